"""Batches to replicas: a task's pipeline for each worker, read as one stream whose position can be saved.

Names that other rooms may use, by file:
    dataset_requests: BadRecords, Reads
    batches: Batches, BatchSizePeriod, Epoch
    block_stream: none
    distribution: distribute, runs_on_host
    host_stream: HostStream
    input_context: InputContext
    iterator_state: none
    order: as_plan, Ids, Locate, mix, OrderKey, Plan, seeds_at
    pipelines: none
    rows: assert_even, check_even, count, map_parts, parts
    saved_position: none
    stream: BatchProperties, Stream
"""

"""Batches to replicas: a task's pipeline for each worker, read as one stream whose position can be saved.

Names that other rooms may use, by file:
    batches: Batches, BatchSizePeriod, Epoch
    block_stream: none
    bottleneck: of
    dataset_requests: BadRecords, Reads
    distribution: distribute, runs_on_host
    host_stream: HostStream
    input_context: InputContext
    iterator_state: none
    order: Ids, Locate, mix, OrderKey, Plan
    pipelines: none
    refused: find
    rows: assert_even, check_even, count, map_parts, parts
    saved_position: none
    stream: BatchProperties, Stream
"""

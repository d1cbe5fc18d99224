"""Batches to replicas: a task's pipeline for each worker, read as one stream whose position can be saved.

Names that other rooms may use, by file:
    batches: Batches, Epoch, Span
    block_stream: none
    distribution: distribute, runs_on_host
    host_stream: HostStream
    input_context: BadRecords, InputContext, Reads
    iterator_state: none
    order: Ids, Locate, OrderKey, Plan, as_plan, mix, seeds_at
    pipelines: none
    shares: Share, counted, current, in_use, of_means, weighed
    stream: Properties, Stream
"""

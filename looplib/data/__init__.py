"""Batches to replicas: a task's pipeline for each worker, read as one stream whose position can be saved.

Names that other rooms may use, by file:
    batches: Batches, Epoch, Span
    block_stream: none
    devices: runs_on_host
    distribution: distribute
    global_batches: none
    host_stream: HostStream
    input_context: BadRecords, InputContext, Reads
    iterator_state: none
    lengths: none
    order: as_plan, Ids, Locate, mix, OrderKey, Plan, seeds_at
    pipelines: none
    remote_stream: Place, RemoteStream
    stream: Stream
"""

"""Batches to replicas: a task's pipeline for each worker, read as one stream whose position can be saved.

Names that other rooms may use, by file:
    arrays: Array, as_arrays, BatchFormat, is_array, is_of, LOOKED_AT, OmittedParts, without_lists
    block_stream: none
    causes: find, of
    context: BadRecords, InputContext, PipelineMemory
    iterator_state: none
    loader: LoaderReader, read
    loader_state: is_position
    open_loader: ByNumber
    order: Batches, BatchSizePeriod, Epoch, Ids, Locate, mix, OrderKey, Plan
    pipelines: Pipelines, runs_on_host
    rows: assert_even, check_even, count, map_parts, of_whole, parts, SPECS
    service: explained, lost, serve
    streams: BatchProperties, HostStream, Stream
"""

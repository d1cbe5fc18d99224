"""Batches to replicas: a task's pipeline for each worker, read as one stream whose position can be saved.

Names that other rooms may use, by file:
    block_stream: none
    distribution: DISTRIBUTES, distribute, local_devices, runs_on_host
    host_stream: HostStream
    iterator_state: none
    pipelines: none
    stream: Properties, Stream
"""

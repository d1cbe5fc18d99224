"""Batches to replicas: a task's pipeline for each worker, read as one stream whose position can be saved.

Names that other rooms may use, by file:
    block_stream: none
    bottleneck: of
    devices: local_devices, runs_on_host
    distribution: distribute
    doubts: none
    global_batches: none
    host_stream: HostStream
    iterator_state: none
    lengths: none
    pipelines: none
    refused: none
    remote_stream: Place, RemoteStream
    stream: Stream
"""

"""Batches to replicas: a task's pipeline for each worker, read as one stream whose position can be saved.

Names that other rooms may use, by file:
    iterator_state: none
    pipelines: distribute
    stream: HostStream, RemoteStream, tables
"""

"""Training with parameter servers: the processes of the cluster, and the coordinator's inner loop.

Names that other rooms may use, by file:
    coordinator: none
    plugin: STRATEGY
    processes: none
    remote_stream: none
    results: none
"""

"""The processes of a run: which of them this one is, what they agree on, and how all end when one of them fails.

Names that other rooms may use, by file:
    collectives: PEER_ERRORS, Workers
    environment: Cluster, EXPECTED, resolve
    peers: current, join, Peers
    remote: check_placement, connect, connected, named, names, plugin_of, RemoteStrategy
    replicas: counted, current, in_micro_batch, in_use, KINDS, micro_batch, over_replicas, Share, times, watching,
        weight_of_part, weighted, weighting_means
    scopes: outside
    updates: apply_gradients, refuse_others, TrainingOptimizers
"""

"""The processes of a run: which of them this one is, what they agree on, and how all end when one of them fails.

Names that other rooms may use, by file:
    collectives: PEER_ERRORS, Workers
    connection: is_lost, start_again
    environment: Cluster, resolve
    environments: none
    peers: current
    remote: check_placement, connected, plugin_of, RemoteStrategy
    rendezvous: none
    replicas: counted, current, in_micro_batch, in_use, KINDS, micro_batch, over_replicas, Share, times, watching,
        weight_of_part, weighted, weighting_means
    runtime: describe, PRECISIONS, setup, STRATEGIES
    scopes: outside
    updates: apply_gradients, refuse_others, TrainingOptimizers
    watched: none
"""

"""The processes of a run: which of them this one is, what they agree on, and how all end when one of them fails.

Names that other rooms may use, by file:
    collectives: outside, PEER_ERRORS, Workers
    environment: Cluster, resolve
    peers: current
    rendezvous: none
    runtime: check_placement, connected, describe, plugin_of, PRECISIONS, RemoteStrategy, setup, STRATEGIES
    tpu: is_lost, start_again
    updates: apply_gradients, counted, current, in_micro_batch, in_use, KINDS, micro_batch, over_replicas,
        refuse_others, Share, sums_itself, times, TrainingOptimizers, watching, weight_of_part, weighted,
        weighting_means
"""

"""The processes of a run: which of them this one is, what they agree on, and how all end when one of them fails.

Names that other rooms may use, by file:
    collectives: PEER_ERRORS, Workers
    environment: resolve
    holders: Holders, joined
    parameter_servers: called, counts
    peers: current
    preemption: debugger_holds_a_thread, innermost_frames, notice, RunningTime
    rendezvous: none
    runtime: check_placement, connected, describe, is_remote, PRECISIONS, setup, STRATEGIES
    tpu: is_lost, start_again
    updates: apply_gradients, counted, current, in_micro_batch, in_use, KINDS, micro_batch, NEEDS_WHOLE, over_replicas,
        refuse_others, Share, sums_itself, times, TrainingOptimizers, update_tables, watching, weight_of_part, weighted,
        weighting_means
"""

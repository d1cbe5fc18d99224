"""The processes of a run: which of them this one is, what they agree on, and how all end when one of them fails.

Names that other rooms may use, by file:
    collectives: OF_OTHERS, Workers
    environment: Cluster, EXPECTED, resolve
    gradient_sum: Gradient, MAKE_DENSE, is_summed, over_replicas, summed_already, times, varies
    peers: Peers, current
    remote: check_placement, RemoteStrategy, connect, connected, named, names, plugin_of
    rendezvous: none
"""

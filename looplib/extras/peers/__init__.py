"""The other workers of a run: they meet at the chief's address, and all end when one of them fails.

Names that other rooms may use, by file:
    rendezvous: none
    watched: WatchedPeers
"""

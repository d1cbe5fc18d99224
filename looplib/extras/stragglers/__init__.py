"""Stragglers: which of several workers that train in step is slower than the others, found by their own times.

Names that other rooms may use, by file:
    comparing: none
    own_times: none
    watching: none
"""

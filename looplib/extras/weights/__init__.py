"""Weights from elsewhere: warm starts, checkpoints of other programs, and partial restores.

Names that other rooms may use, by file:
    loading: warm_start
    matching: none
"""

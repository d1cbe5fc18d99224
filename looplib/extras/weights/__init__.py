"""Weights from elsewhere: warm starts, checkpoints of other programs, and partial restores.

Names that other rooms may use, by file:
    checkpoints: none
    command: add
    hdf5: none
    hdf5_contents: none
    layers: none
    loading: warm_start
    matching: none
    opening: none
    pairing: none
    rules: WarmStart, WeightRule
    safetensors: none
    shards: none
    sources: none
    suggestions: none
    taking: none
    targets: none
    values: none
    writing: none
    zipped: none
"""

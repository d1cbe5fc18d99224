"""Weights from elsewhere, found and taken by name: files, formats, rules.

Names that other rooms may use, by file:
    checkpoints: none
    hdf5: none
    hdf5_contents: none
    layers: none
    loading: none
    matching: none
    names: none
    opening: none
    pairing: none
    restoring: none
    rules: none
    safetensors: none
    sources: none
    suggestions: none
    taking: none
    targets: none
    values: none
    writing: none
    zipped: none
"""

"""Weights from elsewhere, found and taken by name: files, formats, rules.

Names that other rooms may use, by file:
    checkpoints: CheckpointWeights
    hdf5: none
    hdf5_contents: none
    layers: ComputedValue, LayerWalk
    loading: continue_from, located, take_all, take_what_fits, warm_start
    names: LiveVariables, SavedVariables, stable_names
    opening: open_weights, SafetensorsFile
    pairing: none
    restoring: contents_of, objects_of, peek, read_position, restore
    rules: apply, given, RuledName, WarmStart, WeightRule
    sources: StoredTensor
    tables: join_listed
    taking: named_weights, unique_names, write_safetensors
"""

"""A run directory's checkpoints: when to save, what to keep, what proves them, and how a run starts from one.

Names that other rooms may use, by file:
    checkpointer: Checkpointer
    directory: resolve, RunDirectory
    perturbation: none
    recorded: RecordedParts
    saving: none
"""

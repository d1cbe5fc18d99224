"""Warnings of trainings that run without an error and lose their meaning, with the evidence.

These are predictions that do not depend on the input, weights that no longer change, norms that explode, and an
evaluation of examples that the training has too.

Names that other rooms may use, by file:
    budget: none
    finding: none
    flag: LearningWarningsFlag
    learning_warnings: LearningWarnings
    metric_norms: none
    outputs: none
    overlap: none
    record_overlap: none
    samples: none
    trained: none
    weights: none
"""

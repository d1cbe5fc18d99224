"""Warnings of trainings that run without an error and lose their meaning, with the evidence.

These are predictions that do not depend on the input, weights that no longer change, and norms that explode.

Names that other rooms may use, by file:
    budget: none
    finding: none
    flag: LearningWarningsFlag
    learning_warnings: LearningWarnings
    metric_norms: none
    outputs: none
    samples: none
    trained: none
    weights: none
"""

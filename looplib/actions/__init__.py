"""What watches a training at its reports, or adds to its steps.

Names that other rooms may use, by file:
    additions: none
    agreement: none
    budget: none
    checksums: none
    compared: none
    comparing: none
    comparison: none
    finding: none
    learning_warnings: none
    listener: none
    metadata: none
    metric_norms: none
    op_times: none
    outputs: none
    own_times: none
    plateau: none
    profiling: none
    samples: none
    sources: none
    timed_saves: none
    trained: none
    watching: none
    weights: none
"""

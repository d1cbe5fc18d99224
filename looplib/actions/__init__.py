"""What watches a training at its reports, or adds to its steps.

Names that other rooms may use, by file:
    agreement: DEFAULT_EVERY, ReplicaAgreement
    budget: none
    checksums: none
    compared: none
    comparing: none
    comparison: none
    finding: none
    learning_warnings: LearningWarnings
    listener: NoticeListener, SOURCES
    metadata: none
    metric_norms: none
    op_times: none
    outputs: none
    own_times: none
    plateau: EarlyStopping, ExportBest, ReduceOnPlateau
    profiling: Profile
    samples: none
    sources: none
    timed_saves: Timed, TimedSaves
    trained: none
    watching: Stragglers
    weights: none
"""

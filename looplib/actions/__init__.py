"""Actions, which watch a training at its reports, or add to its steps.

Names that other rooms may use, by file:
    checksums: none
    export_every: ExportEvery, ExportGate
    finding: none
    learning_warnings: LearningWarnings
    notices: NoticeListener, SOURCES
    output_checks: none
    plateau: EarlyStopping, ExportBest, ReduceOnPlateau
    prequential: Prequential
    profile: Profile
    replica_agreement: DEFAULT_EVERY, ReplicaAgreement
    stragglers: Stragglers
    timed_saves: Timed, TimedSaves
    weight_checks: none
"""

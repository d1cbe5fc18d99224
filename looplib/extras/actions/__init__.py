"""Actions that a program or a flag asks for: early stopping, exports of the best, lower rates, profiles.

Names that other rooms may use, by file:
    op_times: none
    plateau: EarlyStopping, ExportBest, ReduceOnPlateau
    profile_flag: ProfileFlag
    profiling: Profile
    timed_saves: TimedSaves
    timed_saves_flags: TimedSavesFlags
"""

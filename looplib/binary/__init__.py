"""A binary: its flags and their groups, trials before a training, and how it ends.

Names that other rooms may use, by file:
    alert_flag: AlertFlags
    audit_flag: AuditFlag
    batch_report: BatchReport
    command_line: all_flags, check, FETCHED, flag_plugins, FlagPlugin, parse, PATHS, policy, PRINT_FLAG, SETUP_FLAGS,
        start, TRAINING_MODES
    config: none
    dry_run: none
    export_flags: ExportFlags
    forecast: none
    integrity_flags: IntegrityFlags
    learning_warnings_flag: LearningWarningsFlag
    measuring: none
    metrics_port: MetricsPortFlag
    notices_flag: NoticesFlag
    outcome: failed, Session
    profile_flag: ProfileFlag
    saves: none
    timed_saves_flags: TimedSavesFlags
    trackers_flag: TrackersFlag
    trial: trial_flags, TRIALS
"""

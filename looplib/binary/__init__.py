"""A binary: its flags and their groups, trials before a training, and how it ends.

Names that other rooms may use, by file:
    alert_flag: none
    audit_flag: none
    batch_report: none
    command_line: all_flags, check, FETCHED, flag_plugins, FlagPlugin, parse, PATHS, policy, PRINT_FLAG, SETUP_FLAGS,
        start, TRAINING_MODES
    config: __name__
    dry_run: none
    export_flags: none
    flag_groups: none
    forecast: none
    integrity_flags: none
    learning_warnings_flag: none
    measuring: none
    metrics_port: none
    notices_flag: none
    outcome: failed, Session
    profile_flag: none
    saves: none
    timed_saves_flags: none
    trackers_flag: none
    trial: TRIALS
"""

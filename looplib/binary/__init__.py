"""A binary: its flags and their groups, trials before a training, and how it ends.

Names that other rooms may use, by file:
    alert_flag: none
    audit_flag: none
    batch_report: none
    command_line: none
    config: none
    dry_run: none
    export_flags: none
    forecast: none
    integrity_flags: none
    learning_warnings_flag: none
    measuring: none
    metrics_port: none
    notices_flag: none
    outcome: none
    profile_flag: none
    saves: none
    timed_saves_flags: none
    trackers_flag: none
    trial: none
"""

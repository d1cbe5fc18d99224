"""A binary: its flags and their groups, trials before a training, and how it ends.

Names that other rooms may use, by file:
    alert_flag: none
    command_line: all_flags, check, FETCHED, flag_plugins, FlagPlugin, parse, PATHS, policy, PRINT_FLAG, SETUP_FLAGS,
        start, TRAINING_MODES
    config: __name__
    estimate: none
    flag_groups: none
    ordered: none
    outcome: failed, Session
    trial: TRIALS
"""

"""Trials of a program in place of its job, in a temporary run directory: `--dry_run` and `--estimate`.

Names that other rooms may use, by file:
    dry_run: none
    forecast: none
    measuring: none
    saves: none
    trial: TRIALS, trial_flags
"""

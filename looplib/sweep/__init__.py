"""Trials of a sweep, chosen by Optuna and run as processes.

Names that other rooms may use, by file:
    command: add
    jobs: none
    space: none
    study: none
    sweep: none
"""

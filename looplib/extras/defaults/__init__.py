"""Defaults: what looplib itself adds to each training; it knows of several rooms, and none of them knows of it.

Names that other rooms may use, by file:
    additions: run_actions, step_additions
"""

"""The commands of `python -m looplib`, one file each, and what several of them share.

Names that other rooms may use, by file:
    again: none
    audit: none
    audit_command: none
    average: none
    board: none
    check: none
    commands: none
    compare: none
    comparing: none
    diff: none
    export: none
    inspect: none
    intervals: none
    journal: none
    kind: none
    new: none
    options: none
    project: none
    ray: none
    recorded_run: none
    replay: none
    report: none
    rerun: none
    runs: none
    status: none
    watch: none
    watching: none
    weights: none
"""

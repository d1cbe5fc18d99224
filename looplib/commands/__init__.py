"""The commands of `python -m looplib`, one file each, and what several of them share.

Names that other rooms may use, by file:
    again: none
    audit: none
    audit_command: add
    average: none
    board: add
    check: none
    commands: average, check, diff, export, inspect, launch, replay, rerun, status
    compare: none
    comparing: none
    diff: none
    export: none
    inspect: none
    intervals: none
    journal: none
    kind: none
    new: add
    options: place
    project: none
    ray: add
    recorded_run: none
    replay: none
    report: add
    rerun: none
    runs: last_lines, saved_step, say
    status: none
    watch: add, URLS
    watching: none
    weights: add
"""

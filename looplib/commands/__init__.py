"""The commands of `python -m looplib`, one file each, and what several of them share.

Names that other rooms may use, by file:
    average: none
    board: add
    check: saved_step, say
    commands: average, check, data_worker, diff, export, inspect, launch, publish, ray, replay, rerun, status
    compare: none
    diff: none
    export: none
    inspect: none
    intervals: none
    new: add
    options: place
    project: none
    replay: none
    report: add
    rerun: none
    status: none
    weights: add
"""

"""The commands of `python -m looplib`, and what they are made of.

Names that other rooms may use, by file:
    average: average
    check: fits, replicas, resume
    children: ended_by_signals
    compare: none
    dry_run: keep_inside, redirect, try_out
    diff: diff
    export: export
    inspect: inspect
    local_launch: launch
    player: none
    preflight: answer, requested, settings
    pure_function: none
    replay: replay
    replayer: answer, requested
    recorded_run: Recorded, check_replay, report_of
    rerun: rerun
    runs: none
    status: status
    step_view: none
    variable_ops: none
    xla: none
"""

"""The commands of `python -m looplib`, and what they are made of.

Names that other rooms may use, by file:
    average: average
    check: fits, replicas, resume
    children: none
    compare: none
    dry_run: redirect, try_out
    export: export
    inspect: inspect
    local_launch: launch
    preflight: answer, requested, settings
    pure_function: none
    rerun: rerun
    runs: none
    status: status
    variable_ops: none
    xla: none
"""

"""The commands of `python -m looplib`, and what they are made of.

Names that other rooms may use, by file:
    average: none
    batch_report: BatchReport
    check: none
    children: ended_by_signals
    code_version: this_program
    commands: average, check, diff, export, inspect, launch, replay, rerun, status
    compare: none
    diff: none
    example_checksum: none
    fitting: fitting
    export: none
    inspect: none
    launch_folder: none
    local_launch: none
    normalization: none
    options: none
    perturbation: nudge
    player: none
    preflight: none
    recorded_run: none
    rematerialization: rematerialize
    replay: none
    replayer: none
    rerun: none
    runs: none
    status: none
    step_view: none
    tasks: none
    worker_numbers: none
    worker_processes: none
    xla: none
"""

"""The run directory: its lock, its commits, run.json, metrics.jsonl, its status; all of it without TensorFlow.

Names that other rooms may use, by file:
    choice: none
    code_version: none
    commits: none
    goodput: none
    lock: none
    machine: none
    metric_names: none
    mirror: none
    newest: none
    notice: none
    phases: none
    policy: none
    program: none
    records: none
    run_json: none
    run_status: none
    slow_workers: none
    standing: none
    values: none
"""

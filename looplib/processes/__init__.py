"""Processes on this machine and on others: started, watched, signalled, restarted, ended.

Names that other rooms may use, by file:
    actor: none
    children: dying_with_parent, ended_by_signals, poll, Signals, start, temporary_folder
    launch_folder: none
    launching: run, WorkerPlace
    local_launch: launch
    order: requested, VARIABLE
    tasks: none
    worker_numbers: BATCH_FILE, REPORTED
    worker_processes: none
"""

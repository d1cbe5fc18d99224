"""Processes on this machine and on others: started, watched, signalled, restarted, ended.

Names that other rooms may use, by file:
    actor: none
    children: none
    launch_folder: none
    launching: none
    local_launch: none
    order: none
    tasks: none
    worker_numbers: none
    worker_processes: none
"""

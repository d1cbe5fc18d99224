"""Processes on this machine and on others: started, watched, signalled, restarted, ended.

Names that other rooms may use, by file:
    child: Child, CommandLine, ended_by_signals, last_lines, news_of, output_of, Signals, TemporaryFolder, without
    group: none
    local_workers: launch
    ray: run, WorkerPlace
    restarts: none
"""

"""Alerts: a process beside the runs looks at their directories, and tells what has happened to them.

Names that other rooms may use, by file:
    alert: none
    command: add
    flag: AlertFlags
    observer: none
    sending: none
    watching: none
"""

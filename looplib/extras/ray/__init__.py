"""Workers of a run on a Ray cluster: actors start the command of each worker, and restart all after a failure.

Names that other rooms may use, by file:
    actor: none
    command: add
    launching: none
"""

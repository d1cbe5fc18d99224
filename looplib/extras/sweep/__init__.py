"""`python -m looplib sweep`: one command with many settings, searched by Optuna.

Names that other rooms may use, by file:
    command: add
    database: none
    jobs: none
    leases: none
    place: none
    results: none
    shared: none
    space: none
    stored: none
    study: none
    sweep: none
"""

"""`python -m looplib sweep`: one command with many settings, searched by Optuna.

Names that other rooms may use, by file:
    command: add
    jobs: none
    results: none
    space: none
    storage: none
    study: none
    sweep: none
"""

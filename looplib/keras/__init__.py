"""Compiled Keras models, trained as `fit` trains them.

Names that other rooms may use, by file:
    building: none
    callback_state: none
    callbacks: none
    data: none
    losses: none
    means: none
    new_rows: none
    python_data: python_batches
    results: none
    rows: none
    step_trial: none
    trainer: KerasTrainer
"""

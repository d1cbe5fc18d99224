"""Compiled Keras models, trained as `fit` trains them.

Names that other rooms may use, by file:
    batch_format: none
    batch_logs: none
    best_weights: none
    building: none
    callback_kinds: none
    callback_memory: none
    callbacks: none
    data: none
    losses: none
    means: none
    metric_parts: none
    origins: none
    python_data: python_batches
    results: none
    rows: none
    step_trial: none
    trainer: KerasTrainer
"""

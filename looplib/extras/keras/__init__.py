"""Compiled Keras models, of either family, trained as `fit` trains them.

Names that other rooms may use, by file:
    building: none
    callback_memory: none
    callbacks: none
    data: none
    trainer: KerasTrainer
"""

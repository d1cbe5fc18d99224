"""Guesses at causes, for people: the line, the record or the stage of a pipeline to look at, and the speed of a step.

Names that other rooms may use, by file:
    bottleneck: none
    causes: Causes
    model_table: none
    places: none
    refused: none
    speed: none
    traced_ops: none
"""

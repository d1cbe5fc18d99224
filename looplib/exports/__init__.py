"""What leaves a run: exported models, predictions.

Names that other rooms may use, by file:
    card: none
    exports: none
    facts: none
    folder: none
    int8: none
    new_folder: none
    parts: none
    pieces: none
    prediction: none
    predictions: none
    samples: none
"""

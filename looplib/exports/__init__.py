"""Results that leave a run: exported models, predictions.

Names that other rooms may use, by file:
    card: none
    exports: export
    folder: none
    int8: none
    new_folder: new_folder
    parts: none
    predictions: predict
    samples: none
"""

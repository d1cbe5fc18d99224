"""What a run makes for other programs: exports of its model, and predictions for data.

Names that other rooms may use, by file:
    exports: export
    folder: none
    new_folder: none
    pieces: none
    prediction: none
    predictions: predict
"""

"""What a run makes for other programs: exports of its model, and predictions for data.

Names that other rooms may use, by file:
    card: none
    exports: export
    facts: none
    flags: ExportFlags
    folder: none
    formats: check_export
    int8: none
    new_folder: none
    parts: none
    pieces: none
    prediction: none
    predictions: predict
    samples: none
"""

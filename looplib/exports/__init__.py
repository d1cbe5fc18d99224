"""Results that leave a run: exported models, predictions.

Names that other rooms may use, by file:
    card: none
    exports: check_exportable, export, is_own, sample, to_export
    folder: none
    int8: none
    new_folder: check_free, new_folder
    parts: Parts, SIGNATURE
    predictions: predict
    samples: ModelInputs
    versions: REJECTED_FOLDER, VERSION, VersionRecord, Versions, versions_in
    warm_up: MOST_EXAMPLES, write_requests
"""

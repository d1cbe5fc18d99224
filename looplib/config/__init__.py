"""Settings of a run, which a user sets, and the types of their fields.

Names that other rooms may use, by file:
    field_types: At, check, dump, fields, hints, is_config_dict, is_listing, load, members, name_of, plain,
        refuse_name, typed, update
    formats: CARD, check_export, ExportFormat, FORMATS, KERAS, PredictionFormat, PREDICTIONS, SAVED_MODEL
    run_config: RunConfig
    settings: as_flags, check, Flag, flags_of, from_flags, setting
"""

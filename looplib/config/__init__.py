"""What a user sets: the settings of a run, and the types of their fields.

Names that other rooms may use, by file:
    field_types: none
    formats: none
    run_config: none
    settings: none
"""

"""The typed configuration of a binary: a dataclass, from code, YAML files and flags.

Names that other rooms may use, by file:
    config: none
    field_types: none
"""

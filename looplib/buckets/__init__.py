"""A run that is in an object store: its lease, what is copied there and fetched from there.

Names that other rooms may use, by file:
    copies: fetched
    copying: none
    fetching: none
    held: none
    lease: none
    local: list_checkpoints, local_path
    mirror: open_mirror
    note: none
    outputs: none
"""

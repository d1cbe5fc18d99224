"""A run that is in an object store: its lease, what is copied there and fetched from there.

Names that other rooms may use, by file:
    download: none
    lease: none
    local: list_checkpoints, local_path
    mirror: fetched, open_mirror
    note: none
    upload: none
"""

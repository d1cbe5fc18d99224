"""A run that is in an object store: its lease, what is copied there and fetched from there.

Names that other rooms may use, by file:
    download: list_checkpoints, local_path
    lease: none
    mirror: fetched, open_mirror
    note: none
    upload: none
"""

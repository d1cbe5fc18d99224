"""Runs that live in an object store: a local directory that is copied there in the background, and read from there.

`stores` asks a store through fsspec, and `lease` keeps a second writer away. `mirror` is the copy of a run directory:
`note` knows what the store has of it, `copying` copies into the store, `fetching` out of it; `copies` are for tools.
The core sees the local directory alone.

Names that other rooms use:
    copies: fetched
    copying: none
    fetching: none
    lease: none
    mirror: open_mirror
    note: none
    stores: none
"""

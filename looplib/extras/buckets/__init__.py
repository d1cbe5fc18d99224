"""Runs that live in an object store: a local directory that is copied there in the background, and read from there.

`stores` asks a store through fsspec, `lease` keeps a second writer away, and `mirror` is the copy of a run directory.
`ranges` reads objects in pieces, for records. The core sees the local directory alone.

Names that other rooms use:
    lease: none
    mirror: local_directory
    ranges: none
    stores: none
"""

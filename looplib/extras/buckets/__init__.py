"""Runs that live in an object store: a local directory that is copied there in the background, and read from there.

`stores` asks a store through fsspec's `drivers`, `lease` keeps a second writer away, and `mirror` is the copy of a run
directory, which `copying` and `fetching` keep equal, `note` remembers and `standing` describes. `copies` fetches what
tools read, `outputs` copies what evaluation jobs write, `held` keeps two jobs from one folder of outputs, and `ranges`
reads pieces of objects, for records. The core sees the local directory alone.

Names that other rooms use:
    copies: fetched
    copying: none
    drivers: none
    fetching: none
    held: none
    lease: none
    mirror: open_mirror
    note: none
    outputs: none
    ranges: none
    standing: none
    stores: none
"""

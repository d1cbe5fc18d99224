"""Bytes at a URL: drivers of object stores, ranges of objects with a cache, files that an index names.

Names that other rooms may use, by file:
    drivers: none
    ranges: none
    shards: none
    stores: none
"""

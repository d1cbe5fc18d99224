"""Bytes at a URL: drivers of object stores, ranges of objects with a cache, files that an index names.

Names that other rooms may use, by file:
    ranges: matching, Ranges, ReplacedError
    shards: files_of, INDEXES, KERAS, kind_of, MOST_TENSORS, places_in, refusal, SAFETENSORS
    stores: ADVICE, cache, cache_directory, PATIENCE, Store, StoredFile
"""

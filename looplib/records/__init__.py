"""Records in files by number: sources, the index of their offsets, keyed orders, reading ahead.

Names that other rooms may use, by file:
    files: none
    index: none
    order: BlockOrder, RecordOrder, seeds_at
    reading: read
    sources: mean_bytes, open_records, opened
    tfrecord: none
"""

"""Records in files by number: sources, the index of their offsets, keyed orders, reading ahead.

Names that other rooms may use, by file:
    damage: Tolerant
    files: none
    formats: none
    index: none
    indexed: none
    order: BlockOrder, Order, Picks, RecordOrder, seeds_at
    reading: read
    sources: Blocked, Source, mean_bytes, open_records, opened
    tfrecord: none
"""

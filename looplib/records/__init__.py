"""Records in files by number: sources, the index of their offsets, keyed orders, reading ahead.

Names that other rooms may use, by file:
    damage: LeftOut, given, tolerant
    files: none
    fingerprint: changes, fingerprint
    formats: none
    index: none
    index_shuffle: none
    indexed: none
    measured: measure
    order: BlockOrder, Order, Picks, RecordOrder, key_of, mix, seeds_at, shuffled
    reading: Reads, read
    sources: Blocked, Chain, Source, Subset, mean_bytes, named, open_records, opened
    tfrecord: none
"""

"""Records in files by number, and plans of which come in which order: filters, mixtures, packing, buckets.

Names that other rooms may use, by file:
    damage: none
    files: none
    fingerprint: changes
    formats: none
    index: none
    indexed: none
    lengths: Buckets, Packed, PackedRows
    mixture: Mixture
    order: none
    plans: Kept
    reader: RecordReader
    reading: measure
    sources: open_records
"""

"""Files of records and mixtures of them: read ahead, measured, in a given order.

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
    reader: none
    reading: measure, structure_of, tuple_like, without_lists
    sources: items, open_records
"""

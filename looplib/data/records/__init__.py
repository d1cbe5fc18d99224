"""Files of records and mixtures of them: read ahead, measured, in a given order.

Names that other rooms may use, by file:
    blocks: none
    files: none
    follow: Follow
    formats: none
    index: none
    mixture: Mixture
    on_workers: none
    plans: Buckets, Kept, Packed, PackedRows
    reader: changes
    reading: measure, structure_of
    sources: items, open_records
"""

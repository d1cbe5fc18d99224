"""Files of records and mixtures of them: read ahead, measured, in a given order.

Names that other rooms may use, by file:
    damage: none
    files: none
    fingerprint: none
    formats: none
    index: none
    indexed: none
    lengths: none
    mixture: none
    order: none
    plans: none
    reader: none
    reading: none
    sources: none
"""

"""What the hardware did to the numbers: replicas that came to differ, copies of batches that arrived wrongly.

Names that other rooms may use, by file:
    agreement: ReplicaAgreement
    batch_sizes: none
    checksums: none
    compared: none
    comparison: none
    copies: CopyCheck
    corrupted: none
    flags: IntegrityFlags
"""

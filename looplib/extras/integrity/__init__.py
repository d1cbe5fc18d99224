"""What the hardware did to the numbers: replicas that came to differ.

Names that other rooms may use, by file:
    agreement: ReplicaAgreement
    batch_sizes: none
    checksums: none
    compared: none
    comparison: none
    flags: IntegrityFlags
"""

"""What the hardware did to the numbers: replicas that came to differ, copies of batches that arrived wrongly.

Names that other rooms may use, by file:
    additions: run_actions, step_additions
    agreement: ReplicaAgreement
    batch_sizes: none
    checksums: none
    compared: none
    comparison: none
    copies: CopyCheck
    corrupted: none
    flags: IntegrityFlags
"""

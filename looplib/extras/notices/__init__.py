"""Notices that the machine or the job goes soon, of GCP, AWS and Slurm: they end a training, saved.

Names that other rooms may use, by file:
    flag: NoticesFlag
    listener: none
    metadata: none
    sources: none
"""

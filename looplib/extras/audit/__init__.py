"""Audits of a run: intervals between its checkpoints, trained again from the first of them, and compared with the last.

Names that other rooms may use, by file:
    again: none
    audit: none
    command: add
    comparing: none
    flag: AuditFlag
    intervals: none
    journal: none
    kind: none
    machine: none
    order: none
"""

"""Guards against values that are not finite, losses that diverge, and steps that make no progress.

Names that other rooms may use, by file:
    guards: none
    non_finite: none
    preemption: none
    watchdog: none
"""

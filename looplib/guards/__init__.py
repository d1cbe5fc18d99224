"""Guards against values that are not finite, losses that diverge, and steps that make no progress.

Names that other rooms may use, by file:
    guards: check_loss, check_skipped, Diverged, Guards
    non_finite: GRADIENT_OF, measure_gradients, StateCheck
    watchdog: Watchdog
"""

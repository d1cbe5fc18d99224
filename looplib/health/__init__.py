"""What can go wrong while a run trains: values that are not finite, jumps of the loss, signals, and stalls.

Names that other rooms may use, by file:
    guards: check_loss, check_skipped, Diverged, Guards
    non_finite: GRADIENT_OF, measure_gradients, StateCheck
    preemption: notice
    watchdog: Watchdog
"""

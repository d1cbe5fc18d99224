"""What can go wrong while a run trains: values that are not finite, jumps of the loss, signals, and stalls.

Names that other rooms may use, by file:
    guards: Diverged, Guards, check_loss, check_skipped
    non_finite: GRADIENT_OF, StateCheck, note_gradients, run_watched
    preemption: notice
    watchdog: Watchdog
"""

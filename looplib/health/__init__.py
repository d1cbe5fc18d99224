"""What can go wrong while a run trains: values that are not finite, jumps of the loss, signals, and stalls.

Names that other rooms may use, by file:
    debuggers: none
    guards: Guards, Trouble
    non_finite: GRADIENT_OF, StateCheck, check_skipped, note_gradients, run_watched
    preemption: notice
    running_time: none
    spikes: check_loss
    watchdog: Watchdog
"""

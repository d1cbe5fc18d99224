"""What can go wrong while a run trains: values that are not finite, jumps of the loss, signals, and stalls.

Names that other rooms may use, by file:
    debuggers: none
    guards: Guards, Trouble
    non_finite: check_skipped, GRADIENT_OF, run_watched, StateCheck
    preemption: notice
    running_time: none
    spikes: check_loss
    watchdog: Watchdog
"""

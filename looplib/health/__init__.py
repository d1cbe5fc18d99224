"""What can go wrong while a run trains: values that are not finite, jumps of the loss, signals, and stalls.

Names that other rooms may use, by file:
    debuggers: none
    guards: Guards, POLICIES, StateCheck, Trouble, listing, look_for_a_jump, look_for_nothing_but_skips, note, watched
    preemption: SIGNALS, notice
    running_time: none
    watchdog: Watchdog
"""

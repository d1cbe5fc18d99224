"""What a tool orders of the own program of a run: steps once more, a close look at one, statistics.

Names that other rooms may use, by file:
    normalization: none
    player: Answer, CHECKSUM, Order, Trace
    preflight: answer, requested, settings, VARIABLE
    replayer: answer, requested
    step_view: none
    xla: none
"""

"""What a tool orders of the own program of a run: steps once more, a close look at one, statistics.

Names that other rooms may use, by file:
    normalization: none
    player: Answer, answer, CHECKSUM, Trace
    preflight: answer, Finding, Found, FoundStep, settings
    step_view: none
"""

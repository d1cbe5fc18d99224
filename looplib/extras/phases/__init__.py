"""Phases of a training: parts of one run that train other variables, or at another learning rate.

Names that other rooms may use, by file:
    phase: Phase
    phased_loop: PhasedLoop
    phases: PhasedTraining
"""

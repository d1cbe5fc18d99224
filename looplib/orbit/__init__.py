"""Trainers and evaluators of Orbit, with loops of their own.

Names that other rooms may use, by file:
    adapters: OrbitEvaluator, OrbitTrainer
    data: none
"""

"""Trainers and evaluators with loops of their own, Orbit's and Model Garden's, under looplib's outer loop.

Names that other rooms may use, by file:
    adapters: OrbitEvaluator, OrbitTrainer
    data: none
    results: none
"""

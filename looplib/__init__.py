"""looplib: custom training loops for TensorFlow.

Subclass `Trainer` (and `Evaluator`), write one `step_fn` for one replica, and a `Controller` does the rest.

A name is loaded when it is first used, and TensorFlow with the first one, so that a program pays only for the parts
that it uses.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Action": "task.actions",
    "Adapter": "task.adapter",
    "CheckpointPolicy": "run.policy",
    "Commit": "run.commits",
    "Controller": "controller",
    "DEFAULT_WRITERS": "report.writers.contract",
    "DivergenceError": "errors",
    "Evaluator": "task.evaluator",
    "Event": "task.actions",
    "Exported": "task.exported",
    "GradientTrainer": "task.gradient_trainer",
    "Guards": "guards.guards",
    "InputContext": "data.input_context",
    "JsonlWriter": "report.writers.jsonl_writer",
    "KeepBest": "run.policy",
    "KeepEvery": "run.policy",
    "KeepLast": "run.policy",
    "Preempted": "errors",
    "RunConfig": "config.run_config",
    "Start": "run.policy",
    "Trainer": "task.trainer",
    "UsageError": "errors",
    "WeightAverages": "task.averages",
    "Writer": "report.writers.contract",
    "all_gather": "task.reductions",
    "each": "task.reductions",
    "global_positions": "task.reductions",
    "last": "task.reductions",
    "learning_rate": "task.learning_rates",
    "list_checkpoints": "run.commits",
    "mean": "task.reductions",
    "total": "task.reductions",
}
_MODULES, _PART_MODULES = {"launch": "launch", "runtime": "cluster.runtime"}, ("preflight", "tpu")
_PARTS = (  # of plug-ins
    "BackgroundWriter",
    "Buckets",
    "ConsoleWriter",
    "CsvWriter",
    "EarlyStopping",
    "ExportBest",
    "Kept",
    "KerasTrainer",
    "LearningWarnings",
    "Mixture",
    "MlflowWriter",
    "OrbitEvaluator",
    "OrbitTrainer",
    "Packed",
    "PackedRows",
    "Phase",
    "Profile",
    "ReduceOnPlateau",
    "ReplicaAgreement",
    "TensorBoardWriter",
    "TimedSaves",
    "WandbWriter",
    "WarmStart",
    "WeightRule",
    "histogram",
    "image",
    "measure",
    "open_records",
    "python_batches",
    "text",
    "warm_start",
)

__all__ = sorted([*_HOMES, *_PARTS])  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name in _HOMES or name in _MODULES or name in (*_PARTS, *_PART_MODULES):
        from looplib.compat import tensorflow as _tf  # noqa: F401  (imports TensorFlow, before any other file does)
    if name in _HOMES:
        value = getattr(importlib.import_module(f"looplib.{_HOMES[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"looplib.{_MODULES[name]}")
    elif name in (*_PARTS, *_PART_MODULES):
        value = importlib.import_module("looplib.base.plugins").load("looplib.parts", name)
    else:
        raise AttributeError(f"module 'looplib' has no attribute {name!r}")
    return globals().setdefault(name, value)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES, *_PARTS, *_PART_MODULES})

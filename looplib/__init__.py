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
    "BackgroundWriter": "extras.trackers.background",
    "Buckets": "task.buckets",
    "CheckpointPolicy": "checkpoint.policy",
    "Commit": "checkpoint.commits",
    "ConsoleWriter": "report.console_writer",
    "Controller": "controller",
    "CsvWriter": "extras.trackers.csv_writer",
    "DivergenceError": "errors",
    "EarlyStopping": "extras.actions.plateau",
    "Evaluator": "task.evaluator",
    "Event": "task.actions",
    "ExportBest": "extras.actions.plateau",
    "Exported": "task.exported",
    "GradientTrainer": "task.gradient_trainer",
    "Guards": "health.guards",
    "InputContext": "task.input_context",
    "JsonlWriter": "report.jsonl_writer",
    "Kept": "task.plans",
    "KeepBest": "checkpoint.policy",
    "KeepEvery": "checkpoint.policy",
    "KeepLast": "checkpoint.policy",
    "KerasTrainer": "extras.keras.trainer",
    "Mixture": "task.mixture",
    "MlflowWriter": "extras.trackers.mlflow_writer",
    "OrbitEvaluator": "extras.orbit.adapters",
    "OrbitTrainer": "extras.orbit.adapters",
    "Packed": "task.packed",
    "PackedRows": "task.packed",
    "Preempted": "errors",
    "Profile": "extras.actions.profiling",
    "ReduceOnPlateau": "extras.actions.plateau",
    "TensorBoardWriter": "report.tensorboard_writer",
    "Start": "checkpoint.policy",
    "Trainer": "task.trainer",
    "UsageError": "errors",
    "WeightAverages": "task.averages",
    "WandbWriter": "extras.trackers.wandb_writer",
    "Writer": "report.writer",
    "all_gather": "task.reductions",
    "checkpoints": "checkpoint.commits",
    "each": "task.reductions",
    "global_positions": "task.reductions",
    "histogram": "task.media",
    "image": "task.media",
    "last": "task.reductions",
    "learning_rate": "task.learning_rates",
    "measure": "records.measured",
    "mean": "task.reductions",
    "open_records": "records.sources",
    "text": "task.media",
    "total": "task.reductions",
    "warm_start": "extras.weights.loading",
}
_MODULES = {"launch": "launch", "preflight": "extras.tools.preflight", "runtime": "runtime", "tpu": "cluster.tpu"}

__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name in _HOMES or name in _MODULES:
        from looplib.compat import tensorflow as _tf  # noqa: F401  (imports TensorFlow, before any other file does)
    if name in _HOMES:
        value = getattr(importlib.import_module(f"looplib.{_HOMES[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"looplib.{_MODULES[name]}")
    else:
        raise AttributeError(f"module 'looplib' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})

"""looplib: custom training loops for TensorFlow.

Subclass `Trainer` (and `Evaluator`), write one `step_fn` for one replica, and a `Controller` does the rest.

A name is loaded when it is first used, and TensorFlow with the first one, so that a program pays only for the parts
that it uses.
"""

import importlib
import sys
from typing import Any

if sys.platform == "win32":
    raise ImportError(
        "looplib is for Linux, macOS and WSL, not for Windows itself; install WSL 2, and run Python in it"
    )

__version__ = "0.1.0"

_HOMES = {
    "Action": "task.actions",
    "Adapter": "task.trainer",
    "BackgroundWriter": "report.reporter",
    "Buckets": "data.records.plans",
    "CheckpointPolicy": "run.policy",
    "Commit": "run.commits",
    "ConsoleWriter": "report.writers.console_writer",
    "Controller": "controller",
    "CsvWriter": "report.writers.files",
    "DEFAULT_WRITERS": "report.writers.contract",
    "DivergenceError": "errors",
    "DynamicEmbedding": "task.dynamic_embedding",
    "EarlyStopping": "actions.plateau",
    "Evaluator": "task.trainer",
    "Event": "task.actions",
    "ExportBest": "actions.plateau",
    "ExportEvery": "actions.export_every",
    "ExportGate": "actions.export_every",
    "Exported": "task.trainer",
    "Follow": "data.records.follow",
    "GradientTrainer": "task.gradient_trainer",
    "Guards": "guards.guards",
    "InputContext": "data.context",
    "JsonlWriter": "report.writers.files",
    "KeepBest": "run.policy",
    "KeepEvery": "run.policy",
    "KeepLast": "run.policy",
    "Kept": "data.records.plans",
    "KerasTrainer": "keras.trainer",
    "LearningWarnings": "actions.learning_warnings",
    "Mixture": "data.records.mixture",
    "MlflowWriter": "report.writers.trackers",
    "OrbitEvaluator": "orbit.adapters",
    "OrbitTrainer": "orbit.adapters",
    "Packed": "data.records.plans",
    "PackedRows": "data.records.plans",
    "Phase": "task.phases",
    "Preempted": "errors",
    "Prequential": "actions.prequential",
    "Profile": "actions.profile",
    "ReduceOnPlateau": "actions.plateau",
    "ReplicaAgreement": "actions.replica_agreement",
    "RunConfig": "config.run_config",
    "ShardedEmbedding": "task.sharded_embedding",
    "Start": "run.policy",
    "TensorBoardWriter": "report.writers.tensorboard_writer",
    "TimedSaves": "actions.timed_saves",
    "Trainer": "task.trainer",
    "UsageError": "errors",
    "WandbWriter": "report.writers.trackers",
    "WarmStart": "weights.rules",
    "WeightAverages": "task.averages",
    "WeightRule": "weights.rules",
    "Writer": "report.writers.contract",
    "all_gather": "task.reductions",
    "each": "task.reductions",
    "global_positions": "task.reductions",
    "histogram": "task.reductions",
    "image": "task.reductions",
    "input_means": "task.reductions",
    "last": "task.reductions",
    "learning_rate": "task.learning_rates",
    "list_checkpoints": "buckets.local",
    "mean": "task.reductions",
    "measure": "data.records.reading",
    "open_records": "data.records.sources",
    "python_batches": "keras.python_data",
    "text": "task.reductions",
    "total": "task.reductions",
    "warm_start": "weights.loading",
}
_MODULES = {
    "errors": "errors",
    "launch": "launch",
    "preflight": "replay.preflight",
    "runtime": "cluster.runtime",
    "tpu": "cluster.tpu",
}

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
    return globals().setdefault(name, value)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})

"""looplib: custom training loops for TensorFlow.

Subclass `Trainer` (and `Evaluator`), write one `step_fn` for one replica, and a `Controller` does the rest.
"""

from looplib import imports, startup  # noqa: F401  (first, before the others import TensorFlow)
from looplib.actions import Action, Event
from looplib.checkpoint_policy import CheckpointPolicy, KeepBest, KeepEvery, KeepLast
from looplib.commits import checkpoints
from looplib.controller import Controller
from looplib.errors import DivergenceError, UsageError
from looplib.evaluator import Evaluator
from looplib.foreign import OrbitEvaluator, OrbitTrainer
from looplib.guards import Guards
from looplib.inputs import InputContext
from looplib.marker import Commit
from looplib.preemption import Preempted
from looplib.reductions import each, last, mean, total
from looplib.trainer import Trainer
from looplib.writers import ConsoleWriter, JsonlWriter, TensorBoardWriter, Writer

__version__ = "0.1.0"

__all__ = [
    "Action",
    "CheckpointPolicy",
    "Commit",
    "ConsoleWriter",
    "Controller",
    "DivergenceError",
    "Evaluator",
    "Event",
    "Guards",
    "InputContext",
    "JsonlWriter",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "OrbitEvaluator",
    "OrbitTrainer",
    "Preempted",
    "TensorBoardWriter",
    "Trainer",
    "UsageError",
    "Writer",
    "checkpoints",
    "each",
    "last",
    "mean",
    "total",
]

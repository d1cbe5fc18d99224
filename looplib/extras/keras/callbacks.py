"""Keras callbacks that observe epochs or set the learning rate, called by a controller."""

from collections.abc import Sequence
from typing import Any

from looplib import _keras
from looplib.errors import UsageError
from looplib.extras.keras.callback_memory import Memories
from looplib.task.actions import Action, Event

_REPLACED = {
    "ModelCheckpoint": "CheckpointPolicy(keep=(looplib.KeepBest(...),)) and model_dir of the Controller, or the action "
    "looplib.ExportBest",
    "BackupAndRestore": "model_dir of the Controller, which saves all state and continues from it",
    "TensorBoard": "model_dir of the Controller, which writes TensorBoard events",
    "TerminateOnNaN": "CheckpointPolicy(guards=looplib.Guards(non_finite=...)), which halts by default",
    "SwapEMAWeights": "the averages of looplib.GradientTrainer",
    "OrbaxCheckpoint": "model_dir of the Controller, and CheckpointPolicy",
    "CSVLogger": "Controller(trackers=[looplib.CsvWriter(model_dir)]) (--trackers=csv), whose tables have each step "
    "once, also after a kill",
    "RemoteMonitor": "trackers of the Controller, or a looplib.Writer of your own that sends the metrics, because its "
    "`resume` says which records the run makes again",
    "ProgbarLogger": "the console, which looplib writes by default",
}
_IN_AN_EPOCH = (
    "on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end",
    "on_test_begin", "on_test_end", "on_test_batch_begin", "on_test_batch_end",
)  # fmt: skip
_OWN = ("steps_per_second", "epoch")  # of a report, beside the trainer's metrics


class KerasCallbacks(Action):
    """Calls the callbacks of a `KerasTrainer` as `fit` does, at the start and the end of each epoch.

    What they remember in their attributes is part of the checkpoints, where JSON can hold it, such as the best value
    and the epochs waited; see `callback_memory.Memory`. It belongs to the callback of the same class, `monitor`, `mode`
    and `name`, which are attributes that it may have.

    Args:
      model: the model that they are for.
      callbacks: of the model's family.

    Raises:
      UsageError: for a callback that cannot work.
    """

    def __init__(self, model: Any, callbacks: Sequence[Any]) -> None:
        self._model = model
        self._callbacks = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
        for callback in self._callbacks:
            _check(model, callback)
            callback.set_model(model)
        self._trains = False
        self._logs: dict[str, float] | None = None  # of an epoch that has ended and lacks its evaluation
        self._missing: list[str] = []  # the evaluators whose metrics it lacks
        self._begun = -1  # the last epoch that was begun
        self._memories = Memories(self._callbacks, vars(_keras.callback_base(self._model)()))

    def on_start(self, controller: Any) -> None:
        """Begins the training, and its first epoch."""
        steps = controller.steps_per_epoch
        if steps is None or controller.steps_per_loop != steps:
            raise UsageError(
                f"Keras callbacks take the metrics of whole epochs, of {steps or 'an unknown number of'} steps, and "
                f"the Controller reports every {controller.steps_per_loop} steps; leave out its steps_per_loop, and "
                "give a data set of unknown length tf.data.experimental.assert_cardinality"
            )
        batches = controller.loops["train"].batches
        if batches.earlier:
            raise UsageError(
                f"Keras callbacks take the metrics of whole epochs, and this run had batches of {batches}, so that its "
                f"reports do not end with its epochs; continue with {batches.original}, or start a new run from the "
                "weights (--warm_start)"
            )
        self._begin_training()
        if self._logs is None:
            self._begin_epoch(controller.global_step // steps)

    def __call__(self, event: Event) -> None:
        """Ends an epoch with its report, or with the last evaluation after that."""
        controller = event.controller
        if event.split == "train" and event.step % controller.steps_per_epoch == 0:
            self._logs = {name: value for name, value in event.metrics.items() if name not in _OWN}
            self._missing = [name for name in controller.loops if name != "train"] if controller.evaluation_due else []
        elif self._logs is not None and event.split in self._missing:
            prefix = "val" if event.split == "eval" else event.split
            self._logs |= {f"{prefix}_{name}": value for name, value in event.metrics.items() if name != "examples"}
            self._missing.remove(event.split)
        else:
            return
        if not self._missing:
            self._end_epoch(event.step // controller.steps_per_epoch - 1, controller)

    def on_end(self, controller: Any) -> None:
        """Ends the training."""
        self._trains = False
        for callback in self._callbacks:
            callback.on_train_end({})

    def state(self) -> dict[str, Any]:
        """See `Action`: of each callback, what has changed since its training began."""
        changed = self._memories.changed()
        return {"callbacks": changed, "logs": self._logs, "missing": self._missing, "begun": self._begun}

    def load(self, state: dict[str, Any]) -> None:
        """See `Action`."""
        self._begin_training()
        self._memories.load(state["callbacks"])
        self._logs, self._missing, self._begun = state["logs"], list(state["missing"]), state["begun"]

    def _begin_training(self) -> None:
        if self._trains:
            return
        self._trains = True
        self._model.stop_training = False
        for callback in self._callbacks:
            callback.on_train_begin({})
        self._memories.begin()

    def _begin_epoch(self, epoch: int) -> None:
        if epoch > self._begun:
            self._begun = epoch
            for callback in self._callbacks:
                callback.on_epoch_begin(epoch, {})

    def _end_epoch(self, epoch: int, controller: Any) -> None:
        logs, self._logs = self._logs, None
        for callback in self._callbacks:
            callback.on_epoch_end(epoch, logs)
        if self._model.stop_training:
            controller.stop()
        elif not controller.ending:
            self._begin_epoch(epoch + 1)


def _check(model: Any, callback: Any) -> None:
    kind = type(callback).__name__
    base = _keras.callback_base(model)
    if not isinstance(callback, base):
        raise UsageError(
            f"the callback {callback!r} is no {base.__module__}.{base.__name__}, as the model's family needs"
        )
    for parent in type(callback).__mro__:
        if parent.__name__ in _REPLACED and _keras.family(callback):
            raise UsageError(f"the callback {kind} does not work in looplib; use {_REPLACED[parent.__name__]}")
    if getattr(callback, "restore_best_weights", False):
        raise UsageError(
            f"{kind} has restore_best_weights, which a restart would forget; use "
            "looplib.EarlyStopping(restore_best=True)"
        )
    for name in _IN_AN_EPOCH:
        if name in vars(callback) or getattr(type(callback), name) is not getattr(base, name):
            raise UsageError(
                f"the callback {kind} has {name}, which looplib does not call, because it runs many steps in one call "
                "to the device; use on_epoch_end, or an action of the Controller, which is called after each report"
            )

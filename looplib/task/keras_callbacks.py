"""Keras callbacks that observe epochs or set the learning rate, called by a controller."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import logging

from looplib import _keras
from looplib.errors import UsageError
from looplib.task.actions import Action, Event, warn_of_other_memories

_REPLACED = {
    "ModelCheckpoint": "CheckpointPolicy(keep=(looplib.KeepBest(...),)) and model_dir of the Controller",
    "BackupAndRestore": "model_dir of the Controller, which saves all state and continues from it",
    "TensorBoard": "model_dir of the Controller, which writes TensorBoard events",
    "TerminateOnNaN": "CheckpointPolicy(guards=looplib.Guards(non_finite=...)), which halts by default",
    "SwapEMAWeights": "the averages of looplib.GradientTrainer",
}
_IN_AN_EPOCH = (
    "on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end",
    "on_test_begin", "on_test_end", "on_test_batch_begin", "on_test_batch_end",
)  # fmt: skip
_SETTINGS = ("min_delta",)  # of which Keras 3 changes the sign, once it knows which values are better
_OWN = ("steps_per_second", "epoch")  # of a report, beside the trainer's metrics


class KerasCallbacks(Action):
    """Calls the callbacks of a `KerasTrainer` as `fit` does, at the start and the end of each epoch.

    Their numbers, such as the best value and the epochs waited, are part of the checkpoints. They belong to the
    callback of the same class, `monitor`, `mode` and `name`, which are attributes that it may have.

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
        self._names = [_name(callback) for callback in self._callbacks]
        self._refuse_equal_names()
        self._trains = False
        self._logs: dict[str, float] | None = None  # of an epoch that has ended and lacks its evaluation
        self._missing: list[str] = []  # the evaluators whose metrics it lacks
        self._begun = -1  # the last epoch that was begun
        self._first = [_numbers(callback) for callback in self._callbacks]

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
        """See `Action`: of each callback, the numbers that have changed since its training began."""
        self._refuse_equal_names()
        changed = {
            name: {key: value for key, value in _numbers(callback).items() if first.get(key, ...) != value}
            for name, callback, first in zip(self._names, self._callbacks, self._first)
        }
        return {"callbacks": changed, "logs": self._logs, "missing": self._missing, "begun": self._begun}

    def load(self, state: dict[str, Any]) -> None:
        """See `Action`."""
        self._begin_training()
        changed = state["callbacks"]
        if isinstance(changed, list):
            changed = self._of_an_earlier_looplib(changed)
        for name, callback, first in zip(self._names, self._callbacks, self._first):
            vars(callback).update({**first, **changed.get(name, {})})
        new = [name for name, one in zip(self._names, self._callbacks) if self._remembers(one) and name not in changed]
        left = [name for name, numbers in changed.items() if numbers and name not in self._names]
        warn_of_other_memories("callbacks", new, left)
        self._logs, self._missing, self._begun = state["logs"], list(state["missing"]), state["begun"]

    def _of_an_earlier_looplib(self, changed: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Returns numbers by the names of the callbacks, where they were saved by their places."""
        if len(changed) != len(self._callbacks):
            return {f"callback {place}": numbers for place, numbers in enumerate(changed, 1)}
        if len(changed) > 1 and any(changed):
            logging.warning(
                "the checkpoint names callbacks by their places, and %s continue with the numbers of these places; if "
                "the callbacks were others then, start without callbacks until a checkpoint is saved",
                ", ".join(self._names),
            )
        return dict(zip(self._names, changed))

    def _remembers(self, callback: Any) -> bool:
        """Returns whether a callback has numbers, beside those of all callbacks."""
        return bool(_numbers(callback).keys() - vars(_keras.callback_base(self._model)()).keys())

    def _refuse_equal_names(self) -> None:
        for name, callback in zip(self._names, self._callbacks):
            if self._names.count(name) > 1 and self._remembers(callback):
                raise UsageError(
                    f"two callbacks are {name}, and a checkpoint could not tell which of them a memory belongs to; "
                    "give each an attribute `name` of its own"
                )

    def _begin_training(self) -> None:
        if self._trains:
            return
        self._trains = True
        self._model.stop_training = False
        for callback in self._callbacks:
            callback.on_train_begin({})
        self._refuse_equal_names()
        self._first = [_numbers(callback) for callback in self._callbacks]

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


def _name(callback: Any) -> str:
    """Returns what a callback is and watches."""
    held = vars(callback)
    better = getattr(held.get("monitor_op"), "__name__", None)  # in place of a mode in tf_keras
    known = (held.get("monitor"), held.get("mode", better), held.get("name"))
    return f"{type(callback).__name__}({', '.join(one for one in known if isinstance(one, str))})"


def _numbers(callback: Any) -> dict[str, Any]:
    """Returns the attributes of a callback that are numbers, or None until they are."""
    return {
        name: value.item() if isinstance(value, np.generic) else value
        for name, value in vars(callback).items()
        if (value is None or isinstance(value, (bool, int, float, np.number))) and name not in _SETTINGS
    }

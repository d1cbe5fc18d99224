"""Keras callbacks, called by a controller at the start and the end of each epoch, with the best weights they keep."""

import contextlib
import copy
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from looplib.cluster.collectives import Workers
from looplib.compat import keras as _keras
from looplib.errors import CallbackError
from looplib.keras import callback_state
from looplib.keras.callback_state import Memories
from looplib.keras.results import BatchLogs, ReportsArrays
from looplib.run import commits
from looplib.run.commits import Commit
from looplib.run.metric_names import CHECKSUM
from looplib.task.actions import Action, Event
from looplib.task.learning_rates import constant_rate


class BestWeights:
    """The steps of the best weights, by the names of the callbacks that restore them.

    A checkpoint of such a step is kept as long as it is the best one, now or in the memory that was saved last. Without
    a `model_dir` there is none, and the callbacks themselves hold the weights.

    Attributes:
      restoring: whether a checkpoint is being restored for its weights.
    """

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}
        self._saved: dict[str, int] = {}
        self._held: dict[str, Any] = {}  # without a model_dir, the weights at the end of the last call of train
        self.restoring = False

    def state(self) -> dict[str, int]:
        """Returns the steps, to be saved."""
        return self._steps

    def saved(self, steps: Mapping[str, int]) -> None:
        """Takes what a checkpoint holds that is written or read now."""
        self._saved = dict(steps)

    def check(self, steps: Any) -> None:
        """Raises `ValueError` for what are no steps of a checkpoint."""
        if not isinstance(steps, dict) or any(type(step) is not int for step in steps.values()):
            raise ValueError(f"the steps of the best weights are {steps!r:.100}; expected a dict of whole numbers")

    def load(self, steps: Mapping[str, int], named: Sequence[tuple[str, Any]]) -> None:
        """Takes the steps of a checkpoint, and leaves the weights there until they are needed."""
        known = [name for name, callback in named if callback_state.restores_best(callback)]
        self._steps = {name: step for name, step in steps.items() if name in known}
        self.saved(self._steps)
        for name, callback in named:
            if name in known:
                callback.best_weights = self._held.get(name, []) if name in self._steps else None

    def forget(self) -> None:
        """Begins without any."""
        self._steps = {}

    def select(self, kept: Sequence[Commit]) -> list[Commit]:
        """See `KeepRule`."""
        steps = {*self._steps.values(), *self._saved.values()}
        return [done for done in kept if done.step in steps]

    def forget_lost(self, controller: Any, named: Sequence[tuple[str, Any]]) -> None:
        """Lets callbacks whose best checkpoint is gone begin again, with a warning."""
        if not self._steps or controller.model_dir is None:
            return
        found = {
            controller.global_step,
            *(done.step for done in commits.committed(commits.checkpoint_folder(controller.model_dir))),
        }
        for name, callback in named:
            if (step := self._steps.get(name)) not in (None, *found):
                logging.warning(
                    "the best weights of %s were those of step %d, whose checkpoint is gone; it begins with a fresh "
                    "memory, and will restore the best weights of the epochs to come", name, step,
                )  # fmt: skip
                self._steps = {other: at for other, at in self._steps.items() if other != name}
                callback.on_train_begin({})

    def end_epoch(self, name: str, callback: Any, epoch: int, logs: dict[str, float], step: int) -> bool:
        """Ends an epoch for a callback; returns whether its weights are the best since then."""
        if not callback_state.restores_best(callback):
            callback.on_epoch_end(epoch, logs)
            return False
        before = callback.best_weights
        callback.on_epoch_end(epoch, logs)
        if callback.best_weights is before:
            return False
        self._steps = {**self._steps, name: step}
        return True

    def restore(self, name: str, callback: Any, model: Any, controller: Any) -> None:
        """Gives the model the best weights that a callback is to restore, by the checkpoint that has them."""
        step = self._steps.get(name)
        if step is None:
            return
        if controller.model_dir is None:
            self._held[name] = callback.best_weights
            return
        if step != controller.global_step:
            self.restoring = True
            try:
                controller.restore_checkpoint(step)
            finally:
                self.restoring = False
        callback.best_weights = model.get_weights()


_OWN = ("steps_per_second", "epoch", "examples", CHECKSUM)  # of a report, beside the trainer's metrics


class KerasCallbacks(Action):
    """Calls the callbacks of a `KerasTrainer` as `fit` does, at the start and the end of each epoch.

    What they remember in their attributes is part of the checkpoints, where JSON can hold it, such as the best value
    and the epochs waited; see `callback_memory.Memory`. It belongs to the callback of the same class, `monitor`, `mode`
    and `name`, which are attributes that it may have.

    Args:
      model: the model that they are for.
      callbacks: of the model's family.
      batch_logs: the logs of the batches of each epoch, for callbacks that observe these; None calls none for batches.

    Raises:
      UsageError: for a callback that cannot work.
    """

    def __init__(self, model: Any, callbacks: Sequence[Any], batch_logs: BatchLogs | None = None) -> None:
        self._model, self._batch_logs = model, batch_logs
        callbacks = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._callbacks, self._replaced = callback_state.running(model, callbacks, batch_logs is not None)
        if not Workers(model.distribute_strategy).is_chief:
            self._callbacks = [self._to_nowhere(callback) for callback in self._callbacks]
        for callback in self._callbacks:
            callback.set_model(model)
        self.watched = next(filter(None, map(callback_state.watched, self._callbacks)), "")
        self._trains = False
        self._loaded: dict[str, Any] | None = None  # the state of a checkpoint, until the training begins
        self._kept: dict[str, Any] | None = None  # the state at the end of a training, for a later one
        self._last: dict[str, Any] = {}  # the logs of the epoch that has ended last
        self._logs: dict[str, Any] | None = None  # of an epoch that has ended and lacks its evaluation
        self._missing: list[str] = []  # the evaluators whose metrics it lacks
        self._begun = -1  # the last epoch that was begun
        self._rate: float | None = None  # the learning rate that the training began with; None for a schedule
        self._memories = Memories(self._callbacks, vars(_keras.module_of(self._model).callbacks.Callback()))
        self._best = self.keeps = BestWeights()
        self._stopped: dict[str, Any] | None = None  # the state before the end of the epoch that ended the training

    def begin(self) -> None:
        """Lets the callbacks set what the step of a new training needs, before one begins."""
        with self._scope():
            for callback in self._callbacks:
                callback.on_train_begin({})
        self._memories.begin()

    def on_start(self, controller: Any) -> None:
        """Begins the training, and its first epoch."""
        steps = controller.steps_per_epoch
        if steps is None or controller.steps_per_loop != steps:
            raise CallbackError(
                f"Keras callbacks take the metrics of whole epochs, of {steps or 'an unknown number of'} steps, and "
                f"the Controller reports every {controller.steps_per_loop} steps; leave out its steps_per_loop, and "
                "give data that never ends a length, such as by tf.data.Dataset.take"
            )
        batches = controller.loops["train"].batches
        if batches.earlier:
            raise CallbackError(
                f"Keras callbacks take the metrics of whole epochs, and this run had batches of {batches}, so that its "
                f"reports do not end with its epochs; continue with {batches.original}, or start a new run from the "
                "weights (--warm_start)"
            )
        callback_state.check_replaced(self._replaced, controller)
        end = controller.target_step
        epochs = None if end is None else math.ceil(end / steps)
        for callback in self._callbacks:
            callback.set_params({"verbose": 1, "epochs": epochs, "steps": int(steps)})
        self._loaded, self._kept = self._loaded or self._kept, None
        with self._scope():
            self._begin_training()
            self._best.forget_lost(controller, self._memories.named)
            if self._logs is None:
                self._begin_epoch(controller.global_step // steps)
            elif not self._missing:  # the run has stopped there
                self._end_epoch(controller.global_step, controller, ending=False)

    def __call__(self, event: Event) -> None:
        """Ends an epoch with its report, or with the last evaluation after that."""
        with self._scope():
            self._take(event)

    def _take(self, event: Event) -> None:
        controller = event.controller
        if not self._trains:  # an evaluation after the training
            return
        if event.split == "train" and event.step % controller.steps_per_epoch == 0:
            self._end_batches()
            self._logs = {name: value for name, value in _as_in_fit(event).items() if name not in _OWN}
            self._missing = [name for name in controller.loops if name != "train"] if event.evaluation_due else []
        elif self._logs is not None and event.split in self._missing:
            prefix = "val" if event.split == "eval" else event.split
            self._logs |= {f"{prefix}_{name}": value for name, value in _as_in_fit(event).items() if name != "examples"}
            self._missing.remove(event.split)
        else:
            return
        if not self._missing and self._end_epoch(event.step, controller, event.ending):
            if event.split == "train" and controller.model_dir:  # before an evaluation, the step has been saved
                controller.save_checkpoint()

    def on_end(self, controller: Any) -> None:
        """Ends the training, with the best weights if a callback restores them."""
        self._kept = self.state()
        self._trains = False
        with self._scope():
            for name, callback in self._memories.named:
                self._best.restore(name, callback, self._model, controller)
                callback.on_train_end(dict(self._last))

    def state(self) -> dict[str, Any]:
        """See `Action`: of each callback, what has changed since its training began.

        Where a callback has ended the training, it is the state before that, and the next start asks the callbacks
        again, as they may have other settings.
        """
        state = self._stopped or self._state()
        self._best.saved(state["best"])
        return state

    def load(self, state: dict[str, Any]) -> None:
        """See `Action`; a checkpoint that is restored for the best weights at the end changes no callback."""
        if not self._best.restoring:
            self._memories.check(state["callbacks"])
            self._best.check(state.get("best", {}))
            self._loaded = {"best": {}, "last": {}, **state}
            if self._trains:
                self._remember()
            self._last = _of_json(state.get("last", {}))
        self._missing, self._begun = list(state["missing"]), state["begun"]
        self._logs = None if state["logs"] is None else _of_json(state["logs"])
        self._stopped = None

    def _remember(self) -> None:
        """Gives the callbacks what a checkpoint has of them."""
        if self._loaded is not None:
            self._memories.load(self._loaded["callbacks"])
            self._best.load(self._loaded.get("best", {}), self._memories.named)
        self._loaded = None

    def _scope(self) -> contextlib.AbstractContextManager[Any]:
        """Returns what `fit` calls callbacks in: of tf_keras, the scope of the strategy."""
        in_scope = _keras.family(self._model) == "tf_keras"
        return self._model.distribute_strategy.scope() if in_scope else contextlib.nullcontext()

    def _state(self) -> dict[str, Any]:
        if self._loaded is not None:
            return self._loaded
        return {
            "callbacks": self._memories.changed(),
            "last": dict(self._last),
            "best": self._best.state(),
            "logs": self._logs and dict(self._logs),
            "missing": list(self._missing),
            "begun": self._begun,
            "rate": self._rate,
        }

    def _to_nowhere(self, callback: Any) -> Any:
        """Returns what stands for a callback where another worker writes files: reading the weights takes all."""
        if not callback_state.writes_models(callback) or _keras.family(callback) == "tf_keras":  # which does so itself
            return callback
        self._folder = self._folder or tempfile.TemporaryDirectory(prefix="looplib-keras-")
        twin = copy.copy(callback)
        twin.filepath = os.path.join(self._folder.name, os.path.basename(callback.filepath))
        return twin

    def _begin_training(self) -> None:
        if self._trains:
            return
        self._trains = True
        self._model.stop_training = False
        self._stopped = None
        self._best.forget()
        optimizer = self._model.optimizer
        rate, first = constant_rate(optimizer), (self._loaded or {}).get("rate")
        first = first if type(first) in (int, float) else None  # it may be of an older or a foreign checkpoint
        self._rate, resumes = rate if first is None else first, None not in (rate, first)
        if resumes:  # callbacks read it as the rate of the whole training, or change it for that
            optimizer.learning_rate = first
        for callback in self._callbacks:
            callback.on_train_begin({})
        if resumes:
            optimizer.learning_rate = rate
        self._memories.begin()
        self._remember()

    def _begin_epoch(self, epoch: int) -> None:
        if epoch > self._begun:
            self._begun = epoch
            for callback in self._callbacks:
                callback.on_epoch_begin(epoch, {})

    def _end_batches(self) -> None:
        """Calls the callbacks for each batch of an epoch whose steps have ended."""
        for index, logs in enumerate(self._batch_logs or ()):
            for callback in self._callbacks:
                callback.on_train_batch_begin(index, {})
            for callback in self._callbacks:
                callback.on_train_batch_end(index, dict(logs))

    def _end_epoch(self, step: int, controller: Any, ending: bool) -> bool:
        """Ends the epoch of a step; returns whether the weights to restore at the end are now this step's."""
        epoch = step // controller.steps_per_epoch - 1
        before, logs, self._logs = self._state(), self._logs, None
        self._last = dict(logs)
        who, why, best = "a callback of Keras", "", False
        for name, callback in self._memories.named:
            going_on = not self._model.stop_training
            best |= self._best.end_epoch(name, callback, epoch, logs, step)
            if going_on and self._model.stop_training:
                who = type(callback).__name__
                why = callback_state.monitored(callback, logs)
        if self._model.stop_training:
            self._stopped = before
            controller.stop(f"{who} has ended the training at step {step:,}{why}")
        elif not ending:
            self._begin_epoch(epoch + 1)
        return best


def _as_in_fit(event: Event) -> dict[str, Any]:
    """Returns the metrics of a report with its arrays whole, such as `f1` for `f1_0` and `f1_1`."""
    task = event.controller.loops[event.split].task
    arrays = task.report_arrays if isinstance(task, ReportsArrays) else {}
    parts = {f"{name}_{number}" for name, array in arrays.items() for number in range(array.size)}
    return {name: value for name, value in event.metrics.items() if name not in parts} | arrays


def _of_json(logs: dict[str, Any]) -> dict[str, Any]:
    """Returns logs with arrays in place of the lists that JSON has."""
    return {name: np.asarray(one) if isinstance(one, list) else one for name, one in logs.items()}

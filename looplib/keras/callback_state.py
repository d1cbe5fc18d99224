"""Callbacks that a resume continues: which kinds there are, and what they remember."""

import json
import math
import os
from collections.abc import Collection, Mapping, Sequence, Sized
from typing import Any

import numpy as np
from absl import logging

from looplib.base import orders
from looplib.base.messages import join_names
from looplib.compat import keras
from looplib.errors import CallbackError
from looplib.run.metric_names import known_mode
from looplib.task.actions import warn_of_unused_memories
from looplib.task.plain import as_json

_REFUSED = {
    "SwapEMAWeights": "the averages of looplib.GradientTrainer",
    "OrbaxCheckpoint": "model_dir of the Controller, and CheckpointPolicy",
    "CSVLogger": "Controller(writers=[*looplib.DEFAULT_WRITERS, 'csv']) (--trackers=csv), whose tables have each step "
    "once, also after a kill",
    "RemoteMonitor": "a tracker among the writers of the Controller, or a looplib.Writer of your own that sends the "
    "metrics, because its `resume` says which records the run makes again",
}
_MODEL_DIR, _GUARDS, _CONSOLE = "a model_dir", "guards against values that are not finite", "the console"
_REPLACED = {  # what does their work, and how
    "BackupAndRestore": (_MODEL_DIR, "which has all state, and from which the program continues when it is run again"),
    "TensorBoard": (
        _MODEL_DIR,
        "with the metrics as TensorBoard events; nothing is written to the log_dir of the callback, and no graph; for "
        "histograms and profiles see looplib.histogram and --profile",
    ),
    "TerminateOnNaN": (_GUARDS, "which end the training by an error that names the step and the tensor"),
    "ProgbarLogger": (_CONSOLE, "which shows the progress"),
}
_OF_BATCHES = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
_OF_EVALUATIONS = ("on_test_begin", "on_test_end", "on_test_batch_begin", "on_test_batch_end")


def writes_models(callback: Any) -> bool:
    """Returns whether a callback is a `ModelCheckpoint`."""
    return _class_of_keras(callback, ("ModelCheckpoint",)) is not None


def restores_best(callback: Any) -> bool:
    """Returns whether a callback is an `EarlyStopping` that gives the model its best weights at the end."""
    return _class_of_keras(callback, ("EarlyStopping",)) is not None and bool(callback.restore_best_weights)


def watched(callback: Any) -> str:
    """Returns the `Action.watched` of a callback that finds the best value of a metric of "eval"; "" for any other."""
    held, kind = vars(callback), _class_of_keras(callback, ("EarlyStopping", "ReduceLROnPlateau", "ModelCheckpoint"))
    if kind is None or not held.get("save_best_only", True) or not callback.monitor.startswith("val_"):
        return ""
    metric = f"eval/{callback.monitor.removeprefix('val_')}"
    modes = {"min": "min", "max": "max", "less": "min", "greater": "max"}
    mode = modes.get(held.get("mode")) or modes.get(_better(held)) or known_mode(metric)
    return f"{mode}:{metric}" if mode else ""


def monitored(callback: Any, logs: Mapping[str, Any]) -> str:
    """Returns the value of the metric that a callback monitors, and the best one, as a clause; "" for none."""
    held = vars(callback)
    name, best = held.get("monitor"), held.get("best")
    if name not in logs or np.ndim(logs[name]):
        return ""
    is_known = isinstance(best, (int, float, np.number)) and math.isfinite(best)
    before = f", and the value to improve was {best:.6g}" if is_known else ""
    return f": {name} is {logs[name]:.6g}{before}"


def running(model: Any, callbacks: Sequence[Any], observes_batches: bool) -> tuple[list[Any], dict[str, str]]:
    """Returns the callbacks to call, and what the others need that looplib does in their place.

    Args:
      model: the model that they are for.
      callbacks: those that were given.
      observes_batches: whether what they do for batches of the training is said to be observing.

    Returns:
      The callbacks to call, and a dict from the class of each other one to what does its work.

    Raises:
      UsageError: for a callback that cannot work.
    """
    if observes_batches and model.distribute_strategy.num_replicas_in_sync > 1:
        raise CallbackError(
            "KerasTrainer got observes_batches=True on several replicas, each of which has only its own part of a "
            "batch's metrics; use one replica, or on_epoch_end, or an action of the Controller with steps_per_loop=1"
        )
    found, needs = [], {}
    for callback in callbacks:
        _check_family(model, callback)
        if kind := _class_of_keras(callback, _REPLACED):
            need, how = _REPLACED[kind.__name__]
            _refuse_own_methods(callback, kind, need)
            needs[type(callback).__name__] = need
            logging.info("the callback %s is not called: %s does its work, %s", type(callback).__name__, need, how)
            continue
        _check(keras.module_of(model).callbacks.Callback, callback, observes_batches)
        if writes_models(callback) and orders.current().until:
            continue  # steps are repeated, and write nothing elsewhere
        found.append(callback)
    return found, needs


def _refuse_own_methods(callback: Any, kind: type, need: str) -> None:
    """Raises `UsageError` if a callback does more than one of Keras that is not called."""
    name = type(callback).__name__
    own = [one for one in dir(kind) if one.startswith("on_") and getattr(type(callback), one) is not getattr(kind, one)]
    if own:
        raise CallbackError(
            f"the callback {name} is a {kind.__name__}, which is not called, because {need} does its work, so that its "
            f"own {join_names(own)} would be left out; derive it from Callback, or use an action of the Controller"
        )


def check_replaced(needs: dict[str, str], controller: Any) -> None:
    """Checks that a controller has what does the work of callbacks.

    Args:
      needs: from `running`.
      controller: the `Controller`.

    Raises:
      UsageError: if it lacks that.
    """
    guarded = controller.guards.non_finite != "off"
    lacking = {_MODEL_DIR: controller.model_dir is None, _GUARDS: not guarded, _CONSOLE: False}
    for kind, need in needs.items():
        if lacking[need]:
            cure = "one" if need == _MODEL_DIR else "guards=looplib.Guards()"
            raise CallbackError(
                f"the callback {kind} is not called, because {need} does its work, and the Controller has none; give "
                f"it {cure}, or leave out {kind}"
            )


def _check_family(model: Any, callback: Any) -> None:
    base = keras.module_of(model).callbacks.Callback
    if isinstance(callback, (list, tuple)):
        raise CallbackError(
            f"callbacks has {callback!r:.200} among its entries; expected a flat list of callbacks, each alone"
        )
    if not isinstance(callback, base):
        raise CallbackError(
            f"the callback {callback!r:.200} is no {base.__module__}.{base.__name__}, as the model's family needs; "
            "derive it from that class, or give a function to the Controller as one of its actions"
        )


def _check(base: type, callback: Any, observes_batches: bool) -> None:
    kind = type(callback).__name__
    if refused := _class_of_keras(callback, _REFUSED):
        raise CallbackError(f"the callback {kind} does not work in looplib; use {_REFUSED[refused.__name__]}")
    if writer := _class_of_keras(callback, ("ModelCheckpoint",)):
        _check_checkpoint(callback)
        base = writer  # whose methods for batches do nothing then
    for name in (*_OF_BATCHES, *_OF_EVALUATIONS):
        if not (name in vars(callback) or getattr(type(callback), name) is not getattr(base, name)):
            continue
        if name in _OF_EVALUATIONS:
            raise CallbackError(
                f"the callback {kind} has {name}, which looplib does not call, because an evaluation runs many steps "
                "in one call to the device; use on_epoch_end, whose logs have the metrics of the evaluation (val_...), "
                "or an action of the Controller, which is called after each evaluation"
            )
        if not observes_batches:
            raise CallbackError(
                f"the callback {kind} has {name}, and looplib runs the batches of an epoch in one call to the device; "
                "if it only observes, and neither reads nor writes the weights, say KerasTrainer(..., "
                "observes_batches=True), which calls it for each batch once the epoch has ended; or use on_epoch_end, "
                "or an action of the Controller, which is called after each report"
            )


def _check_checkpoint(callback: Any) -> None:
    kind = type(callback).__name__
    if callback.save_freq != "epoch":
        raise CallbackError(
            f"the callback {kind} has save_freq={callback.save_freq!r}, a number of batches, and looplib calls it "
            "after each epoch; leave out save_freq, or give CheckpointPolicy(every_steps=...), which saves all state"
        )
    if vars(callback).get("load_weights_on_restart"):
        raise CallbackError(
            f"the callback {kind} has load_weights_on_restart, which would replace the weights of the checkpoint that "
            "the run continues from; leave it out, and give the Controller a model_dir"
        )


def _class_of_keras(callback: Any, names: Collection[str]) -> type | None:
    """Returns the class with one of some names that a callback is of, or derived from; None if Keras has none."""
    kinds = [kind for kind in type(callback).__mro__ if kind.__module__.startswith(("keras.", "tf_keras."))]
    return next((kind for kind in kinds if kind.__name__ in names), None)


_SETTINGS = ("min_delta",)  # Keras 3 changes their sign, once it knows which values are better


class Memory:
    """The attributes of one callback: None, numbers, strings, and lists and dicts of them.

    Of an object that has nothing else, such as a regulator of a rate, each attribute is kept: `pid.integral`, say.
    An attribute of another kind, such as a set or an array, is not kept. If it changes in the training, a warning says
    so: if the attribute is set again, or gets another length.

    Args:
      callback: the callback.
    """

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self._others_keep = _SETTINGS + (("best_weights",) if restores_best(callback) else ())
        self._warned: set[str] = set()
        self.begin()

    def begin(self) -> None:
        """Takes the attributes as those that a training begins with."""
        self._first, self._others = self._kept(), self._not_kept()

    @property
    def names(self) -> set[str]:
        """The names of the attributes that are kept."""
        return set(self._kept())

    def changed(self) -> dict[str, Any]:
        """Returns the attributes that have changed since the training began."""
        self._warn()
        kept = self._kept().items()
        return {name: json.loads(text) for name, text in kept if self._first.get(name) != text}

    def check(self, changed: Mapping[str, Any]) -> None:
        """Raises `UsageError` if `load` cannot set what `changed` is said to have returned."""
        for name in changed:
            if callable(getattr(type(self._callback), name, None)):
                raise CallbackError(
                    f"the checkpoint has a value for {type(self._callback).__name__}.{name:.100}, which is a method; "
                    "name another checkpoint"
                )

    def load(self, changed: Mapping[str, Any]) -> None:
        """Sets the attributes to those that the training began with, and some to what `changed` returned."""
        held, owners = vars(self._callback), self._owners()
        first = {name: json.loads(text) for name, text in self._first.items() if not callable(held.get(name))}
        for name, value in {**first, **changed}.items():
            owner, _, own = name.rpartition(".")
            if owner in owners:
                owners[owner][own] = value

    def _owners(self) -> dict[str, dict[str, Any]]:
        """Returns the attributes of the callback, and those of the objects among them that have plain values alone."""
        inner = {name: getattr(value, "__dict__", None) for name, value in vars(self._callback).items()}
        return {"": vars(self._callback), **{name: held for name, held in inner.items() if held and _is_plain(held)}}

    def _kept(self) -> dict[str, str]:
        """Returns the attributes that are kept, as JSON."""
        return {
            f"{owner}.{name}" if owner else name: json.dumps(value, default=as_json)
            for owner, held in self._owners().items()
            for name, value in held.items()
            if name not in self._others_keep and _is_plain(value)
        }

    def _not_kept(self) -> dict[str, tuple[int, int]]:
        """Returns the identities and lengths of the other attributes, apart from functions."""
        return {
            name: (id(value), len(value) if isinstance(value, Sized) else 0)
            for name, value in vars(self._callback).items()
            if name not in self._others_keep and not _is_plain(value) and not callable(value)
        }

    def _warn(self) -> None:
        now = self._not_kept()
        for name in sorted(now.keys() - self._warned):
            if now[name] != self._others.get(name):
                self._warned.add(name)
                logging.warning(
                    "the attribute %s of the callback %s has changed and is a %s, which is not kept in checkpoints: a "
                    "resumed run has the value that it begins with; use numbers, strings, and lists and dicts of them, "
                    "or a looplib.Action with state and load",
                    name, type(self._callback).__name__, type(vars(self._callback)[name]).__name__,
                )  # fmt: skip


class Memories:
    """The memories of a trainer's callbacks, each by its class, `monitor`, `mode` and `name`.

    Args:
      callbacks: the callbacks.
      common: the names of attributes that every callback has.

    Attributes:
      named: the callbacks with their names.

    Raises:
      UsageError: if two that remember something have one name.
    """

    def __init__(self, callbacks: Sequence[Any], common: Collection[str]) -> None:
        self._common = frozenset(common)
        self.named = [(_name(callback), callback) for callback in callbacks]
        self._named = [(name, Memory(callback)) for name, callback in self.named]
        self._refuse_equal_names()

    def begin(self) -> None:
        """Takes the attributes as those that a training begins with."""
        for _, memory in self._named:
            memory.begin()
        self._refuse_equal_names()

    def changed(self) -> dict[str, dict[str, Any]]:
        """Returns the attributes that have changed since the training began, by name."""
        self._refuse_equal_names()
        return {name: memory.changed() for name, memory in self._named}

    def check(self, saved: Any) -> None:
        """Logs what no callback has of a memory to be loaded.

        Args:
          saved: what `changed` returned.

        Raises:
          UsageError: if it is something else.
        """
        if not isinstance(saved, dict) or not all(isinstance(changed, dict) for changed in saved.values()):
            raise CallbackError(
                f"the checkpoint has {saved!r:.100} for Keras callbacks, expected a dict of their attributes; name "
                "another checkpoint"
            )
        for name, memory in self._named:
            memory.check(saved.get(name, {}))
        ours = {name for name, _ in self._named}
        new = [name for name, memory in self._named if memory.names - self._common and name not in saved]
        warn_of_unused_memories("callbacks", new, [name for name in saved if saved[name] and name not in ours])

    def load(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Gives each callback what it remembered, as `changed` returned it."""
        for name, memory in self._named:
            memory.load(saved.get(name, {}))

    def _refuse_equal_names(self) -> None:
        names = [name for name, _ in self._named]
        for name, memory in self._named:
            if names.count(name) > 1 and memory.names - self._common:
                raise CallbackError(
                    f"two callbacks are {name}, and a checkpoint could not tell which of them a memory belongs to; "
                    "give each an attribute `name` of its own"
                )


def _better(held: Mapping[str, Any]) -> str | None:
    """Returns the name of the comparison among the attributes of a callback, which tf_keras has in place of a mode."""
    return getattr(held.get("monitor_op"), "__name__", None)


def _name(callback: Any) -> str:
    """Returns what a callback is, watches and writes."""
    held = vars(callback)
    file = os.path.basename(callback.filepath) if writes_models(callback) else None
    known = (held.get("monitor"), held.get("mode", _better(held)), file, held.get("name"))
    return f"{type(callback).__name__}({', '.join(one for one in known if isinstance(one, str))})"


def _is_plain(value: Any) -> bool:
    """Returns whether JSON gives a value back as it was."""
    try:
        if type(value) in (list, dict):
            items = value.values() if type(value) is dict else value
            return all(map(_is_plain, items)) and (type(value) is list or all(type(key) is str for key in value))
    except RecursionError:  # it holds itself
        return False
    return value is None or isinstance(value, (bool, int, float, str, np.integer, np.floating, np.bool_))

"""Which Keras callbacks run, which looplib stands in for, and which cannot work."""

from collections.abc import Collection, Sequence
from typing import Any

from absl import logging

from looplib.compat import models
from looplib.errors import CallbackError

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
    from looplib.processes.order import requested  # here, because its room uses others that use this one

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
            needs[type(callback).__name__] = need
            logging.info("the callback %s is not called: %s does its work, %s", type(callback).__name__, need, how)
            continue
        _check(models.callbacks_of(model).Callback, callback, observes_batches)
        if writes_models(callback) and requested() is not None:
            continue  # an audit repeats steps, and writes nothing elsewhere
        found.append(callback)
    return found, needs


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
    base = models.callbacks_of(model).Callback
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

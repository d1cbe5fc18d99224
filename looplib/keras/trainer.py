"""Trainer and evaluator of a compiled Keras model, of either family."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.base.messages import join_names, shown, whole_number
from looplib.compat import keras as _keras
from looplib.compat import patches
from looplib.compat.tensorflow import not_converted
from looplib.data.arrays import is_of
from looplib.data.context import InputContext
from looplib.errors import DatasetError, ModelError, SettingError, StrategyError
from looplib.keras import means, rows
from looplib.keras.building import build
from looplib.keras.callbacks import KerasCallbacks
from looplib.keras.data import KerasData
from looplib.keras.losses import part_of_batch
from looplib.keras.new_rows import NewRows, Predictor, check
from looplib.keras.results import BatchLogs, KerasResults
from looplib.loop.loops import loops_of
from looplib.task.state import state_of_model, variables_of
from looplib.task.trainer import Adapter, Evaluator, Exported, Trainer, of_model

_ELSEWHERE = {  # arguments that have another place: of `fit`, and of `GradientTrainer`
    "phases": "phases are a setting of looplib.GradientTrainer, whose step takes the trained variables of each phase",
    "batch_size": "looplib.RunConfig has it as global_batch_size",
    "epochs": "controller.train and train_and_evaluate take epochs",
    "steps_per_epoch": "an epoch is a pass over the data; controller.train takes steps",
    "initial_epoch": "a run with a model_dir continues where it was",
    "validation_split": "divide the arrays, and give the held-out part as validation_data",
    "validation_freq": "controller.train_and_evaluate takes eval_interval, in steps",
    "validation_steps": "controller.train_and_evaluate takes eval_steps",
    "workers": "a PyDataset takes workers when it is made, which looplib then reads batches by",
    "use_multiprocessing": "looplib reads in threads: give a PyDataset workers, or write the data to files of records",
    "max_queue_size": "looplib reads ahead by itself",
    "run_eagerly": "looplib.RunConfig has loop='eager'",
    "steps_per_execution": "looplib.RunConfig has steps_per_loop",
    "jit_compile": "looplib.RunConfig has loop='xla'",
    "micro_batches": "looplib.GradientTrainer has it",
    "validation_batch_size": "looplib.RunConfig has global_batch_size",
    "verbose": "the writers of the Controller show the progress",
}


class KerasTrainer(Adapter, Trainer):
    """Trains a compiled Keras model, with its losses, metrics, weights and `train_step`, as `fit` does.

    Build the model, compile it and build the trainer under `strategy.scope()`. What differs from `fit` is in
    docs/from_keras_differences.md.

    Args:
      model: a compiled model of Keras 3 or tf_keras: functional, sequential, or a subclass with its own `train_step` or
        `compute_loss`.
      x: an array or a structure of arrays; or a `tf.data.Dataset` of global batches, or a function that makes one or a
        generator of them; or a `PyDataset`, or a loader of batches with a length; or an object that gives one example
        by number. Elements are inputs, (inputs, targets) or (inputs, targets, sample weights).
      y: array or structure of arrays, for arrays as x.
      sample_weight: array or structure of arrays, for arrays as x.
      class_weight: dict from class number to weight.
      validation_data: (x, y), (x, y, sample_weight) or a data set of global batches, for `evaluator()`.
      shuffle: whether each epoch has an order of its own; for arrays, examples by number, and batches of a `PyDataset`.
      callbacks: Keras callbacks that observe epochs or set the learning rate.
      observes_batches: says that what `callbacks` do for batches of the training is only to observe: they neither read
        nor write the weights. They are called for each batch, with its logs, once the epoch has ended; on one replica.
      per_replica: bool, whether each replica may compute the loss of its own examples alone also where that
        differs from their part in the loss of the global batch, such as a contrastive loss. By default it is refused.
      **others: refused, with the place that an argument of `fit` has.

    Raises:
      UsageError: for a model that is not compiled, data that does not fit together, a callback that cannot work, or, on
        several replicas, a loss that is no mean over examples.

    Example:
        ```python
        trainer = looplib.KerasTrainer(model, x, y, validation_data=(x_test, y_test))
        controller = looplib.Controller(
            looplib.RunConfig(global_batch_size=32), trainer=trainer, evaluator=trainer.evaluator()
        )
        controller.train_and_evaluate(epochs=5)
        ```
    """

    batches, base_initialized = "global", False

    def __init__(
        self,
        model: Any,
        x: Any,
        y: Any = None,
        *,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
        validation_data: Any = None,
        shuffle: bool = True,
        callbacks: Sequence[Any] = (),
        observes_batches: bool = False,
        per_replica: bool = False,
        **others: Any,
    ) -> None:
        _refuse("KerasTrainer", others)
        if not _keras.is_model(model) or getattr(model, "optimizer", None) is None:
            found = "a model that is not compiled" if _keras.is_model(model) else repr(model)
            raise ModelError(f"KerasTrainer got {found}; expected a Keras model after model.compile(optimizer, loss)")
        _keras.refuse_limits(model)
        if isinstance(model.distribute_strategy, tf.distribute.ParameterServerStrategy):
            raise StrategyError(
                "KerasTrainer does not run on parameter servers; use another strategy, or write a Trainer"
            )
        self.model, self.optimizer, self.base_initialized = model, model.optimizer, True
        self._keras_batch_logs = BatchLogs() if observes_batches else None
        self._keras_callbacks = KerasCallbacks(model, callbacks, self._keras_batch_logs) if callbacks else None
        self._keras_columns = list(x) if is_of(x, "pandas", "DataFrame") else None
        self._keras_data = KerasData(model, x, y, sample_weight, class_weight)
        self._keras_shuffle = shuffle
        self._keras_validation = validation_data
        self.batch_size_varies = self._keras_data.is_of_examples  # few examples may be less than a batch
        build(model, self._keras_data, trains=True)
        self.uneven_parts = per_replica
        several = model.distribute_strategy.num_replicas_in_sync > 1
        if several:
            patches.synchronize(model)
        if several and not per_replica:
            sample = self._keras_data.sample(means.EXAMPLES)
            means.check(model, sample, self._keras_callbacks.begin if self._keras_callbacks else None)
            self.uneven_parts = len(set(rows.sizes(sample))) > 1  # each part is divided by its own, which was tried
        self.metrics = [*model.metrics, *_keras.unlisted_metrics(model)]
        held = {id(variable) for _, variable in variables_of(state_of_model(model))}
        self.callback_state = [one for one in _keras.untracked_variables(callbacks) if id(one) not in held]
        self._keras_results = KerasResults(model, "train_step", self._keras_batch_logs)
        self._keras_predictor = Predictor(model)

    def evaluator(
        self, x: Any = None, y: Any = None, sample_weight: Any = None, *, predict_data: Any = None,
        predict_ids: Any = None,
    ) -> "KerasEvaluator":  # fmt: skip
        """Returns an evaluator of the model with its compiled loss and metrics.

        With `predict_data` alone, it can only predict.

        Args:
          x: as for the trainer; default the trainer's `validation_data`.
          y: as for the trainer.
          sample_weight: as for the trainer.
          predict_data: what `Controller.predict` and `--mode=predict` predict for, as the trainer's x, without targets;
            default the evaluation data.
          predict_ids: for arrays as predict_data, an array of a whole number or text for each row, which records have
            as "id"; or the name of a column of a dict or `DataFrame`, which the model then does not get.

        Raises:
          UsageError: without data, or for data that does not fit together or to the model.
        """
        if x is None and self._keras_validation is None and predict_data is None:
            raise DatasetError(
                "KerasTrainer.evaluator() has no data; give it x and y, or give the trainer validation_data, or give "
                "predict_data to predict alone"
            )
        if predict_data is None and predict_ids is not None:
            raise DatasetError("KerasTrainer.evaluator() got predict_ids without predict_data; give both")
        data = (x, y, sample_weight)
        if x is None and self._keras_validation is not None:
            data = _as_arguments(self._keras_validation)
        data = (self._in_order(data[0]), *data[1:])
        new_rows = None
        if predict_data is not None:
            new_rows = NewRows(self.model, self._in_order(predict_data, predict_ids), predict_ids)
            check(new_rows)
        return KerasEvaluator(self.model, *data, uneven_parts=self.uneven_parts, new_rows=new_rows)

    def predict(
        self, x: Any, batch_size: int | None = None, verbose: Any = 0, steps: int | None = None, **others: Any
    ) -> Any:
        """Returns what the model predicts for all rows, in their order: numpy arrays, as `model.predict` does.

        The batch size, the replicas and the state of normalizations are those of an evaluation of the training.

        Args:
          x: inputs, as for the trainer; targets beside them in a data set are not used.
          batch_size: examples of a step over all replicas; default that of the controller, or 32 for each
            replica where there is none.
          verbose: 1 or "auto" shows a progress bar, 2 a line at the end, 0 nothing, as in Keras.
          steps: how many batches; default all.
          **others: refused.

        Raises:
          UsageError: for data that does not fit together or to the model, or outputs that make no arrays.
        """
        _refuse("KerasTrainer.predict", others)
        for name, value in (("batch_size", batch_size), ("steps", steps)):
            if value is not None:
                whole_number(name, value)
        verbose = 1 if verbose == "auto" else verbose
        return self._keras_predictor.predict(self._in_order(x), loops_of(self), batch_size, steps, verbose)

    def _in_order(self, x: Any, ids: Any = None) -> Any:
        """Returns a table with its columns in the order of the training's, which names say; other data as it is."""
        if self._keras_columns is None or not is_of(x, "pandas", "DataFrame"):
            return x
        wanted = [*self._keras_columns, *([ids] if isinstance(ids, str) and ids in x else [])]
        if len(wanted) != len(list(x)) or set(wanted) != set(x):
            raise DatasetError(
                f"KerasTrainer was given a DataFrame with the columns {join_names([*map(repr, wanted)], most=6)}, and "
                f"now gets one with {join_names([*map(repr, x)], most=6)}; give the columns of the training"
            )
        return x[wanted]

    @property
    def own_actions(self) -> Sequence[Callable[[Any], object]]:
        """See `Adapter`."""
        return [self._keras_callbacks] if self._keras_callbacks else []

    def own_steps_per_loop(self, global_batch_size: int | None, of_epoch: bool = False) -> int | None:
        """See `Adapter`: an epoch, which callbacks need too, if its length is known or asked for."""
        if not global_batch_size:
            return None
        steps = self._keras_data.steps_per_epoch(global_batch_size, of_epoch or self._keras_callbacks is not None)
        if self._keras_batch_logs is not None:
            self._keras_batch_logs.steps = steps or 1
        return steps

    @property
    def report_arrays(self) -> dict[str, np.ndarray]:
        """See `ReportsArrays`."""
        return self._keras_results.arrays

    def dataset(self, context: InputContext, /) -> tf.data.Dataset:
        """See `Trainer`."""
        count = self.model.distribute_strategy.num_replicas_in_sync
        _keras.check_stateful_batch(self.model, context.global_batch_size / count)
        if not self.batch_size_varies:
            self._keras_data.check_size(context.global_batch_size)
        return self._keras_data.training(context, self._keras_shuffle)

    @not_converted
    def step_fn(self, inputs: Any, /) -> dict[str, Any]:
        """See `Trainer`."""
        with part_of_batch():
            return self._keras_results.of_step(self._keras_data.whole(inputs), self.global_step)

    def export(self) -> Exported:
        """See `Trainer`; of a `Distiller`, its student."""
        return of_model(type(self).__name__, _keras.served(self.model))

    def loop_end(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """See `Trainer`: gives metrics the names and values that they have in `fit`."""
        return self._keras_results.finished(metrics)


class KerasEvaluator(Evaluator):
    """Evaluates a compiled Keras model as `model.evaluate` does; see `KerasTrainer.evaluator`.

    Args:
      model: the compiled model.
      x: as for `KerasTrainer`, and so are the others; None for an evaluator that only predicts.
      y: the targets.
      sample_weight: the weights of the examples.
      uneven_parts: see `Trainer`.
      new_rows: what it predicts for; None for the data that it evaluates on.
    """

    batches = "global"

    def __init__(
        self, model: Any, x: Any, y: Any = None, sample_weight: Any = None, *, uneven_parts: bool = False,
        new_rows: NewRows | None = None,
    ) -> None:  # fmt: skip
        _keras.refuse_limits(model)
        self.model, self.uneven_parts, self.predicts_only = model, uneven_parts, x is None
        if x is None:
            self._keras_data = new_rows.data
        else:
            self._keras_data = KerasData(model, x, y, sample_weight, None)
            build(model, self._keras_data, trains=False)
        self._keras_rows = new_rows or NewRows(model, self._keras_data)
        self.metrics, self._keras_results = list(model.metrics), KerasResults(model, "test_step")

    @property
    def report_arrays(self) -> dict[str, np.ndarray]:
        """See `ReportsArrays`."""
        return self._keras_results.arrays

    def dataset(self, context: InputContext, /) -> tf.data.Dataset:
        """See `Evaluator`."""
        return self._keras_data.evaluation(context)

    @not_converted
    def step_fn(self, inputs: Any, /) -> dict[str, Any]:
        """See `Evaluator`."""
        if self.predicts_only:
            return {}
        with part_of_batch():
            return self._keras_results.of_step(self._keras_data.whole(inputs))

    def predict_dataset(self, context: InputContext) -> tf.data.Dataset:
        """See `Evaluator`."""
        return self._keras_rows.data.evaluation(context)

    @not_converted
    def predict_fn(self, inputs: Any, /) -> dict[str, Any]:
        """See `Evaluator`: what `model.predict` gives, as `prediction`; several outputs by their names or numbers."""
        return self._keras_rows.predict_fn(inputs)

    def predict_checksum(self) -> str:
        """See `Evaluator`."""
        return self._keras_rows.data.checksum()

    def export(self) -> Exported:
        """See `Evaluator`; of a `Distiller`, its student."""
        return of_model(type(self).__name__, _keras.served(self.model), self.averages)

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """See `Evaluator`: the metrics are shared with the training, which gets its own values back."""
        for metric in self.metrics:
            metric.reset_state()
        return super().evaluating()

    def loop_end(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """See `Evaluator`: gives metrics the names and values that they have in `fit`."""
        return self._keras_results.finished(metrics)


def _refuse(who: str, others: Mapping[str, Any]) -> None:
    """Raises `UsageError` for arguments that `who` does not take."""
    for name, value in others.items():
        cure = _ELSEWHERE.get(name, "leave it out: docs/from_keras_differences.md says what differs from Keras")
        raise SettingError(f"{who} got {name}={shown(value)}, which it does not take; {cure}")


def _as_arguments(data: Any) -> tuple:
    """Returns validation data as the arguments x, y and sample_weight; raises `UsageError` for a list of batches."""
    of_batches = isinstance(data, list) and data and all(type(part) is tuple for part in data)
    if of_batches or (isinstance(data, (tuple, list)) and not 0 < len(data) <= 3):
        what = "a list of tuples" if of_batches else f"a {type(data).__name__} of {len(data)} parts"
        raise DatasetError(
            f"validation_data is {what}; expected (x, y), (x, y, sample_weight), or a data set of batches: give a "
            "tf.data.Dataset, or a function that makes a generator of them, such as lambda: iter(batches)"
        )
    return tuple(data) if isinstance(data, (tuple, list)) else (data,)

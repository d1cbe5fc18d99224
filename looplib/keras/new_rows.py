"""Predictions of a Keras model for data that needs no targets."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.base.messages import gist, join_names
from looplib.cluster.collectives import Workers
from looplib.cluster.updates import Share
from looplib.compat import keras as _keras
from looplib.compat.tensorflow import converted, nodes_in
from looplib.config.run_config import RunConfig
from looplib.data.arrays import is_of
from looplib.data.context import InputContext
from looplib.data.pipelines import Pipelines
from looplib.data.records.reading import structure_of
from looplib.errors import DatasetError, EmptyDataError, EndlessDataError, PredictionError, StaleTraceError
from looplib.keras.building import trace
from looplib.keras.data import KerasData
from looplib.loop.loops import Loops
from looplib.loop.step import raise_refusal
from looplib.loop.step_checks import TracedValues

_DEFAULT_OF_REPLICA = 32  # examples, as in Keras on one
_NO_ROWS = "there are 0 rows to predict for; check where they are read from"
_ENDLESS = "the rows to predict for never end; leave out repeat()"
_CAST = ("SrcT", "DstT")  # the types of an op that converts numbers
ConcreteFunction = tf.types.experimental.ConcreteFunction


class NewRows:
    """The rows that a model predicts for, of which targets and weights are not used; the `PipelineTask` of `predict`.

    Args:
      model: the model.
      x: as for `KerasTrainer`, or a `KerasData`.
      ids: for arrays, an array of a whole number or text for each row, which records have as "id"; or the name of a
        column of a dict or `DataFrame`, which the model then does not get; or None.

    Raises:
      UsageError: for data that does not fit together.
    """

    batches, batch_size_varies, uneven_parts = "global", True, False

    def __init__(self, model: Any, x: Any, ids: Any = None) -> None:
        self.model = model
        self._id = ids if isinstance(ids, str) else None if ids is None else "id"
        if isinstance(ids, str) and is_of(x, "pandas", "DataFrame"):
            self._check_known(list(x))
            x, ids = x.drop(columns=ids), x[ids]
        self._is_column = isinstance(ids, str)
        self.data = x if isinstance(x, KerasData) else _data_of(model, x)
        if self._is_column:
            columns = self._parts(self.data.spec(1))[0]
            columns = columns if isinstance(columns, Mapping) else {}
            self._check_known(columns)
            _check_ids(columns[self._id])
        elif ids is not None:
            self._add(ids)

    def _check_known(self, columns: Iterable[Any]) -> None:
        """Raises `UsageError` for rows without the column of ids."""
        if self._id not in columns:
            found = join_names([repr(name) for name in columns]) or "no columns"
            raise DatasetError(
                f"predict_ids is {self._id!r}, and the rows have {found}; expected a dict of columns or a DataFrame "
                "with this name"
            )

    def _add(self, ids: Any) -> None:
        """Adds an array of ids to arrays."""
        if not self.data.is_arrays or _keras.preprocessing(self.model) is not None:
            why = "the model has a preprocessor" if self.data.is_arrays else "the rows are a data set"
            raise DatasetError(
                f"predict_ids is a {type(ids).__name__}, and {why}; give the rows as a dict of columns with the ids "
                "among them, and their name as predict_ids"
            )
        if len(ids) != self.data.num_examples:
            raise DatasetError(
                f"predict_ids has {len(ids)} ids, and predict_data {self.data.num_examples} rows; give one for each"
            )
        self.data.add_part(ids)
        _check_ids(self._parts(self.data.spec(1))[1])

    def dataset(self, context: InputContext) -> tf.data.Dataset:
        """See `PipelineTask`."""
        return self.data.evaluation(context, resident=False)

    @tf.autograph.experimental.do_not_convert
    def predict_fn(self, inputs: Any) -> dict[str, Any]:
        """Returns the record of each row of a batch: its id, and the outputs by their names or numbers."""
        found, batch = {}, self._parts(inputs)
        if self._id:
            ids = batch[0][self._id] if self._is_column else batch[1]
            found[self._id] = ids[:, 0] if ids.shape.rank == 2 else ids  # as a column of pandas is
            batch = (self.of_model(inputs),)
        outputs = named(converted(self.model.predict_step)(batch))
        if self._id in outputs:
            raise PredictionError(
                f"the model has an output {self._id!r}, and so are the ids called; give the ids as the key of a dict "
                "of columns that has another name"
            )
        return found | outputs

    def of_model(self, inputs: Any) -> Any:
        """Returns what the model gets of a batch, or of its specs, as x."""
        x = self._parts(inputs)[0]
        return {name: part for name, part in x.items() if name != self._id} if self._is_column else x

    @tf.autograph.experimental.do_not_convert
    def predict_step(self, inputs: Any) -> Any:
        """Returns what the model predicts for a batch."""
        return converted(self.model.predict_step)(self._parts(inputs))

    def _parts(self, inputs: Any) -> tuple:
        batch = self.data.whole(inputs)
        return batch if isinstance(batch, tuple) else (batch,)


def _data_of(model: Any, x: Any) -> KerasData:
    """Returns the rows to predict for; raises `UsageError` for a path, or where there are none."""
    if isinstance(x, (str, bytes, os.PathLike)):
        raise DatasetError(f"the rows to predict for are {x!r:.100}; read the file, and give arrays or a data set")
    data = KerasData(model, x, None, None, None)
    if data.cardinality == 0:
        raise EmptyDataError(_NO_ROWS)
    return data


def named(outputs: Any, name: str = "") -> dict[str, Any]:
    """Returns the outputs of a model by their names or numbers: one alone as "prediction", nested ones joined by "_".

    Raises:
      UsageError: for two outputs of one name.
    """
    if not isinstance(outputs, (Mapping, list, tuple)):
        return {name or "prediction": outputs}
    is_mapping = isinstance(outputs, Mapping)
    prefix = f"{name}_" if name else "" if is_mapping else "prediction_"
    found: dict[str, Any] = {}
    for key, part in outputs.items() if is_mapping else enumerate(outputs):
        for one, value in named(part, f"{prefix}{key}").items():
            if one in found:
                raise PredictionError(f"two outputs of the model are called {one!r} in records; rename one")
            found[one] = value
    return found


def _check_ids(ids: tf.TypeSpec) -> None:
    """Raises `UsageError` for what cannot be the ids of rows, by its spec."""
    dense = isinstance(ids, tf.TensorSpec)
    shape = ids.shape[1:] if dense and ids.shape.rank else None
    if shape is None or shape.as_list() not in ([], [1]) or not (ids.dtype.is_integer or ids.dtype == tf.string):
        kind = f"{ids.dtype.name} of shape {ids.shape}" if dense else type(ids).__name__
        raise DatasetError(f"the ids of rows are {kind}; expected a whole number or a text for each row")


def _fitting(rows: NewRows, spec: Any, make: Callable[[], ConcreteFunction]) -> ConcreteFunction:
    """Traces a prediction; raises `UsageError` for rows, by the spec of a batch, that the model does not take."""
    try:
        traced = make()
        for node in nodes_in(traced.graph.as_graph_def()):
            if node.op == "Cast" and tf.string in (kinds := [tf.as_dtype(node.attr[name].type) for name in _CAST]):
                raise TypeError(f"{kinds[0].name} is no {kinds[1].name}")  # which TensorFlow finds in the first step
    except Exception as error:
        raise_refusal(error)
        raise PredictionError(
            f"the model does not take the rows to predict for, which are {structure_of(rows.of_model(spec))}: "
            f"{gist(error)}; give arrays, columns or batches like the inputs that it was trained on"
        ) from error
    return traced


class Predictor:
    """Predicts for all rows of some data at once, as `Model.predict` does, and keeps what it has traced.

    Args:
      model: the model.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._strategy = model, model.distribute_strategy
        self._traced: dict[str, tf.types.experimental.GenericFunction] = {}  # by the structure of a batch
        self._values: TracedValues | None = None  # those of the model in Python, when it was traced first
        self._rows: NewRows | None = None  # while they are predicted for

    def _on_replicas(self, inputs: Any) -> Any:
        return self._strategy.run(self._on_replica, args=(inputs,))

    @tf.autograph.experimental.do_not_convert
    def _on_replica(self, inputs: Any) -> tuple[tf.Tensor, Any]:
        """Returns whether the replica has rows, and the outputs for them."""
        share = inputs if isinstance(inputs, Share) else Share(inputs, tf.constant(1), tf.constant(1))
        return share.examples > 0, self._rows.predict_step(share.inputs)

    def predict(self, x: Any, loops: Loops | None, batch_size: int | None, steps: int | None, verbose: int = 0) -> Any:
        """Returns the outputs for all rows, in their order, as numpy arrays in the structure of the model's outputs.

        Args:
          x: the rows, as for `KerasTrainer`.
          loops: of the training, whose batch size and state they have; None for those of the model alone.
          batch_size: examples of a step over all replicas, which is made up to a multiple of these; None for the
            training's.
          steps: how many batches; None for all.
          verbose: see `KerasTrainer.predict`.
        """
        self._rows = NewRows(self._model, x)
        replicas = self._strategy.num_replicas_in_sync
        config = loops.config if loops else RunConfig()
        size = batch_size or (loops and config.global_batch_size) or _DEFAULT_OF_REPLICA * replicas
        config = dataclasses.replace(config, global_batch_size=-(-size // replicas) * replicas, overfit_batch=False)
        stream = Pipelines(self._strategy, self._rows, config, training=False).distribute()
        if stream.properties.infinite and steps is None:
            raise EndlessDataError(f"{_ENDLESS}, or give steps")
        taken: list[list[tf.Tensor]] = []
        iterator, done = stream.iterate(), 0
        batches = steps or self._rows.data.steps_per_epoch(config.global_batch_size, count=False)
        progress = _keras.module_of(self._model).utils.Progbar(batches, verbose=verbose)
        try:
            with loops.borrowing() if loops else contextlib.nullcontext():
                call = self._on_replicas if config.loop == "eager" else self._function(stream.element_spec)
                while done != steps and stream.has_value(batch := stream.next_as_optional(iterator)):
                    found = call(stream.get_value(batch))
                    done += 1
                    each = zip(*(self._strategy.experimental_local_results(part) for part in tf.nest.flatten(found)))
                    taken += [of for has, *of in Workers(self._strategy).gather_tensors(list(each)) if has]
                    progress.update(done, finalize=False)
                    if loops:
                        loops.evaluated.assign_add(1)
            progress.update(done, finalize=True)
        finally:
            stream.end(iterator)
            self._rows = None
        if not taken:
            raise EmptyDataError(_NO_ROWS)
        return tf.nest.pack_sequence_as(found[1], [_joined(parts) for parts in zip(*taken)])

    def _function(self, batches: Any) -> Callable[[Any], Any]:
        """Returns the function of the batches of all replicas, by their specs; it is traced once for each."""
        try:
            if self._values:
                self._values.check("predict")
        except StaleTraceError:  # constants or functions of the layers are others now
            self._traced, self._values = {}, None
        spec = self._rows.data.spec(1)
        call = self._traced.setdefault(repr(spec), tf.function(self._on_replicas, autograph=False))
        with self._strategy.scope():
            traced = _fitting(self._rows, spec, lambda: call.get_concrete_function(batches))
        self._values = self._values or TracedValues(self, "predict_step")
        return traced


def check(rows: NewRows) -> None:
    """Raises `UsageError` for rows that never end or that the model does not take; traces a prediction."""
    if rows.data.cardinality == tf.data.INFINITE_CARDINALITY:
        raise EndlessDataError(_ENDLESS)
    spec = rows.data.spec(rows.model.distribute_strategy.num_replicas_in_sync)
    _fitting(rows, rows.data.spec(1), lambda: trace(rows.model, rows.predict_fn, spec))


def _joined(parts: tuple[tf.Tensor, ...]) -> np.ndarray:
    if not isinstance(parts[0], tf.Tensor):
        raise PredictionError(
            "the model has an output that is ragged or sparse, which is no numpy array; make it dense, or write "
            "the predictions to files (controller.predict), which may have ragged rows"
        )
    arrays = [part.numpy() for part in parts]
    if parts[0].dtype == tf.bfloat16:  # which numpy does not have
        arrays = [array.astype(np.float32) for array in arrays]
    shapes = {array.shape[1:] for array in arrays}
    if len(shapes) > 1 or not arrays[0].ndim:
        found = join_names([str(shape) for shape in sorted(shapes)], most=3)
        raise PredictionError(
            f"an output of the model has rows of the shapes {found} in different batches, which make no array; pad "
            "them to one length, or write the predictions to files (controller.predict)"
        )
    return np.concatenate(arrays)

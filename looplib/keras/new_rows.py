"""Predictions of a Keras model for data that needs no targets."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.base.messages import join_names
from looplib.compat import keras as _keras
from looplib.compat.tensorflow import converted
from looplib.config.run_config import RunConfig
from looplib.data.context import InputContext
from looplib.errors import DatasetError, PredictionError
from looplib.keras.data import KerasData
from looplib.loop.contracts import Request
from looplib.loop.loops import Loops
from looplib.loop.task_loop import no_batch
from looplib.report.clock import Clock
from looplib.task import reductions
from looplib.task.trainer import Evaluator

_DEFAULT_OF_REPLICA = 32  # examples, as in Keras on one


class NewRows(Evaluator):
    """Predicts for the inputs of some data, as `model.predict` does; targets and weights are not used.

    Args:
      model: the model.
      x: as for `KerasTrainer`.
      ids: for arrays, an array of a whole number or text for each row, which records have as "id"; or the key of a dict
        of columns, which the model then does not get; or None.

    Raises:
      UsageError: for data that does not fit together.
    """

    batches = "global"

    def __init__(self, model: Any, x: Any, ids: Any = None) -> None:
        super().__init__(model)
        self._taken: list[list[Any]] = []  # the outputs of each replica and step
        self._structure: Any = None  # of the outputs, once the step is traced
        self._id = ids if isinstance(ids, str) else None if ids is None else "id"
        self._is_column = isinstance(ids, str)
        if isinstance(x, (str, bytes, os.PathLike)):
            raise DatasetError(f"the rows to predict for are {x!r:.100}; read the file, and give arrays or a data set")
        self._data = KerasData(model, x, None, None, None)
        if ids is None or self._is_column:
            return
        if not self._data.is_arrays or _keras.preprocessing(model) is not None:
            why = "the model has a preprocessor" if self._data.is_arrays else "the rows are a data set"
            raise DatasetError(
                f"predict_ids is a {type(ids).__name__}, and {why}; give the rows as a dict of columns with the ids "
                "among them, and its key as predict_ids"
            )
        if len(ids) != self._data.num_examples:
            raise DatasetError(
                f"predict_ids has {len(ids)} ids, and predict_data {self._data.num_examples} rows; give one for each"
            )
        self._data = KerasData(model, x, ids, None, None)

    def dataset(self, context: InputContext) -> tf.data.Dataset:
        """See `Evaluator`."""
        return self._data.evaluation(context)

    def predict_checksum(self) -> str:
        """See `Evaluator`."""
        return self._data.checksum()

    @tf.autograph.experimental.do_not_convert
    def predict_fn(self, inputs: Any) -> dict[str, Any]:
        """See `Evaluator`: the ids, and the outputs by their names or numbers."""
        x, *others = self._parts(inputs)
        found = {}
        if self._is_column:
            if not isinstance(x, Mapping) or self._id not in x:
                names = join_names([repr(name) for name in x]) if isinstance(x, Mapping) else type(x).__name__
                raise DatasetError(
                    f"predict_ids is {self._id!r}, and the rows have {names}; expected a dict of columns with this key"
                )
            found[self._id] = _as_ids(x[self._id])
            x = {name: part for name, part in x.items() if name != self._id}
        elif self._id:
            found[self._id] = _as_ids(others[0])
        outputs = named(converted(self.model.predict_step)((x,)))
        if self._id in outputs:
            raise PredictionError(
                f"the model has an output {self._id!r}, and so are the ids called; give the ids as the key of a dict "
                "of columns that has another name"
            )
        return found | outputs

    def _parts(self, inputs: Any) -> tuple:
        batch = self._data.whole(inputs)
        return batch if isinstance(batch, tuple) else (batch,)

    @tf.autograph.experimental.do_not_convert
    def step_fn(self, inputs: Any) -> dict[str, Any]:
        """See `Evaluator`."""
        self._structure = converted(self.model.predict_step)((self._parts(inputs)[0],))
        outputs = tf.nest.flatten(self._structure)
        if not all(isinstance(output, tf.Tensor) for output in outputs):
            raise PredictionError(
                "the model has an output that is ragged or sparse, which is no numpy array; make it dense, or write "
                "the predictions to files (controller.predict), which may have ragged rows"
            )
        return {"predictions": reductions.each(outputs)}

    def collect(self, outputs: list[dict[str, Any]]) -> None:
        """See `Evaluator`."""
        self._taken += [output["predictions"] for output in outputs]

    def predict(self, loops: Loops | None, batch_size: int | None) -> Any:
        """Returns the outputs for all rows, in their order, as numpy arrays in the structure of the model's outputs.

        Args:
          loops: of the training, whose batch size and state they have; None for those of the model alone.
          batch_size: examples of a step; None for the training's.
        """
        if loops is None:
            strategy = self.model.distribute_strategy
            size = batch_size or _DEFAULT_OF_REPLICA * strategy.num_replicas_in_sync
            loops = Loops(RunConfig(global_batch_size=size), strategy, Clock())
        self.global_batch_size = batch_size
        loops.attach(self)
        loop = loops.prediction_loop("predict", self, 0)
        try:
            with loops.borrowing(loop):
                loop.run(Request(-1), "evaluate")
        finally:
            loop.close()
        if not self._taken:
            raise no_batch("predict", "KerasTrainer")
        return tf.nest.pack_sequence_as(self._structure, [_joined(parts) for parts in zip(*self._taken)])


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


def _as_ids(ids: Any) -> tf.Tensor:
    """Returns ids as `[batch]`; raises `UsageError` for what cannot be ids."""
    kind = f"{ids.dtype.name} of shape {ids.shape}" if isinstance(ids, tf.Tensor) else type(ids).__name__
    if isinstance(ids, tf.Tensor) and ids.shape.rank == 2 and ids.shape[1] == 1:  # as a column of pandas is
        ids = ids[:, 0]
    if not isinstance(ids, tf.Tensor) or ids.shape.rank != 1 or not (ids.dtype.is_integer or ids.dtype == tf.string):
        raise DatasetError(f"the ids of rows are {kind}; expected a whole number or a text for each row")
    return ids


def _joined(parts: tuple[tf.Tensor, ...]) -> np.ndarray:
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

"""The steps of a prediction: an evaluator's `predict_fn` on each batch, and its outputs as records on the host."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.compat.autograph import converted
from looplib.data.input_context import InputContext
from looplib.errors import PredictionError
from looplib.exports.pieces import Record, rows_of
from looplib.loop import example_checksum
from looplib.loop.packing import batch_size
from looplib.task import reductions
from looplib.task.evaluator import Evaluator

Take = Callable[[list[Record], np.ndarray], None]  # gets the records of a step, and a checksum of each example


class Prediction(Evaluator):
    """Predicts for the data of an evaluator.

    Args:
      evaluator: has the data and `predict_fn`.
      take: gets what each step predicts, in the order of the data.

    Attributes:
      outputs: the name, type and shape of each output, once the step is traced.
    """

    def __init__(self, evaluator: Evaluator, take: Take) -> None:
        self._evaluator, self._take = evaluator, take
        self._who = type(evaluator).__name__
        self.batches, self.global_batch_size = evaluator.batches, evaluator.global_batch_size
        self.uneven_parts = evaluator.uneven_parts
        self.outputs: dict[str, str] = {}

    def dataset(self, context: InputContext) -> tf.data.Dataset:
        """See `Evaluator`."""
        return self._evaluator.dataset(context)

    @tf.autograph.experimental.do_not_convert
    def step_fn(self, inputs: Any) -> dict[str, Any]:
        """See `Evaluator`."""
        batch = batch_size(inputs)
        if batch is None:
            raise PredictionError(
                f"{self._who}.dataset has batches without a batch dimension, so no example to predict for"
            )
        parts = self._parts(converted(self._evaluator.predict_fn)(inputs))
        return {"predictions": reductions.each({"examples": _checksums(inputs, batch[1]), "outputs": parts})}

    @tf.autograph.experimental.do_not_convert
    def _parts(self, outputs: Any) -> dict[str, list[tf.Tensor]]:
        """Returns of each output the values, and the row splits where it is ragged."""
        if not isinstance(outputs, dict) or not outputs or not all(isinstance(name, str) for name in outputs):
            raise PredictionError(
                f"{self._who}.predict_fn returned {type(outputs).__name__}; expected a dict from name to a tensor "
                "[batch, ...] with a row for each example"
            )
        parts = {}
        for name, value in sorted(outputs.items()):
            if isinstance(value, tf.SparseTensor):
                raise PredictionError(
                    f"{self._who}.predict_fn returned {name!r} as a sparse tensor; return it dense "
                    "(tf.sparse.to_dense) or ragged (tf.RaggedTensor.from_sparse)"
                )
            value = value if isinstance(value, tf.RaggedTensor) else tf.convert_to_tensor(value)
            shape, dtype = value.shape, value.dtype
            if shape.rank == 0 or not (dtype.is_floating or dtype.is_integer or dtype in (tf.bool, tf.string)):
                raise PredictionError(
                    f"{self._who}.predict_fn returned {name!r} as {dtype.name} of shape {shape}; expected numbers, "
                    "booleans or strings [batch, ...] with a row for each example"
                )
            ragged = isinstance(value, tf.RaggedTensor)
            rest = shape[1:] if shape.rank else "unknown"
            self.outputs[name] = f"{dtype.name}{rest}{' ragged' if ragged else ''}"
            parts[name] = [value.flat_values, *value.nested_row_splits] if ragged else [value]
        return parts

    def collect(self, outputs: list[dict[str, Any]]) -> None:
        """See `Evaluator`."""
        records: list[Record] = []
        examples = []
        for output in outputs:
            of_replica = output["predictions"]
            examples.append(of_replica["examples"].numpy())
            columns = {}
            for name, (values, *splits) in of_replica["outputs"].items():
                columns[name] = rows_of(values.numpy(), [part.numpy() for part in splits])
                if len(columns[name]) != len(examples[-1]):
                    raise PredictionError(
                        f"{self._who}.predict_fn returned {name!r} with {len(columns[name])} rows for a batch of "
                        f"{len(examples[-1])} examples; expected a row for each example"
                    )
            records += [dict(zip(columns, rows)) for rows in zip(*columns.values())]
        self._take(records, np.concatenate(examples))


@tf.autograph.experimental.do_not_convert
def _checksums(inputs: Any, size: tf.Tensor) -> tf.Tensor:
    """Returns a checksum of each example, int64 `[batch]`; zeros on a TPU, which has no op for it."""
    found = None
    if not isinstance(tf.distribute.get_strategy(), tf.distribute.TPUStrategy):
        found = example_checksum.hash_of_each(inputs)
    return tf.zeros([size], tf.int64) if found is None else found

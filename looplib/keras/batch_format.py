"""The structure, the types and the sizes that batches of Python have in common."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.base.messages import gist
from looplib.data.records.reading import without_lists
from looplib.errors import DatasetError
from looplib.keras import rows


class BatchFormat:
    """The structure, the types and the sizes of batches.

    Args:
      who: what they come from.
      first: some of them.
      float_type: the type that floating-point numbers become.

    Raises:
      UsageError: if there is none, or they have no rows.
    """

    def __init__(self, who: str, first: Iterable[Any], float_type: str) -> None:
        self.who, self._float_type = who, float_type
        batches = [without_lists(batch) for batch in first]
        if not batches:
            raise DatasetError(f"{who} has no batch; check where the data is read from")
        self._like = batches[0]
        arrays = [self._arrays(batch) for batch in batches]
        if not all(array.shape for array in arrays[0]):
            raise DatasetError(f"{who} has single examples or numbers; expected batches, whose arrays have a row each")
        sizes = [zip(*(part.shape for part in parts)) for parts in zip(*arrays)]
        shapes = [[dims[0] if len(set(dims)) == 1 else None for dims in each] for each in sizes]
        self.specs = [
            tf.TensorSpec([None, *shape[1:]], tf.string if array.dtype.kind in "SUO" else array.dtype)
            for shape, array in zip(shapes, arrays[0])
        ]
        self.types = [spec.dtype for spec in self.specs]
        self.first_size = arrays[0][0].shape[0]  # the rows of the first batch
        for batch in batches:
            self.flat(batch)  # whose types have to be equal

    def flat(self, batch: Any) -> list[np.ndarray]:
        """Returns the arrays of a batch.

        Raises:
          UsageError: if it is not like the first ones.
        """
        arrays = self._arrays(without_lists(batch))
        found = [f"{array.dtype} {list(array.shape)}" for array in arrays]
        if len(arrays) != len(self.specs) or not all(map(_is_of, arrays, self.specs)):
            known = [f"{spec.dtype.name} {spec.shape.as_list()}" for spec in self.specs]
            raise DatasetError(
                f"{self.who} has a batch of {', '.join(found)}, and its first ones have {', '.join(known)}; give all "
                "batches the same types, and rows of the same shape"
            )
        return arrays

    def packed(self, tensors: Iterable[tf.Tensor]) -> Any:
        """Returns the batch of the tensors of its arrays."""
        parts = iter([tf.ensure_shape(tensor, spec.shape) for tensor, spec in zip(tensors, self.specs)])
        filled = [None if part is None else next(parts) for part in tf.nest.flatten(self._like)]
        return tf.nest.pack_sequence_as(self._like, filled)

    def _arrays(self, batch: Any) -> list[np.ndarray]:
        try:
            tf.nest.assert_same_structure(self._like, batch)
        except (ValueError, TypeError) as error:
            raise DatasetError(
                f"{self.who} has batches of different structures ({gist(error)}); expected (inputs, targets) or the "
                "like of each"
            ) from error
        arrays = [rows.as_array(part, self._float_type) for part in tf.nest.flatten(batch) if part is not None]
        if not all(isinstance(array, np.ndarray) for array in arrays):
            raise DatasetError(
                f"{self.who} has sparse or ragged arrays, which only a tf.data.Dataset has in batches; give one "
                "(tf.data.Dataset.from_generator makes one of a generator)"
            )
        # Integers that TensorFlow would otherwise read where they are, and that a source may overwrite meanwhile.
        return [array if array.dtype.kind == "f" else array.copy() for array in arrays]


def _is_of(array: np.ndarray, spec: tf.TensorSpec) -> bool:
    kind = tf.string if array.dtype.kind in "SUO" else tf.as_dtype(array.dtype)
    return kind == spec.dtype and spec.shape.is_compatible_with(array.shape)

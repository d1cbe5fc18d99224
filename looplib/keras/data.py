"""The data that a Keras model is trained on: arrays, examples by number, or global batches."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from looplib.base.messages import join_names
from looplib.compat import keras
from looplib.data.arrays import OmittedParts, as_arrays, without_lists
from looplib.data.context import InputContext
from looplib.data.loader import LoaderReader
from looplib.data.records.reading import structure_of
from looplib.data.records.sources import items
from looplib.data.rows import SPECS, of_whole
from looplib.errors import BatchSizeError, DatasetError
from looplib.keras import python_data, rows
from looplib.task.plain import checksum_of

_MOST_RESIDENT_BYTES = 2**28  # of arrays that stay on the device
_SINGLE = "the data set of KerasTrainer has single examples; batch it by the global batch size"
_FEW = 32  # examples, to look at
_PATIENCE = 10.0  # seconds between two lines of the log


class KerasData:
    """Inputs, targets and weights of examples.

    Args:
      model: the compiled model.
      x: array, structure of arrays, `tf.data.Dataset`, function that makes one or a generator; or a `PyDataset`, a
        loader of batches, or an object that gives examples by number.
      y: targets, for arrays; or None.
      sample_weight: weights, for arrays; or None.
      class_weight: dict from class number to weight, or None.

    Attributes:
      is_arrays: whether x is arrays.
      is_of_examples: whether looplib makes the batches.

    Raises:
      UsageError: for data that does not fit together.
    """

    def __init__(
        self,
        model: Any,
        x: Any,
        y: Any,
        sample_weight: Any,
        class_weight: Mapping[int, float] | None,
    ) -> None:
        self._float_type, self._preprocess = keras.module_of(model).backend.floatx(), keras.preprocessing(model)
        if x is None:
            raise DatasetError("KerasTrainer got x=None; expected an array, arrays or a tf.data.Dataset of batches")
        if isinstance(x, Iterator):
            raise DatasetError(
                f"KerasTrainer got a {type(x).__name__} as x, which cannot begin again; give the function that makes "
                "it, without calling it"
            )
        self._blanks = OmittedParts(())
        self._generated: LoaderReader | None = None
        python_data.check_sized(x)
        self._batches = python_data.as_batches(x, self._float_type)
        self._examples = x if self._batches is None and python_data.is_numbered(x) else None
        others = self._batches is not None or self._examples is not None
        self.is_arrays = not (others or callable(x) or isinstance(x, tf.data.Dataset))
        self.is_of_examples = self.is_arrays or self._examples is not None
        self._weights = None if class_weight is None else _table(class_weight)
        if sample_weight is not None and class_weight is not None:
            raise DatasetError("KerasTrainer got class_weight and sample_weight; give their product as sample_weight")
        if not self.is_arrays:
            if y is not None or sample_weight is not None:
                raise DatasetError(
                    "KerasTrainer got a data set as x, and y or sample_weight beside it; make the data set's elements "
                    "(x, y) or (x, y, sample_weight)"
                )
            self._given = x
            self._length: int | None = None  # in batches; of examples, their number
            self._counted = False
            self._first_size: int | None = None  # the rows of the first batch, once it is known
            if self._examples is not None:
                self._length = len(x)
                if not self._length:
                    raise DatasetError(f"{type(x).__name__} has no example; check where the data is read from")
                python_data.check_example(type(x).__name__, x[0])
            elif self._batches is not None:
                self._length, self._first_size = self._batches.count, self._batches.first_size
            return
        if y is None and sample_weight is not None:
            raise DatasetError(
                "KerasTrainer got sample_weight and no y, and fit leaves such weights out; give y, or a data set of "
                "(x, None, sample_weight)"
            )
        if y is None and isinstance(x, list) and x and all(type(part) is tuple for part in x):
            raise DatasetError(
                "KerasTrainer got a list of tuples as x; expected arrays as x and y, or a function that makes a "
                "generator of batches, such as lambda: iter(batches)"
            )
        parts = (x,) if y is None else (x, y) if sample_weight is None else (x, y, sample_weight)
        self._arrays = tuple(as_arrays(part, self._float_type, "KerasTrainer") for part in parts)
        lengths = {array.shape[0] if array.shape else None for array in tf.nest.flatten(self._arrays)}
        if len(lengths) != 1 or None in lengths:
            found = ", ".join("no" if length is None else str(length) for length in lengths)
            raise DatasetError(
                f"the arrays of KerasTrainer have {found} rows; give x, y and sample_weight equally many, one for each "
                "example"
            )
        (self._length,) = lengths
        if self._weights is not None:
            weighted = self._with_weights(*self._arrays)
            self._arrays = tf.nest.map_structure(
                lambda one: one.numpy() if isinstance(one, tf.Tensor) else one, weighted
            )

    @property
    def num_examples(self) -> int | None:
        """The number of examples of arrays or of a numbered source; None for batches."""
        return self._length if self.is_of_examples else None

    @property
    def cardinality(self) -> int:
        """The number of examples or batches, as tf.data says it."""
        return self._length if self.is_of_examples else int(self._made().cardinality())

    def checksum(self) -> str:
        """Returns a checksum of arrays; "" for other data."""
        return checksum_of(map(np.asarray, tf.nest.flatten(self._arrays))) if self.is_arrays else ""

    def steps_per_epoch(self, global_batch_size: int, count: bool) -> int | None:
        """Returns the number of steps of one pass over all examples; None if it is not known.

        Args:
          global_batch_size: examples of a step.
          count: whether to read the data once, if that tells the number.
        """
        if self.is_of_examples:
            return math.ceil(self._length / global_batch_size)
        if self._length is None:
            self._length = int(self._made().cardinality())
        if count and self._length == tf.data.UNKNOWN_CARDINALITY:
            self._length, self._counted = _count(self._dataset()), True
        return self._length if self._length > 0 else None

    def sample(self, examples: int) -> Any:
        """Returns a batch of a few examples, as the model's step gets it; of arrays, those that differ most."""
        if self.is_arrays:
            return self._preprocessed(rows.take(self._rows_given, rows.varied(self._rows_given, examples)))
        element = next(iter(self._dataset()))
        sizes = [leaf.shape[0] if leaf.shape.rank else None for leaf in tf.nest.flatten(element)]
        if None in sizes:
            raise DatasetError(_SINGLE)
        self._first_size = int(sizes[0])
        if len(set(sizes)) > 1:
            return self.whole(element)  # its rows may belong together
        return rows.take(self.whole(element), range(min(examples, int(sizes[0]))))

    def spec(self, replicas: int) -> Any:
        """Returns the structure of `tf.TypeSpec`s of the batches of one replica.

        Their size is known where the size of the data set's batches is.
        """
        if self.is_arrays:
            return tf.nest.map_structure(rows.spec, self._rows_given if self._preprocess is None else self.sample(1))

        def of_replica(spec: Any) -> Any:
            if not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None:
                return spec
            if spec.shape.rank == 0:
                raise DatasetError(_SINGLE)
            size = spec.shape[0] and math.ceil(spec.shape[0] / replicas)
            return tf.TensorSpec([size, *spec.shape[1:]], spec.dtype)

        return self.whole(tf.nest.map_structure(of_replica, self._dataset().element_spec))

    def whole(self, batch: Any) -> Any:
        """Returns a batch, or its specs, with None where the data has it, which the data sets here leave out."""
        return self._blanks.restore(batch) if self._blanks else batch

    def training(self, context: InputContext, shuffle: bool) -> tf.data.Dataset:
        """Returns the data, epoch after epoch."""
        if self.is_arrays:
            return self._rows(context, shuffle)
        if self._batches is not None:
            return self._mapped(self._batches.dataset(context, shuffle))
        if self._examples is not None:
            return self._mapped(self._of_examples(context, shuffle))
        dataset = self._dataset()
        if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
            return dataset
        context.steps_per_epoch = self.steps_per_epoch(context.global_batch_size, False)
        if self._counted:  # a pass of another length is an error
            dataset = dataset.apply(tf.data.experimental.assert_cardinality(self._length))
        return dataset.repeat()

    def check_size(self, global_batch_size: int) -> None:
        """Raises `UsageError` if the first batch is known to have another size, and is not all of an epoch."""
        size = None if self.is_of_examples else self._first_size
        alone = size is not None and self.steps_per_epoch(global_batch_size, False) == 1
        if size is not None and (size > global_batch_size or (size < global_batch_size and not alone)):
            raise BatchSizeError(
                f"the first batch of KerasTrainer's data has {size} examples, and global_batch_size is "
                f"{global_batch_size}; set global_batch_size={size}, or batch the data by {global_batch_size}; where "
                "sizes vary on purpose, set trainer.batch_size_varies = True"
            )

    def evaluation(self, context: InputContext, resident: bool = True) -> tf.data.Dataset:
        """Returns the data, once; `resident` says whether arrays may stay on the device, where a step gathers rows."""
        if self._examples is not None:
            return self._mapped(self._of_examples(context, False))
        return self._rows(context, False, resident) if self.is_arrays else self._dataset()

    def add_part(self, array: Any) -> None:
        """Adds an array of a row for each example to arrays, such as ids."""
        self._arrays += (as_arrays(array, self._float_type, "KerasTrainer"),)

    @property
    def _rows_given(self) -> Any:
        """The arrays, in the structure of a batch."""
        alone = len(self._arrays) == 1 and not isinstance(self._arrays[0], (list, tuple))  # which would be x and y
        return self._arrays[0] if alone else self._arrays

    def _rows(self, context: InputContext, shuffle: bool, resident: bool = True) -> tf.data.Dataset:
        arrays = self._rows_given
        flat = tf.nest.flatten(arrays)
        dense = resident and all(isinstance(array, np.ndarray) and array.dtype.kind in "biuf" for array in flat)
        if self._preprocess is None and dense and sum(array.nbytes for array in flat) <= _MOST_RESIDENT_BYTES:
            return context.resident(arrays, shuffle=shuffle, whole_epochs=True)
        get = [rows.getter(array) for array in flat]
        ids = context.indices(self._length, shuffle=shuffle, whole_epochs=True)

        def batch(ids: tf.Tensor) -> Any:
            return self._preprocessed(tf.nest.pack_sequence_as(arrays, [of(ids) for of in get]))

        return ids.map(batch, tf.data.AUTOTUNE)

    def _of_examples(self, context: InputContext, shuffle: bool) -> tf.data.Dataset:
        found = context.records(self._examples, shuffle=shuffle, whole_epochs=context.training, block=1)
        return found.map(tf.autograph.experimental.do_not_convert(lambda *parts: self._of_one_type(parts)))

    def _of_one_type(self, parts: tuple) -> Any:
        def cast(part: tf.Tensor) -> tf.Tensor:
            return tf.cast(part, self._float_type) if part.dtype.is_floating else part

        return tf.nest.map_structure(cast, parts if len(parts) > 1 else parts[0])

    def _preprocessed(self, batch: Any) -> Any:
        """Returns a batch as the model's own `fit` gives it to a step."""
        if self._preprocess is None:
            return batch
        return without_lists(self._preprocess(*(batch if isinstance(batch, tuple) else (batch,))))

    def _dataset(self) -> tf.data.Dataset:
        return self._mapped(self._made())

    def _made(self) -> tf.data.Dataset:
        """Returns batches of one pass, as they were given."""
        if self._batches is not None:
            return self._batches.once()
        if self._examples is not None:
            few = items(self._examples, range(min(_FEW, self._length)))
            stacked = _stacked([without_lists(example) for example in few])
            numbers = tf.data.Dataset.range(len(few)).batch(len(few))
            picked = numbers.map(lambda ids: tf.nest.map_structure(lambda part: tf.gather(part, ids), stacked))
            return picked.map(tf.autograph.experimental.do_not_convert(lambda *parts: self._of_one_type(parts)))
        if self._generated is None:
            made = self._given() if callable(self._given) else self._given
            if isinstance(made, tf.data.Dataset):
                return made
            if not isinstance(made, Iterator):
                raise DatasetError(
                    f"the function x of KerasTrainer returned {made!r:.200}; expected a tf.data.Dataset of batches, or "
                    "a generator of batches"
                )
            begun = [made]  # is the first pass
            self._generated = python_data.one_pass(lambda: begun.pop() if begun else self._given(), self._float_type)
        return self._generated.dataset()

    def _mapped(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Makes batches for the model's step of those that were given."""
        if self._preprocess is not None:

            def preprocessed(*parts: Any) -> Any:
                return self._preprocessed(parts if len(parts) > 1 else parts[0])

            dataset = dataset.map(preprocessed, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        if self._weights is not None:
            dataset = dataset.map(self._with_weights)
        spec = dataset.element_spec
        if all(isinstance(part, SPECS) for part in tf.nest.flatten(spec)):
            return dataset

        def without_none(batch: Any) -> tuple:
            self._blanks = OmittedParts(batch)
            return self._blanks.remove(batch)

        return dataset.map(of_whole(without_none, spec))

    @tf.autograph.experimental.do_not_convert
    def _with_weights(self, x: Any, y: Any = None, *others: Any) -> tuple:
        """Adds the weights of the examples' classes to a batch, or to all examples."""
        if y is None or tf.nest.is_nested(y) or any(part is not None for part in others):
            raise DatasetError(
                "class_weight needs (x, y) with class numbers or one-hot vectors as y, and no sample weights; use "
                "sample_weight alone"
            )
        labels = _class_numbers(tf.convert_to_tensor(y), self._weights.size)
        known = tf.logical_and(labels >= 0, labels < self._weights.size)
        weights = tf.gather(self._weights, tf.where(known, labels, 0))
        return x, y, tf.where(known, weights, tf.ones_like(weights))


def _stacked(examples: Sequence[Any]) -> Any:
    """Returns a batch of examples; raises `DatasetError` where they make none."""
    try:
        stacked = tf.nest.map_structure(lambda *each: np.stack([np.asarray(one) for one in each]), *examples)
        if any(part.dtype == object for part in tf.nest.flatten(stacked)):
            raise TypeError("None, or objects")
    except (TypeError, ValueError) as error:
        kinds = list(dict.fromkeys(map(structure_of, examples)))
        raise DatasetError(
            f"the examples of x have the form {join_names(kinds, most=2)}, which make no batch; return "
            "arrays or numbers of one shape from __getitem__, alone or in tuples and dicts: leave out what is None, "
            "and pad what has several lengths"
        ) from error
    return stacked


def _class_numbers(labels: tf.Tensor, classes: int) -> tf.Tensor:
    """Returns the classes that targets mean, as `fit` does: an argmax of vectors, and numbers rounded; int64."""
    rank, width = labels.shape.rank, labels.shape[-1] if labels.shape.rank else 1
    of_vectors = rank is not None and rank > 1 and width != 1
    if rank is None or (of_vectors and rank > 2 and (labels.dtype.is_integer or width is None or width > classes)):
        raise DatasetError(
            f"class_weight of {classes} classes got {labels.dtype.name} targets of shape {labels.shape}, which are not "
            "known to be one-hot vectors; give class numbers a last dimension of 1, one-hot vectors of several "
            "positions as floating-point numbers with a known last dimension, or use sample_weight"
        )

    def of_numbers() -> tf.Tensor:
        numbers = labels if rank < 2 else labels[..., 0]
        return tf.cast(tf.round(numbers) if labels.dtype.is_floating else numbers, tf.int64)

    if of_vectors and width is None:
        return tf.cond(tf.shape(labels)[-1] > 1, lambda: tf.argmax(labels, axis=-1), of_numbers)
    return tf.argmax(labels, axis=-1) if of_vectors else of_numbers()


def _count(dataset: tf.data.Dataset) -> int:
    """Counts the batches of data that does not tell their number, by reading it once."""
    count, told = 0, time.monotonic()
    for _ in dataset.map(lambda *_: 0):
        count += 1
        if time.monotonic() - told > _PATIENCE:
            told = time.monotonic()
            logging.warning(
                "the batches of an epoch are being counted, because the data set of KerasTrainer does not tell their "
                "number: %d so far; tf.data.experimental.assert_cardinality spares that; data that never ends is "
                "trained on by steps, without Keras callbacks", count,
            )  # fmt: skip
    logging.info("an epoch of KerasTrainer has %d batches, counted by reading the data once", count)
    return count


def _table(class_weight: Mapping[int, float]) -> np.ndarray:
    if not class_weight or not all(isinstance(label, (int, np.integer)) and label >= 0 for label in class_weight):
        raise DatasetError(f"class_weight is {class_weight!r}; expected a dict from class number to weight")
    table = np.ones(max(class_weight) + 1, np.float32)
    for label, weight in class_weight.items():
        table[label] = weight
    return table

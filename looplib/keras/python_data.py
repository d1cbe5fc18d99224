"""Batches that Python makes: a `PyDataset`, a loader as PyTorch has them, and what generators give."""

from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any, Protocol, runtime_checkable

import numpy as np
import tensorflow as tf

from looplib.base.messages import shown
from looplib.compat import keras as _keras
from looplib.data import loader
from looplib.data.arrays import LOOKED_AT, BatchFormat, is_array
from looplib.data.context import InputContext
from looplib.data.open_loader import ByNumber
from looplib.data.order import Ids, Locate, OrderKey, Plan
from looplib.errors import DatasetError


@runtime_checkable
class _InProcesses(Protocol):
    """Data that says how many of its batches are read at once, such as a `PyDataset` of Keras 3."""

    workers: int
    use_multiprocessing: bool


def python_batches(context: InputContext, data: Any, *, shuffle: bool = True) -> tf.data.Dataset:
    """Makes the batches of a `PyDataset`, for a task of global batches.

    The pipeline begins at any batch, by its number. For a loader use `context.loader`, and for an object that gives one
    example by number, `context.records`.

        class Classifier(looplib.GradientTrainer):
            batches = "global"

            def dataset(self, context):
                return looplib.python_batches(context, self.py_dataset)

    Args:
      context: the argument of `dataset`.
      data: a `PyDataset` (`Sequence`), whose batches have `context.global_batch_size` examples.
      shuffle: whether each epoch of a training has the batches in an order of its own.

    Returns:
      A `tf.data.Dataset` of batches, in which floating-point numbers are float32.

    Raises:
      UsageError: for other data, or if the batches would not be global ones.
    """
    if not is_py_dataset(data):
        raise DatasetError(
            f"looplib.python_batches got a {type(data).__name__}; expected a PyDataset; use context.loader for a "
            "loader of batches, and context.records for examples by number"
        )
    if not context.global_batches:
        raise DatasetError(
            f"looplib.python_batches makes global batches, of what {type(data).__name__} gives, and the trainer or "
            'evaluator takes those of a replica; set batches = "global" in its class'
        )
    return PyDatasetBatches(data, "float32").dataset(context, shuffle)


def as_batches(data: Any, float_type: str) -> "PyDatasetBatches | LoaderBatches | None":
    """Returns the batches of a `PyDataset` or a loader; None for other data."""
    if is_py_dataset(data):
        return PyDatasetBatches(data, float_type)
    return LoaderBatches(data, float_type) if is_loader(data) and not isinstance(data, tf.data.Dataset) else None


def is_py_dataset(data: Any) -> bool:
    """Returns whether data is a `PyDataset` of Keras 3, or a `Sequence` of tf_keras."""
    return _keras.is_a(data, "utils", "PyDataset") or _keras.is_a(data, "utils", "Sequence")


def is_numbered(data: Any) -> bool:
    """Returns whether data gives examples by number, and is neither arrays nor a structure of them."""
    structures = (list, tuple, str, bytes, Mapping)
    return isinstance(data, ByNumber) and not isinstance(data, structures) and not is_array(data)


def is_loader(data: Any) -> bool:
    """Returns whether data gives batches in passes of one length, and not by number."""
    others = (ByNumber, set, frozenset, Mapping)
    return isinstance(data, Iterable) and isinstance(data, Sized) and not (isinstance(data, others) or is_array(data))


def check_sized(data: Any) -> None:
    """Raises `UsageError` for a loader that does not say how many batches a pass has."""
    of_batches = isinstance(data, Iterable) and not callable(data) and not is_array(data)
    if of_batches and not isinstance(data, Sized) and not is_py_dataset(data):
        kind = type(data).__name__
        raise DatasetError(
            f"{kind} has __iter__ and no __len__, so that its passes and epochs have no known end; give it a __len__ "
            "of the batches of a pass, or give KerasTrainer a function that makes a generator, such as "
            f"lambda: iter(loader) of the {kind}"
        )


def check_example(who: str, example: Any) -> None:
    """Raises `UsageError` for an example with a list of numbers, which may be an array or a structure of numbers."""
    if isinstance(example, Mapping):
        example = tuple(example.values())
    if isinstance(example, list) and example and all(isinstance(part, (int, float)) for part in example):
        raise DatasetError(
            f"{who}.__getitem__ returns a list of numbers, {shown(example)}, which may be an array, or inputs and "
            "targets; return numpy.asarray of each array, in a tuple of inputs and targets"
        )
    for part in example if isinstance(example, (list, tuple)) else ():
        check_example(who, part)


class PyDatasetBatches:
    """The batches of a `PyDataset`.

    Args:
      data: the `PyDataset`.
      float_type: the type that floating-point numbers become.

    Raises:
      UsageError: if their position would not say which batches they are.
    """

    def __init__(self, data: Any, float_type: str) -> None:
        kind = type(data).__name__
        base = _keras.module_of(data).utils.Sequence
        for hook in ("on_epoch_begin", "on_epoch_end"):
            if getattr(type(data), hook, None) is not getattr(base, hook, None):
                raise DatasetError(
                    f"{kind} has {hook}, which changes its batches between epochs, and looplib may begin at any batch "
                    f"of any epoch; leave out {hook}, because KerasTrainer shuffles the batches of each epoch by the "
                    "run's seed, or the examples, if it gets an object whose __getitem__ returns one example; or give "
                    "a function that makes a generator, whose batches are read again and skipped at a resume"
                )
        count = _count(data, base)
        if not count:
            raise DatasetError(
                f"{kind} has no batch, or no end; give it a __len__ or num_batches of an epoch, or give KerasTrainer a "
                "function that makes a generator, and train by steps"
            )
        if isinstance(data, _InProcesses) and data.use_multiprocessing:
            raise DatasetError(
                f"{kind} has use_multiprocessing=True, and looplib reads it in threads of its own process; leave that "
                "out (workers=8 reads 8 batches at once, in the same order), or write the data to files of records, "
                "which are read fast (docs/data.md)"
            )
        self._data, self.count = data, count
        self._at_once = max(1, data.workers) if isinstance(data, _InProcesses) else 1
        self._format = BatchFormat(kind, (data[number] for number in range(min(LOOKED_AT, count))), float_type)
        self.first_size = self._format.first_size

    def dataset(self, context: InputContext, shuffle: bool) -> tf.data.Dataset:
        """Makes the batches of a pipeline of global batches, which begins at any position by itself.

        Args:
          context: the context.
          shuffle: whether each epoch of a training has an order of its own.
        """
        context.refuse_earlier_sizes(
            f"{self._format.who} makes the batches, so that their numbers mean other examples with another size"
        )
        plan = _BatchNumbers(Ids(self.count, shuffle), context.global_batch_size)
        found = context.located(plan, context.order_seed(plan, None))
        chunks, call = context.positions_of(plan, "indices", False, False, 1)
        call.batches = self._read(chunks.map(lambda chunk: found(chunk)[0, 0]))
        return call.batches

    def once(self) -> tf.data.Dataset:
        """Makes the batches of one pass."""
        return self._read(tf.data.Dataset.range(self.count))

    def _read(self, numbers: tf.data.Dataset) -> tf.data.Dataset:
        own = self._format

        def read(number: np.ndarray) -> list[np.ndarray]:
            return own.flat(self._data[int(number) % self.count])

        @tf.autograph.experimental.do_not_convert
        def batch(number: tf.Tensor) -> Any:
            return own.packed(tf.numpy_function(read, [number], own.types))

        parallel = {"num_parallel_calls": self._at_once, "deterministic": True} if self._at_once > 1 else {}
        return numbers.map(batch, **parallel).prefetch(2)


def _count(data: Any, base: type) -> int | None:
    """Returns the batches of an epoch of a `PyDataset`, of a class of Keras's; None if it says none, or no end."""
    if "num_batches" in vars(base):  # of Keras 3, by default the `__len__`
        try:
            return data.num_batches
        except NotImplementedError:
            return None
    return len(data) if isinstance(data, Sized) else None


class LoaderBatches:
    """The batches of a loader, pass after pass.

    Args:
      data: the loader.
      float_type: see `PyDatasetBatches`.
    """

    def __init__(self, data: Any, float_type: str) -> None:
        self._data, self._float_type, self.count = data, float_type, len(data)
        self._pass = one_pass(lambda: data, float_type)
        self.first_size = self._pass.first_size

    def dataset(self, context: InputContext, shuffle: bool) -> tf.data.Dataset:
        """See `PyDatasetBatches`: its passes have the order that it gives them."""
        return loader.read(context, lambda index, count: self._data, "warn", self._float_type)

    def once(self) -> tf.data.Dataset:
        """Makes the batches of one pass."""
        return self._pass.dataset()


def one_pass(make: Callable[[], Any], float_type: str) -> loader.LoaderReader:
    """Returns the reader of one pass of a loader that is made for each."""
    return loader.LoaderReader(make, "all", size=None, training=False, start=0, mismatch="warn", float_type=float_type)


class _BatchNumbers(Plan):
    """The numbers of batches that others make: each example has that of its batch.

    Args:
      order: of the numbers in an epoch.
      batch_size: the examples of a batch.
    """

    chosen_by_batch = True

    def __init__(self, order: Ids, batch_size: int) -> None:
        self.size, self._batch_size, self._order = order.size * batch_size, batch_size, order

    def endless(self, key: OrderKey) -> Locate:
        """See `Plan`."""
        located = self._order.endless(key)
        return lambda positions: located(positions // self._batch_size)

    def once(self) -> Locate:
        """See `Plan`."""
        return lambda positions: positions // self._batch_size

"""Batches of many steps in one element of the iterator, for small steps that would wait for each `next`."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from looplib.data.streams import HostStream

# TensorFlow takes 20 to 50 microseconds for a `next` in a graph, whatever the batch: half of a small step.
# A whole element has to be there before its first step, so that it may not be long where the input is slow.
# A batch is copied out of its element, which costs more than its `next` from about 64 KB on (W1, batches of 16 and 32).
_LONGEST, _BYTES = 20, 2**16  # steps of an element, bytes of a step
_AHEAD = 5  # elements of the longest kind that are read ahead
Rows = Callable[[tf.Tensor], Any]  # from their numbers
_HUNDREDS = 4  # of steps, at most, in an element of ids, which are never slow
_IDS = 2**14  # that such an element has at most, beyond a hundred steps


class _Buffer:
    """The element that was read last, as variables `parts` `[n, ...]`, and how many of its batches are used."""

    def __init__(self, specs: list[tf.TensorSpec]) -> None:
        self.parts = [
            tf.Variable(tf.zeros([0, *spec.shape], spec.dtype), trainable=False, shape=[None, *spec.shape])
            for spec in specs
        ]
        self._used = tf.Variable(0, trainable=False)

    def left(self) -> tf.Tensor:
        """Returns the number of batches that are left, int32 scalar tensor."""
        return tf.shape(self.parts[0])[0] - self._used

    def put(self, parts: list[tf.Tensor], used: int | tf.Tensor = 0) -> None:
        """Replaces the element by another one, some of whose batches have been used."""
        for variable, part in zip(self.parts, parts):
            variable.assign(part)
        self._used.assign(used)

    def rest(self) -> list[tf.Tensor]:
        """Returns the batches that are left, each part `[n, ...]`."""
        used = self._used.read_value()
        return [part.read_value()[used:] for part in self.parts]

    def take(self, count: int) -> list[tf.Tensor]:
        """Returns the next batches, each part `[count, ...]`, and counts them as used."""
        used = self._used.read_value()
        parts = [part.read_value()[used : used + count] for part in self.parts]
        for part, variable in zip(parts, self.parts):
            part.set_shape([count, *variable.shape[1:]])
        self._used.assign(used + count)
        return parts


@dataclasses.dataclass(kw_only=True)
class BlockStream(HostStream):
    """A `HostStream` for one replica whose iterator brings the batches of `block` steps in one element.

    A saved position holds the unused batches of the current element, and the iterator's state behind it.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._buffer = _Buffer(tf.nest.flatten(self.dataset.element_spec))

    @property
    def element_spec(self) -> Any:
        """See `Stream`."""
        if self._spec is None:

            def read() -> None:
                self._spec = tf.nest.map_structure(tf.type_spec_from_value, self.get_value(tf.constant(True)))

            tf.function(read, autograph=False).get_concrete_function()
        return self._spec

    def share(self, stream: "BlockStream") -> None:
        """See `Stream`."""
        self._buffer = stream._buffer

    def _iter(self) -> tf.data.Iterator:
        self._buffer.put([part[:0] for part in self._buffer.parts])
        return iter(self._blocks().prefetch(_AHEAD if self.block == _LONGEST else 1))

    def _blocks(self) -> tf.data.Dataset:
        return self._read_from(self._renewed())

    def _read_from(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """See `HostStream`."""
        return dataset.batch(self.block, drop_remainder=self.properties.infinite)

    def _kind(self) -> tuple:
        return (*super()._kind(), self.block)

    def _skip(self, iterator: tf.data.Iterator) -> None:
        whole, used = divmod(self.skipped, self.block)
        self._read_on(iterator, whole)
        if used and (new := iterator.get_next_as_optional()).has_value():
            parts = tf.nest.flatten(new.get_value())
            self._buffer.put(parts, tf.minimum(used, tf.shape(parts[0])[0]))

    def next_steps(self, iterator: tf.data.Iterator, steps: int) -> Any:
        """See `Stream`."""
        return self._packed(self._next(iterator, steps))

    def next(self, iterator: tf.data.Iterator) -> Any:
        """See `Stream`."""
        return self._one_step(self._next(iterator, 1))

    @tf.autograph.experimental.do_not_convert
    def _next(self, iterator: tf.data.Iterator, count: int) -> list[tf.Tensor]:
        """Returns the next batches, each part `[count, ...]`."""
        buffer, elements = self._buffer, -(-count // self.block)

        def read() -> list[tf.Tensor]:
            new = [tf.nest.flatten(iterator.get_next()) for _ in range(elements)]
            if elements == 1:  # joining would copy it
                parts = tf.cond(buffer.left() > 0, lambda: _joined(buffer.rest(), *new), lambda: new[0])
            else:
                parts = _joined(buffer.rest(), *new)
            buffer.put(parts)
            return buffer.take(count)

        return tf.cond(buffer.left() >= count, lambda: buffer.take(count), read)

    @tf.autograph.experimental.do_not_convert
    def next_as_optional(self, iterator: tf.data.Iterator) -> tf.Tensor:
        """See `Stream`; only looks whether there is a next step, which `get_value` takes."""
        buffer = self._buffer

        def read() -> tf.Tensor:
            new = iterator.get_next_as_optional()

            def put() -> tf.Tensor:
                buffer.put(_joined(buffer.rest(), tf.nest.flatten(new.get_value())))
                return buffer.left() > 0

            return tf.cond(new.has_value(), put, lambda: tf.constant(False))

        return tf.cond(buffer.left() > 0, lambda: tf.constant(True), read)

    @tf.autograph.experimental.do_not_convert
    def has_value(self, optional: tf.Tensor) -> tf.Tensor:
        """See `Stream`."""
        return optional

    @tf.autograph.experimental.do_not_convert
    def get_value(self, optional: tf.Tensor) -> Any:
        """See `Stream`."""
        return self._one_step(self._buffer.take(1))

    def _one_step(self, parts: list[tf.Tensor]) -> Any:
        return self._to_replicas([self._packed([part[0] for part in parts])])

    def _packed(self, parts: list[tf.Tensor]) -> Any:
        return tf.nest.pack_sequence_as(self.dataset.element_spec, parts)

    def position(self, iterator: tf.data.Iterator, batches: int) -> bytes | None:
        """See `Stream`."""
        state = super().position(iterator, batches)
        if state is None or self.loader is not None:
            return state
        rest = [tf.io.serialize_tensor(part) for part in self._buffer.rest()]
        return tf.io.serialize_tensor(tf.stack([*rest, state])).numpy()

    def _is_restored(self, iterator: tf.data.Iterator, position: bytes) -> bool:
        variables = self._buffer.parts
        try:
            *rest, state = tf.unstack(tf.io.parse_tensor(position, tf.string))
            rest = [tf.io.parse_tensor(part, variable.dtype) for part, variable in zip(rest, variables, strict=True)]
            if not all(variable.shape.is_compatible_with(part.shape) for part, variable in zip(rest, variables)):
                raise ValueError("a part has another shape")
        except (tf.errors.OpError, ValueError):  # of a pipeline that is not read in blocks, or changed
            rest, state = [], tf.constant(b"")
        if not super()._is_restored(iterator, state.numpy()):
            return False
        self._buffer.put(rest)
        return True


@dataclasses.dataclass(kw_only=True)
class KeyedStream(BlockStream):
    """A `BlockStream` of ids, which an XLA program computes for many steps at a time, or of the rows that they number.

    Only the specs of `dataset` are used, which describe the rows.

    Attributes:
      draw: returns ids from a number of batches of this pipeline on; see `DatasetCall.draw`.
      rows: returns rows by their numbers; None leaves the ids.
    """

    draw: Callable[[tf.Tensor, int], tf.Tensor]
    rows: Rows | None = None

    def share(self, stream: "KeyedStream") -> None:
        """See `Stream`; the rows stay in the arrays that the first stream was made with."""
        super().share(stream)
        self.rows, self.dataset = stream.rows, stream.dataset

    def _blocks(self) -> tf.data.Dataset:
        draw = tf.function(lambda first: self.draw(first, self.block), jit_compile=True, autograph=False)
        ids = tf.data.Dataset.counter(self.start_step, self.block).map(lambda first: draw(first))
        return ids if self.rows is None else ids.map(self.rows)


def block_size(spec: Any) -> int:
    """Returns how many batches of a spec to read as one element: 1 for large ones and those whose shape varies."""
    specs = tf.nest.flatten(spec)
    if not specs or not all(isinstance(each, tf.TensorSpec) and each.shape.is_fully_defined() for each in specs):
        return 1
    size = sum(math.prod(each.shape) * each.dtype.size for each in specs)
    return _LONGEST if size <= _BYTES else 1


def block_size_of_ids(batch_size: int) -> int:
    """Returns how many batches of ids to draw as one element: 100 to 400, divisible by XLA chunks of 100 steps."""
    return 100 * max(1, min(_HUNDREDS, _IDS // (100 * batch_size)))


def _joined(*elements: list[tf.Tensor]) -> list[tf.Tensor]:
    return [tf.concat(parts, axis=0) for parts in zip(*elements)]

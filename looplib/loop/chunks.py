"""Several steps as one round of the graph loop: unrolled, or compiled by XLA into one program."""

import abc
from typing import Any

import tensorflow as tf

from looplib.loop.base import Iterator
from looplib.loop.step import Step
from looplib.loop.timing import timed

# An XLA program's call costs as much as a small step, so that longer chunks hardly help; nothing stops one under way.
LONGEST, _BYTES = 50, 8 * 2**20


class Chunk(abc.ABC):
    """A number of steps that run as one round of the loop.

    Args:
      step: the step.
      size: number of steps.
    """

    def __init__(self, step: Step, size: int) -> None:
        self.size = size
        self._step = step

    def prepare(self) -> None:
        """Compiles what can be compiled before the first call; raises an error if that is not possible."""

    @abc.abstractmethod
    def run(self, iterator: Iterator) -> tf.Tensor:
        """Does the steps, in a `tf.function`; returns the seconds that they waited for data, float64."""


class Unrolled(Chunk):
    """A chunk whose steps stand one after another in the graph, so that the loop's own ops run once for all of them."""

    def run(self, iterator: Iterator) -> tf.Tensor:
        """See `Chunk`."""
        # Not by adding one to the next: TensorFlow makes temporary variables of that, which clash in nested loops.
        return tf.reduce_sum(tf.stack([do_step(self._step, iterator) for _ in range(self.size)]))


class XlaProgram(Chunk):
    """A chunk that is one XLA program over all its batches. Batches of different shapes run step by step."""

    def __init__(self, step: Step, size: int) -> None:
        super().__init__(step, size)
        self._program: Any = None

    def prepare(self) -> None:
        """Compiles the program; raises one of XLA's errors if the step has an op that XLA lacks."""
        stream = self._step.stream
        program = tf.function(self._steps_of, jit_compile=True)
        self._program = program.get_concrete_function([stream.element_spec] * self.size)
        batch = tf.nest.map_structure(lambda spec: tf.zeros(spec.shape, spec.dtype), stream.full_spec)
        program.experimental_get_compiler_ir([batch] * self.size)(stage="hlo")

    def run(self, iterator: Iterator) -> tf.Tensor:
        """See `Chunk`."""
        batches, seconds = timed(lambda: [self._step.stream.next(iterator) for _ in range(self.size)])
        alike = _alike(batches)
        if alike is None:
            self._program(batches)
        else:
            tf.cond(alike, lambda: self._all_at_once(batches), lambda: self._one_by_one(batches))
        return seconds

    def _all_at_once(self, batches: list) -> int:
        self._program(batches)
        return 0

    def _one_by_one(self, batches: list) -> int:
        for i in tf.range(self.size):
            self._step(tf.switch_case(i, [lambda batch=batch: batch for batch in batches]))
        return 0

    def _steps_of(self, batches: list) -> None:
        """The program: a loop over all batches of the chunk."""
        stacked = tf.nest.map_structure(lambda *parts: tf.stack(parts), *batches)
        for i in tf.range(self.size):
            self._step(tf.nest.map_structure(lambda part, i=i: part[i], stacked))


def do_step(step: Step, iterator: Iterator) -> tf.Tensor:
    """Does one step, in a `tf.function`; returns the seconds that it waited for data, float64."""
    batch, seconds = timed(lambda: step.stream.next(iterator))
    step(batch)
    return seconds


def size_of_chunk(longest: int, step: Step, steps_per_loop: int) -> int:
    """Returns the number of steps for an XLA program: at most `longest`, and leaving few steps of a call over."""
    size = sum(spec.shape.num_elements() * spec.dtype.size for spec in tf.nest.flatten(step.stream.full_spec))
    longest = max(1, min(longest, LONGEST, steps_per_loop, _BYTES // max(1, size)))
    return min(range(longest, longest // 2, -1), key=lambda chunk: steps_per_loop % chunk)


def why_not_xla(step: Step) -> str | None:
    """Returns why no chunk of the step can be an XLA program that computes the same; None if no reason is known."""
    for spec in tf.nest.flatten(step.stream.full_spec):
        if not isinstance(spec, tf.TensorSpec) or not spec.shape.is_fully_defined():
            return f"a batch has {spec}; only tensors with a static shape (except for the batch size) can be stacked"
    for node in step.ops:
        if node.op == "TensorListResize" or node.attr["resize_if_index_out_of_bounds"].b:
            return f"{node.name} makes a tf.TensorArray grow, which XLA does not; give it its size"
    if any(spec.dtype == tf.string for spec in tf.nest.flatten(step.reducer.collects)):
        return "looplib.text shows strings, which XLA does not have; give it token ids with decode=<function>"
    return None


def _alike(batches: list) -> tf.Tensor | None:
    """Returns whether batches have the same shapes, boolean scalar tensor; None if the shapes are static."""
    alike = []
    for parts in zip(*(tf.nest.flatten(batch) for batch in batches)):
        if not parts[0].shape.is_fully_defined():
            shapes = tf.stack([tf.shape(part) for part in parts])
            alike.append(tf.reduce_all(shapes == shapes[0]))
    return tf.reduce_all(tf.stack(alike)) if alike else None

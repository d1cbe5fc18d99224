"""Several steps as one round of the graph loop: unrolled, or compiled by XLA into one program."""

import abc
from typing import Any

import tensorflow as tf

from looplib.compat import tensorflow as _tf
from looplib.loop import one_program
from looplib.loop.base import Iterator
from looplib.loop.one_program import OneProgram
from looplib.loop.step import Step
from looplib.loop.timing import timed

# An XLA program's call costs as much as a small step, so that longer chunks hardly help; nothing stops one under way.
LONGEST, _BYTES, _COPIED = 100, 8 * 2**20, 2**20


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
        stream = self._step.stream
        if stream.block >= self.size and self._step.strategy.num_replicas_in_sync == 1:
            batches, seconds = timed(lambda: stream.next_steps(iterator, self.size))
            for i in range(self.size):
                self._step(_at(batches, i))
            return seconds
        # Not by adding one to the next: TensorFlow makes temporary variables of that, which clash in nested loops.
        return tf.reduce_sum(tf.stack([do_step(self._step, iterator) for _ in range(self.size)]))


class XlaProgram(Chunk):
    """A chunk that is one XLA program over all its batches. Batches of different shapes run step by step."""

    def __init__(self, step: Step, size: int) -> None:
        super().__init__(step, size)
        self._replicas = step.strategy.num_replicas_in_sync
        self._program: Any = None

    def prepare(self) -> None:
        """Compiles the program; raises one of XLA's errors if the step has an op that XLA lacks."""
        stream = self._step.stream
        batches: Any = [stream.replica_spec] * self.size * self._replicas
        full: Any = [stream.full_spec] * self.size * self._replicas
        if stream.block > 1:
            batches = full = tf.nest.map_structure(self._stacked, stream.replica_spec)
        program = tf.function(self._steps_of, jit_compile=True)
        if self._replicas > 1:
            together = OneProgram(self._steps_of, batches, self._step.strategy)
            self._program, program = together.run, together.program
        else:
            self._program = program.get_concrete_function(batches)
        zeros = tf.nest.map_structure(lambda spec: tf.zeros(spec.shape, spec.dtype), full)
        program.experimental_get_compiler_ir(zeros)(stage="hlo")

    def _stacked(self, spec: tf.TensorSpec) -> tf.TensorSpec:
        return tf.TensorSpec([self.size * self._replicas, *spec.shape], spec.dtype)

    def run(self, iterator: Iterator) -> tf.Tensor:
        """See `Chunk`."""
        stream = self._step.stream
        if stream.block > 1:
            batches, seconds = timed(lambda: stream.next_steps(iterator, self.size))
            self._program(batches)
            return seconds
        batches, seconds = timed(lambda: self._next(iterator))
        alike = _alike(batches)
        if alike is None:
            self._program(batches)
        else:
            tf.cond(alike, lambda: self._all_at_once(batches), lambda: self._one_by_one(batches))
        return seconds

    @tf.autograph.experimental.do_not_convert
    def _next(self, iterator: Iterator) -> list:
        """Returns the batches of the steps, one after the other those of each step's replicas."""
        replicas = self._step.strategy.experimental_local_results
        batches = []
        for _ in range(self.size):
            batch = self._step.stream.next(iterator)
            parts = zip(*(replicas(leaf) for leaf in tf.nest.flatten(batch)))
            batches += [tf.nest.pack_sequence_as(batch, part) for part in parts]
        return batches

    def _all_at_once(self, batches: list) -> int:
        self._program(batches)
        return 0

    def _one_by_one(self, batches: list) -> int:
        for i in tf.range(self.size):
            steps = [batches[first : first + self._replicas] for first in range(0, len(batches), self._replicas)]
            self._do_step(tf.switch_case(i, [lambda step=step: step for step in steps]))
        return 0

    def _steps_of(self, batches: Any) -> None:
        """The program: a loop over all batches of the chunk."""
        stacked = batches
        if self._step.stream.block == 1:
            stacked = tf.nest.map_structure(lambda *parts: tf.stack(parts), *batches)
        for i in tf.range(self.size):
            self._do_step([_at(stacked, i * self._replicas + replica) for replica in range(self._replicas)])

    @tf.autograph.experimental.do_not_convert
    def _do_step(self, batches: list) -> None:
        """Does one step with the batches of its replicas."""
        to_replicas = self._step.strategy.experimental_distribute_values_from_function
        several = len(batches) > 1
        self._step(to_replicas(lambda context: batches[context.replica_id_in_sync_group]) if several else batches[0])


def _at(batches: Any, i: int | tf.Tensor) -> Any:
    return tf.nest.map_structure(lambda part: part[i], batches)


def do_step(step: Step, iterator: Iterator) -> tf.Tensor:
    """Does one step, in a `tf.function`; returns the seconds that it waited for data, float64."""
    batch, seconds = timed(lambda: step.stream.next(iterator))
    step(batch)
    return seconds


def size_of_chunk(longest: int, step: Step, steps_per_loop: int) -> int:
    """Returns the number of steps for an XLA program: at most `longest`, and leaving few steps of a call over."""
    specs = tf.nest.flatten(step.stream.full_spec) * step.strategy.num_replicas_in_sync
    size = sum(spec.shape.num_elements() * spec.dtype.size for spec in specs)
    # More than an element costs a copy, and where the data ends it is not sure that they are there.
    in_one = 1 < step.stream.block and (not step.stream.infinite or size * step.stream.block > _COPIED)
    most = step.stream.block if in_one else _BYTES // max(1, size)
    longest = max(1, min(longest, LONGEST, steps_per_loop, most))
    return min(range(longest, longest // 2, -1), key=lambda chunk: steps_per_loop % chunk)


def why_not_xla(step: Step) -> str | None:
    """Returns why no chunk of the step can be an XLA program that computes the same; None if no reason is known."""
    if step.strategy.num_replicas_in_sync > 1 and (reason := one_program.why_not(step)):
        return reason
    for spec in tf.nest.flatten(step.stream.full_spec):
        if not isinstance(spec, tf.TensorSpec) or not spec.shape.is_fully_defined():
            return f"a batch has {spec}; only tensors with a static shape (except for the batch size) can be stacked"
    has_lists = any(op.startswith("TensorList") for op in step.op_counts)
    if array := _tf.growing_array(step.ops if has_lists else ()):
        return f"{array} makes a tf.TensorArray grow, which XLA does not; give it its size"
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

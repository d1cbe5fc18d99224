"""Several steps as one program of XLA, which is one round of the device loop."""

from typing import Any

import tensorflow as tf

from looplib.compat import tensorflow as _tf
from looplib.compat.row_updates import CHECK
from looplib.compat.tensorflow import converted
from looplib.loop.contracts import StreamIterator
from looplib.loop.step import Step, timed

# An XLA program's call costs as much as a small step, so that longer chunks hardly help; nothing stops one under way.
LONGEST, _BYTES, _COPIED = 100, 8 * 2**20, 2**20


class XlaChunk:
    """`size` steps on one replica as one XLA program. Batches of different shapes run step by step."""

    def __init__(self, step: Step, size: int) -> None:
        self.size = size
        self._step, self._stream = step, step.stream
        self._program: Any = None

    def prepare(self) -> None:
        """Compiles the program, once; raises one of XLA's errors if the step has an op that XLA lacks."""
        if self._program is not None:
            return
        batches: Any = [self._stream.replica_spec] * self.size
        full: Any = [self._stream.full_spec] * self.size
        if self._stream.block > 1:
            batches = full = tf.nest.map_structure(
                lambda spec: tf.TensorSpec([self.size, *spec.shape], spec.dtype), self._stream.replica_spec
            )
        program = tf.function(self._steps_of, jit_compile=True)
        concrete = program.get_concrete_function(batches)
        zeros = tf.nest.map_structure(lambda spec: tf.zeros(spec.shape, spec.dtype), full)
        program.experimental_get_compiler_ir(zeros)(stage="hlo")
        self._program = concrete

    def run(self, iterator: StreamIterator) -> tf.Tensor:
        """Does the steps, in a `tf.function`; returns the seconds that they waited for data, float64."""
        if self._stream.block > 1:
            batches, seconds = timed(lambda: self._stream.next_steps(iterator, self.size))
            self._program(batches)
            return seconds
        batches, seconds = timed(lambda: self._next(iterator))
        alike = _alike(batches)
        if alike is None:
            self._program(batches)
        else:
            tf.cond(alike, lambda: self._all_at_once(batches), lambda: converted(self._one_by_one)(batches))
        return seconds

    @tf.autograph.experimental.do_not_convert
    def _next(self, iterator: StreamIterator) -> list:
        return [self._stream.next(iterator) for _ in range(self.size)]

    @tf.autograph.experimental.do_not_convert
    def _all_at_once(self, batches: list) -> int:
        self._program(batches)
        return 0

    def _one_by_one(self, batches: list) -> int:
        for i in tf.range(self.size):
            self._step.run(tf.switch_case(i, [lambda batch=batch: batch for batch in batches]))
        return 0

    def _steps_of(self, batches: Any) -> None:
        """The program: a loop over all batches of the chunk."""
        stacked = batches
        if self._stream.block == 1:
            stacked = tf.nest.map_structure(lambda *parts: tf.stack(parts), *batches)
        for i in tf.range(self.size):
            self._step.run(_at(stacked, i))


@tf.autograph.experimental.do_not_convert
def _at(batches: Any, i: tf.Tensor) -> Any:
    return tf.nest.map_structure(lambda part: part[i], batches)


def size_of_chunk(longest: int, step: Step, steps_per_loop: int) -> int:
    """Returns the number of steps for an XLA program: at most `longest`, and leaving few steps of a call over."""
    stream = step.stream
    size = sum(spec.shape.num_elements() * spec.dtype.size for spec in tf.nest.flatten(stream.full_spec))
    # More than an element costs a copy, and where the data ends it is not sure that they are there.
    in_one = 1 < stream.block and (not stream.properties.infinite or size * stream.block > _COPIED)
    most = stream.block if in_one else _BYTES // max(1, size)
    longest = max(1, min(longest, LONGEST, steps_per_loop, most))
    return min(range(longest, longest // 2, -1), key=lambda chunk: steps_per_loop % chunk)


def why_not_xla(step: Step) -> str | None:
    """Returns why no XLA program can compute the step exactly; None if no reason is known."""
    if (replicas := step.strategy.num_replicas_in_sync) > 1:
        return (
            f"the strategy has {replicas} replicas, and a program of many steps has one "
            "(GradientTrainer(jit_compile=True) lets XLA compile the gradients of each replica; on TPUs graph is "
            "compiled by XLA in any case)"
        )
    for spec in tf.nest.flatten(step.stream.full_spec):
        if not isinstance(spec, tf.TensorSpec) or not spec.shape.is_fully_defined():
            return f"a batch has {spec}; only tensors with a static shape (except for the batch size) can be stacked"
    has_lists = any(op.startswith("TensorList") for op in step.op_counts)
    if array := _tf.growing_array(step.ops if has_lists else ()):
        return f"{array} makes a tf.TensorArray grow, which XLA does not; give it its size"
    if "Assert" in step.op_counts and any(CHECK in node.name for node in step.ops):
        return "a table of embeddings checks its ids in the step, and XLA leaves out assertions"
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

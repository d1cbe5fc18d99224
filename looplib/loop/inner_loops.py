"""The inner loop: many steps on the device for one call from the host.

A loop runs a `steps.Step` in one of several ways, and is called as `loop(iterator, steps, ...)`; it returns a `Ran`.
`engines.py` names the loops and chooses between them.
"""

import dataclasses
import math
import time

import numpy as np
import tensorflow as tf
from absl import logging

from looplib.cluster.collectives import Workers
from looplib.errors import UsageError
from looplib.health.preemption import notice

_TO_THE_END = np.iinfo(np.int64).max
# How long the device may go on without looking at the stop flag: looking after each of many small steps costs 3%, and
# several workers have to ask each other.
_STRIDE_SECONDS, _STRIDE_SECONDS_OF_WORKERS, _LONGEST_STRIDE = 0.02, 0.1, 1000


@dataclasses.dataclass(frozen=True)
class Ran:
    """What a call of a loop did.

    Attributes:
      done: steps, fewer than asked for if the data ended, a signal came or a value was not finite.
      finite: whether all that the reducer watches was finite.
      stopped: whether a signal asked this worker, or another one, to end.
      waited: seconds that steps waited for their data.
      compiled: seconds that TensorFlow took to get the loop ready, which it does in the first call.
      to_stop: seconds that it may take to stop, where that is longer than a step.
    """

    done: int
    finite: bool
    stopped: bool = False
    waited: float = 0.0
    compiled: float = 0.0
    to_stop: float = 0.0

    def then(self, other):
        """Returns what this call and another one after it did together."""
        waited, compiled = self.waited + other.waited, self.compiled + other.compiled
        return Ran(self.done + other.done, other.finite, other.stopped, waited, compiled, other.to_stop)


class GraphLoop:
    """Steps in a `tf.range` loop inside one `tf.function`.

    The number of steps is a tensor, so that no other number traces again. With a `chunk`, so many steps make one round
    of the loop while the data is sure to last for them, and the others go one by one.

    Args:
      step: `steps.Step`.
      chunk: steps of a round.
      compiled: whether a chunk is one XLA program over all its batches; else it is unrolled.

    Attributes:
      seconds_per_step: float, of the last call.
    """

    def __init__(self, step, chunk=1, compiled=False):
        self.traces = 0
        self.chunk = chunk
        self._step = step
        self._reducer = step.reducer
        self._stream = step.stream
        self._stop = notice.flag
        self._workers = Workers(step.strategy)
        self._spec = None
        self._taken = None  # the totals that the last call has read
        self.seconds_per_step = math.inf
        self._compiled = compiled
        self._program = None
        self._ran = False
        self._loop = tf.function(self._run)
        self._binds = step.stream.renew is not None  # training reads one iterator for long, evaluations many
        self._bound = self._numbers_now = None
        self._numbers = tf.Variable(tf.zeros([4], tf.int64), trainable=False) if self._binds else None
        self._read = tf.function(step.reducer.read)

    def __call__(self, iterator, steps, *, sure=0, read=False, horizon=0):
        """Runs steps until a signal asks to stop or a value is not finite.

        Args:
          iterator: of the stream's data set.
          steps: how many; -1 runs to the end of the data.
          sure: for how many steps the data is known to last with batches of full size.
          read: whether `read` follows if all steps are done, so that it costs no call of its own.
          horizon: for how many steps the run is known to go on, for a loop that makes itself ready for them.

        Returns:
          `Ran`.
        """
        del horizon
        steps = _TO_THE_END if steps < 0 else steps
        first = self.chunk if self._stream.infinite or not self._in_chunks else self.chunk + 1
        if self._ran or steps < first or (self._in_chunks and sure < self.chunk):
            return self._run_for(iterator, steps, sure, read)
        # TensorFlow optimizes and compiles a loop as it first runs, which is no time of training.
        self._ran = True
        started = time.perf_counter()
        ran = self._run_for(iterator, first, sure, read and steps == first)
        seconds = time.perf_counter() - started - ran.waited
        if ran.done == first < steps and ran.finite:
            ran = ran.then(self._run_for(iterator, steps - first, max(0, sure - first), read))
            seconds -= first * self.seconds_per_step
        return dataclasses.replace(ran, compiled=max(0.0, seconds))

    def _run_for(self, iterator, steps, sure, read):
        # Where the data ends, one step at least is left to the part of the loop that looks whether it does.
        chunks = min(steps if self._stream.infinite else steps - 1, sure) // self.chunk if self._in_chunks else 0
        alone = self._workers.count == 1
        stride_seconds = _STRIDE_SECONDS if alone else _STRIDE_SECONDS_OF_WORKERS
        stride = max(1, min(_LONGEST_STRIDE, int(stride_seconds / self.seconds_per_step)))
        stride = 1 << stride.bit_length() - 1  # so that it is often the same as in the last call
        started = time.perf_counter()
        done, finite, stopped, waited, seconds, taken, totals = self._call(iterator, (steps, chunks, stride, int(read)))
        done, self._taken = int(done), totals if taken else None
        if done:
            # What decides when workers ask each other has to be the same on all of them.
            self.seconds_per_step = (time.perf_counter() - started if alone else float(seconds) or math.inf) / done
        return Ran(done, bool(finite), bool(notice.requested if alone else stopped), waited=float(waited))

    def _call(self, iterator, numbers):
        if not self._binds:
            return self._loop(iterator, tf.constant(numbers, tf.int64))
        if self._bound is None or self._bound[0] is not iterator:
            self._bind(iterator)
        if numbers != self._numbers_now:
            self._numbers.assign(numbers)
            self._numbers_now = numbers
        return self._bound[1]()

    def _bind(self, iterator):
        """Makes a function without arguments, which takes a third of the time to call."""
        bound = tf.function(lambda: self._loop(iterator, self._numbers.read_value()))
        self._bound, self._ran = (iterator, bound.get_concrete_function()), False

    def read(self):
        """Returns the metrics since the last read, and starts anew."""
        totals, self._taken = self._taken, None
        return self._reducer.packer.unpack(*((totals, {}) if totals is not None else self._read()))

    def trace(self, iterator):
        """Traces the loop for this iterator, so that no later call does."""
        if self._binds:
            self._bind(iterator)
        else:
            self._loop.get_concrete_function(iterator, tf.TensorSpec([4], tf.int64))
        if self._reducer.has_keras_metrics:
            self._read.get_concrete_function()

    def lower(self):
        """Makes the program of a chunk, and has XLA look through it, which raises if there is an op that it lacks."""
        if self._compiled:
            specs = [self._stream.element_spec] * self.chunk
            program = tf.function(self._steps_of, jit_compile=True)
            self._program = program.get_concrete_function(specs)
            batch = tf.nest.map_structure(lambda spec: tf.zeros(spec.shape, spec.dtype), self._stream.full_spec)
            program.experimental_get_compiler_ir([batch] * self.chunk)(stage="hlo")

    @property
    def _in_chunks(self):
        return self._compiled or self.chunk > 1

    def _run(self, iterator, numbers):
        self._note_trace(iterator)
        steps, chunks, stride, read = numbers[0], numbers[1], numbers[2], numbers[3] > 0
        started = now()
        done, waited, ended = tf.constant(0, tf.int64), tf.constant(0, tf.float64), tf.constant(False)
        status = self._look()
        if self._in_chunks:
            done, waited, status = self._rounds(
                self._do_chunk, self.chunk, iterator, done, chunks * self.chunk, stride, status
            )
        if self._stream.infinite:
            done, more, status = self._rounds(self._do_step, 1, iterator, done, steps, stride, status)
        else:
            done, more, status, ended = self._ending(iterator, done, steps, stride, status)
        stopped, finite = status
        take = read and finite and not stopped and (ended or done >= steps)
        if self._reducer.has_keras_metrics:
            take = tf.constant(False)
        with tf.control_dependencies([done]):
            seconds = self._workers.mean(now() - started)
        return done, finite, stopped, waited + more, seconds, take, self._reducer.take(take)

    @tf.autograph.experimental.do_not_convert
    def _look(self):
        """Whether to stop, and whether all is finite: boolean scalar tensors, alike on all workers."""
        return self._workers.any(self._stop.read_value()), self._reducer.finite()

    def _rounds(self, do, size, iterator, done, steps, stride, status):
        # One place in the program for the step: where it draws random numbers, each place has a state of its own.
        waited = tf.constant(0, tf.float64)
        stopped, finite = status
        while done < steps and not stopped and finite:
            until = tf.minimum(done + stride, steps)
            while done < until:
                waited += do(iterator)
                done += size
            stopped, finite = self._look()
        return done, waited, (stopped, finite)

    def _do_step(self, iterator):
        batch, seconds = timed(lambda: self._stream.next(iterator))
        self._step(batch)
        return seconds

    def _do_chunk(self, iterator):
        if not self._compiled:
            # Not by adding one to the next: TensorFlow makes temporary variables of that, which clash in nested loops.
            return tf.reduce_sum(tf.stack([self._do_step(iterator) for _ in range(self.chunk)]))
        batches, seconds = timed(lambda: [self._stream.next(iterator) for _ in range(self.chunk)])
        alike = _alike(batches)
        if alike is None:
            self._program(batches)
        else:
            tf.cond(alike, lambda: self._all_at_once(batches), lambda: self._one_by_one(batches))
        return seconds

    def _all_at_once(self, batches):
        self._program(batches)
        return 0

    def _one_by_one(self, batches):
        i = tf.constant(0)
        while i < self.chunk:
            self._step(tf.switch_case(i, [lambda batch=batch: batch for batch in batches]))
            i += 1
        return 0

    def _steps_of(self, batches):
        """The steps of a chunk, for XLA."""
        stacked = tf.nest.map_structure(lambda *parts: tf.stack(parts), *batches)
        i = tf.constant(0, tf.int64)
        while i < self.chunk:
            self._step(tf.nest.map_structure(lambda part, i=i: part[i], stacked))
            i += 1

    def _ending(self, iterator, done, steps, stride, status):
        # The last step stands apart, as a second loop of at most one round, so that no batch is fetched which this call
        # does not train on; a tf.cond in its place fails on several replicas (TensorFlow 2.20).
        waited = tf.constant(0, tf.float64)
        stopped, finite = status
        batch = self._stream.next_as_optional(iterator)
        while done < steps - 1 and self._stream.has_value(batch) and not stopped and finite:
            until = tf.minimum(done + stride, steps - 1)
            while done < until and self._stream.has_value(batch):
                self._step(self._stream.get_value(batch))
                done += 1
                batch, seconds = timed(
                    lambda: self._stream.next_as_optional(iterator), lambda batch: [self._stream.has_value(batch)]
                )
                waited += seconds
            stopped, finite = self._look()
        until = done + 1 if finite else done  # a batch that was fetched is trained on, also when asked to stop
        while done < tf.minimum(steps, until) and self._stream.has_value(batch):
            self._step(self._stream.get_value(batch))
            done += 1
        return done, waited, self._look(), not self._stream.has_value(batch)

    @tf.autograph.experimental.do_not_convert
    def _note_trace(self, iterator):
        self.traces += 1  # runs when tf.function traces, not when it runs
        before, self._spec = self._spec, iterator.element_spec
        if self.traces > 1:
            logging.warning(
                "the loop was traced again (%d times now), because the structure or shapes of its input changed from "
                "%s to %s; each trace costs seconds, so keep the elements of dataset() alike",
                self.traces,
                before,
                self._spec,
            )


@tf.autograph.experimental.do_not_convert
def now():
    """The time in seconds, float64 scalar tensor; 0 where ops are to be deterministic, as the clock is not.

    With `tf.config.experimental.enable_op_determinism` TensorFlow refuses to run the op.
    """
    with tf.init_scope():
        try:
            tf.timestamp()
        except tf.errors.FailedPreconditionError:
            return tf.constant(0, tf.float64)
    return tf.timestamp()


# Not kept from AutoGraph: without it, TensorFlow refuses a trace with more than some 30 calls of next().
def timed(fetch, ready=lambda batch: tf.nest.flatten(batch, expand_composites=True)):
    """Returns (what `fetch` returns, the seconds until it was `ready` as a float64 tensor)."""
    start = now()
    with tf.control_dependencies([start]):
        batch = fetch()
    with tf.control_dependencies(ready(batch)):
        return batch, now() - start


def _alike(batches):
    """Whether batches have the same shapes, boolean scalar tensor; None if it is known beforehand."""
    alike = []
    for parts in zip(*(tf.nest.flatten(batch) for batch in batches)):
        if not parts[0].shape.is_fully_defined():
            shapes = tf.stack([tf.shape(part) for part in parts])
            alike.append(tf.reduce_all(shapes == shapes[0]))
    return tf.reduce_all(tf.stack(alike)) if alike else None


class EagerLoop:
    """The same steps one by one without `tf.function`, for print, pdb and exact stack traces.

    Takes the arguments of `Step`, and the `collect` of an evaluator. The structure of the step's outputs is known only
    after the first step.
    """

    variables = random_ops = ()  # none are known without a trace
    traces = 0

    def __init__(self, strategy, step_fn, reducer, stream, counter=None, skip_bad=False, collect=None):
        if skip_bad:
            raise UsageError("the eager loop cannot undo steps; use another policy than skip with --loop=eager")
        self._stream = stream
        self._strategy = strategy
        self._workers = Workers(strategy)
        self._counter = counter
        self._reducer = reducer
        self._step_fn = step_fn
        self._collect = collect

    def __call__(self, iterator, steps, *, sure=0, read=False, horizon=0):
        """Runs steps; see `GraphLoop`. It looks after each step whether to go on."""
        del sure, read, horizon
        done, waited = 0, 0.0
        while done != steps and not self._stopped() and self._finite():
            started = time.perf_counter()
            batch = self._stream.next_as_optional(iterator)
            if not self._stream.has_value(batch):
                break
            waited += time.perf_counter() - started
            collected = self._do(self._stream.get_value(batch))
            if self._reducer.collects:
                self._hand_over(collected)
            done += 1
        return Ran(done, self._finite(), self._stopped(), waited=waited)

    def _do(self, batch):
        """Does and counts one step; returns what it collects."""
        contributions, collected = self._strategy.run(self._replica_step, args=(batch,)), None
        if self._reducer.collects:
            contributions, collected = contributions
        if not self._reducer.created:
            self._reducer.create()
        self._reducer.add(contributions)
        if self._counter is not None:
            self._counter.assign_add(1)
        return collected

    def _hand_over(self, collected):
        """Gives the task what the replicas that had examples collected, those of all workers in order."""
        parts = [self._strategy.experimental_local_results(leaf) for leaf in tf.nest.flatten(collected)]
        replicas = self._workers.gather_tensors(list(zip(*parts)))
        replicas = [tf.nest.pack_sequence_as(collected, leaves) for leaves in replicas]
        self._collect([values for had_examples, values in replicas if had_examples])

    def _stopped(self):
        return self._workers.any_of(bool(notice.requested))

    def _finite(self):
        return not self._reducer.created or bool(self._reducer.finite())

    def _replica_step(self, inputs):
        return self._reducer.run_step(self._step_fn, inputs, self._stream.may_be_empty)

    def read(self):
        """Returns the metrics since the last read, and starts anew."""
        return self._reducer.packer.unpack(*self._reducer.read())

    def trace(self, iterator):
        """Nothing to trace."""


class StepwiseLoop(EagerLoop):
    """One call into the device for each step, as the host takes what it collects in between.

    Args:
      step: `steps.Step` of an evaluation.
      collect: `Evaluator.collect`.
    """

    def __init__(self, step, collect):
        super().__init__(step.strategy, None, step.reducer, step.stream, collect=collect)
        self._do = tf.function(step.__call__, autograph=False)

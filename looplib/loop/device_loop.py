"""The device loop: `for _ in tf.range(n)` around `strategy.run`, inside one `tf.function`."""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf
from absl import logging

from looplib.cluster.collectives import Workers
from looplib.cluster.preemption import notice
from looplib.compat import tensorflow as _tf
from looplib.compat.tensorflow import converted
from looplib.loop.contracts import InnerLoop, LoopResult, Metrics, Request, StreamIterator
from looplib.loop.step import Step, now, timed
from looplib.loop.xla import XlaChunk

_FEW = 3  # chunks of XLA that are called one by one
_TO_THE_END = np.iinfo(np.int32).max  # rounds of a tf.range loop; a TPU counts no further
# Seconds that the device may run without reading the stop flag: the end of an inner loop costs more than half of a
# small step (docs/speed_choices.md), and several workers have to ask each other.
_STRIDE_SECONDS, _LONGEST_STRIDE = 0.1, 1000
# Ops of a step from which the loop over steps looks at the stop flag itself, which costs 17 microseconds a step. At the
# end of a loop TensorFlow passes over all ops of its body again, in a third of the time of a step of many small ops.
_MANY_OPS = 4000

Value = TypeVar("Value")  # what the rounds of a loop pass on: tensors of the same shapes each time


class Numbers(NamedTuple):
    """The arguments of the loop on the device, as one int64 tensor `[4]`, so that a new number traces nothing."""

    steps: int
    rounds: int  # of these steps, that the data is sure to last for
    stride: int  # steps between two looks at the stop flag
    read: int  # 1 if the totals are to be read and reset after the last step


class Status(NamedTuple):
    """Whether to stop, and whether all values are finite: boolean scalar tensors, equal on all workers."""

    stopped: tf.Tensor
    finite: tf.Tensor

    @property
    def go(self) -> tf.Tensor:
        """Whether to do another step."""
        return self.finite & ~self.stopped


Steps = tuple[tf.Tensor, tf.Tensor, Status, tf.Tensor]
Program = Callable[[StreamIterator, tf.Tensor], tf.Tensor]  # of an iterator and `Numbers`; returns `LoopOutputs`


class LoopOutputs(NamedTuple):
    """The result of the loop on the device, as one float64 vector `[7 + n]` with the totals."""

    done: float | tf.Tensor  # steps
    stopped: float | tf.Tensor  # `Status.stopped` after the last step, 0 or 1
    finite: float | tf.Tensor  # `Status.finite` after the last step, 0 or 1
    waited: float | tf.Tensor  # seconds that steps waited for data
    seconds: float | tf.Tensor  # of the loop, the mean of all workers
    counted: float | tf.Tensor  # the step's counter after the last step
    taken: float | tf.Tensor  # whether the totals were reset, 0 or 1


class LoopPrograms:
    """The `tf.function`s of a loop and of one round of it alone, called from the host.

    With `binds` they are bound to an iterator and take no arguments, which takes a third of the time to call.
    """

    def __init__(self, loop: Program, one_round: Program, binds: bool) -> None:
        self._loop, self._one_round = tf.function(loop), tf.function(one_round)
        self.binds = binds
        self._iterator: StreamIterator = None  # that the functions are bound to
        self._bound: dict[bool, Callable[[], tf.Tensor]] = {}  # of the loop (False) and of one round (True)
        self.ran: set[bool] = set()  # which of them have run
        self._numbers = _tf.outside(lambda: tf.Variable(tf.zeros([4], tf.int64), trainable=False)) if binds else None
        self._numbers_now: Numbers | None = None

    def call(self, iterator: StreamIterator, numbers: Numbers, one_round: bool) -> np.ndarray:
        """Runs one of the functions."""
        if not self.binds:
            return self._loop(iterator, tf.constant(numbers, tf.int64)).numpy()
        self._bind(iterator, one_round)
        if numbers != self._numbers_now:
            self._numbers.assign(numbers)
            self._numbers_now = numbers
        return self._bound[one_round]().numpy()

    def trace(self, iterator: StreamIterator) -> None:
        """Traces the function of the loop."""
        if self.binds:
            self._bind(iterator, one_round=False)
        else:
            self._loop.get_concrete_function(iterator, tf.TensorSpec([4], tf.int64))

    def _bind(self, iterator: StreamIterator, one_round: bool) -> None:
        if self._iterator is not iterator:
            self._iterator, self._bound, self.ran = iterator, {}, set()
        if one_round not in self._bound:
            run = self._one_round if one_round else self._loop
            bound = tf.function(lambda: run(iterator, self._numbers.read_value()), autograph=False)
            self._bound[one_round] = bound.get_concrete_function()


class DeviceLoop(InnerLoop):
    """Steps in a `tf.range` loop inside one `tf.function`.

    With a chunk of XLA, its steps make one round of the loop while the data is sure to last for them, and the others
    run one by one.
    """

    _at_once = 10  # rounds, where they do not wait for each other's variables; TensorFlow's own default

    def __init__(self, step: Step, chunk: XlaChunk | None = None) -> None:
        self.step, self._chunk, self._workers = step, chunk, Workers(step.strategy)
        self._seconds_per_step = math.inf  # of the last call
        self._fetches_in_step = step.stream.properties.infinite and not step.stream.ahead
        self._spec = None
        self._taken: np.ndarray | None = None  # the totals that the last call has read
        # A training whose data ends saves the totals before it reads them.
        self._reads_at_end = step.stream.renew is None
        self._programs = LoopPrograms(self._run, self._run_round, binds=step.stream.renew is not None)
        self._looks_within = sum(step.op_counts.values()) >= _MANY_OPS
        self._inner = converted(self._repeat_and_look) if self._looks_within else self._repeat_in_strides
        self._inner_to_the_end = converted(self._repeat_to_the_end)
        self._most_alone = self._most_rounds_alone()
        self._read = tf.function(step.reducer.read, autograph=False)

    @property
    def round_size(self) -> int:
        """The number of steps of a round."""
        return self._chunk.size if self._chunk else 1

    # On the device.

    @tf.autograph.experimental.do_not_convert
    def _run(self, iterator: StreamIterator, numbers: tf.Tensor) -> tf.Tensor:
        self._note_trace(iterator)
        wanted = Numbers(*tf.unstack(numbers))
        started = now()
        done, waited, status, ended = self._steps(iterator, wanted, self._look())
        if not self._reads_at_end:
            ended = tf.constant(False)
        take = (wanted.read > 0) & status.go & (ended | (done >= wanted.steps))
        return self._outcome(done, status, waited, started, take)

    @tf.autograph.experimental.do_not_convert
    def _run_round(self, iterator: StreamIterator, numbers: tf.Tensor) -> tf.Tensor:
        """One round, without the loops around it, which cost a call up to a millisecond."""
        started = now()
        waited = self._do_round(iterator, tf.constant(0, tf.float64))
        status = self._look()
        done = tf.constant(self.round_size, tf.int64)
        return self._outcome(done, status, waited, started, (numbers[3] > 0) & status.go)

    @tf.autograph.experimental.do_not_convert
    def _outcome(
        self, done: tf.Tensor, status: Status, waited: tf.Tensor, started: tf.Tensor, take: tf.Tensor
    ) -> tf.Tensor:
        if self.step.reducer.has_keras_metrics:
            take = tf.constant(False)
        with tf.control_dependencies([done, status.finite]):
            passed = self._workers.mean(now() - started)
        outcome = LoopOutputs(done, status.stopped, status.finite, waited, passed, self.step.counted(), take)
        numbers = tf.stack([tf.cast(part, tf.float64) for part in outcome])
        return tf.concat([numbers, self.step.reducer.take(take)], axis=0)

    def _steps(self, iterator: StreamIterator, wanted: Numbers, status: Status) -> Steps:
        """Does the steps; returns how many, the seconds that they waited, the status, and whether the data ended."""
        done, waited, ended = tf.constant(0, tf.int64), tf.constant(0, tf.float64), tf.constant(False)
        if self._chunk is not None:
            stride = -(-wanted.stride // self.round_size)
            rounds, waited, status = self._inner(self._do_round, waited, iterator, wanted.rounds, stride, status)
            done = rounds * self.round_size
        left = wanted.steps - done
        if self._fetches_in_step:
            more, waited, status = self._inner(self._do_step, waited, iterator, left, wanted.stride, status)
        else:
            more, seconds, status, ended = self._inner_to_the_end(iterator, left, wanted.stride, status)
            waited += seconds
        return done + more, waited, status, ended

    def _repeat(
        self, do: Callable[[StreamIterator, Value], Value], value: Value, iterator: StreamIterator, rounds: tf.Tensor
    ) -> Value:
        """The inner loop: `do` calls `strategy.run`, and makes each round's value from the one before."""
        for _ in tf.range(rounds):
            tf.autograph.experimental.set_loop_options(parallel_iterations=self._at_once)
            value = do(iterator, value)
        return value

    @tf.autograph.experimental.do_not_convert
    def _repeat_in_strides(
        self, do: Callable[[StreamIterator, Value], Value], value: Value, iterator: StreamIterator, rounds: tf.Tensor,
        stride: tf.Tensor, status: Status,
    ) -> tuple[tf.Tensor, Value, Status]:  # fmt: skip
        """Runs the inner loop for a stride of rounds after another, and looks after each whether to stop."""
        repeat = converted(self._repeat)

        # The step appears once in the program: if it draws random numbers, each copy would have its own state.
        def next_stride(done: tf.Tensor, value: Value, _: Status) -> tuple[tf.Tensor, Value, Status]:
            count = tf.minimum(stride, rounds - done)
            value = repeat(do, value, iterator, count)
            self._note(count)
            return done + count, value, self._look()

        def continues(done: tf.Tensor, value: Value, status: Status) -> tf.Tensor:
            return status.go & (done < rounds)

        return tf.while_loop(continues, next_stride, (tf.constant(0, tf.int64), value, status))

    def _repeat_and_look(
        self, do: Callable[[StreamIterator, Value], Value], value: Value, iterator: StreamIterator, rounds: tf.Tensor,
        stride: tf.Tensor, status: Status,
    ) -> tuple[tf.Tensor, Value, Status]:  # fmt: skip
        """Does what `_repeat_in_strides` does in a single loop, which checks whether to stop without ending."""
        done = tf.constant(0, tf.int64)
        for _ in tf.range(tf.where(status.go, rounds, 0)):
            tf.autograph.experimental.set_loop_options(parallel_iterations=self._at_once)
            value = do(iterator, value)
            done += 1
            if tf.equal(done % stride, 0):
                self._note(stride)
                status = self._look()
                if not status.go:
                    break
        self._note(done % stride)
        return done, value, self._look()

    def _repeat_to_the_end(
        self, iterator: StreamIterator, steps: tf.Tensor, stride: tf.Tensor, status: Status
    ) -> Steps:
        """The inner loop over data that ends, or is fetched a step ahead."""
        # The last step stands apart, as a second loop of at most one round, so that no batch is fetched which this call
        # does not train on; a tf.cond in its place fails on several replicas (TensorFlow 2.20).
        done, waited = tf.constant(0, tf.int64), tf.constant(0, tf.float64)
        batch = self.step.stream.next_as_optional(iterator)
        begins = self.step.stream.has_value(batch) & status.go
        rounds = tf.where(begins, steps - 1, 0)
        longest = tf.maximum(rounds, 1) if self._looks_within else stride
        for _ in tf.range(_strides(rounds, longest)):
            for _ in tf.range(tf.minimum(longest, rounds - done)):
                self.step.run(self.step.stream.get_value(batch))
                done += 1
                batch, seconds = timed(lambda: self.step.stream.next_as_optional(iterator), self.step.stream.has_value)
                waited += seconds
                ends = ~self.step.stream.has_value(batch)
                if self._looks_within:
                    if tf.equal(done % stride, 0):
                        status = self._look()
                    ends |= ~status.go
                if ends:
                    break
            status = self._look()
            if ~(status.go & self.step.stream.has_value(batch)):
                break
        # A batch that was fetched is trained on, also when a signal asks to stop.
        one_more = status.finite & (done < steps) & self.step.stream.has_value(batch)
        for _ in tf.range(tf.cast(one_more, tf.int64)):
            self.step.run(self.step.stream.get_value(batch))
            done += 1
        with tf.control_dependencies([self.step.stream.has_value(batch)]):  # a stream ends where a signal asks to stop
            status = self._look()
        return done, waited, status, not self.step.stream.has_value(batch)

    @tf.autograph.experimental.do_not_convert
    def _do_step(self, iterator: StreamIterator, waited: tf.Tensor) -> tf.Tensor:
        batch, seconds = timed(lambda: self.step.stream.next(iterator))
        self.step.run(batch)
        return waited + seconds

    @tf.autograph.experimental.do_not_convert
    def _do_round(self, iterator: StreamIterator, waited: tf.Tensor) -> tf.Tensor:
        return self._do_step(iterator, waited) if self._chunk is None else waited + self._chunk.run(iterator)

    @tf.autograph.experimental.do_not_convert
    def _note(self, rounds: tf.Tensor) -> None:
        """Counts the steps of a stride, where rounds do not count them; does nothing here."""

    @tf.autograph.experimental.do_not_convert
    def _look(self) -> Status:
        return Status(self._workers.any(notice.flag.read_value()), self.step.reducer.finite())

    @tf.autograph.experimental.do_not_convert
    def _note_trace(self, iterator: StreamIterator) -> None:
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

    # On the host.

    def run(self, iterator: StreamIterator, request: Request) -> LoopResult:
        """See `InnerLoop`."""
        steps = _TO_THE_END if request.steps < 0 else request.steps
        request = dataclasses.replace(request, steps=steps)
        first = self.round_size if self._fetches_in_step or self._chunk is None else self.round_size + 1
        alone = 0 < self._rounds(request) <= self._most_alone
        if alone in self._programs.ran or steps < first or (self._chunk is not None and request.sure < self.round_size):
            return self._run_for(iterator, request, alone)
        # TensorFlow optimizes and compiles a program in its first run; this time is not training.
        self._programs.ran.add(alone)
        started = time.perf_counter()
        ran = self._run_for(iterator, request.first(first), alone)
        seconds = time.perf_counter() - started - ran.waited
        if ran.done == first < steps and ran.finite:
            ran = ran.then(self._run_for(iterator, request.after(first), alone))
            seconds -= first * self._seconds_per_step
        return dataclasses.replace(ran, compiled=max(0.0, seconds))

    def _rounds(self, request: Request) -> int:
        # Where the data ends, one step at least is left to the part of the loop that checks for it.
        steps = request.steps if self._fetches_in_step else request.steps - 1
        return min(steps, request.sure) // self.round_size

    def _run_for(self, iterator: StreamIterator, request: Request, alone: bool) -> LoopResult:
        """Runs steps in one call; rounds that run `alone` are called one by one before it."""
        steps, rounds, ran = request.steps, self._rounds(request), LoopResult(0, True)
        if alone and rounds:
            for _ in range(rounds):
                if notice.requested:
                    return dataclasses.replace(ran, stopped=True)
                read = int(request.read and ran.done + self.round_size == steps)
                ran = ran.then(self._run_once(iterator, Numbers(self.round_size, 1, 1, read), one_round=True))
                if not ran.finite or ran.done == steps:
                    return ran
            return ran.then(self._run_for(iterator, request.after(ran.done), False))
        stride = max(1, min(_LONGEST_STRIDE, int(_STRIDE_SECONDS / self._seconds_per_step)))
        # A power of two, and no more than is needed, so that it is often the same as in the last call.
        stride = 1 << min(stride.bit_length() - 1, (steps - 1).bit_length())
        return self._run_once(iterator, Numbers(steps, rounds, stride, int(request.read)))

    def _most_rounds_alone(self) -> int:
        """Returns up to how many rounds are called one by one; 0 for none."""
        if not self._programs.binds or self._workers.count > 1:
            return 0
        if self._chunk is None:  # the step's copy in another program would have its own state of random ops
            return int(self._fetches_in_step and not self.step.random_ops)
        return _FEW

    def _run_once(self, iterator: StreamIterator, numbers: Numbers, one_round: bool = False) -> LoopResult:
        one_worker = self._workers.count == 1
        started = time.perf_counter()
        vector = self._programs.call(iterator, numbers, one_round)
        outcome, totals = LoopOutputs(*vector[: len(LoopOutputs._fields)].tolist()), vector[len(LoopOutputs._fields) :]
        done, self._taken = int(outcome.done), totals if outcome.taken else None
        passed = time.perf_counter() - started
        if done:
            self._seconds_per_step = (passed if one_worker else outcome.seconds or math.inf) / done  # alike on workers
        stopped = bool(notice.requested if one_worker else outcome.stopped)
        waited = min(max(0.0, outcome.waited), passed)  # TensorFlow's clock is one that is set
        return LoopResult(done, bool(outcome.finite), stopped, waited=waited, counted=int(outcome.counted))

    def read(self) -> Metrics:
        """See `InnerLoop`."""
        totals, self._taken = self._taken, None
        return self.step.reducer.packer.unpack(*((totals, {}) if totals is not None else self._read()))

    def trace(self, iterator: StreamIterator) -> None:
        """See `InnerLoop`; raises one of XLA's errors if it cannot compile the chunk."""
        if self._chunk is not None:
            self._chunk.prepare()
        self._programs.trace(iterator)
        if self.step.reducer.has_keras_metrics:
            self._read.get_concrete_function()


@tf.autograph.experimental.do_not_convert
def _strides(rounds: tf.Tensor, stride: tf.Tensor) -> tf.Tensor:
    """Returns the number of strides in some rounds, the last maybe shorter; 0 for no or negative rounds."""
    return tf.maximum(tf.constant(0, tf.int64), (rounds - 1) // stride + 1)


class EvaluationLoop(DeviceLoop):
    """A device loop that keeps the totals as values, not in a variable, for whose update the next step would wait.

    Two steps run at a time, unless the user's own step updates variables, as Keras metrics do. A call that fails adds
    nothing to the totals.
    """

    _at_once = 2  # steps; more need memory and are not faster

    def _steps(self, iterator: StreamIterator, wanted: Numbers, status: Status) -> Steps:
        """See `DeviceLoop`; while steps are sure to have data, nothing looks for its end."""
        totals = self.step.reducer.totals()
        done, totals, status = self._inner(self._add, totals, iterator, wanted.rounds, wanted.stride, status)
        waited, ends = tf.constant(0, tf.float64), not self.step.stream.properties.infinite
        if ends:  # the last step may have no data
            batch, waited = timed(lambda: self.step.stream.next_as_optional(iterator), self.step.stream.has_value)
            one_more = tf.cast(status.go & (done < wanted.steps) & self.step.stream.has_value(batch), tf.int64)

            def add(left: tf.Tensor, totals: Any) -> tuple[tf.Tensor, Any]:
                totals = self.step.added_to(totals, self.step.stream.get_value(batch))
                self.step.count(1)
                return left - 1, totals

            _, totals = tf.while_loop(lambda left, _: left > 0, add, (one_more, totals))
            done, status = done + one_more, self._look()
        self.step.reducer.put(totals)
        # No batch follows the last step, so this call reads the metrics, although nothing has looked for one.
        return done, waited, status, tf.constant(ends)

    @tf.autograph.experimental.do_not_convert
    def _add(self, iterator: StreamIterator, totals: Any) -> Any:
        return self.step.added_to(totals, self.step.stream.next(iterator))

    @tf.autograph.experimental.do_not_convert
    def _note(self, rounds: tf.Tensor) -> None:
        self.step.count(rounds)


def single_steps(step: Step) -> DeviceLoop:
    """Returns the device loop whose rounds are single steps, of a training or an evaluation.

    Steps overlap where the length of the data is known and there is one replica, so that all steps but the last are
    sure to have data.
    """
    evaluates = step.stream.renew is None and not isinstance(step.strategy, tf.distribute.TPUStrategy)
    overlaps = evaluates and step.stream.properties.sure > 0 and step.strategy.num_replicas_in_sync == 1
    return EvaluationLoop(step) if overlaps else DeviceLoop(step)

"""The inner loop of a coordinator: calls of several steps, each done by whichever worker is free.

A call does its steps one after another on one worker, against the weights on the parameter servers, and returns their
contribution to the metrics. Its arguments say which steps of the run are its own, and it reads just their batches. So a
call that is repeated, because its worker died, counts once, and the coordinator owns the number of steps.
"""

import collections
import dataclasses
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf
from absl import logging

from looplib.base.messages import OURS, gist, parse_error
from looplib.cluster import parameter_servers
from looplib.cluster.preemption import notice
from looplib.compat import keras as _keras
from looplib.compat import tensorflow as _tf
from looplib.compat.optimizers import Replacement
from looplib.data.order import Batches
from looplib.data.streams import Stream
from looplib.errors import DataError, ParameterServerError, UsageError
from looplib.loop.contracts import InnerLoop, LoopResult, Metrics, Request, Specification
from looplib.loop.engines import Backend, Decorator
from looplib.loop.reducer import Reducer
from looplib.loop.step import Step, StepFn, timed
from looplib.task.trainer import Trainer


@dataclasses.dataclass
class DataPosition:
    """A position in the data of a `RemoteStream`, which the loop advances.

    Attributes:
      step: number of steps before it.
      skipped: steps that a pipeline which is no function of the number of the batch leaves out to begin there.
    """

    step: int
    skipped: int


@dataclasses.dataclass(kw_only=True)
class RemoteStream(Stream):
    """A `Stream` for workers that read by themselves, each its own batches. Its iterators are `DataPosition`s.

    `dataset` was made on the coordinator, which reads only its properties.

    Attributes:
      make: `Pipelines.build_on_worker`, which makes the pipeline of a worker, in a `tf.function` there.
      by_number: whether that makes a batch for each number it is given.
    """

    make: Callable[..., tf.data.Dataset]

    def __post_init__(self) -> None:
        requests, cardinality = self.context().requests, int(self.dataset.cardinality())
        steps = requests.last.steps if requests.last else None
        endless_or_all = tf.data.INFINITE_CARDINALITY if self.training else steps
        self.by_number = requests.positioned and cardinality == endless_or_all

    @property
    def training(self) -> bool:
        """Returns whether this is training data."""
        return self.renew is not None

    @property
    def element_spec(self) -> Any:
        """The spec of a batch; in a training, of (a batch, the number of steps before it: int64 scalar)."""
        spec = self.dataset.element_spec
        return (spec, tf.TensorSpec([], tf.int64)) if self.training else spec

    def iterate(self, position: bytes | None = None) -> DataPosition:
        """See `Stream`."""
        if self.start_step:
            others = "by a new pipeline on each worker, which skips its share of the batches"
            self._note(f"resumes after step {self.start_step} {'from its position' if self.by_number else others}")
        return DataPosition(self.start_step, self.skipped)

    def next_as_optional(self, iterator: DataPosition) -> tf.experimental.Optional:
        """Returns the first batch, always: the coordinator only checks whether there is one."""
        return iter(self.dataset).get_next_as_optional()


class RemoteReducer(Reducer):
    """A `Reducer` whose steps run on workers, so that it keeps its totals on the coordinator."""

    def _make_totals(self, size: int) -> tf.Variable:
        return tf.Variable(tf.zeros([size], tf.float64), trainable=False, name=f"{self._who}_totals")

    @tf.autograph.experimental.do_not_convert
    def none(self) -> tf.Tensor:
        """Returns the totals of no step, float64 `[n]`; on a worker."""
        return tf.zeros(self._totals.shape, tf.float64)

    def add(self, contributions: tf.Tensor) -> None:
        """Adds the contribution of a call, float64 `[n]`."""
        self._totals.assign(self.joined(self._totals.read_value(), contributions))

    def finite(self) -> bool:
        """Returns whether all watched values were finite so far."""
        return not self._watched or bool(self.finite_in(self._totals.read_value()))

    def read(self) -> tuple[np.ndarray, Metrics]:
        """See `Reducer`."""
        totals, results = self._totals.numpy(), self.results()
        self._reset_local()
        return totals, results

    def clear(self) -> None:
        """See `Reducer`."""
        if self.created:
            self._reset_local()


class WorkerResult(NamedTuple):
    """The result of a call on a worker.

    Attributes:
      done: steps.
      seconds: seconds that it took.
      waited: seconds that its steps waited for data.
      contribution: to the totals, float64 `[n]`.
    """

    done: int
    seconds: float
    waited: float
    contribution: np.ndarray


def packed(done: tf.Tensor, started: tf.Tensor, waited: tf.Tensor, totals: tf.Tensor) -> tf.Tensor:
    """Packs a `WorkerResult` into one float64 vector, on a worker."""
    with tf.control_dependencies([totals]):
        seconds = tf.timestamp() - started
    return tf.concat([tf.stack([tf.cast(done, tf.float64), seconds, waited]), totals], axis=0)


def unpacked(packed: tf.Tensor) -> WorkerResult:
    """Unpacks a vector of `packed`."""
    values = packed.numpy()
    return WorkerResult(int(values[0]), float(values[1]), float(values[2]), values[3:])


_AHEAD = 2  # calls for each worker that are under way or wait for it
# A call takes half of a worker's share of what is left, within these seconds: calls get shorter towards a boundary, so
# that workers end together (guided self-scheduling: Polychronopoulos and Kuck, 1987). Around its steps, a call needs
# about 0.01 s.
_SHORTEST, _LONGEST = 0.1, 1.0
_PARTS = 8  # of an evaluation, for each worker


_Result = TypeVar("_Result")


class ParameterServers(Backend):
    """Steps on the workers of a cluster with parameter servers."""

    remote_stream = RemoteStream

    def __init__(self, spec: Specification) -> None:
        super().__init__(spec)
        if spec.config.overfit_batch:
            raise ParameterServerError(
                f"overfit_batch repeats the first batch of {spec.who}.dataset, which is not read here; expected a "
                "trainer with data of looplib's, and no parameter servers; leave out --overfit_batch"
            )
        if spec.config.loop in ("xla", "eager"):
            raise ParameterServerError(
                f"loop is {spec.config.loop}, but with the strategy parameter_server steps run on workers, and the "
                "variables are on parameter servers; use loop=graph"
            )
        if spec.config.distribute == "tf":
            raise ParameterServerError(
                "distribute is 'tf', and with parameter servers each worker reads its own data; leave it out, or use "
                "another strategy"
            )
        if spec.skips:
            raise ParameterServerError(
                "the policy skip undoes a step, but with the strategy parameter_server other workers have already "
                "continued from it; use halt, rollback or off (--non_finite)"
            )
        if spec.strategy.num_replicas_in_sync > 1:
            raise ParameterServerError(
                f"each worker has {spec.strategy.num_replicas_in_sync} GPUs; with the strategy parameter_server "
                "looplib uses one, so start a worker for each GPU (CUDA_VISIBLE_DEVICES)"
            )

    def check(self, stream: RemoteStream) -> None:
        """See `Backend`."""
        _check_data(stream)
        if self._spec.training:
            _check_training_data(stream)
            for optimizer in _keras.with_inner(_keras.optimizers(self._spec.task).values()):
                _count_exactly(optimizer)

    def check_earlier(self, before: Batches, now: Batches) -> None:
        """See `Backend`."""
        if now.earlier != before.earlier:
            raise ParameterServerError(
                f"the checkpoint is of a run with batches of {now}, and the workers of the strategy "
                "parameter_server read theirs already; build a new controller to continue from it"
            )

    def reducer(self) -> RemoteReducer:
        """See `Backend`."""
        spec = self._spec
        return RemoteReducer(spec.strategy, spec.step_name, not spec.training, spec.watched_loss, spec.skips)

    def tables(self, arrays: Any) -> Any:
        """See `Backend`; the arrays become a part of the program that is sent to the workers."""
        return tf.nest.map_structure(np.asarray, arrays)

    def decorators(self) -> list[Decorator]:
        """See `Backend`; a training step gets its number together with its batch."""
        task = self._spec.task
        return [lambda step_fn: _numbered(task, step_fn)] if self._spec.training else []

    def inner_loop(self, step_fn: StepFn, reducer: Reducer, stream: Stream) -> "RemoteLoop":
        """See `Backend`."""
        spec = self._spec
        step = Step(spec.strategy, step_fn, reducer, stream, spec.counter)
        if reducer.collects:
            names = ", ".join(sorted(reducer.collects))
            raise ParameterServerError(
                f"{spec.step_name} returns {names} as looplib.each or as media, which parameter server workers "
                "cannot send back; evaluate in a separate job, with --mode=continuous_eval and another "
                "strategy"
            )
        return RemoteLoop(spec.strategy, step, spec.who, spec.counter)


class RemoteLoop(InnerLoop):
    """Runs the steps of a trainer or evaluator on the workers of a cluster with parameter servers.

    Each worker keeps its pipeline. Where that is a function of the number of the batch (`context.indices`), a call says
    which batches it wants by putting their numbers into a queue on its worker, where the pipeline takes them.

    Args:
      strategy: the strategy.
      step: the step.
      who: the class name of the user's trainer or evaluator, for messages.
      counter: int64 `tf.Variable` that counts finished steps.

    Raises:
      UsageError: for what only steps in one order can do.
    """

    def __init__(
        self, strategy: tf.distribute.ParameterServerStrategy, step: Step, who: str, counter: tf.Variable
    ) -> None:
        self.traces = 0
        self.step = step
        self._strategy = strategy
        self._stream: RemoteStream = step.stream
        self._reducer: RemoteReducer = step.reducer
        self._who = who
        self._counter = counter
        self._workers = parameter_servers.counts()[0]
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self._seconds_per_step = _LONGEST
        self._place: DataPosition | None = None
        self._iterators: Any = None
        self._ticket: tf.Variable | None = None
        self._queues = [f"looplib_{uuid.uuid4().hex}" for _ in range(2)]
        self._call = tf.function(self._run)
        self._call_for_part = tf.function(self._run_part)
        if self._stream.training and self._reducer.has_keras_metrics:
            raise ParameterServerError(
                f"{who}.step_fn returns Keras metric objects, and workers that update one together lose counts; "
                "with the strategy parameter_server return values per example, looplib.mean or looplib.total (an "
                "evaluator may return them)"
            )
        if self._by_number:
            self._iterators = self._iterate(self._draw_by_number)
            self._guarded(lambda: self._result(self._schedule(range(0))))  # traces it

    @property
    def _by_number(self) -> bool:
        return self._stream.by_number and not self._reducer.has_keras_metrics

    def run(self, iterator: DataPosition, request: Request) -> LoopResult:
        """See `InnerLoop`; returns when no worker has any step left, and moves the place."""
        steps = request.steps
        return self._guarded(lambda: self._train(iterator, steps) if self._stream.training else self._evaluate(steps))

    def read(self) -> Metrics:
        """See `InnerLoop`."""
        if not self._reducer.created:
            logging.warning("the metrics since the last report are left out: no worker has run a step since the resume")
            return {}
        return self._reducer.packer.unpack(*self._reducer.read())

    def _train(self, place: DataPosition, steps: int) -> LoopResult:
        if place is not self._place and not self._by_number:
            self._iterators = self._iterate(lambda: self._draw_own_share(place.skipped // self._workers))
        self._place = place
        ahead = place.step - int(self._counter)  # batches that rollbacks have left out
        calls, given, done, waited, longest = collections.deque(), 0, 0, 0.0, 0.0
        while True:
            if given < steps and self._may_continue(calls):
                size = self._size(steps - given)
                calls.append(self._schedule(range(place.step + given, place.step + given + size), ahead))
                given += size
            elif calls:
                work = self._result(calls.popleft())
                if self._reducer.finite():  # calls after a bad one do not count
                    done += work.done
                    self._counter.assign_add(work.done)
                self._reducer.add(work.contribution)
                waited += work.waited
                self._seconds_per_step = max(work.seconds, 1e-6) / max(1, work.done)
                longest = max(longest, work.seconds)
                notice.step_seconds = max(notice.step_seconds, _AHEAD * longest)
            else:
                break
        place.step += done
        waited /= self._workers
        return LoopResult(done, self._reducer.finite(), bool(notice.requested), waited=waited, to_stop=_AHEAD * longest)

    def _may_continue(self, calls: Sequence) -> bool:
        return len(calls) < _AHEAD * self._workers and not notice.requested and self._reducer.finite()

    def _size(self, left: int) -> int:
        shortest, longest = (max(1, int(seconds / self._seconds_per_step)) for seconds in (_SHORTEST, _LONGEST))
        share = left if self._workers == 1 else -(-left // (2 * self._workers))
        return min(left, longest, max(shortest, share))

    def _evaluate(self, steps: int) -> LoopResult:
        if self._reducer.has_keras_metrics:  # their variables take one update at a time, so here and one by one
            with self._strategy.scope():
                results = [(0, unpacked(self._call_for_part(*_int64(steps, 1, 0))))]
            self._counter.assign_add(results[0][1].done)
            parts = 1
        else:
            batches = self._stream.properties.sure + 1 if steps < 0 else min(steps, self._stream.properties.sure + 1)
            # Where batches are not determined by their numbers, each worker reads all data once.
            parts = min(_PARTS * self._workers, batches) if self._by_number else self._workers
            results = self._evaluate_parts(steps, batches, parts)
        # In the order of their last batches, which is what `looplib.last` is about.
        results.sort(key=lambda item: (item[1].done - 1) * parts + item[0])
        for _, work in results:
            if work.done:
                self._reducer.add(work.contribution)
        return LoopResult(sum(work.done for _, work in results), self._reducer.finite(), bool(notice.requested))

    def _evaluate_parts(self, steps: int, batches: int, parts: int) -> list[tuple[int, WorkerResult]]:
        calls, given, results = collections.deque(), 0, []
        while True:
            if given < parts and self._may_continue(calls):
                if self._by_number:
                    call = self._schedule(range(given, batches, parts))
                else:
                    call = self._coordinator.schedule(self._call_for_part, args=_int64(steps, parts, given))
                calls.append((given, call))
                given += 1
            elif calls:
                part, call = calls.popleft()
                results.append((part, self._result(call)))
                self._counter.assign_add(results[-1][1].done)
            else:
                return results

    # On a worker.

    def _run(self, iterator: Any, given: tf.Tensor) -> tf.Tensor:
        """Trains on, or evaluates, batches.

        Args:
          iterator: of the worker's pipeline.
          given: int64 `[4]`, in one tensor because each is sent by itself: start, stop and step of the range of the
            batches' numbers, and how many more batches than steps the run has had, because rollbacks left some out.

        Returns:
          See `packed`.
        """
        self._note_trace()
        numbers, ahead = tf.range(given[0], given[1], given[2]), given[3]
        if self._by_number:
            for queue in self._open_queues():
                tf.raw_ops.QueueEnqueueManyV2(handle=queue, components=[numbers])
        started = tf.timestamp()
        done, waited, totals = 0, tf.constant(0, tf.float64), self._reducer.none()
        for _ in tf.range(tf.size(numbers)):
            inputs, seconds = timed(lambda: next(iterator))
            if self._by_number:
                while inputs[1] != numbers[done]:  # of a call that was broken off here
                    inputs, more = timed(lambda: next(iterator))
                    seconds += more
                inputs = inputs[0]
            if self._stream.training:
                inputs = inputs, numbers[done] - ahead
            totals = self._reducer.joined(totals, self.step.contribution(inputs))
            waited += seconds
            done += 1
            if not self._reducer.finite_in(totals):
                break
        return packed(done, started, waited, totals)

    def _run_part(self, limit: tf.Tensor, count: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
        """Evaluates, of the first `limit` batches, each `count`-th from `index` on; see `packed`."""
        self._note_trace()
        started = tf.timestamp()
        done, totals = 0, self._reducer.none()
        iterator = iter(self._stream.make().take(limit).shard(count, index))
        batch = iterator.get_next_as_optional()
        while batch.has_value():
            totals = self._reducer.joined(totals, self.step.contribution(batch.get_value()))
            done += 1
            batch = iterator.get_next_as_optional()
        return packed(done, started, tf.constant(0, tf.float64), totals)

    def _draw_by_number(self) -> tf.data.Dataset:
        """Builds the pipeline of batches by number: numbers come from one queue, and each batch's from the other."""
        numbers, echo = (
            tf.data.Dataset.counter().map(lambda _, queue=queue: _dequeue(queue)) for queue in self._open_queues()
        )
        return tf.data.Dataset.zip((self._stream.make(numbers=numbers), echo))

    def _open_queues(self) -> list[tf.Tensor]:
        """Opens the two queues of the worker that runs this, which exist once."""
        make = tf.raw_ops.FIFOQueueV2
        return [make(component_types=[tf.int64], shapes=[[]], shared_name=name) for name in self._queues]

    def _draw_own_share(self, skipped: int) -> tf.data.Dataset:
        """Builds the pipeline of a worker whose batches are no function of a number: its own part of the data."""
        # Counts up in one op, because workers do it at the same time.
        drawn = tf.raw_ops.ResourceCountUpTo(resource=self._ticket.handle, limit=2**62, T=tf.int64)
        return self._stream.make(drawn % self._workers, self._workers).skip(skipped)

    @tf.autograph.experimental.do_not_convert
    def _note_trace(self) -> None:
        self.traces += 1

    # Calls.

    def _iterate(self, make: Callable[[], tf.data.Dataset]) -> Any:
        """Makes a pipeline on each worker; a worker that comes back after its death makes it again."""
        if self._ticket is None and not self._by_number:
            with tf.device("/job:ps/task:0/device:CPU:0"):
                self._ticket = tf.Variable(0, dtype=tf.int64, trainable=False, name="pipelines")
        try:
            return iter(self._coordinator.create_per_worker_dataset(lambda: make().prefetch(2)))
        except UsageError:
            raise
        except Exception as error:  # whatever a user's pipeline raises
            raise ParameterServerError(
                f"{self._who}.dataset cannot be made on a worker, where it is called in a tf.function ({gist(error)}); "
                "use TensorFlow in it as one does there, without .numpy() or Python that depends on a tensor's value"
            ) from error

    def _schedule(self, numbers: range, ahead: int = 0) -> Any:
        # As a range, because the function would be traced again for each length of a list.
        given = tf.constant([numbers.start, numbers.stop, numbers.step, ahead], tf.int64)
        return self._coordinator.schedule(self._call, args=(self._iterators, given))

    def _result(self, call: Any) -> WorkerResult:
        return unpacked(call.get())

    # Errors.

    def _guarded(self, run: Callable[[], _Result]) -> _Result:
        """Calls a function, and returns when no call on a worker is left, whatever happened."""
        try:
            result = run()
            self._coordinator.join()
            return result
        except UsageError:
            raise
        except Exception as error:  # TensorFlow's coordinator raises types that are no OpError
            raise self._failure(self._first_error(error)) from None

    def _first_error(self, error: Exception) -> BaseException:
        """Waits for all calls, and returns the error that came first, for which others were cancelled."""
        try:
            self._coordinator.join()
        except Exception as first:  # TensorFlow wraps some in types that are no OpError
            return getattr(first, "original_exception", first)  # of a type without a public name (TensorFlow 2.21)
        return error

    def _failure(self, error: BaseException) -> BaseException:
        if isinstance(error, tf.errors.OutOfRangeError) and self._stream.training:
            return ParameterServerError(
                f"the data of {self._who}.dataset ended on a worker; each worker reads by itself, so with the strategy "
                "parameter_server it must not end: repeat() it, and give a number of steps"
            )
        if isinstance(error, tf.errors.OpError) and (found := parse_error(error)).kind in OURS:
            return DataError(found.sentence)
        return _tf.lost_server(error, of_any_process=True) or error  # TensorFlow itself replaces a lost worker


def _count_exactly(optimizer: Any) -> None:
    """Lets an optimizer count by one op, where Keras 3 reads, adds and writes, and workers lose counts."""
    if getattr(optimizer, "gradient_accumulation_steps", None):
        raise ParameterServerError(
            f"{type(optimizer).__name__} has gradient_accumulation_steps, and with the strategy parameter_server "
            "workers add to one accumulator at the same time, so that gradients are lost; use a larger batch"
        )
    iterations = optimizer.iterations
    if _keras.is_variable(iterations):
        variable = iterations.value

        def assign_add(value: Any) -> tf.Tensor:
            with tf.device(variable.device):  # so that a constant is not sent there at each step
                return variable.assign_add(tf.cast(value, variable.dtype))

        Replacement(iterations, "assign_add", lambda _: assign_add)


def _check_data(stream: RemoteStream) -> None:
    """Raises `UsageError` for data that workers cannot read by themselves."""
    context, who = stream.context(), stream.properties.who
    if stream.training and context.requests.calls and not stream.by_number:
        raise ParameterServerError(
            f"{who}.dataset makes more or fewer batches than context.indices, or batches that depend on others (for "
            "example with filter, take or shuffle); with the strategy parameter_server it must make each batch from "
            "one batch of ids, as map does"
        )


def _check_training_data(stream: RemoteStream) -> None:
    """Raises `UsageError` for training data that ends."""
    if not stream.properties.infinite and not stream.properties.unknown:
        raise ParameterServerError(
            f"{stream.properties.who}.dataset ends, but each worker reads by itself; with the strategy "
            "parameter_server training data must not end: repeat() it, and give a number of steps"
        )


def _numbered(task: Trainer, step_fn: StepFn) -> StepFn:
    """Makes a step of (batch, number) from a trainer's step, which finds the number in `global_step`."""

    def numbered_step(inputs: tuple[Any, tf.Tensor]) -> Any:
        batch, number = inputs
        before, task.global_step = task.global_step, number
        try:
            return step_fn(batch)
        finally:
            task.global_step = before

    return numbered_step


@tf.autograph.experimental.do_not_convert
def _dequeue(queue: tf.Tensor) -> tf.Tensor:
    (number,) = tf.raw_ops.QueueDequeueV2(handle=queue, component_types=[tf.int64])
    return tf.ensure_shape(number, [])


def _int64(*numbers: int) -> list[tf.Tensor]:
    return [tf.constant(number, tf.int64) for number in numbers]

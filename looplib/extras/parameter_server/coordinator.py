"""The inner loop of a coordinator: calls of several steps, each done by whichever worker is free.

A call does its steps one after another on one worker, against the weights on the parameter servers, and returns what
they contribute to the metrics. It is told which steps of the run are its own and reads just their batches. So a call
that is done again, as its worker died, counts once, and the coordinator owns the number of steps.
"""

import collections
import uuid

import numpy as np
import tensorflow as tf

from looplib._tf import lost_server
from looplib.errors import UsageError, gist
from looplib.extras.parameter_server.processes import counts
from looplib.health.preemption import notice
from looplib.loop.inner_loops import Ran, timed
from looplib.loop.reducer import Reducer

_AHEAD = 2  # calls for each worker that are under way or wait for it
# A call takes half of a worker's share of what is left, within these seconds: calls get shorter towards a boundary, so
# that workers end together (guided self-scheduling: Polychronopoulos and Kuck, 1987).
_SHORTEST, _LONGEST = 0.05, 0.5
_PARTS = 8  # of an evaluation, for each worker


class RemoteReducer(Reducer):
    """A `Reducer` whose steps run elsewhere, so that it keeps its totals on the coordinator."""

    def _make_totals(self, size):
        return tf.Variable(tf.zeros([size], tf.float64), trainable=False, name=f"{self._who}_totals")

    @tf.autograph.experimental.do_not_convert
    def none(self):
        """Totals of no step, float64 `[n]`; on a worker."""
        return tf.zeros(self._totals.shape, tf.float64)

    @tf.autograph.experimental.do_not_convert
    def finite_in(self, totals):
        """Whether all that is watched is finite in some totals: boolean scalar; on a worker."""
        return tf.math.is_finite(totals[self.packer.size + 1]) if self._watched else tf.constant(True)

    def add(self, contributions):
        """Adds what a call contributed, float64 `[n]`."""
        self._totals.assign(self.joined(self._totals.read_value(), contributions))

    def finite(self):
        """Whether all that is watched was finite so far."""
        return not self._watched or bool(np.isfinite(self._totals.numpy()[self.packer.size + 1]))

    def read(self):
        """See `Reducer`."""
        totals = self._totals.numpy()
        self._totals.assign(np.zeros_like(totals))
        results = {name: metric.result() for name, metric in self.packer.keras.items()}
        for metric in self.packer.keras.values():
            metric.reset_state()
        return totals, results


class RemoteLoop:
    """Runs the steps of a trainer or evaluator on the workers of a cluster with parameter servers.

    Each worker keeps its pipeline. Where that is a function of the number of the batch (`context.indices`), a call says
    which batches it wants by putting their numbers into a queue on its worker, from which the pipeline draws.

    Args:
      strategy: `tf.distribute.ParameterServerStrategy`.
      step: `steps.Step`.
      who: the class name of the user's trainer or evaluator, for messages.
      counter: int64 `tf.Variable` that counts finished steps.

    Raises:
      UsageError: for what only steps in one order can do.
    """

    def __init__(self, strategy, step, who, counter):
        self.traces = 0
        self._strategy = strategy
        self._step = step
        self._stream = step.stream
        self._reducer = step.reducer
        self._who = who
        self._counter = counter
        self._workers = counts()[0]
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self._seconds_per_step = _LONGEST
        self._place = self._iterators = self._ticket = None
        self._queues = [f"looplib_{uuid.uuid4().hex}" for _ in range(2)]
        self._call = tf.function(self._run)
        self._call_for_part = tf.function(self._run_part)
        if self._stream.training and self._reducer.has_keras_metrics:
            raise UsageError(
                f"{who}.step_fn returns Keras metric objects, and workers that update one together lose counts; "
                "with the strategy parameter_server return values per example, looplib.mean or looplib.total (an "
                "evaluator may return them)"
            )
        if self._by_number:
            self._iterators = self._iterate(self._draw_by_number)
            self._guarded(lambda: self._result(self._schedule([])))  # traces it

    @property
    def _by_number(self):
        return self._stream.by_number and not self._reducer.has_keras_metrics

    def trace(self, place):
        """Nothing more to trace."""

    def read(self):
        """Returns the metrics since the last read, and starts anew."""
        return self._reducer.packer.unpack(*self._reducer.read())

    def __call__(self, place, steps, *, sure=0, read=False, horizon=0):
        """Runs steps, and returns when no worker has any left; see `GraphLoop`.

        Args:
          place: `feeds.Place`, which is moved on.
          steps: how many; -1 evaluates to the end of the data.
          sure: not used.
          read: not used.
          horizon: not used.

        Returns:
          `Ran`.
        """
        del sure, read, horizon
        return self._guarded(lambda: self._train(place, steps) if self._stream.training else self._evaluate(steps))

    def _train(self, place, steps):
        if place is not self._place and not self._by_number:
            self._iterators = self._iterate(lambda: self._draw_own_share(place.step // self._workers))
        self._place = place
        ahead = place.step - int(self._counter)  # batches that rollbacks have left out
        calls, given, done, waited, longest = collections.deque(), 0, 0, 0.0, 0.0
        while True:
            if given < steps and self._may_go_on(calls):
                size = self._size(steps - given)
                calls.append(self._schedule(range(place.step + given, place.step + given + size), ahead))
                given += size
            elif calls:
                more, seconds, input_seconds, contribution = self._result(calls.popleft())
                if self._reducer.finite():  # of those that follow a bad one nothing counts
                    done += more
                    self._counter.assign_add(more)
                self._reducer.add(contribution)
                waited += input_seconds
                self._seconds_per_step = max(seconds, 1e-6) / max(1, more)
                longest = max(longest, seconds)
                notice.step_seconds = max(notice.step_seconds, _AHEAD * longest)
            else:
                break
        place.step += done
        waited /= self._workers
        return Ran(done, self._reducer.finite(), bool(notice.requested), waited=waited, to_stop=_AHEAD * longest)

    def _may_go_on(self, calls):
        return len(calls) < _AHEAD * self._workers and not notice.requested and self._reducer.finite()

    def _size(self, left):
        shortest, longest = (max(1, int(seconds / self._seconds_per_step)) for seconds in (_SHORTEST, _LONGEST))
        return min(left, longest, max(shortest, -(-left // (2 * self._workers))))

    def _evaluate(self, steps):
        if self._reducer.has_keras_metrics:  # their variables take one update at a time, so here and one by one
            with self._strategy.scope():
                results = [(0, self._unpack(self._call_for_part(*_int64(steps, 1, 0))))]
            self._counter.assign_add(results[0][1][0])
            parts = 1
        else:
            batches = self._stream.sure + 1 if steps < 0 else min(steps, self._stream.sure + 1)
            # Where nothing tells which batch is where in the data, each worker reads all of it once.
            parts = min(_PARTS * self._workers, batches) if self._by_number else self._workers
            results = self._evaluate_parts(steps, batches, parts)
        # In the order of their last batches, which is what `looplib.last` is about.
        results.sort(key=lambda item: (item[1][0] - 1) * parts + item[0])
        for _, (more, _, _, contribution) in results:
            if more:
                self._reducer.add(contribution)
        return Ran(sum(result[0] for _, result in results), self._reducer.finite(), bool(notice.requested))

    def _evaluate_parts(self, steps, batches, parts):
        calls, given, results = collections.deque(), 0, []
        while True:
            if given < parts and self._may_go_on(calls):
                if self._by_number:
                    call = self._schedule(range(given, batches, parts))
                else:
                    call = self._coordinator.schedule(self._call_for_part, args=_int64(steps, parts, given))
                calls.append((given, call))
                given += 1
            elif calls:
                part, call = calls.popleft()
                results.append((part, self._result(call)))
                self._counter.assign_add(results[-1][1][0])
            else:
                return results

    # On a worker.

    def _run(self, iterator, numbers, ahead):
        """Trains on, or evaluates, the batches of these numbers, int64 `[k]`, which are so far ahead of the steps'."""
        self._note_trace()
        if self._by_number:
            for queue in self._open_queues():
                tf.raw_ops.QueueEnqueueManyV2(handle=queue, components=[numbers])
        started, count = tf.timestamp(), tf.size(numbers)
        done, waited, totals = 0, tf.constant(0, tf.float64), self._reducer.none()
        while done < count and self._reducer.finite_in(totals):
            inputs, seconds = timed(lambda: next(iterator))
            if self._by_number:
                while inputs[1] != numbers[done]:  # of a call that was broken off here
                    inputs, more = timed(lambda: next(iterator))
                    seconds += more
                inputs = inputs[0]
            if self._stream.training:
                inputs = inputs, numbers[done] - ahead
            totals = self._reducer.joined(totals, self._step.contribution(inputs))
            waited += seconds
            done += 1
        return _packed(done, started, waited, totals)

    def _run_part(self, limit, count, index):
        """Evaluates, of the first `limit` batches, each `count`-th from `index` on."""
        self._note_trace()
        started = tf.timestamp()
        done, totals = 0, self._reducer.none()
        iterator = iter(self._stream.make().take(limit).shard(count, index))
        batch = iterator.get_next_as_optional()
        while batch.has_value():
            totals = self._reducer.joined(totals, self._step.contribution(batch.get_value()))
            done += 1
            batch = iterator.get_next_as_optional()
        return _packed(done, started, tf.constant(0, tf.float64), totals)

    def _draw_by_number(self):
        """The pipeline of the numbers in one queue, each batch with its number from the other."""
        numbers, echo = (
            tf.data.Dataset.counter().map(lambda _, queue=queue: _dequeue(queue)) for queue in self._open_queues()
        )
        return tf.data.Dataset.zip((self._stream.make(numbers=numbers), echo))

    def _open_queues(self):
        """Two queues on the worker that runs this, the same each time."""
        make = tf.raw_ops.FIFOQueueV2
        return [make(component_types=[tf.int64], shapes=[[]], shared_name=name) for name in self._queues]

    def _draw_own_share(self, skipped):
        """A pipeline that is no function of the number: its own part of the data, as it comes."""
        # Counts up in one op, as workers do it at the same time.
        drawn = tf.raw_ops.ResourceCountUpTo(resource=self._ticket.handle, limit=2**62, T=tf.int64)
        return self._stream.make(drawn % self._workers, self._workers).skip(skipped)

    @tf.autograph.experimental.do_not_convert
    def _note_trace(self):
        self.traces += 1

    # Calls.

    def _iterate(self, make):
        """Makes a pipeline on each worker, which makes it again when it is back after it died."""
        if self._ticket is None and not self._by_number:
            with tf.device("/job:ps/task:0/device:CPU:0"):
                self._ticket = tf.Variable(0, dtype=tf.int64, trainable=False, name="pipelines")
        try:
            return iter(self._coordinator.create_per_worker_dataset(make))
        except UsageError:
            raise
        except Exception as error:  # whatever a user's pipeline raises
            raise UsageError(
                f"{self._who}.dataset cannot be made on a worker, where it is called in a tf.function ({gist(error)}); "
                "use TensorFlow in it as one does there, without .numpy() or Python that depends on a tensor's value"
            ) from error

    def _schedule(self, numbers, ahead=0):
        numbers = tf.constant(list(numbers), tf.int64, shape=[len(numbers)])
        return self._coordinator.schedule(self._call, args=(self._iterators, numbers, *_int64(ahead)))

    def _result(self, call):
        return self._unpack(call.get())

    @staticmethod
    def _unpack(result):
        result = result.numpy()
        return int(result[0]), float(result[1]), float(result[2]), result[3:]

    # Errors.

    def _guarded(self, run):
        """Calls a function, and returns when no call is under way any more, whatever happened."""
        try:
            result = run()
            self._coordinator.join()
            return result
        except UsageError:
            raise
        except Exception as error:  # TensorFlow's coordinator has types of its own that are no OpError
            raise self._failure(self._first_error(error)) from None

    def _first_error(self, error):
        """What went wrong first: others are cancelled for it. No call is under way any more after this."""
        try:
            self._coordinator.join()
        except Exception as first:  # TensorFlow wraps some in types of its own that are no OpError
            return getattr(first, "original_exception", first)
        return error

    def _failure(self, error):
        if isinstance(error, tf.errors.OutOfRangeError) and self._stream.training:
            return UsageError(
                f"the data of {self._who}.dataset ended on a worker; each worker reads by itself, so with the strategy "
                "parameter_server it must not end: repeat() it, and give a number of steps"
            )
        return lost_server(error, of_any_process=True) or error  # TensorFlow itself replaces a lost worker


def check(split, stream, engine, non_finite):
    """Raises `UsageError` for what steps that several workers do in no fixed order cannot keep.

    Args:
      split: "train" or the evaluator's name.
      stream: `feeds.RemoteStream`.
      engine: a name in `engines.ENGINES`.
      non_finite: the policy of `guards.Guards`.
    """
    if engine in ("xla", "eager"):
        raise UsageError(
            f"loop is {engine}, and with the strategy parameter_server steps run on workers that variables are not on; "
            "use loop=graph"
        )
    if non_finite == "skip":
        raise UsageError(
            "the policy skip undoes a step, and with the strategy parameter_server others have gone on from it; use "
            "halt, rollback or off (--non_finite)"
        )
    if stream.strategy.num_replicas_in_sync > 1:
        raise UsageError(
            f"each worker has {stream.strategy.num_replicas_in_sync} GPUs; with the strategy parameter_server looplib "
            "uses one, so start a worker for each GPU (CUDA_VISIBLE_DEVICES)"
        )
    if split == "train" and stream.positioned and not stream.by_number:
        raise UsageError(
            f"{stream.who}.dataset makes other batches of those of context.indices (by filter or take, say); with the "
            "strategy parameter_server it must make one of each, as map does"
        )
    if split == "train" and not stream.infinite and not stream.unknown:
        raise UsageError(
            f"{stream.who}.dataset ends, and each worker reads by itself; with the strategy parameter_server training "
            "data must not end: repeat() it, and give a number of steps"
        )


def numbered(task, step_fn):
    """A trainer's step as one of (batch, number), which finds its number in `global_step`."""

    def numbered_step(inputs):
        batch, number = inputs
        before, task.global_step = task.global_step, number
        try:
            return step_fn(batch)
        finally:
            task.global_step = before

    return numbered_step


def _packed(done, started, waited, totals):
    """A call's result: float64 [steps, seconds, seconds that they waited for data, *contribution]."""
    with tf.control_dependencies([totals]):
        seconds = tf.timestamp() - started
    return tf.concat([tf.stack([tf.cast(done, tf.float64), seconds, waited]), totals], axis=0)


@tf.autograph.experimental.do_not_convert
def _dequeue(queue):
    (number,) = tf.raw_ops.QueueDequeueV2(handle=queue, component_types=[tf.int64])
    return tf.ensure_shape(number, [])


def _int64(*numbers):
    return [tf.constant(number, tf.int64) for number in numbers]

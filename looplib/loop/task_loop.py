"""The inner loop of one task: its data distributed, its step traced, its loop built, its metrics read."""

import math
import numbers
import re

import numpy as np
import tensorflow as tf
from absl import logging

from looplib import runtime, source_locations
from looplib.cluster.collectives import Workers
from looplib.data import pipelines, stream
from looplib.errors import UsageError, join_names, whole_number
from looplib.health.preemption import notice
from looplib.loop import engines, example_checksum
from looplib.loop.batch_sizes import BatchSizes
from looplib.loop.inner_loops import EagerLoop, StepwiseLoop
from looplib.loop.optimizers import TrainingOptimizers
from looplib.loop.packing import check_metric_name
from looplib.loop.reducer import Reducer
from looplib.loop.step import Step
from looplib.task.evaluator import Evaluator
from looplib.task.state import variables_of
from looplib.task.trainer import Trainer

# What TensorFlow says of an error in the data set's own ops.
_OF_THE_INPUT = re.compile("IteratorGetNext|user-defined function passed to")


class TaskLoop:
    """The inner loop of one trainer or evaluator over its own data.

    Building it builds the data set and traces the step, so that what is wrong with either is found before the first
    step.

    Args:
      split: "train" or the evaluator's name.
      task: the `Trainer` or `Evaluator`.
      strategy: `tf.distribute.Strategy`.
      engine: a name in `engines.ENGINES`.
      global_batch_size: examples of a step over all replicas.
      seed: the run's seed.
      clock: `Clock` that gets the time of tracing as "compile".
      steps_per_loop: steps of a call.
      start_step: global batches that were consumed before.
      counter: int64 `tf.Variable` of finished steps, or None.
      non_finite: the policy of `guards.Guards`, for training.
      chosen: the `chosen` of an earlier start of the run, or None.
    """

    def __init__(
        self, split, task, *, strategy, engine, global_batch_size, seed, clock, steps_per_loop, start_step=0,
        counter=None, non_finite="off", chosen=None,
    ):  # fmt: skip
        self.task = task
        self.who = type(task).__name__
        self._strategy = strategy
        self._clock = clock
        self._iterator = None
        self._counter = counter
        self._position = None
        self._start_step = start_step
        self._optimizers = None
        self._distribution = dict(global_batch_size=global_batch_size, seed=seed, training=split == "train")
        self._stream = pipelines.distribute(strategy, task, start_step=start_step, **self._distribution)
        self._first_stream = self._stream  # which the loop reads all iterators with
        remote = isinstance(self._stream, stream.RemoteStream)
        coordinator = runtime.coordinator() if remote else None
        if remote:
            coordinator.check(split, self._stream, engine, non_finite)
        skips = non_finite == "skip"
        kind = coordinator.RemoteReducer if remote else Reducer
        self.reducer = kind(
            strategy, self.who, count_examples=split != "train", guarded=non_finite != "off", skips=skips
        )
        if split == "train":
            self._optimizers = TrainingOptimizers(task, strategy, noted=non_finite != "off")
        if split != "train" and self._stream.unknown and not self._has_a_batch(split):
            raise UsageError(
                f"the evaluation data set {split!r} is empty: {self.who}.dataset has no batch; check where the data is "
                "read from"
            )
        step_fn = task.step_fn
        if split == "train" and example_checksum.enabled():
            step_fn = example_checksum.add_to(step_fn, lambda: task.global_step if remote else counter)
        self._failed: BaseException | None = None
        self._sizes = None if self._stream.sized else BatchSizes(self.who, self._stream.batch_size)
        if self._sizes:
            step_fn = self._sizes.add_to(step_fn)
        self._tables = None
        if self._stream.arrays is not None:
            self._tables = stream.tables(strategy, self._stream.arrays)
            step_fn = _gathering(step_fn, self._tables)
        if remote and split == "train":
            step_fn = coordinator.numbered(task, step_fn)
        with clock.phase("compile"):
            arguments = (strategy, step_fn, self.reducer, self._stream, counter, skips)
            if remote:
                self._step = Step(*arguments)
                if self.reducer.collects:
                    raise UsageError(
                        f"{self.who}.step_fn returns looplib.each, which the workers of a parameter server strategy "
                        "have no way to hand over; evaluate in a job of its own, with --mode=continuous_eval and "
                        "another strategy"
                    )
                self._engine = coordinator.RemoteLoop(strategy, self._step, self.who, counter)
                return
            collect = getattr(task, "collect", None)
            if engine == "eager":
                self._step = self._engine = EagerLoop(*arguments, collect=collect)
                return
            before = clock.of("compile")
            self._step = Step(*arguments)
            if self.reducer.collects:
                self._engine = StepwiseLoop(self._step, collect)
                return
            self._engine = engines.make(
                engine,
                self._step,
                # An evaluation is one call, whatever the training's are.
                steps_per_loop=steps_per_loop if split == "train" else max(1, min(self._stream.sure, 1000)),
                clock=clock,
                tracing=clock.of("compile") - before,
                chosen=chosen,
            )

    def _has_a_batch(self, split):
        try:
            return self._stream.has_value(self._stream.next_as_optional(self._stream.iterate()))
        except (tf.errors.NotFoundError, tf.errors.DataLossError, tf.errors.PermissionDeniedError) as error:
            raise UsageError(
                f"the evaluation data set {split!r} cannot be read: {error.message.partition(' [Op')[0]}; check where "
                f"{self.who}.dataset reads from"
            ) from error

    @property
    def step(self):
        """The `steps.Step` that the loop runs (an `EagerLoop` with that engine)."""
        return self._step

    @property
    def endless(self):
        """Whether the data is known never to end."""
        return self._stream.infinite

    @property
    def metric_names(self) -> frozenset[str] | None:
        """The names of the metrics that `read` returns; None where the trace does not tell them."""
        packer = self.reducer.packer
        if packer.slots is None or type(self.task).loop_end not in (Trainer.loop_end, Evaluator.loop_end):
            return None
        return frozenset(packer.names) | packer.keras.keys()

    @property
    def traces(self):
        """How often the loop was traced."""
        return self._engine.traces

    @property
    def chosen(self):
        """The `EngineChoice` of an engine that chooses, or None."""
        return getattr(self._engine, "record", None)

    def position(self):
        """The place in the data after the last `run`, as bytes for `rewind`; None where `start_step` has to do."""
        if self._sizes and self.reducer.created:
            self._sizes.look(self.reducer.packer, self.reducer.state().totals)
        return self._stream.position(self._iterator) if self._iterator is not None else self._position

    def rewind(self, start_step=0, position=None):
        """Lets the next `run` start with the data after `start_step` global batches.

        Args:
          start_step: how many were consumed.
          position: bytes from `position` at that step, which spare the pipeline to read and skip what came before.
        """
        self._end_data()
        self._position = position
        if start_step != self._start_step:
            self._start_step = start_step
            self._stream = pipelines.distribute(self._strategy, self.task, start_step=start_step, **self._distribution)

    def place_of(self, error: BaseException) -> str:
        """The line of the user's program that an error of the last `run` comes from; "" if it is none of that."""
        if error is not self._failed:
            return ""
        steps = [self._step.function] if isinstance(self._step, Step) else []
        place = source_locations.place_of(error, steps)
        if not place and _OF_THE_INPUT.search(str(error)):
            place = source_locations.place_of_function(type(self.task).dataset)
        return place

    def left_whole(self, error: BaseException) -> bool:
        """Whether an error of the last `run` came between two steps, so that no variable is updated by half a step."""
        if isinstance(error, KeyboardInterrupt):  # Python sees it once the loop on the device has ended with a step
            return not isinstance(self._engine, EagerLoop)
        return isinstance(error, UsageError) or bool(_OF_THE_INPUT.search(str(error)))

    def close(self):
        """Lets go of the data, and gives the optimizers back as they were."""
        self._end_data()
        if self._optimizers is not None:
            self._optimizers.close()

    def _end_data(self):
        if self._iterator is not None:
            self._stream.end(self._iterator)
        self._iterator = None

    def resume(self, step):
        """Goes on with the data after `step` global batches, where the last `run` failed on its way."""
        if self._iterator is None and step != self._start_step:
            self.rewind(step)

    def warn_of_what_is_not_saved(self, objects):
        """Warns of variables that the step uses and `objects`, the state of a checkpoint, does not hold."""
        saved = {
            _identity(component)
            for variable in [*(variable for _, variable in variables_of(objects)), *tf.nest.flatten(self._tables)]
            for component in self._strategy.experimental_local_results(variable)
        }
        saved.add(_identity(self._counter))  # the controller's own
        names = [variable.name for variable in self._step.variables if _identity(variable) not in saved]
        if names:
            logging.warning(
                "%s.step_fn uses variables that no attribute of the trainer holds, so that they are not saved and a "
                "resumed run starts them anew: %s",
                self.who,
                ", ".join(sorted(names)[:10]),
            )
        if random := self._step.random_ops:
            logging.warning(
                "%s.step_fn draws random numbers whose state nobody can save (%s), so that a resumed run draws others; "
                "use tf.random.stateless_* with seed=self.step_seed(), a tf.random.Generator attribute, or layers of "
                "Keras 3; with tf_keras, call tf_keras.backend.experimental.enable_tf_random_generator() before making "
                "layers",
                self.who,
                join_names(random),
            )

    def run(self, steps, phase, read=False, horizon=0):
        """Runs steps on the data that follows.

        Args:
          steps: how many; -1 runs to the end of the data.
          phase: the clock's phase for the time that it takes, without tracing and without waiting for the input.
          read: whether `read` follows if all is done.
          horizon: steps that the run is known to go on for.

        Returns:
          `loops.Ran`.
        """
        with self._clock.phase(phase):
            if self._iterator is None:
                self._iterator, self._position = self._stream.iterate(self._position), None
                self._sure = self._stream.sure - (0 if self._stream.positioned else self._start_step)
                if not self._engine.traces:
                    with self._clock.phase("compile"):
                        self._engine.trace(self._iterator)
            try:
                before, suspended = self._clock.of(phase), notice.suspended
                ran = self._engine(self._iterator, steps, sure=max(0, self._sure), read=read, horizon=horizon)
                self._sure -= ran.done
                if ran.done:
                    seconds = self._clock.of(phase) - before - (notice.suspended - suspended)
                    notice.step_seconds = max(ran.to_stop, seconds / ran.done)
                self._clock.move(ran.compiled, phase, "compile")
                if phase == "train":
                    self._clock.move(ran.waited, phase, "input")
                return ran
            except BaseException as error:  # a KeyboardInterrupt too, after which a notebook may train on
                self._failed = error
                self._end_data()  # it has moved on past what was not trained
                if not self.endless or not isinstance(error, tf.errors.OutOfRangeError):
                    raise
                raise UsageError(
                    f"the data of {self.who}.dataset ended, though it says it never does; check for repeat() of an "
                    "empty data set, or of files without examples"
                ) from error

    def note_end(self, step, target):
        """Says that the data ended before the step that was asked for; raises `UsageError` if there was none.

        Waits for the other workers.
        """
        if left_out := self._first_stream.left_out(self._stream.sure - self._sure):
            if Workers(self._strategy).is_chief:  # once is enough
                logging.warning(
                    "the training data ended at step %d on some workers only: %s; give each as many batches, or "
                    "repeat() them",
                    step,
                    left_out,
                )
        if not step:
            raise UsageError(
                f"the training data set is empty: {self.who}.dataset has no batch, or not one for each "
                "replica; check where the data is read from, and that drop_remainder does not drop the only batch"
            )
        if target != -1:
            logging.warning("the training data ended at step %d, before step %d; repeat() it to train on", step, target)

    def read(self):
        """Returns the metrics since the last read, finished by `loop_end`, as a dict from name to int or float."""
        metrics = self._engine.read()
        metrics = self._sizes.check(metrics) if self._sizes else metrics
        # The checksum is no matter of the user's.
        checksum = {name: metrics.pop(name) for name in [example_checksum.METRIC] if name in metrics}
        return {**as_numbers(self.who, self.task.loop_end(metrics)), **checksum}


def make_loop(split, task, **settings):
    """Returns the `TaskLoop` of a task, or the loop that the task makes itself, with the same methods."""
    if hasattr(task, "make_loop"):
        return task.make_loop(split, **settings)
    return TaskLoop(split, task, **settings)


def check_evaluation(evaluations, steps):
    """Checks that there is something to evaluate, and an end to it.

    Args:
      evaluations: dict from name to `TaskLoop`.
      steps: how many steps were asked for; -1 for all data.

    Returns:
      int, the steps.

    Raises:
      UsageError: if not.
    """
    if not evaluations:
        raise UsageError("this controller has no evaluator; give Controller(evaluator=...) to evaluate")
    steps = whole_number("the number of evaluation steps", steps, or_all=True)
    for name, evaluation in evaluations.items():
        if steps == -1 and evaluation.endless:
            raise UsageError(
                f"the evaluation data set {name!r} never ends ({evaluation.who}.dataset is infinite), "
                "so its evaluation would not either; leave out repeat(), or give a number of evaluation steps"
            )
    return steps


def as_numbers(who, metrics):
    """Checks the metrics that a `loop_end` returned; returns them as Python numbers.

    Args:
      who: the class name of the user's trainer or evaluator, for messages.
      metrics: dict from name to number.

    Raises:
      UsageError: for something else.
    """
    if not isinstance(metrics, dict):
        raise UsageError(f"{who}.loop_end returned a {type(metrics).__name__}; expected the dict of metrics to report")
    converted = {}
    for name, value in metrics.items():
        check_metric_name(who, name)
        array = np.asarray(value)
        if array.shape != () or not isinstance(array.item(), numbers.Real):
            raise UsageError(
                f"the metric {name!r} of {who} is not a number (shape {list(array.shape)}, {array.dtype}); derive "
                "numbers from it in loop_end and leave it out of what loop_end returns"
            )
        value = array.item()
        converted[name] = value if isinstance(value, int) or not math.isfinite(value) else float(value)
    return converted


def _gathering(step_fn, tables):
    """The step of rows as a step of row numbers, int64 `[b]`."""
    return lambda ids: step_fn(tf.nest.map_structure(lambda table: tf.gather(table, ids), tables))


def _identity(variable):
    """What tells whether two are one variable, also if one of them is wrapped, as those on parameter servers are."""
    return id(getattr(variable, "handle", variable))

"""The loop of one task: its data distributed, its step traced, its inner loop built, its metrics read."""

import atexit
import dataclasses
import functools
import operator
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
from absl import logging

from looplib.base.messages import OURS, gist, join_names, parse_error, whole_number
from looplib.cluster.collectives import Workers
from looplib.cluster.preemption import notice
from looplib.cluster.updates import TrainingOptimizers, refuse_others
from looplib.compat import places
from looplib.compat import tensorflow as _tf
from looplib.compat.tensorflow import converted
from looplib.data import causes, service
from looplib.data.context import PipelineMemory
from looplib.data.order import Batches, Epoch
from looplib.data.pipelines import Pipelines
from looplib.data.streams import Stream
from looplib.errors import (
    DataError,
    DatasetError,
    EmptyDataError,
    EndlessDataError,
    EngineError,
    MetricError,
    MissingPartError,
    StaleTraceError,
    UsageError,
)
from looplib.guards.guards import Diverged, Guards, check_loss, check_skipped
from looplib.loop import additions
from looplib.loop.additions import add_share, check_share, count_examples_alone
from looplib.loop.contracts import Loop, LoopResult, Request, Specification, StepAddition, StreamIterator, TrainingLoop
from looplib.loop.engines import Backend, Decorator, backend_of
from looplib.loop.packing import check_metric_name
from looplib.loop.step import Step, StepFn
from looplib.loop.step_checks import TracedValues, check_metrics, check_own_updates
from looplib.report.clock import Clock
from looplib.report.writers.contract import Shown
from looplib.run import metric_names
from looplib.task.plain import as_number
from looplib.task.record import EngineChoice
from looplib.task.state import tables_of, unheld
from looplib.task.trainer import Evaluator, OwnLoop, Trainer, rates_of


class Window:
    """The training steps since the last report. Their time is that of the clock's phases "train" and "input".

    Attributes:
      start: the step of the last report, or the one that the training continued from. The first is part of the state of
        a run, because a checkpoint within a window holds its metrics so far.
    """

    def __init__(self, training: TrainingLoop, clock: Clock, guards: Guards) -> None:
        self.start = 0
        self._training, self._clock, self._guards = training, clock, guards
        self._mark = (0, 0.0)

    def measure_from(self, step: int) -> None:
        """Starts to measure the speed at a step."""
        self._mark = step, self._seconds()

    def metrics(self, step: int, losses: list[float], complete: int) -> dict[str, float]:
        """Ends the window at a step; returns its metrics, with `steps_per_second` and, if it is known, the `epoch`.

        This window's loss is added to the last reported `losses`; `complete` is the steps of a complete window. Raises
        `Diverged` if the loss jumps, or every step was skipped.
        """
        steps, seconds = step - self._mark[0], self._seconds() - self._mark[1]
        with self._clock.phase("report"):
            metrics = self._training.read_metrics()
            check_skipped(step, metrics, step - self.start)
            self.start = step
            loss = metrics.get(self._training.task.loss_name)
            check_loss(losses, step, loss, self._guards, complete)
            if steps and seconds:
                metrics["steps_per_second"] = round(steps / seconds, 2)
                for name, value in rates_of(self._training.task).items():
                    metrics[name] = as_number(f"the rate {name!r} of {self._training.who}", value) * steps / seconds
            if (epochs := self._training.epochs_at(step)) is not None:
                metrics["epoch"] = round(epochs, 3)
        self.measure_from(step)
        return metrics

    def _seconds(self) -> float:
        return self._clock.of("train") + self._clock.of("input")


_SUSPENDED_SECONDS = 2.0  # what is shorter may be a wait for the interpreter lock or for a processor
_reading: "weakref.WeakSet[TaskData]" = weakref.WeakSet()  # those that have an iterator


class TaskData:
    """The data of one task: the stream of its batches, the iterator over it, and where that stands."""

    def __init__(self, spec: Specification, backend: Backend) -> None:
        self._spec, self._backend = spec, backend
        self.batches = Batches(spec.config.global_batch_size, spec.earlier)
        self.memory = PipelineMemory()
        self.read = 0  # steps that were run since the iterator was made
        self.stream = self._distribute(spec.start_step)  # built again for another position
        self.first_stream = self.stream  # which the inner loop reads all iterators with
        self.iterator: StreamIterator = None  # None while no step reads the data
        self.position: bytes | None = None  # of the next iterator; None where the stream's step determines it
        self.sure = 0  # further steps that the iterator certainly has batches for
        self.counted_before = 0  # steps of other evaluations that the counter had when the iterator was made

    def _distribute(self, start_step: int) -> Stream:
        spec = self._spec
        return Pipelines(
            spec.strategy,
            spec.task,
            spec.config,
            spec.left_out,
            self.memory,
            training=spec.training,
            start_step=start_step,
            earlier=self.batches.earlier,
            in_blocks=spec.may_compile,
            remote=self._backend.remote_stream,
        ).distribute()

    def iterate(self) -> None:
        """Makes an iterator, from the position of the last `rewind`."""
        self.counted_before = 0 if self._spec.training else int(self._spec.counter)
        self.read = 0
        if self.memory.followed is not None:
            self.memory.followed.begin(self.position, self.stream.start_step)
        self.iterator, self.position = self.stream.iterate(self.position), None
        _reading.add(self)
        self.sure = self.stream.properties.sure - self.stream.skipped_steps

    def end(self, wait: bool = False) -> None:
        """Ends the iterator, if there is one."""
        if self.iterator is not None:
            if self.memory.followed is not None:
                self.memory.followed.close()
            self.stream.end(self.iterator, wait)
        self.iterator = None
        _reading.discard(self)

    def rewind(self, start_step: int, position: bytes | None, batches: Batches) -> None:
        """See `Loop`."""
        self.end()
        self.position = position
        self._backend.check_earlier(self.batches, batches)
        if (start_step, batches) != (self.stream.start_step, self.batches):
            self.batches = batches
            self.renew(start_step)

    def renew(self, start_step: int) -> None:
        """Builds the data again, to begin after `start_step` global batches."""
        self.end()
        self.stream = self._distribute(start_step)
        self.stream.share(self.first_stream)


class TaskLoop(TrainingLoop):
    """The loop of one trainer or evaluator, over its own data.

    Building it builds the data set and traces the step, so that an error in either is found before the first step.
    """

    def __init__(self, spec: Specification) -> None:
        self.task, self.who = spec.task, spec.who
        self._spec = spec
        self._build()

    def _build(self) -> None:
        spec = self._spec
        self._failed: BaseException | None = None
        backend = backend_of(spec)
        self.data = TaskData(spec, backend)
        stream, properties = self.data.stream, self.data.stream.properties
        self.examples, self.order = properties.examples, properties.order
        backend.check(stream)
        self.reducer = backend.reducer()
        # From here until `close` the trainer's optimizers are looplib's.
        self._optimizers = (
            TrainingOptimizers(spec.task, spec.strategy, noted=bool(spec.watched_loss)) if spec.training else None
        )
        if not spec.training and properties.unknown:
            self._check_for_a_batch()
        self._additions: list[StepAddition] = [*spec.additions]
        if spec.training:
            self._additions += additions.of_training(spec, properties)
        self._tables = None if stream.arrays is None else backend.tables(stream.arrays)
        if spec.training:
            spec.clock.of_input = self._slowest_stage
        self._trace(backend, converted(spec.task.step_fn))

    def _trace(self, backend: Backend, step_fn: StepFn) -> None:
        """Traces a step of the task, and makes the inner loop that runs it."""
        spec = self._spec
        step_fn = functools.reduce(lambda step, add: add(step), self._decorators(backend), step_fn)
        with spec.clock.phase("compile"):
            self._inner = backend.inner_loop(step_fn, self.reducer, self.data.stream)
        self._traced = TracedValues(spec.task) if self._inner.step is not None else None
        if self._inner.step is not None and spec.strategy.num_replicas_in_sync > 1:  # these call the step again
            check_share(spec.task, self._inner.step, self._scratch)
            check_metrics(self._inner.step, spec.step_name, self.reducer.packer.keras)
            if spec.training:
                check_own_updates(self._inner.step, spec.step_name, spec.task)

    def _decorators(self, backend: Backend) -> list[Decorator]:
        """Returns everything that is added to the user's step, innermost first."""
        refuse = functools.partial(metric_names.refuse_in, who=self._spec.step_name, rates=lambda: rates_of(self.task))
        added = [functools.partial(addition.add_to_step, task=self.task) for addition in self._additions]
        decorators: list[Decorator] = [refuse, *added]
        if self._tables is not None:
            rows = _rows_in_sequence if self.data.stream.properties.sequential else tf.gather
            decorators.append(functools.partial(_gathering, tables=self._tables, rows=rows))
        if self.task.batches == "global":
            decorators.append(functools.partial(add_share, task=self.task))
        if self.data.stream.properties.may_be_empty:
            joins = functools.partial(getattr, self.reducer, "joins")
            decorators.append(functools.partial(count_examples_alone, task=self.task, joins=joins))
        return [*decorators, *backend.decorators()]

    @property
    def _scratch(self) -> list[tf.Variable]:
        return [variable for addition in self._additions for variable in addition.scratch]

    def _check_for_a_batch(self) -> None:
        """Raises `UsageError` if data of unknown length has no batch, or cannot be read."""
        split, stream = self._spec.split, self.data.stream
        try:
            has_a_batch = stream.has_value(stream.next_as_optional(stream.iterate()))
        except (tf.errors.NotFoundError, tf.errors.DataLossError, tf.errors.PermissionDeniedError) as error:
            raise DatasetError(
                f"the evaluation data set {split!r} cannot be read: {gist(error)}; check where {self.who}.dataset "
                "reads from"
            ) from error
        if not has_a_batch:
            raise no_batch(split, self.who)

    @property
    def batches(self) -> Batches:
        """See `TrainingLoop`."""
        return self.data.batches

    @property
    def epoch(self) -> Epoch | None:
        """See `TrainingLoop`."""
        return self.data.stream.properties.epoch

    @property
    def fingerprint(self) -> dict[str, str] | None:
        """See `TrainingLoop`."""
        return self.data.first_stream.properties.fingerprint or None

    @property
    def traced(self) -> Step | None:
        """See `Loop`."""
        return self._inner.step

    @property
    def step(self) -> Step:
        """See `Loop`."""
        if self._inner.step is None:
            raise EngineError(f"the eager loop traces no step of {self.who} to look at; use loop=graph")
        return self._inner.step

    @property
    def endless(self) -> bool:
        """See `Loop`; files that are followed are trained on until something stops that."""
        return self.data.stream.properties.infinite and self.data.memory.followed is None

    @property
    def metric_names(self) -> frozenset[str] | None:
        """See `Loop`."""
        packer = self.reducer.packer
        if packer.slots is None or type(self.task).loop_end not in (Trainer.loop_end, Evaluator.loop_end):
            return None
        return frozenset(packer.names) | packer.keras.keys()

    @property
    def traces(self) -> int:
        """See `Loop`."""
        return self._inner.traces

    @property
    def chosen(self) -> EngineChoice | None:
        """See `Loop`."""
        return self._inner.record

    def run(self, request: Request, phase: str) -> LoopResult:
        """See `Loop`; the loop knows itself for how many steps the data is sure to last."""
        with self._spec.clock.phase(phase):
            if self.data.iterator is None:
                self.data.iterate()
                if not self._inner.traces:
                    with self._spec.clock.phase("compile"):
                        self._inner.trace(self.data.iterator)
            try:
                return self._run(request, phase) if self.data.memory.followed is None else self._follow(request, phase)
            except BaseException as error:  # a KeyboardInterrupt too, after which a notebook may train on
                self._failed = error
                self.data.end()  # it has moved past examples that were not trained on
                if (explained := self._explained(error)) is not None:
                    raise explained from error
                raise

    def _follow(self, request: Request, phase: str) -> LoopResult:
        """Runs steps as their files appear."""
        total, data, workers = LoopResult(0, True), self.data, Workers(self._spec.strategy)
        while True:
            rest = request.after(total.done)
            with self._spec.clock.phase("waiting"):
                steps = data.memory.followed.ready(
                    workers, data.batches, data.stream.start_step + data.read, rest.steps
                )
            if not steps:
                continue
            if steps < 0:
                return dataclasses.replace(total, stopped=True)
            ran = self._run(rest.first(steps), phase)
            total = total.then(ran)
            if total.done == request.steps or ran.done < steps or not ran.go:
                return total

    def _explained(self, error: BaseException) -> Exception | None:
        """Returns an error of the steps or their data as one that says its cause, where that is known."""
        if isinstance(error, tf.errors.OpError) and (found := parse_error(error)).kind in OURS:
            return DataError(found.sentence)
        if isinstance(error, tf.errors.OpError) and (sentence := service.explained(error)):
            return DataError(sentence)
        if ops := _tf.lacking_in_xla(error):
            return EngineError(
                f"XLA cannot compile what {self._spec.step_name} computes with jit_compile, because it has no "
                f"{join_names(ops)}; compute that outside of it, or leave out jit_compile"
            )
        if lengths := _tf.lengths_of_a_wrong_epoch(error):
            return DataError(
                f"{self.who}.dataset was to have {lengths[0]} batches in each epoch, and one had {lengths[1]}; "
                "give each epoch as many, such as by a filter without random numbers, or train by steps"
            )
        if isinstance(error, tf.errors.OpError) and _tf.is_of_the_input(error):
            steps = 0 if self._spec.config.overfit_batch else int(self._spec.counter) - self.data.counted_before
            if (named := causes.find(self.task.dataset, self.data.stream.context(), steps)) is not None:
                return DataError(
                    f"{named}, is refused by {self.who}.dataset: {found}; restore the file if it is damaged, or "
                    f"fix {self.place_of(error) or 'the functions of its maps'}"
                )
        if self.endless and isinstance(error, tf.errors.OutOfRangeError):
            return DatasetError(
                f"the data of {self.who}.dataset ended although its cardinality is infinite; check for repeat() of "
                "an empty data set, or of files without examples"
            )
        return None

    def _run(self, request: Request, phase: str) -> LoopResult:
        if self._traced:
            self._traced.check(self._spec.step_name)
        clock = self._spec.clock
        before, suspended = clock.of(phase), notice.suspended
        ran = self._inner.run(self.data.iterator, dataclasses.replace(request, sure=max(0, self.data.sure)))
        self.data.sure -= ran.done
        self.data.read += ran.done
        suspended = notice.suspended - suspended
        if ran.done:
            seconds = clock.of(phase) - before - suspended
            notice.step_seconds = max(ran.to_stop, seconds / ran.done)
        if suspended > _SUSPENDED_SECONDS:
            clock.move(suspended, phase, "suspended")
        clock.move(ran.compiled, phase, "compile")
        if phase == "train":
            clock.move(min(ran.waited, clock.of(phase) - before), phase, "input")
        return ran

    def progress(self) -> float:
        """See `Loop`; what counts is data that is read again by a run that resumes."""
        stream, followed = self.data.stream, self.data.memory.followed
        read_again = stream.passed + (stream.loader.passed if stream.loader is not None else 0)
        return read_again + (followed.looks if followed is not None else 0)

    def read_metrics(self) -> dict[str, int | float]:
        """See `Loop`."""
        metrics = self._inner.read()
        if not self.reducer.created:
            return {}  # no step has been run, and the loop has warned of it
        own = [addition.take(metrics) for addition in self._additions]  # which the user's `loop_end` does not see
        before = dict(metrics)
        finished = as_numbers(self.who, self.task.loop_end(metrics))
        metric_names.check_finished(self.who, before, finished, rates_of(self.task))
        return functools.reduce(operator.or_, own, finished)

    def shown(self) -> dict[str, Shown]:
        """See `Loop`."""
        return self._inner.shown()

    def position(self, batches: int) -> bytes | None:
        """See `TrainingLoop`."""
        if self._additions and self.reducer.created:
            read = functools.cache(lambda: self.reducer.state().totals)  # where several workers train, they gather
            for addition in self._additions:
                addition.check(self.reducer.packer, read)
        for addition in self._additions:
            addition.check_state()
        data = self.data
        if data.iterator is None:
            return data.position
        return (
            data.stream.position(data.iterator, batches)
            if data.memory.followed is None
            else data.memory.followed.save()
        )

    def rewind(self, start_step: int = 0, position: bytes | None = None, batches: Batches | None = None) -> None:
        """See `Loop`."""
        self.data.rewind(start_step, position, batches or self.batches)

    def renew(self) -> None:
        """See `TrainingLoop`."""
        self.data.renew(self.data.stream.start_step)

    def resume(self, step: int) -> None:
        """See `TrainingLoop`."""
        if self.data.iterator is None and step != self.data.stream.start_step:
            self.rewind(step)

    def retrace(self, layers: str) -> None:
        """See `Loop`; raises `UsageError` if a function of the user's own was traced before, and is not again."""
        before = _tf.functions_in(self._inner.step.function) if self._inner.step else set()
        self.close()
        self._build()
        if self._inner.step and (kept := before & _tf.functions_in(self._inner.step.function)):
            raise StaleTraceError(
                f"{self._spec.step_name} calls {join_names(sorted(kept))}, which were traced with other constants of "
                f"{layers} than those that are restored; leave out tf.function there, or adapt these layers in the "
                "program, as that run did, before the controller is built"
            )

    def close(self) -> None:
        """See `Loop`; restores the optimizers' original methods."""
        clock = self._spec.clock
        if self._spec.training and clock.waits_for_input and self.data.iterator is not None:
            slowest = self._slowest_stage()
            clock.of_input = lambda: slowest
        self.data.end()
        if self._optimizers is not None:
            self._optimizers.close()

    def _slowest_stage(self) -> tuple[str, str] | None:
        """Returns the slowest stage of the data, and what to change; see `Clock.of_input`."""
        if self.data.iterator is None:
            return None
        stream = self.data.stream
        if stream.properties.served:
            return "data workers make the batches", "start more of them, or make their functions cheaper"
        found = causes.of(self.data.iterator, stream.copy_seconds(), stream.context().requests)
        return (str(found), found.advice) if found else None

    def place_of(self, error: BaseException) -> str:
        """See `Loop`."""
        if error is not self._failed:
            return ""
        place = places.place_of(error, [self._inner.step.function] if self._inner.step else [])
        if not place and _tf.is_of_the_input(error):
            place = places.place_of_function(type(self.task).dataset)
        return place

    def failed_between_steps(self, error: BaseException) -> bool:
        """See `TrainingLoop`."""
        if isinstance(error, KeyboardInterrupt):
            return self._inner.ends_steps
        return isinstance(error, (UsageError, Diverged)) or _tf.is_of_the_input(error)

    def foresee_end(self, target: int) -> None:
        """See `TrainingLoop`."""
        stream = self.data.stream
        lengths = stream.properties.lengths
        if lengths is None or lengths.steps is None:
            return
        last = lengths.steps + (0 if stream.positioned else stream.start_step - stream.skipped_steps)
        ends = target == -1 or target > last
        if ends and (left_out := lengths.left_out()) and Workers(self._spec.strategy).is_chief:
            logging.warning(
                "%s.dataset lasts for %d steps: it has %s; give each replica as many batches, or repeat() them",
                self.who,
                last,
                left_out,
            )

    def note_end(self, step: int, target: int) -> None:
        """See `TrainingLoop`; waits for the other workers."""
        data, lengths = self.data, self.data.stream.properties.lengths
        foreseen = lengths is not None and lengths.steps is not None
        left_out = "" if foreseen else data.first_stream.left_out(data.stream.properties.sure - data.sure)
        if left_out and Workers(self._spec.strategy).is_chief:  # once is enough
            logging.warning(
                "the training data ended at step %d on some workers only: %s; give each as many batches, or "
                "repeat() them",
                step,
                left_out,
            )
        if not step:
            raise EmptyDataError(
                f"the training data set is empty: {self.who}.dataset has no batch, or not one for each "
                "replica; check where the data is read from, and that drop_remainder does not drop the only batch"
            )
        if target != -1:
            logging.warning("the training data ended at step %d, before step %d; repeat() it to train on", step, target)

    def warn_of_what_is_not_saved(self, objects: dict[str, Any]) -> None:
        """See `TrainingLoop`; a loop that traces no step does not know its variables."""
        if self._inner.step is None:
            return
        own = [*tf.nest.flatten(self._tables), self._spec.counter, *self._scratch]  # the controller's
        names = unheld(self._spec.strategy, self._inner.step.variables, objects, own)
        refuse_others(self._spec.strategy, self._inner.step.variables, names)
        if names:
            logging.warning(
                "%s uses variables that are not attributes of the trainer; they are not saved, and a resumed "
                "run starts them from their initial values: %s",
                self._spec.step_name,
                ", ".join(sorted(names)[:10]),
            )
        if unsaved := self._inner.step.unsaved(saves_tables=bool(tables_of(objects))):
            logging.warning(
                "%s uses %s; if these keep a state, it is not saved, and a resumed run differs; keep state in "
                "variables that are attributes of the trainer",
                self._spec.step_name,
                ", ".join(unsaved),
            )
        if random := self._inner.step.random_ops:
            logging.warning(
                "%s draws random numbers whose state cannot be saved (%s); a resumed run draws different ones; "
                "use tf.random.stateless_* with seed=self.step_seed(), a tf.random.Generator attribute, or layers of "
                "Keras 3; with tf_keras, call tf_keras.backend.experimental.enable_tf_random_generator() before making "
                "layers",
                self._spec.step_name,
                join_names(random),
            )


def no_batch(split: str, who: str) -> UsageError:
    """Returns the error of an evaluation without data."""
    return EmptyDataError(
        f"the evaluation data set {split!r} is empty: {who}.dataset has no batch; check where the data is read from"
    )


@atexit.register
def _end_all_data() -> None:
    """Ends the data of loops that nobody has closed, at the end of the process while Python still runs.

    Later, Python would wait for an iterator whose `tf.py_function` waits for Python, and the process would never end.
    """
    for data in list(_reading):
        data.end(wait=True)  # at an exit, Python 3.12 starts no thread


def make_loop(spec: Specification) -> Loop:
    """Returns the `TaskLoop` of a task, or the loop that the task makes itself; a `TrainingLoop` for a trainer."""
    if spec.config.overfit_batch and isinstance(spec.task, OwnLoop):
        raise EngineError(
            f"overfit_batch repeats the first batch of {spec.who}.dataset, which is not read here; expected a trainer "
            "with data of looplib's, and no parameter servers; leave out --overfit_batch"
        )
    if spec.training and spec.task.training_phases is not None:
        from looplib.loop.phased_loop import PhasedLoop  # here, as it is made of loops

        return PhasedLoop(spec)
    return spec.task.make_loop(spec) if isinstance(spec.task, OwnLoop) else TaskLoop(spec)


def check_evaluation(evaluations: Mapping[str, Loop], steps: int) -> int:
    """Returns a number of evaluation steps, -1 for all data; raises `UsageError` if the evaluation would not end.

    So it does where there is nothing to evaluate. The loops are given by the names of the evaluators.
    """
    if not evaluations:
        raise MissingPartError(
            "this controller has no evaluator; give Controller(evaluator=...) to evaluate, such as "
            "trainer.evaluator() of a KerasTrainer with validation_data"
        )
    steps = whole_number("the number of evaluation steps", steps, or_all=True)
    for name, evaluation in evaluations.items():
        if isinstance(evaluation.task, Evaluator) and evaluation.task.predicts_only:
            raise MissingPartError(
                f"the evaluator {name!r} has rows to predict for, and no data to evaluate on; give it some, such as "
                "trainer.evaluator(x, y, predict_data=...) of a KerasTrainer, or train without an evaluation "
                "(controller.train, --mode=train)"
            )
        if steps == -1 and evaluation.endless:
            raise EndlessDataError(
                f"the evaluation data set {name!r} never ends ({evaluation.who}.dataset is infinite), "
                "so its evaluation would not either; leave out repeat(), or give a number of evaluation steps"
            )
    return steps


def as_numbers(who: str, metrics: object) -> dict[str, int | float]:
    """Returns the metrics of a `loop_end` as Python numbers; raises `UsageError` for anything but a dict of numbers."""
    if not isinstance(metrics, dict):
        raise MetricError(f"{who}.loop_end returned a {type(metrics).__name__}; expected the dict of metrics to report")
    converted = {}
    for name, value in metrics.items():
        check_metric_name(who, name)
        converted[name] = as_number(f"the metric {name!r} of {who}", value)
    return converted


def _gathering(step_fn: StepFn, tables: Any, rows: Callable[[Any, tf.Tensor], tf.Tensor]) -> StepFn:
    """Makes a step of row numbers, int64 `[b]`, from a step of the rows."""
    return lambda ids: step_fn(tf.nest.map_structure(lambda table: rows(table, ids), tables))


def _rows_in_sequence(table: Any, ids: tf.Tensor) -> tf.Tensor:
    """Returns consecutive rows as a slice, which is no copy on a CPU."""
    first = tf.reduce_sum(ids[:1])  # 0 for a batch without examples
    count = tf.shape(ids, tf.int64)[0]
    begin, size = [first, *[0] * (len(table.shape) - 1)], [count, *table.shape[1:]]
    return tf.ensure_shape(tf.slice(table, begin, size), [*ids.shape, *table.shape[1:]])

"""The loops of a run: one for its trainer, and one for each evaluator."""

import contextlib
import dataclasses
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import tensorflow as tf
from absl import logging

from looplib.base.messages import join_names, whole_number
from looplib.cluster.collectives import Workers
from looplib.compat import patches
from looplib.compat import tensorflow as _tf
from looplib.config.run_config import RunConfig
from looplib.data.context import BadRecords
from looplib.data.order import Batches, Epoch
from looplib.errors import ClosedError, EndlessDataError, MissingPartError, SettingError, StepError
from looplib.loop import task_loop
from looplib.loop.contracts import Boundary, Loop, LoopResult, Request, Specification, StepAddition, TrainingLoop
from looplib.loop.task_loop import TaskLoop
from looplib.report.clock import Clock
from looplib.task import checks
from looplib.task.averages import refuse_in_use
from looplib.task.record import EngineChoice, RunRecord
from looplib.task.state import no_weights, state_of, values_kept
from looplib.task.trainer import Adapter, Evaluator, Trainer

# The newest loops of each trainer, by the trainer's id: a trainer that is a dataclass has no hash.
_newest: weakref.WeakValueDictionary[int, "Loops"] = weakref.WeakValueDictionary()


def loops_of(trainer: Trainer) -> "Loops | None":
    """Returns the loops of the newest controller of a trainer that is not closed."""
    found = _newest.get(id(trainer))
    return None if found is None or found.closed else found


class Loops:
    """The loops of a run, and the counters of their steps.

    They share a configuration and a strategy. The clock gets the time of all of them. `left_out` are the damaged
    records that the run has left out.
    """

    def __init__(
        self, config: RunConfig, strategy: tf.distribute.Strategy, clock: Clock, left_out: BadRecords | None = None
    ) -> None:
        self.config, self.strategy = config, strategy
        self._clock, self._left_out = clock, left_out
        self.global_step, self.evaluated = _tf.outside(
            lambda: [
                tf.Variable(0, dtype=tf.int64, trainable=False, name=name)
                for name in ("global_step", "evaluated_steps")
            ]
        )
        self.training: TrainingLoop | None = None  # once it is built
        self.evaluations: dict[str, Loop] = {}  # by name
        self.closed = False
        self.step = 0  # what the controller has counted, or restored
        self.borrower = ""  # the evaluator that has the training's variables now
        self.half_updated = False  # whether a step has failed, which may have updated only a part of the variables
        self._borrowings: weakref.WeakKeyDictionary[Loop | Loops, BorrowedState] = weakref.WeakKeyDictionary()
        self._unread: set[str] = set()  # evaluators whose last evaluation failed or was stopped

    def build(
        self,
        trainer: Trainer | None,
        evaluators: Mapping[str, Evaluator],
        start_step: int,
        record: RunRecord,
        non_finite: str,
        actions: Sequence[object],
    ) -> None:
        """Builds the data sets and traces the steps.

        Args:
          trainer: the trainer, or None.
          evaluators: the evaluators, by name.
          start_step: global batches that the run has consumed.
          record: the record of an earlier start of the run.
          non_finite: the policy of `guards.Guards`, for training.
          actions: of the controller; a `StepAddition` among them adds to the steps of the training.
        """

        def make_loop(split: str, task: Trainer | Evaluator, **others: Any) -> Loop:
            return task_loop.make_loop(self._specification(split, task, chosen=record.engines.get(split), **others))

        for task in filter(None, (trainer, *evaluators.values())):
            self.attach(task)
        if trainer:
            self._warn_of_others(trainer)
            if self.strategy.num_replicas_in_sync > 1:
                patches.synchronize(state_of(trainer))
            checks.build_optimizers(trainer, self.strategy, self.config.loop)
            batches = self.batches_after(record, start_step - record.input_offset)
            self.training = make_loop(
                "train",
                trainer,
                start_step=start_step,
                earlier=batches.earlier if batches else (),
                counter=self.global_step,
                non_finite=non_finite,
                additions=tuple(action for action in actions if isinstance(action, StepAddition)),
            )
        for name, task in evaluators.items():
            self.evaluations[name] = make_loop(name, task, counter=self.evaluated)
        if trainer:
            _newest[id(trainer)] = self  # last, as a build that fails is none that anybody could close

    def _specification(self, split: str, task: Trainer | Evaluator, **others: Any) -> Specification:
        config = self.config
        if isinstance(task, Evaluator):
            size = task.global_batch_size or config.global_batch_size
            config = dataclasses.replace(config, global_batch_size=size, overfit_batch=False)
        return Specification(split, task, self.strategy, self._clock, config, left_out=self._left_out, **others)

    def batches_after(self, record: RunRecord, step: int) -> Batches | None:
        """Returns the sizes of the global batches of a run that continues from a step; None if it has none."""
        size = self.config.global_batch_size
        return None if size is None else record.batches(step, size)

    def prediction_loop(self, name: str, task: Evaluator, start_step: int) -> TaskLoop:
        """Returns a new loop that predicts from `start_step` on by a named evaluator, for the caller to close."""
        return TaskLoop(self._specification(name, task, start_step=start_step, counter=self.evaluated))

    def attach(self, task: Trainer | Evaluator) -> None:
        """Sets the attributes of the run on a task, again before each use: another controller may have set its own."""
        task.global_step = self.global_step
        if isinstance(task, Trainer):
            task.global_batch_size, task.run_seed = self.config.global_batch_size, self.config.seed

    def _warn_of_others(self, trainer: Trainer) -> None:
        if loops_of(trainer) is not None:
            logging.warning(
                "this %s is also the trainer of another controller that is not closed: both train its weights, and "
                "each counts and saves its own steps only; close the other one",
                type(trainer).__name__,
            )

    @property
    def by_name(self) -> dict[str, Loop]:
        """All loops, by "train" and the names of the evaluators."""
        return {**({"train": self.training} if self.training else {}), **self.evaluations}

    @property
    def engines(self) -> dict[str, EngineChoice]:
        """The choices of `loop="auto"` so far, by split."""
        return {split: loop.chosen for split, loop in self.by_name.items() if loop.chosen}

    @property
    def choices(self) -> dict[str, dict[str, Any]]:
        """The `engines` as plain dicts, for a user and for `run.json`."""
        return {split: dataclasses.asdict(choice) for split, choice in self.engines.items()}

    @property
    def steps_per_epoch(self) -> float | None:
        """The steps of one pass over the training data; None if not known, or nothing is trained."""
        return self.training.steps_per_epoch if self.training else None

    def steps_of(self, steps: int | None, epochs: float | None) -> int:
        """Returns the step to train to, given by `steps` or by `epochs`; `UsageError` if it cannot be known."""
        if self.training is None:
            raise MissingPartError("this controller has no trainer; give Controller(trainer=...) to train")
        if (steps is None) == (epochs is None):
            raise SettingError(f"steps is {steps} and epochs is {epochs}; give one of the two")
        if epochs is None:
            return steps
        epoch = self._epoch(epochs)
        if not isinstance(epochs, (int, float)) or not (epochs > 0 and math.isfinite(epochs)):
            raise SettingError(f"epochs is {epochs!r}; expected a positive number")
        examples = Fraction(str(float(epochs))) * epoch.examples  # 0.1 as it is written
        return self.training.batches.step_of(examples, epoch)

    def evaluation_intervals(self, given: int | Mapping[str, int] | None) -> dict[str, int]:
        """Returns the steps between evaluations by evaluator; by default of an epoch with the present batch size."""
        if isinstance(given, Mapping):
            if given.keys() != self.evaluations.keys():
                names = join_names(list(given)) or "nothing"
                raise SettingError(
                    f"eval_interval has intervals of {names}; expected one for each of the evaluators "
                    f"{join_names(list(self.evaluations))}"
                )
            return {name: whole_number(f"eval_interval[{name!r}]", given[name]) for name in self.evaluations}
        steps = math.ceil(self._epoch(1).steps(self.training.batches.size)) if given is None else given
        return dict.fromkeys(self.evaluations, whole_number("eval_interval", steps))

    def _epoch(self, epochs: float) -> Epoch:
        training = self.training
        adapted = training.task if isinstance(training.task, Adapter) else None
        if training.epoch is None and adapted and adapted.own_steps_per_loop(self.config.global_batch_size, True):
            training.renew()
        if training.epoch is None:
            raise EndlessDataError(
                f"epochs is {epochs}, and the length of the training data is not known, or it never ends; give steps, "
                "or make the data with context.indices, or set context.steps_per_epoch in dataset"
            )
        return training.epoch

    def check_end(self, end: int) -> int | None:
        """Returns the step to train to, None for the end of the data; raises `UsageError` if that never comes."""
        end = whole_number("the number of training steps", end, or_all=True)
        if end == -1 and self.training.endless:
            raise EndlessDataError(
                f"{self.training.who}.dataset never ends, so training to its end would not either; give a number of "
                "steps"
            )
        self.training.foresee_end(end)
        return None if end == -1 else end

    def train(self, step: int, boundary: Boundary, horizon: int) -> LoopResult:
        """Runs the steps up to a boundary; fewer if the data ends, a signal comes or a value is not finite.

        Args:
          step: the current step.
          boundary: where to stop.
          horizon: the last step that the training is known to reach.
        """
        refuse_in_use("train")
        try:
            request = Request(boundary.step - step, read=boundary.report, horizon=horizon - step, show=boundary.shows)
            ran = self.training.run(request, "train")
        except BaseException as error:
            self.half_updated = not self.training.failed_between_steps(error)
            if not self.half_updated:  # whole steps may have run before it
                self.step = int(self.global_step)
            raise
        self.step = step + ran.done
        self.check_count(ran.counted)
        return ran

    def refuse_if_unfit(self, what: str, kept: str | None) -> None:
        """Raises `UsageError` if the run is closed, or a failed step may have updated only a part of the variables.

        The sentence names the call `what` that is refused, and the path `kept` of the newest checkpoint, if any.
        """
        if self.closed:
            raise ClosedError(
                f"{what} was called on a closed controller; another one may own its run directory; build a new one"
            )
        if self.half_updated:
            cure = (
                f"call controller.restore_checkpoint(), which goes back to {kept}"
                if kept
                else "there is no checkpoint to go back to, so build the trainer and the controller again"
            )
            raise ClosedError(
                f"{what} was called after a step that failed, which may have updated only a part of the variables; "
                f"{cure}"
            )
        self.check_count()

    def check_count(self, counted: int | None = None) -> None:
        """Raises `UsageError` if the global step, which a loop may have read, is not what the controller counted.

        So does a trainer's own count that differs from it.
        """
        if self.training is None:
            return
        counted = int(self.global_step) if counted is None else counted
        if counted != self.step:
            raise StepError(
                f"the global step is {counted} after step {self.step}: {self.training.who}, an action or the program "
                "assigns global_step, which only the controller may change; remove the assignment (looplib.Start("
                "continue_from=PATH) begins at the step of a checkpoint)"
            )
        own = self.training.own_count
        if own not in (None, self.step):
            raise StepError(
                f"{self.training.who} counts {own} steps at step {self.step} of the run, so something else than its "
                "training has assigned its global step; assign it before the controller is built, which then begins "
                "at this step, or call controller.restore_checkpoint()"
            )

    def begin_at(self, step: int | None) -> int:
        """Sets the step that a run begins at, which it returns; None for the trainer's own count, or 0."""
        if self.training is None:
            self.step = step or 0
            return self.step
        own = self.training.own_count if step is None else None
        self.step = step or own or 0
        if own:
            self.global_step.assign(own)
        self.training.count_from(self.step)
        self.check_count()
        return self.step

    def progress(self) -> tuple[int, int, list[float]]:
        """Returns the global step and other numbers; at least one changes while a loop makes progress."""
        within = [loop.progress() for loop in self.by_name.values()]
        return int(self.global_step), int(self.evaluated), within

    def evaluate(self, name: str, steps: int) -> dict[str, float] | None:
        """Runs an evaluator for some steps, -1 for all data; returns its metrics, None if a signal ended it.

        Raises `UsageError` if there is no batch.
        """
        loop = self.evaluations[name]
        self.attach(loop.task)
        if name in self._unread:
            loop.reducer.clear()
        self._unread.add(name)
        with self.borrowing(loop), loop.task.evaluating():
            try:
                ran = loop.run(Request(steps, read=True, show=True), "evaluate")
            finally:
                loop.rewind()  # now, so that its data takes no memory and no time from the training that follows
            if ran.done and not ran.stopped:
                with self._clock.phase("report"):
                    metrics = loop.read_metrics()
                self._unread.remove(name)
                return metrics
        if ran.stopped:
            return None
        raise task_loop.no_batch(name, loop.who)

    @contextlib.contextmanager
    def borrowing(self, loop: Loop | None = None) -> Iterator[None]:
        """Returns a context manager for an evaluation or a prediction, see `BorrowedState`; None for one by no loop."""
        if self.training is None:
            yield
            return
        key = loop or self
        if key not in self._borrowings or self._borrowings[key].step is not self.training.traced:
            self._borrowings[key] = BorrowedState(self.strategy, self.training, loop)
        before, self.borrower = self.borrower, (loop or self.training).who
        try:
            with self._borrowings[key].borrowed():
                yield
        finally:
            self.borrower = before

    def refuse_if_borrowed(self, what: str) -> None:
        """Raises `UsageError` if an evaluation or a prediction has changed variables that the call `what` needs."""
        if self.borrower:
            raise ClosedError(
                f"{what} was called while {self.borrower} evaluates or predicts, which may have other values in the "
                "variables, such as averages of the weights; call it afterwards, such as in an action of the Controller"
            )

    def retrace(self, layers: str) -> None:
        """Traces all steps again, because constants of layers have changed; see `Loop.retrace`."""
        self._borrowings.clear()
        for loop in self.by_name.values():
            loop.retrace(layers)

    def close(self) -> None:
        """Closes each loop, also where another one fails."""
        self.closed = True
        with contextlib.ExitStack() as stack:
            for loop in self.by_name.values():
                stack.callback(loop.close)


_Variables = dict[int, tf.Variable]  # by their `identity_of`


class BorrowedState:
    """State that a training lends to an evaluation or a prediction.

    Moving statistics and the like may differ between replicas: each of them evaluates with the values that an export
    writes. What the evaluation updates, such as the state of a stateful RNN, is put back. The variables are those that
    the traced steps use and update; where no step is traced, all of the trainer's that are no weights.
    """

    def __init__(self, strategy: tf.distribute.Strategy, training: Loop, evaluation: Loop | None) -> None:
        self._workers, self.step = Workers(strategy), training.traced
        state = [
            (variable, strategy.experimental_local_results(variable))
            for variable in no_weights(training.task, state_of(training.task))
        ]
        every = [part for _, parts in state for part in parts]
        (trained, trains), (evaluated, evaluates) = (_uses(strategy, loop, every) for loop in (training, evaluation))
        several = strategy.num_replicas_in_sync > 1
        self._differing = [
            (variable, parts)
            for variable, parts in state
            if several and trains.keys() & (ids := set(map(_tf.identity_of, parts))) and evaluated.keys() & ids
        ]
        differing = {_tf.identity_of(part): part for _, parts in self._differing for part in parts}
        updated = {key: part for key, part in evaluates.items() if key in trained}
        self._kept = list((differing | updated).values())
        clear = evaluation.reducer.clear if evaluation else lambda: None
        # TensorFlow warns of a step on replicas that is not traced.
        self._clear = tf.function(clear, autograph=False) if several and evaluation and evaluation.traced else clear

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[None]:
        """Returns a context manager that an evaluation runs in; workers wait for each other."""
        with values_kept(self._kept):
            if self._differing:
                values = [tf.identity(variable) for variable, _ in self._differing]
                from_chief = self._workers.gather_tensors([values])[0]  # which writes an export
                for (_, parts), value in zip(self._differing, from_chief):
                    for part in parts:
                        part.assign(value)
            if self._kept:
                self._clear()  # of metrics that the training has too
            yield


def _uses(
    strategy: tf.distribute.Strategy, loop: Loop | None, every: Iterable[tf.Variable]
) -> tuple[_Variables, _Variables]:
    """Returns the variables used by the step of a loop, and the subset that it may update."""
    traced = loop.traced if loop else None
    variables = traced.variables if traced else every
    used = {_tf.identity_of(part): part for one in variables for part in strategy.experimental_local_results(one)}
    updated = _tf.updated_by(traced.function) if traced else used.keys()
    return used, {key: part for key, part in used.items() if key in updated}

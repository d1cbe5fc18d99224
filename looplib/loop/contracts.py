"""Contracts of the loops: when they stop, what they are made of, and what one run of a loop gives."""

import abc
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from looplib.config.run_config import RunConfig
from looplib.data.context import BadRecords
from looplib.data.order import Batches, BatchSizePeriod, Epoch
from looplib.errors import StaleTraceError
from looplib.loop.packing import Packer
from looplib.loop.reducer import Accumulator
from looplib.loop.step import Step, StepFn
from looplib.report.clock import Clock
from looplib.report.writers.contract import Shown
from looplib.task.record import EngineChoice
from looplib.task.trainer import Evaluator, Trainer


@dataclasses.dataclass(frozen=True)
class Boundary:
    """A step at which something is due."""

    step: int  # the global step
    report: bool  # whether the training metrics since the last report are due
    save: bool  # whether a checkpoint is due
    # the evaluators that are due. None at the end, where the controller evaluates after the final save.
    evaluators: tuple[str, ...]
    end: bool  # whether the training ends here

    @property
    def shows(self) -> bool:
        """Returns whether the media of this step are shown: with a report, and at the end."""
        return self.report or self.end


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Reports, saves and evaluations at exact multiples of their intervals, counted from step 0 of the run."""

    report_every: int  # steps between reports
    save_every: int  # steps between checkpoints
    # steps between evaluations, by evaluator; empty for a training without any
    evaluate_every: Mapping[str, int] = dataclasses.field(default_factory=dict)
    end: int | None = None  # the step to train to; None trains to the end of the data
    stops: tuple[int, ...] = ()  # further steps where the inner loop returns

    def boundaries(self, step: int) -> Iterator[Boundary]:
        """Yields the boundaries after a step, in order: each multiple of an interval, each stop, and the end."""
        intervals = {self.report_every, self.save_every, *self.evaluate_every.values()}
        while self.end is None or step < self.end:
            later = [stop for stop in self.stops if stop > step]
            step = min(*(step - step % every + every for every in intervals), *later, math.inf)
            step = step if self.end is None else min(step, self.end)
            yield Boundary(
                step,
                report=step % self.report_every == 0,
                save=step % self.save_every == 0,
                evaluators=self.evaluators_at(step),
                end=step == self.end,
            )

    def evaluators_at(self, step: int) -> tuple[str, ...]:
        """Returns the evaluators that are due at a step on the way to the end."""
        on_the_way = step not in (0, self.end)
        return tuple(name for name, every in self.evaluate_every.items() if on_the_way and step % every == 0)

    def next_evaluation(self, step: int) -> int | None:
        """Returns the step of the next evaluation after a step; None without any, or once the end is reached."""
        if not self.evaluate_every or step == self.end:
            return None
        after = min(step - step % every + every for every in self.evaluate_every.values())
        return after if self.end is None else min(after, self.end)

    def horizon(self, boundary: Boundary) -> int:
        """Returns the last step that the training is known to reach, unless something stops it: the end, if known."""
        return boundary.step if self.end is None else self.end


Metrics = dict[str, Any]  # what a user's metrics are, before `loop_end`: Python numbers and numpy arrays by name
StreamIterator = Any  # what the stream's `iterate` returns; only the stream knows its type


@dataclasses.dataclass(frozen=True)
class Request:
    """An order to an inner loop."""

    steps: int  # number of steps; -1 runs to the end of the data
    sure: int = 0  # number of steps for which the data certainly has batches of full size
    # whether the caller reads the metrics next if all steps are done. A loop may fetch them in the same call.
    read: bool = False
    horizon: int = 0  # number of steps that the run is known to do from here on. A loop may prepare itself for them.
    show: bool = False  # whether the caller shows media of these steps, see `InnerLoop.shown`

    def after(self, done: int) -> "Request":
        """Returns the request for the rest of the steps, once some are done."""
        steps = self.steps if self.steps < 0 else self.steps - done
        return dataclasses.replace(self, steps=steps, sure=max(0, self.sure - done), horizon=self.horizon - done)

    def first(self, steps: int) -> "Request":
        """Returns the request for the first steps alone."""
        return dataclasses.replace(self, steps=steps, read=self.read and steps == self.steps)


@dataclasses.dataclass(frozen=True)
class LoopResult:
    """The result of one call of an inner loop."""

    done: int  # number of steps. It is less than requested if the data ended, a signal came or a value was not finite.
    finite: bool  # whether all values that the reducer watches were finite
    stopped: bool = False  # whether a signal asked this worker, or another one, to end
    waited: float = 0.0  # seconds that steps waited for their data
    compiled: float = 0.0  # seconds that TensorFlow took to optimize and compile the loop, in its first call
    to_stop: float = 0.0  # seconds that a stop may take, where that is longer than a step
    counted: int | None = None  # the counter of steps as the loop has read it after the last step; None if it has not

    @property
    def go(self) -> bool:
        """Whether another step may follow."""
        return self.finite and not self.stopped

    def then(self, other: "LoopResult") -> "LoopResult":
        """Returns the result of this call and a later one together."""
        waited, compiled = self.waited + other.waited, self.compiled + other.compiled
        return dataclasses.replace(other, done=self.done + other.done, waited=waited, compiled=compiled)


class InnerLoop(abc.ABC):
    """Runs many steps for one call from the host."""

    step: Step | None = None  # the traced step; None for a loop that traces none
    traces: int = 0  # how often TensorFlow traced the loop
    ends_steps: bool = True  # whether a KeyboardInterrupt reaches Python only after a complete step
    # the choice of a loop that chooses between engines; None before it is made, and for all other loops
    record: EngineChoice | None = None

    @abc.abstractmethod
    def run(self, iterator: StreamIterator, request: Request) -> LoopResult:
        """Runs steps, until the requested number, the end of the data, a signal or a value that is not finite."""

    @abc.abstractmethod
    def read(self) -> Metrics:
        """Returns the metrics since the last read, and resets them."""

    def shown(self) -> dict[str, Shown]:
        """Returns the media of the last `run`, by name, and forgets them.

        They come from the first replica, if it had examples: from the last step of a training, if that was requested
        and reached; from the first step of an evaluation.
        """
        return {}

    def trace(self, iterator: StreamIterator) -> None:
        """Traces the loop for an iterator, so that no later call does. A loop that traces nothing does nothing."""


class StepAddition:
    """Something that looks at the steps and the state of a training; an action may be one.

    All methods do nothing by default. Where several workers train, all call them.

    Attributes:
      scratch: its variables that hold nothing between two steps, so that no checkpoint has to; none by default.
    """

    scratch: Sequence[tf.Variable] = ()

    def add_to_step(self, step_fn: StepFn, task: Trainer) -> StepFn:
        """Wraps the user's step on one replica, to have totals of its own among the metrics."""
        return step_fn

    def take(self, metrics: Metrics) -> Metrics:
        """Removes its own totals from the metrics of a report, and checks them; returns what is reported of them."""
        return {}

    def check(self, packer: Packer, read: Callable[[], list[list[float]]]) -> None:
        """Checks the totals of each replica since the last report, before a save.

        `read` returns them by replica and by the places that the `packer` has for names; all workers have to call it.
        """

    def check_state(self) -> None:
        """Checks the state, which is saved next."""


@dataclasses.dataclass(frozen=True)
class Specification:
    """The parts that the loop of one trainer or evaluator is built from."""

    split: str  # "train" or the evaluator's name
    task: Trainer | Evaluator  # the `Trainer` or `Evaluator`
    strategy: tf.distribute.Strategy  # the strategy that the steps run on
    clock: Clock  # gets the time of tracing as "compile"
    config: RunConfig  # the settings of the controller; of an evaluator, with its own global batch size
    counter: tf.Variable | None = None  # int64 `tf.Variable` of finished steps, or None
    start_step: int = 0  # global batches that were consumed before
    earlier: tuple[BatchSizePeriod, ...] = ()  # batches of other sizes
    non_finite: str = "off"  # the policy of `guards.Guards`, for training
    chosen: EngineChoice | None = None  # the `Loop.chosen` of an earlier start of the run, or None
    # the damaged records that the run has left out, and how many it may; None for none
    left_out: BadRecords | None = None
    additions: tuple[StepAddition, ...] = ()  # to the steps of a training

    @property
    def training(self) -> bool:
        """Whether this is the loop of the trainer."""
        return self.split == "train"

    @property
    def who(self) -> str:
        """The class name of the task, for messages."""
        return type(self.task).__name__

    @property
    def step_name(self) -> str:
        """The user's method that a step calls, such as "Digits.step_fn", for messages."""
        return f"{self.who}.{self.task.step_method}"

    @property
    def may_compile(self) -> bool:
        """Returns whether steps may run as chunks in XLA, which takes one replica."""
        return self.config.loop in ("auto", "xla") and self.strategy.num_replicas_in_sync == 1

    @property
    def watched_loss(self) -> str:
        """Returns the name of the loss if values that are not finite are looked for in each step; else ""."""
        return self.task.loss_name if isinstance(self.task, Trainer) and self.non_finite != "off" else ""

    @property
    def skips(self) -> bool:
        """Returns whether a step with a value that is not finite is undone."""
        return self.non_finite == "skip"


class Loop(abc.ABC):
    """The loop of one trainer or evaluator over its own data, as a controller calls it."""

    task: Trainer | Evaluator  # the `Trainer` or `Evaluator`
    who: str  # the class name of the user's object, for messages
    reducer: Accumulator  # what the steps have added up since the last `read_metrics`
    traces: int = 0  # how often the loop was traced
    traced: Step | None = None  # the traced step; None where there is none to look at
    chosen: EngineChoice | None = None  # the choice of `loop="auto"`, or None
    # the names of the metrics that `read_metrics` returns; None where they are not known before
    metric_names: frozenset[str] | None = None

    @property
    @abc.abstractmethod
    def step(self) -> Step:
        """The traced step; raises `UsageError` where there is none to look at."""

    @property
    @abc.abstractmethod
    def endless(self) -> bool:
        """Returns whether the data is known never to end."""

    @abc.abstractmethod
    def run(self, request: Request, phase: str) -> LoopResult:
        """Runs steps on the data that follows; `phase` of the clock gets the time without tracing and input."""

    @abc.abstractmethod
    def read_metrics(self) -> dict[str, int | float]:
        """Returns the metrics since the last read, finished by the task's `loop_end`, and resets them."""

    def shown(self) -> dict[str, Shown]:
        """Returns the media of the last `run`, see `InnerLoop.shown`."""
        return {}

    @abc.abstractmethod
    def rewind(self, start_step: int = 0, position: bytes | None = None, batches: Batches | None = None) -> None:
        """Makes the next `run` start with the data after `start_step` global batches.

        The bytes from `position` at that step spare the pipeline to read and skip earlier batches. `batches` are the
        sizes of the global batches; None does not change them.
        """

    def retrace(self, layers: str) -> None:
        """Traces the step again, and builds the data set, because constants of `layers`, their names, have changed.

        Raises `UsageError` if what was traced is not looplib's, and may compute with the earlier constants.
        """
        raise StaleTraceError(
            f"{self.who} has its own loop, which may have been traced with other constants of {layers} than those that "
            "are restored; adapt these layers in the program, as that run did, before the controller is built"
        )

    @abc.abstractmethod
    def close(self) -> None:
        """Releases the data, and undoes what was done to the user's objects."""

    def place_of(self, error: BaseException) -> str:
        """Returns the line of the user's program that caused an error of the last `run`; "" if it is not known."""
        return ""

    def progress(self) -> float:
        """Returns a number that changes while a `run` makes progress that the counter of steps does not show."""
        return 0


class TrainingLoop(Loop):
    """The loop of a trainer, whose position in the data is saved and restored."""

    batches: Batches | None = None  # the sizes of the global batches; None for data that looplib does not read
    epoch: Epoch | None = None  # how many examples are an epoch; None where that is not known
    examples: int | None = None  # how many examples the data has; None where that is not known
    order: Sequence[int] = ()  # see `DatasetRequests.order`
    # of the files of the data, see `RecordReader.fingerprint`; None where it is not known
    fingerprint: dict[str, str] | None = None

    @property
    def own_count(self) -> int | None:
        """The steps that the trainer counts itself; None if only the controller counts them."""
        return None

    def count_from(self, step: int) -> None:
        """Sets the trainer's own count, if it has one."""

    @property
    def steps_per_epoch(self) -> float | None:
        """The steps of one pass over the data; None if not known."""
        return self.epoch.steps(self.batches.size) if self.epoch else None

    def epochs_at(self, step: int) -> float | None:
        """Returns how often the data has come at a step; None where the length of an epoch is not known."""
        return float(self.batches.trained(step, self.epoch) / self.epoch.examples) if self.epoch else None

    def renew(self) -> None:
        """Builds the data again, once the trainer knows the length of an epoch."""

    @abc.abstractmethod
    def position(self, batches: int) -> bytes | None:
        """Returns the position in the data after the last `run`, for `rewind`; None if the step determines it.

        `batches` is the number of global batches that the run has consumed.
        """

    @abc.abstractmethod
    def resume(self, step: int) -> None:
        """Continues with the data after `step` global batches, where the last `run` failed in the middle."""

    @abc.abstractmethod
    def failed_between_steps(self, error: BaseException) -> bool:
        """Returns whether an error of the last `run` came between two steps, so that none has updated only a part."""

    def foresee_end(self, target: int) -> None:
        """Warns of data that a training to the step `target` (-1: the end) leaves out, if that is known before it."""

    @abc.abstractmethod
    def note_end(self, step: int, target: int) -> None:
        """Warns that the data ended at a step before `target` (-1: the end); raises `UsageError` if it had no step."""

    @abc.abstractmethod
    def warn_of_what_is_not_saved(self, objects: dict[str, Any]) -> None:
        """Warns of variables that the training uses and a checkpoint of these objects, by name, does not hold."""

"""Trainers and evaluators with loops of their own, Orbit's, under looplib's outer loop.

Nothing here imports Orbit: a trainer is what has `train(num_steps)`, an evaluator what has `evaluate(num_steps)`.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from looplib.base.messages import join_names
from looplib.cluster.collectives import Workers
from looplib.cluster.preemption import notice
from looplib.cluster.updates import TrainingOptimizers
from looplib.compat import keras as _keras
from looplib.data.order import Batches
from looplib.errors import MetricError, OrbitError
from looplib.loop.contracts import Loop, LoopResult, Request, Specification, TrainingLoop
from looplib.loop.reducer import Accumulator, State
from looplib.loop.step import Step
from looplib.loop.task_loop import as_numbers
from looplib.orbit.data import Data, datasets_of
from looplib.run import metric_names
from looplib.task.plain import as_array, as_number, is_number
from looplib.task.record import RunningTotals
from looplib.task.state import state_of, variables_of
from looplib.task.trainer import Evaluator, OwnLoop, Trainer


class OrbitResults(Accumulator):
    """The metrics of the last call, in place of the sums of a `Reducer`.

    Attributes:
      bad: names of the losses in them that are not finite.
    """

    def __init__(self) -> None:
        self.bad: list[str] = []
        self._metrics: dict[str, np.ndarray] = {}
        self._steps = 0

    def take(self, metrics: dict[str, np.ndarray], steps: int) -> None:
        """Replaces the metrics by the results of a call of some steps."""
        self._metrics, self._steps = metrics, self._steps + steps

    def metrics(self) -> dict[str, np.ndarray]:
        """Returns the metrics and forgets them."""
        metrics = self._metrics
        self.clear()
        return metrics

    def clear(self) -> None:
        """See `Accumulator`."""
        self._metrics, self._steps = {}, 0

    def first_bad(self) -> tuple[int, list[str]]:
        """See `Accumulator`; the step is the last one of the call."""
        return self._steps, self.bad

    def state(self) -> State:
        """Returns the metrics that are not yet read."""
        return {
            name: as_number(name, value)
            for name, value in self._metrics.items()
            if value.ndim == 0 and is_number(value)
        }

    def load(self, state: State) -> None:
        """See `Accumulator`."""
        state = {} if isinstance(state, RunningTotals) else state
        numbers = {name: np.asarray(value) for name, value in state.items()}
        self._metrics = {name: value for name, value in numbers.items() if value.ndim == 0 and is_number(value)}
        self._steps = 0


def flat(who: str, results: Any, prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, numpy array) of what may be dicts in a dict; their names are joined by "/"."""
    if not isinstance(results, dict):
        raise MetricError(f"{who} returned a {type(results).__name__}; expected a dict from metric name to number")
    for name, value in results.items():
        name = f"{prefix}{name}" if isinstance(name, str) else name
        if isinstance(value, dict):
            yield from flat(who, value, f"{name}/")
        else:
            yield name, as_array(value)


def is_bad_loss(name: str, value: np.ndarray) -> bool:
    """Returns whether a metric is a loss by its name, and not finite."""
    return "loss" in str(name).lower() and is_number(value) and not np.isfinite(value.astype(np.float64)).all()


# Attributes of Orbit's classes that are no state.
_NO_STATE = {f"_{split}_{part}" for split in ("train", "eval") for part in ("dataset", "iter", "loop_fn", "options")}
_STEP = "orbit_step"


class _OrbitAdapter(OwnLoop[Specification, Loop]):
    """The common part of both adapters: a checkpoint finds the state of Orbit's object in their attributes."""

    base_initialized = False

    def __init__(
        self, whose: Any, method: str, global_step: Any = None, checkpoint: tf.train.Checkpoint | None = None
    ) -> None:
        if not callable(getattr(whose, method, None)):
            raise OrbitError(
                f"{type(self).__name__} got a {type(whose).__name__}; expected an object with {method}(num_steps), "
                "such as an instance of a subclass of Orbit's classes"
            )
        if checkpoint is not None and not isinstance(checkpoint, tf.train.Checkpoint):
            raise OrbitError(
                f"{type(self).__name__} got a {type(checkpoint).__name__} as checkpoint; expected a "
                "tf.train.Checkpoint with the objects to save"
            )
        self.base_initialized = True
        self._whose = lambda: whose  # as an attribute it would be state, with all that it holds
        _adopt(self, checkpoint if checkpoint is not None else whose)
        step = global_step if global_step is not None else getattr(whose, "global_step", None)
        step = step.value if _keras.is_variable(step) else step
        if step is not None and not isinstance(step, tf.Variable):
            raise OrbitError(
                f"{type(whose).__name__}'s global_step is a {type(step).__name__}; expected the tf.Variable that "
                "counts its steps"
            )
        self._step = (lambda: step) if step is not None else None
        if step is not None and all(variable is not step for _, variable in variables_of(state_of(self))):
            vars(self)[_STEP] = step

    def dataset(self, context: Any, /) -> tf.data.Dataset:
        """Is not called: Orbit's object has its own data."""
        raise NotImplementedError

    def step_fn(self, inputs: Any, /) -> dict[str, Any]:
        """Is not called: Orbit's object has its own step."""
        raise NotImplementedError


class OrbitTrainer(_OrbitAdapter, Trainer):
    """An `orbit.AbstractTrainer` or `orbit.StandardTrainer`, to be trained by a `Controller` unchanged.

    Each loop of the controller is one call of `trainer.train(num_steps)`, and what that returns is reported. See
    docs/from_orbit.md for what the controller cannot see from outside of it. Override `loop_end` to rename or leave out
    metrics.

    Args:
      trainer: the object with `train(num_steps)`, built under the strategy's scope.
      global_step: the `tf.Variable` that it counts its steps in, such as `trainer.optimizer.iterations`; default
        `trainer.global_step`, if it has one.
      checkpoint: a `tf.train.Checkpoint` of the objects to save, such as that of Orbit's CheckpointManager; default
        what the trainer holds in its attributes, by their names without leading underscores.

    Raises:
      UsageError: for objects of other kinds.
    """

    def __init__(self, trainer: Any, global_step: Any = None, checkpoint: tf.train.Checkpoint | None = None) -> None:
        super().__init__(trainer, "train", global_step, checkpoint)

    @property
    def trainer(self) -> Any:
        """The trainer that was given."""
        return self._whose()

    def make_loop(self, specification: Specification) -> "TrainerLoop":
        """See `OwnLoop`."""
        return TrainerLoop(specification, self.trainer, self._step and self._step())


class OrbitEvaluator(_OrbitAdapter, Evaluator):
    """An `orbit.AbstractEvaluator` or `orbit.StandardEvaluator`, to be run by a `Controller` unchanged.

    An evaluation is one call of `evaluator.evaluate(num_steps)`, with -1 for all data as in Orbit.

    Args:
      evaluator: the object with `evaluate(num_steps)`, built under the strategy's scope.
      checkpoint: a `tf.train.Checkpoint` of the objects that it shares with the trainer, for a job that only evaluates;
        default what it holds in its attributes besides metrics.

    Raises:
      UsageError: for objects of other kinds.
    """

    def __init__(self, evaluator: Any, checkpoint: tf.train.Checkpoint | None = None) -> None:
        super().__init__(evaluator, "evaluate", None, checkpoint)
        for name in [name for name, value in vars(self).items() if _keras.is_metrics(value)]:
            del vars(self)[name]  # they belong to one evaluation

    @property
    def evaluator(self) -> Any:
        """The evaluator that was given."""
        return self._whose()

    def make_loop(self, specification: Specification) -> "EvaluatorLoop":
        """See `OwnLoop`."""
        return EvaluatorLoop(specification, self.evaluator)


class _OrbitLoop(Loop):
    """The loop of an object with its own loop: each `run` is one call of its method.

    Args:
      spec: the adapter, and how to run it.
      whose: Orbit's object.
      method: its method of one argument, the number of steps.
      data: the structure of its data sets, or None.
    """

    def __init__(
        self, spec: Specification, whose: Any, method: Callable[[tf.Tensor], dict[str, Any] | None], data: Any
    ) -> None:
        self.task = spec.task
        self.who = type(whose).__name__
        self.reducer = OrbitResults()
        self._call = method
        self._clock = spec.clock
        self._counter = spec.counter
        self._running = False
        if spec.config.loop != "graph":
            raise OrbitError(f"loop is {spec.config.loop}, and {self.who} has its own loop; use loop=graph with it")
        if Workers(spec.strategy).count > 1 or isinstance(spec.strategy, tf.distribute.ParameterServerStrategy):
            raise OrbitError(
                f"{self.who} has its own loop, which looplib cannot synchronize across workers; run it in one "
                "process, or write it as a looplib.Trainer or Evaluator (docs/from_orbit.md)"
            )
        self._datasets = datasets_of(data)

    @property
    def endless(self) -> bool:
        """See `Loop`."""
        lengths = [data.cardinality() for data in self._datasets if isinstance(data, tf.data.Dataset)]
        return bool(self._datasets) and lengths == [tf.data.INFINITE_CARDINALITY] * len(self._datasets)

    @property
    def step(self) -> Step:
        """Raises `UsageError`: there is no step that looplib traces."""
        raise OrbitError(f"{self.who} has its own loop, which looplib cannot inspect; check a looplib.Trainer")

    def progress(self) -> float:
        """Returns the time while a call runs, as if it always made progress: nothing else is known."""
        return time.monotonic() if self._running else 0

    def read_metrics(self) -> dict[str, int | float]:
        """Returns the metrics of the last call since the last read, finished by `loop_end`."""
        metrics = as_numbers(self.who, self.task.loop_end(self.reducer.metrics()))
        metric_names.check(self.who, metrics)
        return metrics

    def _results(self, steps: int) -> dict[str, np.ndarray]:
        """Calls Orbit's object, and returns its metrics as a flat dict."""
        started, suspended, self._running = time.perf_counter(), notice.suspended, True
        try:
            results = self._call(tf.constant(steps, tf.int32))
        finally:
            self._running = False
        # A signal has to wait for the end of the call.
        seconds = time.perf_counter() - started - (notice.suspended - suspended)
        notice.step_seconds = max(notice.step_seconds, seconds)
        return dict(flat(self.who, {} if results is None else results))


class EvaluatorLoop(_OrbitLoop):
    """The loop of an `OrbitEvaluator`.

    Args:
      spec: the adapter, and how to run it.
      evaluator: Orbit's.
    """

    def __init__(self, spec: Specification, evaluator: Any) -> None:
        super().__init__(spec, evaluator, evaluator.evaluate, getattr(evaluator, "eval_dataset", None))

    def rewind(self, start_step: int = 0, position: bytes | None = None, batches: Batches | None = None) -> None:
        """Does nothing: each evaluation begins at the start of its data."""

    def close(self) -> None:
        """Does nothing: the data belongs to Orbit's object."""

    def run(self, request: Request, phase: str) -> LoopResult:
        """Calls the evaluator once. A signal waits for the end of the call."""
        if notice.requested:
            return LoopResult(0, True, stopped=True)
        steps = max(1, request.steps)
        with self._clock.phase(phase):
            self.reducer.take(self._results(request.steps), steps)
        self._counter.assign_add(steps)
        return LoopResult(steps, True)


class TrainerLoop(_OrbitLoop, TrainingLoop):
    """The loop of an `OrbitTrainer`.

    Building it makes an Orbit `StandardTrainer` train 0 steps: that traces its loop, so that an error in its step is
    raised now, and all variables exist before a checkpoint is restored. A loop that Orbit divides for summaries
    (`use_tpu_summary_optimization`) cannot do 0 steps; it is traced by its first call.

    Args:
      spec: the adapter, and how to run it.
      trainer: Orbit's.
      step: the `tf.Variable` that it counts its steps in, or None.
    """

    def __init__(self, spec: Specification, trainer: Any, step: tf.Variable | None) -> None:
        super().__init__(spec, trainer, trainer.train, getattr(trainer, "train_dataset", None))
        if spec.skips:
            raise OrbitError(
                f"the policy skip undoes a step, but {self.who} has its own loop, of which looplib sees only the end; "
                "use halt, rollback or off (--non_finite)"
            )
        self._guarded = bool(spec.watched_loss)
        self._own_variable = step
        self._step = spec.strategy.experimental_local_results(step)[0] if step is not None else None
        self._objects: dict[str, Any] = {}
        self._known: set[int] | None = None
        self._ran = False
        self._data = Data(trainer, self._datasets, spec.strategy, self.who)
        self._optimizers = TrainingOptimizers(spec.task, spec.strategy, noted=False, fuse=False)
        divided = getattr(getattr(trainer, "_train_options", None), "use_tpu_summary_optimization", False)
        if getattr(trainer, "train_loop_begin", None) is not None and not divided:  # a StandardTrainer
            with spec.clock.phase("compile"), self._data.put_aside():
                self._call(tf.constant(0, tf.int32))

    @property
    def own_count(self) -> int | None:
        """See `TrainingLoop`."""
        return int(self._step) if self._step is not None else None

    def count_from(self, step: int) -> None:
        """See `TrainingLoop`."""
        if self._own_variable is not None and self.own_count != step:
            self._own_variable.assign(step)

    def progress(self) -> float:
        """Returns the trainer's own count of steps, if it has one; called from another thread."""
        return super().progress() if self._step is None else int(self._step)

    def close(self) -> None:
        """Restores the original optimizers; the data belongs to Orbit's object."""
        self._optimizers.close()

    def warn_of_what_is_not_saved(self, objects: dict[str, Any]) -> None:
        """Keeps the state, to look for variables that are made too late."""
        self._objects, self._known = objects, {id(variable) for _, variable in variables_of(objects)}

    def position(self, batches: int) -> bytes | None:
        """See `TrainingLoop`; None if the position is unknown."""
        if self._ran and self._known is not None:
            late = [name for name, variable in variables_of(self._objects) if id(variable) not in self._known]
            if late:
                raise OrbitError(
                    f"{self.who}.train has made variables ({join_names(late)}) that a resumed run would not have "
                    "when it restores them; make them in __init__, as optimizer.build(model.trainable_variables) does"
                )
            self._known = None
        return self._data.position()

    def rewind(self, start_step: int = 0, position: bytes | None = None, batches: Batches | None = None) -> None:
        """Continues after `start_step` steps, if the position in the data is known.

        After a rollback, which has no position, the data continues after the bad steps.
        """
        if batches and batches.earlier:
            logging.warning(
                "the run had batches of %s: looplib counts the batches that %s reads by itself, %d so far, whatever "
                "their size",
                batches, self.who, start_step,
            )  # fmt: skip
        if position is None and self._ran:
            logging.info("the data of %s continues from its current position", self.who)
        else:
            self._data.begin(start_step, position)

    def resume(self, step: int) -> None:
        """Does nothing: how much of the data a failed call has read is unknown."""

    def failed_between_steps(self, error: BaseException) -> bool:
        """Returns False: it is unknown whether the variables are those of a complete step."""
        return False

    def run(self, request: Request, phase: str) -> LoopResult:
        """Calls the trainer once. A signal waits for the end of the call.

        Raises:
          UsageError: if the trainer counts its steps otherwise, or an error says that its data has ended.
        """
        if notice.requested:
            return LoopResult(0, True, stopped=True)
        steps, before, self._ran = request.steps, self.own_count, True
        with self._clock.phase(phase):
            try:
                results = self._results(steps)
            except tf.errors.OutOfRangeError as error:
                raise OrbitError(
                    f"the data of {self.who} ended in the {steps} steps after step {int(self._counter)}, and its loop "
                    "does not tell after which, so that their end is not saved; repeat() the data, or train to a step "
                    "before its end"
                ) from error
        done = steps if before is None else self.own_count - before
        if done > steps or (done < steps and self.endless):
            raise OrbitError(
                f"{self.who}.train({steps}) moved its global step by {done}; expected {steps}: give "
                "OrbitTrainer(global_step=...) the variable that it adds 1 to once a step"
            )
        self._counter.assign_add(done)
        self.reducer.take(results, done)
        self.reducer.bad = [name for name, value in results.items() if self._guarded and is_bad_loss(name, value)]
        return LoopResult(done, not self.reducer.bad, bool(notice.requested))

    def note_end(self, step: int, target: int) -> None:
        """See `TrainingLoop`; the trainer did fewer steps than were requested."""
        if not step:
            raise OrbitError(
                f"{self.who}.train has returned, but its global step is unchanged: its data is empty, or it counts "
                "its steps elsewhere; give OrbitTrainer(global_step=...) the variable that it adds 1 to once a step"
            )
        if target != -1:
            logging.warning(
                "%s has trained to step %d, not to %d, because its data ended (or it did not count all of its steps)",
                self.who, step, target,
            )  # fmt: skip


def _adopt(task: Trainer | Evaluator, holder: Any, seen: tuple = ()) -> None:
    """Gives a task the state among the attributes of an object, and of Orbit's objects in it that are not in `seen`."""
    state = state_of(holder)
    for name, value in vars(holder).items():
        private = name.startswith("_self_") or name in _NO_STATE
        if not private and _has_a_loop(value):  # an evaluator may hold its trainer
            if all(value is not other for other in seen):
                _adopt(task, value, (*seen, holder))
            continue
        if private or not (name in state or f"{name}_untracked" in state):
            continue
        if isinstance(holder, tf.train.Checkpoint) and name.startswith("_"):
            continue  # TensorFlow's own
        new = name.lstrip("_")
        if new == "global_step":
            continue  # it has its own entry
        if new in dir(task) or not new:
            new = f"{new}_"
        vars(task)[new] = value


def _has_a_loop(value: Any) -> bool:
    """Returns whether a value is another trainer or evaluator of Orbit's kind."""
    has = [callable(getattr(value, name, None)) for name in ("train", "evaluate")]
    return any(has) and isinstance(value, tf.Module) and not _keras.is_layer(value)

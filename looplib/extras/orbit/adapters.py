"""Trainers and evaluators with loops of their own, Orbit's, under looplib's outer loop.

Nothing here imports Orbit: a trainer is what has `train(num_steps)`, an evaluator what has `evaluate(num_steps)`.
"""

import time

import numpy as np
import tensorflow as tf
from absl import logging

from looplib import _keras
from looplib.cluster.collectives import Workers
from looplib.errors import UsageError, join_names
from looplib.extras.orbit.data import Data, datasets_of
from looplib.health.preemption import notice
from looplib.loop.inner_loops import Ran
from looplib.loop.optimizers import TrainingOptimizers
from looplib.loop.task_loop import as_numbers
from looplib.task.evaluator import Evaluator
from looplib.task.record import RunningTotals
from looplib.task.state import state_of, variables_of
from looplib.task.trainer import Trainer

# Attributes of Orbit's classes that are no state.
_NO_STATE = {f"_{split}_{part}" for split in ("train", "eval") for part in ("dataset", "iter", "loop_fn", "options")}
_STEP = "orbit_step"


class _HasItsOwnLoop:
    """What both adapters have in common: a checkpoint finds in their attributes what Orbit's object holds."""

    def __init__(self, whose, method, global_step, checkpoint):
        if not callable(getattr(whose, method, None)):
            raise UsageError(
                f"{type(self).__name__} got a {type(whose).__name__}; expected an object with {method}(num_steps), "
                "such as an instance of a subclass of Orbit's classes"
            )
        if checkpoint is not None and not isinstance(checkpoint, tf.train.Checkpoint):
            raise UsageError(
                f"{type(self).__name__} got a {type(checkpoint).__name__} as checkpoint; expected a "
                "tf.train.Checkpoint with the objects to save"
            )
        self._whose = lambda: whose  # as an attribute it would be state, with all that it holds
        _adopt(self, checkpoint if checkpoint is not None else whose)
        step = global_step if global_step is not None else getattr(whose, "global_step", None)
        step = step.value if _keras.is_variable(step) else step
        if step is not None and not isinstance(step, tf.Variable):
            raise UsageError(
                f"{type(whose).__name__}'s global_step is a {type(step).__name__}; expected the tf.Variable that "
                "counts its steps"
            )
        self._step = (lambda: step) if step is not None else None
        if step is not None and all(variable is not step for _, variable in variables_of(state_of(self))):
            vars(self)[_STEP] = step

    def dataset(self, context):
        """Is not called: Orbit's object has its own data."""
        raise NotImplementedError

    def step_fn(self, inputs):
        """Is not called: Orbit's object has its own step."""
        raise NotImplementedError


class OrbitTrainer(_HasItsOwnLoop, Trainer):
    """An `orbit.AbstractTrainer` or `orbit.StandardTrainer`, to be trained by a `Controller` as it is.

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

    def __init__(self, trainer, global_step=None, checkpoint=None):
        super().__init__(trainer, "train", global_step, checkpoint)

    @property
    def trainer(self):
        """The trainer that was given."""
        return self._whose()

    def make_loop(self, split, **settings):
        """Returns the loop that the controller runs."""
        return TrainerLoop(split, self, self.trainer, self._step and self._step(), **settings)


class OrbitEvaluator(_HasItsOwnLoop, Evaluator):
    """An `orbit.AbstractEvaluator` or `orbit.StandardEvaluator`, to be run by a `Controller` as it is.

    An evaluation is one call of `evaluator.evaluate(num_steps)`, with -1 for all data as in Orbit.

    Args:
      evaluator: the object with `evaluate(num_steps)`, built under the strategy's scope.
      checkpoint: a `tf.train.Checkpoint` of the objects that it shares with the trainer, for a job that only evaluates;
        default what it holds in its attributes besides metrics.

    Raises:
      UsageError: for objects of other kinds.
    """

    def __init__(self, evaluator, checkpoint=None):
        super().__init__(evaluator, "evaluate", None, checkpoint)
        for name in [name for name, value in vars(self).items() if _keras.is_metrics(value)]:
            del vars(self)[name]  # they belong to one evaluation

    @property
    def evaluator(self):
        """The evaluator that was given."""
        return self._whose()

    def make_loop(self, split, **settings):
        """Returns the loop that the controller runs."""
        return EvaluatorLoop(split, self, self.evaluator, self.evaluator.evaluate, **settings)


class EvaluatorLoop:
    """What `task_loop.TaskLoop` is to the controller, where the loop is another's.

    Args:
      split: "train" or the evaluator's name.
      task: the `OrbitTrainer` or `OrbitEvaluator`.
      whose: Orbit's object.
      call: its method of one argument, the number of steps.
      strategy: `tf.distribute.Strategy`.
      engine: a name in `engines.ENGINES`.
      clock: `Clock`.
      counter: int64 `tf.Variable` of finished steps.
      **_: settings of looplib's own loops.

    Attributes:
      reducer: `Results`.
    """

    traces, chosen, metric_names = 0, None, None

    def __init__(self, split, task, whose, call, *, strategy, engine, clock, counter, **_):
        self.task = task
        self.who = type(whose).__name__
        self.reducer = Results()
        self._call = call
        self._clock = clock
        self._counter = counter
        self._running = False
        if engine != "graph":
            raise UsageError(f"loop is {engine}, and {self.who} has a loop of its own; use loop=graph with it")
        if Workers(strategy).count > 1 or isinstance(strategy, tf.distribute.ParameterServerStrategy):
            raise UsageError(
                f"{self.who} has a loop of its own, in which looplib cannot let several workers agree; run it in one "
                "process, or write it as a looplib.Trainer or Evaluator (docs/from_orbit.md)"
            )
        self._datasets = datasets_of(getattr(whose, "train_dataset" if split == "train" else "eval_dataset", None))

    @property
    def endless(self):
        """Whether the data is known never to end."""
        lengths = [data.cardinality() for data in self._datasets if isinstance(data, tf.data.Dataset)]
        return bool(self._datasets) and lengths == [tf.data.INFINITE_CARDINALITY] * len(self._datasets)

    @property
    def step(self):
        """There is none that can be looked at."""
        raise UsageError(f"{self.who} has a loop of its own, which looplib cannot look into; check a looplib.Trainer")

    def place_of(self, error: BaseException) -> str:
        """Nothing is known besides what the error itself says."""
        return ""

    def progress(self):
        """What changes while a call goes on, for the watchdog: the time, as nothing else is known."""
        return time.monotonic() if self._running else 0

    def rewind(self, start_step=0, position=None):
        """Nothing to do: an evaluation begins with its data."""

    def close(self):
        """Nothing to do: the data is another's."""

    def run(self, steps, phase, read=False, horizon=0):
        """Calls the evaluator once; see `task_loop.TaskLoop`. A signal waits for the end of the call."""
        del read, horizon
        if notice.requested:
            return Ran(0, True, stopped=True)
        with self._clock.phase(phase):
            self.reducer.take(self._results(steps), max(1, steps))
        self._counter.assign_add(max(1, steps))
        return Ran(max(1, steps), True)

    def _results(self, steps):
        """Calls Orbit's object, and returns its metrics as a flat dict."""
        started, suspended, self._running = time.perf_counter(), notice.suspended, True
        try:
            results = self._call(tf.constant(steps, tf.int32))
        finally:
            self._running = False
        seconds = time.perf_counter() - started - (notice.suspended - suspended)
        notice.step_seconds = max(notice.step_seconds, seconds)  # what a signal has to wait for
        return dict(_flat(self.who, {} if results is None else results))

    def read(self):
        """Returns the metrics of the last call since the last read, finished by `loop_end`."""
        return as_numbers(self.who, self.task.loop_end(self.reducer.read()))


class TrainerLoop(EvaluatorLoop):
    """The same for a trainer.

    Building it makes an Orbit `StandardTrainer` train 0 steps: that traces its loop, so that an error in its step is
    told now, and all variables exist before a checkpoint is restored.

    Args:
      split: "train".
      task: the `OrbitTrainer`.
      trainer: Orbit's.
      step: the `tf.Variable` that it counts its steps in, or None.
      strategy: `tf.distribute.Strategy`.
      clock: `Clock`.
      non_finite: the policy of `guards.Guards`.
      **settings: of `EvaluatorLoop`.
    """

    def __init__(self, split, task, trainer, step, *, strategy, clock, non_finite="off", **settings):
        super().__init__(split, task, trainer, trainer.train, strategy=strategy, clock=clock, **settings)
        if non_finite == "skip":
            raise UsageError(
                f"the policy skip undoes a step, and {self.who} has a loop of its own, of which looplib sees the end "
                "only; use halt, rollback or off (--non_finite)"
            )
        self._guarded = non_finite != "off"
        self._step = strategy.experimental_local_results(step)[0] if step is not None else None
        self._objects, self._known, self._ran = {}, None, False
        self._data = Data(trainer, self._datasets, strategy, self.who)
        self._optimizers = TrainingOptimizers(task, strategy, noted=False, fuse=False)
        if hasattr(trainer, "train_loop_begin"):
            with clock.phase("compile"), self._data.put_aside():
                self._call(tf.constant(0, tf.int32))

    def place_of(self, error: BaseException) -> str:
        """Nothing is known besides what the error itself says."""
        return ""

    def progress(self):
        """The trainer's own count of steps, if it has one; called from another thread."""
        return int(self._step) if self._step is not None else super().progress()

    def close(self):
        """Gives the optimizers back as they were; the data is another's."""
        self._optimizers.close()

    def warn_of_what_is_not_saved(self, objects):
        """Keeps the state, a dict from name to trackable object, to look for variables that come too late."""
        self._objects, self._known = objects, {id(variable) for _, variable in variables_of(objects)}

    def position(self):
        """The place in the data, as bytes for `rewind`; None where it is not known."""
        if self._ran and self._known is not None:
            late = [name for name, variable in variables_of(self._objects) if id(variable) not in self._known]
            if late:
                raise UsageError(
                    f"{self.who}.train has made variables ({join_names(late)}) that a resumed run would not have "
                    "when it restores them; make them in __init__, as optimizer.build(model.trainable_variables) does"
                )
            self._known = None
        return self._data.position()

    def rewind(self, start_step=0, position=None):
        """Goes on after `start_step` steps, as far as the place in the data is known.

        After a rollback, which has no position, the data goes on after the bad steps.
        """
        if position is None and self._ran:
            logging.info("the data of %s goes on where it is", self.who)
        else:
            self._data.begin(start_step, position)

    def resume(self, step):
        """Nothing to do: where a call failed on its way, nobody knows how much of the data it has read."""

    def left_whole(self, error: BaseException) -> bool:
        """Whether the variables are those of a whole step after an error of `run`, which nobody can tell here."""
        return False

    def run(self, steps, phase, read=False, horizon=0):
        """Calls the trainer once; see `task_loop.TaskLoop`. A signal waits for the end of the call.

        Raises:
          UsageError: if the trainer counts its steps otherwise, or an error tells that its data has ended.
        """
        del read, horizon
        if notice.requested:
            return Ran(0, True, stopped=True)
        before, self._ran = self._count(), True
        with self._clock.phase(phase):
            try:
                results = self._results(steps)
            except tf.errors.OutOfRangeError as error:
                raise UsageError(
                    f"the data of {self.who} ended in the {steps} steps after step {int(self._counter)}, and its loop "
                    "does not tell after which, so that their end is not saved; repeat() the data, or train to a step "
                    "before its end"
                ) from error
        done = steps if before is None else self._count() - before
        if done > steps or (done < steps and self.endless):
            raise UsageError(
                f"{self.who}.train({steps}) moved its global step by {done}; expected {steps}: give "
                "OrbitTrainer(global_step=...) the variable that it adds 1 to once a step"
            )
        self._counter.assign_add(done)
        self.reducer.take(results, done)
        self.reducer.bad = [name for name, value in results.items() if self._guarded and _is_bad_loss(name, value)]
        return Ran(done, not self.reducer.bad, bool(notice.requested))

    def _count(self):
        return int(self._step) if self._step is not None else None

    def note_end(self, step, target):
        """Says that the trainer did fewer steps than it was asked for; raises `UsageError` if it did none ever."""
        if not step:
            raise UsageError(
                f"{self.who}.train has returned, and its global step is where it was: its data is empty, or it counts "
                "its steps elsewhere; give OrbitTrainer(global_step=...) the variable that it adds 1 to once a step"
            )
        if target != -1:
            logging.warning(
                "%s has trained to step %d, not to %d, as its data ended (or it did not count all of its steps)",
                self.who, step, target,
            )  # fmt: skip


class Results:
    """The metrics of the last call, in place of what `metrics.Reducer` adds up.

    Attributes:
      bad: names of the losses in them that are not finite.
    """

    def __init__(self):
        self.bad = []
        self._metrics, self._steps = {}, 0

    def take(self, metrics, steps):
        """Replaces the metrics by those of a call of so many steps."""
        self._metrics, self._steps = metrics, self._steps + steps

    def read(self):
        """Returns the metrics and starts anew."""
        metrics = self._metrics
        self._metrics, self._steps = {}, 0
        return metrics

    def first_bad(self):
        """Returns (the steps since the last read or load, the names of losses that are not finite)."""
        return self._steps, self.bad

    def state(self):
        """Returns the metrics that are not yet read, as a dict of what JSON can hold."""
        return {name: value.item() for name, value in self._metrics.items() if value.ndim == 0 and _is_number(value)}

    def load(self, state):
        """Goes on from a `state()`, or anew from that of another kind of trainer."""
        state = {} if isinstance(state, RunningTotals) else state
        numbers = {name: np.asarray(value) for name, value in state.items()}
        self._metrics = {name: value for name, value in numbers.items() if value.ndim == 0 and _is_number(value)}
        self._steps = 0


def _adopt(task, holder, seen=()):
    """Gives a task the state among the attributes of an object, and of Orbit's objects that it holds but those seen."""
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
            continue  # it has a place of its own
        if hasattr(task, new) or not new:
            new = f"{new}_"
        vars(task)[new] = value


def _has_a_loop(value):
    """Whether a value is another trainer or evaluator of Orbit's kind."""
    has = [callable(getattr(value, name, None)) for name in ("train", "evaluate")]
    return any(has) and isinstance(value, tf.Module) and not _keras.is_layer(value)


def _flat(who, results, prefix=""):
    """Yields (name, numpy array) of what may be dicts in a dict; their names are joined by "/"."""
    if not isinstance(results, dict):
        raise UsageError(f"{who} returned a {type(results).__name__}; expected a dict from metric name to number")
    for name, value in results.items():
        name = f"{prefix}{name}" if isinstance(name, str) else name
        if isinstance(value, dict):
            yield from _flat(who, value, f"{name}/")
        else:
            value = value.value if _keras.is_variable(value) else value
            yield name, np.asarray(tf.convert_to_tensor(value) if isinstance(value, tf.Variable) else value)


def _is_number(value):
    return value.dtype.kind in "biuf"


def _is_bad_loss(name, value):
    return "loss" in str(name).lower() and _is_number(value) and not np.isfinite(value).all()

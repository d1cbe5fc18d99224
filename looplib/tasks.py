"""A trainer or evaluator made ready to run: checked, its state found, its data distributed, its loop built."""

import math
import numbers
import re

import numpy as np
import tensorflow as tf
from absl import logging

from looplib import checksums, coordinator, engines, feeds, fused, guards, keras_family, pipelines
from looplib.errors import UsageError, positive
from looplib.evaluator import Evaluator
from looplib.loops import EagerLoop, StepwiseLoop
from looplib.metrics import Reducer, check_metric_name
from looplib.preemption import notice
from looplib.state import state_of, variables_of
from looplib.steps import Step
from looplib.trainer import Trainer
from looplib.workers import Workers


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
        self._distribution = dict(global_batch_size=global_batch_size, seed=seed, training=split == "train")
        self._stream = pipelines.distribute(strategy, task, start_step=start_step, **self._distribution)
        self._first_stream = self._stream  # which the loop reads all iterators with
        remote = isinstance(self._stream, feeds.RemoteStream)
        if remote:
            coordinator.check(split, self._stream, engine, non_finite)
        skips = non_finite == "skip"
        kind = coordinator.RemoteReducer if remote else Reducer
        self.reducer = kind(
            strategy, self.who, count_examples=split != "train", guarded=non_finite != "off", skips=skips
        )
        if split == "train":
            fused.fuse(task)
            if remote:
                coordinator.prepare(task)
        if non_finite != "off":
            guards.watch_gradients(task)
        if split != "train" and self._stream.unknown and not self._has_a_batch(split):
            raise UsageError(
                f"the evaluation data set {split!r} is empty: {self.who}.dataset has no batch; check where the data is "
                "read from"
            )
        step_fn = task.step_fn
        if split == "train" and checksums.enabled():
            step_fn = checksums.add_to(step_fn, lambda: task.global_step if remote else counter)
        self._tables = None
        if self._stream.arrays is not None:
            self._tables = feeds.tables(strategy, self._stream.arrays)
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
    def traces(self):
        """How often the loop was traced."""
        return self._engine.traces

    @property
    def chosen(self):
        """What an engine has chosen for itself, as a dict for JSON, or None."""
        return getattr(self._engine, "record", None)

    def position(self):
        """The place in the data after the last `run`, as bytes for `rewind`; None where `start_step` has to do."""
        return self._stream.position(self._iterator) if self._iterator is not None else self._position

    def rewind(self, start_step=0, position=None):
        """Lets the next `run` start with the data after `start_step` global batches.

        Args:
          start_step: how many were consumed.
          position: bytes from `position` at that step, which spare the pipeline to read and skip what came before.
        """
        self._iterator, self._position = None, position
        if start_step != self._start_step:
            self._start_step = start_step
            self._stream = pipelines.distribute(self._strategy, self.task, start_step=start_step, **self._distribution)

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
                guards.listing(random),
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
                before = self._clock.of(phase)
                ran = self._engine(self._iterator, steps, sure=max(0, self._sure), read=read, horizon=horizon)
                self._sure -= ran.done
                if ran.done:
                    notice.step_seconds = max(ran.to_stop, (self._clock.of(phase) - before) / ran.done)
                self._clock.move(ran.compiled, phase, "compile")
                if phase == "train":
                    self._clock.move(ran.waited, phase, "input")
                return ran
            except Exception as error:
                self._iterator = None  # it has moved on past what was not trained
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
        # The checksum is no matter of the user's.
        checksum = {name: metrics.pop(name) for name in [checksums.METRIC] if name in metrics}
        return {**as_numbers(self.who, self.task.loop_end(metrics)), **checksum}


def make_loop(split, task, **settings):
    """Returns the `TaskLoop` of a task, or the loop that the task makes itself, with the same methods."""
    if hasattr(task, "make_loop"):
        return task.make_loop(split, **settings)
    return TaskLoop(split, task, **settings)


def check_tasks(trainer, evaluator):
    """Checks what a controller was given; returns the evaluators as a dict from name to `Evaluator`.

    Raises:
      UsageError: for objects of other kinds, bad names, or nothing at all.
    """
    evaluators = evaluator if isinstance(evaluator, dict) else {"eval": evaluator} if evaluator is not None else {}
    if trainer is None and not evaluators:
        raise UsageError("a controller needs a trainer, an evaluator or both; it was given neither")
    if trainer is not None and not isinstance(trainer, Trainer):
        raise UsageError(
            f"trainer is a {type(trainer).__name__}; expected an instance of a looplib.Trainer subclass (one of "
            "Orbit's is wrapped: looplib.OrbitTrainer(trainer))"
        )
    for name, value in evaluators.items():
        if not isinstance(value, Evaluator):
            raise UsageError(
                f"evaluator {name!r} is a {type(value).__name__}; expected a looplib.Evaluator instance (one of "
                "Orbit's is wrapped: looplib.OrbitEvaluator(evaluator))"
            )
        if name == "train" or not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
            raise UsageError(
                f"an evaluator is named {name!r}; expected letters, digits, '.', '_' or '-', and not 'train'"
            )
    return dict(evaluators)


def check_kinds(strategy, actions):
    """Raises `UsageError` if the strategy is none, or an action cannot be called."""
    if not isinstance(strategy, tf.distribute.Strategy):
        raise UsageError(
            f"strategy is {strategy!r}; expected a tf.distribute.Strategy, as looplib.runtime.setup returns"
        )
    for action in actions:
        if not callable(action):
            raise UsageError(f"the action {action!r} is not callable; expected a function of one looplib.Event")


def check_evaluation(evaluations, steps):
    """Checks that there is something to evaluate, and an end to it.

    Args:
      evaluations: dict from name to `TaskLoop`.
      steps: how many steps were asked for; -1 for all data.

    Raises:
      UsageError: if not.
    """
    if not evaluations:
        raise UsageError("this controller has no evaluator; give Controller(evaluator=...) to evaluate")
    if steps != -1:
        positive("the number of evaluation steps", steps)
    for name, evaluation in evaluations.items():
        if steps == -1 and evaluation.endless:
            raise UsageError(
                f"the evaluation data set {name!r} never ends ({evaluation.who}.dataset is infinite), "
                "so its evaluation would not either; leave out repeat(), or give a number of evaluation steps"
            )


def check_together(trainer, evaluators, strategy, engine):
    """Checks that what the tasks hold can run together, on this strategy and engine.

    Args:
      trainer: the `Trainer` or None.
      evaluators: dict from name to `Evaluator`.
      strategy: `tf.distribute.Strategy`.
      engine: a name in `engines.ENGINES`.

    Raises:
      UsageError: for two Keras families, variables of another strategy, models without variables where they must have
        them, or tasks with different models of one name.
    """
    tasks = [*([trainer] if trainer else []), *evaluators.values()]
    held = {
        f"{type(task).__name__}.{name}": value
        for task in tasks
        for name, value in vars(task).items()
        if name != "global_step"  # of the controller that had the task before
    }
    keras_family.check_one_family(held)
    if engine == "eager" and isinstance(strategy, tf.distribute.TPUStrategy):
        raise UsageError(
            "a TPU runs compiled programs only, and the eager loop none; debug on the host, with --strategy=one_device "
            "--loop=eager"
        )
    may_wait = {id(value) for task in tasks if hasattr(task, "make_loop") for value in vars(task).values()}
    for what, value in held.items():
        if keras_family.is_model(value) and not value.built and id(value) in may_wait:
            continue  # for a loop that is not looplib's
        if keras_family.is_model(value) and not value.built:
            _check_unbuilt(what, strategy, engine)
        elif not keras_family.is_layer(value) or value.built:
            keras_family.check_placement(strategy, what, _variables(value))
    owners = {}
    for task in tasks:
        for name, value in vars(task).items():
            owner = owners.setdefault(name, task)
            if getattr(owner, name) is not value and keras_family.is_layer(value) and value.built and value.variables:
                raise UsageError(
                    f"{type(task).__name__}.{name} is not the object that {type(owner).__name__} holds under that "
                    "name, and a checkpoint has one place for it; give an evaluator the trainer's own model, or "
                    "another name"
                )


def collect_state(trainer, evaluators):
    """Finds the whole state of a run; after tracing, when all variables exist.

    Returns:
      dict from attribute name to trackable object. An evaluator's attributes join the trainer's, but for its metrics.
    """
    objects = state_of(trainer) if trainer else {}
    for task in evaluators.values():
        for name, value in state_of(task).items():
            if not keras_family.is_metrics(getattr(task, name, None)):
                objects.setdefault(name, value)
    return objects


def build_optimizers(trainer, strategy):
    """Makes the slots of an optimizer that has none yet, where it is plain whose they are, so that all state exists."""
    held = list(vars(trainer).values())
    layers = [value for value in held if keras_family.is_layer(value) and value.built and value.trainable_variables]
    variables = [value for value in held if isinstance(value, tf.Variable) or keras_family.is_variable(value)]
    loose = any(variable.trainable for variable in variables)  # the optimizer may be meant to train them too
    if len(layers) == 1 and not loose:
        for optimizer in filter(keras_family.is_optimizer, held):
            if hasattr(optimizer, "build"):
                with strategy.scope():
                    optimizer.build(layers[0].trainable_variables)


def _check_unbuilt(what, strategy, engine):
    remote = isinstance(strategy, tf.distribute.ParameterServerStrategy)
    if engine == "eager" or strategy.num_replicas_in_sync > 1 or remote:
        raise UsageError(
            f"{what} has no variables yet; on several replicas or workers, and in the eager loop, a model must have "
            "them before the first step: give it an Input layer, or call it once in __init__"
        )


def _identity(variable):
    """What tells whether two are one variable, also if one of them is wrapped, as those on parameter servers are."""
    return id(getattr(variable, "handle", variable))


def _variables(value):
    if isinstance(value, tf.Variable):
        return [value]
    if isinstance(value, (list, tuple)):
        return [variable for item in value for variable in _variables(item)]
    if keras_family.is_variable(value):
        return [value]
    if isinstance(value, tf.Module) or keras_family.family(value):
        found = getattr(value, "variables", [])
        return list(found() if callable(found) else found)
    return []


def _gathering(step_fn, tables):
    """The step of rows as a step of row numbers, int64 `[b]`."""
    return lambda ids: step_fn(tf.nest.map_structure(lambda table: tf.gather(table, ids), tables))


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

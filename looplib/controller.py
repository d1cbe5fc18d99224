"""Controller: the outer loop, a schedule of boundaries around the inner loop."""

import math
import numbers
import os
import re
import time

import numpy as np
import tensorflow as tf
from absl import logging

from looplib import inputs, keras_family, writers as writers_lib
from looplib.actions import Event
from looplib.checkpoints import Checkpoints, CheckpointPolicy, RunState, peek, positive, state_of
from looplib.clock import Clock
from looplib.errors import UsageError
from looplib.evaluator import Evaluator
from looplib.loops import ENGINES
from looplib.metrics import Reducer
from looplib.trainer import Trainer


class Controller:
    """Trains and evaluates: schedule, loops, metric reduction, checkpoints, batch math.

    Building a controller checks everything that can be checked, traces the steps, and restores the newest checkpoint in
    `model_dir`, or else calls `trainer.initialize()`; so the same program run again goes on where it stopped.

    Args:
      global_batch_size: examples of a training step over all replicas; also for evaluators that set no size.
      trainer: the `Trainer`; None for a job that only evaluates.
      evaluator: an `Evaluator`, whose metrics are reported as "eval", or a dict from name to `Evaluator`.
      strategy: `tf.distribute.Strategy` under whose scope the models were built; default the current one.
      model_dir: the run directory, made if missing; None keeps nothing on disk.
      steps_per_loop: steps of one call into the device; training metrics are reported at its exact multiples.
      loop: the engine, "graph" or "eager" (for debugging).
      seed: decides the order of the training data.
      checkpoints: `CheckpointPolicy`, when to save and what to keep.
      writers: list of `Writer`; default TensorBoard and `metrics.jsonl` in `model_dir`, and the console.
      actions: callables that take an `Event`, called after every reported loop and every evaluation.

    Attributes:
      clock: `Clock` with the seconds of compile, train, evaluate, save, restore and report.
      restored_from: path of the checkpoint that this run goes on from, or None.

    Raises:
      UsageError: for bad input, in a sentence.
    """

    def __init__(
        self,
        *,
        global_batch_size,
        trainer=None,
        evaluator=None,
        strategy=None,
        model_dir=None,
        steps_per_loop=100,
        loop="graph",
        seed=0,
        checkpoints=CheckpointPolicy(),
        writers=None,
        actions=(),
    ):
        self.clock = Clock()
        self._strategy = strategy or tf.distribute.get_strategy()
        self._trainer, self._evaluators = _check_tasks(trainer, evaluator)
        positive("steps_per_loop", steps_per_loop)
        if loop not in ENGINES:
            raise UsageError(f"loop is {loop!r}; expected one of {', '.join(ENGINES)}")
        self._global_batch_size = global_batch_size
        self._steps_per_loop = steps_per_loop
        self._loop = loop
        self._seed = seed
        self._policy = checkpoints
        self._model_dir = os.fspath(model_dir) if model_dir else None
        self._actions = list(actions)
        self._stopped = False

        objects = self._collect_state()
        if self._model_dir:
            _check_writable(self._model_dir)
        self._checkpoints = self._model_dir and Checkpoints(
            os.path.join(self._model_dir, "checkpoints"), objects, checkpoints.keep_last
        )
        self._writers = self._default_writers() if writers is None else list(writers)
        self._saved_step = None
        self.restored_from = None
        start = self._checkpoints and self._checkpoints.latest
        self._build_engines(start_step=peek(start)[0] if start else 0)
        if start:
            self.restore_checkpoint(start)
        elif trainer:
            with self._strategy.scope():
                trainer.initialize()

    # Building.

    def _collect_state(self):
        """Finds the whole state, and fails on models that cannot run together or on this strategy."""
        objects = state_of(self._trainer) if self._trainer else {}
        named = {f"{type(self._trainer).__name__}.{name}": value for name, value in objects.items()}
        for evaluator in self._evaluators.values():
            who = type(evaluator).__name__
            for name, value in state_of(evaluator).items():
                named[f"{who}.{name}"] = value
                if keras_family.is_metric(getattr(evaluator, name, None)):
                    continue
                theirs = objects.setdefault(name, value)
                if self._trainer and theirs is not value and getattr(value, "trainable_variables", None):
                    raise UsageError(
                        f"{who}.{name} is not the object that {type(self._trainer).__name__} holds under that name, so "
                        "it would be evaluated untrained; give the evaluator the trainer's own model"
                    )
        families = {
            f"{type(task).__name__}.{name}": value
            for task in filter(None, [self._trainer, *self._evaluators.values()])
            for name, value in vars(task).items()
        }
        keras_family.check_one_family(families)
        for name, value in named.items():
            if keras_family.is_layer(value) and not value.built:
                self._check_unbuilt(name)
            else:
                keras_family.check_placement(self._strategy, name, _variables(value))
        self._global_step = tf.Variable(0, dtype=tf.int64, trainable=False, name="global_step")
        self._run_state = RunState()
        for name in ("global_step", "run_state"):
            if name in objects:
                raise UsageError(f"the attribute {name!r} is the controller's own name in a checkpoint; rename yours")
        return {**objects, "global_step": self._global_step, "run_state": self._run_state}

    def _check_unbuilt(self, name):
        if self._loop != "graph" or self._strategy.num_replicas_in_sync > 1:
            raise UsageError(
                f"{name} has no variables yet; on several replicas, and in the eager loop, a model must have them before "
                "the first step: give it an Input layer, or call build(input_shape) in __init__"
            )

    def _default_writers(self):
        console = [writers_lib.ConsoleWriter()]
        if not self._model_dir:
            return console
        jsonl = writers_lib.JsonlWriter(os.path.join(self._model_dir, "metrics.jsonl"))
        return [writers_lib.TensorBoardWriter(self._model_dir), jsonl, *console]

    def _build_engines(self, start_step):
        """Builds data sets and inner loops, so that what is wrong with a step is found before the first one."""
        self._reducers = {}
        self._engines = {}
        self._streams = {}
        self._iterator = None
        if self._trainer:
            self._trainer.global_batch_size = self._global_batch_size
            self._trainer.global_step = self._global_step
            _build_optimizers(self._trainer, self._strategy)
            self._start_step = start_step
            self._build_engine("train", self._trainer, self._global_batch_size, start_step)
        for name, evaluator in self._evaluators.items():
            self._build_engine(name, evaluator, evaluator.global_batch_size or self._global_batch_size, 0)

    def _build_engine(self, split, task, global_batch_size, start_step):
        training = split == "train"
        self._streams[split] = self._distribute(split, task, global_batch_size, start_step)
        self._reducers[split] = Reducer(self._strategy, type(task).__name__, count_examples=not training)
        with self.clock.phase("compile"):
            self._engines[split] = ENGINES[self._loop](
                self._strategy,
                task.step_fn,
                self._reducers[split],
                self._streams[split],
                self._global_step if training else None,
            )

    def _distribute(self, split, task, global_batch_size, start_step):
        return inputs.distribute(
            self._strategy,
            task,
            global_batch_size=global_batch_size,
            seed=self._seed,
            training=split == "train",
            start_step=start_step,
        )

    # What a user calls.

    @property
    def global_step(self):
        """The number of training steps done, an int."""
        return int(self._global_step)

    @property
    def latest_checkpoint(self):
        """The path of the newest checkpoint in `model_dir`, or None."""
        return self._checkpoints.latest if self._checkpoints else None

    def train(self, steps):
        """Trains.

        Args:
          steps: the global step to train to, counted from the start of the run; -1 for the end of the data.

        Returns:
          dict, the last reported training metrics; {} if there was nothing left to do.

        Raises:
          UsageError: for bad input.
        """
        return self._train(steps, None, -1)

    def train_and_evaluate(self, train_steps, eval_interval, eval_steps=-1):
        """Trains, saving and evaluating at exact multiples of `eval_interval` and at the end.

        Args:
          train_steps: the global step to train to; -1 for the end of the data.
          eval_interval: steps between evaluations.
          eval_steps: steps of each evaluation; -1 for all data.

        Returns:
          dict from evaluator name to metrics, of the last evaluation.

        Raises:
          UsageError: for bad input.
        """
        positive("eval_interval", eval_interval)
        self._check_evaluation(eval_steps)
        self._train(train_steps, eval_interval, eval_steps)
        return self._last_evaluation

    def evaluate(self, steps=-1):
        """Evaluates every evaluator at the current step.

        Args:
          steps: how many steps of each data set; -1 for all of it.

        Returns:
          dict from evaluator name to a dict of metrics, the number of `examples` among them.

        Raises:
          UsageError: for bad input.
        """
        self._check_evaluation(steps)
        step, results = self.global_step, {}
        for name, evaluator in self._evaluators.items():
            with self.clock.phase("evaluate"):
                done = self._engines[name](self._iterate(name), steps)
                if not done:
                    raise UsageError(
                        f"the evaluation data set {name!r} is empty: {type(evaluator).__name__}.dataset has no batch; "
                        "check where the data is read from"
                    )
                metrics = self._engines[name].read()
            results[name] = self._publish(name, step, evaluator, metrics)
        self._last_evaluation = results
        return results

    def evaluate_continuously(self, steps=-1, until_step=None, timeout=None):
        """Evaluates each new checkpoint in `model_dir`, as another job writes them.

        Args:
          steps: steps of each evaluation; -1 for all data.
          until_step: ends after the evaluation of a checkpoint at or past this step; None waits on.
          timeout: ends after this many seconds without a new checkpoint; None waits for ever.

        Returns:
          dict from evaluator name to metrics, of the last evaluation.

        Raises:
          UsageError: for bad input, or if no checkpoint came in time.
        """
        self._check_evaluation(steps)
        results = None
        directory = self._need_checkpoints("evaluate_continuously").directory
        for path in tf.train.checkpoints_iterator(directory, timeout=timeout):
            if self.restored_from != path or results is None:
                self.restore_checkpoint(path)
                results = self.evaluate(steps)
            if until_step is not None and self.global_step >= until_step:
                break
        if results is None:
            raise UsageError(f"no checkpoint came in {directory} within {timeout} s; check that the training writes there")
        return results

    def save_checkpoint(self):
        """Saves the whole state now, unless this step is already saved.

        Returns:
          str, the path of the checkpoint.

        Raises:
          UsageError: without a `model_dir`, or if it cannot be written.
        """
        checkpoints = self._need_checkpoints("save_checkpoint")
        step = self.global_step
        if self._saved_step != step:
            with self.clock.phase("save"):
                running = self._reducers["train"].state() if self._trainer else {}
                self._run_state.values.update(
                    running=running, seed=self._seed, global_batch_size=self._global_batch_size
                )
                for writer in self._writers:
                    writer.flush()
                try:
                    checkpoints.save(step)
                except (OSError, tf.errors.OpError) as error:
                    raise UsageError(
                        f"the checkpoint of step {step} could not be saved in {checkpoints.directory} "
                        f"({_first_line(error)}); free space or mend the permissions and run the same command again"
                    ) from error
            self._saved_step = step
        return checkpoints.latest

    def restore_checkpoint(self, path=None):
        """Restores the whole state, the position in the data included.

        Args:
          path: a checkpoint, such as `<model_dir>/checkpoints/ckpt-1000`; None takes the newest of `model_dir`.

        Returns:
          The path, or None if there is no checkpoint yet.

        Raises:
          UsageError: if the checkpoint cannot be read or belongs to another model.
        """
        own = self._need_checkpoints("restore_checkpoint")
        path = os.fspath(path) if path else own.latest
        if path is None:
            return None
        step, _ = peek(path)
        with self.clock.phase("restore"):
            own.restore(path, partial=self._trainer is None)
        values = self._run_state.values
        for name, ours in (("seed", self._seed), ("global_batch_size", self._global_batch_size)):
            if self._trainer and values.get(name, ours) != ours:
                logging.warning(
                    "the checkpoint was made with %s %s and this run has %s: from step %d on the examples come in another"
                    " order than in an uninterrupted run", name, values[name], ours, step
                )  # fmt: skip
        self.restored_from, self._saved_step = path, step
        logging.info("restored step %d from %s", step, path)
        if self._trainer:
            self._iterator = None
            self._reducers["train"].load(values.get("running", {}))
            reported = {**dict.fromkeys(self._streams, 0), **values.get("reported", {})}
            for writer in self._writers:
                writer.resume(step, reported)
        return path

    def stop(self):
        """Ends the training at the next boundary, with the final save and evaluation; for actions."""
        self._stopped = True

    def close(self):
        """Closes the writers."""
        for writer in self._writers:
            writer.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    # The outer loop.

    def _train(self, target, eval_interval, eval_steps):
        if self._trainer is None:
            raise UsageError("this controller has no trainer; give Controller(trainer=...) to train")
        if target != -1:
            positive("the number of training steps", target)
        step, reported = self.global_step, self._run_state.values.setdefault("reported", {})
        self._stopped, self._last_evaluation, metrics = False, {}, {}
        intervals = [self._steps_per_loop, self._policy.every_steps, *([eval_interval] if eval_interval else [])]

        def evaluation_due(now):
            return eval_interval and any(reported.get(name) != now for name in self._evaluators)

        if eval_interval and step and step % eval_interval == 0 and evaluation_due(step) and step != target:
            self.evaluate(eval_steps)  # the run stopped between the save and the evaluation
        mark = self._mark(step)
        while not self._stopped and step != target:
            if target != -1 and step > target:
                logging.warning("the run is already at step %d, past the %d that it was asked to train to", step, target)
                break
            boundary = min(step - step % interval + interval for interval in intervals)
            boundary = boundary if target == -1 else min(boundary, target)
            done = self._run_loop(boundary - step)
            step, ended = step + done, step + done < boundary
            if step % self._steps_per_loop == 0 and done:
                metrics = self._report(step, mark)
                mark = self._mark(step)
            if step % self._policy.every_steps == 0 and done and self._checkpoints:
                self.save_checkpoint()
            if eval_interval and step % eval_interval == 0 and done and step != target:
                self._evaluate_saved(eval_steps)
            for writer in self._writers:
                writer.progress(step, None if target == -1 else target)
            if ended:
                self._note_end(step, target)
                break
        # Saved before an unfinished window of metrics is reported: a longer run goes on with the window whole.
        if self._checkpoints and (step or self._saved_step is not None):
            self.save_checkpoint()
        if step > reported.get("train", 0):
            metrics = self._report(step, mark)
        if evaluation_due(step):
            self._evaluate_saved(eval_steps)
        for writer in self._writers:
            writer.flush()
        return metrics

    def _run_loop(self, steps):
        if self._iterator is None:
            if self._start_step != self.global_step:
                self._start_step = self.global_step
                self._streams["train"] = self._distribute(
                    "train", self._trainer, self._global_batch_size, self._start_step
                )
            self._iterator = self._iterate("train")
        with self.clock.phase("train"):
            return self._engines["train"](self._iterator, steps)

    def _iterate(self, split):
        """Starts one pass over a data set; the first one traces the loop."""
        iterator = iter(self._streams[split].dataset)
        if not self._engines[split].traces:
            with self.clock.phase("compile"):
                self._engines[split].trace(iterator)
        return iterator

    def _evaluate_saved(self, eval_steps):
        if self._checkpoints:
            self.save_checkpoint()  # so that a failing evaluation loses nothing
        self.evaluate(eval_steps)

    def _note_end(self, step, target):
        if not step:
            raise UsageError(
                f"the training data set is empty: {type(self._trainer).__name__}.dataset has no batch; check where the "
                "data is read from, and that drop_remainder does not drop the only batch"
            )
        if target != -1:
            logging.warning("the training data ended at step %d, before step %d; repeat() it to train on", step, target)

    # Reports.

    def _mark(self, step):
        return step, self.clock.of("train")

    def _report(self, step, mark):
        metrics = self._engines["train"].read()
        steps, seconds = step - mark[0], self.clock.of("train") - mark[1]
        rate = {"steps_per_second": round(steps / seconds, 2)} if steps and seconds else {}
        return self._publish("train", step, self._trainer, metrics, rate)

    def _publish(self, split, step, task, metrics, extra={}):
        with self.clock.phase("report"):
            metrics = {**_numbers(task, task.loop_end(dict(metrics))), **extra}
            for writer in self._writers:
                writer.write(step, split, metrics)
            self._run_state.values.setdefault("reported", {})[split] = step
            for action in self._actions:
                action(Event(step, split, dict(metrics), self))
        return metrics

    # Checks.

    def _check_evaluation(self, steps):
        if not self._evaluators:
            raise UsageError("this controller has no evaluator; give Controller(evaluator=...) to evaluate")
        if steps != -1:
            positive("the number of evaluation steps", steps)
        for name, evaluator in self._evaluators.items():
            if steps == -1 and self._streams[name].infinite:
                raise UsageError(
                    f"the evaluation data set {name!r} never ends ({type(evaluator).__name__}.dataset is infinite), so "
                    "its evaluation would not either; leave out repeat(), or give a number of evaluation steps"
                )

    def _need_checkpoints(self, what):
        if not self._checkpoints:
            raise UsageError(f"{what} needs a model_dir, and this controller has none; give Controller(model_dir=...)")
        return self._checkpoints


def _check_tasks(trainer, evaluator):
    evaluators = evaluator if isinstance(evaluator, dict) else {"eval": evaluator} if evaluator is not None else {}
    if trainer is None and not evaluators:
        raise UsageError("a controller needs a trainer, an evaluator or both; it was given neither")
    if trainer is not None and not isinstance(trainer, Trainer):
        raise UsageError(f"trainer is a {type(trainer).__name__}; expected an instance of a looplib.Trainer subclass")
    for name, value in evaluators.items():
        if not isinstance(value, Evaluator):
            raise UsageError(f"evaluator {name!r} is a {type(value).__name__}; expected a looplib.Evaluator instance")
        if name == "train" or not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
            raise UsageError(
                f"an evaluator is named {name!r}; expected letters, digits, '.', '_' or '-', and not 'train'"
            )
    return trainer, dict(evaluators)


def _check_writable(model_dir):
    """Fails now on a directory that could not be written to at the first save."""
    probe = os.path.join(model_dir, f".looplib-{os.getpid()}-{time.time_ns()}")
    try:
        tf.io.gfile.makedirs(model_dir)
        with tf.io.gfile.GFile(probe, "w") as file:
            file.write("")
        tf.io.gfile.remove(probe)
    except (OSError, tf.errors.OpError) as error:
        raise UsageError(
            f"model_dir {model_dir} cannot be written to ({_first_line(error)}); name a directory that can be made and "
            "written, or mend its permissions"
        ) from error


def _build_optimizers(trainer, strategy):
    """Makes the slots of an optimizer that has none yet, where it is plain whose they are, so that all state exists."""
    held = list(vars(trainer).values())
    layers = [value for value in held if keras_family.is_layer(value)]
    if len(layers) == 1 and layers[0].built:
        for optimizer in filter(keras_family.is_optimizer, held):
            if hasattr(optimizer, "build"):
                with strategy.scope():
                    optimizer.build(layers[0].trainable_variables)


def _variables(value):
    if isinstance(value, tf.Variable):
        return [value]
    if isinstance(value, (list, tuple)):
        return [variable for item in value for variable in _variables(item)]
    if isinstance(value, tf.Module) or keras_family.family(value):
        found = value.variables
        return list(found() if callable(found) else found)
    return []


def _numbers(task, metrics):
    if not isinstance(metrics, dict):
        raise UsageError(
            f"{type(task).__name__}.loop_end returned a {type(metrics).__name__}; expected the dict of metrics to report"
        )
    numbers_only = {}
    for name, value in metrics.items():
        array = np.asarray(value)
        if array.shape != () or not isinstance(array.item(), numbers.Real):
            raise UsageError(
                f"the metric {name!r} of {type(task).__name__} is not a number (shape {list(array.shape)}, "
                f"{array.dtype}); derive numbers from it in loop_end and leave it out of what loop_end returns"
            )
        value = array.item()
        numbers_only[name] = value if isinstance(value, int) or not math.isfinite(value) else float(value)
    return numbers_only


def _first_line(error):
    return str(getattr(error, "message", error)).splitlines()[0]

"""Controller: the outer loop, a schedule of boundaries around the inner loop."""

import contextlib
import dataclasses
import weakref

import tensorflow as tf
from absl import logging

from looplib import _keras, console, runtime
from looplib._tf import lost_server
from looplib.checkpoint import run_directory
from looplib.checkpoint.policy import CheckpointPolicy
from looplib.checkpoint.store import Store
from looplib.checkpoint.warm_start import continue_from, warm_start
from looplib.cluster.collectives import Workers
from looplib.errors import DivergenceError, Preempted, UsageError, whole_number
from looplib.health.guards import Trouble, look_for_a_jump, look_for_nothing_but_skips
from looplib.health.preemption import notice
from looplib.health.watchdog import Watchdog
from looplib.loop import task_loop
from looplib.loop.base import Request, Specification
from looplib.loop.engines import ENGINES
from looplib.report import run_json
from looplib.report.clock import Clock
from looplib.report.writers import make_writers
from looplib.task import checks, perturbation
from looplib.task.actions import ActionStates, Event
from looplib.task.learning_rates import LearningRates
from looplib.task.state import ReplicaState, differing_variables
from looplib.task.trainer import Trainer

# The newest controller of each trainer, by the trainer's id: a trainer that is a dataclass has no hash.
_controllers: weakref.WeakValueDictionary[int, "Controller"] = weakref.WeakValueDictionary()


class Controller:
    """Trains and evaluates: schedule, loops, metric reduction, checkpoints, batch math.

    Building a controller checks everything that can be checked, traces the steps, and restores the newest checkpoint in
    `model_dir`, or else calls `trainer.initialize()`; so the same program run again continues where it stopped. State
    comes from the checkpoint (weights, optimizer, step, place in the data, seeds of layers); settings come from the
    program (these arguments, and what it computes with, a constant learning rate included).

    One controller at a time writes to a run directory: building another one with a trainer for the same `model_dir`
    closes the one before, or is refused while that one trains.

    Args:
      global_batch_size: examples of a training step over all replicas; also for evaluators that set no size. Only
        `OrbitTrainer` and `OrbitEvaluator`, which have data of their own, do without.
      trainer: the `Trainer`; None for a job that only evaluates.
      evaluator: an `Evaluator`, whose metrics are reported as "eval", or a dict from name to `Evaluator`.
      strategy: `tf.distribute.Strategy` under whose scope the models were built; default the current one.
      model_dir: the run directory, made if missing; None keeps nothing on disk.
      steps_per_loop: steps of one call into the device; training metrics are reported at its exact multiples.
      loop: the engine: "graph"; "xla", chunks of steps as one program of XLA; "auto", the fastest of these for the
        model, found in the first loops; "eager", for debugging.
      seed: decides the order of the training data.
      checkpoints: `CheckpointPolicy`, when to save and what to keep.
      writers: list of `Writer`; default TensorBoard and `metrics.jsonl` in `model_dir`, and the console.
      actions: callables that take an `Event`, called after every reported loop and every evaluation; the state of
        those that are an `Action` is part of the checkpoints.
      config: the program's own settings, for `run.json`: a dataclass, a dict, or an object with `as_dict`.

    Attributes:
      clock: `Clock` with the seconds of compile, train, input (steps that wait for their data), evaluate, save, restore
        and report; `clock.summary()` says what they mean.
      restored_from: path of the checkpoint that this run continues from, or None.
      report: `RunReport`, which writes `run.json` when a training starts and ends (`run_eval.json` for a controller
        without a trainer).

    Raises:
      UsageError: for bad input, in a sentence.
    """

    def __init__(
        self,
        *,
        global_batch_size=None,
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
        config=None,
    ):
        self.clock = Clock()
        self._strategy = strategy or tf.distribute.get_strategy()
        checks.check_kinds(self._strategy, actions)
        self._workers = Workers(self._strategy)
        evaluators = checks.check_tasks(trainer, evaluator)
        self._steps_per_loop = whole_number("steps_per_loop", steps_per_loop)
        if global_batch_size is not None:
            global_batch_size = whole_number("global_batch_size", global_batch_size)
        seed = whole_number("seed", seed, least=0)
        if loop not in ENGINES:
            raise UsageError(f"loop is {loop!r}; expected one of {', '.join(ENGINES)}")
        checks.check_together(trainer, evaluators, self._strategy, loop)
        self._settings = {"seed": seed, "global_batch_size": global_batch_size, "loop": loop}
        self._optimizers = [type(optimizer).__name__ for optimizer in _keras.optimizers(trainer)] if trainer else []
        self._policy = checkpoints
        self._actions = list(actions)
        self._action_states = ActionStates(self._actions)
        self._model_dir = run_directory.resolve(model_dir) if model_dir else None
        self._global_step = tf.Variable(0, dtype=tf.int64, trainable=False, name="global_step")
        self._stopped = self._training_now = self._closed = False
        self._window_start = 0
        self._last_evaluation = {}
        self._continued_from, self._save_noted = None, False
        self._torn = False  # a step has failed, and nobody knows which variables it had updated by then
        self.restored_from = None
        self._training, self._evaluations, self._writers = None, {}, []

        if trainer:
            checkpoints.check(dict.fromkeys(evaluators), self._model_dir)
        self._store = Store(self._model_dir, checkpoints, trainer is not None, self._workers, self._give_up)
        self.report = self._make_report(config)
        self._store.check_nothing_is_lost(self.report.saved_step)
        self._writers = make_writers(writers, self._store.writable and self._model_dir) if self.is_chief else []
        self._build_loops(trainer, evaluators, loop, *self._store.peek())
        if trainer:
            checkpoints.check({name: loop.metric_names for name, loop in self._evaluations.items()}, self._model_dir)
            self._learning_rates = LearningRates(trainer)
        self._watchdog = Watchdog(
            self.clock, self._progress, lambda: self._store.latest, self._policy.guards.stall_limit
        )
        objects = checks.collect_state(trainer, evaluators)
        if self._training:
            self._training.warn_of_what_is_not_saved(objects)
        own = ReplicaState(self._strategy, differing_variables(self._strategy, trainer, objects)) if trainer else None
        self._store.open(objects, self._global_step, own, self._sync)
        if self._store.start:
            self._restore_start(self._store.start.path)
        else:
            self._start(trainer, objects)
        self._store.guard(objects)

    # Building.

    def _start(self, trainer, objects):
        """Starts a run that has no checkpoint of its own."""
        step = 0
        if self._policy.continue_from:
            self.restored_from, step = continue_from(objects, self._global_step, self._policy.continue_from)
            logging.info("goes on from step %d of %s, with the data from its start", step, self.restored_from)
            self._store.values.update(input_offset=-step, reported={"train": step})
            self._window_start = step
        elif trainer:
            with self._strategy.scope():
                trainer.initialize()
            if self._policy.warm_start:
                warm_start(objects, self._policy.warm_start)
            if perturbation.requested():
                perturbation.nudge(self._strategy, objects)
        # What a run wrote that was killed before its first save is void.
        self._continued_from = step, step

    def _build_loops(self, trainer, evaluators, engine, start_step, values):
        chosen = values.get("engines", {})
        batch = self._settings["global_batch_size"]
        self._own(*filter(None, [trainer, *evaluators.values()]))
        self._evaluated = tf.Variable(0, dtype=tf.int64, trainable=False, name="evaluated_steps")

        def make_loop(split, task, **settings):
            return task_loop.make_loop(
                Specification(
                    split=split,
                    task=task,
                    strategy=self._strategy,
                    clock=self.clock,
                    engine=engine,
                    seed=self._settings["seed"],
                    steps_per_loop=self._steps_per_loop,
                    chosen=chosen.get(split),
                    **settings,
                )
            )

        self._training = None
        if trainer:
            self._warn_of_another_controller(trainer)
            checks.build_optimizers(trainer, self._strategy)
            self._training = make_loop(
                "train",
                trainer,
                global_batch_size=batch,
                start_step=start_step,
                counter=self._global_step,
                non_finite=self._policy.guards.non_finite,
            )
        self._evaluations = {
            name: make_loop(name, task, global_batch_size=task.global_batch_size or batch, counter=self._evaluated)
            for name, task in evaluators.items()
        }

    def _own(self, *tasks_of_this):
        """Gives trainers and evaluators what they read of the run; another controller may have had them since."""
        for task in tasks_of_this:
            task.global_step = self._global_step
            if isinstance(task, Trainer):
                task.global_batch_size, task.run_seed = self._settings["global_batch_size"], self._settings["seed"]

    def _warn_of_another_controller(self, trainer):
        other = _controllers.get(id(trainer))
        if other is not None and not other._closed:
            logging.warning(
                "this %s is also the trainer of another controller that is not closed: both train its weights, and "
                "each counts and saves its own steps only; close the other one",
                type(trainer).__name__,
            )
        _controllers[id(trainer)] = self

    def _make_report(self, config):
        path = None
        if self.is_chief and self._store.writable:
            path = run_json.path_of(self._model_dir, self._store.writes)
        return run_json.RunReport(
            path=path,
            clock=self.clock,
            strategy=runtime.describe(self._strategy),
            num_replicas=self._strategy.num_replicas_in_sync,
            flags={
                **self._settings,
                "steps_per_loop": self._steps_per_loop,
                "checkpoint_interval": self._policy.every_steps,
                "guards": dataclasses.asdict(self._policy.guards),
            },
            config=config,
            standing=self._standing,
            check=self._store.check_lock,
        )

    def _progress(self):
        own = [loop.progress() for loop in self.loops.values()]
        return int(self._global_step), int(self._evaluated), own

    # What a user calls.

    @property
    def is_chief(self):
        """Whether this process writes checkpoints and reports for all workers."""
        return self._workers.is_chief

    @property
    def global_step(self):
        """The number of training steps done, an int."""
        return int(self._global_step)

    @property
    def latest_checkpoint(self):
        """The path of the newest committed checkpoint in `model_dir`, or None."""
        return self._store.latest

    @property
    def best_checkpoint(self):
        """The path of the best committed checkpoint by the policy's first `KeepBest`, or None if none has a score.

        Raises:
          UsageError: if the policy has no `KeepBest`.
        """
        return self._store.best()

    @property
    def rollbacks(self):
        """How often the run went back to a checkpoint, over all its restarts."""
        return self._store.values.get("rollbacks", 0)

    @property
    def engines(self):
        """What `loop="auto"` has chosen so far: dict from split to `loop`, `chunk` and `seconds_per_step`."""
        return {split: loop.chosen for split, loop in self.loops.items() if loop.chosen}

    @property
    def loops(self):
        """The inner loops: dict from "train" and the names of evaluators to `loop.base.Loop`."""
        return {**({"train": self._training} if self._training else {}), **self._evaluations}

    def train(self, steps):
        """Trains.

        Args:
          steps: the global step to train to, counted from the start of the run; -1 for the end of the data.

        Returns:
          dict, the last reported training metrics, of an earlier start of the run if there was nothing left to do.

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
        eval_interval = whole_number("eval_interval", eval_interval)
        eval_steps = task_loop.check_evaluation(self._evaluations, eval_steps)
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
        steps = task_loop.check_evaluation(self._evaluations, steps)
        if self._model_dir and not self._training and not self.restored_from:
            raise UsageError(
                f"there is no checkpoint in {self._model_dir} to evaluate; train first, or name the directory of a "
                "training"
            )
        with contextlib.nullcontext() if self._training else self.report.of_a_start(self.restored_from):
            step, results = self.global_step, {}
            with console.guarded(), notice.listening(), self._watchdog.watching():
                for name, evaluation in self._evaluations.items():
                    results[name] = self._publish(name, step, self._evaluate(name, evaluation, steps, step))
            if not self._closed:
                with self.clock.phase("save"):
                    self._store.add_scores(step, results)
            self._last_evaluation = results
            return results

    def _evaluate(self, name, evaluation, steps, step):
        self._own(evaluation.task)
        with evaluation.task.evaluating():
            evaluation.rewind()
            ran = evaluation.run(Request(steps, read=True), "evaluate")
            if ran.done and not ran.stopped:
                with self.clock.phase("report"):
                    return evaluation.read()
        if ran.stopped:
            self._leave(step)
        raise UsageError(
            f"the evaluation data set {name!r} is empty: {evaluation.who}.dataset has no batch; check where the data "
            "is read from"
        )

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
        steps = task_loop.check_evaluation(self._evaluations, steps)
        if until_step is not None:
            until_step = whole_number("until_step", until_step, least=0)
        results = None
        self._store.need("evaluate_continuously")
        with console.guarded(), notice.listening():
            while path := self._store.wait_for_newer(self.restored_from if results is not None else None, timeout):
                try:
                    self.restore_checkpoint(path)
                except UsageError:
                    if tf.io.gfile.exists(path + ".commit") or self._workers.count > 1:
                        raise
                    continue  # the training has meanwhile deleted it, having newer ones
                results = self.evaluate(steps)
                if until_step is not None and self.global_step >= until_step:
                    break
        if results is None:
            raise UsageError(
                f"no checkpoint came in {self._store.directory} within {timeout} s; check that the training writes "
                "there"
            )
        return results

    def save_checkpoint(self):
        """Saves the whole state now, and waits until it is committed.

        Nothing is written if a checkpoint of this step holds these values already. If it holds others, because weights
        were assigned since then, it is moved into `checkpoints/set_aside`, and so are checkpoints of later steps.

        Returns:
          str, the path of the checkpoint.

        Raises:
          UsageError: without a `model_dir`, or if it cannot be written.
          DivergenceError: if a variable is not finite; nothing is saved then.
        """
        self._refuse_if_closed("save_checkpoint")
        self._refuse_if_torn("save_checkpoint")
        self._store.need("save_checkpoint")
        if self._training is None:
            raise UsageError("save_checkpoint needs a trainer, and this controller has none; an evaluation only reads")
        try:
            self._store.forget_save_of_other_values(self.global_step)
            self._save(wait=True)
        except Trouble as trouble:
            raise DivergenceError(f"{trouble.what}; it is not saved") from None
        return self._store.path_of(self.global_step)

    def _save(self, wait):
        """Saves, unless this step is saved; returns when it is committed, or at once if `wait` is not set."""
        with self.clock.phase("save"):
            for writer in self._writers:
                writer.flush()  # what the checkpoint calls reported is on disk before it is
            self._store.save(self.global_step, self._own_state, wait)

    def _own_state(self):
        self._store.input_state.position = self._training.position() or b""
        return {
            "running": self._training.reducer.state(),
            "optimizers": self._optimizers,
            "learning_rates": self._learning_rates.built,
            "actions": self._action_states.save(),
            "engines": self.engines,
            **self._settings,
        }

    def restore_checkpoint(self, path=None):
        """Restores the whole state, the position in the data included; changes nothing in the run directory.

        Only a training that continues from there changes it: it moves later checkpoints into `checkpoints/set_aside`
        and later records into `metrics.voided.jsonl`, with a line for each.

        Args:
          path: a checkpoint, such as `<model_dir>/checkpoints/ckpt-1000`; None takes the newest of `model_dir`.

        Returns:
          The path, or None if there is no checkpoint yet.

        Raises:
          UsageError: if the checkpoint cannot be read or belongs to another model.
        """
        self._store.need("restore_checkpoint")
        self._refuse_while_training("restore_checkpoint")
        return self._restore(path)

    def _restore_start(self, path):
        """Restores what the run starts from; an evaluation whose training has deleted it meanwhile, a newer one."""
        while True:
            try:
                self.restore_checkpoint(path)
                return
            except UsageError:
                newer = None if self._training or self._workers.count > 1 else self._store.latest
                if newer is None or newer == path or tf.io.gfile.exists(path + ".commit"):
                    raise
                path = newer

    def _restore(self, path, changes=None):
        with self.clock.phase("restore"):
            path, step = self._store.restore(path, changes)
        if path is None:
            return None
        values = self._store.values
        if self._training:
            self._store.check_optimizers(path, self._optimizers)
            self._store.warn_of_changes(step, self._settings)
        self.restored_from, self._torn = path, False
        self._say(f"restored step {step} from {path}")
        if self._training:
            self._learning_rates.after_restore(values.get("learning_rates", {}), step)
            self._action_states.load(values.get("actions", {}))
            # After a rollback the data goes on elsewhere than where the checkpoint's position says.
            position = None if changes else self._store.input_state.position or None
            self._training.rewind(step + self._store.input_offset, position)
            self._training.reducer.load(values.get("running", {}))
            self._window_start = step
            self._continued_from = step, values.get("reported", {}).get("train", 0)
        return path

    def _say(self, sentence):
        """Tells the user something about the run, in the log and on the console."""
        logging.info("%s", sentence)
        for writer in self._writers:
            writer.note(sentence)

    def stop(self):
        """Ends the training at the next boundary, with the final save and evaluation; for actions."""
        self._stopped = True

    def close(self):
        """Waits for a save under way, closes the writers, and releases the data and the run directory.

        A closed controller refuses to train and to save, and its evaluations are not reported. Closing it again does
        nothing.

        Raises:
          UsageError: if that save failed.
        """
        self._refuse_while_training("close")
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as stack:  # each is done, whatever the others raise; in the reverse order of these
            stack.callback(self._store.close)
            for part in (*self._writers, *self.loops.values()):
                stack.callback(part.close)
            self._writers = []

    def _give_up(self):
        """Closes this controller, because another one of the process is being built for its directory."""
        if self._training_now:
            raise UsageError(
                f"another controller of this process is training in {self._model_dir}; wait until it ends, or give "
                "this one a model_dir of its own"
            )
        logging.warning("the controller that was built earlier for %s is closed, because a new one is", self._model_dir)
        try:
            self.close()
        except UsageError as error:  # a failed save of that controller, and not of the new one
            logging.error("%s", error)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    # The outer loop.

    def _train(self, target, eval_interval, eval_steps):
        if self._training is None:
            raise UsageError("this controller has no trainer; give Controller(trainer=...) to train")
        self._refuse_if_closed("train")
        self._refuse_if_torn("train")
        self._refuse_while_training("train")
        target = whole_number("the number of training steps", target, or_all=True)
        if target == -1 and self._training.endless:
            raise UsageError(
                f"{self._training.who}.dataset never ends, so training to its end would not either; give a number of "
                "steps"
            )
        self._training_now = True
        self._own(self._training.task)
        try:
            with (
                console.guarded(),
                self.report.of_a_start(self.restored_from),
                notice.listening(),
                notice.deferred(self._busy),
                self._watchdog.watching(),
            ):
                if self._policy.guards.may_roll_back and self._store and self._store.agreed_latest() is None:
                    self._save(wait=True)  # to have where to go back to
                while True:
                    try:
                        return self._train_on(target, eval_interval, eval_steps)
                    except Trouble as trouble:
                        self._restore(*self._store.go_back(trouble))
        except BaseException as error:
            self._finish_save()
            if lost := lost_server(error):
                raise lost from error
            raise
        finally:
            self._training_now = False

    def _finish_save(self):
        """Lets a background save end where something else has already ended the training."""
        try:
            self._store.wait()
        except UsageError as error:
            logging.error("%s", error)

    def _train_on(self, target, eval_interval, eval_steps):
        step, reported = self.global_step, self._store.values.setdefault("reported", {})
        if step == target:
            self._say(f"already at step {step}, nothing to train")
        elif target == -1 or step < target:
            self._drop_what_comes_after(eval_interval)
        self._stopped, self._last_evaluation = False, {}
        intervals = [self._steps_per_loop, self._policy.every_steps, *([eval_interval] if eval_interval else [])]

        def evaluation_due(now):
            return eval_interval and any(reported.get(name) != now for name in self._evaluations)

        if eval_interval and step and step % eval_interval == 0 and evaluation_due(step) and step != target:
            self.evaluate(eval_steps)  # the run stopped between the save and the evaluation
        self._training.resume(step + self._store.input_offset)
        mark = self._mark(step)
        while not self._stopped and step != target:
            if target != -1 and step > target:
                logging.warning(
                    "the run is already at step %d, past the %d that it was asked to train to", step, target
                )
                break
            boundary = min(step - step % interval + interval for interval in intervals)
            boundary = boundary if target == -1 else min(boundary, target)
            reported_there = boundary % self._steps_per_loop == 0
            horizon = boundary if target == -1 else target
            try:
                ran = self._training.run(Request(boundary - step, read=reported_there, horizon=horizon - step), "train")
            except BaseException as error:
                self._torn = not self._training.left_whole(error)
                raise
            done, step = ran.done, step + ran.done
            self._check_count(step)
            ended = step < boundary and not ran.stopped
            if not ran.finite:
                after, names = self._training.reducer.first_bad()
                raise self._store.trouble_in_step(self._window_start + after, names)
            self._store.raise_failure()
            if not self._save_noted and self._store.saved_step and not self._store.saving:
                self._save_noted = True
                self.report.write("running")  # from now on the run does not start over without being asked to
            if step % self._steps_per_loop == 0 and done:
                self._report(step, mark)
                mark = self._mark(step)
            if step % self._policy.every_steps == 0 and done and self._store:
                self._save(wait=False)
            if ran.stopped:
                self._leave(step)
            if eval_interval and step % eval_interval == 0 and done and step != target:
                self._evaluate_saved(eval_steps)
            for writer in self._writers:
                writer.progress(step, None if target == -1 else target)
            if ended:
                self._training.note_end(step, target)
                break
        self._check_count(step)
        # Saved before an unfinished window of metrics is reported: a longer run goes on with the window whole.
        if self._store and (step or self._store.saved_step is not None):
            self._save(wait=True)
        self._store.check(step)
        if step > reported.get("train", 0):
            self._report(step, mark)
        if evaluation_due(step):
            self._evaluate_saved(eval_steps)
        for writer in self._writers:
            writer.flush()
        return self._store.values.get("train", {})

    def _check_count(self, step):
        if self.global_step != step:
            raise UsageError(
                f"the global step is {self.global_step} after step {step}: {self._training.who}.step_fn, its loop_end "
                "or an action assigns global_step, which the controller counts itself; leave that out"
            )

    def _sync(self):
        for writer in self._writers:
            writer.sync()

    def _drop_what_comes_after(self, eval_interval):
        """Moves later checkpoints and records of the run aside, once the training continues from an earlier step."""
        if self._continued_from is None:
            return
        (step, reported), self._continued_from = self._continued_from, None
        # An evaluation at the end of an earlier training is not one of a longer training's.
        evaluated = step if not eval_interval or step % eval_interval == 0 else step - 1
        self._store.set_newer_aside(step)
        for writer in self._writers:
            writer.resume(step, {"train": reported, **dict.fromkeys(self._evaluations, evaluated)})

    def _standing(self):
        trained = self._store.values.get("train") if self._training else None
        return run_json.Standing(
            step=self.global_step,
            metrics={**({"train": trained} if trained else {}), **self._last_evaluation},
            rollbacks=self.rollbacks,
            engines=self.engines,
            saved_step=int(latest.rsplit("-", 1)[1]) if (latest := self._store.latest) else None,
        )

    def _busy(self):
        return self.clock.current[0] == "save" or self._store.saving

    def _leave(self, step):
        """Ends the run for a signal: saves, flushes, raises `Preempted`."""
        signal = notice.requested or "a signal to another worker"
        if not self._training_now:
            raise Preempted(f"ended by {signal} in the evaluation of step {step}; run the same command again")
        if self._store:
            self._save(wait=True)
        for writer in self._writers:
            writer.flush()
        kept = self._store.agreed_latest()
        saved = f"saved in {kept}; the same command goes on from there" if kept else "without a model_dir to save to"
        raise Preempted(f"ended by {signal} at step {step}, {saved}")

    def _evaluate_saved(self, eval_steps):
        if not self._store:
            self.evaluate(eval_steps)
            return
        with self.clock.saving_for_an_evaluation():
            self._save(wait=False)  # so that a failing evaluation loses nothing
            try:
                self.evaluate(eval_steps)
            finally:
                with self.clock.phase("save"):
                    self._store.wait()

    # Reports.

    def _mark(self, step):
        return step, self._training_seconds()

    def _training_seconds(self):
        return self.clock.of("train") + self.clock.of("input")

    def _report(self, step, mark):
        steps, seconds = step - mark[0], self._training_seconds() - mark[1]
        with self.clock.phase("report"):
            metrics = self._training.read()
            look_for_nothing_but_skips(step, metrics, step - self._window_start)
            self._window_start = step
            loss = metrics.get(self._training.task.loss_name)
            look_for_a_jump(self._store.values, step, loss, self._policy.guards, self._steps_per_loop)
            if steps and seconds:
                metrics.setdefault("steps_per_second", round(steps / seconds, 2))
        self._publish("train", step, metrics)

    def _publish(self, split, step, metrics):
        with self.clock.phase("report"):
            self._store.check_lock()
            for writer in self._writers:
                writer.write(step, split, metrics)
            self._store.values.setdefault("reported", {})[split] = step
            if split == "train":
                self._store.values["train"] = metrics
            for action in self._actions:
                action(Event(step, split, dict(metrics), self))
        return metrics

    # Checks.

    def _refuse_if_closed(self, what):
        if self._closed:
            raise UsageError(
                f"{what} was called on a closed controller, whose run directory may be another's; build a new one"
            )

    def _refuse_if_torn(self, what):
        if self._torn:
            kept = self._store.latest
            cure = (
                f"call controller.restore_checkpoint(), which goes back to {kept}"
                if kept
                else "there is no checkpoint to go back to, so build the trainer and the controller again"
            )
            raise UsageError(
                f"{what} was called after a step that failed, which may have updated only a part of the variables; "
                f"{cure}"
            )

    def _refuse_while_training(self, what):
        if self._training_now:
            raise UsageError(f"{what} was called by an action inside a training; an action may save, evaluate or stop")

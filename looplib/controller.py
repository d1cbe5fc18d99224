"""Controller: the outer loop, a schedule of boundaries around the inner loop."""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from looplib import files, plugins
from looplib.checkpoint import choice
from looplib.checkpoint.directory import resolve
from looplib.checkpoint.policy import CheckpointPolicy, KeepRule
from looplib.errors import DivergenceError, UsageError, shown, whole_number
from looplib.evaluations import Evaluations
from looplib.health.guards import Trouble
from looplib.loop import task_loop
from looplib.loop.base import Loop
from looplib.loop.host_loop import as_shown
from looplib.loop.schedule import Schedule
from looplib.report.writers import Writer
from looplib.run import Metrics, Run
from looplib.run_config import RunConfig
from looplib.task import checks
from looplib.task.actions import Event, attending, stops_of, tell_saves
from looplib.task.evaluator import Evaluator
from looplib.task.media import Media
from looplib.task.trainer import Trainer


class Controller:
    """Trains and evaluates: schedule, loops, metric reduction, checkpoints, batch math.

    Building a controller checks everything that can be checked, traces the steps, and restores the newest checkpoint in
    `model_dir`, or else calls `trainer.initialize()`; so the same program run again continues where it stopped. Without
    a trainer it restores the checkpoint that the training ended with, or the `CheckpointPolicy.restore`. State
    comes from the checkpoint (weights, optimizer, step, position in the data, seeds of layers); settings come from the
    program (these arguments, and the constants that it computes with, such as a constant learning rate).

    One controller at a time writes to a run directory: building another one with a trainer for the same `model_dir`
    closes the one before, or is refused while that one trains.

    Args:
      run_config: the `RunConfig`: batch size, steps per loop, engine, seed and the like.
      trainer: the `Trainer`; None for a job that only evaluates.
      evaluator: an `Evaluator`, whose metrics are reported as "eval", or a dict from name to `Evaluator`.
      strategy: `tf.distribute.Strategy` under whose scope the models were built; default the current one.
      model_dir: the run directory, made if missing; None keeps nothing on disk.
      checkpoints: `CheckpointPolicy`, when to save and what to keep.
      writers: list of `Writer`, or names of plug-ins of the group `looplib.writers`, such as
        `[*looplib.DEFAULT_WRITERS, "mlflow"]`; default `DEFAULT_WRITERS`: the console, and in `model_dir` TensorBoard,
        `metrics.jsonl` and `media.jsonl`.
      actions: callables that take an `Event`, called after every reported loop and every evaluation; the state of
        those that are an `Action` is part of the checkpoints.
      config: the program's own settings, for `run.json`: a dataclass, a dict, or an object with `as_dict`.

    Attributes:
      clock: `Clock` with the seconds of compile, train, input (steps that wait for their data), evaluate, save, restore
        and report; `clock.summary()` says what they mean.
      model_dir: the run directory, or None.
      policy: the `CheckpointPolicy`.
      report: `RunReport`, which writes `run.json` when a training starts and ends (`run_eval.json` for a controller
        without a trainer). `controller.report()` writes `report.html` as it is now, and shows it in a notebook.

    Raises:
      UsageError: for bad input, in a sentence.
    """

    def __init__(
        self,
        run_config: RunConfig = RunConfig(),
        *,
        trainer: Trainer | None = None,
        evaluator: Evaluator | Mapping[str, Evaluator] | None = None,
        strategy: tf.distribute.Strategy | None = None,
        model_dir: str | os.PathLike[str] | None = None,
        checkpoints: CheckpointPolicy | None = None,
        writers: Sequence[Writer | str] | None = None,
        actions: Sequence[Callable[[Event], object]] | None = None,
        config: Any = None,
    ) -> None:
        files.check_temporary()
        if not isinstance(run_config, RunConfig):
            raise UsageError(f"run_config is {shown(run_config)}; expected a looplib.RunConfig, as the first argument")
        strategy = strategy or tf.distribute.get_strategy()
        checkpoints, actions = checkpoints or CheckpointPolicy(), actions or ()
        checks.check_kinds(strategy, actions)
        evaluators = checks.check_tasks(trainer, evaluator)
        steps = run_config.steps_per_loop
        own_steps = trainer.own_steps_per_loop if trainer and steps is None else lambda *_: steps
        self._own_steps = functools.partial(own_steps, run_config.global_batch_size)
        run_config = dataclasses.replace(run_config, steps_per_loop=self.steps_per_loop)
        model_dir = resolve(model_dir) if model_dir else None
        checks.check_together(trainer, evaluators, strategy, run_config.loop)
        tasks = [*([trainer] if trainer else []), *evaluators.values()]
        own = [action for task in tasks for action in task.own_actions]
        self._actions = [*own, *actions]
        rules = (*checkpoints.keep, *(action for action in own if isinstance(action, KeepRule)))
        checkpoints = dataclasses.replace(checkpoints, keep=rules)
        self._stops = stops_of(self._actions)
        self._stopped = self._evaluation_due = self._ending = False
        self._run = Run(
            run_config,
            strategy,
            trainer,
            evaluators,
            model_dir=model_dir,
            policy=checkpoints,
            writers=writers,
            actions=self._actions,
            config=config,
        )
        self._evaluations = Evaluations(self._run, self._publish)
        self.policy, self.model_dir = checkpoints, self._run.model_dir
        self.clock, self.report = self._run.clock, self._run.report

    # What a user calls.

    @property
    def is_chief(self) -> bool:
        """Returns whether this process writes checkpoints and reports for all workers."""
        return self._run.workers.is_chief

    @property
    def global_step(self) -> int:
        """The number of training steps done."""
        return self._run.step

    @property
    def restored_from(self) -> str | None:
        """The path of the checkpoint that this run continues from, or None."""
        return self._run.restored_from

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the newest committed checkpoint in `model_dir`, or None."""
        return self._run.directory.latest

    @property
    def best_checkpoint(self) -> str | None:
        """The path of the best committed checkpoint by the policy's first `KeepBest`, or None if none has a score.

        Without one, that of the training which `run.json` has.

        Raises:
          UsageError: if neither has one.
        """
        best = self._run.directory.best()
        return best.path if best else None

    @property
    def rollbacks(self) -> int:
        """How often the run went back to a checkpoint, over all its restarts."""
        return self._run.store.record.rollbacks

    @property
    def engines(self) -> dict[str, dict[str, Any]]:
        """The choices of `loop="auto"` so far: dict from split to `loop`, `chunk` and `seconds_per_step`."""
        return self._run.loops.choices

    @property
    def loops(self) -> dict[str, Loop]:
        """The inner loops: dict from "train" and the names of evaluators to `loop.base.Loop`."""
        return self._run.loops.by_name

    @property
    def steps_per_loop(self) -> int:
        """The steps of one call into the device."""
        steps = self._own_steps()
        return 100 if steps is None else steps

    @property
    def steps_per_epoch(self) -> float | None:
        """The steps in which the training data comes once; None where that is not known."""
        return self._run.loops.steps_per_epoch

    def train(self, steps: int | None = None, *, epochs: float | None = None) -> Metrics:
        """Trains.

        Args:
          steps: the global step to train to, counted from the start of the run; -1 for the end of the data.
          epochs: in place of steps, how often the data is to come, counted from the start of the run.

        Returns:
          dict, the last reported training metrics, of an earlier start of the run if there was nothing left to do.

        Raises:
          UsageError: for bad input.
        """
        return self._train(self._run.loops.steps_of(steps, epochs), None, -1)

    def train_and_evaluate(
        self, steps: int | None = None, eval_interval: int | None = None, eval_steps: int = -1, *,
        epochs: float | None = None,
    ) -> dict[str, Metrics]:  # fmt: skip
        """Trains, saving and evaluating at exact multiples of `eval_interval` and at the end.

        Args:
          steps: the global step to train to; -1 for the end of the data.
          eval_interval: steps between evaluations; default an epoch.
          eval_steps: steps of each evaluation; -1 for all data.
          epochs: in place of steps, how often the data is to come.

        Returns:
          dict from evaluator name to metrics, of the last evaluation.

        Raises:
          UsageError: for bad input.
        """
        loops = self._run.loops
        end = loops.steps_of(steps, epochs)
        interval = whole_number("eval_interval", loops.steps_of_an_epoch() if eval_interval is None else eval_interval)
        eval_steps = task_loop.check_evaluation(loops.evaluations, eval_steps)
        self._train(end, interval, eval_steps)
        return self._run.last_evaluation

    def evaluate(self, steps: int = -1) -> dict[str, Metrics]:
        """Evaluates every evaluator at the current step.

        Args:
          steps: how many steps of each data set; -1 for all of it.

        Returns:
          dict from evaluator name to a dict of metrics, the number of `examples` among them.

        Raises:
          UsageError: for bad input.
        """
        return self._evaluations.at_this_step(steps)

    def evaluate_continuously(
        self, steps: int = -1, until_step: int | None = None, timeout: float | None = None
    ) -> dict[str, Metrics]:
        """Evaluates each new checkpoint in `model_dir`, as another job writes them.

        Args:
          steps: steps of each evaluation; -1 for all data.
          until_step: ends after the evaluation of a checkpoint at or past this step; None waits on.
          timeout: ends after this many seconds without a new checkpoint; None waits forever.

        Returns:
          dict from evaluator name to metrics, of the last evaluation.

        Raises:
          UsageError: for bad input, or if no checkpoint came in time.
        """
        return self._evaluations.of_each_checkpoint(steps, until_step, timeout)

    def predict(
        self, directory: str | os.PathLike[str] | None = None, *, format: str = "jsonl", piece: int = 10_000
    ) -> dict[str, str]:
        """Writes what each evaluator that has a `predict_fn` predicts: one record for each example, in their order.

        A call that was killed is repeated to continue after the pieces that are finished. Weights, data or settings
        that differ from those of the finished pieces are refused.

        Args:
          directory: default `predictions` in `model_dir`; the records of an evaluator are in a folder of its name.
          format: "jsonl", "tfrecord" (of `tf.train.Example`) or "parquet" (with pyarrow).
          piece: records of a file.

        Returns:
          dict from evaluator name to its folder.

        Raises:
          UsageError: for bad input, or if no evaluator predicts.
        """
        predict = plugins.load("looplib.parts", "predict")
        directory = files.resolve(directory, "the directory of the predictions") if directory is not None else None
        return predict(self._run, directory, format, piece)

    def export(
        self, directory: str | os.PathLike[str] | None = None, *, averages: bool = True, tflite: bool = False
    ) -> str:
        """Writes the model at the current step for programs without looplib, into a directory that appears whole.

        It holds `saved_model`, with a signature for serving, `model.keras` where Keras can write the model, and
        `export.json`. What is exported is the `export` of the first evaluator, or else of the trainer. An action may
        call it.

        Args:
          directory: default `export/step-<step>` in `model_dir`; an earlier export there is replaced.
          averages: whether averaged weights are exported, if there are any.
          tflite: whether to write `model.tflite` too, if TensorFlow's converter takes the model.

        Returns:
          The directory.

        Raises:
          UsageError: for bad input, or a model that cannot be exported.
        """
        export = plugins.load("looplib.parts", "export")
        directory = files.resolve(directory, "the directory of the export") if directory is not None else None
        return export(self._run, directory, averages, tflite)

    def save_checkpoint(self) -> str:
        """Saves the complete state now, and waits until it is committed.

        Nothing is written if a checkpoint of this step holds these values already. If it holds others, because weights
        were assigned since then, it is moved into `checkpoints/set_aside`, and so are checkpoints of later steps.

        Returns:
          str, the path of the checkpoint.

        Raises:
          UsageError: without a `model_dir`, or if it cannot be written.
          DivergenceError: if a variable is not finite; nothing is saved then.
        """
        run = self._run
        run.refuse_if_closed_or_torn("save_checkpoint")
        run.directory.need("save_checkpoint")
        if run.loops.training is None:
            raise UsageError(
                "save_checkpoint needs a trainer, but this controller has none; evaluation jobs are read-only"
            )
        try:
            run.store.forget_save_of_other_values(run.step)
            run.save(wait=True)
        except Trouble as trouble:
            raise DivergenceError(f"{trouble.what}; it is not saved") from None
        self._tell_saves()
        return run.directory.path_of(run.step)

    def restore_checkpoint(self, checkpoint: str | int | os.PathLike[str] = "latest") -> str | None:
        """Restores the complete state, including the position in the data; changes nothing in the run directory.

        Only a training that continues from there changes it: it moves later checkpoints into `checkpoints/set_aside`
        and later records into `metrics.voided.jsonl`, with a line for each.

        Args:
          checkpoint: "latest"; "best", the `best_checkpoint`; "final", the one that the training ended with; a step;
            or a path, such as `<model_dir>/checkpoints/ckpt-1000`.

        Returns:
          The path, or None if there is no checkpoint yet.

        Raises:
          UsageError: if the checkpoint is not there, cannot be read or belongs to another model.
        """
        self._run.directory.need("restore_checkpoint")
        self._run.refuse_while_training("restore_checkpoint")
        if checkpoint == choice.LATEST:
            return self._run.restore(None)
        is_path = isinstance(checkpoint, (str, os.PathLike)) and checkpoint not in (choice.BEST, choice.FINAL)
        return self._run.restore(checkpoint) if is_path else self._run.restore_chosen(checkpoint)

    def show(self, media: Mapping[str, Media], split: str = "train") -> None:
        """Shows images, texts and histograms at the current step; for actions.

        Args:
          media: dict from name to `looplib.image`, `looplib.text` or `looplib.histogram`. What another call has shown
            under the same name at this step is replaced.
          split: "train", or an evaluator's name.
        """
        self._run.show(split, self._run.step, as_shown(media))

    def stop(self) -> None:
        """Ends the training at the next boundary, with the final save and evaluation; for actions."""
        self._stopped = True

    def close(self) -> None:
        """Waits for a save under way, closes the writers, and releases the data and the run directory.

        A closed controller refuses to train and to save, and its evaluations are not reported. Closing it again does
        nothing.

        Raises:
          UsageError: if that save failed.
        """
        self._run.refuse_while_training("close")
        self._run.close()

    def __enter__(self) -> "Controller":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The outer loop.

    def _train(self, end: int, eval_interval: int | None, eval_steps: int) -> Metrics:
        run = self._run
        run.refuse_if_closed_or_torn("train")
        if self.policy.restore is not None:
            raise UsageError(
                f"CheckpointPolicy(restore={self.policy.restore!r}) is for evaluations, predictions and exports, and "
                "each start of a training would go back there; leave it out, and call controller.restore_checkpoint"
            )
        run.refuse_while_training("train")
        end = run.loops.check_end(end)
        schedule = Schedule(self.steps_per_loop, self.policy.every_steps, eval_interval, end, tuple(self._stops))
        run.end = schedule.end
        self._stopped = False
        with attending(self._actions, run.store.take_committed, self), run.training_now():
            while True:
                try:
                    self._train_on(schedule, eval_steps)
                    break
                except Trouble as trouble:
                    run.go_back(trouble)
                    self._stopped = False
        run.note_end()
        return run.store.record.train

    def _train_on(self, schedule: Schedule, eval_steps: int) -> None:
        """Trains from the current step on, and does at each boundary what is due there."""
        run, step = self._run, self._continue(schedule, eval_steps)
        for boundary in schedule.boundaries(step):
            if self._stopped:
                break
            for action in self._stops.get(step, ()):
                action.on_leaving(step, self)
            ran = run.train_to(step, boundary, schedule.horizon(boundary))
            step += ran.done
            for action in self._stops.get(step, ()):
                action.on_reaching(step, self)
            reached = step == boundary.step
            self._evaluation_due = boundary.evaluate or (boundary.end and bool(schedule.evaluate_every))
            self._ending = boundary.end
            self._show_progress(step, schedule)
            if reached and boundary.report:
                self._report(step)
            if reached and boundary.shows:
                run.show("train", step, run.loops.training.shown())
            if reached and boundary.save and run.store:
                run.save(wait=False)
            if ran.stopped:
                run.leave(step)
            if reached and boundary.evaluate:
                with run.saved():
                    self._evaluate_now(step, schedule, eval_steps)
            self._tell_saves()
            if not reached:  # the data has ended
                run.loops.training.note_end(step, -1 if schedule.end is None else schedule.end)
                break
        run.loops.check_count(step)
        self._finish(schedule, eval_steps)

    def _continue(self, schedule: Schedule, eval_steps: int) -> int:
        """Gets ready to train from the current step, which it returns."""
        run, step = self._run, self._run.step
        if step == schedule.end:
            run.say(f"already at step {step}, nothing to train")
        elif schedule.end is None or step < schedule.end:
            run.drop_what_comes_after(schedule.evaluate_every)
        else:
            logging.warning("the run is at step %d, beyond the requested step %d", step, schedule.end)
        run.last_evaluation = {}
        run.pace.measure_from(step)
        self._show_progress(step, schedule)
        if schedule.evaluates_at(step) and self._evaluations.lack():
            self._evaluate_now(step, schedule, eval_steps)  # the run stopped between the save and the evaluation
        run.loops.training.resume(step + run.store.input_offset)
        run.window.measure_from(step)
        return step

    def _finish(self, schedule: Schedule, eval_steps: int) -> None:
        """Saves, reports and evaluates at the end."""
        run, step = self._run, self._run.step
        # Saved before an unfinished window of metrics is reported: a longer run continues with the complete window.
        if run.store and (step or run.store.saved_step is not None):
            run.save(wait=True)
        run.recovery.check(step)
        if step > run.store.record.reported.get("train", 0):
            self._report(step)
        if schedule.evaluate_every and self._evaluations.lack():
            with run.saved():
                self._evaluate_now(step, schedule, eval_steps)
        run.writers.flush()
        run.note_speed()

    def _evaluate_now(self, step: int, schedule: Schedule, eval_steps: int) -> None:
        self._show_progress(step, schedule, evaluating=True)
        self.evaluate(eval_steps)
        self._show_progress(step, schedule)

    def _show_progress(self, step: int, schedule: Schedule, evaluating: bool = False) -> None:
        run = self._run
        run.writers.progress(run.pace.at(step, schedule.end, schedule.next_evaluation(step), evaluating))

    def _report(self, step: int) -> None:
        metrics = self._run.window.read(step, self._run.store.record.losses, self.steps_per_loop)
        self._publish("train", step, metrics)

    def _tell_saves(self) -> None:
        tell_saves(self._actions, self._run.store.take_committed(), self)

    def _publish(self, split: str, step: int, metrics: Metrics) -> None:
        """Gives metrics to the writers and the actions."""
        with self._run.clock.phase("report"):
            self._run.write(split, step, metrics)
            for action in self._actions:
                action(Event(step, split, dict(metrics), self, self._evaluation_due, self._ending))

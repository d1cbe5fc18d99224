"""Controller: the outer loop, a schedule of boundaries around the inner loop."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from looplib.base import console, files
from looplib.base.messages import whole_number
from looplib.checkpoint.checkpointer import Checkpointer
from looplib.checkpoint.directory import RunDirectory, resolve
from looplib.checkpoint.recorded import RecordedParts
from looplib.cluster import runtime
from looplib.cluster.collectives import Workers
from looplib.cluster.preemption import notice
from looplib.compat.tensorflow import log_once, lost_server
from looplib.config.formats import ExportFormat, PredictionFormat
from looplib.config.run_config import RunConfig
from looplib.config.settings import as_flags
from looplib.data import service
from looplib.data.context import BadRecords
from looplib.errors import MissingPartError
from looplib.guards.guards import Diverged, Guards
from looplib.guards.watchdog import Watchdog
from looplib.loop import speed, task_loop
from looplib.loop.contracts import Loop, Schedule
from looplib.loop.host_loop import as_shown
from looplib.loop.loops import Loops
from looplib.loop.task_loop import Window
from looplib.report.clock import Clock
from looplib.report.reporter import Metrics, Reporter
from looplib.report.run_report import RunFacts, StartReport
from looplib.report.writers.contract import Writer
from looplib.run.policy import CheckpointPolicy, Start
from looplib.task import checks, model_table
from looplib.task.actions import Actions, Event
from looplib.task.reductions import Media
from looplib.task.trainer import Adapter, Evaluator, Trainer


class Controller:
    """Trains and evaluates: schedule, loops, metric reduction, checkpoints, batch math.

    Building a controller checks everything that can be checked, traces the steps, and restores the newest checkpoint in
    `model_dir`, or else calls `trainer.initialize()`; so the same program run again continues where it stopped. Without
    a trainer it restores the checkpoint that the training ended with, or the one of `Start.checkpoint`. State comes
    from the checkpoint (weights, optimizer, step, position in the data, seeds of layers); settings come from the
    program (these arguments, and the constants that it computes with, such as a constant learning rate).

    One controller at a time writes to a run directory: building another one with a trainer for the same `model_dir`
    closes the one before, or is refused while that one trains.

    Args:
      run_config: the `RunConfig`: batch size, steps per loop, engine, seed and the like.
      trainer: the `Trainer`; None for a job that only evaluates.
      evaluator: an `Evaluator`, whose metrics are reported as "eval", or a dict from name to `Evaluator`.
      strategy: `tf.distribute.Strategy` under whose scope the models were built; default the current one.
      model_dir: the run directory, made if missing, or the URL of one in an object store; None keeps nothing on disk.
      checkpoints: `CheckpointPolicy`, when to save and what to keep.
      guards: `Guards` against bad values, jumps of the loss and stalls.
      start: `Start`, where the run starts from, if it has no checkpoint of its own, or which of them.
      writers: list of `Writer`, or names of writers, such as
        `[*looplib.DEFAULT_WRITERS, "mlflow"]`; default `DEFAULT_WRITERS`: the console, and in `model_dir` TensorBoard,
        `metrics.jsonl` and `media.jsonl`.
      actions: callables that take an `Event`, called after every reported loop and every evaluation; the state of
        those that are an `Action` is part of the checkpoints. Default `LearningWarnings()`.
      config: the program's own settings, for `run.json`: a dataclass, a dict, or an object with `as_dict`.

    Attributes:
      guards: the `Guards`.

    Raises:
      UsageError: for bad input, in a sentence, as all methods do.
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
        guards: Guards | None = None,
        start: Start | None = None,
        writers: Sequence[Writer | str] | None = None,
        actions: Sequence[Callable[[Event], object]] | None = None,
        config: Any = None,
    ) -> None:
        files.check_temporary()
        strategy = strategy or tf.distribute.get_strategy()
        if actions is None and trainer:
            from looplib.actions.learning_warnings import LearningWarnings  # here, as imports are to stay light

            actions = [LearningWarnings()]
        policy, actions = checkpoints or CheckpointPolicy(), actions or ()
        self.guards, start = guards or Guards(), start or Start()
        checks.check_settings(
            run_config=(run_config, RunConfig), checkpoints=(policy, CheckpointPolicy), guards=(self.guards, Guards),
            start=(start, Start),
        )  # fmt: skip
        checks.check_kinds(strategy, actions)
        evaluators = checks.check_tasks(trainer, evaluator)
        steps = run_config.steps_per_loop
        own_steps = trainer.own_steps_per_loop if isinstance(trainer, Adapter) and steps is None else lambda _: steps
        self._own_steps = functools.partial(own_steps, run_config.global_batch_size)
        run_config = dataclasses.replace(run_config, steps_per_loop=self.steps_per_loop)
        model_dir = resolve(model_dir) if model_dir else None
        checks.check_together(trainer, evaluators, strategy, run_config.loop)
        tasks = [*([trainer] if trainer else []), *evaluators.values()]
        own = [action for task in tasks if isinstance(task, Adapter) for action in task.own_actions]
        if trainer and Workers(strategy).count > 1:
            from looplib.actions.stragglers import Stragglers  # here, as few runs have several workers

            own = [Stragglers(strategy), *own]
        self._actions = Actions([*own, *actions])
        policy = dataclasses.replace(policy, keep=(*policy.keep, *self._actions.keeps))
        self._due = (False, False)  # whether the reported step is evaluated, and whether it is the last
        log_once()
        clock = Clock()
        left_out = BadRecords(run_config.bad_records, f"{model_dir}/bad_records" if model_dir else None)
        self._loops = loops = Loops(run_config, strategy, clock, left_out)
        if trainer:
            policy.check(dict.fromkeys(evaluators))
            if self.guards.may_roll_back and not model_dir:
                raise MissingPartError(
                    "a rollback needs checkpoints, but no model_dir is set; give Controller(model_dir=...)"
                )
        self._directory = directory = RunDirectory(
            model_dir, policy, start, trainer is not None, Workers(strategy), self.close
        )
        flags = {
            **as_flags(run_config),
            "checkpoint_interval": policy.every_steps,
            "keep_best": str(policy.best) if policy.best else self._actions.watched,
            "guards": dataclasses.asdict(self.guards),
            "phases": trainer.training_phases.as_flags() if trainer and trainer.training_phases else None,
        }
        self._reporter = Reporter(
            model_dir if directory.writable else None,
            writers=writers,
            is_chief=self.is_chief,
            trains=directory.trains,
            check=directory.check_lock,
            clock=clock,
            facts=RunFacts(runtime.describe(strategy), strategy.num_replicas_in_sync, flags, config),
            standing=lambda: self._checkpointer.standing(),
        )
        loops.build(trainer, evaluators, *directory.peek(), self.guards.non_finite, self._actions)
        self._window = None
        if trainer:
            policy.check({name: loop.metric_names for name, loop in loops.evaluations.items()})
            self._window = Window(loops.training, clock, self.guards)
            facts = self.report.facts
            facts.model = model_table.note(trainer)
            facts.speed = speed.of_training(loops.training, strategy)
            logging.info("%s", facts.speed or "the FLOPs of a step are not known")
        lost = functools.partial(service.lost, run_config.data_workers if trainer else ())
        self._watchdog = Watchdog(clock, loops.progress, lambda: directory.latest, self.guards.stall_limit, lost)
        objects = checks.collect_state(trainer, evaluators)
        parts = RecordedParts(trainer, objects, loops, self._window, self._actions)
        self._checkpointer = Checkpointer(directory, self._reporter, parts, self.guards, objects)

    _directory: RunDirectory | None = None  # these are None if building has failed before
    _reporter: Reporter | None = None
    _checkpointer: Checkpointer | None = None

    # What a run is now.

    @property
    def is_chief(self) -> bool:
        """Returns whether this process writes checkpoints and reports for all workers."""
        return self._directory.workers.is_chief

    @property
    def model_dir(self) -> str | None:
        """The run directory, or None."""
        return self._directory.model_dir

    @property
    def policy(self) -> CheckpointPolicy:
        """The policy that says what is saved when, and what is kept."""
        return self._directory.policy

    @property
    def clock(self) -> Clock:
        """The seconds of compile, train, input (steps that wait for their data), evaluate, save, restore and report.

        `clock.summary()` says what they mean.
        """
        return self._reporter.clock

    @property
    def report(self) -> StartReport:
        """Writes `run.json` when a training starts and ends (`run_eval.json` for a controller without a trainer).

        `controller.report()` writes `report.html` as it is now, and shows it in a notebook.
        """
        return self._reporter.report

    @property
    def global_step(self) -> int:
        """The number of training steps done."""
        return int(self._loops.global_step)

    @property
    def target_step(self) -> int | None:
        """The step to which the newest `train` trains; None for the end of the data, or before the first one."""
        return self._reporter.end

    @property
    def restored_from(self) -> str | None:
        """The path of the checkpoint that this run continues from, or None."""
        return self._checkpointer.restored_from

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the newest committed checkpoint in `model_dir`, or None."""
        return self._directory.latest

    @property
    def best_checkpoint(self) -> str | None:
        """The path of the best committed checkpoint by the policy's first `KeepBest`, or None if none has a score.

        Without one, by the rule that the training has written into `run.json`.

        Raises:
          NoCheckpointError: if no metric decides which one is the best.
        """
        best = self._directory.best()
        return best.path if best else None

    @property
    def rollbacks(self) -> int:
        """How often the run went back to a checkpoint, over all its restarts."""
        return self._checkpointer.record.rollbacks

    @property
    def engines(self) -> dict[str, dict[str, Any]]:
        """The choices of `loop="auto"` so far: dict from split to `loop`, `chunk` and `seconds_per_step`."""
        return self._loops.choices

    @property
    def loops(self) -> dict[str, Loop]:
        """The inner loops: dict from "train" and the names of evaluators to `loop.contracts.Loop`."""
        return self._loops.by_name

    @property
    def steps_per_loop(self) -> int:
        """The steps of one call into the device."""
        steps = self._own_steps()
        return 100 if steps is None else steps

    @property
    def steps_per_epoch(self) -> float | None:
        """The steps of one pass over the training data; None if not known."""
        return self._loops.steps_per_epoch

    # Training.

    def train(self, steps: int | None = None, *, epochs: float | None = None) -> Metrics:
        """Trains.

        Args:
          steps: the global step to train to, counted from the start of the run; -1 for the end of the data.
          epochs: in place of steps, how often the data is to come, counted from the start of the run.

        Returns:
          dict, the last reported training metrics, of an earlier start of the run if there was nothing left to do.
        """
        return self._train(self._loops.steps_of(steps, epochs), {}, -1)

    def train_and_evaluate(
        self, steps: int | None = None, eval_interval: int | Mapping[str, int] | None = None, eval_steps: int = -1, *,
        epochs: float | None = None,
    ) -> dict[str, Metrics]:  # fmt: skip
        """Trains, saving and evaluating at exact multiples of `eval_interval` and at the end.

        Args:
          steps: the global step to train to; -1 for the end of the data.
          eval_interval: steps between evaluations; a dict has those of each evaluator, by name. Default an epoch. At
            the end, all evaluate.
          eval_steps: steps of each evaluation; -1 for all data.
          epochs: in place of steps, how often the data is to come.

        Returns:
          dict from evaluator name to metrics, of the last evaluation.
        """
        loops = self._loops
        end = loops.steps_of(steps, epochs)
        eval_steps = task_loop.check_evaluation(loops.evaluations, eval_steps)
        self._train(end, loops.evaluation_intervals(eval_interval), eval_steps)
        return self._reporter.last_evaluation

    def _train(self, end: int, evaluate_every: Mapping[str, int], eval_steps: int) -> Metrics:
        self._loops.refuse_if_unfit("train", self.latest_checkpoint)
        self._loops.refuse_if_borrowed("train")
        self._directory.check_may_train()
        reporter, checkpointer = self._reporter, self._checkpointer
        end = self._loops.check_end(end)
        schedule = Schedule(
            self.steps_per_loop, self.policy.every_steps, evaluate_every, end, tuple(self._actions.stops)
        )
        reporter.end, self.report.stopped = schedule.end, None
        with self._actions.around_training(checkpointer.take_committed, self), self._training():
            while True:
                try:
                    self._train_on(schedule, eval_steps)
                    break
                except Diverged as fault:
                    checkpointer.roll_back(fault)
                    self.report.stopped = None
        reporter.note_end(self.global_step)
        return checkpointer.record.train

    def _train_on(self, schedule: Schedule, eval_steps: int) -> None:
        """Trains from the current step on: for each boundary, runs to it, checks, reports, saves, evaluates."""
        loops, checkpointer, reporter = self._loops, self._checkpointer, self._reporter
        step = self._continue(schedule, eval_steps)
        for due in schedule.boundaries(step):
            if self.report.stopped is not None:
                break
            for action in self._actions.stops.get(step, ()):
                action.on_leaving(step, self)
            result = loops.train(step, due, schedule.horizon(due))
            step += result.done
            reporter.trained += result.done
            checkpointer.check(result.finite)
            for action in self._actions.stops.get(step, ()):
                action.on_reaching(step, self)
            reached = step == due.step
            self._due = bool(due.evaluators or (due.end and schedule.evaluate_every)), due.end
            reporter.show_progress(step, schedule.next_evaluation(step))
            if reached and due.report:
                self._report(step)
            if reached and due.shows:
                reporter.show("train", step, loops.training.shown())
            if reached and due.save and checkpointer:
                checkpointer.save(wait=False)
            if result.stopped:
                checkpointer.leave(step)
            if reached and due.evaluators:
                self._evaluate(schedule, eval_steps, due.evaluators)
            self._actions.saved(checkpointer.take_committed(), self)
            if not reached:  # the data has ended
                loops.training.note_end(step, -1 if schedule.end is None else schedule.end)
                break
        loops.check_count()
        self._finish(schedule, eval_steps)

    def _continue(self, schedule: Schedule, eval_steps: int) -> int:
        """Gets ready to train from the current step, which it returns."""
        reporter, checkpointer, step = self._reporter, self._checkpointer, self.global_step
        if step == schedule.end:
            reporter.say(f"already at step {step}, nothing to train")
        elif schedule.end is None or step < schedule.end:
            checkpointer.drop_later(schedule.evaluate_every)
        else:
            logging.warning("the run is at step %d, beyond the requested step %d", step, schedule.end)
        reporter.last_evaluation = {}
        reporter.speed_meter.measure_from(step)
        reporter.show_progress(step, schedule.next_evaluation(step))
        if lacking := checkpointer.not_evaluated(schedule.evaluators_at(step)):
            # The run stopped between the save and the evaluation.
            self._evaluate(schedule, eval_steps, lacking, saves=False)
        self._loops.training.resume(step + checkpointer.record.input_offset)
        self._window.measure_from(step)
        return step

    def _finish(self, schedule: Schedule, eval_steps: int) -> None:
        """Saves, reports and evaluates at the end."""
        checkpointer, step = self._checkpointer, self.global_step
        # Saved before an unfinished window of metrics is reported: a longer run continues with the complete window.
        if checkpointer and (step or checkpointer.saved_step is not None):
            checkpointer.save(wait=True)
        checkpointer.check_finite(step)
        if step > checkpointer.record.reported.get("train", 0):
            self._report(step)
        if checkpointer.not_evaluated(schedule.evaluate_every):
            self._evaluate(schedule, eval_steps, tuple(schedule.evaluate_every))
        self._reporter.writers.flush()
        self._reporter.note_speed(functools.partial(speed.with_share, strategy=self._loops.strategy))

    @contextlib.contextmanager
    def _training(self) -> Iterator[None]:
        """Guards a training, the `with` block: the console, signals, the watchdog, and `run.json`."""
        clock, checkpointer, reporter = self.clock, self._checkpointer, self._reporter
        self._directory.is_training, limit = True, self._loops.config.max_time
        self._loops.attach(self._loops.training.task)
        try:
            with (
                console.guarded(),
                reporter.training(self.restored_from, as_flags(self._loops.config), lambda: self.global_step),
                notice.listening(),
                notice.deferred(lambda: clock.current[0] == "save" or checkpointer.saving),
                notice.limited(clock.left_of(limit), f"max_time of {limit or 0:g} s"),
                self._watchdog.watching(),
            ):
                if self.guards.may_roll_back and checkpointer and self._directory.agreed_latest() is None:
                    checkpointer.save(wait=True)  # a checkpoint to go back to
                yield
        except BaseException as error:
            checkpointer.wait_and_log()
            if lost := lost_server(error):
                raise lost from error
            raise
        finally:
            self._directory.is_training = False

    # Evaluations and reports.

    def evaluate(self, steps: int = -1) -> dict[str, Metrics]:
        """Evaluates every evaluator at the current step.

        Args:
          steps: how many steps of each data set; -1 for all of it.

        Returns:
          dict from evaluator name to a dict of metrics, the number of `examples` among them.
        """
        evaluations = self._loops.evaluations
        return self._run_evaluators(tuple(evaluations), task_loop.check_evaluation(evaluations, steps))

    def _run_evaluators(self, names: Sequence[str], steps: int) -> dict[str, Metrics]:
        loops, reporter = self._loops, self._reporter
        self._checkpointer.need_state()
        with contextlib.nullcontext() if loops.training else self.report.recording_start(self.restored_from):
            results, step = {}, self.global_step
            with console.guarded(), notice.listening(), self._watchdog.watching():
                for name in names:
                    metrics = loops.evaluate(name, steps)
                    if metrics is None:
                        self._checkpointer.leave(step)
                    results[name] = metrics
                    reporter.last_evaluation = {**reporter.last_evaluation, name: metrics}  # for an action that exports
                    self._publish(name, step, metrics)
                    reporter.show(name, step, loops.evaluations[name].shown())
            reporter.writers.flush()
            if not loops.closed:
                with self.clock.phase("save"):
                    self._checkpointer.add_scores(step, results)
            return results

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
        """
        steps = task_loop.check_evaluation(self._loops.evaluations, steps)
        if until_step is not None:
            until_step = whole_number("until_step", until_step, least=0)
        results: dict[str, Metrics] = {}
        self._directory.need("evaluate_continuously")
        self._directory.refuse_while_training("evaluate_continuously")
        with console.guarded(), notice.listening():
            for _ in self._checkpointer.each_new(timeout):
                results = self.evaluate(steps)
                if until_step is not None and self.global_step >= until_step:
                    break
        return results

    def predict(
        self, directory: str | os.PathLike[str] | None = None, *, format: PredictionFormat = "jsonl",
        piece: int = 10_000,
    ) -> dict[str, str]:  # fmt: skip
        """Writes what each evaluator that has a `predict_fn` predicts: one record for each example, in their order.

        The examples are those of its `predict_dataset`, which may be new ones without labels.

        A call that was killed is repeated to continue after the pieces that are finished. Weights, data or settings
        that differ from the finished pieces are refused.

        Args:
          directory: default `predictions` in `model_dir`; the records of an evaluator are in a folder of its name.
          format: "jsonl", "csv", "tfrecord" (of `tf.train.Example`) or "parquet" (with pyarrow).
          piece: records of a file.

        Returns:
          dict from evaluator name to its folder.
        """
        from looplib.exports.predictions import predict  # here, as few starts need it

        self._checkpointer.need_state()
        self._directory.refuse_while_training("predict")
        with console.guarded(), notice.listening(), self._watchdog.watching():
            return predict(self._loops, self._checkpointer, self._reporter, directory, format, piece)

    def _evaluate(self, schedule: Schedule, eval_steps: int, names: Sequence[str], saves: bool = True) -> None:
        """Evaluates in a training, and saves before, so that an evaluation that fails loses nothing."""
        step = self.global_step
        with self._checkpointer.saved() if saves else contextlib.nullcontext():
            self._reporter.show_progress(step, schedule.next_evaluation(step), evaluating=True)
            self._run_evaluators(names, eval_steps)
            self._reporter.show_progress(step, schedule.next_evaluation(step))

    def _report(self, step: int) -> None:
        self._publish("train", step, self._window.metrics(step, self._checkpointer.record.losses, self.steps_per_loop))

    def _publish(self, split: str, step: int, metrics: Metrics) -> None:
        """Gives metrics to the writers and the actions, and notes that they are reported."""
        with self.clock.phase("report"):
            self._reporter.write(split, step, metrics)
            record, (evaluates, ends) = self._checkpointer.record, self._due
            record.reported[split] = step
            if split == "train":
                record.train = metrics
            self._actions.reported(Event(step, split, dict(metrics), self, evaluation_due=evaluates, ending=ends))

    # What else users and actions call.

    def show(self, media: Mapping[str, Media], split: str = "train") -> None:
        """Shows images, texts and histograms at the current step; for actions.

        Args:
          media: dict from name to `looplib.image`, `looplib.text` or `looplib.histogram`. What another call has shown
            under the same name at this step is replaced.
          split: "train", or an evaluator's name.
        """
        self._reporter.show(split, self.global_step, as_shown(media))

    def gather(self, value: Any) -> Any:
        """Waits for the other workers; returns an array of the numbers or arrays of all, the chief's first."""
        return self._directory.workers.gather(value)

    def stop(self, reason: str = "") -> None:
        """Ends the training at the next boundary, with the final save and evaluation; for actions.

        Args:
          reason: a clause for the log, `run.json`, `status` and the page, such as "early stopping at step 100".
        """
        self.report.stopped = reason
        if reason and self.is_chief:
            logging.warning("%s", reason)  # which a program without absl shows too

    def export(
        self, directory: str | os.PathLike[str] | None = None, *, averages: bool = True,
        formats: Sequence[ExportFormat] = (), license: str = "unknown",
    ) -> str:  # fmt: skip
        """Writes the model at the current step for programs without looplib, into a directory that appears whole.

        It holds `saved_model`, with a signature for serving, `model.keras` where Keras can write the model, the model
        card `README.md`, and `export.json`. What is exported is the `export` of the first evaluator, or else of the
        trainer. An action may call it.

        Args:
          directory: default `export/step-<step>` in `model_dir`; an earlier export there is replaced.
          averages: whether averaged weights are exported, if there are any.
          formats: what to write too: "safetensors", "weights.h5", "onnx", "tflite", "int8".
          license: of the model, for its card, such as "apache-2.0".

        Returns:
          The directory.
        """
        from looplib.exports.exports import export  # here, as few starts need it

        self._loops.refuse_if_unfit("export", self.latest_checkpoint)
        self._checkpointer.need_state()
        return export(self._loops, self._checkpointer, self._reporter, directory, averages, formats, license)

    def save_checkpoint(self, wait: bool = True) -> str:
        """Saves the complete state now; with `wait`, returns when it is committed.

        Nothing is written if a checkpoint of this step holds these values already. If it holds others, because weights
        were assigned since then, it is moved into `checkpoints/set_aside`, and so are checkpoints of later steps.

        Returns:
          str, the path of the checkpoint.

        Raises:
          DivergenceError: if a variable is not finite; nothing is saved then.
        """
        self._loops.refuse_if_unfit("save_checkpoint", self.latest_checkpoint)
        self._loops.refuse_if_borrowed("save_checkpoint")
        path = self._checkpointer.save_changed(wait)
        self._actions.saved(self._checkpointer.take_committed(), self)
        return path

    def restore_checkpoint(self, checkpoint: str | int | os.PathLike[str] = "latest") -> str | None:
        """Restores the complete state, including the position in the data; changes nothing in the run directory.

        Only a training that continues from there changes it: it moves later checkpoints into `checkpoints/set_aside`
        and later records into `metrics.voided.jsonl`, with a line for each.

        Args:
          checkpoint: "latest"; "best", the `best_checkpoint`; "final", the one that the training ended with; a step;
            or a path, such as `<model_dir>/checkpoints/ckpt-1000`.

        Returns:
          The path, or None if there is no checkpoint yet.
        """
        self._directory.need("restore_checkpoint")
        self._directory.refuse_while_training("restore_checkpoint")
        self._loops.refuse_if_borrowed("restore_checkpoint")
        return self._checkpointer.restore_chosen(checkpoint)

    def close(self) -> None:
        """Waits for a save under way, closes the writers, and releases the data and the run directory.

        A closed controller refuses to train and to save, and its evaluations are not reported. Closing it again
        copies what was reported since then to the store of a `model_dir` that is a URL.
        """
        with contextlib.ExitStack() as stack:  # each is done even if another raises; in reverse order
            if self._directory is not None:
                self._directory.refuse_while_training("close")
                stack.callback(self._directory.release)
            if self._loops.closed:
                return
            self._loops.closed = True
            if self._reporter is not None:
                stack.callback(self._reporter.close)
            stack.callback(self._loops.close)
            if self._checkpointer is not None:
                stack.callback(
                    self._checkpointer.finish
                )  # a save syncs the writers before it counts metrics as reported

    def __enter__(self) -> "Controller":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

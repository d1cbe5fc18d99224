"""Estimates of a run before it starts: what is measured in a few steps, and the forecast from it."""

import dataclasses
import json
import math
import os
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from looplib.actions.timed_saves import Timed
from looplib.base.numbers import format_seconds, format_size
from looplib.controller import Controller
from looplib.errors import CheckError
from looplib.report.run_report import peak_bytes
from looplib.run import commits
from looplib.run.commits import Commit
from looplib.run.policy import KeepBest, KeepRule
from looplib.task.actions import Action, Event

_MOST_SAVES = 200_000  # of which each is an object


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """What the settings ask a training to do after step `start`, up to step `end`.

    Attributes:
      start: the step that it continues from; 0 for a new run.
      end: the step to train to.
      save_every: steps between checkpoints.
      evaluate_every: steps between evaluations; None without any on the way.
      evaluates_at_end: whether an evaluation follows the last save.
    """

    start: int
    end: int
    save_every: int
    evaluate_every: int | None = None
    evaluates_at_end: bool = False

    @property
    def steps(self) -> int:
        """The steps to train."""
        return self.end - self.start

    @property
    def evaluations(self) -> list[int]:
        """The steps of the evaluations."""
        every = self.evaluate_every
        on_the_way = range(self.start - self.start % every + every, self.end, every) if every else range(0)
        _refuse_many(len(on_the_way), "evaluations", "--eval_interval")
        return [*on_the_way, *([self.end] if self.evaluates_at_end else [])]

    def saves(self, timed_every: int | None = None) -> list[int]:
        """Returns the steps of the saves.

        Args:
          timed_every: steps that pass in the time after which another save is due, see `TimedSaves`; None for none.
        """
        first = self.start - self.start % self.save_every + self.save_every
        by_steps = range(first, self.end, self.save_every)
        _refuse_many(len(by_steps), "saves", "--checkpoint_interval")
        found = sorted({*by_steps, *self.evaluations, self.end})
        if timed_every is None:
            return found
        _refuse_many(self.steps // timed_every, "saves by time", "the time between them")
        gaps = zip([self.start, *found], found)
        return sorted({*found, *(step for low, high in gaps for step in range(low + timed_every, high, timed_every))})


def kept(saves: Sequence[int], evaluations: Sequence[int], rules: Sequence[KeepRule]) -> list[int]:
    """Returns the steps of the checkpoints that a training leaves, oldest first.

    The best checkpoints are not known; they are taken to be the first that are evaluated. No other case keeps more.

    Args:
      saves: the steps of all saves, ascending.
      evaluations: those that are evaluated.
      rules: of `CheckpointPolicy.keep`.
    """
    sign = {rule.metric: -1.0 if rule.mode == "max" else 1.0 for rule in rules if isinstance(rule, KeepBest)}
    evaluated = set(evaluations)
    done = [
        Commit(
            path=f"ckpt-{step}",
            step=step,
            time=float(number),
            files={},
            scores={metric: each * step for metric, each in sign.items()} if step in evaluated else {},
            versions={},
        )
        for number, step in enumerate(saves)
    ][::-1]
    wanted = {one.step for rule in rules for one in rule.select(done)}
    return sorted(wanted | set(saves[-1:]))


def _refuse_many(count: int, what: str, setting: str) -> None:
    if count > _MOST_SAVES:
        raise CheckError(
            f"--estimate would count {count:,} {what}; expected at most {_MOST_SAVES:,}; raise {setting}, or estimate "
            "fewer steps with --train_steps"
        )


_FIRST, STEPS = 5, 20  # steps until the first measurement, which compile, and steps that are measured at least
_STOPS = tuple(range(_FIRST, STEPS + 1, 3))
_SAVE_AT = _STOPS[-2]  # so late that it disturbs one measurement alone
_LOOPS_SECONDS, _MOST_SECONDS = 3.0, 30.0  # of whole loops, and how long the least number of them may take
_LEAST_LOOPS, _MOST_LOOPS = 3, 5000
_OF_STEPS = ("train", "input", "report", "other")  # phases of the clock
_OF_EVALUATIONS = ("evaluate", "report", "other")
_SHORT = 5.0  # seconds of an evaluation that is repeated, because the first one does more


@dataclasses.dataclass(frozen=True)
class Measured:
    """What was measured.

    Attributes:
      start: seconds from the start of the process to the first step, without compiling.
      compiling: seconds of tracing and compiling.
      step: seconds of a step in whole loops, the median; with waiting for data and reports.
      loops: how many whole loops were measured; 0 if only the twenty steps were.
      evaluation: seconds of an evaluation; 0 without one.
      first_save: seconds of the first save of a process, for which the training waits.
      stop: seconds that another save stops the training.
      save: seconds that it takes until it is complete.
      checkpoint_bytes: the size of a checkpoint on disk, with its marker.
      other_bytes: the size of all other files after these steps.
      report_bytes: by how much a report makes them larger.
      evaluation_bytes: by how much an evaluation does.
      reports: the reports that were made.
      evaluations: the evaluations that were made.
      memory: peak bytes of the process.
      device_memory: peak bytes of the fullest GPU; None without one.
    """

    start: float
    compiling: float
    step: float
    loops: int
    evaluation: float
    first_save: float
    stop: float
    save: float
    checkpoint_bytes: int
    other_bytes: int
    report_bytes: float
    evaluation_bytes: float
    reports: int
    evaluations: int
    memory: int
    device_memory: int | None


@dataclasses.dataclass(frozen=True)
class _Mark:
    step: int
    seconds: float  # of `_OF_STEPS` so far


class Stopwatch(Action):
    """Notes the time at some steps and at each report, and saves once.

    Attributes:
      stops_seen: the marks at its stops.
      reports_seen: the marks at reports.
      stop: seconds that the save stopped the training.
      saved_before: seconds of saves when the last stop was reached.
    """

    def __init__(self) -> None:
        self.stops_seen: list[_Mark] = []
        self.reports_seen: list[_Mark] = []
        self.stop = self.saved_before = 0.0

    def stops(self) -> Sequence[int]:
        """See `Action`."""
        return _STOPS

    def on_reaching(self, step: int, controller: Controller) -> None:
        """Notes the time, and saves at one of the steps."""
        self.stops_seen.append(_mark(step, controller))
        self.saved_before = controller.clock.of("save")
        if step == _SAVE_AT:
            controller.save_checkpoint(wait=False)
            self.stop = controller.clock.of("save") - self.saved_before

    def __call__(self, event: Event) -> None:
        """Notes the time of a report."""
        if event.split == "train":
            self.reports_seen.append(_mark(event.step, event.controller))


def _mark(step: int, controller: Controller) -> _Mark:
    return _Mark(step, _seconds(controller, _OF_STEPS))


def _seconds(controller: Controller, phases: Sequence[str]) -> float:
    return sum(controller.clock.of(name) for name in phases)


def measure(controller: Controller, watch: Stopwatch, eval_steps: int | None) -> Measured:
    """Trains, evaluates and saves.

    Args:
      controller: of a new run, with `watch` among its actions.
      watch: the stopwatch.
      eval_steps: steps of an evaluation, -1 for all data; None for a training without any.

    Raises:
      UsageError: if the data ends within these steps.
    """
    clock, folder = controller.clock, controller.model_dir
    start = clock.seconds()["wall"] - clock.of("compile")
    _train(controller, _FIRST)
    first_save, first_bytes = clock.of("save"), _size_of_others(folder)
    _train(controller, STEPS)
    save = clock.of("save") - watch.saved_before
    last_bytes = _size_of_others(folder)
    newest = commits.committed(os.path.join(folder, "checkpoints"))[0]
    checkpoint_bytes = newest.bytes + os.path.getsize(f"{newest.path}.commit")
    each_step, reports = list(_each_step(watch.stops_seen)), len(watch.reports_seen)
    report_bytes = float(last_bytes - first_bytes) / max(1, reports - 1)
    size, loop = controller.steps_per_loop, min(each_step) * controller.steps_per_loop  # the first steps are slower
    loops: list[float] = []
    if _LEAST_LOOPS * loop <= _MOST_SECONDS:
        count = min(_MOST_LOOPS, max(_LEAST_LOOPS, math.ceil(_LOOPS_SECONDS / loop)))
        _train(controller, (STEPS // size + 1 + count) * size)
        marks = watch.reports_seen[reports:]
        loops = list(_each_step([mark for mark in marks if mark.step % size == 0]))
        before, last_bytes = last_bytes, _size_of_others(folder)
        report_bytes = (last_bytes - before) / len(marks)
    evaluation, evaluations = 0.0, 0
    if eval_steps is not None:
        evaluation, evaluations = _evaluate(controller, eval_steps)
    other_bytes = _size_of_others(folder)
    return Measured(
        start=start,
        compiling=clock.of("compile"),
        step=statistics.median(loops or each_step),
        loops=len(loops),
        evaluation=evaluation,
        first_save=first_save,
        stop=watch.stop,
        save=max(save, watch.stop),
        checkpoint_bytes=checkpoint_bytes,
        other_bytes=other_bytes,
        report_bytes=max(0.0, report_bytes),
        evaluation_bytes=max(0.0, (other_bytes - last_bytes) / max(1, evaluations)),
        reports=len(watch.reports_seen),
        evaluations=evaluations,
        memory=peak_bytes(),
        device_memory=_device_memory(),
    )


def _train(controller: Controller, step: int) -> None:
    controller.train(step)
    if controller.global_step < step:
        raise CheckError(
            f"the training ended at step {controller.global_step}, and --estimate measures up to step {step}; run it, "
            "which takes no longer"
        )


def _evaluate(controller: Controller, steps: int) -> tuple[float, int]:
    """Returns the seconds of an evaluation, and how many were made."""
    taken: list[float] = []
    while not taken or (len(taken) == 1 and taken[0] < _SHORT):
        before = _seconds(controller, _OF_EVALUATIONS)
        controller.evaluate(steps)
        taken.append(_seconds(controller, _OF_EVALUATIONS) - before)
    return taken[-1], len(taken)


def _each_step(marks: Sequence[_Mark]) -> Iterator[float]:
    """Yields the seconds of a step between each two marks."""
    for one, other in zip(marks, marks[1:]):
        if other.step > one.step:
            yield (other.seconds - one.seconds) / (other.step - one.step)


def _size_of_others(folder: str) -> int:
    """Returns the bytes of all files of a run directory, except those of its checkpoints."""
    found = 0
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if place != folder or name != "checkpoints"]
        found += sum(os.lstat(os.path.join(place, name)).st_size for name in names)
    return found


def _device_memory() -> int | None:
    names: list[Any] = [device.name.rpartition("device:")[2] for device in tf.config.list_logical_devices("GPU")]
    try:
        return max((tf.config.experimental.get_memory_info(name)["peak"] for name in names), default=None)
    except (ValueError, tf.errors.OpError):  # a device whose memory is not counted
        return None


@dataclasses.dataclass(frozen=True)
class Forecast:
    """What a training will take.

    Attributes:
      plan: what it does.
      measured: what that was computed from.
      steps_per_loop: steps between reports.
      rules: of the checkpoints to keep.
      timed: further saves, by time, see `TimedSaves`.
      notes: sentences about what the forecast leaves out.
    """

    plan: RunPlan
    measured: Measured
    steps_per_loop: int
    rules: Sequence[KeepRule]
    timed: Timed = Timed()
    notes: tuple[str, ...] = ()

    @property
    def saves(self) -> list[int]:
        """The steps of the saves."""
        seconds = self.timed.seconds(self.measured.stop, self.measured.save)
        return self.plan.saves(None if seconds is None else self._whole_loops(seconds))

    @property
    def kept(self) -> int:
        """The most checkpoints that the training leaves."""
        return len(kept(self.saves, self.plan.evaluations, self.rules))

    @property
    def seconds(self) -> float:
        """Seconds from the start of the process to the end of the training.

        A save on the way stops the training for a moment; before an evaluation it runs beside the evaluation, which
        ends no earlier than it; the first of the process and the last one let the training wait.
        """
        measured, plan = self.measured, self.plan
        on_the_way, before = len(self.saves) - 1, len(plan.evaluations) - plan.evaluates_at_end
        found = measured.start + measured.compiling + plan.steps * measured.step + measured.first_save
        if on_the_way:
            found += (on_the_way - 1) * measured.stop + measured.save
        found += before * max(measured.evaluation, measured.save - measured.stop)
        return found + plan.evaluates_at_end * measured.evaluation

    @property
    def other_bytes(self) -> int:
        """Bytes of the metrics and events."""
        measured, plan = self.measured, self.plan
        reports = plan.end // self.steps_per_loop - plan.start // self.steps_per_loop
        reports += bool(plan.end % self.steps_per_loop)
        more = (reports - measured.reports) * measured.report_bytes
        more += (len(plan.evaluations) - measured.evaluations) * measured.evaluation_bytes
        return max(0, round(measured.other_bytes + more))

    @property
    def disk(self) -> int:
        """Bytes of the run directory at its end."""
        return self.kept * self.measured.checkpoint_bytes + self.other_bytes

    @property
    def most_disk(self) -> int:
        """Bytes of the run directory while one more checkpoint is written."""
        return self.disk + (len(self.saves) > self.kept) * self.measured.checkpoint_bytes

    def _whole_loops(self, seconds: float) -> int:
        """Returns the steps after which a save that is due after some seconds comes: with a report."""
        return max(1, math.ceil(seconds / self.measured.step / self.steps_per_loop)) * self.steps_per_loop

    def as_dict(self) -> dict[str, Any]:
        """Returns the numbers by name: seconds, bytes, steps."""
        measured = self.measured
        return {
            "from_step": self.plan.start,
            "to_step": self.plan.end,
            "seconds": round(self.seconds, 3),
            "steps_per_second": round(1 / measured.step, 3),
            "start_seconds": round(measured.start, 3),
            "compile_seconds": round(measured.compiling, 3),
            "evaluations": len(self.plan.evaluations),
            "evaluation_seconds": round(measured.evaluation, 4),
            "saves": len(self.saves),
            "save_stop_seconds": round(measured.stop, 4),
            "save_seconds": round(measured.save, 4),
            "checkpoint_bytes": measured.checkpoint_bytes,
            "checkpoints_kept": self.kept,
            "other_bytes": self.other_bytes,
            "disk_bytes": self.disk,
            "most_disk_bytes": self.most_disk,
            "memory_bytes": measured.memory,
            "device_memory_bytes": measured.device_memory,
        }

    def __str__(self) -> str:
        measured, plan, saves = self.measured, self.plan, len(self.saves)
        how = f"{measured.loops} loops of {self.steps_per_loop}" if measured.loops else f"{STEPS} steps"
        times = f"stops the training for {_short(measured.stop)}, is complete after {_short(measured.save)}"
        rows = {
            "speed": f"{_rate(measured.step)}, the median of {how}",
            "start": f"{_short(measured.start)}, and {_short(measured.compiling)} of compiling",
            "evaluation": f"{_short(measured.evaluation)}; {_times(len(plan.evaluations))}",
            "save": f"{times}; {_times(saves)}",
            "time": f"{format_seconds(self.seconds)} to step {plan.end:,}",
            "checkpoint": format_size(measured.checkpoint_bytes),
            "disk": f"{format_size(self.disk)}: checkpoints (at most {self.kept}), and {format_size(self.other_bytes)} "
            f"of metrics and events; {format_size(self.most_disk)} while one is written",
            "memory": f"{format_size(measured.memory)} of this process at most",
        }
        if not plan.evaluations:
            rows["evaluation"] = "none"
        if measured.device_memory is not None:
            rows["memory"] += f", {format_size(measured.device_memory)} of the fullest GPU"
        lines = [f"estimate of the {plan.steps:,} steps after step {plan.start:,}, nothing is kept:"]
        lines += [f"  {name:<12}{text}" for name, text in rows.items()]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes), json.dumps(self.as_dict())])


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _rate(step: float) -> str:
    return f"{1 / step:,.3g} steps/s" if 1 / step < 1000 else f"{1 / step:,.0f} steps/s"


def _short(seconds: float) -> str:
    """Formats a duration of less than a second too."""
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.1f} s" if seconds < 60 else format_seconds(seconds)

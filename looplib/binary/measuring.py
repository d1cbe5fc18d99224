"""The measurements of `--estimate`: twenty steps and some loops, an evaluation and saves, of the training itself."""

import dataclasses
import math
import os
import resource
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from looplib.controller import Controller
from looplib.errors import CheckError
from looplib.run import commits
from looplib.task.actions import Action, Event

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
    checkpoint_bytes = _size_of_checkpoint(commits.committed(os.path.join(folder, "checkpoints"))[0])
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
        memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
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


def _size_of_checkpoint(done: commits.Commit) -> int:
    return done.bytes + os.path.getsize(f"{done.path}.commit")


def _device_memory() -> int | None:
    names: list[Any] = [device.name.rpartition("device:")[2] for device in tf.config.list_logical_devices("GPU")]
    try:
        return max((tf.config.experimental.get_memory_info(name)["peak"] for name in names), default=None)
    except (ValueError, tf.errors.OpError):  # a device whose memory is not counted
        return None

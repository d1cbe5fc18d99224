"""What a training will take, from its plan and what was measured: time, disk and memory."""

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

from looplib.actions.timed_saves import Timed
from looplib.base.numbers import format_size
from looplib.base.progress import format_seconds
from looplib.binary.measuring import STEPS, Measured
from looplib.binary.saves import RunPlan, kept
from looplib.run.policy import KeepRule


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

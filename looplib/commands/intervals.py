"""What can be audited of a run: the intervals between its checkpoints, and the commands that trained them."""

import dataclasses
import random
from collections.abc import Collection, Sequence

from looplib.commands import recorded_run
from looplib.commands.journal import Verdict, cut
from looplib.commands.recorded_run import Recorded
from looplib.errors import ReplayError
from looplib.run import values
from looplib.run.commits import Commit
from looplib.run.run_status import read_status

# Settings of the process that write to other places, wait for other machines, or end it early; and which it gets.
_WITHOUT = ("notices",)
_FLAGS = ("--nodry_run", "--noestimate", "--max_time=", "--verbosity=-1", "--trackers=", "--metrics_port=")


@dataclasses.dataclass(frozen=True)
class Interval:
    """The steps between two checkpoints.

    Attributes:
      begin: the step after which it begins.
      first: the checkpoint of that step; None for the start of the run.
      last: the checkpoint of its last step.
    """

    begin: int
    first: Commit | None
    last: Commit

    @property
    def end(self) -> int:
        """Its last step."""
        return self.last.step

    @property
    def place(self) -> tuple[int, int]:
        """The step after which it begins, and its last step."""
        return self.begin, self.end

    def __str__(self) -> str:
        return f"steps {self.begin + 1:,} to {self.end:,}"


@dataclasses.dataclass(frozen=True)
class Segment:
    """A part of an interval that one command trains.

    Attributes:
      start: the number of the start of the run whose command it is.
      end: its last step.
    """

    start: int
    end: int


class AuditedRun(Recorded):
    """A run of one process whose intervals can be trained again; see `Recorded`."""

    def reread(self) -> None:
        """Reads the report again, because the run may train meanwhile."""
        self.report = recorded_run.report_of(self.directory)

    @property
    def begin(self) -> int:
        """The step after which the run begins: 0, or that of the checkpoint that it continued from."""
        return self.begins()[0] if self.starts else 0

    def reached(self) -> int:
        """Returns the step that the run has reached, as far as it is known."""
        steps = [read_status(self.directory).step or 0, *(done.step for done in self.checkpoints())]
        return max(steps)

    def intervals(self, without: Collection[int] = ()) -> list[Interval]:
        """Returns the intervals between the checkpoints that are there now, in the order of their steps.

        Args:
          without: steps whose checkpoints are left out.
        """
        intact = [done for done in reversed(self.checkpoints()) if done.step not in without]
        firsts: list[Commit | None] = [done for done in intact if done.step >= self.begin]
        if not firsts or firsts[0].step > self.begin:
            knows_begin = not self.begin or self.report.get("flags", {}).get("continue_from")
            firsts = [None, *firsts] if knows_begin else firsts
        return [Interval(one.step if one else self.begin, one, other) for one, other in zip(firsts, firsts[1:])]

    def segments(self, interval: Interval) -> list[Segment]:
        """Returns the parts of an interval that were trained with other settings each, in their order.

        A start that had the settings of the one before is a part of it: a resumed run continues exactly.
        """
        turns = sorted({begin for begin in self.begins() if interval.begin < begin < interval.end})
        found: list[Segment] = []
        for end in (*turns, interval.end):
            segment = Segment(self.start_that_did(end), end)
            if found and not any(self._changed(number) for number in range(found[-1].start + 1, segment.start + 1)):
                found.pop()
            found.append(segment)
        return found

    def command(self, segment: Segment, model_dir: str) -> tuple[list[str], str]:
        """Returns the command that trains a segment in another run directory, and its working directory.

        Raises:
          UsageError: if the report does not say how that start was started.
        """
        command, place = recorded_run.command_of(self.report, self.directory, segment.start)
        command = recorded_run.without(command, *_WITHOUT)
        return [*command, *self._settings_of(segment.start), f"--model_dir={model_dir}", *_FLAGS], place

    def _settings_of(self, number: int) -> list[str]:
        """Returns flags for what later starts have changed in `config.yaml`, from which a command takes settings."""
        before = {}
        for later in range(number + 1, len(self.starts)):
            for name, (old, _) in self._changed(later).items():
                before.setdefault(name, old)
        found = []
        for name, old in before.items():
            if not name.startswith("config."):
                continue  # the start's own command has it
            if not isinstance(old, bool | int | float | str):
                raise ReplayError(
                    f"a later start has changed the setting {values.text(name, 200)}, and its value before, "
                    f"{values.shown(old)}, cannot be given as a flag"
                )
            found.append(f"--{name}={str(old).lower() if isinstance(old, bool) else old}")
        return found

    def _changed(self, number: int) -> dict[str, tuple[object, object]]:
        return self.starts[number].get("changed", {})

    def rollbacks(self) -> list[int]:
        """Returns the steps that the run went back to, in the order of time."""
        notes = [note for start in self.starts for note in values.items(start.get("rollbacks"))]
        steps = [values.whole(values.mapping(note).get("to")) for note in notes]
        return [step for step in steps if step is not None]

    def still_true(self, verdicts: Sequence[Verdict]) -> list[Verdict]:
        """Returns verdicts without the steps that the run has trained again since."""
        return [kept for one in verdicts if (kept := cut(one, self.begins(), self.starts, self.rollbacks()))]


def choose(
    intervals: Sequence[Interval], verdicts: Sequence[Verdict], tried: Collection[tuple[int, int]], draw: random.Random
) -> Interval | None:
    """Returns a random interval, of those that no audit has tried before if there are any; None if none is left.

    Args:
      intervals: those that there are.
      verdicts: of earlier audits.
      tried: the places of intervals that were tried now.
      draw: draws the random numbers.
    """
    left = [one for one in intervals if one.place not in tried]
    new = [one for one in left if not any(known.begin <= one.begin and one.end <= known.end for known in verdicts)]
    return draw.choice(new or left) if left else None

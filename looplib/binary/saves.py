"""The saves of a training: at which steps, and which of them are kept."""

import dataclasses
from collections.abc import Sequence

from looplib.errors import CheckError
from looplib.run.commits import Commit
from looplib.run.policy import KeepBest, KeepRule

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

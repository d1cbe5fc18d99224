"""The results of a sweep: a table as text and CSV."""

import csv
import io
import os
from collections.abc import Sequence

from optuna.trial import FrozenTrial, TrialState

from looplib.base import files
from looplib.base.console import printable
from looplib.commands.runs import say
from looplib.run.metric_names import best_first
from looplib.sweep.space import Parameter
from looplib.sweep.study import SweepPlan, deviation, error, name_of, values

_STATES = {TrialState.COMPLETE: "done", TrialState.PRUNED: "stopped", TrialState.FAIL: "failed"}
Cell = str | int | float | None


def ranked(trials: Sequence[FrozenTrial], goal: str) -> list[FrozenTrial]:
    """Returns the trials that have a result, the best first.

    Args:
      trials: all trials.
      goal: "max" or "min".
    """
    done = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    return best_first(done, lambda trial: trial.value, goal)


def write(directory: str, plan: SweepPlan, parameters: Sequence[Parameter], trials: Sequence[FrozenTrial]) -> None:
    """Writes results.csv and results.txt into a sweep's directory, and prints the table.

    Args:
      directory: the sweep's.
      plan: what it does.
      parameters: what it searches.
      trials: all trials.
    """
    if not trials:
        return
    best = ranked(trials, plan.goal)
    rows = _rows(plan, parameters, [*best, *(trial for trial in trials if trial not in best)])
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    files.write_whole(os.path.join(directory, "results.csv"), text.getvalue().encode(errors="replace"))
    table = _aligned(rows)
    files.write_whole(os.path.join(directory, "results.txt"), table)
    say(table.rstrip())
    if best:
        settings = " ".join(f"{flag}={value}" for flag, value in best[0].params.items())
        say(f"best: {name_of(best[0])}, {plan.compared} {best[0].value:.6g} {settings}")
    say(f"results.csv and results.txt are in {directory}")


def _rows(plan: SweepPlan, parameters: Sequence[Parameter], trials: Sequence[FrozenTrial]) -> list[list[Cell]]:
    several = plan.seeds > 1
    names = [one.flag.lstrip("-") for one in parameters]
    seeds = [f"seed {seed}" for seed in range(plan.seeds)] if several else []
    rows: list[list[Cell]] = [["trial", "state", plan.compared, *["deviation"] * several, *seeds, *names, "error"]]
    for trial in trials:
        known = values(trial)
        row: list[Cell] = [name_of(trial), _STATES.get(trial.state, "not ended"), trial.value]
        if several:
            row += [deviation(trial), *(known.get(seed) for seed in range(plan.seeds))]
        row += [trial.params.get(one.flag) for one in parameters]
        rows.append([*row, error(trial)])
    return rows


def _aligned(rows: Sequence[Sequence[Cell]]) -> str:
    used = [column for column in range(len(rows[0])) if any(row[column] not in (None, "") for row in rows[1:])]
    short = [[_short(row[column]) for column in used] for row in rows]
    widths = [max(len(row[column]) for row in short) for column in range(len(used))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in short)
    return "\n".join(lines) + "\n"


def _short(cell: Cell) -> str:
    return "" if cell is None else f"{cell:.6g}" if isinstance(cell, float) else printable(str(cell))

"""The results of a sweep: a table as text and CSV, and a plot."""

import csv
import io
import math
import os
from collections.abc import Sequence

from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState

from looplib import files
from looplib.console import printable
from looplib.extras.sweep.jobs import curve
from looplib.extras.sweep.space import Parameter
from looplib.extras.sweep.study import SweepPlan, deviation, error, name_of, values
from looplib.extras.tools.runs import say
from looplib.messages import gist
from looplib.task.metric_names import best_first

_STATES = {
    TrialState.COMPLETE: "done",
    TrialState.PRUNED: "stopped",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "not ended",
    TrialState.WAITING: "not ended",
}
Cell = str | int | float | None


def ranked(trials: Sequence[FrozenTrial], goal: str) -> list[FrozenTrial]:
    """Returns the trials that have a result, the best first.

    Args:
      trials: all trials.
      goal: "max" or "min".
    """
    done = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    return best_first(done, lambda trial: trial.value, goal)


def write(
    directory: str, plan: SweepPlan, parameters: Sequence[Parameter], trials: Sequence[FrozenTrial], shown: str
) -> None:
    """Writes results.csv, results.txt and results.png into a sweep's directory, and prints the table.

    Args:
      directory: the sweep's.
      plan: what it does.
      parameters: what it searches.
      trials: all trials.
      shown: what a user calls the directory.
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
    try:
        picture = _plot(directory, plan, parameters, best)
    except Exception as error:  # matplotlib's, of numbers that it cannot draw
        say(f"results.png cannot be drawn: {gist(error)}")
    else:
        files.write_whole(os.path.join(directory, "results.png"), picture)
    if best:
        settings = " ".join(f"{flag}={value}" for flag, value in best[0].params.items())
        say(f"best: {name_of(best[0])}, {plan.compared} {best[0].value:.6g} {settings}")
    say(f"results.csv, results.txt and results.png are in {shown}")


def _rows(plan: SweepPlan, parameters: Sequence[Parameter], trials: Sequence[FrozenTrial]) -> list[list[Cell]]:
    several = plan.seeds > 1
    names = [one.flag.lstrip("-") for one in parameters]
    seeds = [f"seed {seed}" for seed in range(plan.seeds)] if several else []
    rows: list[list[Cell]] = [["trial", "state", plan.compared, *["deviation"] * several, *seeds, *names, "error"]]
    for trial in trials:
        known = values(trial)
        row: list[Cell] = [name_of(trial), _STATES[trial.state], trial.value]
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


def _plot(directory: str, plan: SweepPlan, parameters: Sequence[Parameter], best: Sequence[FrozenTrial]) -> bytes:
    """Returns a PNG file with the curves of all results, and the results by each parameter."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(3, 1 + len(parameters))
    lines = math.ceil((1 + len(parameters)) / columns)
    figure = Figure(figsize=(5 * columns, 4 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for place, trial in reversed(list(enumerate(best))):  # the best on top
        for seed in values(trial):
            folder = os.path.join(directory, name_of(trial), f"seed-{seed}" if plan.seeds else "")
            points = sorted(curve(folder, plan.metric).items())
            if not points:  # its run directory is gone
                continue
            label = f"trial {trial.number} (best)" if place == 0 and seed == min(values(trial)) else None
            color = "tab:red" if place == 0 else "0.75"
            axes[0].plot(*zip(*points), color=color, marker=".", linewidth=1, label=label)
    axes[0].set(xlabel="step", ylabel=plan.metric)
    if axes[0].get_legend_handles_labels()[0]:
        axes[0].legend()
    for axis, parameter in zip(axes[1:], parameters):
        settings = [trial.params[parameter.flag] for trial in best]
        if isinstance(parameter.values, CategoricalDistribution):
            order = {choice: number for number, choice in enumerate(parameter.values.choices)}
            settings = [order[setting] for setting in settings]
            axis.set_xticks(list(order.values()), list(order))
        elif parameter.values.log:
            axis.set_xscale("log")
        spread = [deviation(trial) or 0.0 for trial in best]
        axis.errorbar(settings, [trial.value for trial in best], spread, fmt="o", color="0.4", capsize=2)
        axis.set(xlabel=parameter.flag, ylabel=plan.compared)
        if best:
            axis.plot(settings[0], best[0].value, "o", color="tab:red", zorder=3)
    for axis in axes[1 + len(parameters) :]:
        axis.remove()
    picture = io.BytesIO()
    figure.savefig(picture)
    return picture.getvalue()

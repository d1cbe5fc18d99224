"""The points that `benchmarks.growth` has measured: their file, and their picture."""

import dataclasses
import json
import os
import pathlib

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot


@dataclasses.dataclass(frozen=True)
class Point:
    """What was measured of both loops in one setting.

    Attributes:
      steps: per second, by loop, "looplib" and "bare"; medians.
      ratios: of looplib's steps per second to the other's: the lower quartile, the median, the upper quartile.
      megabytes: memory that the process has gained, by loop.
      start: seconds from building to the first result, by loop.
    """

    steps: dict[str, float]
    ratios: list[float]
    megabytes: dict[str, float]
    start: dict[str, float]

    def row(self) -> str:
        """Returns the point as a row of a table."""
        low, ratio, high = self.ratios
        steps, megabytes, start = (
            [values["looplib"], values["bare"]] for values in (self.steps, self.megabytes, self.start)
        )
        return (
            "".join(f"{value:>9.0f}" for value in steps)
            + f"{ratio:>7.2f}{f'({low:.2f}-{high:.2f})':>14}"
            + "".join(f"{value:>7.0f}" for value in megabytes)
            + f"{start[0]:>12.1f}{start[1]:>7.1f}"
        )


Points = dict[str, dict[int, Point]]  # by axis and value


def read(path: str) -> Points:
    """Returns the points in a file; none if there is no file."""
    if not os.path.exists(path):
        return {}
    with open(path) as file:
        return {
            axis: {int(value): Point(**point) for value, point in points.items()}
            for axis, points in json.load(file).items()
        }


def write(path: str, found: Points) -> None:
    """Writes the points to a file."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    plain = {
        axis: {value: dataclasses.asdict(each) for value, each in points.items()} for axis, points in found.items()
    }
    pathlib.Path(path).write_text(json.dumps(plain, indent=1) + "\n")


def draw(found: Points, labels: dict[str, str], path: str) -> None:
    """Draws a column of panels for each axis: speed over the other loop's, memory, time to the first result.

    Args:
      found: the points.
      labels: what to write below each axis.
      path: the points' file; the picture lies beside it.
    """
    figure, panels = pyplot.subplots(3, len(found), figsize=(2.6 * len(found), 6.5), squeeze=False, sharex="col")
    for column, (axis, points) in zip(panels.T, found.items()):
        values = sorted(points)
        low, ratio, high = zip(*(points[value].ratios for value in values))
        column[0].fill_between(values, low, high, alpha=0.3)
        column[0].plot(values, ratio, "o-")
        column[0].axhline(1, color="black", linewidth=0.8, linestyle="--")
        column[0].set_ylim(0, max(1.6, 1.1 * max(high)))
        for panel, field in ((column[1], "megabytes"), (column[2], "start")):
            for name, style in (("looplib", "o-"), ("bare", "s--")):
                panel.plot(values, [getattr(points[value], field)[name] for value in values], style, label=name)
            panel.set_ylim(bottom=0)
        column[2].set_xscale("log")
        column[2].minorticks_off()
        column[2].set_xticks(values, [f"{value // 1000}k" if value >= 1000 else str(value) for value in values])
        column[2].set_xlabel(labels[axis])
    for panel, label in zip(panels[:, 0], ("steps/s, looplib / bare", "MB", "s to the first result")):
        panel.set_ylabel(label)
    panels[1, 0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(pathlib.Path(path).with_suffix(".png"), dpi=80)
    pyplot.close(figure)

"""Pictures of results, as PNG files: points by class, and the curves of several runs.

python -m trainers.pictures --output=accuracy.png --metric=eval/accuracy /tmp/all /tmp/last /tmp/lora
"""

import io
import os
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from absl import app, flags
from matplotlib.figure import Figure

from looplib import UsageError
from looplib.base.files import resolve
from looplib.run.records import read_jsonl


def write_points(path: str, features: np.ndarray, labels: np.ndarray) -> None:
    """Draws features by their first two principal components, in the colors of at most ten classes.

    Args:
      path: the PNG file.
      features: float `[n, d]`.
      labels: integers `[n]`, from 0 to 9.
    """
    centered = features - features.mean(axis=0)
    points = centered @ np.linalg.svd(centered, full_matrices=False)[2][:2].T
    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.subplots()
    colors = axes.scatter(*points.T, c=labels, cmap="tab10", vmin=-0.5, vmax=9.5, s=12)
    figure.colorbar(colors, ticks=range(labels.max() + 1), label="class")
    axes.set(xlabel="first principal component", ylabel="second principal component")
    _write(path, figure)


def write_curves(path: str, run_dirs: Sequence[str], metric: str) -> None:
    """Draws a metric of several runs over their steps; each is named after its directory.

    Args:
      path: the PNG file.
      run_dirs: run directories, with a `metrics.jsonl`.
      metric: the split and the name, such as "eval/accuracy".

    Raises:
      UsageError: for a run without the metric.
    """
    split, _, name = metric.partition("/")
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for run_dir in run_dirs:
        records = read_jsonl(os.path.join(run_dir, "metrics.jsonl"))
        if not records:
            raise UsageError(f"{run_dir} has no metrics.jsonl with records; expected a run directory")
        points = [(record["step"], record[name]) for record in records if record["split"] == split and name in record]
        if not points:
            raise UsageError(f"{run_dir} has no metric {metric}; expected a split and a name, such as eval/accuracy")
        axes.plot(*zip(*points), marker=".", label=os.path.basename(os.path.normpath(run_dir)))
    axes.set(xlabel="step", ylabel=metric)
    axes.grid(alpha=0.3)
    axes.legend()
    _write(path, figure)


def write_evaluations(model_dir: str, metric: str, mark: str) -> None:
    """Draws a metric of all evaluations over the minutes of training, into `<metric>.png` of the run directory.

    Args:
      model_dir: the run directory, which has records of the training and of evaluations.
      metric: the name of the metric.
      mark: the name of another metric of the evaluations, the last value of which becomes a dashed line.
    """
    records = read_jsonl(os.path.join(model_dir, "metrics.jsonl"))
    steps, minutes = [0], [0.0]
    for record in records:
        if record["split"] == "train":
            minutes.append(minutes[-1] + (record["step"] - steps[-1]) / record["steps_per_second"] / 60)
            steps.append(record["step"])
    evaluations = [record for record in records if record["split"] == "eval"]
    times = np.interp([record["step"] for record in evaluations], steps, minutes)
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(times, [record[metric] for record in evaluations], "o-", label=metric)
    axes.axhline(evaluations[-1][mark], color="gray", linestyle="--", label=mark)
    axes.set(xlabel="minutes of training", ylabel=metric)
    axes.legend()
    _write(os.path.join(model_dir, f"{metric}.png"), figure)


def _write(path: str, figure: Figure) -> None:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=80)
    with tf.io.gfile.GFile(path, "wb") as file:
        file.write(content.getvalue())


def main(argv: Sequence[str]) -> None:
    """Draws the curves that the command line asks for."""
    if len(argv) < 2:
        raise app.UsageError("name one or more run directories")
    write_curves(resolve(flags.FLAGS.output, "--output"), argv[1:], flags.FLAGS.metric)


if __name__ == "__main__":
    flags.DEFINE_string("output", "curves.png", "The PNG file to write.")
    flags.DEFINE_string("metric", "eval/accuracy", "Split and name of the metric.")
    app.run(main)

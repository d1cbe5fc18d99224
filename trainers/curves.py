"""A picture of a run's evaluations."""

import os

import matplotlib.figure
import numpy as np
import tensorflow as tf

from looplib.report.records import read_jsonl


def draw(model_dir: str, metric: str, mark: str) -> None:
    """Draws a metric of all evaluations over the minutes of training, into `<metric>.png`.

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
    figure = matplotlib.figure.Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(times, [record[metric] for record in evaluations], "o-", label=metric)
    axes.axhline(evaluations[-1][mark], color="gray", linestyle="--", label=mark)
    axes.set(xlabel="minutes of training", ylabel=metric)
    axes.legend()
    with tf.io.gfile.GFile(os.path.join(model_dir, f"{metric}.png"), "wb") as file:
        figure.savefig(file, format="png", dpi=100)

"""What finding the fastest engine costs in a run of a minute: `python -m benchmarks.choice`.

A new controller with `loop="auto"` trains a minute, trials and compilation included. Before and after it another one
with `loop="graph"`, traced and warm, trains for a few seconds. The ratio is of the steps that auto did to those that
graph does in the same time: auto may be the default as long as it is nowhere below 0.97.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported

import time

import numpy as np
import tensorflow as tf
from absl import app, flags, logging

from benchmarks import contestants, records
from benchmarks.workloads import WORKLOADS, Task

_WORKLOADS = flags.DEFINE_list("workloads", ["W1", "W2", "W3", "W4", "W5"], "The workloads to run.")
_SECONDS = flags.DEFINE_float("seconds", 60, "Length of auto's run.", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", "build/bench.json", "The file to add the ratios to.")


def steps_per_second(task, engine, seconds, warm_up):
    """Trains a new controller for some time and returns its rate, of all its time after the warm-up."""
    marks = []

    def stop_in_time(event):
        now = time.perf_counter()
        if not marks and now >= started + warm_up:
            marks.append((now, event.step))
        elif marks and now >= marks[0][0] + seconds:
            marks.append((now, event.step))
            event.controller.stop()

    controller = contestants.make_controller(task, engine, actions=[stop_in_time])
    started = time.perf_counter()
    controller.train(10**8)
    (since, first), (until, last) = marks
    return (last - first) / (until - since), controller.engines


def main(argv):
    """Runs the workloads, prints and keeps the ratios."""
    del argv
    logging.set_verbosity(logging.WARNING)
    for name in _WORKLOADS.value:
        workload = WORKLOADS[name]
        arrays = tuple(tf.constant(array) for array in workload.arrays())
        graph = [steps_per_second(Task(workload, arrays), "graph", _SECONDS.value / 8, 3)[0]]
        auto, chosen = steps_per_second(Task(workload, arrays), "auto", _SECONDS.value, 0)
        graph.append(steps_per_second(Task(workload, arrays), "graph", _SECONDS.value / 8, 3)[0])
        engine = chosen.get("train", {"loop": "none", "chunk": 0})
        print(
            f"{name}: {engine['loop']} x{engine['chunk']} was chosen; auto did {auto / np.mean(graph):.3f} of the steps"
        )
        records.add(_OUTPUT.value, [records.record(f"choice, {name}", "looplib, graph", auto / np.array(graph))])


if __name__ == "__main__":
    app.run(main)

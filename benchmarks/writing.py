"""What all that a run writes costs it: `python -m benchmarks.writing`.

The MLP of W1 trains with a run directory and a report every 100 steps: progress, `metrics.jsonl`, TensorBoard's events,
and in a second run images and histograms too. The share is the loop's own clock: the time of reports, in which metrics
are read from the device, checked and written, against the time of training. The page at the end is apart.
"""

import os
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported

import numpy as np
from absl import app, flags, logging

import looplib
from benchmarks.media import Mlp
from benchmarks.workloads import WORKLOADS
from looplib.extras.page import html

_TURNS = flags.DEFINE_integer("turns", 10, "Turns that count.", lower_bound=1)
_TURN_STEPS = flags.DEFINE_integer("turn_steps", 2000, "Steps of a turn.", lower_bound=100)


def _shares(controller):
    """Trains in turns; returns the share of the time of reports in each, after a first turn to warm up."""
    shares = []
    for turn in range(_TURNS.value + 1):
        before = {name: controller.clock.of(name) for name in ("train", "input", "report")}
        controller.train((turn + 1) * _TURN_STEPS.value)
        passed = {name: controller.clock.of(name) - seconds for name, seconds in before.items()}
        shares.append(passed["report"] / sum(passed.values()))
    return shares[1:]


def main(argv):
    """Measures a run without media, and one with them."""
    del argv
    logging.set_verbosity(logging.ERROR)
    arrays, lines = WORKLOADS["W1"].arrays(), []
    for name, shows in (("metrics", False), ("metrics and media", True)):
        with tempfile.TemporaryDirectory() as folder:
            policy = looplib.CheckpointPolicy(every_steps=10**9)  # and at the end of a turn
            trainer = Mlp(arrays, shows)
            with looplib.Controller(
                trainer=trainer, global_batch_size=128, model_dir=folder, checkpoints=policy
            ) as controller:
                low, middle, high = np.percentile(_shares(controller), (25, 50, 75))
            started = time.perf_counter()
            html.write_of_run(folder)
            page = time.perf_counter() - started
        lines.append(f"{name}: {middle:.2%} of the training (quartiles {low:.2%}, {high:.2%}); page {page:.2f} s")
    print(*lines, sep="\n")


if __name__ == "__main__":
    app.run(main)

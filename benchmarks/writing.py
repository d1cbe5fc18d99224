"""What all that a run writes costs it: `python -m benchmarks.writing`.

The MLP of W1 trains with a run directory and a report every 100 steps: progress, `metrics.jsonl`, TensorBoard's events,
and in a second run images and histograms too. The same training without a directory and writers takes turns with it.
What is compared is the time from the first report of a turn to its last, processor time of all threads and wall time,
without the checkpoint at its end. The share of the reports is the loop's own clock: how long it waits for them. The
processor time of the thread that writes the files is measured by itself, because it is less than what two trainings
differ by. The page at the end is apart.
"""

import os
import tempfile
import threading
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported

import numpy as np
from absl import app, flags, logging

import looplib
from benchmarks.media import Mlp
from benchmarks.workloads import WORKLOADS
from looplib.report.page import html

_TURNS = flags.DEFINE_integer("turns", 12, "Turns of each that count.", lower_bound=1)
_TURN_STEPS = flags.DEFINE_integer("turn_steps", 1000, "Steps of a turn.", lower_bound=300)


class _Contestant:
    """A training, with or without a run directory.

    Args:
      trainer: the trainer.
      model_dir: the run directory; None writes nothing.
    """

    def __init__(self, trainer, model_dir):
        self._times = []  # at each report: processor time, wall time, the clock's time of reports, the thread's time
        self.controller = looplib.Controller(
            looplib.RunConfig(global_batch_size=128),
            trainer=trainer,
            model_dir=model_dir,
            checkpoints=looplib.CheckpointPolicy(every_steps=10**9),  # and at the end of a turn
            writers=None if model_dir else [],
            actions=[self._note],
        )

    def _note(self, event):
        clock = event.controller.clock
        self._times.append((time.process_time(), time.perf_counter(), clock.of("report"), _writing_seconds()))

    def turn(self):
        """Trains for a turn; returns the seconds from its first report to its last one, of each kind."""
        self._times.clear()
        self.controller.train(self.controller.global_step + _TURN_STEPS.value)
        return np.subtract(self._times[-1], self._times[0])


def _writing_seconds():
    """Returns the processor time so far of the threads that write files."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("ThreadedWriter")]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) for thread in threads)


def _both(pair, first):
    """Lets the contestants of a pair take their turns; returns their seconds, in the order of the pair."""
    found = {number: pair[number].turn() for number in (first, 1 - first)}
    return [found[0], found[1]]


def _quartiles(values):
    low, middle, high = np.percentile(values, (25, 50, 75))
    return f"{middle:.2%} ({low:.2%} to {high:.2%})"


def main(argv):
    """Measures a run without media, and one with them."""
    del argv
    logging.set_verbosity(logging.ERROR)
    arrays, lines = WORKLOADS["W1"].arrays(), []
    for name, shows in (("metrics", False), ("metrics and media", True)):
        with tempfile.TemporaryDirectory() as folder:
            pair = [_Contestant(Mlp(arrays, shows), place) for place in (None, folder)]
            turns = np.array([_both(pair, first=turn % 2) for turn in range(_TURNS.value + 1)][1:])
            for contestant in pair:
                contestant.controller.close()
            started = time.perf_counter()
            html.write_of_run(folder)
            page = time.perf_counter() - started
        processor, wall = (turns[:, 1, :2] / turns[:, 0, :2] - 1).T
        lines.append(
            f"{name}: the loop waits {_quartiles(turns[:, 1, 2] / turns[:, 1, 1])} of its time for reports; the thread "
            f"that writes takes {_quartiles(turns[:, 1, 3] / turns[:, 1, 0])} of the processor time; it takes "
            f"{_quartiles(processor)} more processor time and {_quartiles(wall)} more wall time than without writing; "
            f"page {page:.2f} s"
        )
    print(*lines, sep="\n")


if __name__ == "__main__":
    app.run(main)

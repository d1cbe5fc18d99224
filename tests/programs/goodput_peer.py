"""Goodput by ml-goodput-measurement beside looplib's, of the same simulated runs of a day: `python goodput_peer.py`.

Its recorder writes to a list, which stands in for Cloud Logging, and its calculator reads from there. It needs the
packages ml-goodput-measurement and absl-py, and no TensorFlow; `PYTHONPATH` has the project and its tests.
"""

import datetime
import tempfile

from ml_goodput_measurement import goodput as peer
from simulated_run import BEGIN, Faults, SimulatedRun

from looplib.base.decoding import decode
from looplib.run.goodput import goodput
from looplib.run.report import StartEntry

HOUR = 3600.0
RUNS = {
    "no faults": Faults(),
    "kills": Faults(kill=2 * HOUR),
    "rollbacks": Faults(rollback=2 * HOUR),
    "preemptions": Faults(preemption=2 * HOUR),
    "suspensions": Faults(suspension=4 * HOUR),
}
EVENTS = ("save", "evaluate", "suspended")  # that a program may record as custom events; it has no other name for them


class Log:
    """Entries in memory, with the interface of the package's own `_CloudLogger`."""

    def __init__(self):
        self.entries = []

    def write_cloud_logging_entry(self, entry):
        """Takes an entry."""
        self.entries.append(entry)

    def read_cloud_logging_entries(self, start_time=None, end_time=None, last_entry_info=None):
        """Returns all entries, and the time and the name of the last."""
        return list(self.entries), (datetime.datetime.now(datetime.timezone.utc), f"{len(self.entries)}")

    def flush(self):
        """Does nothing."""


def lives(run):
    """Yields the moments of each start."""
    found = []
    for moment in run.moments:
        if moment.what == "life":
            yield moment, found
            found = []
        else:
            found.append(moment)


def recorded(run, with_events):
    """Returns the log of a run, as a program would have written it."""
    log = Log()
    recorder = peer.GoodputRecorder("run", "log", True, log)

    def at(seconds):
        return BEGIN + datetime.timedelta(seconds=seconds)

    for life, moments in lives(run):
        recorder.record_job_start_time(at(life.begin))
        for one in moments:
            if one.what == "start":
                recorder.record_tpu_init_start_time(at(one.begin))
                recorder.record_tpu_init_end_time(at(one.end))
            elif one.what in ("compile", "restore"):
                recorder.record_training_preparation_start_time(at(one.begin))
                recorder.record_training_preparation_end_time(at(one.end))
            elif one.what == "steps":
                each = 1.0  # second, as the simulation has it without variation
                for step in range(one.first, one.last + (one.last == one.first)):
                    recorder.record_step_start_time(step, at(one.begin + (step - one.first) * each))
            elif with_events:
                recorder.record_custom_badput_event_start_time(at(one.begin), one.what)
                recorder.record_custom_badput_event_end_time(at(one.end), one.what)
    recorder.record_job_end_time(at(run.now))
    return log


def share(log, folder):
    """Returns the goodput by the package's calculator, and what it says of the rest, both as shares."""
    calculator = peer.GoodputCalculator("run", "log", log, cache_dir=folder)
    found, rest, _ = calculator.get_job_goodput(include_badput_breakdown=True)
    flat = {}
    for kind, value in rest.items():
        parts = value if isinstance(value, dict) else {kind.name: value}
        flat.update({name: round(part / 100, 4) for name, part in parts.items() if part > 0.005})
    return found / 100, flat


def main():
    """Prints a table."""
    print(f"{'':<13}{'looplib':>9}{'truth':>8}{'+ input':>9}{'peer, events':>14}{'peer':>8}")
    for name, faults in RUNS.items():
        run = SimulatedRun(1, faults, 24 * HOUR)
        kept = run.truth["train"] / run.wall, (run.truth["train"] + run.truth["input"]) / run.wall
        found = []
        for with_events in (True, False):
            with tempfile.TemporaryDirectory() as folder:
                found.append(share(recorded(run, with_events), folder))
        (events, rest), (bare, _) = found
        print(
            f"{name:<13}{goodput(decode(list[StartEntry], run.starts, strict=False)).share:>9.4f}{kept[0]:>8.4f}{kept[1]:>9.4f}{events:>14.4f}{bare:>8.4f}"
        )
        print("   truth:", {cause: round(seconds / run.wall, 4) for cause, seconds in run.truth.items() if seconds})
        print("   peer: ", rest, flush=True)


if __name__ == "__main__":
    main()

"""A run of days, simulated with kills, preemptions, rollbacks, suspensions and times off: the truth, and its `run.json`.

It imports no TensorFlow. The truth is kept step by step: what each step took, in its execution that is kept at the end,
and what became of each other second. The `starts` of `run.json` are what looplib writes: with the seconds of a clock at
each report, of which 50 to 100 are kept; when something happens; and otherwise at the first report of each minute, so
that of a start that is killed the last of them is all that is known.
"""

import collections
import dataclasses
import datetime
import math
import random

import numpy as np

BEGIN = datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc)
WEEK = 7 * 86_400.0
REPORT, SAVE, EVALUATE = 100, 500, 2000  # steps
START = {"start": 20.0, "compile": 40.0}  # seconds
RESTORE, SAVE_SECONDS, EVALUATE_SECONDS = 30.0, 6.0, 40.0
CAUSES = ("train", "input", "repeated", "start", "evaluate", "save", "suspended", "off")
_CAUSE = {"compile": "start", "restore": "start"}  # of phases


class _Killed(Exception):
    pass


@dataclasses.dataclass
class Faults:
    """The kinds of strikes, by the mean seconds between two; never by default."""

    kill: float = math.inf
    preemption: float = math.inf
    rollback: float = math.inf
    suspension: float = math.inf
    off: float = 900.0  # the mean seconds between two starts


class Moment:
    """Something that the run did: `what`, from `begin` to `end` in seconds; of steps, from the first to the last."""

    def __init__(self, what, begin, end, first=0, last=0):
        self.what, self.begin, self.end, self.first, self.last = what, begin, end, first, last


class SimulatedRun:
    """The run.

    Args:
      seed: of everything that is random.
      faults: the `Faults`.
      seconds: after which it ends with the next save.
      waiting: share of a step's time that waits for input.
      variation: by which the time of a step differs from a second, as a share, from one report to the next.

    Attributes:
      truth: dict from cause to seconds, see `goodput.Goodput`.
      starts: those of `run.json`.
      unnoted: seconds of starts that were killed after the last that `run.json` has of them.
      longest: the longest time of steps between two points that `run.json` has, over all starts, in seconds.
      cuts: how often steps were taken back.
      moments: list of `Moment`, in order: "life" (a start, from its process's begin to its end), "start", "compile",
        "restore", "steps", "save", "evaluate", "suspended".
      now: the end, in seconds.
    """

    def __init__(self, seed, faults, seconds=WEEK, waiting=0.1, variation=0.0):
        self.random, self.faults, self.waiting, self.variation = random.Random(seed), faults, waiting, variation
        self.truth, self.starts, self.moments = collections.Counter(dict.fromkeys(CAUSES, 0.0)), [], []
        self.unnoted, self.longest, self.cuts, self.now = 0.0, 0.0, 0, 0.0
        self._saved, self._end = [0], seconds
        self._kept = np.zeros([2, int(2 * seconds) + 10_000])  # train and input of each step that is kept so far
        self._top = 0  # the last of these steps
        while not self._life():
            pause = self.random.expovariate(1 / faults.off)
            self.truth["off"] += pause
            self.now += pause
        self.truth["train"], self.truth["input"] = self._kept.sum(axis=1).tolist()

    @property
    def wall(self):
        """All seconds."""
        return sum(self.truth.values())

    def _after(self, mean):
        return self.now + (self.random.expovariate(1 / mean) if mean < math.inf else math.inf)

    def _life(self):
        """One start, to its end; returns whether the run is done."""
        self._began, self._rollbacks, self._points = self.now, [], []
        self._seconds = collections.Counter(train=0.0, input=0.0)
        self._reports, self._every, self._written, self._noted = 0, 1, None, self.now
        self._kill = self._after(self.faults.kill) if self.now < self._end else math.inf
        if not self.starts:  # what was before the first that run.json has is not known
            self._kill = max(self._kill, self.now + sum(START.values()) + 1)
        restored = self._saved[-1]
        self._fixed = {
            "started": (BEGIN + datetime.timedelta(seconds=self.now)).isoformat(timespec="seconds"),
            "restored_from": f"/run/checkpoints/ckpt-{restored}" if restored else None,
        }
        try:
            for phase, seconds in [*START.items(), *([("restore", RESTORE)] if restored else [])]:
                self._spend(phase, seconds)
            self._write(restored, "running")
            self._write(*self._train(restored))
        except _Killed:
            self.unnoted += self.now - self._noted
            self._take_back(self._saved[-1])
            if self._written:
                self._written["status"] = "killed"
        self.moments.append(Moment("life", self._began, self.now))
        if self._written:
            self.starts.append(self._written)
            trained = [
                sum(map(point["seconds"].get, ("train", "input")))
                for point in [*self._written["points"], self._written]
            ]
            self.longest = max(self.longest, *np.diff([0.0, *trained]))
        return bool(self._written) and self._written["status"] == "done"

    def _train(self, step):
        """Trains; returns the step and the status at the end."""
        rollback, suspension = self._after(self.faults.rollback), self._after(self.faults.suspension)
        preemption = self._after(self.faults.preemption)
        while True:
            step = self._steps(step, (step // REPORT + 1) * REPORT)
            if self.now >= suspension:
                self._spend("suspended", self.random.expovariate(1 / 1800))
                suspension = self._after(self.faults.suspension)
            if self.now >= rollback:
                if len(self._saved) > 2 and self.random.random() < 0.3:  # the newest is not proven good
                    self._saved.pop()
                self._rollbacks.append(
                    {"step": step, "to": self._saved[-1], "reason": "a spike", "seconds": self._clock()}
                )
                self._take_back(self._saved[-1])
                step, rollback = self._saved[-1], self._after(self.faults.rollback)
                self._spend("restore", RESTORE)
                self._write(step, "running")
                continue
            self._report(step)
            ends = self.now >= self._end or self.now >= preemption
            if (step % SAVE == 0 or ends) and step > self._saved[-1]:
                self._spend("save", SAVE_SECONDS)
                self._saved.append(step)
                if len(self._saved) == 2:
                    self._write(step, "running")
            if ends:
                return step, "done" if self.now >= self._end else "preempted"
            if step % EVALUATE == 0:
                self._spend("evaluate", EVALUATE_SECONDS)

    def _steps(self, step, to):
        """Trains from one report to the next, or until a kill."""
        each = 1.0 + self.variation * self.random.uniform(-1, 1)
        begin = self.now
        if self.now + (to - step) * each >= self._kill:
            self.moments.append(Moment("steps", begin, self._kill, step, step + int((self._kill - begin) / each)))
            self.truth["repeated"] += self._kill - self.now
            self.now = self._kill
            raise _Killed
        self.now += (to - step) * each
        parts = each * (1 - self.waiting), each * self.waiting
        self._kept[0, step:to], self._kept[1, step:to], self._top = *parts, to
        for name, seconds in zip(("train", "input"), parts):
            self._seconds[name] += (to - step) * seconds
        self.moments.append(Moment("steps", begin, self.now, step, to))
        return to

    def _spend(self, phase, seconds):
        begin, killed = self.now, self.now + seconds >= self._kill
        seconds = min(seconds, self._kill - self.now)
        self.now += seconds
        self._seconds[phase] += seconds
        self.truth[_CAUSE.get(phase, phase)] += seconds
        self.moments.append(Moment(phase, begin, self.now))
        if killed:
            raise _Killed

    def _take_back(self, step):
        self.cuts += 1
        self.truth["repeated"] += float(self._kept[:, step : self._top].sum())
        self._kept[:, step : self._top] = 0
        self._top = step

    def _report(self, step):
        self._reports += 1
        if self._reports % self._every == 0:
            self._points.append({"step": step, "seconds": self._clock()})
            if len(self._points) == 100:  # as `run_report.Points` keeps them
                self._points, self._every = self._points[1::2], 2 * self._every
        if self.now - self._noted >= 60:
            self._write(step, "running")

    def _clock(self):
        return {name: round(seconds, 3) for name, seconds in self._seconds.items()}

    def _write(self, step, status):
        self._noted = self.now
        self._written = {
            **self._fixed, "step": step, "status": status, "points": [*self._points],
            "rollbacks": [*self._rollbacks], "seconds": {**self._clock(), "wall": round(self.now - self._began, 3)},
        }  # fmt: skip

"""Time accounting: seconds by phase, which add up to the wall time, and the speed of the training."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator

from looplib.base.numbers import Progress, format_share

_IMPORTED = time.perf_counter()
_SHORT_CALL = 0.002  # seconds; each call of the loop costs a few tenths of a millisecond, whatever its number of steps
_HALF_LIFE = 30.0  # seconds of training after which a measurement of speed has half of its weight
_LONG_TRAINING = 0.5  # seconds; in a shorter training, waiting means waiting for the first batch
_SHORT_RUN, _LEAST_WORK = 60.0, 10.0  # seconds, see `summary`
_OF_A_START = ("start", "compile", "restore")
# The advice for the phase that takes most of the time.
_AGAINST = {
    **dict.fromkeys(_OF_A_START, "train more steps per start"),
    "train": "try --loop=auto, a lower precision, or more devices",
    "input": "try map(..., tf.data.AUTOTUNE) on batches, cache(), prefetch(), or context.resident for arrays",
    "evaluate": "evaluate less often, or beside the training with --mode=continuous_eval",
    "report": "raise steps_per_loop",
    "save": "save less often",
    "save before evaluations": "evaluate less often, because each evaluation saves first; save no more often",
}
_NO_OVERHEAD = ("train", "input", "evaluate", "suspended", "waiting")
observers: list[Callable[["Clock", str, float, float], None]] = []  # take each phase that ends, its begin and its end


class Clock:
    """Adds up the seconds of phases. Phases do not overlap: time in an inner phase does not count for the outer one.

    Attributes:
      of_process: whether time counts from the start of the process.
      of_input: returns (clause that names the slowest stage of the input, advice), or None.

    Example:
        clock = Clock()
        with clock.phase("train"):
            with clock.phase("save"):
                ...
        clock.seconds()  # {"save": 0.2, "train": 1.3, "other": 0.01, "wall": 1.51}
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._started = self._mark = now()
        self._stack, self._seconds = ["other"], {"other": 0.0}
        self._calls: dict[str, int] = {}
        self._before_evaluations = 0.0
        self._entered = 0
        self.of_process = False
        self.of_input: Callable[[], tuple[str, str] | None] = lambda: None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time of a `with` block for the phase `name`."""
        self._close_span()
        began = self._mark
        self._stack.append(name)
        self._calls[name] = self._calls.get(name, 0) + 1
        self._entered += 1
        try:
            yield
        finally:
            self._close_span()
            self._stack.pop()
            self._entered += 1
            for observe in observers:
                observe(self, name, began, self._mark)

    @property
    def current(self) -> tuple[str, int]:
        """`(current phase, number of changes of phase)`; may be read by another thread."""
        return self._stack[-1], self._entered

    def seconds(self) -> dict[str, float]:
        """Returns a dict from phase to seconds; `other` is time outside of all phases, `wall` the sum of all."""
        self._close_span()
        wall = self._mark - self._started
        return {**{name: round(value, 3) for name, value in sorted(self._seconds.items())}, "wall": round(wall, 3)}

    def move(self, seconds: float, source: str, target: str) -> None:
        """Moves seconds from one phase to another, at most all of the first."""
        seconds = min(seconds, self.of(source))
        self._seconds[source] -= seconds
        self._seconds[target] = self._seconds.get(target, 0.0) + seconds

    def add(self, name: str, seconds: float) -> None:
        """Adds seconds that passed before this clock was made."""
        self._started -= seconds
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def add_start(self) -> None:
        """Adds the time from the start of the process to the start of this clock, as "start"."""
        self.of_process = True
        self.add("start", max(0.0, _process_seconds() - self.seconds()["wall"]))

    @contextlib.contextmanager
    def saving_for_an_evaluation(self) -> Iterator[None]:
        """Counts the saves of a `with` block as caused by an evaluation, not by the interval."""
        before = self.of("save")
        try:
            yield
        finally:
            self._before_evaluations += self.of("save") - before

    def summary(self) -> tuple[str, str]:
        """Says where the time went, for a person.

        A run of less than a minute has a verdict if it waits for its data, or if it trains and evaluates for most of
        its time and at least 10 seconds: any short run starts, saves and reports for much of its time.

        Returns:
          `(line, verdict)`: all phases with their shares, the longest first; and the bottleneck of the run, a word
          ending in "-bound", with a remedy to try for a training. The verdict is "" where nothing can be said.
        """
        seconds = self.seconds()
        wall = max(seconds.pop("wall"), 1e-9)
        ran = max(wall - seconds.get("suspended", 0.0) - seconds.get("waiting", 0.0), 1e-9)
        longest = sorted((item for item in seconds.items() if item[1] >= 0.0005), key=lambda item: -item[1])
        shares = ", ".join(f"{name} {value:.1f} ({format_share(value / wall)})" for name, value in longest)
        verdict = self._verdict(seconds, ran)
        return f"time {wall:.1f} s: {shares}", verdict if self._calls.get("train") else verdict.partition("; ")[0]

    def _verdict(self, seconds: dict[str, float], wall: float) -> str:
        train, waited, evaluated = (seconds.get(name, 0.0) for name in ("train", "input", "evaluate"))
        training, calls = train + waited, self._calls.get("train", 0)
        of_start = {name: seconds[name] for name in _OF_A_START if seconds.get(name, 0.0) >= 0.01 * wall}
        begun = sum(of_start.values())
        others = {name: value for name, value in seconds.items() if name not in _NO_OVERHEAD}
        most, overhead = max(others, key=others.get), sum(others.values()) / wall
        is_short = wall < _SHORT_RUN
        waits = training > _LONG_TRAINING and self.waits_for_input and (not is_short or waited > wall / 10)
        if is_short and not waits and training + evaluated < max(_LEAST_WORK, wall / 2):
            return ""
        if not is_short and begun > max(training, evaluated, overhead * wall - begun):
            parts = ", ".join(f"{name} {format_share(value / wall)}" for name, value in of_start.items())
            what, advice = f"start-up took {begun / wall:.0%} of the time ({parts})", _AGAINST["start"]
            if waits:
                clause, change = self.of_input() or ("", _AGAINST["input"])
                what += (
                    f", and the training itself waits for its data {waited / training:.0%} of its time (input-bound)"
                )
                what, advice = what + f", and {clause}" * bool(clause), f"{advice}, and {change}"
            return f"start-bound: {what}; {advice}"
        if not is_short and overhead > 0.5:
            forced = most == "save" and self._before_evaluations > 0.5 * seconds["save"]
            advice = _AGAINST.get("save before evaluations" if forced else most, "check what else the program does")
            return f"overhead-bound: {overhead:.0%} of the time is overhead, most of it {most}; {advice}"
        if evaluated > training and not (is_short and waits):
            return f"evaluation-bound: {evaluated / wall:.0%} of the time is evaluation; {_AGAINST['evaluate']}"
        if waits:
            what, advice = self.of_input() or ("", _AGAINST["input"])
            clause = f", and {what}" * bool(what)
            return f"input-bound: training waits for its data {waited / training:.0%} of the time{clause}; {advice}"
        if calls and train / calls < _SHORT_CALL:
            return f"overhead-bound: a call of the loop takes {1e3 * train / calls:.1f} ms; {_AGAINST['report']}"
        return f"compute-bound: the device computes {train / wall:.0%} of the time; {_AGAINST['train']}"

    @property
    def waits_for_input(self) -> bool:
        """Whether training spends more than a fifth of its time waiting for data."""
        waited = self.of("input")
        return waited > 0.2 * (self.of("train") + waited)

    def left_of(self, limit: float | None) -> float | None:
        """Returns the seconds left of a time limit. It counts from the start of the process, if that is known."""
        return limit - self.seconds()["wall"] if limit is not None and self.of_process else limit

    def of(self, name: str) -> float:
        """Returns the seconds of one phase so far."""
        self._close_span()
        return self._seconds.get(name, 0.0)

    def _close_span(self) -> None:
        now = self._now()
        phase = self._stack[-1]
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._mark
        self._mark = now


class SpeedMeter:
    """Measures the speed of a training since this process started or resumed it.

    Args:
      clock: has the time of the run by phase.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._overhead_start = self._outside()
        self._ran = 0  # all steps, including those before a rollback
        self._steps = self._seconds = 0.0  # weighted: older ones count less
        self._waiting = 0.0
        self._mark = (0, 0.0, 0.0)

    def measure_from(self, step: int) -> None:
        """Starts a measurement at a step: at the start, at a resume, or after a rollback."""
        self._mark = step, self._clock.of("train"), self._clock.of("input")

    def at(self, step: int, end: int | None, evaluation: int | None, evaluating: bool = False) -> Progress:
        """Returns the progress.

        Args:
          step: the global step.
          end: the step to train to, or None.
          evaluation: the step of the next evaluation, or None.
          evaluating: whether the evaluation of this step comes now.
        """
        before, train, waited = self._mark
        self.measure_from(step)
        waited = self._mark[2] - waited
        passed = self._mark[1] - train + waited
        keep = 0.5 ** (max(0.0, passed) / _HALF_LIFE)
        self._ran += step - before
        self._steps = keep * self._steps + step - before
        self._seconds = keep * self._seconds + passed
        if passed > 0:
            self._waiting = min(1.0, max(0.0, waited / passed))
        if not self._steps or self._seconds <= 0:
            return Progress(step, end, evaluating)
        rate = self._steps / self._seconds
        overhead = max(0.0, self._outside() - self._overhead_start) / self._ran
        return Progress(
            step,
            end,
            evaluating,
            rate=rate,
            left=None if end is None or end < step else (end - step) * (1 / rate + overhead),
            to_evaluation=None if evaluation is None else (evaluation - step) / rate,
            waiting=self._waiting,
        )

    def _outside(self) -> float:
        """Returns the seconds spent in evaluations, saves and reports so far."""
        return sum(self._clock.of(name) for name in ("evaluate", "save", "report"))


def _process_seconds() -> float:
    """Returns the seconds since the start of the process, or since the import of this file if that is unknown."""
    try:
        with open("/proc/self/stat") as file:
            started = int(file.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError, ValueError, IndexError):
        return time.perf_counter() - _IMPORTED

"""LearningWarnings: an action that warns of a training that runs without an error and loses its meaning."""

import collections
import contextlib
import math
import statistics
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from absl import logging

from looplib.actions.finding import LearningFinding, key
from looplib.actions.output_checks import ConstantOutputs
from looplib.actions.weight_checks import EXPLODING, TrainedVariables, WeightChecks
from looplib.base.messages import gist, whole_number
from looplib.errors import ActionError
from looplib.loop.contracts import Loop
from looplib.run.report import RunWarning, read_report
from looplib.task.actions import Action, Event

_FREE = 0.2  # seconds that checks may take in any case, so that a short first run has them too


class Budget:
    """Keeps what checks take below a share of the time since the training began, and a fifth of a second.

    Args:
      share: such as 0.004, for 0.4%.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.seconds = 0.0  # that checks have taken since the training began
        self._began = time.perf_counter()

    def begin(self) -> None:
        """Counts the time from here on."""
        self.seconds, self._began = 0.0, time.perf_counter()

    def allows(self, seconds: float) -> bool:
        """Returns whether a check that takes about so many seconds fits."""
        return self.seconds + seconds <= _FREE + self.share * (time.perf_counter() - self._began)

    @contextlib.contextmanager
    def spending(self) -> Iterator[None]:
        """Counts the time of the `with` block as that of checks."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began


_METRIC = "gradient_norm"  # and "gradient_norm/<variable>", as `GradientTrainer(report=...)` reports them
_HISTORY, _FEWEST = 20, 10  # norms of a metric: kept, and needed for a verdict
_RATIO, _LEAST = 100.0, 1.0  # norms of gradients differ from step to step, and far more than those of weights
_IN_A_ROW = 3  # reports; a single spike is no explosion


class MetricNorms:
    """Follows the norms of gradients that a training reports.

    A norm explodes if it is a hundred times the median of its last reports, three times in a row.
    """

    def __init__(self) -> None:
        self._norms: dict[str, collections.deque[float]] = {}
        self._high: dict[str, list[int]] = {}  # the steps of the reports in a row that were too high

    def check(self, step: int, metrics: Mapping[str, float], known: Collection[str]) -> list[LearningFinding]:
        """Looks at a report.

        Args:
          step: the global step.
          metrics: of the training.
          known: the keys of earlier findings.
        """
        found = []
        for name, norm in metrics.items():
            if (name != _METRIC and not name.startswith(f"{_METRIC}/")) or not math.isfinite(norm):
                continue
            history = self._norms.setdefault(name, collections.deque(maxlen=_HISTORY))
            usual = statistics.median(history) if len(history) >= _FEWEST else math.inf
            if norm <= max(_RATIO * usual, _LEAST):
                history.append(norm)
                self._high.pop(name, None)
                continue
            steps = self._high.setdefault(name, [])
            steps.append(step)
            if len(steps) == _IN_A_ROW and key(EXPLODING, name) not in known:
                found.append(_finding(name, norm, usual, len(history), steps[0]))
        return found


def _finding(name: str, norm: float, usual: float, count: int, since: int) -> LearningFinding:
    times = f"{norm / usual:.3g} times" if usual else "above"
    return LearningFinding(
        EXPLODING,
        (name,),
        since,
        f"{name} is {norm:.4g}, {times} the median of its last {count} usual reports ({usual:.4g}), in each of the "
        f"last {_IN_A_ROW} reports since step {since:,}",
        "lower the learning rate, or clip gradients (clip_global_norm)",
    )


_SOONEST = 20  # steps between two checks early in a training
_SECONDS_OF_A_VARIABLE = 0.001  # that a check of weights may take, before one was made
_SECONDS_TO_LIST = 0.005  # the variables
_MOST_KNOWN = 100_000  # findings in a checkpoint


class LearningWarnings(Action):
    """Warns, with the evidence, of a training that runs without an error and loses its meaning.

    It looks for weights without a gradient, predictions that are equal for all examples, weights that no longer change,
    and norms that explode against their own history. A warning is logged once in a run, is part of `run.json`, and is
    shown on the report page. Nothing that the run computes changes. Where several workers train, the chief watches
    reported norms alone.

    Args:
      every: steps between two checks of the weights, at least, and fewer early in a training; they are made with a
        report.
      share: of the time of the training that all checks may take, beside a fifth of a second.

    Raises:
      UsageError: for bad input.

    Example:
        ```python
        looplib.Controller(..., model_dir="/tmp/run", actions=[looplib.LearningWarnings()])
        ```
    """

    def __init__(self, every: int = 100, share: float = 0.004) -> None:
        self._every = whole_number("every of LearningWarnings", every)
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ActionError(f"share of LearningWarnings is {share!r:.100}; expected a share such as 0.004, for 0.4%")
        self._budget = Budget(float(share))
        self._known: set[str] = set()
        self._weights, self._norms, self._outputs = WeightChecks(), MetricNorms(), ConstantOutputs()
        self._trained: TrainedVariables | None = None  # of the loops
        self._loops: list[Loop] = []
        self._first = 0  # the step of the first check of the weights
        self._checked: int | None = None  # the step of the last one
        self._seconds: float | None = None  # that it took
        self._failed = self._is_training = self._several = False

    @property
    def seconds(self) -> float:
        """The seconds that the checks of this training have taken."""
        return self._budget.seconds

    def on_start(self, controller: Any) -> None:
        """Takes the loops of a training; the time counts from the first one on."""
        self._is_training = True
        # What the chief alone reads of variables and data would have it wait for workers that do not.
        self._several = controller.report.facts.strategy.startswith("MultiWorker")
        loops = list(controller.loops.values())
        if loops == self._loops or not controller.is_chief:  # a program may train many times
            return
        if not self._loops:
            self._budget.begin()
            self._known.update(_earlier(controller.report.path))
        self._loops, self._trained = loops, None

    def on_end(self, controller: Any) -> None:
        """Notes that the training has ended."""
        self._is_training = False

    def on_exception(self, error: BaseException, controller: Any) -> None:
        """Notes that the training has ended."""
        self._is_training = False

    def __call__(self, event: Event) -> None:
        """Looks at what fits into the time, and warns."""
        if self._failed or not event.controller.is_chief:
            return
        try:
            found = self._of_training(event) if event.split == "train" else self._of_evaluation(event)
            for finding in found:
                self._warn(finding, event)
        except Exception as error:  # what only warns never ends a run
            self._failed = True
            logging.warning("LearningWarnings looks no further, because a check failed: %s", gist(error))

    def _of_training(self, event: Event) -> list[LearningFinding]:
        found = self._norms.check(event.step, event.metrics, self._known)
        loops = event.controller.loops
        if self._several or "train" not in loops or not self._is_due(event.step):
            return found
        if self._trained is None:
            if not self._budget.allows(_SECONDS_TO_LIST):
                return found
            with self._budget.spending():
                self._trained = TrainedVariables(loops["train"])
            found += self._trained.unreached(event.step, self._known)
            self._known.update(one for finding in found for one in finding.keys)
        before = self._checked if self._checked is not None and self._checked < event.step else event.step - 1
        trained = self._trained.between(before, event.step)
        expected = self._seconds if self._seconds is not None else _SECONDS_OF_A_VARIABLE * len(trained)
        if not trained or not self._budget.allows(expected):
            return found
        self._first = event.step if self._checked is None else self._first
        started, self._checked = time.perf_counter(), event.step
        with self._budget.spending():
            found += self._weights.check(event.step, trained, self._known)
        self._seconds = time.perf_counter() - started
        return found

    def _is_due(self, step: int) -> bool:
        """Returns whether so many steps have passed since the last check, or the run went back."""
        distance = min(self._every, max(_SOONEST, (step - self._first) // 4))
        return self._checked is None or not 0 <= step - self._checked < distance

    def _of_evaluation(self, event: Event) -> list[LearningFinding]:
        loop, compiled = event.controller.loops.get(event.split), event.controller.clock.of("compile")
        if self._several or loop is None or not self._budget.allows(self._outputs.seconds(event.split, loop, compiled)):
            return []
        with self._budget.spending():
            return self._outputs.check(event.split, loop, event.step, event.ending, self._known)

    def _warn(self, finding: LearningFinding, event: Event) -> None:
        self._known.update(finding.keys)
        logging.warning("step %d: %s; %s", event.step, finding.text, finding.advice)
        report = event.controller.report
        report.note(
            RunWarning(event.step, finding.kind, [*finding.subjects], finding.since, finding.text, finding.advice)
        )
        if self._is_training:
            report.write("running")  # now: a start that is killed writes nothing, and the next one would warn again

    def state(self) -> dict[str, Any]:
        """See `Action`."""
        return {"known": sorted(self._known), "norms": self._weights.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """See `Action`; what this process has warned of stays known."""
        known, norms = state["known"], state["norms"]
        if not isinstance(known, list) or not all(isinstance(one, str) for one in known) or len(known) > _MOST_KNOWN:
            raise ValueError("expected a list of texts")
        if not isinstance(norms, dict):
            raise ValueError("expected a dict of norms")
        self._weights.load(norms)
        self._known.update(known)
        self._checked = None


def _earlier(path: str | None) -> Iterator[str]:
    """Yields the keys of what earlier starts of a run have found, as far as its `run.json` says it."""
    report = read_report(path) if path else None
    for start in report.starts if report else ():
        for one in start.warnings:
            yield from (key(one.kind, subject) for subject in one.subjects)

"""The data digest of a run (`--data_digest`): a running checksum of all training examples, as a part of checkpoints."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from looplib import files
from looplib.errors import ActionError
from looplib.extras.tools.example_checksum import METRIC, ExampleSum
from looplib.loop.reducer import Reducer
from looplib.report.records import Record
from looplib.task.actions import Action, Event
from looplib.task.record import RunningTotals, RunRecord

_LARGEST = 2**53
_NOT_BEGUN = -1


@dataclasses.dataclass(frozen=True)
class DigestAt:
    """What a checkpoint knows of the data so far.

    Attributes:
      since: the step after which the digest begins: 0 if it was on from the start; -1 before the first step.
      step: the step up to which it goes.
      examples: how many examples it covers.
      checksum: the sum of their hashes, modulo 2**53.
      reported_examples: how many of them the reports have.
      reported_checksum: the sum of the hashes of these.
    """

    since: int
    step: int
    examples: int
    checksum: int
    reported_examples: int
    reported_checksum: int

    def __post_init__(self) -> None:
        if any(abs(value) >= _LARGEST for value in dataclasses.astuple(self)) or self.checksum < 0:
            raise files.MisfitError(f"{self} is no digest of data")

    @property
    def total(self) -> ExampleSum:
        """The examples up to the step."""
        return ExampleSum(self.examples, self.checksum)

    @property
    def reported(self) -> ExampleSum:
        """The examples up to the last report."""
        return ExampleSum(self.reported_examples, self.reported_checksum)

    def __str__(self) -> str:
        since = f"{self.since + 1:,}" if self.since >= 0 else "1"
        return f"digest {self.total.text} of {self.examples:,} examples of steps {since} to {self.step:,}"


class DataDigest(Action):
    """Adds up the checksums of the training's examples; the sum is a part of each checkpoint.

    It depends on the content of the examples and the steps that trained on them alone: not on replicas, workers, the
    engine, `steps_per_loop`, or kills and restarts. Steps that a rollback has undone, or a guard skipped, do not count.
    `RunConfig.data_digest` makes it.

    Raises:
      UsageError: when a training starts, for a trainer whose data looplib does not read.
    """

    def __init__(self) -> None:
        self._since = _NOT_BEGUN
        self._reported = ExampleSum()  # up to the last report
        self._loaded: DigestAt | None = DigestAt(_NOT_BEGUN, 0, 0, 0, 0, 0)  # of a checkpoint, until a training starts
        self._controller: Any = None

    def on_start(self, controller: Any) -> None:
        """Continues from the step of the controller, with what a checkpoint has."""
        training = controller.loops["train"]
        if training.batches is None or controller.report.computation.strategy.startswith("ParameterServer"):
            raise ActionError(
                f"data_digest needs the examples of each step, and {training.who} has data that looplib does not read "
                "in the order of its steps (of Orbit, or with parameter servers); leave out --data_digest"
            )
        self._controller = controller
        if self._loaded is None:
            return
        found = self._open()
        if found is not None:  # without the metrics of the checkpoint, if the program's have changed
            self._reported = self._loaded.total - found
        if self._since == _NOT_BEGUN:
            self._since = controller.global_step
        self._loaded = None

    def __call__(self, event: Event) -> None:
        """Adds the examples of a report."""
        if event.split == "train":
            window = ExampleSum.of_record(event.metrics)
            if window is None:
                who = self._controller.loops["train"].who
                raise ActionError(
                    f"data_digest has found nothing to add up: no batch of {who}.dataset has a tensor with a row for "
                    "each example; leave out --data_digest"
                )
            self._reported += window

    def state(self) -> dict[str, int]:
        """See `Action`; workers wait for each other."""
        if self._loaded is not None:
            return dataclasses.asdict(self._loaded)
        total, reported = self._reported + (self._open() or ExampleSum()), self._reported
        step = self._controller.global_step
        return dataclasses.asdict(
            DigestAt(self._since, step, total.examples, total.checksum, reported.examples, reported.checksum)
        )

    def load(self, state: Any) -> None:
        """See `Action`."""
        found = files.typed(state, DigestAt)
        self._since, self._reported = found.since, found.reported
        if self._controller is None:
            self._loaded = found
        elif found.since == _NOT_BEGUN:  # back to a checkpoint from before the digest was asked for
            self._since = self._controller.global_step

    def _open(self) -> ExampleSum | None:
        """Returns what the steps since the last report have summed; None before the first step of an eager loop."""
        reducer = self._controller.loops["train"].reducer
        if not isinstance(reducer, Reducer) or not reducer.created or METRIC not in reducer.packer.names:
            return None
        state = reducer.state()
        totals = np.sum(state.totals if isinstance(state, RunningTotals) else [], axis=0)
        start = reducer.packer.start_of(METRIC)
        return ExampleSum.of_parts(totals[start : start + 4])


def digest_of(record: RunRecord) -> DigestAt | None:
    """Returns the digest that a checkpoint has; None for one without.

    Args:
      record: its run record, which may come from somebody else.
    """
    try:
        found = files.typed(record.actions.get(f"{DataDigest.__name__}()"), DigestAt)
    except files.MisfitError:
        return None
    return found if found.since >= 0 else None


def digests_of(records: Iterable[Record]) -> dict[tuple[int, int], ExampleSum]:
    """Returns what a run trained on, by (the step after which a digest begins, the step up to which it goes).

    Args:
      records: the records of a `metrics.jsonl`, in the order of their steps.
    """
    found: dict[tuple[int, int], ExampleSum] = {}
    since, total = 0, ExampleSum()
    for record in records:
        if record["split"] != "train":
            continue
        if (window := ExampleSum.of_record(record)) is None:  # nothing is known of the steps up to here
            since, total = record["step"], ExampleSum()
            continue
        total += window
        found[since, record["step"]] = total
    return found


def where_data_differs(one: dict[tuple[int, int], ExampleSum], other: dict[tuple[int, int], ExampleSum]) -> str:
    """Says whether two runs trained on equal data, and up to which step, as a clause; "" if their digests do not tell.

    Args:
      one: the digests of a run, by (the step after which they begin, the step up to which they go).
      other: those of the other one.
    """
    common = one.keys() & other.keys()
    if not common:
        return ""
    since = reached = min(since for since, _ in common)
    begin = f"from step {since + 1} " if since else ""
    for step in sorted(step for start, step in common if start == since):
        if one[since, step] != other[since, step]:
            return f"other examples between steps {reached + 1} and {step}"
        reached = step
    return f"equal {begin}up to step {reached}"

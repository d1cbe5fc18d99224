"""RunObserver: what has happened to a run since one looked last, from the files of its directory alone."""

import os
from collections.abc import Iterator, Sequence
from typing import Any

from looplib import files
from looplib.extras.alerts.alert import Alert, Condition
from looplib.extras.page import values
from looplib.extras.page.run_status import RunStatus, read_status
from looplib.report import run_json
from looplib.report.records import Record, parse_line

ENDED = ("done", "failed", "preempted", "killed")
_MOST_BYTES = 1 << 22  # of records for one look
_NAMES = ("step", "split")  # of a record, which are no metrics
_SENTENCES = {
    "done": "the training has reached its end",
    "failed": "the run has failed",
    "preempted": "the run was ended by a signal or its time limit, and is saved",
    "killed": "its process is gone without a word; run the same command to resume",
}


class RunObserver:
    """Finds what is new about a run.

    The first look finds nothing about starts that have ended before it, except about the process that `process` names.

    Args:
      folder: the run directory, whose contents may be anything.
      conditions: on metrics.
      process: the id of the process that an alert is expected of, or None.
    """

    def __init__(self, folder: str, conditions: Sequence[Condition] = (), process: int | None = None) -> None:
        self._folder, self._conditions, self._process = folder, conditions, process
        self._records = _NewRecords(os.path.join(folder, "metrics.jsonl"))
        self._looked = False
        self._start: tuple[Any, ...] = ()  # the newest start
        self._state = ""
        self._missing = False  # whether the process was gone at the last look too
        self._process_ended = False  # before it wrote a report
        self._rollbacks = 0
        self._bad: set[str] = set()  # metrics that are not finite
        self._met: set[Condition] = set()  # conditions that the last value has met

    @property
    def has_ended(self) -> bool:
        """Whether the newest start had ended at the last look."""
        return self._process_ended or self._state in ENDED

    def look(self) -> list[Alert]:
        """Returns what has happened since the last look, in the order of steps."""
        report = run_json.read_report(run_json.path_of(self._folder, trains=True))
        status = read_status(self._folder, report)
        newest = (report.get("starts") or [{}])[-1]
        pid = newest.get("process", {}).get("pid")
        if self._process is not None and not self._looked and pid != self._process:
            if _is_alive(self._process):
                return []  # it has not written its report yet
            self._looked, self._state, self._start = True, status.state, (newest.get("started"), pid)
            self._process_ended = True
            return [Alert("killed", self._folder, status.step, "its process has ended before it wrote a report")]
        start = (newest.get("started"), pid)
        is_new = start != self._start
        first, self._looked = not self._looked, True
        if is_new:
            self._start, self._state, self._rollbacks, self._process_ended = start, "", 0, False
            self._bad.clear()
        known = first and self._process is None
        found = [] if known else [*self._of_records(self._records.read())]
        if known:
            self._records.skip()
        found += self._of_rollbacks(newest, known)
        return found + self._of_state(status, known)

    def _of_state(self, status: RunStatus, known: bool) -> list[Alert]:
        state = status.state
        if state == "killed" and not self._missing and not known:
            self._missing = True  # a run that ends writes its report and lets go of its lock in two steps
            return []
        self._missing = state == "killed"
        before, self._state = self._state, state
        if state == before or known:
            return []
        if state == "silent":
            text = status.detail or "the run is alive and reports nothing"
            return [Alert("silent", self._folder, status.step, f"no news for {status.age:.0f} s: {text}")]
        if state in ENDED:
            sentence = status.detail if state in ("failed", "preempted") and status.detail else _SENTENCES[state]
            return [Alert(state, self._folder, status.step, sentence)]
        if before == "silent" and state == "running":
            return [Alert("recovered", self._folder, status.step, "the run reports again")]
        return []

    def _of_rollbacks(self, start: Any, known: bool) -> list[Alert]:
        rollbacks = [values.mapping(each) for each in values.items(start.get("rollbacks"))]
        new, self._rollbacks = rollbacks[self._rollbacks :], len(rollbacks)
        return [] if known else [self._rollback(each) for each in new]

    def _rollback(self, noted: dict[str, Any]) -> Alert:
        reason = values.text(noted.get("reason")) or "no reason is known"
        sentence = f"back to step {values.whole(noted.get('to'))}: {reason}"
        return Alert("rollback", self._folder, values.whole(noted.get("step")), sentence)

    def _of_records(self, records: Sequence[Record]) -> Iterator[Alert]:
        for record in records:
            step, split = values.whole(record["step"]), record["split"]
            if values.number(record.get("skipped_steps")) and split not in self._bad:
                self._bad.add(split)
                yield Alert("not_finite", self._folder, step, f"steps of {split} were skipped by --non_finite=skip")
            for name, value in record.items():
                if name not in _NAMES and value is None and (key := f"{split}/{name}") not in self._bad:
                    self._bad.add(key)
                    yield Alert("not_finite", self._folder, step, f"{key} is NaN or infinite")
            for condition in self._conditions:
                value = values.number(record.get(condition.metric))
                if condition.split != split or value is None:
                    continue
                if not condition.holds(value):
                    self._met.discard(condition)
                elif condition not in self._met:
                    self._met.add(condition)
                    yield Alert("worse", self._folder, step, f"{split}/{condition.metric} is {value:g} ({condition})")


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


class _NewRecords:
    """The records that were added to a `metrics.jsonl` since the last read, also of one that a start has replaced."""

    def __init__(self, path: str) -> None:
        self._path, self._file, self._at = path, (0, 0), 0
        self._steps: dict[str, int] = {}  # the last step of each split

    def read(self) -> list[Record]:
        """Returns the records of the next whole lines, of at most 4 MiB."""
        try:
            with files.open_regular(self._path) as file:
                found = os.fstat(file.fileno())
                if (found.st_dev, found.st_ino) != self._file or found.st_size < self._at:
                    self._file, self._at = (found.st_dev, found.st_ino), 0  # a start has taken records out
                file.seek(self._at)
                text = file.read(_MOST_BYTES)
        except (OSError, files.NotRegularError):
            return []
        end = text.rfind(b"\n") + 1 or (len(text) if len(text) == _MOST_BYTES else 0)
        self._at += end
        records = [record for line in text[:end].splitlines() if (record := parse_line(line))]
        new = []
        for record in records:
            if record["step"] > self._steps.get(record["split"], -1):
                self._steps[record["split"]] = record["step"]
                new.append(record)
        return new

    def skip(self) -> None:
        """Reads all records that there are."""
        before = -1
        while before != self._at:
            before = self._at
            self.read()

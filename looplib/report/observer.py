"""RunObserver: what has happened to a run since one looked last, from the files of its directory alone."""

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from looplib.base import files
from looplib.base.messages import join_names
from looplib.report.alert import Alert, Condition
from looplib.run import run_json, values
from looplib.run.goodput import restored_step
from looplib.run.records import Record, parse_line
from looplib.run.run_status import RunStatus, last_written, read_status

ENDED = ("done", "failed", "preempted", "killed")
_MOST_BYTES = 1 << 22  # of records for one look
_MOST_TAIL = 256  # bytes before the end of what was read, by which a file is known again
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
    A start, a rollback and a new run in the directory begin anew: a metric that is still bad is told again, and so are
    steps that are trained again. What the run has kept is not.

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
        self._missed = set(self._conditions)  # conditions on metrics that no record has had
        self._written, self._since = 0.0, 0.0  # the time of the run's last news, and of this process's timer then

    @property
    def has_ended(self) -> bool:
        """Whether the newest start had ended at the last look."""
        return self._process_ended or self._state in ENDED

    def look(self) -> list[Alert]:
        """Returns what has happened since the last look, in the order of steps."""
        report = run_json.read_report(run_json.path_of(self._folder, trains=True))
        status = read_status(self._folder, report, self._age())
        newest = (report.get("starts") or [{}])[-1]
        pid = newest.get("process", {}).get("pid")
        if self._process is not None and not self._looked and pid != self._process:
            if _is_alive(self._process):
                return []  # it has not written its report yet
            self._looked, self._state, self._start = True, status.state, (newest.get("started"), pid)
            self._process_ended = True
            return [Alert("killed", self._folder, status.step, "its process has ended before it wrote a report")]
        first, self._looked = not self._looked, True
        known = first and self._process is None
        found = self._of_starts(report.get("starts", []), known)
        if known:
            self._records.skip()
        elif first:
            self._records.know(restored_step(newest))  # an earlier process has told of them
        return [*([] if known else self._of_records(self._records.read())), *found, *self._of_state(status, known)]

    def _age(self) -> float | None:
        """Returns the seconds since the last news by the timer of this process; clocks may be set, or be another's."""
        now, written = time.monotonic(), last_written(self._folder)
        if written != self._written:
            age = 0.0 if self._written else max(0.0, time.time() - written)
            self._written, self._since = written, now - age
        return now - self._since if written else None

    def _of_state(self, status: RunStatus, known: bool) -> list[Alert]:
        state = status.state
        if state == "unknown":  # no report can be read at the moment
            return []
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
            if self._missed and self._process is not None:
                missed = join_names(sorted(map(str, self._missed)))
                sentence += f"; no metric of --alert_when was reported for {missed}"
            return [Alert(state, self._folder, status.step, sentence)]
        if before == "silent" and state == "running":
            return [Alert("recovered", self._folder, status.step, "the run reports again")]
        return []

    def _of_starts(self, starts: Sequence[Any], known: bool) -> list[Alert]:
        """Returns the rollbacks since the last look; notes where the run has begun anew."""
        names = [(start.get("started"), start.get("process", {}).get("pid")) for start in starts]
        place = names.index(self._start) if self._start in names else -1
        if place < 0 and self._start and starts:
            self._records.go_back(-1)  # another run
        found = []
        for number in range(max(place, 0), len(starts)):
            if number > place:
                self._start, self._state, self._rollbacks, self._process_ended = names[number], "", 0, False
                self._begin_anew(restored_step(starts[number]))
            rollbacks = [values.mapping(each) for each in values.items(starts[number].get("rollbacks"))]
            for rollback in rollbacks[self._rollbacks :]:
                self._begin_anew(values.whole(rollback.get("to")))
                found.append(self._rollback(rollback))
            self._rollbacks = len(rollbacks)
        return [] if known else found

    def _begin_anew(self, step: int | None) -> None:
        self._bad.clear()
        self._met.clear()
        self._records.go_back(step or 0)

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
                if condition.split == split and condition.metric in record:
                    self._missed.discard(condition)
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
    """The records that were added to a `metrics.jsonl` since the last read.

    Of a file that a start or a rollback has replaced, these are those after the last known step of their split, at most
    the step that the run has gone back to.
    """

    def __init__(self, path: str) -> None:
        self._path, self._file, self._at, self._tail = path, (0, 0, 0), 0, b""
        self._old = 0  # the size of the file when it was found replaced
        self._steps: dict[str, int] = {}  # the last known step of each split
        self._known = -1  # the same of the others

    def know(self, step: int | None) -> None:
        """Notes before the first read that the records up to a step are known."""
        self._known = -1 if step is None else step

    def go_back(self, step: int) -> None:
        """Notes that the run has gone back to a step: records of later ones are new when they come again."""
        self._steps = {split: min(step, last) for split, last in self._steps.items()}
        self._known = min(step, self._known)

    def read(self) -> list[Record]:
        """Returns the records of the next whole lines, of at most 4 MiB."""
        try:
            with files.open_regular(self._path) as file:
                found = os.fstat(file.fileno())
                if self._is_replaced(file, found):
                    self._at, self._tail, self._old = 0, b"", found.st_size
                file.seek(self._at)
                text = file.read(min(_MOST_BYTES, found.st_size - self._at))
        except (OSError, files.NotRegularError):
            return []
        is_old, self._file = self._at < self._old, (found.st_dev, found.st_ino, found.st_mtime_ns)
        text = text[: text.rfind(b"\n") + 1 or (len(text) if len(text) == _MOST_BYTES else 0)]
        self._at, self._tail = self._at + len(text), (self._tail + text)[-_MOST_TAIL:]
        new = []
        for record in filter(None, map(parse_line, text.splitlines())):
            step, last = record["step"], self._steps.get(record["split"], self._known)
            if step > last or not is_old:
                self._steps[record["split"]] = max(step, last)
                new.append(record)
        return new

    def _is_replaced(self, file: BinaryIO, found: os.stat_result) -> bool:
        """Returns whether it is another file, which may have the number of one that was removed."""
        if (found.st_dev, found.st_ino) != self._file[:2] or found.st_size < self._at:
            return True
        if found.st_size == self._at and found.st_mtime_ns != self._file[2]:
            return True
        file.seek(self._at - len(self._tail))
        return file.read(len(self._tail)) != self._tail

    def skip(self) -> None:
        """Reads all records that there are."""
        before = -1
        while before != self._at:
            before = self._at
            self.read()

"""`python -m looplib audit DIR`: intervals of a run trained again, and compared with what the run has kept."""

import contextlib
import os
import random
import re
import tempfile
import time

from looplib.base import folders
from looplib.base.messages import with_cure
from looplib.commands import again, comparing, journal, kind, rerun
from looplib.commands.again import DamagedError, GoneError
from looplib.commands.comparing import Differences
from looplib.commands.intervals import AuditedRun, Interval, choose
from looplib.commands.journal import DIFFERENT, EQUAL, UNKNOWN, Verdict
from looplib.commands.runs import say
from looplib.data.records.reader import changes
from looplib.errors import EXIT_DIFFERENT, EXIT_DONE, EXIT_UNKNOWN, ReplayError, UsageError
from looplib.run import run_json
from looplib.run.commits import Commit
from looplib.task.record import RunningTotals, RunRecord
from looplib.weights.restoring import peek

_SHOWN, _KEPT = 6, 20  # differences that are printed, and kept in the journal
_MOST_GONE = 100  # checkpoints that a run under way may remove before they are copied
_MOST_LINES = 10  # of the changes of the code
_UNKNOWN_CODE = re.compile("not recorded|cannot be compared|not known \\(")  # lines that name no difference


def audit(directory: str, intervals: int = 1, every: bool = False, seed: int | None = None) -> int:
    """Trains random intervals of a run again, and compares them; adds the verdicts to `audit.jsonl`.

    Args:
      directory: the run directory; the run may train meanwhile.
      intervals: how many; those that no audit has tried before come first.
      every: whether to audit every interval that there is.
      seed: of the random choice; default a new one each time.

    Returns:
      The exit code: `EXIT_DONE` if all were equal, `EXIT_DIFFERENT` if one was not, `EXIT_UNKNOWN` if none was audited.

    Raises:
      UsageError: for a run that cannot be audited.
    """
    run, draw = AuditedRun(directory), random.Random(seed)
    results: list[str] = []
    tried: set[tuple[int, int]] = set()
    damaged: set[int] = set()
    gone = 0
    while every or len(results) < intervals:
        run.reread()
        known = run.still_true(journal.read(run.directory))
        interval = choose(run.intervals(damaged), known, tried, draw)
        if interval is None:
            break
        tried.add(interval.place)
        try:
            with tempfile.TemporaryDirectory(prefix="looplib-audit-") as folder:
                verdict = _Audit(run, interval, folder).verdict()
        except GoneError:
            gone += 1
            if gone > _MOST_GONE:
                break
            continue
        except DamagedError as damage:
            say(str(damage))
            damaged.add(damage.step)
            continue
        except UsageError as error:
            if not results:
                raise
            say(f"{interval} are not audited: {error}")
            break
        results.append(verdict.result)
        _keep(run, verdict)
    if not tried:
        raise ReplayError(f"the run in {run.directory} has no interval between two checkpoints yet; wait for the first")
    verdicts = run.still_true(journal.read(run.directory))
    say(f"audited so far: {journal.coverage(verdicts, run.begin, run.reached())}")
    if DIFFERENT in results:
        return EXIT_DIFFERENT
    return EXIT_DONE if EQUAL in results else EXIT_UNKNOWN


def _keep(run: AuditedRun, verdict: Verdict) -> None:
    """Appends a verdict to the journal; where that fails, says so."""
    try:
        journal.append(run.directory, verdict)
    except (OSError, UsageError) as error:
        say(f"the verdict cannot be kept in {run.directory}: {with_cure(error)}")


class _Audit:
    """The audit of one interval.

    Args:
      run: the run.
      interval: the interval.
      folder: an empty directory, for all that is written.
    """

    def __init__(self, run: AuditedRun, interval: Interval, folder: str) -> None:
        self._run, self._interval, self._folder = run, interval, folder
        place = "the start of the run" if interval.first is None else f"the checkpoint of step {interval.begin:,}"
        say(f"{interval}, from {place}")
        self._first = self._secured("first", interval.first) if interval.first else None
        self._last = self._secured("last", interval.last)
        self._of_first = peek(self._first.path)[1] if self._first else None
        self._of_last = peek(self._last.path)[1]

    def _secured(self, name: str, done: Commit) -> Commit:
        return again.secure(done, folders.make_folder(self._folder, name))

    def verdict(self) -> Verdict:
        """Trains and compares; returns the verdict, which it prints."""
        path = self._train("again")
        found = self._compare(self._last.path, path)
        if not found:
            what = f"{found.tensors} tensors of the checkpoint of step {self._interval.end:,}"
            reports = f"{found.records} report" + "s" * (found.records != 1)
            say(f"EQUAL, bit by bit: {self._interval}, {what} and {reports}")
            return self._told(EQUAL)
        if doubt := self._doubt():
            return self._not_known(doubt, found)
        causes = self._causes(path)
        now = run_json.read_report(run_json.path_of(os.path.join(self._folder, "again"), trains=True))
        starts = [self._run.starts[number] for number in self._numbers()]
        other = kind.why_other_bits(starts, now, self._of_first, self._of_last, peek(path)[1])
        if found.data:  # which depends on no machine
            causes.insert(0, f"other examples, by their checksums ({found.of_data()})")
        elif other:
            return self._not_known(f"bits need not be equal: {other}; audit on a machine like the run's", found)
        say("different; once more, to see whether the program repeats itself")
        if self._compare(path, self._train("twice"), os.path.join(self._folder, "again")):
            return self._not_known(
                "two repetitions differ from each other: the steps use something that neither a checkpoint nor the "
                "command holds",
                found,
            )
        return self._different(found, causes)

    def _not_known(self, doubt: str, found: Differences) -> Verdict:
        say(f"not known: {self._interval} differ, but {doubt}")
        return self._told(UNKNOWN, doubt, found)

    def _different(self, found: Differences, causes: list[str]) -> Verdict:
        say(f"DIFFERENT: {self._interval}")
        if found.first_report is not None:
            say(f"  the first report that differs is of step {found.first_report:,}")
        for title, texts in (("variables", found.variables), ("reports", found.reports)):
            for text in texts[:_SHOWN]:
                say(f"  {title}: {text}")
            if len(texts) > _SHOWN:
                say(f"  {title}: {len(texts) - _SHOWN:,} more")
        for cause in causes:
            say(f"  possible cause: {cause}")
        return self._told(DIFFERENT, "", found, causes)

    def _train(self, name: str) -> str:
        return again.train(self._run, self._interval, self._first, os.path.join(self._folder, name))

    def _compare(self, kept: str, path: str, directory: str | None = None) -> Differences:
        other = os.path.dirname(os.path.dirname(path))
        return comparing.compare(kept, path, directory or self._run.directory, other, self._interval.begin)

    def _numbers(self) -> list[int]:
        """Returns the numbers of the starts that trained the interval."""
        begins = self._run.begins()
        steps = [*(begin for begin in begins if self._interval.begin < begin < self._interval.end), self._interval.end]
        return sorted({self._run.start_that_did(step) for step in steps})

    def _doubt(self) -> str:
        """Returns why a difference would prove nothing, as a clause; "" if it does."""
        before = self._of_first or RunRecord(input_offset=-self._interval.begin)
        if (before.rollbacks, before.input_offset) != (self._of_last.rollbacks, self._of_last.input_offset):
            return "the run has gone back to a checkpoint in them, which another training need not repeat"
        if not isinstance(self._of_last.running, RunningTotals):
            return "the trainer has a loop of its own, as Orbit's have, whose place in the data looplib does not know"
        return ""

    def _causes(self, path: str) -> list[str]:
        """Returns what is likely to have caused a difference, as clauses."""
        found, now = [], peek(path)[1]
        if self._of_last.files and now.files and self._of_last.files != now.files:
            clauses = changes(self._of_last.files, now.files)
            found += [f"the training data has changed since: {clause}" for clause in clauses]
        if None not in (self._of_last.examples, now.examples) and self._of_last.examples != now.examples:
            found.append(f"the training data had {self._of_last.examples:,} examples, and has {now.examples:,}")
        with contextlib.suppress(KeyError, TypeError, AttributeError):  # of a report that lacks them
            lines = rerun.differences_now(self._run.report, self._run.directory)
            found += [line.strip() for line in lines[:_MOST_LINES] if not _UNKNOWN_CODE.search(line)]
        return found

    def _told(
        self, result: str, why: str = "", found: Differences | None = None, causes: list[str] | None = None
    ) -> Verdict:
        texts = [*found.variables, *found.reports] if found else []
        return Verdict(
            time=time.time(),
            begin=self._interval.begin,
            end=self._interval.end,
            saved=float(self._interval.last.time),
            rollbacks=self._of_last.rollbacks,
            result=result,
            why=why,
            differences=len(texts),
            variables=texts[:_KEPT],
            causes=(causes or [])[:_KEPT],
        )

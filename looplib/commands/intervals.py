"""`python -m looplib rerun DIR --from=STEP --to=STEP`: an interval of a run trained again, and compared bit by bit."""

import contextlib
import dataclasses
import io
import json
import os
import re
import zipfile
from collections.abc import Collection, Sequence

import numpy as np
import tensorflow as tf

from looplib.base import files, folders
from looplib.base.decoding import decode, parse_json, text
from looplib.base.messages import gist, with_cure
from looplib.base.orders import Order
from looplib.commands import rerun
from looplib.commands.check import say
from looplib.commands.compare import compare_tensors, is_speed
from looplib.commands.replay import Replayable, copy_checkpoint
from looplib.compat import tensorflow as _tf
from looplib.data.records.reader import changes
from looplib.errors import EXIT_DIFFERENT, EXIT_DONE, EXIT_UNKNOWN, FileError, ReplayError, UsageError
from looplib.loop.additions import METRIC
from looplib.processes.child import TemporaryFolder
from looplib.run import commits, started
from looplib.run.commits import Commit
from looplib.run.directory import RunDir
from looplib.run.records import cut_short
from looplib.run.report import RunReport, StartEntry, shown
from looplib.task.record import RunningTotals, RunRecord
from looplib.weights.names import SavedVariables
from looplib.weights.restoring import peek

ANY = -1  # in place of a step
NOTES = "audit.jsonl"  # in the run directory: intervals that were trained again
EQUAL, DIFFERENT, UNKNOWN = "equal", "different", "unknown"
_CODES = {EQUAL: EXIT_DONE, DIFFERENT: EXIT_DIFFERENT, UNKNOWN: EXIT_UNKNOWN}
_SHOWN = 6  # differences that are printed
_MOST_LINES = 10  # of the changes of the code
_LONGEST = 200  # characters
_MOST_SECONDS = 10.0  # that another process may write the notes
_UNKNOWN_CODE = re.compile("not recorded|cannot be compared|not known \\(")  # lines that name no difference
_COMPUTING = ("tensorflow", "keras", "tf_keras", "numpy")  # packages
_TENSOR, _REPLICAS = "tensor ", "replica_state"
# Settings of the process that write to other places, wait for other machines, or end it early; and which it gets.
_WITHOUT = ("notices",)
_FLAGS = ("--nodry_run", "--noestimate", "--max_time=", "--verbosity=-1", "--trackers=", "--metrics_port=")


def rerun_interval(directory: str, begin: int, end: int) -> int:
    """Trains an interval between two checkpoints of a run again, and compares it; notes the result in `NOTES`.

    Args:
      directory: the run directory; the run may train meanwhile.
      begin: the step after which the interval begins, of a checkpoint, or 0 for the start; or `ANY`.
      end: its last step, of a checkpoint; or `ANY`: the next checkpoint. If both are `ANY`, it is the newest interval
        that was not trained again yet.

    Returns:
      The exit code: `EXIT_DONE` if it is equal, `EXIT_DIFFERENT` if not, `EXIT_UNKNOWN` if that cannot be told.

    Raises:
      UsageError: for a run whose intervals cannot be trained again, or if there is no such interval.
    """
    run, damaged = _Run(directory), set()
    while True:
        run.report = started.report_of(run.directory)  # the run may have gone on
        interval = run.pick(begin, end, damaged)
        try:
            with TemporaryFolder() as folder:
                result = _Repetition(run, interval, folder).result()
        except GoneError:
            continue
        except DamagedError as damage:
            say(str(damage))
            damaged.add(damage.step)
            continue
        _note(run.directory, interval.noted(result))
        tried, every = run.untried(damaged)
        say(f"trained again so far: {every - len(tried)} of the {every} intervals between checkpoints that are there")
        return _CODES[result]


class GoneError(Exception):
    """A checkpoint was removed while it was copied, by a run that trains and keeps few."""


class DamagedError(Exception):
    """A checkpoint is damaged, or cannot be read."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(f"the checkpoint of step {step:,} is damaged: {reason}")
        self.step = step


# Which intervals there are, and which were trained again.


@dataclasses.dataclass(frozen=True)
class NotedInterval:
    """A line of `NOTES`.

    Attributes:
      begin: the step after which the interval begins.
      end: its last step.
      saved: when the checkpoint of that step was committed: one that is saved again is another one.
      result: `EQUAL`, `DIFFERENT` or `UNKNOWN`.
    """

    begin: int
    end: int
    saved: float
    result: str


@dataclasses.dataclass(frozen=True)
class Interval:
    """The steps between two checkpoints.

    Attributes:
      begin: the step after which it begins.
      first: the checkpoint of that step; None for the start of the run.
      last: the checkpoint of its last step.
    """

    begin: int
    first: Commit | None
    last: Commit

    def noted(self, result: str) -> NotedInterval:
        """Returns the line about it."""
        return NotedInterval(self.begin, self.last.step, float(self.last.time), result)

    def __str__(self) -> str:
        return f"steps {self.begin + 1:,} to {self.last.step:,}"


def notes(directory: str) -> list[NotedInterval]:
    """Returns the intervals of a run that were trained again; lines that are none are left out.

    Raises:
      UsageError: if the file cannot be read.
    """
    path, found = os.path.join(directory, NOTES), []
    try:
        lines = files.read_text(path).splitlines() if os.path.lexists(path) else []
    except (OSError, ValueError) as error:
        raise ReplayError(f"{path} cannot be read ({gist(error)}); move it away to begin a new one") from error
    for line in lines:
        with contextlib.suppress(ValueError):
            found.append(decode(NotedInterval, parse_json(line), strict=True))
    return found


def _note(directory: str, noted: NotedInterval) -> None:
    path = os.path.join(directory, NOTES)
    try:
        with files.appending(path, _MOST_SECONDS) as file:
            line = json.dumps(dataclasses.asdict(noted)) + "\n"
            file.write((b"\n" if cut_short(path) else b"") + line.encode())
    except (OSError, UsageError) as error:
        say(f"the result cannot be noted in {directory}: {with_cure(error)}")


class _Run(Replayable):
    """A run of one process whose intervals can be trained again; see `Replayable`."""

    def _points(self, damaged: Collection[int]) -> dict[int, Commit | None]:
        """Returns the steps at which intervals begin and end, in order, with their checkpoints; None for the start."""
        begin = self.begins()[0] if self.starts else 0
        points: dict[int, Commit | None] = {}
        if not begin or self.report.flags.get("continue_from"):
            points[begin] = None
        kept = [done for done in reversed(self.checkpoints()) if done.step >= begin and done.step not in damaged]
        return points | {done.step: done for done in kept}

    def untried(self, damaged: Collection[int]) -> tuple[list[Interval], int]:
        """Returns the intervals between successive checkpoints that were not trained again, and how many all are."""
        points = list(self._points(damaged).items())
        intervals = [Interval(step, first, last) for (step, first), (_, last) in zip(points, points[1:])]
        known = [dataclasses.replace(one, result="") for one in notes(self.directory)]
        return [one for one in intervals if one.noted("") not in known], len(intervals)

    def pick(self, begin: int, end: int, damaged: Collection[int]) -> Interval:
        """Returns the interval that is meant, see `rerun_interval`."""
        points = self._points(damaged)
        steps = list(points)
        if len(steps) < 2:
            raise ReplayError(f"the run in {self.directory} has no interval between two checkpoints yet; wait for one")
        if begin == end == ANY:
            left, every = self.untried(damaged)
            if not left:
                raise ReplayError(
                    f"all {every} intervals between checkpoints of {self.directory} were trained again, see {NOTES}; "
                    "name one by --from=STEP to train it once more"
                )
            return left[-1]
        begin = max((step for step in steps if step < end), default=ANY) if begin == ANY else begin
        end = min((step for step in steps if step > begin), default=ANY) if end == ANY else end
        if begin not in steps or end not in steps or begin >= end:
            raise ReplayError(
                f"the run in {self.directory} has no interval from step {'ANY' if begin == ANY else begin} to "
                f"{'ANY' if end == ANY else end}; expected two of its intact checkpoints: {', '.join(map(str, steps))}"
            )
        return Interval(begin, points[begin], points[end])

    def segments(self, interval: Interval) -> list[tuple[int, int]]:
        """Returns the parts of an interval that one command each trains: (the number of its start, its last step).

        A start that had the settings of the one before is a part of it: a resumed run continues exactly.
        """
        turns = sorted({begin for begin in self.begins() if interval.begin < begin < interval.last.step})
        found: list[tuple[int, int]] = []
        for end in (*turns, interval.last.step):
            number = self.start_that_did(end)
            if found and not any(self._changed(later) for later in range(found[-1][0] + 1, number + 1)):
                found.pop()
            found.append((number, end))
        return found

    def settings_of(self, number: int) -> list[str]:
        """Returns flags for what later starts have changed in `config.yaml`, from which a command takes settings."""
        before: dict[str, object] = {}
        for later in range(number + 1, len(self.starts)):
            for name, (old, _) in self._changed(later).items():
                before.setdefault(name, old)
        found = []
        for name, old in before.items():
            if not name.startswith("config."):
                continue  # the start's own command has it
            if not isinstance(old, bool | int | float | str):
                raise ReplayError(
                    f"a later start has changed the setting {text(name, 200)}, and its value before, "
                    f"{shown(old)}, cannot be given as a flag"
                )
            found.append(f"--{name}={str(old).lower() if isinstance(old, bool) else old}")
        return found

    def _changed(self, number: int) -> dict[str, tuple[object, object]]:
        return self.starts[number].changed


# One repetition.


def verified_copy(done: Commit, folder: str) -> Commit:
    """Copies a checkpoint, and reads the copy through; returns the copy.

    Args:
      done: the checkpoint.
      folder: an existing directory.

    Raises:
      GoneError: if it was removed meanwhile.
      DamagedError: if it does not read as it was written.
      UsageError: if it cannot be read, or copied, now.
    """
    try:
        copy_checkpoint(done, folder)
        copy = commits.read_marker(commits.path_of(folder, done.step))
        reason = commits.verify(copy)
    except UsageError:  # it cannot be read now, or only by a newer version
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, MemoryError) as error:
        if files.fails_here(error, folder):
            raise FileError(
                f"the checkpoint of step {done.step:,} cannot be copied to {folder}: {with_cure(error)}, or set TMPDIR "
                "to a folder on another one"
            ) from error
        reason = gist(error)
    if not reason:
        return copy
    raise DamagedError(done.step, reason) if os.path.exists(f"{done.path}.commit") else GoneError


class _Repetition:
    """The repetition of an interval.

    Args:
      run: the run.
      interval: the interval.
      folder: for all that is written.
    """

    def __init__(self, run: _Run, interval: Interval, folder: TemporaryFolder) -> None:
        self._run, self._interval, self._folder = run, interval, folder
        place = "the start of the run" if interval.first is None else f"the checkpoint of step {interval.begin:,}"
        say(f"{interval}, from {place}")
        self._first = (
            verified_copy(interval.first, folders.make_folder(folder.path, "first")) if interval.first else None
        )
        self._last = verified_copy(interval.last, folders.make_folder(folder.path, "last"))
        self._of_first = peek(self._first.path)[1] if self._first else None
        self._of_last = peek(self._last.path)[1]

    def result(self) -> str:
        """Trains and compares, and prints what is found; returns the result."""
        again = self._train("again")
        found = self._compare(self._last.path, again, self._run.directory)
        if not found.texts:
            reports = f"{found.records} report" + "s" * (found.records != 1)
            what = f"{found.tensors} tensors of the checkpoint of step {self._interval.last.step:,} and {reports}"
            say(f"EQUAL, bit by bit: {self._interval}, {what}")
            return EQUAL
        if doubt := self._doubt(again, found):
            say(f"not known: {self._interval} differ, but {doubt}")
            return UNKNOWN
        say("different; once more, to see whether the program repeats itself")
        if self._compare(again, self._train("twice"), os.path.join(self._folder.path, "again")).texts:
            say(
                f"not known: {self._interval} differ, but two repetitions differ from each other: the steps use "
                "something that neither a checkpoint nor the command holds"
            )
            return UNKNOWN
        say(f"DIFFERENT: {self._interval}")
        for title, texts in (("variables", found.variables), ("reports", found.reports)):
            for line in texts[:_SHOWN] + [f"{len(texts) - _SHOWN:,} more"] * (len(texts) > _SHOWN):
                say(f"  {title}: {line}")
        for cause in self._causes(again, found):
            say(f"  possible cause: {cause}")
        return DIFFERENT

    def _train(self, name: str) -> str:
        """Trains the interval in a new directory; returns the path of the checkpoint of its last step."""
        model_dir = os.path.join(self._folder.path, name)
        saves = folders.make_folder(model_dir, "checkpoints")
        if self._first:
            copy_checkpoint(self._first, saves)
        for number, end in self._run.segments(self._interval):
            command = started.command_of(self._run.report, self._run.directory, number).without(*_WITHOUT)
            command = command.adding(*self._run.settings_of(number), f"--model_dir={model_dir}", *_FLAGS)
            order = Order(example_checksums=started.has_checksums(self._run.directory), until=end)
            given = order.give(os.path.join(self._folder.path, f"{name}-{end}.json"))
            if code := self._run.train(command, given, self._folder, lambda: self._news(model_dir)):
                raise self._run.failed(code, end, self._folder)
            newest = commits.newest(saves)
            if newest is None or newest.step != end:
                ended = f"at step {newest.step}" if newest else "without a checkpoint"
                raise ReplayError(
                    f"the command ended {ended} by itself, and the run had gone on to step {end}: its data, code or "
                    "settings are not those that it had"
                )
        return commits.path_of(saves, self._interval.last.step)

    def _news(self, model_dir: str) -> str:
        steps = [record.step for record in RunDir(model_dir).records().tail()]
        return f"at step {max(steps):,} of {self._interval.last.step:,}" if steps else "starting"

    def _compare(self, kept: str, again: str, directory: str) -> "_Differences":
        other = os.path.dirname(os.path.dirname(again))
        return _compare(kept, again, directory, other, self._interval)

    def _doubt(self, again: str, found: "_Differences") -> str:
        """Returns why a difference would prove nothing, as a clause; "" if it does."""
        before = self._of_first or RunRecord(input_offset=-self._interval.begin)
        if (before.rollbacks, before.input_offset) != (self._of_last.rollbacks, self._of_last.input_offset):
            return "the run has gone back to a checkpoint in them, which another training need not repeat"
        if not isinstance(self._of_last.running, RunningTotals):
            return "the trainer has a loop of its own, as Orbit's have, whose place in the data looplib does not know"
        if found.data:  # which depends on no machine
            return ""
        begins = self._run.begins()
        turns = [begin for begin in begins if self._interval.begin < begin < self._interval.last.step]
        numbers = sorted({self._run.start_that_did(step) for step in (*turns, self._interval.last.step)})
        now = RunDir(os.path.join(self._folder.path, "again")).report() or RunReport()
        records = (self._of_first or RunRecord(), self._of_last, peek(again)[1])
        other = _why_other_bits([self._run.starts[number] for number in numbers], now, records)
        return f"bits need not be equal: {other}; repeat it on a machine like the run's" if other else ""

    def _causes(self, again: str, found: "_Differences") -> list[str]:
        """Returns what is likely to have caused a difference, as clauses."""
        causes = [f"other examples, by their checksums ({found.data})"] if found.data else []
        then, now = self._of_last, peek(again)[1]
        if then.files and now.files and then.files != now.files:
            causes += [f"the training data has changed since: {clause}" for clause in changes(then.files, now.files)]
        if None not in (then.examples, now.examples) and then.examples != now.examples:
            causes.append(f"the training data had {then.examples:,} examples, and has {now.examples:,}")
        lines = rerun.differences_now(self._run.report, self._run.directory)
        causes += [line.strip() for line in lines[:_MOST_LINES] if not _UNKNOWN_CODE.search(line)]
        return causes


def _why_other_bits(starts: Sequence[StartEntry], now: RunReport, records: Sequence[RunRecord]) -> str:
    """Returns why an interval need not have the bits that it had, as clauses; "" if it has to.

    That takes one kind of machine, one engine, one version.

    Args:
      starts: those of the run that trained the interval.
      now: the report of the training that was to repeat it.
      records: those of its first and its last checkpoint, and of the one that was made again.
    """
    found: list[str] = []
    here, flags = now.newest, now.flags
    machine = here.machine[-1] if here.machine else None
    for start in starts:
        then = start.machine[-1] if start.machine else None
        unknown = ["run.json does not say what kind of machine it was"]
        found += then.differences(machine) if then and machine else unknown
        versions = start.versions, here.versions
        pairs = [(name, *(version.get(name) for version in versions)) for name in _COMPUTING]
        pairs.append(("the number of replicas", start.num_replicas, here.num_replicas))
        found += [f"{name} was {shown(a)}, and is {shown(b)}" for name, a, b in pairs if a != b]
    if flags.get("loop") == "auto" and here.num_replicas == 1:
        chosen = [record.engines.get("train") for record in records]
        engines = {(one.loop, one.chunk) if one else None for one in chosen}
        if len(engines) > 1 or engines == {None}:
            found.append("--loop=auto had not chosen one engine for all of these steps")
    if machine and machine.devices and not flags.get("deterministic"):
        found.append(f"ops on a {machine.devices[0]} need not be deterministic without --deterministic")
    return "; ".join(list(dict.fromkeys(found))[:_SHOWN])


# What is compared: the tensors of the last checkpoint, and the reports.


@dataclasses.dataclass
class _Differences:
    """What differs between an interval and its repetition.

    Attributes:
      tensors: how many tensors were compared.
      variables: a text for each variable that differs.
      records: how many reports were compared.
      reports: a text for each number of a report that differs, in the order of their steps.
      data: the first text about a checksum of examples; "" if these are equal.
    """

    tensors: int
    variables: list[str]
    records: int = 0
    reports: list[str] = dataclasses.field(default_factory=list)
    data: str = ""

    @property
    def texts(self) -> list[str]:
        """All of them."""
        return self.variables + self.reports


def _compare(kept: str, again: str, directory: str, other: str, interval: Interval) -> _Differences:
    """Compares the checkpoints `kept` and `again`, and the reports in the directories of the two, bit by bit."""
    compared = compare_tensors(kept, again)
    found = _Differences(compared.tensors, _of_replicas(kept, again))
    names = _names_of(kept) if compared.differences else {}
    for difference in compared.differences:
        tensor = difference.where.removeprefix(_TENSOR)
        named = dataclasses.replace(difference, where=names.get(tensor, tensor))
        found.variables.append(text(named.text("then", "now"), _LONGEST))
    ones, others = (RunDir(place).records().by_key() for place in (directory, other))
    for step, split in sorted(ones.keys() & others.keys()):
        if not interval.begin < step <= interval.last.step:
            continue
        found.records += 1
        one, now = ones[step, split], others[step, split]
        for name in sorted(one.keys() & now.keys(), key=lambda name: (name != METRIC, name)):
            if is_speed(name) or one[name] == now[name]:
                continue
            said = text(f"step {step} {split} {name}: {one[name]} then, {now[name]} now", _LONGEST)
            found.data = found.data or (said if name == METRIC else "")
            found.reports.append(said)
    return found


def _names_of(path: str) -> dict[str, str]:
    """Returns names of a checkpoint's variables by their keys, without the ending; of a slot, what it is kept for."""
    reader = tf.train.load_checkpoint(path)
    if (graph := _tf.object_graph(reader)) is None:
        return {}
    roots = {child.local_name: tf.train.Checkpoint() for child in graph.nodes[0].children}  # placeholders
    roots.pop("save_counter", None)
    leaves = SavedVariables(reader, graph, RunRecord.in_checkpoint(reader, path).names, roots).leaves.values()
    ending = _tf.variable_key("")
    return {
        leaf.key.removesuffix(ending): f"{leaf.kind} of {leaf.origin.name}" if leaf.origin else leaf.name
        for leaf in leaves
    }


def _of_replicas(kept: str, again: str) -> list[str]:
    """Returns a text for each variable of which a replica has another value."""
    ones, others = _replica_values(kept), _replica_values(again)
    differing = [name for name in ones.keys() | others.keys() if ones.get(name) != others.get(name)]
    return [f"{text(name, _LONGEST)}: the values of the replicas" for name in sorted(differing)]


def _replica_values(path: str) -> dict[str, tuple[object, ...]]:
    """Returns the values that differ between replicas, by name; {} where there are none."""
    reader, name = tf.train.load_checkpoint(path), _tf.python_state_key(_REPLICAS)
    content = reader.get_tensor(name) if reader.has_tensor(name) else b""
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return {name: (value.dtype, value.shape, value.tobytes()) for name, value in arrays.items()}
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile):
        return {"what differs between replicas": (content,)} if content else {}

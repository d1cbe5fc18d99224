"""Compares two run directories: metrics, examples and final checkpoints, but no times."""

import collections
import dataclasses
import os
import re
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.compat import tensorflow as _tf
from looplib.errors import CheckError
from looplib.loop import additions
from looplib.run.commits import latest_checkpoint
from looplib.run.directory import RunDir
from looplib.run.report import RunReport
from looplib.task.plain import gaps
from looplib.weights.restoring import peek

# Not compared bit by bit.
_NOT_COMPARED = (
    _tf.OBJECT_GRAPH_KEY,
    _tf.variable_key("save_counter"),
    _tf.python_state_key("run_state"),  # JSON, which is compared value by value
    _tf.python_state_key("replica_state"),  # a zip file holds the time; its values decide the other files
    _tf.python_state_key("input_state"),  # depends on how full a pipeline's buffers were
)
_TIMES_ROUNDING = 20.0  # rounding varies from step to step; an error in a step is off by thousands of times
_DECIDED = 0.01  # where rounding has moved the weights that far, runs lie apart by any factor
_TENSOR = "tensor "
_TRAINED = re.compile(r"step (\d+) train ")
# Of actions and callbacks; what `LearningWarnings` has looked at depends on the time that it may take.
_TIMES_OF_ACTIONS = re.compile(r"(\b|_)(seconds?|time|clock)(\b|_)|^LearningWarnings\(")
_SPEED = re.compile("per_second$|share_of_peak$")


@dataclasses.dataclass(frozen=True)
class Difference:
    """Two values that were compared.

    Attributes:
      where: what they are values of, such as "tensor NAME" or "step 3 train loss".
      one: the first one as text; of arrays, an element with its place.
      other: the second one.
      count: how many elements of arrays differ, as text; "" for other values.
    """

    where: str
    one: str
    other: str
    count: str = ""

    def text(self, first: str, second: str) -> str:
        """Returns both with words that say whose they are."""
        return f"{self.where}: {self.one} {first}, {self.other} {second}" + (f", {self.count}" if self.count else "")


@dataclasses.dataclass
class Comparison:
    """The result of comparing two run directories.

    Attributes:
      records: how many records of `metrics.jsonl` the first has.
      tensors: how many tensors its last checkpoint has.
      bytes: their size.
      examples: whether the training records of both have checksums of the examples.
      differences: the values that are not equal.
      gaps: the largest absolute difference of each number, or of each tensor's elements, by where it is.
      relative_gaps: that relative to the first's number, or to the tensor's largest element, by where it is.
      weights: whether the elements of floating-point tensors were compared.
      largest: (relative difference, the values) by split, or "final checkpoint" of `weights`.
    """

    records: int = 0
    tensors: int = 0
    bytes: int = 0
    examples: bool = False
    differences: list[Difference] = dataclasses.field(default_factory=list)
    largest: dict[str, tuple[float, Difference]] = dataclasses.field(default_factory=dict)
    gaps: dict[str, float] = dataclasses.field(default_factory=dict)
    relative_gaps: dict[str, float] = dataclasses.field(default_factory=dict)
    weights: bool = True

    def add(self, split: str, where: str, one: Any, other: Any, rtol: float, atol: float, slack: float = 0.0) -> None:
        """Compares one value of each."""
        same, relative, gap, texts = _compare(one, other, rtol, atol, slack)
        if gap is not None:
            self.gaps[where] = gap
        if relative is not None:
            self.relative_gaps[where] = relative
        pair = Difference(where, *texts)
        if not same:
            self.differences.append(pair)
        if split and relative is not None and (split not in self.largest or relative >= self.largest[split][0]):
            self.largest[split] = relative, pair

    def tensors_apart(self) -> dict[str, float]:
        """Returns the `relative_gaps` of floating-point tensors."""
        return {where: gap for where, gap in self.relative_gaps.items() if where.startswith(_TENSOR)}


def compare(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    rtol: float = 0.0,
    atol: float = 0.0,
    rounding: Sequence[Comparison] = (),
) -> Comparison:
    """Compares the metrics, the final metrics and the last checkpoints of two run directories.

    Args:
      first: a run directory.
      second: the other.
      rtol: relative tolerance of metrics and floating point tensors; with 0 for both, all is compared bit by bit.
      atol: absolute tolerance of metrics and floating point tensors.
      rounding: comparisons of the first with runs that differ from it by rounding alone. A number of the second may be
        off by 20 times as much, and one that counts examples, such as an accuracy, by four of them. Floating-point
        tensors may be off by anything if `decided_by_rounding`.

    Returns:
      The `Comparison`.

    Raises:
      UsageError: if one has no checkpoint.
    """
    result = Comparison(weights=not decided_by_rounding(rounding))
    replicas_differ = bool(rtol or atol)
    ones, others = _numbers(first, replicas_differ), _numbers(second, replicas_differ)
    slack = _slack(first, ones, rounding) if rounding else {}
    if not result.weights:  # a NaN is no rounding
        slack |= {where: sys.float_info.max for run in rounding for where in run.tensors_apart()}
    for split, where in [*ones, *(key for key in others if key not in ones)]:
        exact = where.endswith((additions.METRIC, "records"))
        tolerances = (0, 0) if exact else (rtol, atol, slack.get(where, 0.0))
        result.add(split, where, ones.get((split, where)), others.get((split, where)), *tolerances)
    result.records = sum(value for (_, where), value in ones.items() if where.endswith(": records"))
    result.examples = all(any(where.endswith(additions.METRIC) for _, where in run) for run in (ones, others))
    compare_tensors(final_checkpoint(first), final_checkpoint(second), rtol, atol, slack, result)
    return result


def compare_tensors(
    first: str,
    second: str,
    rtol: float = 0.0,
    atol: float = 0.0,
    slack: Mapping[str, float] = types.MappingProxyType({}),
    result: Comparison | None = None,
) -> Comparison:
    """Compares the tensors of two checkpoints; see `compare`.

    Args:
      first: the path of a checkpoint.
      second: the other's.
      rtol: relative tolerance.
      atol: absolute tolerance.
      slack: further absolute tolerances by location.
      result: to be added to; default a new one.

    Returns:
      The `Comparison`.
    """
    result = result or Comparison()
    readers = [tf.train.load_checkpoint(path) for path in (first, second)]
    keys = [reader.get_variable_to_shape_map().keys() - set(_NOT_COMPARED) for reader in readers]
    for key in sorted(keys[0] | keys[1]):  # one at a time, because a model may fill half of the memory
        one, other = (_read(reader, key) if key in own else None for reader, own in zip(readers, keys))
        whole = np.asarray(one).dtype.kind in "iub"  # counters and seeds
        name = key.replace("/.ATTRIBUTES/VARIABLE_VALUE", "")
        where = f"{_TENSOR}{name}"
        tolerances = (0, 0) if whole else (rtol, atol, slack.get(where, 0.0))
        result.add("final checkpoint" if result.weights else "", where, one, other, *tolerances)
        if one is not None:
            result.tensors += 1
            result.bytes += np.asarray(one).nbytes
    return result


def _read(reader: Any, key: str) -> Any:
    """Returns a tensor of a checkpoint; the entries of a lookup table, which have no order, in that of their keys."""
    value, (name, _, part) = reader.get_tensor(key), key.rpartition("/")
    if part not in ("table-keys", "table-values"):
        return value
    keys = reader.get_tensor(f"{name}/table-keys")
    return value[sorted(range(len(keys)), key=lambda number: repr(keys[number]))]


def decided_by_rounding(rounding: Sequence[Comparison]) -> float:
    """Returns by how much rounding alone moves half of the tensors, relative to their size, or 0 if by less than 1%.

    From there on differences no longer grow in proportion, so a few runs give no bound for another run.
    """
    moved = max((float(np.median(list(run.tensors_apart().values()) or 0.0)) for run in rounding), default=0.0)
    return moved if moved > _DECIDED else 0.0


def first_moved_by_rounding(rounding: Sequence[Comparison]) -> int | None:
    """Returns the first training step in whose metrics rounding alone makes a difference of more than 1%, or None."""
    gaps = [(_TRAINED.match(where), gap) for run in rounding for where, gap in run.relative_gaps.items()]
    return min((int(found[1]) for found, gap in gaps if found and gap > _DECIDED), default=None)


def _slack(
    folder: str | os.PathLike[str], numbers: dict[tuple[str, str], Any], rounding: Sequence[Comparison]
) -> dict[str, float]:
    """Returns the absolute difference allowed for each number in addition to the tolerances, by location."""
    slack: dict[str, float] = {}
    for run in rounding:
        slack |= {where: max(_TIMES_ROUNDING * gap, slack.get(where, 0.0)) for where, gap in run.gaps.items()}
    counting = _counting(folder)
    so_far: dict[tuple[str, str], float] = {}  # where rounding is small once, it may grow again
    for split, where in numbers:
        name = where.rsplit(" ", 1)[-1]
        if split:
            so_far[split, name] = slack[where] = max(slack.get(where, 0.0), so_far.get((split, name), 0.0))
        slack[where] = max(slack.get(where, 0.0), counting.get(name, 0.0))
    return slack


def _counting(folder: str | os.PathLike[str]) -> dict[str, float]:
    """Finds the metrics that count examples, such as an accuracy; returns the part that four examples are, by name."""
    report = RunDir(folder).report()
    batch = report.flags.get("global_batch_size") if report else None
    batch = batch if type(batch) is int else 1
    found, before = collections.defaultdict(list), collections.Counter()
    for record in RunDir(folder).records().all():
        step, split, metrics = record.step, record.split, record.numbers
        examples = metrics.get("examples", batch * (step - before[split]))
        before[split] = step
        for name in metrics.keys() - {"examples", additions.METRIC}:
            if not is_speed(name):
                found[name].append((metrics[name], examples))
    return {
        name: 4 / min(examples for _, examples in pairs)
        for name, pairs in found.items()
        if all(examples and x is not None and abs(x * examples - round(x * examples)) < 1e-3 for x, examples in pairs)
    }


def _numbers(folder: str | os.PathLike[str], replicas_differ: bool) -> dict[tuple[str, str], Any]:
    """Returns all numbers of a run but times, by (split, where); those that explain others come first."""
    numbers, counts = {}, collections.Counter()
    records = RunDir(folder).records().all()
    for record in sorted(records, key=lambda one: (one.step, one.split != "train", one.split)):
        step, split, metrics = record.step, record.split, record.numbers
        counts[split, step] += 1
        numbers[split, f"step {step} {split}: records"] = counts[split, step]
        names = [name for name in metrics if not is_speed(name)]
        for name in sorted(names, key=lambda name: (name != additions.METRIC, name)):
            numbers[split, f"step {step} {split} {name}"] = metrics[name]
    run = RunDir(folder).report() or RunReport()
    _, record = peek(final_checkpoint(folder))
    state = dataclasses.asdict(record)
    if replicas_differ:  # then the totals of the replicas are compared as a sum
        state["running"]["totals"] = np.sum(state["running"].get("totals", []), axis=0).tolist()
    for title, tree in (
        ("run.json", {name: vars(run)[name] for name in ("status", "step", "final_step", "metrics")}),
        ("run_state of the final checkpoint", state),
    ):
        numbers.update({("", " ".join((title, *keys))): value for keys, value in _flat(tree) if not _is_time(keys)})
    return numbers


def is_speed(name: str) -> bool:
    """Returns whether a metric is a speed, by its name."""
    return bool(_SPEED.search(name))


def _is_time(keys: Sequence[str]) -> bool:
    """Returns whether a value is a time or a speed, by the names that lead to it."""
    of_actions = keys[0] == "actions" and any(map(_TIMES_OF_ACTIONS.search, keys))
    return of_actions or any(key == "seconds_per_step" or is_speed(key) for key in keys)


def _flat(tree: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not isinstance(tree, (dict, list)):
        yield keys, tree
        return
    for key, value in sorted(tree.items()) if isinstance(tree, dict) else enumerate(tree):
        yield from _flat(value, (*keys, str(key)))


def final_checkpoint(folder: str | os.PathLike[str]) -> str:
    """Returns the path of a run directory's last checkpoint.

    Args:
      folder: the run directory.

    Raises:
      UsageError: if there is none.
    """
    path = latest_checkpoint(os.path.join(folder, "checkpoints"))
    if path is None:
        raise CheckError(f"the command left no checkpoint in {folder}; give one that trains (--mode=train_and_eval)")
    return path


def _compare(
    one: Any, other: Any, rtol: float, atol: float, slack: float
) -> tuple[bool, float | None, float | None, tuple[str, ...]]:
    """Compares JSON values, arrays or None.

    Returns:
      (whether they are equal, the relative and the absolute difference if they have one, the texts of a `Difference`).
    """
    a, b = (np.asarray(x, object if isinstance(x, (bytes, str)) else None) for x in (one, other))
    if one is None or other is None or a.shape != b.shape:
        same = one is None and other is None
        return same, None, None, tuple("nothing" if x is None else _describe(x) for x in (one, other))
    if not rtol or {"O", "b"} & {a.dtype.kind, b.dtype.kind}:
        gap = wrong = _differing(a, b)
        same, relative, most = a.dtype == b.dtype and not wrong.any(), None, None
    else:
        gap, sizes = gaps(a, b).ravel(), np.abs(a if a.dtype.kind == "c" else a.astype(np.float64)).ravel()
        sizes = np.where(np.isfinite(sizes), sizes, 0)  # nothing but itself is within a tolerance of infinity
        wrong = gap > atol + slack + rtol * sizes
        # Relative to the tensor's largest element, because elements near 0 may differ by many times themselves.
        most = float(gap.max(initial=0))
        relative = float(most / max(sizes.max(initial=0), atol)) if most else 0.0
        same = not wrong.any()
    if not a.size:
        return same, relative, most, (_describe(a), _describe(b))
    if not a.shape:
        return same, relative, most, (str(a[()]), str(b[()]))
    at = np.unravel_index(int((gap if same else wrong).argmax()), a.shape)
    prefix = f"{list(map(int, at))} "
    count = f"{int(wrong.sum()):,} of {a.size:,} elements differ" if not same else ""
    return same, relative, most, (f"{prefix}{a[at]}", f"{prefix}{b[at]}", count)


def _differing(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns which elements of two arrays of one shape differ in a bit, bool `[size]`."""
    if a.dtype != b.dtype:
        return np.ones(a.size, bool)
    if a.dtype.kind == "O":  # strings, which lie elsewhere
        return np.array([x != y for x, y in zip(a.ravel().tolist(), b.ravel().tolist())], bool)
    one, other = (np.frombuffer(x.tobytes(), np.uint8).reshape(x.size, x.dtype.itemsize) for x in (a, b))
    return (one != other).any(axis=1)


def _describe(value: Any) -> str:
    array = np.asarray(value)
    return f"{array.dtype} {list(array.shape)}" if array.shape else repr(value)

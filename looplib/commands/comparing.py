"""What an interval that was trained again is compared by: the tensors of its last checkpoint, and its reports."""

import dataclasses
import io
import os
import zipfile
from collections.abc import Iterable, Iterator

import numpy as np
import tensorflow as tf

from looplib.commands.compare import Comparison, compare_tensors, is_speed
from looplib.compat import tensorflow as _tf
from looplib.loop.additions import METRIC
from looplib.run import values
from looplib.run.records import Record, key
from looplib.task.record import RunRecord
from looplib.weights.names import SavedVariables

_TENSOR, _REPLICAS = "tensor ", "replica_state"
_LONGEST = 200  # characters


@dataclasses.dataclass
class Differences:
    """What differs between an interval and its repetition.

    Attributes:
      tensors: how many tensors were compared.
      records: how many reports were.
      variables: a text for each variable that differs.
      reports: a text for each number of a report that differs, in the order of their steps.
      first_report: the step of the first such report, or None.
      data: whether the examples differ, as far as their checksums say.
    """

    tensors: int = 0
    records: int = 0
    variables: list[str] = dataclasses.field(default_factory=list)
    reports: list[str] = dataclasses.field(default_factory=list)
    first_report: int | None = None
    data: bool = False

    def __bool__(self) -> bool:
        return bool(self.variables or self.reports)

    def of_data(self) -> str:
        """Returns the first text about a checksum of examples."""
        return next(text for text in self.reports if METRIC in text)


def compare(kept: str, again: str, directory: str, other: str, begin: int) -> Differences:
    """Compares an interval with its repetition, bit by bit.

    Args:
      kept: the path of its last checkpoint.
      again: the path of the one that was made again.
      directory: the run directory.
      other: the run directory of the repetition.
      begin: the step after which the interval begins.
    """
    compared = compare_tensors(kept, again)
    found = Differences(compared.tensors, variables=_named(compared, kept))
    found.variables += _of_replicas(kept, again)
    ones, others = _records(directory), _records(other)
    end = int(kept.rpartition("-")[2])
    for place in sorted(ones.keys() & others.keys()):
        if begin < place[0] <= end:
            found.records += 1
            _compare_records(ones[place], others[place], found)
    return found


def _named(compared: Comparison, path: str) -> list[str]:
    """Returns a text for each tensor that differs, by the name of its variable."""
    if not compared.differences:
        return []
    names, found = names_of(path), []
    for difference in compared.differences:
        tensor = difference.where.removeprefix(_TENSOR)
        named = dataclasses.replace(difference, where=names.get(tensor, tensor))
        found.append(values.text(named.text("then", "now"), _LONGEST))
    return found


def names_of(path: str) -> dict[str, str]:
    """Returns the names of a checkpoint's variables by their keys, without the ending; of a slot, what it is kept for.

    Args:
      path: the path of the checkpoint.
    """
    reader = tf.train.load_checkpoint(path)
    if (graph := _tf.object_graph(reader)) is None:
        return {}
    names = {child.local_name for child in graph.nodes[0].children} - {"save_counter"}
    roots = {name: tf.train.Checkpoint() for name in names}  # placeholders
    leaves = SavedVariables(reader, graph, RunRecord.in_checkpoint(reader, path).names, roots).leaves.values()
    ending = _tf.variable_key("")
    return {
        leaf.key.removesuffix(ending): f"{leaf.kind} of {leaf.origin.name}" if leaf.origin else leaf.name
        for leaf in leaves
    }


def _of_replicas(kept: str, again: str) -> list[str]:
    """Returns a text for each variable of which a replica has another value."""
    ones, others = _replica_values(kept), _replica_values(again)
    found = []
    for name in sorted(ones.keys() | others.keys()):
        one, other = ones.get(name), others.get(name)
        if one is None or other is None or one.shape != other.shape or one.tobytes() != other.tobytes():
            found.append(f"{values.text(name, _LONGEST)}: the values of the replicas")
    return found


def _replica_values(path: str) -> dict[str, np.ndarray]:
    """Returns the values that differ between replicas, by name; {} where there are none, or none can be read."""
    reader, name = tf.train.load_checkpoint(path), _tf.python_state_key(_REPLICAS)
    content = reader.get_tensor(name) if reader.has_tensor(name) else b""
    if not content:
        return {}
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return dict(arrays.items())
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile):
        return {"what differs between replicas": np.frombuffer(content, np.uint8)}


def _records(directory: str) -> dict[tuple[int, str], Record]:
    return {key(record): record for record in values.metrics(os.path.join(directory, "metrics.jsonl"))}


def _compare_records(one: Record, other: Record, found: Differences) -> None:
    for name in _compared(one, other):
        if one[name] != other[name]:
            step, split = key(one)
            found.first_report = step if found.first_report is None else found.first_report
            found.data |= name == METRIC
            found.reports.append(
                values.text(f"step {step} {split} {name}: {one[name]} then, {other[name]} now", _LONGEST)
            )


def _compared(one: Record, other: Record) -> Iterator[str]:
    names: Iterable[str] = sorted(one.keys() & other.keys(), key=lambda name: (name != METRIC, name))
    return (name for name in names if name not in ("step", "split") and not is_speed(name))

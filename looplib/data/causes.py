"""Why data is slow, which record is refused, and when a pipeline repeats itself."""

import collections
import dataclasses
import itertools
import math
import re
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from absl import logging

from looplib.base.messages import gist
from looplib.compat import tensorflow as _tf
from looplib.data.context import DatasetRequests, InputContext

if TYPE_CHECKING:
    from looplib.data.records.reading import RecordReads

# What a stage does, by a part of the name that TensorFlow gives it. The first that fits counts.
_KINDS = {
    "Generator": "generator",
    "Shuffle": "shuffle",
    "Interleave": "read",
    "FlatMap": "read",
    "TFRecord": "read",
    "TextLine": "read",
    "FixedLengthRecord": "read",
    "CSV": "read",
    "Load": "read",
    "Snapshot": "read",
    "ParseExample": "decode",
    "Map": "map",
    "Filter": "map",
    "Scan": "map",
    "Batch": "batch",
    "Window": "batch",
    "GroupBy": "batch",
}
_NESTED = ("FlatMap", "Interleave")  # whose elements come from data sets that their function makes
_FILES = ("TFRecord", "TextLine", "FixedLengthRecord", "CSV")
_COUNT = ["Scan", "ForeverRepeat", "FromTensor"]  # the stages that count looplib's batches
_ORDER = "of the examples, which looplib shuffles"
_LEAST = 0.25  # of the time, for a stage that is worth a change
_AUTOTUNE = "num_parallel_calls=tf.data.AUTOTUNE"
# AUTOTUNE starts no more calls than there are cores, and tf.data has no more threads for them.
_MORE = "num_parallel_calls=16 and options.threading.private_threadpool_size = 16"
_INTERLEAVE = f"read several files at once: interleave(tf.data.TFRecordDataset, {_AUTOTUNE})"
_FUNCTION_READS = f"; if its function itself reads, do that in a map in front of it, map(read, {_AUTOTUNE})"
_SHORT_STEPS = "the steps are shorter than the shuffling of their examples"
# (kind, whether it runs in parallel already; for the order, whether a map follows) -> what to change.
_ADVICE = {
    ("read", False): _INTERLEAVE,
    ("expand", False): "batch in front of it, and let it return larger pieces; arrays need none of it with "
    f"context.indices or context.resident{_FUNCTION_READS}",
    ("read", True): "move the files nearer, compress them less, or cache() what fits in memory; if it waits for a "
    f"network, cycle_length=16, {_MORE}",
    ("map", False): f"give that map {_AUTOTUNE}",
    ("map", True): f"make its function cheaper, or cache() it; if it waits rather than computes, {_MORE}",
    ("shuffle", False): "shuffle names of files or ids in place of large elements, or use context.indices",
    ("batch", False): f"give that batch {_AUTOTUNE}, or make elements of fewer and smaller tensors",
    ("batch", True): "make elements of fewer and smaller tensors",
    ("copy", False): "copy fewer bytes: integers or bfloat16, cast and augmented in step_fn, or context.resident",
    ("order", False): f"use larger batches: {_SHORT_STEPS}",
    ("order", True): f"use larger batches, or context.resident for arrays that fit on the device: {_SHORT_STEPS}",
    ("generator", False): "write its elements to files, or make them with ops: Python makes one at a time",
    ("loader", False): "let it read in processes of its own, or in more of them (docs/data_loaders.md)",
}


@dataclasses.dataclass(frozen=True)
class Bottleneck:
    """The slowest stage of a pipeline.

    Attributes:
      kind: "read", "expand" (flat_map or interleave of what is no file), "decode", "map", "order", "shuffle", "batch",
        "generator", "loader" or "copy".
      share: its part of the time of all stages, from 0 to 1; time in parallel calls is divided by their number.
      stage: the name of the slowest one of this kind.
      milliseconds: that it takes for one of its elements.
      parallel: how many of these it makes at once, in all data sets that an interleave reads at once.
      tuned: whether tf.data decides how many.
      of_batches: whether its elements are batches.
      reads: how, if it reads the records of `context.records`; milliseconds are those of a record then.
    """

    kind: str
    share: float
    stage: str
    milliseconds: float
    parallel: int
    tuned: bool = False
    of_batches: bool = True
    reads: "RecordReads | None" = None

    def __str__(self) -> str:
        time = f"{self.milliseconds:.0f}" if self.milliseconds >= 10 else f"{self.milliseconds:.2g}"
        at_once = "as many at once as tf.data chooses" if self.tuned else f"{self.parallel} at once"
        each = f"an element, {at_once}"
        if self.reads is not None:
            each = "a record, " + (at_once if self.parallel == 1 else f"with {self.parallel} threads")
        elif self.kind in ("order", "loader"):
            each = "a batch"
        return f"{self.share:.0%} of the pipeline's time is {self.kind} ({self.stage}: {time} ms for {each})"

    @property
    def advice(self) -> str:
        """Advice on what to change."""
        if self.reads is not None:
            return self.reads.advice
        kind, parallel = "map" if self.kind == "decode" else self.kind, self.tuned or self.parallel > 1
        advice = _ADVICE.get((kind, parallel)) or _ADVICE[kind, False]
        if kind == "read" and not parallel and self.stage in map(_users_name, _NESTED):
            return advice + _FUNCTION_READS
        if kind == "map" and parallel and not self.of_batches:
            return "batch before it so that it works on whole batches, " + advice
        return advice


def of(iterator: tf.data.Iterator, copy: float = 0.0, requests: DatasetRequests | None = None) -> Bottleneck | None:
    """Returns the slowest stage of the pipeline behind an iterator since it was made.

    Args:
      iterator: the iterator.
      copy: seconds to copy an element to its device; tf.data keeps no statistics of them.
      requests: of the pipeline, for what reads records or a loader; tf.data has no statistics of that either.

    Returns:
      None if no stage stands out, or TensorFlow has no statistics, as for iterators of tf.distribute and with
      `autotune.enabled = False`.
    """
    try:
        nodes = tf.data.experimental.get_model_proto(iterator).nodes
        return _slowest(nodes, copy * 1e9, requests or DatasetRequests())
    except (AttributeError, TypeError, ValueError, KeyError, tf.errors.OpError):  # other iterators, other versions
        return None


def _slowest(nodes: Any, copy: float, requests: DatasetRequests) -> Bottleneck | None:
    loader, reads = requests.loader, requests.reader.reads if requests.reader else ()
    reading = {number: one for one in reads for number in _reading(nodes, one)}
    kinds = {number: "read" if number in reading else _kind(nodes[number].name) for number in nodes}
    kinds |= dict.fromkeys((number for number in nodes if _expands(nodes, number)), "expand")
    kinds |= dict.fromkeys((number for number in nodes if number not in reading and _orders(nodes, number)), "order")
    children = {number for node in nodes.values() for number in node.inputs}
    found: dict[int, float] = collections.defaultdict(float)
    for root in nodes.keys() - children:
        _add(nodes, root, 1.0, found)
    seconds: dict[str, float] = collections.defaultdict(float)
    for number, spent in found.items():
        if nodes[number].name != "Root":
            seconds[kinds[number]] += spent
    seconds["copy"] = copy * sum(nodes[root].num_elements for root in nodes.keys() - children)
    seconds["loader"] = loader.seconds * 1e9 if loader else 0.0
    total = sum(seconds.values())
    seconds.pop("", None)
    if not total or not seconds:
        return None
    kind = max(seconds, key=seconds.get)
    if seconds[kind] < _LEAST * total:
        return None
    if kind == "copy":
        return Bottleneck(kind, seconds[kind] / total, "to the device", copy / 1e6, 1)
    if kind == "loader":
        return Bottleneck(kind, seconds[kind] / total, loader.who, 1e3 * loader.seconds / max(1, loader.batches), 1)
    slowest = max((number for number in found if kinds[number] == kind), key=found.get)
    share, one = seconds[kind] / total, reading.get(slowest)
    if one is not None:
        time = sum(nodes[number].processing_time for number, other in reading.items() if other is one)
        return Bottleneck(kind, share, str(one), time / 1e6 / max(1, one.records), one.at_once, reads=one)
    stage, after = nodes[slowest], _after(nodes, slowest)
    if kind == "order":
        batches = next(other.num_elements for other, _ in after if other.name == "Unbatch")
        return Bottleneck(kind, share, _ORDER, stage.processing_time / 1e6 / max(1, batches), 1 + _is_mapped(after))
    around = [one for one, inside in after if inside]
    return Bottleneck(
        kind,
        share,
        _users_name(stage.name),
        stage.processing_time / 1e6 / max(1, stage.num_elements),
        math.prod(map(_parallelism, [stage, *around])),
        any(one.name == "parallelism" and one.tunable for other in [stage, *around] for one in other.parameters),
        _is_of_batches(nodes, slowest, [one for one, _ in after]),
    )


def _reading(nodes: Any, reads: "RecordReads") -> list[int]:
    """Returns the numbers of the stages that read records: maps that were called as often as was noted.

    If a map of the user's was called as often, it comes after them.
    """
    maps = [number for number in nodes if nodes[number].name == "Map"]
    alike = ([n for n in maps if abs(nodes[n].num_elements - calls) <= 1] for calls in reads.calls if calls)
    return [max(numbers, key=lambda number: len(_after(nodes, number))) for numbers in alike if numbers]


def _expands(nodes: Any, number: int) -> bool:
    """Returns whether a stage makes data sets of elements by a function that names no file."""
    if not any(part in nodes[number].name for part in _NESTED):
        return False
    below = _below(nodes, number)
    return bool(below) and all(_kind(nodes[other].name) != "read" or _expands(nodes, other) for other in below)


def _orders(nodes: Any, number: int) -> bool:
    """Returns whether a stage is a map of looplib's that orders chunks of batches: over a count of them, unbatched."""
    after = [stage.name for stage, _ in _after(nodes, number) if "Map" not in stage.name]
    if "Map" not in nodes[number].name or after[:1] != ["Unbatch"]:
        return False
    before, names = number, []
    while nodes[before].inputs:
        before = nodes[before].inputs[0]
        names.append(nodes[before].name)
    return [name for name in names if "Map" not in name] == _COUNT


def _is_mapped(after: list[tuple[Any, bool]]) -> bool:
    """Returns whether a map follows the order of the examples, as it does unless they stay on the device."""
    names = [stage.name for stage, _ in after]
    return any("Map" in name for name in names[names.index("Unbatch") :])


def _users_name(stage: str) -> str:
    """Returns the user's name of a stage that TensorFlow calls ParallelMapV2 or the like."""
    name = re.sub(r"^(Legacy)?Parallel|V\d+$", "", stage)
    if name in _FILES:
        return f"{name}Dataset"
    words = "from_generator" if name == "Generator" else re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    return words.replace("_and_", " and ")


def _after(nodes: Any, number: int) -> list[tuple[Any, bool]]:
    """Returns the stages that a stage's elements pass, and of each whether it reads this stage inside its function."""
    found = []
    while (after := next((other for other in nodes if number in nodes[other].inputs), None)) is not None:
        stage = nodes[after]
        found.append((stage, any(part in stage.name for part in _NESTED) and number != stage.inputs[0]))
        number = after
    return found


def _is_of_batches(nodes: Any, number: int, after: list[Any]) -> bool:
    """Returns whether the elements of a stage are batches: made before it, or nowhere, as by `context.indices`."""
    if "AndBatch" not in nodes[number].name and not any("Batch" in stage.name for stage in after):
        return True
    return any("batch" in nodes[other].name.lower() for other in _below(nodes, number))


def _below(nodes: Any, number: int) -> list[int]:
    """Returns the numbers of the stages that a stage's elements come from."""
    below = list(nodes[number].inputs)
    for other in below:
        below += nodes[other].inputs
    return below


def _add(nodes: Any, number: int, scale: float, found: dict[int, float]) -> None:
    """Adds the nanoseconds of a stage, and of those below it, to `found`, by the numbers of the stages."""
    node = nodes[number]
    parallel = _parallelism(node)
    found[number] += scale * node.processing_time / parallel
    inner = list(node.inputs)
    if any(part in node.name for part in _NESTED):
        if inner:
            _add(nodes, inner.pop(0), scale, found)
        scale /= parallel
    if inner and any(part in node.name for part in (*_NESTED, "Repeat")):
        # TensorFlow keeps no statistics of finished elements; they are taken to be like the present one.
        scale *= node.num_elements / max(1, sum(nodes[other].num_elements for other in inner))
    for other in inner:
        _add(nodes, other, scale, found)


def _parallelism(node: Any) -> int:
    return max([1, *(int(one.value) for one in node.parameters if one.name == "parallelism")])


def _kind(name: str) -> str:
    return next((kind for part, kind in _KINDS.items() if part in name), "")


# The beginnings of TensorFlow's names of ops, and parts of them.
PYTHON = ("PyFunc", "EagerPyFunc", "PyFuncStateless")
_RESOURCES = ("Variable", "Rng", "StatefulUniform", "StatefulStandardNormal", "StatefulTruncatedNormal")


def condition(op: str, *, by_skipping: bool) -> str:
    """Returns the condition under which a pipeline op gives the same results again; "" if it always does.

    Args:
      op: text that begins with the type of the op.
      by_skipping: whether the pipeline is read again from the start; otherwise from a later position.
    """
    if op.startswith(PYTHON):
        return "its Python code depends on its arguments only, not on time or on earlier runs"
    if op.startswith(tuple(_tf.RANDOM_OPS)):
        repeats = "its random ops have seeds and run without num_parallel_calls"
        return repeats if by_skipping else "its random numbers come from tf.random.stateless_*, with seeds=True"
    if any(name in op for name in _RESOURCES):
        values = "from the start of the run" if by_skipping else "that they had at this step"
        return f"its variables and tf.random.Generators have the values {values}"
    return ""


_STEPS = 64  # whose batches are tried: many may be read at once
_SECONDS = 10.0  # that this may take
_RECORDS = 64  # after a bad one; at least one of them has to be good


def find(dataset: Callable[[InputContext], tf.data.Dataset], context: InputContext, step: int) -> str | None:
    """Tries the records of the next batches one by one, and returns which one cannot be processed.

    Args:
      dataset: the `dataset` function of a task, whose stages make each batch of one batch of records.
      context: of the pipeline that failed.
      step: global batches that were consumed before.

    Returns:
      Such as "record 17 of a.tfrecord, at byte 1234"; None if no record is to blame: each one fails, or none does by
      itself, or it cannot be found out.
    """
    if not context.requests.positioned or len(context.requests.calls) != 1 or context.requests.reader is None:
        return None
    try:
        following = context.again(start_step=max(0, step - 1))  # one replica may have counted the step that failed
        dataset(following)
        batches = following.requests.last.positions.unbatch().as_numpy_iterator()
        positions = np.concatenate(list(itertools.islice(batches, _STEPS * following.replicas_per_pipeline)))
        alone = context.again(only=positions)
        found = _first_bad(iter(dataset(alone)), len(positions))
        if found is None:
            return None
        (number,) = next(alone.requests.last.ids.skip(found).as_numpy_iterator())
        return alone.requests.reader.name_of(int(number))
    except Exception as error:  # the run has failed anyway, and its own error is the one to show
        logging.debug("which record the run failed at cannot be found out: %s", gist(error))
        return None


def _first_bad(records: Iterator, count: int) -> int | None:
    """Returns the place of the first record that fails, if another one does not."""
    start, bad, any_good = time.monotonic(), None, False
    for place in range(count):
        try:
            next(records)
            any_good = True
        except tf.errors.OpError:
            bad = place if bad is None else bad
        if bad is not None and (any_good or place - bad >= _RECORDS):
            break
        if time.monotonic() - start > _SECONDS:
            return None
    return bad if any_good else None

"""The stage of an input pipeline that takes most of its time, by tf.data's own statistics."""

import collections
import dataclasses
from typing import Any

import tensorflow as tf

# What a stage does, by a part of the name that TensorFlow gives it. The first that fits counts.
_KINDS = {
    "Generator": "generator",
    "Shuffle": "shuffle",
    "Interleave": "read",
    "TFRecord": "read",
    "TextLine": "read",
    "FixedLengthRecord": "read",
    "CSV": "read",
    "Load": "read",
    "Snapshot": "read",
    "ParseExample": "map",
    "Map": "map",
    "Filter": "map",
    "Scan": "map",
    "Batch": "batch",
    "Window": "batch",
    "GroupBy": "batch",
}
_LEAST = 0.25  # of the time, for a stage that is worth a change
_AUTOTUNE = "num_parallel_calls=tf.data.AUTOTUNE"
# (kind, whether it runs in parallel already) -> what to change.
_ADVICE = {
    ("read", False): f"read several files at once: interleave(tf.data.TFRecordDataset, {_AUTOTUNE})",
    ("read", True): "move the files nearer, compress them less, or cache() what fits in memory",
    ("map", False): f"give that map {_AUTOTUNE}",
    ("map", True): "make its function cheaper, batch before it so that it works on whole batches, or cache() it",
    ("shuffle", False): "shuffle names of files or ids in place of large elements, or use context.indices",
    ("batch", False): f"give that batch {_AUTOTUNE}, or make elements of fewer and smaller tensors",
    ("batch", True): "make elements of fewer and smaller tensors",
    ("copy", False): "copy fewer bytes: integers or bfloat16, cast and augmented in step_fn, or context.resident",
    ("generator", False): "write its elements to files, or make them with ops: Python makes one at a time",
}


@dataclasses.dataclass(frozen=True)
class Bottleneck:
    """The slowest stage of a pipeline.

    Attributes:
      kind: "read", "map", "shuffle", "batch", "generator" or "copy".
      share: its part of the time of all stages, from 0 to 1; time in parallel calls is divided by their number.
      stage: the name that TensorFlow gives the slowest one of this kind.
      milliseconds: that it takes for one of its elements.
      parallel: how many of these it makes at once.
      tuned: whether tf.data decides how many, or reads several such stages at once.
    """

    kind: str
    share: float
    stage: str
    milliseconds: float
    parallel: int
    tuned: bool = False

    def __str__(self) -> str:
        time = f"{self.milliseconds:.0f}" if self.milliseconds >= 10 else f"{self.milliseconds:.2g}"
        each = f"{time} ms for an element, {self.parallel} at once"
        return f"{self.share:.0%} of the pipeline's time is {self.kind} ({self.stage}: {each})"

    @property
    def advice(self) -> str:
        """What to change."""
        return _ADVICE.get((self.kind, self.tuned or self.parallel > 1)) or _ADVICE[self.kind, False]


def of(iterator: tf.data.Iterator, copy: float = 0.0) -> Bottleneck | None:
    """Returns the slowest stage of the pipeline behind an iterator since it was made.

    Args:
      iterator: the iterator.
      copy: seconds that the copy of an element to its device takes, of which tf.data keeps no statistics.

    Returns:
      None if no stage stands out, or TensorFlow has no statistics, as for iterators of tf.distribute and with
      `autotune.enabled = False`.
    """
    try:
        nodes = tf.data.experimental.get_model_proto(iterator).nodes
        return _slowest(nodes, copy * 1e9)
    except (AttributeError, TypeError, ValueError, KeyError, tf.errors.OpError):  # other iterators, other versions
        return None


def _slowest(nodes: Any, copy: float) -> Bottleneck | None:
    children = {number for node in nodes.values() for number in node.inputs}
    found: dict[int, float] = collections.defaultdict(float)
    for root in nodes.keys() - children:
        _add(nodes, root, 1.0, found)
    seconds: dict[str, float] = collections.defaultdict(float)
    for number, time in found.items():
        if nodes[number].name != "Root":
            seconds[_kind(nodes[number].name)] += time
    seconds["copy"] = copy * sum(nodes[root].num_elements for root in nodes.keys() - children)
    total = sum(seconds.values())
    seconds.pop("", None)
    if not total or not seconds:
        return None
    kind = max(seconds, key=seconds.get)
    if seconds[kind] < _LEAST * total:
        return None
    if kind == "copy":
        return Bottleneck(kind, seconds[kind] / total, "to the device", copy / 1e6, 1)
    slowest = max((number for number in found if _kind(nodes[number].name) == kind), key=found.get)
    stage = nodes[slowest]
    milliseconds = stage.processing_time / 1e6 / max(1, stage.num_elements)
    return Bottleneck(
        kind, seconds[kind] / total, stage.name, milliseconds, _parallelism(stage), _is_tuned(nodes, slowest)
    )


def _add(nodes: Any, number: int, scale: float, found: dict[int, float]) -> None:
    """Adds the nanoseconds of a stage, and of those below it, to `found`, by the numbers of the stages."""
    node = nodes[number]
    parallel = _parallelism(node)
    found[number] += scale * node.processing_time / parallel
    inner = list(node.inputs)
    if "Interleave" in node.name or "FlatMap" in node.name:
        if inner:
            _add(nodes, inner.pop(0), scale, found)
        scale /= parallel
    if inner and any(part in node.name for part in ("Interleave", "FlatMap", "Repeat")):
        # Of what it has read to its end, TensorFlow keeps no statistics: it was like what it reads now.
        scale *= node.num_elements / max(1, sum(nodes[other].num_elements for other in inner))
    for other in inner:
        _add(nodes, other, scale, found)


def _is_tuned(nodes: Any, number: int) -> bool:
    """Returns whether tf.data tunes how many elements of a stage it makes at once, or how many of an interleave."""
    if any(one.name == "parallelism" and one.tunable for one in nodes[number].parameters):
        return True
    after = next((other for other in nodes if number in nodes[other].inputs), None)
    if after is None or not any(part in nodes[after].name for part in ("FlatMap", "Interleave")):
        return False
    return _parallelism(nodes[after]) > 1 or _is_tuned(nodes, after)


def _parallelism(node: Any) -> int:
    return max([1, *(int(one.value) for one in node.parameters if one.name == "parallelism")])


def _kind(name: str) -> str:
    return next((kind for part, kind in _KINDS.items() if part in name and name != "FlatMap"), "")

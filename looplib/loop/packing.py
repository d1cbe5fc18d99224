"""Packs the outputs of a step into one vector that sums, and unpacks the sums into metrics."""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.base.messages import is_utf8
from looplib.compat import keras as _keras
from looplib.data import rows
from looplib.errors import MetricError
from looplib.task.plain import as_array, as_number
from looplib.task.reductions import Media, Reduction, total, weighted_sum

BatchSize = tuple[set[int], tf.Tensor]
_MANY = 4  # metrics alike that are cheaper to sum together


@dataclasses.dataclass(frozen=True)
class _Slot:
    """Where one metric lies in the packed vector."""

    name: str
    # "mean" takes two places, sum and weight; "total" one for each element of the value, and "last" one more, which is
    # 1 where a step has given a value.
    kind: str
    shape: tuple
    integer: bool
    start: int

    @property
    def size(self) -> int:
        return 2 if self.kind == "mean" else math.prod(self.shape) + (self.kind == "last")


class Packer:
    """Packs the outputs of one `step_fn`. It learns their structure when the step is first traced or called.

    Args:
      who: the user's method, such as "Digits.step_fn", for messages.
      count_examples: adds the total `examples`, from the first dimension of the inputs.
      skips: makes room for `skipped_steps`, a count of steps that were undone.
    """

    def __init__(self, who: str, count_examples: bool, skips: bool) -> None:
        self._who, self._count_examples, self._skips = who, count_examples, skips
        self.slots: list[_Slot] | None = None  # where each metric lies, once the structure is known
        self.keras: dict[str, Any] = {}  # Keras metric objects among the outputs, which keep their own sums
        self.media: dict[str, Media] = {}  # those among the outputs, with the tensors of the newest trace

    @property
    def size(self) -> int:
        """Elements of a contribution."""
        return sum(slot.size for slot in self.slots)

    @property
    def names(self) -> list[str]:
        """The metrics in a contribution, in their order."""
        return [slot.name for slot in self.slots]

    def start_of(self, name: str) -> int:
        """Returns where the value of a metric begins in a contribution."""
        return next(slot.start for slot in self.slots if slot.name == name)

    def losses(self, name: str) -> list[_Slot]:
        """Returns the slots of the loss of a name, and of other metrics with "loss" in their names."""
        return [one for one in self.slots if one.kind != "last" and (one.name == name or "loss" in one.name.lower())]

    @property
    def keeps_last(self) -> bool:
        """Returns whether a metric is a `looplib.last`."""
        return any(slot.kind == "last" for slot in self.slots)

    def replaced_by(self) -> list[int | None]:
        """Returns for each element where a contribution has the 1 by which it replaces a total, or None if it adds."""
        marks = [slot.start + slot.size - 1 if slot.kind == "last" else None for slot in self.slots]
        return [mark for slot, mark in zip(self.slots, marks) for _ in range(slot.size)]

    @tf.autograph.experimental.do_not_convert
    def pack(self, outputs: object, inputs: Any) -> tuple[tf.Tensor, dict[str, Reduction | Media]]:
        """Packs the outputs of one step on a batch, which gives the number of examples; in replica context.

        Returns:
          `(contribution, collected)`: float64 tensor `[n]`, n fixed by the structure of `outputs`, and a dict of the
          `looplib.each` outputs and of media, which are not summed.

        Raises:
          UsageError: for an output that does not say how it reduces, or a structure that changes between steps.
        """
        if not isinstance(outputs, Mapping):
            raise MetricError(
                f"{self._who} returned {_describe(outputs)}; expected a dict from metric name to value, "
                'such as {"loss": losses} with losses of shape [per_replica_batch]'
            )
        batch = batch_size(inputs)
        reductions, metrics, collected = {}, {}, {}
        values = dict(outputs)
        if self._count_examples and "examples" not in values and batch is not None:
            values["examples"] = total(batch[1])
        if self._skips:
            values["skipped_steps"] = total(tf.constant(0, tf.int64))
        for name, value in sorted(values.items(), key=lambda item: str(item[0])):
            check_metric_name(self._who, name)
            if _keras.is_metric(value):
                metrics[name] = value
            elif isinstance(value, Media) or (isinstance(value, Reduction) and value.kind == "each"):
                collected[name] = value
            else:
                reductions[name] = self._reduction(name, value, batch)
        self.media = {name: value for name, value in collected.items() if isinstance(value, Media)}
        each = collected.keys() - self.media.keys()
        if each and not self._count_examples:
            raise MetricError(
                f"{self._who} returned {', '.join(map(repr, sorted(each)))} as looplib.each, and a training "
                "collects nothing on the host; only an evaluator does"
            )
        slots, contribution = _packed(reductions)
        if self.slots is None:
            self.slots, self.keras = slots, metrics
        elif self.slots != slots or self.keras != metrics:
            raise MetricError(
                f"{self._who} returned metrics {_names(slots, metrics)} after "
                f"{_names(self.slots, self.keras)}; expected the same names, kinds and shapes at every step"
            )
        return contribution, collected

    def _reduction(self, name: str, value: Any, batch: BatchSize | None) -> Reduction:
        where = f"{self._who} returned {name!r} as {_describe(value)}"
        if not isinstance(value, Reduction):
            value = self._per_example(where, value, batch)
        for tensor in (value.value, value.weight):
            if tensor is not None and not _is_number(tensor):
                raise MetricError(f"{where}; expected real numbers, integers or booleans")
        if value.kind != "mean" and not value.value.shape.is_fully_defined():
            raise MetricError(
                f"{where}, and that shape is not fully known; sum over the batch first, "
                f"as in looplib.{value.kind}(tf.reduce_sum(value))"
            )
        return value

    def _per_example(self, where: str, value: Any, batch: BatchSize | None) -> Reduction:
        try:
            value = tf.convert_to_tensor(value)
        except (TypeError, ValueError):
            raise MetricError(
                f"{where}; expected a tensor [per_replica_batch], looplib.mean, looplib.total, looplib.last or a Keras "
                "metric object"
            ) from None
        if value.shape.rank == 0:
            raise MetricError(
                f"{where} without a reduction; return one value per example, or say how a scalar reduces: "
                "looplib.mean(value, weight=<examples>), looplib.total(value) or looplib.last(value)"
            )
        if batch and value.shape.rank and value.shape[0] is not None and value.shape[0] not in batch[0]:
            sizes = " or ".join(map(str, sorted(batch[0]))) or "any size"
            raise MetricError(
                f"{where}, whose first dimension is not the batch ({sizes}); expected one value per example, or "
                "looplib.mean, looplib.total or looplib.last to say how it reduces"
            )
        if value.shape.rank != 1 and _is_number(value):
            value = tf.cast(value, tf.float64)
            value = tf.reduce_mean(value, axis=tf.range(1, tf.rank(value)))
        return Reduction("mean", value)

    def unpack(self, totals: tf.Tensor | np.ndarray, results: dict[str, Any]) -> dict[str, Any]:
        """Turns sums, float64 `[n]`, and results of Keras metrics by name into metrics, see `Reducer.read`.

        They are Python numbers, or numpy arrays where the value was not a scalar.
        """
        totals = np.asarray(totals)
        metrics = {}
        for slot in self.slots:
            part = totals[slot.start : slot.start + slot.size]
            if slot.kind == "mean":
                metrics[slot.name] = float(part[0] / part[1]) if part[1] else math.nan
            elif slot.kind == "last" and not part[-1]:
                metrics[slot.name] = np.full(slot.shape, math.nan) if slot.shape else math.nan
            else:
                part = part[: math.prod(slot.shape)]
                value = part.astype(np.int64) if slot.integer else part
                metrics[slot.name] = value[0].item() if slot.shape == () else value.reshape(slot.shape)
        for name, result in results.items():
            metrics |= _numbers(name, result)
        return metrics


def _packed(reductions: dict[str, Reduction]) -> tuple[list[_Slot], tf.Tensor]:
    """Returns where metrics lie in the packed vector, in the order of their names, and the vector, float64 `[n]`."""
    slots, start = [], 0
    for name, reduction in reductions.items():
        kind, value = reduction.kind, reduction.value
        integer = value.dtype.is_integer or value.dtype.is_bool
        slots.append(_Slot(name, kind, () if kind == "mean" else tuple(value.shape), integer, start))
        start += slots[-1].size
    groups = _groups(reductions)
    vector = _joined([part for names in groups for part in _sums([reductions[name] for name in names])])
    # An eager step may have other groups for a smaller batch; the order in the vector stays.
    elements = {slot.name: range(slot.start, slot.start + slot.size) for slot in slots}
    places = [place for names in groups for name in names for place in elements[name]]
    return slots, vector if places == sorted(places) else tf.gather(vector, np.argsort(places))


def _groups(reductions: dict[str, Reduction]) -> list[list[str]]:
    """Groups metrics that are summed together, by kind, dtype and known shape; any other stays alone."""
    groups: dict[Any, list[str]] = {}
    for name, reduction in reductions.items():
        value, weight = reduction.value, reduction.weight
        key = (reduction.kind, value.dtype, str(value.shape), weight is not None and weight.dtype)
        known = value.shape.is_fully_defined() and (weight is None or weight.shape == value.shape)
        groups.setdefault(key if known else name, []).append(name)
    together = [names for names in groups.values() if len(names) >= _MANY]
    return [[name] for name in reductions if not any(name in names for names in together)] + together


def _sums(group: list[Reduction]) -> list[tf.Tensor]:
    """Returns what metrics of one kind, dtype and shape add to the totals: scalars for one, a tensor for several."""

    def joined(tensors: list[tf.Tensor]) -> tf.Tensor:
        return tf.cast(tensors[0] if len(group) == 1 else tf.stack(tensors), tf.float64)

    kind, data = group[0].kind, joined([reduction.value for reduction in group])
    if kind == "last":
        is_first = tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, 0)
        values = tf.reshape(data, [len(group), math.prod(group[0].value.shape)])
        values = tf.concat([values, tf.ones([len(group), 1], tf.float64)], axis=1)
        return [tf.where(is_first, values, tf.zeros_like(values))]
    if kind != "mean":
        return [data]
    axes = None if len(group) == 1 else list(range(1, data.shape.rank))
    if group[0].weight is not None:
        sums = weighted_sum(data, joined([reduction.weight for reduction in group]), axes)
    else:
        size = tf.cast(tf.size(data) // len(group), tf.float64)
        sums = tf.reduce_sum(data, axes), size if axes is None else tf.fill([len(group)], size)
    return list(sums) if axes is None else [tf.stack(sums, axis=1)]


def _joined(parts: list[tf.Tensor]) -> tf.Tensor:
    """Returns the elements of float64 tensors one after another; neighbouring scalars, which most are, by one op."""
    pieces = []
    for scalars, run in itertools.groupby(parts, lambda part: part.shape.rank == 0):
        tensors = list(run)
        pieces += [tf.stack(tensors)] if scalars else [tf.reshape(tensor, [-1]) for tensor in tensors]
    return pieces[0] if len(pieces) == 1 else tf.concat(pieces or [tf.zeros([0], tf.float64)], axis=0)


def check_metric_name(who: str, name: object) -> None:
    """Raises `UsageError` for a name that is no string, or that a record of `metrics.jsonl` needs itself."""
    if not isinstance(name, str) or not name or name in ("step", "split") or not is_utf8(name):
        raise MetricError(f"{who} has a metric named {name!r}; expected a string other than '', 'step' and 'split'")


@tf.autograph.experimental.do_not_convert
def batch_size(inputs: Any) -> BatchSize | None:
    """Returns the known first dimensions of a batch's tensors, and the rows of the first of them; None without any."""
    parts = rows.parts(inputs)
    known = {part.shape[0] for part in parts if part.shape.rank} - {None}
    return (known, rows.count(parts[0])) if parts else None


def _numbers(name: str, result: Any) -> dict[str, Any]:
    """Returns the numbers of a result of a Keras metric; dicts, also in dicts, are several results."""
    if not isinstance(result, dict):
        return {name: _number(name, result)}
    return {path: number for key, value in result.items() for path, number in _numbers(f"{name}_{key}", value).items()}


def _number(name: str, value: Any) -> Any:
    array = as_array(value)
    return as_number(f"the result of the Keras metric {name!r}", array) if array.shape == () else array


def _is_number(tensor: tf.Tensor) -> bool:
    return tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool


def _names(slots: list[_Slot], metrics: dict[str, Any]) -> list[str]:
    return sorted(
        [f"{slot.name} ({slot.kind} {list(slot.shape)})" for slot in slots] + [f"{m} (Keras)" for m in metrics]
    )


def _describe(value: object) -> str:
    if isinstance(value, Reduction):
        return f"looplib.{value.kind} of {_describe(value.value)}"
    if isinstance(value, (tf.Tensor, tf.Variable)):
        return f"a {value.dtype.name} tensor of shape {value.shape}"
    return f"a {type(value).__name__}"

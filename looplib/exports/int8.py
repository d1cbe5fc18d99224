"""Exports in int8: the converter's own quantisation, and what it costs on data of the run."""

import contextlib
import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.base.messages import gist
from looplib.exports.samples import Inputs, ModelInputs

Runner = Callable[..., Mapping[str, Any]]  # computes outputs by name, for inputs by name
MOST_CALIBRATION = 100  # examples that decide the ranges of the numbers in the model
# How the names of the operations begin that quantization-aware training puts into a model, with learned ranges.
_TRAINED = ("FakeQuantWithMinMax", "QuantizeAndDequantizeV")


@dataclasses.dataclass(frozen=True)
class OutputCost:
    """How much an output of the int8 model differs from that of the float model.

    Attributes:
      largest: the largest difference.
      mean: the mean absolute difference.
      same_class: of an output [batch, classes], the share of examples whose largest one is at one place; else None.
      left_out: examples that are not counted, because outputs of the float model are not finite.
    """

    largest: float
    mean: float
    same_class: float | None
    left_out: int


@dataclasses.dataclass(frozen=True)
class Int8Cost:
    """An int8 export, and its cost.

    Attributes:
      kind: "integer", if weights and computations are int8; "dynamic range", if weights alone are; "as trained", if the
        model says by ranges of its own what is int8.
      reason: why it is not "integer"; "" if it is.
      split: whose data it was compared on: an evaluator's name, or "train"; "" for none.
      examples: how many examples of it, the first ones.
      calibrated: how many of these have decided the ranges of the numbers.
      outputs: by the name of each output, how much it differs.
    """

    kind: str
    reason: str
    split: str
    examples: int
    calibrated: int
    outputs: dict[str, OutputCost]

    def __str__(self) -> str:
        how = self.kind + (f", because {self.reason}" if self.reason else "")
        if not self.outputs:
            return how
        several = len(self.outputs) > 1
        costs = []
        for name, cost in self.outputs.items():
            text = f"{name} " * several + f"differs by {cost.mean:.2g} on average, by {cost.largest:.2g} at most"
            same = "" if cost.same_class is None else f", and {cost.same_class:.2%} have the same class"
            rest = f", without {cost.left_out:,} examples whose outputs are not finite" if cost.left_out else ""
            costs.append(text + same + rest)
        return f"{how}; on {self.examples:,} examples of {self.split}, {'; '.join(costs)}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Returns a context manager without TensorFlow's advice to use another package for its interpreter."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\s*Warning: tf.lite.Interpreter is deprecated", UserWarning)
        yield


def has_ranges(serve: Any) -> bool:
    """Returns whether a concrete function has ranges of numbers that quantization-aware training has learned."""
    graph = serve.graph.as_graph_def()
    nodes = itertools.chain(graph.node, *(function.node_def for function in graph.library.function))
    return any(node.op.startswith(_TRAINED) for node in nodes)


def quantize(saved_model: str, samples: ModelInputs | None, trained: bool = False) -> tuple[bytes, str, str]:
    """Converts a SavedModel to int8.

    Args:
      saved_model: its directory.
      samples: examples for the ranges of the numbers; None for none, which quantises the weights alone.
      trained: whether it has ranges of its own, beside which the converter computes something else if it gets examples.

    Returns:
      `(content, kind, reason)`: the file, and `kind` and `reason` of `Int8Cost`; "" without samples.

    Raises:
      Exception: of any type, if the converter does not take the model.
    """
    converter = tf.lite.TFLiteConverter.from_saved_model(saved_model)
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    if trained or samples is None:
        return converter.convert(), "as trained" if trained else "dynamic range", ""
    batches = samples.of_one_size(MOST_CALIBRATION).batches  # the converter takes no others
    if not all(_is_finite(value) for inputs in batches for value in inputs.values()):  # the converter may crash
        return (*quantize(saved_model, None)[:2], "the examples for the ranges have numbers that are not finite")
    converter.representative_dataset = lambda: iter(batches)
    try:
        with quiet():
            return converter.convert(), "integer", ""
    except Exception as error:  # of many types; it may take the weights alone
        return (*quantize(saved_model, None)[:2], f"the converter does not take the whole model ({gist(error)})")


def compare(floating: Runner, quantized: Runner, batches: Iterable[Inputs]) -> dict[str, OutputCost]:
    """Returns how much each output of numbers differs, over all batches.

    Args:
      floating: the float model.
      quantized: the int8 model.
      batches: inputs.
    """
    sums: dict[str, _Sums] = {}
    for inputs in batches:
        expected = floating(**{name: tf.constant(value) for name, value in inputs.items()})
        found = quantized(**inputs)
        for name, value in _numbers(expected):
            sums.setdefault(name, _Sums()).add(np.asarray(found[name]), value)
    return {name: each.cost() for name, each in sums.items()}


def _is_finite(value: Any) -> bool:
    value = np.asarray(value)
    return value.dtype.kind not in "fV" or bool(np.isfinite(value.astype(np.float64)).all())


def _numbers(outputs: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    for name in sorted(outputs):
        value = np.asarray(outputs[name])
        if value.dtype.kind in "fiubV":
            yield name, value


class _Sums:
    """The differences of one output so far."""

    def __init__(self) -> None:
        self._largest = self._sum = 0.0
        self._count = self._rows = self._same = self._left_out = 0
        self._classes = True

    def add(self, found: np.ndarray, expected: np.ndarray) -> None:
        """Adds the outputs for a batch."""
        found, expected = found.astype(np.float64), expected.astype(np.float64)
        finite = (
            np.isfinite(expected).all(axis=tuple(range(1, expected.ndim))) if expected.ndim else np.isfinite(expected)
        )
        self._left_out += int(np.size(finite) - np.sum(finite))
        found, expected = found[finite], expected[finite]
        if not expected.size:
            return
        differences = np.abs(found - expected)
        self._largest = float(np.maximum(self._largest, differences.max()))  # which keeps NaN
        self._sum += float(differences.sum())
        self._count += differences.size
        self._classes &= expected.ndim == 2 and expected.shape[1] > 1
        if self._classes:
            self._rows += len(expected)
            self._same += int((found.argmax(1) == expected.argmax(1)).sum())

    def cost(self) -> OutputCost:
        """Returns what they come to."""
        same = self._same / self._rows if self._classes and self._rows else None
        mean = self._sum / self._count if self._count else 0.0
        return OutputCost(self._largest, mean, same, self._left_out)

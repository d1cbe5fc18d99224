"""The rows of the matrix beside Keras `fit`: how a model says what it is, and made data for it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

EXAMPLES, BATCH, EPOCHS = 24, 16, 2  # an epoch is a batch of 16 and one of 8
BOTH = ("keras", "tf_keras")


@dataclasses.dataclass(frozen=True)
class Row:
    """A model of the matrix.

    Attributes:
      name: its name.
      text: what it is.
      build: makes the model and the arguments of `fit`, `batch_size` too, from a module of Keras.
      families: the modules that it can be written for.
      said: by column, a sentence of docs/from_keras_differences.md that says why it differs there.
      not_compared: metrics, by a sentence of that page that says why they differ from those of `fit`.
      tolerance: the largest relative difference that is rounding.
      after: what a user calls with the model after the training, as that page says.
      prepare: what a program does with the model, from it and whether the program is the first of its run.
      needs: other packages that it imports.
      settings: attributes that a program sets on its trainer.
    """

    name: str
    text: str
    build: Callable[[Any], tuple[Any, dict[str, Any]]]
    families: tuple[str, ...] = BOTH
    said: Mapping[str, str] = dataclasses.field(default_factory=dict)
    not_compared: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tolerance: float = 2e-4
    after: Callable[[Any], object] | None = None
    prepare: Callable[[Any, bool], object] | None = None
    needs: tuple[str, ...] = ()
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def rows_of(*rows: Any) -> dict[str, Row]:
    """Returns rows by name, of functions that build a model, or pairs of one and what is special about it."""
    pairs = [row if isinstance(row, tuple) else (row, {}) for row in rows]
    return {
        build.__name__: Row(build.__name__, build.__doc__.splitlines()[0].rstrip("."), build, **special)
        for build, special in pairs
    }


def noise(*shape: int, seed: int = 0, examples: int = EXAMPLES) -> np.ndarray:
    """Returns numbers of a normal distribution, a row for each example."""
    return np.random.default_rng(seed).normal(size=(examples, *shape)).astype("float32")


def labels(classes: int, *shape: int, seed: int = 1, examples: int = EXAMPLES) -> np.ndarray:
    """Returns class numbers, a row for each example."""
    return np.random.default_rng(seed).integers(0, classes, (examples, *shape))


def padded(classes: int, length: int, seed: int = 2) -> np.ndarray:
    """Returns rows of whole numbers from 1, with zeros after some; the first half of the rows is shorter."""
    values = labels(classes - 1, length, seed=seed) + 1
    lengths = np.where(np.arange(EXAMPLES) % 16 < 8, 2, length - 1) + labels(2, seed=seed)
    return values * (np.arange(length) < lengths[:, None])


def sparse_loss(keras: Any, **arguments: Any) -> Any:
    """Returns the loss of logits and class numbers."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **arguments)

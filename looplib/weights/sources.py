"""Tensors of a file of weights, by name, read one at a time."""

import dataclasses
import io
import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

MOST_DIMENSIONS = 32
MOST_HEADER = 1 << 24  # bytes of names and shapes


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file, without its numbers.

    Attributes:
      name: by which rules and the model know it.
      shape: its shape.
      dtype: its type in numpy; None for text and the like, which no variable takes.
      layer: the names of the attributes, and of the classes in lists, that lead to its layer, of a format that numbers
        the variables of a layer; else ().
      number: in its layer, as text; else "".
      listed: which parts of `layer` are those of a list, by their indices.
      owned: whether it is of an optimizer or a metric.
      parts: of a table of embeddings that is held in parts, how many; else 0.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype | None
    layer: tuple[str, ...] = ()
    number: str = ""
    listed: frozenset[int] = frozenset()
    owned: bool = False
    parts: int = 0

    @property
    def floating(self) -> bool:
        """Whether it has floating-point numbers; of numpy's kinds, V are bfloat16 and the types of 8 bits."""
        return self.dtype is not None and self.dtype.kind in "fV"

    @property
    def bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * (self.dtype.itemsize if self.dtype else 0)

    def read_from(self, file: io.RawIOBase | io.BufferedReader, place: int, path: str) -> np.ndarray:
        """Returns its numbers, of an open file that has them at a place; raises `WarmStartError` if it ends before."""
        found = np.empty(math.prod(self.shape), self.dtype)
        file.seek(place)
        if file.readinto(found.view(np.uint8)) != self.bytes:
            from looplib.stores.shards import refusal  # here, as few runs read files of weights

            raise refusal(path, "it was shortened while it was read")
        return found.reshape(self.shape)


class WeightsSource(Protocol):
    """Tensors from elsewhere.

    Attributes:
      tensors: the tensors by key.
    """

    tensors: Mapping[str, StoredTensor]

    def read(self, key: str) -> np.ndarray:
        """Returns the numbers of a tensor, which nobody else holds."""
        ...

    def close(self) -> None:
        """Closes the files."""
        ...


def are_sizes(value: Any) -> bool:
    """Returns whether a JSON value is a list of few sizes or places."""
    sizes = isinstance(value, list) and len(value) <= MOST_DIMENSIONS
    return sizes and all(type(number) is int and 0 <= number < 1 << 62 for number in value)

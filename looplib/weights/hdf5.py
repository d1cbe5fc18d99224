"""Keras's files of weights in HDF5: `.weights.h5`, alone or in a `.keras` file, and the older `.h5`.

A `.weights.h5` has a group for each layer, at the path of attributes that lead to it (`block/attention`); layers in a
list are named there by their classes (`layers/dense_1`). The variables of a layer are numbered (`vars/0`), in the order
in which that class saves them. Keras 3 writes the name of each layer beside its variables, tf_keras does not; then the
configuration in a `.keras` file has those in `layers`. An older `.h5` has the names of variables.
"""

import dataclasses
import enum
import os
import re
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from looplib.base.decoding import decode, parse_json
from looplib.base.messages import is_utf8
from looplib.errors import PluginError
from looplib.processes.child import CommandLine, output_of
from looplib.stores.shards import MOST_TENSORS, refusal
from looplib.weights.sources import MOST_HEADER, StoredTensor, are_sizes

_CONTENTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "hdf5_contents.py")  # a program of its own
_LIST, _VARIABLES = "layers", "vars"
_OWNED = frozenset({"optimizer", "metrics", "optimizer_weights"})
SECONDS = 60  # of computing, for the names in a file
_PATIENCE = 600.0  # seconds, where a disk is slow
_MOST_CONTENTS = 1 << 28  # bytes that name what is in a file

LayerNames = Mapping[tuple[str, ...], str]


class NamesOfLayers(enum.Enum):
    """Which layers' names a file has.

    Attributes:
      ALL: all, as Keras 3 writes them.
      OF_LISTS: those of functional and sequential models, from a configuration.
      NONE: none.
    """

    ALL = enum.auto()
    OF_LISTS = enum.auto()
    NONE = enum.auto()


@dataclasses.dataclass(frozen=True)
class Hdf5Layer:
    """A group of variables, by `hdf5_contents.py`.

    Attributes:
      path: the groups that lead to the layer.
      name: of the layer; "" if the file does not say it.
    """

    path: list[str]
    name: str


@dataclasses.dataclass(frozen=True)
class Hdf5Numbers:
    """A data set, by `hdf5_contents.py`.

    Attributes:
      path: the groups that lead to it, and its own name.
      shape: its shape.
      dtype: its type in numpy; "" for something else than numbers.
      place: where it begins, in bytes.
    """

    path: list[str]
    shape: list[int]
    dtype: str
    place: int


@dataclasses.dataclass(frozen=True)
class Hdf5Contents:
    """The contents of a file, as `hdf5_contents.py` prints them.

    Attributes:
      refused: why the file is none of weights; "" if it may be one.
      older: whether it has the names of variables.
      layers: its groups of variables.
      numbers: its data sets.
    """

    refused: str
    older: bool
    layers: list[Hdf5Layer]
    numbers: list[Hdf5Numbers]


@dataclasses.dataclass(frozen=True)
class Hdf5Part:
    """A file of HDF5, or what is one in a file.

    Attributes:
      file: the file, open.
      path: its name in messages.
      start: where in the file HDF5 begins.
      size: how many bytes it has.
    """

    file: BinaryIO
    path: str
    start: int
    size: int


class Hdf5Weights:
    """A file of weights of Keras, or several that an index names.

    Args:
      parts: the files; closed with this.
      config: the configuration of the model beside it, as JSON; None for none.

    Attributes:
      tensors: the tensors by their place in the file.
      numbered: whether the variables of a layer have numbers and no names.
      names: whose names of layers it has.

    Raises:
      WarmStartError: if it is damaged, something else, or has what leads out of it.
    """

    def __init__(self, parts: Sequence[Hdf5Part], config: Any = None) -> None:
        self._parts = parts
        contents = [_contents(part.file, part.path, part.start, part.size) for part in parts]
        layers = [layer for found in contents for layer in found.layers]
        self.numbered = not any(found.older for found in contents)
        self._layers = {tuple(layer.path): layer.name for layer in layers if layer.name}
        self.names = NamesOfLayers.ALL if self._layers else NamesOfLayers.NONE
        if not self._layers and (known := names_in(config)):
            self._layers, self.names = known, NamesOfLayers.OF_LISTS
        self._holders = {(), *(tuple(layer.path) for layer in layers)}  # the others are lists
        self.tensors: dict[str, StoredTensor] = {}
        self._places: dict[str, tuple[Hdf5Part, int]] = {}
        for part, found in zip(parts, contents):
            self._take(part, found.numbers)
        if not self.tensors:
            raise refusal(parts[0].path, "it has no variables")

    def _take(self, part: Hdf5Part, numbers: Iterable[Hdf5Numbers]) -> None:
        for one in numbers:
            key = "/".join(one.path)
            tensor = self._newer(part.path, one) if self.numbered else self._older(one)
            inside = are_sizes(one.shape) and 0 <= one.place <= part.size - tensor.bytes
            if not inside or not all(map(is_utf8, one.path)):
                raise refusal(part.path, f"{key[-100:]!a} is not in it as a whole")
            if key in self.tensors:
                raise refusal(part.path, f"{key[-100:]!a} is also in {self._places[key][0].path}")
            self.tensors[key], self._places[key] = tensor, (part, part.start + one.place)

    def _newer(self, path: str, one: Hdf5Numbers) -> StoredTensor:
        *layer, of, number = one.path if len(one.path) > 1 else ("", *one.path)
        if of != _VARIABLES:
            raise refusal(path, f"{'/'.join(one.path)[-100:]!r} is in no group of variables (vars)")
        name = "/".join([*chain(layer, self._layers, self.names is NamesOfLayers.ALL), number])
        listed = frozenset(index for index in range(len(layer)) if tuple(layer[:index]) not in self._holders)
        owned = bool(layer) and layer[0] in _OWNED
        return StoredTensor(name, tuple(one.shape), _dtype(one), tuple(layer), number, listed, owned)

    def _older(self, one: Hdf5Numbers) -> StoredTensor:
        """Returns a tensor of an `.h5` of tf_keras: <layer>/<name of the variable>:0, maybe below model_weights."""
        names = one.path[2:] if one.path[0] == "model_weights" else one.path[1:]
        name = re.sub(r":\d+$", "", "/".join(names))
        return StoredTensor(name, tuple(one.shape), _dtype(one), owned=one.path[0] in _OWNED)

    def read(self, key: str) -> np.ndarray:
        """Returns the numbers of a tensor."""
        part, place = self._places[key]
        return self.tensors[key].read_from(part.file, place, part.path)

    def close(self) -> None:
        """Closes the files."""
        for part in self._parts:
            part.file.close()


def _contents(file: BinaryIO, path: str, start: int, size: int) -> Hdf5Contents:
    """Returns what is in a file, found by another process, which a damaged file may hang or crash."""
    try:
        import h5py  # noqa: F401
    except ImportError as error:
        raise PluginError(f"{path} is a file of HDF5, which h5py reads; install it with pip install h5py") from error
    numbers = (start, size, MOST_TENSORS, MOST_HEADER, SECONDS)
    command = CommandLine([sys.executable, _CONTENTS, *map(str, numbers)])
    threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # whose stacks are memory
    done = output_of(command, threads, _PATIENCE, _MOST_CONTENTS, stdin=file)
    if done.code is None:
        raise refusal(path, f"HDF5's library did not read it within {_PATIENCE:g} s")
    if done.code:
        how = signal.Signals(-done.code).name if done.code < 0 else f"{done.error:.200}"
        raise refusal(path, f"HDF5's library failed on it ({how})")
    try:
        found = decode(Hdf5Contents, parse_json(done.output), strict=True)
    except ValueError as error:
        raise refusal(path, f"its contents cannot be listed ({error})") from error
    if found.refused:
        raise refusal(path, found.refused)
    return found


def chain(path: list[str] | tuple[str, ...], names: LayerNames, only_named: bool) -> list[str]:
    """Returns the names of the layers that hold each other, from the outermost in.

    Args:
      path: the path of attributes and classes to the innermost.
      names: the names of layers by path.
      only_named: whether the path has nothing else in it that tells layers apart.
    """
    prefixes = [tuple(path[: end + 1]) for end in range(len(path))]
    if only_named:
        return [names[prefix] for prefix in prefixes if prefix in names]
    return [names.get(prefix, prefix[-1]) for prefix in prefixes if prefix[-1] != _LIST]


def names_in(config: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], str]:
    """Returns the names of the layers of a functional or sequential model, also in others, by the path to each."""
    inner = config.get("config") if isinstance(config, dict) else None
    layers = inner.get("layers") if isinstance(inner, dict) else None
    found: dict[tuple[str, ...], str] = {}
    numbers: dict[str, int] = {}
    for layer in layers if isinstance(layers, list) else ():
        kind, own = (layer.get("class_name"), layer.get("config")) if isinstance(layer, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(own, dict):
            continue
        place = (*path, _LIST, numbered(snake_case(kind.rpartition(">")[2]), numbers))
        if isinstance(name := own.get("name") or layer.get("name"), str):
            found[place] = name
        found.update(names_in(layer, place))
    return found


def numbered(name: str, numbers: dict[str, int]) -> str:
    """Returns a name with the number that Keras gives the later ones of a list, and counts it."""
    numbers[name] = numbers.get(name, -1) + 1
    return f"{name}_{numbers[name]}" if numbers[name] else name


def snake_case(name: str) -> str:
    """Returns the name of a class as Keras writes it in a file."""
    name = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", name))
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


def _dtype(one: Hdf5Numbers) -> np.dtype | None:
    return np.dtype(ml_dtypes.bfloat16 if one.dtype == "bfloat16" else one.dtype) if one.dtype else None

"""Keras's files of weights in HDF5: `.weights.h5`, alone or in a `.keras` file, and the older `.h5`.

A `.weights.h5` has a group for each layer, at the path of attributes that lead to it (`block/attention`); layers in a
list are named there by their classes (`layers/dense_1`). The variables of a layer are numbered (`vars/0`), in the order
in which that class saves them. Keras 3 writes the name of each layer beside its variables, tf_keras does not; then the
configuration in a `.keras` file has those in `layers`. An older `.h5` has the names of variables.
"""

import enum
import re
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import h5py
import ml_dtypes
import numpy as np

from looplib.errors import UsageError
from looplib.extras.weights.sources import MOST_DIMENSIONS, MOST_TENSORS, StoredTensor, refusal

_VARIABLES, _LIST = "vars", "layers"
_OWNED = frozenset({"optimizer", "_optimizer", "metrics", "_metrics", "_compile_metrics", "optimizer_weights"})
_DEEPEST = 60  # groups
_LONGEST_NAME = 1_000
_ERRORS = (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError, OverflowError)

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


class Hdf5Weights:
    """A file of weights of Keras.

    Args:
      file: the HDF5 file, open; closed with this.
      path: its name in messages.
      config: the configuration of the model beside it, as JSON; None for none.

    Attributes:
      tensors: the tensors by their place in the file.
      numbered: whether the variables of a layer have numbers and no names.
      names: whose names of layers it has.

    Raises:
      WarmStartError: if it is damaged, something else, or has what leads out of it.
    """

    def __init__(self, file: BinaryIO, path: str, config: Any = None) -> None:
        self._path, self._file = path, file
        self._seen: set[Any] = set()
        self._layers: dict[tuple[str, ...], str] = {}
        self._places: set[tuple[str, ...]] = {()}  # of layers, also of those without variables
        self.names = NamesOfLayers.NONE
        try:
            self._root = h5py.File(file, "r")
            older = "layer_names" in self._root.attrs or "model_weights" in self._root
            self.numbered = not older
            found = list(self._datasets(self._root, ()))
            self.tensors = self._older(found) if older else self._newer(found, config)
        except UsageError:
            file.close()
            raise
        except _ERRORS as error:
            file.close()
            raise refusal(path, f"it is a damaged HDF5 file ({error})".replace("\n", " ")) from error

    def _datasets(self, group: h5py.Group, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], h5py.Dataset]]:
        """Yields what holds numbers below a group, with the path to it; follows no link."""
        if len(path) > _DEEPEST:
            raise refusal(self._path, f"its groups are nested deeper than {_DEEPEST}")
        if path and path[-1] == _VARIABLES:
            self._places.add(path[:-1])
            if name := _text(group.attrs, "name"):
                self._layers[path[:-1]], self.names = name, NamesOfLayers.ALL
        for name in group:
            place = (*path, name)
            shown = "/".join(place)[-100:]
            if not isinstance(link := group.get(name, getlink=True), h5py.HardLink):
                raise refusal(self._path, f"{shown!r} is a link ({type(link).__name__}), which may lead elsewhere")
            item = group[name]
            address = h5py.h5o.get_info(item.id).addr
            if address in self._seen or len(self._seen) > MOST_TENSORS:
                raise refusal(self._path, f"{shown!r} is there twice, or one of more than {MOST_TENSORS:,}")
            self._seen.add(address)
            if isinstance(item, h5py.Group):
                yield from self._datasets(item, place)
            elif isinstance(item, h5py.Dataset):
                self._check(item, shown)
                yield place, item

    def _check(self, item: h5py.Dataset, shown: str) -> None:
        """Raises `WarmStartError` for numbers that are not in the file as they are."""
        if item.is_virtual or item.external:
            raise refusal(self._path, f"the numbers of {shown!r} are in another file")
        if item.shape is None or len(item.shape) > MOST_DIMENSIONS:
            raise refusal(self._path, f"{shown!r} has no shape, or one of more than {MOST_DIMENSIONS} dimensions")
        stored, claimed = item.id.get_storage_size(), item.size * item.dtype.itemsize
        if item.id.get_create_plist().get_nfilters():
            raise refusal(self._path, f"{shown!r} is compressed, as Keras never writes it", "write it uncompressed")
        if stored < claimed:
            raise refusal(self._path, f"{shown!r} claims {claimed:,} bytes, and the file has {stored:,} of them")

    def _newer(self, found: list[tuple[tuple[str, ...], h5py.Dataset]], config: Any) -> dict[str, StoredTensor]:
        if self.names is NamesOfLayers.NONE and (known := names_in(config)):
            self._layers, self.names = known, NamesOfLayers.OF_LISTS
        tensors = {}
        for path, item in found:
            *layer, of, number = path if len(path) > 1 else ("", *path)
            if of != _VARIABLES:
                raise refusal(self._path, f"{'/'.join(path)[-100:]!r} is in no group of variables (vars)")
            name = "/".join([*chain(layer, self._layers, self.names is NamesOfLayers.ALL), number])
            listed = frozenset(index for index in range(len(layer)) if tuple(layer[:index]) not in self._places)
            tensors["/".join(path)] = StoredTensor(
                name, item.shape, _dtype(item), tuple(layer), number, listed, bool(layer) and layer[0] in _OWNED
            )
        if not tensors:
            raise refusal(self._path, "it has no variables")
        return tensors

    def _older(self, found: list[tuple[tuple[str, ...], h5py.Dataset]]) -> dict[str, StoredTensor]:
        """Returns the tensors of an `.h5` of tf_keras: <layer>/<name of the variable>:0, maybe below model_weights."""
        tensors = {}
        for path, item in found:
            names = path[2:] if path[0] == "model_weights" else path[1:]
            name = re.sub(r":\d+$", "", "/".join(names))
            tensors["/".join(path)] = StoredTensor(name, item.shape, _dtype(item), owned=path[0] in _OWNED)
        return tensors

    def read(self, key: str) -> np.ndarray:
        """Returns the numbers of a tensor."""
        item, dtype = self._root[key], self.tensors[key].dtype
        found = np.empty(item.shape, item.dtype)
        try:
            if found.size:
                item.read_direct(found)
        except _ERRORS as error:
            raise refusal(self._path, f"{key[-100:]!r} cannot be read ({error})".replace("\n", " ")) from error
        return found.view(dtype) if found.dtype.kind == "V" else found

    def close(self) -> None:
        """Closes the file."""
        self._root.close()
        self._file.close()


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


def _dtype(item: h5py.Dataset) -> np.dtype | None:
    if item.dtype.kind == "V" and item.dtype.itemsize == 2 and _text(item.attrs, "dtype") == "bfloat16":
        return np.dtype(ml_dtypes.bfloat16)
    return item.dtype if item.dtype.kind in "fiub" else None


def _text(attributes: h5py.AttributeManager, name: str) -> str:
    """Returns a short text of a file; "" for none, or for something else."""
    if (
        name not in attributes
        or (told := attributes.get_id(name)).shape != ()
        or told.get_storage_size() > _LONGEST_NAME
    ):
        return ""
    value = attributes[name]
    value = value.decode(errors="replace") if isinstance(value, bytes) else value
    return value if isinstance(value, str) and len(value) <= _LONGEST_NAME else ""

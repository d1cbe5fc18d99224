"""Opens what a path names, if it is a file of weights, or a folder that has one; not TensorFlow's own formats."""

import os

from looplib.base import files
from looplib.base.console import printable
from looplib.base.messages import with_cure
from looplib.errors import NoCheckpointError, UsageError, WarmStartError
from looplib.stores.shards import INDEXES, KERAS, files_of, kind_of, places_in, refusal
from looplib.weights.hdf5 import Hdf5Part, Hdf5Weights
from looplib.weights.safetensors import SafetensorsFile, SafetensorsShards
from looplib.weights.sources import WeightsSource
from looplib.weights.zipped import find_weights

_HDF5, _ZIP = b"\x89HDF\r\n\x1a\n", b"PK"
_WANTED = (".safetensors", ".weights.h5", ".keras", *INDEXES)
_KNOWN = (
    "a .keras, .weights.h5 or .safetensors file, the .safetensors.index.json or .weights.json of several, a "
    "checkpoint or a SavedModel"
)


def open_weights(path: str) -> Hdf5Weights | WeightsSource | None:
    """Opens a file of weights, or the only one in a folder; None if a path names neither.

    Raises:
      WarmStartError: if it is damaged, something else, or has programs in it.
    """
    try:
        if os.path.isdir(path):
            name = _only(path)
            return _opened(os.path.join(path, name), path) if name else None
        return _opened(os.path.realpath(path), path) if os.path.exists(path) else None
    except UsageError:
        raise
    except (OSError, ValueError, MemoryError) as error:
        raise WarmStartError(f"{path} cannot be read: {with_cure(error)}") from error


def _only(folder: str) -> str | None:
    """Returns the name of the file of weights in a folder; None if there is none."""
    names = sorted(os.listdir(folder))
    found = [name for name in names if name.endswith(_WANTED)]
    for index in [name for name in found if kind_of(name)]:
        shards = files_of(os.path.join(folder, index), kind_of(index))
        found = [name for name in found if name not in shards]
    if len(found) > 1:
        names = printable(", ".join(found))
        raise NoCheckpointError(f"{folder} has several files of weights: {names}; name one of them")
    return found[0] if found else None


def _opened(path: str, given: str) -> Hdf5Weights | WeightsSource | None:
    if kind := kind_of(path, given):
        return _shards_of_keras(path) if kind == KERAS else SafetensorsShards(path)
    try:
        file = files.open_regular(path)
    except files.NotRegularError as error:
        raise refusal(given, str(error), "name the file itself, or copy the folder with cp -rL") from error
    try:
        begin = file.read(10)
        file.seek(0)
        if begin.startswith(_HDF5):
            return Hdf5Weights([Hdf5Part(file, given, 0, os.fstat(file.fileno()).st_size)])
        if begin.startswith(_ZIP):
            start, size, config = find_weights(file, given)
            return Hdf5Weights([Hdf5Part(file, given, start, size)], config)
        if begin[8:9] == b"{" or path.endswith(".safetensors"):
            file.close()
            return SafetensorsFile(path)
        if begin[:1] == b"\x80" and begin[1:2] in b"\2\3\4\5":
            raise refusal(given, "it is a pickle, which is a program", f"expected {_KNOWN}")
        if path.endswith((*_WANTED, ".h5", ".bin", ".pt", ".pth")):
            raise refusal(given, f"it begins with {begin!r}, as no file of weights does", f"expected {_KNOWN}")
    except BaseException:
        file.close()
        raise
    file.close()
    return None


def _shards_of_keras(index: str) -> Hdf5Weights:
    """Opens the files beside an index of Keras 3, of which each has some layers, or some variables of one."""
    parts: list[Hdf5Part] = []
    places = places_in(index, KERAS)
    try:
        for name in sorted({name for names in places.values() for name in names}):
            place = os.path.join(os.path.dirname(index), name)
            try:
                file = files.open_regular(place)
            except FileNotFoundError:
                raise refusal(index, f"{name} is not beside it", "copy all files of the index") from None
            except files.NotRegularError as error:
                raise refusal(place, str(error), "copy the folder with cp -rL") from error
            parts.append(Hdf5Part(file, place, 0, os.fstat(file.fileno()).st_size))
            if file.read(len(_HDF5)) != _HDF5:
                raise refusal(place, "it is no file of HDF5")
            file.seek(0)
        found = Hdf5Weights(parts)
        layers = {key.rpartition("/")[0] for key in found.tensors}
        for layer in places:
            if layer.strip("/") not in layers:
                raise refusal(index, f"its files have no {layer!r:.100}, which it places there")
        return found
    except BaseException:
        for part in parts:
            part.file.close()
        raise

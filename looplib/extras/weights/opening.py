"""Opens what a path names, if it is a file of weights, or a folder that has one; not TensorFlow's own formats."""

import os

from looplib import files
from looplib.errors import NoCheckpointError, UsageError, WarmStartError
from looplib.extras.weights.hdf5 import Hdf5Weights
from looplib.extras.weights.safetensors import INDEX, SafetensorsFile, SafetensorsShards, shards_of
from looplib.extras.weights.sources import WeightsSource, refusal
from looplib.extras.weights.zipped import find_weights
from looplib.messages import with_cure

_HDF5, _ZIP = b"\x89HDF\r\n\x1a\n", b"PK"
_WANTED = (".safetensors", INDEX, ".weights.h5", ".keras")
_KNOWN = (
    "a .keras, .weights.h5 or .safetensors file, the .safetensors.index.json of several, a checkpoint or a SavedModel"
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
    for index in [name for name in found if name.endswith(INDEX)]:
        shards = set(shards_of(os.path.join(folder, index)).values())
        found = [name for name in found if name not in shards]
    if len(found) > 1:
        raise NoCheckpointError(f"{folder} has several files of weights: {', '.join(found)}; name one of them")
    return found[0] if found else None


def _opened(path: str, given: str) -> Hdf5Weights | WeightsSource | None:
    if path.endswith(INDEX) or given.endswith(INDEX):
        return SafetensorsShards(path)
    try:
        file = files.open_regular(path)
    except files.NotRegularError as error:
        raise refusal(given, str(error), "name the file itself, or copy the folder with cp -rL") from error
    try:
        begin = file.read(10)
        file.seek(0)
        if begin.startswith(_HDF5):
            return Hdf5Weights(file, given, 0, os.fstat(file.fileno()).st_size)
        if begin.startswith(_ZIP):
            start, size, config = find_weights(file, given)
            return Hdf5Weights(file, given, start, size, config)
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

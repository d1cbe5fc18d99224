"""Opens files of weights by their format: safetensors, Keras's, HDF5, and TensorFlow's checkpoints."""

import os
import re
import struct
import zipfile
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from looplib.base import files
from looplib.base.console import printable
from looplib.base.decoding import parse_json
from looplib.base.messages import with_cure
from looplib.errors import NoCheckpointError, UsageError, WarmStartError
from looplib.stores.shards import INDEXES, KERAS, MOST_TENSORS, SAFETENSORS, files_of, kind_of, places_in, refusal
from looplib.weights.hdf5 import Hdf5Part, Hdf5Weights
from looplib.weights.sources import MOST_HEADER, StoredTensor, WeightsSource, are_sizes

METADATA = {"format": "tf", "names": "looplib"}  # of a file that looplib writes
DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip


class SafetensorsFile:
    """A file of safetensors.

    Args:
      path: the file, which is no link.

    Attributes:
      tensors: its tensors by key, which are their names.
      counted: whether looplib has written it, and counts the layers that Keras has named from 0 on.

    Raises:
      WarmStartError: if it is damaged, or something else.
      OSError: if it cannot be read.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._file = files.open_regular(path)
        except ValueError as error:
            raise refusal(path, str(error), "name the file itself, or copy the folder with cp -rL") from error
        try:
            self._start, header = self._header()
            self.tensors, self._places = self._checked(header)
        except BaseException:
            self._file.close()
            raise

    def _header(self) -> tuple[int, dict[str, Any]]:
        self._size = os.fstat(self._file.fileno()).st_size
        length = int.from_bytes(self._file.read(8), "little")
        if self._size < 8 or length > self._size - 8:
            raise refusal(self._path, f"it has {self._size:,} bytes, and its header claims {length:,}")
        if length > MOST_HEADER:
            raise refusal(self._path, f"its header has {length:,} bytes, more than {MOST_HEADER:,}")
        try:
            header = parse_json(self._file.read(length))
        except (ValueError, RecursionError) as error:
            raise refusal(self._path, "it does not begin with the header of safetensors") from error
        if not isinstance(header, dict) or len(header) > MOST_TENSORS:
            raise refusal(self._path, f"its header is no list of at most {MOST_TENSORS:,} tensors")
        self.counted = header.pop("__metadata__", None) == METADATA
        return 8 + length, header

    def _checked(self, header: dict[str, Any]) -> tuple[dict[str, StoredTensor], dict[str, int]]:
        """Returns the tensors, and where each begins; they lie one after the other and fill the file."""
        tensors, places = {}, {}
        for name, told in header.items():
            shape, dtype, start, end = self._fields(name, told)
            tensors[name] = StoredTensor(name, shape, np.dtype(dtype))
            places[name] = start
            if end - start != tensors[name].bytes:
                raise refusal(
                    self._path, f"{name!r:.100} has {end - start:,} bytes, and its shape {list(shape)} needs "
                    f"{tensors[name].bytes:,}"
                )  # fmt: skip
        at = 0
        for name in sorted(places, key=lambda name: (places[name], tensors[name].bytes)):
            if places[name] != at:
                raise refusal(
                    self._path, f"{name!r:.100} begins at byte {places[name]:,} of the numbers, not at {at:,}"
                )
            at += tensors[name].bytes
        if self._start + at != self._size:
            raise refusal(self._path, f"it has {self._size:,} bytes, and its header tells of {self._start + at:,}")
        return tensors, places

    def _fields(self, name: str, told: Any) -> tuple[tuple[int, ...], Any, int, int]:
        if isinstance(told, dict):
            shape, dtype, offsets = told.get("shape"), told.get("dtype"), told.get("data_offsets")
            if isinstance(dtype, str) and dtype not in DTYPES:
                raise refusal(self._path, f"{name!r:.100} has the type {dtype!r:.30}", f"expected {', '.join(DTYPES)}")
            if isinstance(dtype, str) and are_sizes(shape) and are_sizes(offsets) and len(offsets) == 2:
                return tuple(shape), DTYPES[dtype], *offsets
        raise refusal(self._path, f"the header's {name!r:.100} has no type, shape and place")

    def read(self, key: str) -> np.ndarray:
        """Returns the numbers of a tensor."""
        return self.tensors[key].read_from(self._file, self._start + self._places[key], self._path)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class SafetensorsShards:
    """Files of safetensors beside an index of them.

    Args:
      path: the index, `model.safetensors.index.json`.

    Attributes:
      tensors: the tensors that the index names, by name.

    Raises:
      WarmStartError: if the index or a file is damaged, or does not fit the other.
      OSError: if one cannot be read.
    """

    def __init__(self, path: str) -> None:
        places = {tensor: name for tensor, (name,) in places_in(path, SAFETENSORS).items()}
        self._shards: dict[str, SafetensorsFile] = {}
        try:
            for name in sorted(set(places.values())):
                place = os.path.join(os.path.dirname(path), name)
                if not os.path.lexists(place):
                    raise refusal(path, f"{name} is not beside it", "copy all files of the index")
                self._shards[name] = SafetensorsFile(place)
            for tensor, name in places.items():
                if tensor not in self._shards[name].tensors:
                    raise refusal(path, f"{name} has no {tensor!r:.100}, which the index places there")
        except BaseException:
            self.close()
            raise
        self._places = places
        self.tensors = {tensor: self._shards[name].tensors[tensor] for tensor, name in places.items()}

    def read(self, key: str) -> np.ndarray:
        """Returns the numbers of a tensor."""
        return self._shards[self._places[key]].read(key)

    def close(self) -> None:
        """Closes the files."""
        for shard in self._shards.values():
            shard.close()


_WEIGHTS, _CONFIG = "model.weights.h5", "config.json"
_UNPACK = f"take its weights alone, by: unzip FILE {_WEIGHTS}"
_END, _LONGEST_COMMENT = b"PK\5\6", 1 << 16
_MOST_MEMBERS = 100_000


def find_weights(file: BinaryIO, path: str) -> tuple[int, int, Any]:
    """Returns where HDF5 begins in a `.keras` file, its bytes, and the model's configuration as JSON; None for none.

    Raises:
      WarmStartError: if it is damaged, something else, compressed, or has pickled code.
      OSError: if it cannot be read.
    """
    _check_directory(file, path)
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            found = {member.filename: member for member in members}
            if len(members) != len(found) or len(members) > _MOST_MEMBERS:
                raise refusal(path, f"it has {len(members):,} members, some of one name")
            for name in found:
                if name.startswith("/") or "\\" in name or ".." in name.split("/"):
                    raise refusal(path, f"its member {name!r:.100} leads out of a folder")
                if name.endswith(".pkl"):
                    raise refusal(
                        path, f"it holds the pickle {name!r:.100}, which is a program", "save it as safetensors"
                    )
            if _WEIGHTS not in found:
                raise refusal(path, f"it has no {_WEIGHTS}", "expected a file that model.save has written")
            config = _config(archive, found.get(_CONFIG), path)
            return *_place(file, found[_WEIGHTS], path), config
    except (zipfile.BadZipFile, EOFError, struct.error, NotImplementedError, RuntimeError, UnicodeDecodeError) as error:
        raise refusal(path, f"it is a damaged zip ({error})") from error


def _check_directory(file: BinaryIO, path: str) -> None:
    """Raises `WarmStartError` for a zip whose list of members would fill the memory."""
    size = os.fstat(file.fileno()).st_size
    file.seek(max(0, size - _LONGEST_COMMENT - 22))
    end = file.read()
    at = end.rfind(_END)
    if at < 0 or len(end) - at < 22:
        raise refusal(path, "it is a zip without an end, so a part of it is missing")
    (listing,) = struct.unpack_from("<I", end, at + 12)
    if listing > MOST_HEADER:
        raise refusal(path, f"the list of its members has {listing:,} bytes, more than {MOST_HEADER:,}")


def _config(archive: zipfile.ZipFile, member: zipfile.ZipInfo | None, path: str) -> Any:
    if member is None:
        return None
    if member.file_size > MOST_HEADER:
        raise refusal(path, f"its {_CONFIG} has {member.file_size:,} bytes, more than {MOST_HEADER:,}", _UNPACK)
    with archive.open(member) as file:
        text = file.read(MOST_HEADER)
    if re.search(rb'"class_name"\s*:\s*"__lambda__"', text):
        raise refusal(path, "it has the pickled code of a lambda, which looplib does not take", _UNPACK)
    try:
        return parse_json(text)
    except ValueError as error:
        raise refusal(path, f"its {_CONFIG} cannot be read ({error})", _UNPACK) from error


def _place(file: BinaryIO, member: zipfile.ZipInfo, path: str) -> tuple[int, int]:
    if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
        kind = "encrypted" if member.flag_bits & 1 else "compressed"
        raise refusal(path, f"its {_WEIGHTS} is {kind}, as Keras never writes it", _UNPACK)
    file.seek(member.header_offset)
    header = file.read(30)
    if len(header) < 30 or not header.startswith(b"PK\3\4"):
        raise refusal(path, f"its {_WEIGHTS} is not where its list says")
    name, extra = struct.unpack("<HH", header[26:])
    start = member.header_offset + 30 + name + extra
    if start + member.file_size > os.fstat(file.fileno()).st_size or member.file_size != member.compress_size:
        raise refusal(path, f"its {_WEIGHTS} claims {member.file_size:,} bytes, which it does not have")
    return start, member.file_size


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

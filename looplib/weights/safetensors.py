"""Files of safetensors: a header of names, types, shapes and places, then the numbers. Nothing in them is a program."""

import math
import os
from typing import Any

import ml_dtypes
import numpy as np

from looplib.base import files
from looplib.stores.shards import MOST_TENSORS, SAFETENSORS, places_in, refusal
from looplib.weights.sources import MOST_HEADER, StoredTensor, are_sizes

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
            header = files.parse_json(self._file.read(length))
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
        tensor = self.tensors[key]
        found = np.empty(math.prod(tensor.shape), tensor.dtype)
        self._file.seek(self._start + self._places[key])
        if self._file.readinto(found.view(np.uint8)) != tensor.bytes:
            raise refusal(self._path, "it was shortened while it was read")
        return found.reshape(tensor.shape)

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

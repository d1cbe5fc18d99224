"""Prints the contents of an HDF5 file as JSON, as a process of its own: a damaged file can hang or crash the library.

It gets the file as standard input, and uses nothing of looplib. `hdf5.py` starts it.
"""

import contextlib
import io
import json
import os
import resource
import sys
from typing import Any

if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file, whose other files have names of packages
import h5py

VARIABLES = "vars"
_DEEPEST = 60  # groups
_MOST_DIMENSIONS = 32
_MEMORY = 4 << 30
_FAILURES = (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError, OverflowError, MemoryError)


class Refusal(Exception):
    """The file has what no file of weights has."""


class FilePart(io.RawIOBase):
    """A part of an open file, as a file that is read.

    Args:
      file: the number of the whole one.
      start: where the part begins.
      size: how many bytes it has.
    """

    def __init__(self, file: int, start: int, size: int) -> None:
        self._file, self._start, self._size, self._at = file, start, size, 0

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Goes to a place in the part, and returns it."""
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Reads bytes into a buffer, and returns how many."""
        view = memoryview(buffer).cast("B")[: max(0, self._size - self._at)]
        count = os.preadv(self._file, [view], self._start + self._at) if view else 0
        self._at += count
        return count


class Hdf5Listing:
    """The groups and data sets of a file.

    Args:
      file: the file.
      most_items: the largest number of them.
      most_bytes: the largest size of their names.
    """

    def __init__(self, file: FilePart, most_items: int, most_bytes: int) -> None:
        self._most_items, self._bytes = most_items, most_bytes
        self._seen: set[Any] = set()
        self.layers: list[dict[str, Any]] = []
        self.numbers: list[dict[str, Any]] = []
        root = h5py.File(file, "r")
        self.older = "layer_names" in root.attrs or "model_weights" in root
        self._look_into(root, ())

    def _look_into(self, group: h5py.Group, path: tuple[str, ...]) -> None:
        """Notes what is below a group; follows no link."""
        if len(path) > _DEEPEST:
            raise Refusal(f"its groups are nested deeper than {_DEEPEST}")
        if path and path[-1] == VARIABLES:
            self.layers.append({"path": path[:-1], "name": _text(group.attrs, "name")})
        for name in group:
            place = (*path, name)
            shown = "/".join(place)[-100:]
            self._bytes -= len(name) + sum(map(len, path))
            if len(self._seen) >= self._most_items or self._bytes < 0:
                raise Refusal(f"it has more than {self._most_items:,} items, or longer names than weights have")
            if not isinstance(link := group.get(name, getlink=True), h5py.HardLink):
                raise Refusal(f"{shown!r} is a link ({type(link).__name__}), which may lead elsewhere")
            item = group[name]
            address = h5py.h5o.get_info(item.id).addr
            if address in self._seen:
                raise Refusal(f"{shown!r} is there twice")
            self._seen.add(address)
            if isinstance(item, h5py.Group):
                self._look_into(item, place)
            elif isinstance(item, h5py.Dataset):
                self._note(item, place, shown)

    def _note(self, item: h5py.Dataset, place: tuple[str, ...], shown: str) -> None:
        """Notes where the numbers of a data set are; refuses those that are not in the file as they are."""
        if item.is_virtual or item.external:
            raise Refusal(f"the numbers of {shown!r} are in another file")
        if item.shape is None or len(item.shape) > _MOST_DIMENSIONS:
            raise Refusal(f"{shown!r} has no shape, or one of more than {_MOST_DIMENSIONS} dimensions")
        if item.chunks or item.id.get_create_plist().get_layout() != h5py.h5d.CONTIGUOUS:
            raise Refusal(f"{shown!r} is in chunks, maybe compressed, as Keras never writes it")
        stored, claimed = item.id.get_storage_size(), item.size * item.dtype.itemsize
        offset = item.id.get_offset()
        if stored < claimed or (claimed and offset is None):
            raise Refusal(f"{shown!r} claims {claimed:,} bytes, and the file has {stored:,} of them")
        self.numbers.append(
            {"path": place, "shape": item.shape, "dtype": _dtype(item), "place": 0 if offset is None else offset}
        )


def _dtype(item: h5py.Dataset) -> str:
    """Returns the type of numbers; "" for something else."""
    if item.dtype.kind == "V" and item.dtype.itemsize == 2 and _text(item.attrs, "dtype") == "bfloat16":
        return "bfloat16"
    return item.dtype.str if item.dtype.kind in "fiub" else ""


def _text(attributes: h5py.AttributeManager, name: str) -> str:
    """Returns a text that a file has beside something; "" for none, or for something else."""
    if name not in attributes or attributes.get_id(name).shape != ():
        return ""
    value = attributes[name]
    value = value.decode(errors="replace") if isinstance(value, bytes) else value
    return value if isinstance(value, str) and len(value) <= 1_000 else ""


def main(start: int, size: int, most_items: int, most_bytes: int, seconds: int) -> None:
    """Prints the contents of standard input, or why they are refused."""
    with contextlib.suppress(ValueError):  # macOS refuses it: it reserves more than that for each process
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    told: dict[str, Any] = {"refused": "", "older": False, "layers": [], "numbers": []}
    try:
        found = Hdf5Listing(FilePart(0, start, size), most_items, most_bytes)
        told |= {"older": found.older, "layers": found.layers, "numbers": found.numbers}
    except Refusal as error:
        told["refused"] = str(error)
    except _FAILURES as error:
        told["refused"] = f"it is a damaged HDF5 file ({' '.join(str(error).split())})"[:300]
    sys.stdout.write(json.dumps(told))
    sys.stdout.flush()
    os._exit(0)  # what is left of a damaged file is not taken apart


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

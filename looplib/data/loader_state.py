"""The state of a loader as a text, and the positions in loaders and in followed files that a checkpoint holds."""

import abc
import base64
import contextlib
import dataclasses
import json
import sys
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from looplib.base import folders
from looplib.base.decoding import MisfitError, decode, parse_json

MOST_BYTES = 64 * 2**20  # of a state
_Kind = TypeVar("_Kind", bound="_Position")
_PLAIN = (bool, int, float, str, type(None))
_KIND, _VALUE = "looplib", "value"  # the names in an object that stands for a value that JSON does not have


class UnsavableStateError(Exception):
    """A loader's state holds a value that cannot be saved as data; the message is a clause that says which."""


def pack(state: Any) -> str:
    """Returns the text of a state: plain values, bytes, arrays, PyTorch tensors, lists, tuples and dicts of these.

    Raises:
      UnsavableStateError: for another value, or a state of more than 64 MiB.
    """
    text = json.dumps(_packed(state, "state"), separators=(",", ":"))
    if len(text) > MOST_BYTES:
        raise UnsavableStateError(f"it has {len(text):,} bytes, and looplib saves at most {MOST_BYTES:,}")
    return text


def unpack(text: str) -> Any:
    """Returns the state of a text; raises `MisfitError` if it is no text of `pack`."""
    try:
        return _unpacked(parse_json(text))
    except (ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        raise MisfitError(f"the saved state of the loader cannot be read: {error}") from error


def _packed(value: Any, where: str) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, bytes):
        return {_KIND: "bytes", _VALUE: base64.b64encode(value).decode()}
    if type(value) is list:
        return [_packed(part, f"{where}[{i}]") for i, part in enumerate(value)]
    if type(value) is tuple:
        return {_KIND: "tuple", _VALUE: [_packed(part, f"{where}[{i}]") for i, part in enumerate(value)]}
    if isinstance(value, Mapping):
        parts = {key: _packed(part, f"{where}[{key!r}]") for key, part in value.items()}
        if all(type(key) is str for key in parts) and _KIND not in parts:
            return parts
        return {_KIND: "dict", _VALUE: [[_packed(key, where), part] for key, part in parts.items()]}
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return {_KIND: "tensor", _VALUE: _packed(value.numpy(force=True), where)}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        array = np.asarray(value)
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        content = base64.b64encode(array.tobytes()).decode()
        return {_KIND: kind, "dtype": array.dtype.str, "shape": array.shape, _VALUE: content}
    raise UnsavableStateError(f"{where} is a {type(value).__module__}.{type(value).__qualname__}")


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(part) for part in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {name: _unpacked(part) for name, part in value.items()}
    kind, inner = value[_KIND], value[_VALUE]
    if kind == "bytes":
        return base64.b64decode(inner, validate=True)
    if kind == "tuple":
        return tuple(_unpacked(inner))
    if kind == "dict":
        return {_unpacked(key): _unpacked(part) for key, part in inner}
    if kind == "tensor":
        import torch

        return torch.from_numpy(_unpacked(inner))
    dtype = np.dtype(value["dtype"])
    if kind not in ("array", "scalar") or dtype.kind not in "biufc":
        raise MisfitError(f"no value is a {kind} of {dtype}")
    array = np.frombuffer(base64.b64decode(inner, validate=True), dtype).reshape(value["shape"]).copy()
    return array if kind == "array" else array[()]


def is_position(saved: bytes) -> bool:
    """Returns whether a saved position in the data says itself what it is of: one in a loader, or in followed files."""
    for kind in (LoaderPosition, FollowedPosition):
        with contextlib.suppress(MisfitError):
            kind.from_bytes(saved)
            return True
    return False


@dataclasses.dataclass(frozen=True)
class _Position(abc.ABC):
    """A position that a checkpoint holds as JSON."""

    @property
    @abc.abstractmethod
    def is_possible(self) -> bool:
        """Whether a run can be there; for values from a file."""

    def to_bytes(self) -> bytes:
        """Returns the position for a checkpoint."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls: type[_Kind], saved: bytes) -> _Kind:
        """Returns a position that was saved; raises `MisfitError` if it is none."""
        try:
            found = decode(cls, parse_json(saved), strict=True)
        except ValueError as error:
            raise MisfitError(str(error)) from error
        if not found.is_possible:
            raise MisfitError(f"no run is at {found!r:.200}")
        return found


@dataclasses.dataclass(frozen=True)
class FollowedFile:
    """A file that a run has taken.

    Attributes:
      name: its path, relative to the folder of the pattern.
      bytes: its size.
      records: how many of its records the run trains on; 0 for a file that is left out.
      digest: of some of its content, see `reader.file_digests`.
    """

    name: str
    bytes: int
    records: int
    digest: str = ""


@dataclasses.dataclass(frozen=True)
class FollowedPosition(_Position):
    """The files that a run has taken, in their order; the step says how many of their records it has trained on."""

    files: list[FollowedFile]

    @property
    def is_possible(self) -> bool:
        """See `_Position`."""
        names = {file.name for file in self.files}
        below = all(map(folders.is_name, "/".join(names or "-").split("/")))  # the folder of the pattern
        return below and len(names) == len(self.files) and all(min(one.bytes, one.records) >= 0 for one in self.files)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderPosition(_Position):
    """A position in the batches of a loader, those of one input pipeline.

    Attributes:
      loader: the name of the loader's class.
      part: the part of the data that the loader gives, such as "part 0 of 2, in batches of 32".
      consumed: how many of its batches the run has trained on.
      number: the number of the batch that follows the state, at most `consumed`.
      epoch: the pass that this batch belongs to, from 0 on.
      index: the number of the batch in its pass.
      state: the text of the loader's state in front of it; None for one without a state.
      digests: of this batch and those that follow, as far as they had been read.
    """

    loader: str
    part: str
    consumed: int
    number: int
    epoch: int
    index: int
    state: str | None
    digests: list[int]

    @property
    def is_possible(self) -> bool:
        """See `_Position`."""
        return min(self.number, self.epoch, self.index, self.consumed - self.number) >= 0

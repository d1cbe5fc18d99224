"""The weights in a `.keras` file, read where they are in the zip. Its configuration is only text here."""

import os
import re
import struct
import zipfile
from typing import Any, BinaryIO

from looplib.base import files
from looplib.stores.shards import refusal
from looplib.weights.sources import MOST_HEADER

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
        return files.parse_json(text)
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

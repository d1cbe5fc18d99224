"""Indexes of several files of weights: they name files beside them, and nothing else."""

from collections.abc import Mapping, Sequence

from looplib.base import files, folders
from looplib.base.console import printable
from looplib.base.decoding import parse_json
from looplib.errors import WarmStartError

# How the name of an index ends, and that of its files: of safetensors, and of Keras 3.
INDEXES = {".safetensors.index.json": ".safetensors", ".weights.json": ".weights.h5"}
SAFETENSORS, KERAS = INDEXES
MOST_TENSORS = 200_000  # of a file
_MOST_FILES = 1000  # of one entry


def kind_of(*names: str) -> str | None:
    """Returns the ending of an index that one of several names of a file has; None if none has."""
    return next((ending for ending in INDEXES for name in names if name.endswith(ending)), None)


def places_in(path: str, kind: str) -> Mapping[str, Sequence[str]]:
    """Returns the names of the files of each tensor, or each layer, in an index; all are plain names in its folder.

    Args:
      path: the index.
      kind: one of `INDEXES`.

    Raises:
      WarmStartError: if it is no such index, or names something else.
      OSError: if it cannot be read.
    """
    try:
        index = parse_json(files.read_text(path))
    except (ValueError, RecursionError) as error:
        raise refusal(path, f"it is no index of files of weights ({error})") from error
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not 0 < len(places) <= MOST_TENSORS:
        raise refusal(path, "it has no weight_map")
    found = {}
    for key, names in places.items():
        found[key] = names if kind == KERAS and isinstance(names, list) else [names]
        if not 0 < len(found[key]) <= _MOST_FILES:
            raise refusal(path, f"it names {len(found[key])} files for {key!r:.100}")
        for name in found[key]:
            if not folders.is_name(name) or not name.endswith(INDEXES[kind]):
                raise refusal(
                    path, f"it names {name!r:.100}", "expected the plain name of a file in its folder, such as "
                    f"model-00001{INDEXES[kind]}"
                )  # fmt: skip
    return found


def files_of(path: str, kind: str) -> list[str]:
    """Returns the names of the files in an index, sorted; for the rest see `places_in`."""
    return sorted({name for names in places_in(path, kind).values() for name in names})


def refusal(path: str, reason: str, cure: str = "save the weights again, or copy the file again") -> WarmStartError:
    """Returns the error of a file that is not what it should be."""
    return WarmStartError(printable(f"{path} is not taken: {reason}; {cure}"))

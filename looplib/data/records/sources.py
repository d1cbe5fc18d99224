"""Sources of records: files of any format that looplib knows, or any object with a length and items by number."""

import bisect
import collections
import glob
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import tensorflow as tf
from absl import logging

from looplib.base.files import is_remote, resolve
from looplib.base.messages import gist, is_utf8, join_names, shown
from looplib.compat.places import is_installed
from looplib.data.records.files import Files, absolute
from looplib.data.records.formats import ArrayRecords, FixedLength, Lines, Parquet, TFRecords
from looplib.data.records.index import BadRecordError, Numbered, Opening, ReadElsewhere, ReadTogether, ends_process
from looplib.errors import PluginError, RecordsError, StoreError, UsageError
from looplib.stores import ranges

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
_OPTIONS = {
    "binary": "record_bytes, and header_bytes if the files have a head",
    "parquet": "no option, or columns=[...], the names of those to read",
}
_EXTENSION = re.compile(r"\.(tfrecords?|array_?records?|parquet|txt|jsonl|csv|tsv)(?=[.-]|$)")


@runtime_checkable
class Source(Protocol):
    """Records by number. `grain.sources`, `array_record` and TFDS's data sources have these methods too.

    A source may also be a `ReadsMany` and `HasMeanBytes`. It is read by several threads at once.
    """

    def __len__(self) -> int:
        """Returns the number of records."""

    def __getitem__(self, number: int) -> Any:
        """Returns a record: bytes, or a structure of numpy arrays."""


@runtime_checkable
class ReadsMany(Protocol):
    """A source that reads several records at once."""

    def __getitems__(self, numbers: Sequence[int]) -> Sequence[Any]:
        """Returns records by number."""


@runtime_checkable
class HasMeanBytes(Protocol):
    """A source that knows the average size of its records, in bytes."""

    mean_bytes: float


@runtime_checkable
class Blocked(Protocol):
    """A source whose records are stored in blocks of `block` records, which are read whole."""

    block: int


@runtime_checkable
class TfdsSplit(Protocol):
    """A data source of TFDS, `builder.as_data_source(split)`: a split, which knows its files."""

    dataset_info: Any
    split: Any


RecordFormat = Literal["tfrecord", "array_record", "lines", "binary", "parquet"]


def open_records(files: Paths, format: RecordFormat | None = None, **options: Any) -> Source:
    """Opens files of records for random access.

    Args:
      files: a path or pattern, or a list of these; local, or in an object store: "s3://bucket/train-*.tfrecord".
      format: one of tfrecord, array_record, lines, binary, parquet; None takes it from the names of the files.
      **options: of the format: `record_bytes` (and `header_bytes`) of binary, `columns` of parquet.

    Returns:
      A `Source` whose records are bytes; of parquet, dicts of values.

    Raises:
      UsageError: if no file matches, the format is not known, or files are not of this format; names what is damaged.
    """
    paths = _matching(files)
    format = format or format_by_name(paths)
    if format not in FORMATS:
        raise RecordsError(f"the format of {paths[0]} is {format!r}; expected one of {', '.join(FORMATS)}")
    try:
        source = FORMATS[format](paths, **options)
        source.opening = Opening(absolute(paths), format, options)
        if not len(source) and any(source.files.sizes):
            logging.warning("no record is in %s", join_names(paths))
        return source
    except UsageError:
        raise
    except TypeError as error:
        raise RecordsError(
            f"files cannot be opened as {format} with the options {options or 'none'} ({gist(error)}); expected "
            f"{_OPTIONS.get(format, 'no option')}"
        ) from error
    except (OSError, RuntimeError, ValueError, MemoryError) as error:  # of another library
        if len(paths) > 1:
            for path in paths:
                open_records(path, format, **options)  # names the one that cannot be opened
        size = Files(paths[:1]).sizes[0]
        what = f"{paths[0]} and {len(paths) - 1} more files" if paths[1:] else f"{paths[0]}, {size} bytes,"
        why = gist(error).rstrip(".") if str(error) else "its end is not that of such a file"
        raise RecordsError(
            f"{what} cannot be opened as {format}: {why}; it was truncated or damaged, is still being written, or is "
            "of another format; restore it from a copy, or wait until it is written"
        ) from error


def opened(source: Any) -> Source:
    """Returns a source as it is, or opens files."""
    path = (str, os.PathLike)
    listed = isinstance(source, (list, tuple)) and source and all(isinstance(item, path) for item in source)
    if isinstance(source, path) or listed:
        return open_records(source)
    if not isinstance(source, Source):
        raise RecordsError(
            f"context.records was given a {type(source).__name__}; expected files, or an object with __len__ and "
            "__getitem__"
        )
    return _guarded(source) if isinstance(source, TfdsSplit) and _is_installed(source) else source


def _guarded(source: Any) -> Source:
    """Returns a data source of TFDS, guarded against changes of its files."""
    try:
        parts = source.dataset_info.splits[source.split].file_instructions
        files = Files([os.fspath(part.filename) for part in parts])
        counts = [part.examples_in_shard - part.skip if part.take == -1 else part.take for part in parts]
    except PluginError:  # TensorFlow reads them by itself
        return source
    except (AttributeError, KeyError, TypeError, ValueError):  # another version, or files that are elsewhere by now
        return source
    if sum(counts) != len(source):
        return source
    return ReadElsewhere(source, files, counts, [part.skip for part in parts])


class Chain(ReadTogether):
    """Sources one after another, as one, for a mixture.

    Args:
      sources: the sources; their records are numbered through.
      names: of the sources.
    """

    def __init__(self, sources: Sequence[Source], names: Sequence[str]) -> None:
        self.sources, self.names = list(sources), list(names)
        self.firsts = list(itertools.accumulate(map(len, self.sources), initial=0))

    def __len__(self) -> int:
        return self.firsts[-1]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Returns records by number."""
        return of_parts(self.firsts, numbers, self.sources.__getitem__)


class Subset(ReadTogether):
    """Some records of a source, as a source.

    Args:
      source: the records.
      ids: int64 `[n]`, the numbers of those to have.

    Attributes:
      source: the records.
      ids: int64 `[n]`, the numbers of those to have.
      mean_bytes: the average size of the records of the source.
    """

    def __init__(self, source: Source, ids: np.ndarray) -> None:
        self.source, self.ids, self.mean_bytes = source, ids, mean_bytes(source)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Returns records by number."""
        return items(self.source, self.ids[np.asarray(numbers)])


def named(source: Source, number: int) -> str:
    """Returns what an error calls a record of a source, with its file and place where these are known."""
    if isinstance(source, Chain):
        part = bisect.bisect_right(source.firsts, number) - 1
        return named(source.sources[part], number - source.firsts[part])
    if isinstance(source, Subset):
        return named(source.source, int(source.ids[number]))
    return source.named(number) if isinstance(source, Numbered) else f"record {number} of the {type(source).__name__}"


def of_parts(firsts: Sequence[int], numbers: Sequence[int], source: Callable[[int], Source]) -> list[Any]:
    """Returns records of sources that are numbered through.

    Args:
      firsts: the number of the first record of each source, and behind it how many there are.
      numbers: of the records.
      source: returns a source by its place.
    """
    numbers, found = np.asarray(numbers, np.int64), [None] * len(numbers)
    parts = np.searchsorted(firsts, numbers, "right") - 1
    for part in np.unique(parts).tolist():
        places = np.flatnonzero(parts == part).tolist()
        for place, record in zip(places, items(source(part), numbers[places] - firsts[part])):
            found[place] = record
    return found


def items(source: Source, numbers: Sequence[int]) -> list[Any]:
    """Returns records of a source, all at once if it can, in memory that the source does not use again.

    Raises:
      BadRecordError: for one that an installed package cannot read; what a class of the user's raises is passed on.
    """
    numbers = [int(number) for number in numbers]  # TFDS's sources take no array
    try:
        if isinstance(source, ReadsMany):
            return [_kept(record) for record in source.__getitems__(numbers)]
        return [_kept(source[number]) for number in numbers]
    except UsageError:
        raise
    except MemoryError as error:
        more = f" and {len(numbers) - 1} more" * (len(numbers) > 1)
        raise RecordsError(
            f"{named(source, numbers[0])}{more} cannot be read: they do not fit into memory; use smaller batches and "
            "blocks, or write smaller records"
        ) from error
    except Exception as error:
        if not _is_installed(source) or ends_process(error):
            raise
        if len(numbers) > 1:
            return [items(source, [number])[0] for number in numbers]
        kind = type(source).__name__
        raise BadRecordError(
            f"record {numbers[0]} of the {kind} cannot be read: {gist(error)}", "its files", f"{kind}-{numbers[0]}"
        ) from error


def _kept(record: Any) -> Any:
    """Returns a record with copies of its arrays, which a source may fill again for the next one."""
    if isinstance(record, np.ndarray):  # first, and those of abstract classes last, which take longer
        return record.copy()
    if isinstance(record, (bytes, str, int, float, np.generic, type(None))):
        return record
    if isinstance(record, (list, tuple)):
        parts = [_kept(part) for part in record]
        return type(record)(parts) if type(record) in (list, tuple) else type(record)(*parts)
    if isinstance(record, Mapping):
        return {name: _kept(part) for name, part in record.items()}
    return np.array(record)


def _is_installed(source: Source) -> bool:
    module = sys.modules.get(type(source).__module__)
    path = getattr(module, "__file__", None)
    return path is not None and is_installed(path)


def mean_bytes(source: Source) -> float:
    """Returns the average size of a source's records, of a few of them where it does not say; at least 1."""
    if isinstance(source, HasMeanBytes):
        return max(1.0, source.mean_bytes)
    if isinstance(source, Chain):
        return sum(mean_bytes(part) * len(part) for part in source.sources) / max(1, len(source))
    few = items(source, range(0, len(source), max(1, len(source) // 8)))
    sizes = [len(leaf) if isinstance(leaf, bytes) else np.asarray(leaf).nbytes for leaf in tf.nest.flatten(few)]
    return max(1.0, sum(sizes) / max(1, len(few)))


def _matching(files: Paths) -> list[str]:
    """Returns the files that patterns match, each pattern's in the order of their names."""
    listed = list(files) if isinstance(files, Iterable) and not isinstance(files, (str, bytes)) else [files]
    if not listed:
        raise RecordsError(
            f"the files of records are {shown(files)}; expected a path or pattern, or a list of at least one"
        )
    paths = []
    for pattern in (file if _is_stored(file) else _local(file) for file in listed):
        if _is_stored(pattern):
            paths += _chosen(os.fspath(pattern), *_objects(pattern))
            continue
        try:
            found, named = sorted(tf.io.gfile.glob(pattern)), tf.io.gfile.exists(pattern)
            is_folder = named and found in ([], [pattern]) and tf.io.gfile.isdir(pattern)
        except UnicodeDecodeError as error:
            names = [shown(name) for name in sorted(glob.glob(pattern)) if not is_utf8(name)]
            raise RecordsError(
                f"{pattern!r} matches files whose names are not UTF-8 ({join_names(names) or gist(error)}); rename "
                "them, or use another pattern"
            ) from error
        except (OSError, tf.errors.OpError) as error:
            raise RecordsError(
                f"{pattern!r} cannot be looked up ({gist(error)}); check the path, or the pattern"
            ) from error
        if is_folder:
            raise RecordsError(f"{pattern} is a folder; expected files, such as {pattern.rstrip('/')}/*.tfrecord")
        if "**" in pattern and not named:  # for TensorFlow it is one level, and for object stores all of them
            raise RecordsError(f"{pattern!r} has **, which local paths do not take; give a pattern for each level")
        paths += _chosen(pattern, found, named)
    names = collections.Counter(absolute(paths))
    if len(names) < len(paths):
        twice = sorted(name for name, count in names.items() if count > 1)
        raise RecordsError(
            f"the files of records contain {join_names(twice)} twice; each record would come twice an epoch"
        )
    return paths


def _chosen(pattern: str, found: list[str], named: bool) -> list[str]:
    """Returns the files that a pattern means: those that it matches, or the one that is `named` so."""
    if named and found not in ([], [pattern]):
        others = [name for name in found if name != pattern]
        raise RecordsError(
            f"{pattern!r} is the name of a file, and as a pattern it matches {join_names(others, most=3)} too; write "
            "[[], [*] and [?] for these signs in a name, or rename the file"
        )
    if not found and not named:
        raise RecordsError(
            f"{pattern!r} matches no file of records; check the path, or the pattern, where [[], [*] and [?] stand for "
            "these signs in a name"
        )
    return found or [pattern]


def _is_stored(path: Any) -> bool:
    return isinstance(path, (str, os.PathLike)) and is_remote(path) and not os.fspath(path).startswith("file://")


def _local(file: Any) -> str:
    resolve(file, "a file of records")  # refuses what is no path
    return os.path.expanduser(os.fspath(file).removeprefix("file://"))


def _objects(pattern: str) -> tuple[list[str], bool]:
    """Returns the objects of a store that a URL matches, and whether it is the URL of one."""
    pattern = os.fspath(pattern)
    if pattern.startswith(("http://", "https://")):
        raise RecordsError(f"{pattern!r} cannot be looked up (it is no object store); download files of the web first")
    try:
        return ranges.matching(pattern)
    except StoreError as error:
        raise RecordsError(f"{pattern!r} cannot be looked up: {error}") from error


def format_by_name(paths: list[str]) -> str:
    """Returns the format that the names of files say; raises `UsageError` if they say none, or several."""
    names = {"tfrecords": "tfrecord", "txt": "lines", "jsonl": "lines", "csv": "lines", "tsv": "lines"}
    found = set()
    for path in paths:
        match = _EXTENSION.search(path.rpartition("/")[2])
        name = match[1] if match else ""
        found.add("array_record" if name.startswith("array") else names.get(name, name))
    if len(found) != 1 or "" in found:
        raise RecordsError(
            f"the names of the files of records, such as {paths[0]}, do not say one format; open them by "
            f"looplib.open_records(files, format), with one of {', '.join(FORMATS)}"
        )
    return found.pop()


FORMATS: dict[RecordFormat, Callable[..., Source]] = {
    "tfrecord": TFRecords,
    "array_record": ArrayRecords,
    "lines": Lines,
    "binary": FixedLength,
    "parquet": Parquet,
}

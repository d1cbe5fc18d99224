"""Files of records that appear while a run trains: each is trained on once, in an order that checkpoints hold."""

import collections
import contextlib
import dataclasses
import datetime
import functools
import glob
import math
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from looplib.base import folders
from looplib.base.decoding import MisfitError
from looplib.base.files import is_remote, resolve, safe_name
from looplib.base.messages import duration, gist, shown, whole_number
from looplib.cluster.collectives import Workers
from looplib.cluster.preemption import notice
from looplib.data.context import DatasetCall, InputContext
from looplib.data.loader import ENDLESS, read_in_turn
from looplib.data.loader_state import FollowedFile, FollowedPosition
from looplib.data.order import Batches, Epoch, Ids, Positions, seeds_at
from looplib.data.records.blocks import RecordSelection, Stretch, block_picks
from looplib.data.records.files import Files
from looplib.data.records.index import BadRecordError, Numbered
from looplib.data.records.reader import RecordReader, as_batches, default_block, file_digests, leave_out, tolerant
from looplib.data.records.reading import RecordReads, read_records
from looplib.data.records.sources import Source, format_by_name, named, of_parts, open_records
from looplib.errors import DatasetError, OrderError, RecordsError, StoreError
from looplib.stores.stores import Store

_SLICE, _LOOKS = 0.2, 50  # seconds of a wait, after which a signal is looked for; and how often, for one `ready`
_SILENT = 60.0  # seconds between two lines of the log that say that a run waits
_LATE_NEWS = 10.0  # seconds that a worker waits until it sees a file which the chief has seen
_LEAST_BLOCKS = 2  # of a lane, of one file, which is smaller than a data set
_TOGETHER, _AHEAD = 16, 8  # batches that are located at once, and how often that is done ahead


@dataclasses.dataclass(frozen=True)
class Follow:
    """Settings of `context.records(pattern, follow=...)`.

    Attributes:
      settled: how long a local file has to be unchanged until it counts as whole: seconds, a `datetime.timedelta` or
        text such as "5m"; default "30s". None takes each file at once, for writers that give a file its name by a
        rename once it is complete. Objects of a store appear whole.
      newest: files whose last change is longer ago than this when they are found are left out, such as "7d"; default
        None, for all.
      every: seconds between two looks for new files; default 1.

    Raises:
      UsageError: for values of other kinds.
    """

    settled: float | str | datetime.timedelta | None = "30s"
    newest: float | str | datetime.timedelta | None = None
    every: float | str | datetime.timedelta | None = 1.0

    def __post_init__(self) -> None:
        for name in ("settled", "newest", "every"):
            object.__setattr__(self, name, duration(f"Follow.{name}", getattr(self, name)) or 0.0)


class FollowedFiles(Numbered):
    """The files that a run has taken, as one source; all workers have one list, which grows at its end.

    The chief looks for files, in the main thread between two calls of the inner loop. A pipeline that reads ahead waits
    in a thread of its own until the list has grown.

    Args:
      context: of a pipeline of the run.
      pattern: of the files.
      settings: the settings.
      block: records that are read at once; None for the default.

    Attributes:
      pattern: of the files.
      looks: how often it was asked for records; it grows while a run waits.
    """

    def __init__(self, context: InputContext, pattern: str, settings: Follow, block: int | None) -> None:
        super().__init__(Files([]), [])
        self._firsts = np.zeros(1, np.int64)
        self.pattern, self.looks = pattern, 0
        self._settings, self._block, self._bad = settings, block, context.bad_records
        self._batch_size, self._stored = context.positions.sizes.original, is_remote(pattern)
        self.format = format_by_name([pattern])
        start = next((at for at, sign in enumerate(pattern) if sign in "*?["), len(pattern))
        self._folder = pattern[: pattern.rfind("/", 0, start) + 1]
        self._store = Store(self._folder) if self._stored else None
        self._files: list[FollowedFile] = []
        self._agreed = False  # whether all workers have the list
        self._next: dict[int, int] = {}  # the number of the next batch of each iterator
        self._entries = 0  # iterators so far
        self._grown = threading.Condition()
        self._opened: dict[str, Numbered] = {}  # by the name of the file
        self._opening = threading.Lock()
        # Names and bytes of files that are not taken yet, in their order; of those that were looked at, bytes and time
        # of change, and since when these hold.
        self._waiting: collections.deque[tuple[str, int]] = collections.deque()
        self._seen: dict[str, tuple[tuple[int, float], float]] = {}
        self._told: set[tuple[str, str]] = set()  # sentences, by the names of the files
        self._listed = self._spoke = float("-inf")

    # As a source.

    @property
    def mean_bytes(self) -> float:
        """The average size of a record, as far as it is known."""
        return sum(file.bytes for file in self._files if file.records) / max(1, len(self))

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """See `Numbered`."""
        return of_parts(self._firsts, numbers, self._source)

    def named(self, number: int) -> str:
        """See `Numbered`."""
        file = int(np.searchsorted(self._firsts, number, "right")) - 1
        return named(self._open(self._files[file].name), number - int(self._firsts[file]))

    def _open(self, name: str) -> Numbered:
        """Opens a file, unless it is open."""
        with self._opening:  # several threads read at once
            if name not in self._opened:
                self._opened[name] = open_records(glob.escape(self._folder + name), self.format)
            return self._opened[name]

    def _source(self, file: int) -> Source:
        """Returns a file of the list as a source; a worker may see it later than the chief."""
        taken, end = self._files[file], time.monotonic() + _LATE_NEWS
        path = self._folder + taken.name
        while not (self._stored or taken.name in self._opened or os.path.exists(path) or time.monotonic() > end):
            time.sleep(_SLICE)
        source = self._checked(taken)
        return tolerant(source, self._bad, True, (None,)) if self._bad.most else source

    def _checked(self, taken: FollowedFile) -> Numbered:
        """Returns a file that is not read to its end; raises `UsageError` if it is gone, or another one by now."""
        try:
            is_new = taken.name not in self._opened
            source = self._open(taken.name)
            if not is_new or self._described(taken.name, source, taken.records) == taken:
                return source
            self._opened.pop(taken.name, None)
            how = "was changed"
        except RecordsError as error:
            how = f"cannot be opened any more ({gist(error)})"
        raise RecordsError(
            f"{self._folder}{taken.name} {how} since the run has taken it, and not all of its records were trained on; "
            "restore it, or leave it out by --bad_records=skip:N"
        )

    def _described(self, name: str, source: Numbered, records: int) -> FollowedFile:
        ((_, digest),) = file_digests(source.files)
        return FollowedFile(name, source.files.sizes[0], min(records, len(source)), digest)

    # For pipelines.

    def like(self) -> Source:
        """Returns records with the structure of all; waits for a file if the format alone does not say it."""
        if self.format != "parquet":
            return [b""]
        while True:
            for name in sorted(self._sizes()):
                with contextlib.suppress(RecordsError):  # it may still be written
                    if len(found := self._open(name)):
                        return found
            self._say_waiting()
            time.sleep(_SLICE)

    def enter(self, number: int) -> np.int64:
        """Begins to give batches to an iterator, from a number on; returns what identifies it."""
        with self._grown:
            self._entries += 1
            self._next[self._entries] = number
            return np.int64(self._entries)

    def following(self, places: Positions, entry: np.int64) -> list[np.ndarray]:
        """Returns the positions int64 `[k, b]` of the next batches of an iterator, and their `stretches`.

        It waits until the records of one are there.

        Raises:
          UsageError: if the iterator was closed.
        """
        with tf.device("/cpu:0"):
            first = tf.constant(self._next.get(entry, 0), tf.int64)
            positions = places.batches(first, _TOGETHER, Epoch(1)).numpy()
        with self._grown:
            while entry in self._next and not (self._agreed and positions[0, -1] < self._firsts[-1]):
                self._grown.wait(_SLICE)
            if entry not in self._next:
                raise RecordsError("the data of the run was closed")
            positions = positions[positions[:, -1] < self._firsts[-1]]
            self._next[entry] += len(positions)
        return [positions, self.stretches(positions)]

    def stretches(self, positions: np.ndarray) -> np.ndarray:
        """Returns the `Stretch`es of positions in the run, int64 `[k, b]`, ascending, as int64 `[4, k, b]`."""
        firsts, taken = self._firsts, self._files
        begin, end = np.searchsorted(firsts, positions[[0, -1], [0, -1]], "right") - 1
        of_each = np.asarray(
            [
                (file, firsts[file], taken[file].records, self.block_of(taken[file]) if taken[file].records else 1)
                for file in range(begin, end + 1)
            ]
        )
        return np.moveaxis(of_each[np.searchsorted(firsts, positions, "right") - 1 - begin], -1, 0)

    def block_of(self, file: FollowedFile) -> int:
        """Returns how many neighbouring records of a file are read at once."""
        mean = file.bytes / file.records
        return self._block or default_block(file.records, mean, self._batch_size, self._stored, _LEAST_BLOCKS)

    # For the loop of the run.

    def begin(self, saved: bytes | None, start_step: int) -> None:
        """Begins to be read, from a position of a checkpoint; without one, with the list as it is.

        Raises:
          UsageError: if the bytes are no position, or there is none where the run continues.
        """
        try:
            files = FollowedPosition.from_bytes(saved).files if saved else self._files
        except MisfitError as error:
            files, start_step = [], max(1, start_step)
            logging.debug("the position is none of followed files: %s", error)
        if start_step and not files:
            raise RecordsError(
                f"the checkpoint does not say which files that match {self.pattern!r} the run has taken, so that it "
                "would train on all of them again; continue with the data that it was trained on, or start a new run "
                "from the weights (--warm_start)"
            )
        if files == self._files[: len(files)]:  # of a process that has gone further, and went back
            files = self._files
        self._set(files, agreed=False)

    def _set(self, files: list[FollowedFile], after: int = 0, agreed: bool = True) -> None:
        """Puts files behind the first ones of the list, in place of the others."""
        with self._grown:
            self._files, self._agreed = [*self._files[:after], *files], agreed
            ends = self._firsts[after] + np.cumsum([file.records for file in files], dtype=np.int64)
            self._firsts = np.concatenate([self._firsts[: after + 1], ends])
            self._grown.notify_all()

    def close(self) -> None:
        """Lets pipelines that wait end with an error, which nobody reads."""
        with self._grown:
            self._next.clear()
            self._grown.notify_all()

    def save(self) -> bytes:
        """Returns the position for a checkpoint."""
        return FollowedPosition(self._files).to_bytes()

    def ready(self, workers: Workers, batches: Batches, done: int, steps: int) -> int:
        """Waits for the records of the next steps, for some seconds at most.

        All workers call this alike, and get one answer.

        Args:
          workers: the workers.
          batches: the sizes of the global batches.
          done: how many were consumed.
          steps: the steps that are wanted.

        Returns:
          How many of them have their records; 0 if none has, or -1 if a signal asks the run to end.

        Raises:
          UsageError: if a file is damaged, or gone before it was read.
        """
        begin, size = batches.before(done), batches.size
        if not self._agreed:
            self._agree(workers, begin)
        needed = {file.name for file in self._files[np.searchsorted(self._firsts, begin, "right") - 1 :]}
        with self._opening:
            self._opened = {name: source for name, source in self._opened.items() if name in needed}
        for _ in range(_LOOKS):
            self.looks += 1
            have = (len(self) - begin) // size
            if have < 2 * steps:  # a pipeline reads ahead of the steps
                found = self._found(begin + 2 * steps * size) if workers.is_chief else []
                if new := _of_chief(workers, found):
                    self._set(new, after=len(self._files))
                have = (len(self) - begin) // size
            if have > 0:
                return min(have, steps)
            if workers.any_of(bool(notice.requested)):
                return -1
            self._say_waiting()
            time.sleep(min(_SLICE, self._settings.every))
        return 0

    def _say_waiting(self) -> None:
        if time.monotonic() - self._spoke > _SILENT:
            self._spoke = time.monotonic()
            level = logging.INFO if self._files else logging.WARNING
            logging.log(level, "waiting for files that match %s; %d were taken", self.pattern, len(self._files))

    def _agree(self, workers: Workers, begin: int) -> None:
        """Has all workers take the chief's list, without files that are gone, as far as the policy allows that."""
        files = list(self._files)
        for number, file in enumerate(files if workers.is_chief else ()):
            if self._firsts[number + 1] <= begin:
                continue
            try:
                self._checked(file)
            except RecordsError as error:
                self._leave_out(file.name, error)
                files[number] = dataclasses.replace(file, records=max(0, begin - int(self._firsts[number])))
        self._set(_of_chief(workers, files))

    # Looking for files, by the chief.

    def _found(self, enough: int) -> list[FollowedFile]:
        """Returns files to take now, as many as are there until there are enough records."""
        if time.monotonic() - self._listed >= self._settings.every:
            self._list()
            self._listed = time.monotonic()
        new, total = [], len(self)
        while self._waiting and total < enough:
            name, size = self._waiting[0]
            if (whole := self._whole(name, size)) is None:
                break  # those after it wait too, so that the order is that of the names
            self._waiting.popleft()
            self._seen.pop(name, None)
            if (file := self._looked_at(name, *whole)) is not None:
                new.append(file)
                total += file.records
        return new

    def _sizes(self) -> dict[str, int]:
        """Returns the sizes of the files that are there, by name."""
        if self._store is not None:
            found = self._store.matching(self.pattern.removeprefix(self._folder).replace("[^", "[!"))
            return {name: file.bytes for name, file in found.items()}
        sizes = {}
        for path in glob.glob(self.pattern):
            with contextlib.suppress(OSError):
                sizes[path.removeprefix(self._folder)] = os.stat(path).st_size
        return sizes

    def _list(self) -> None:
        """Looks for names, and for changes of files that were taken."""
        try:
            sizes = self._sizes()
        except StoreError as error:
            self._tell("", f"{self.pattern} cannot be listed, and is looked at again: {error}")
            return
        taken = {file.name: file.bytes for file in self._files}
        for name, _ in self._waiting:
            if name not in sizes:
                self._tell(name, "is gone before the run has taken it, so that its records are not trained on")
        names = sorted(sizes.keys() - taken.keys())
        self._waiting = collections.deque((name, sizes[name]) for name in names)
        if bad := next((name for name in names if not all(map(folders.is_name, name.split("/")))), None):
            raise RecordsError(
                f"{self.pattern!r} matches {shown(bad)}, a name that no checkpoint can hold, with a backslash or bytes "
                "that are not UTF-8; rename it"
            )
        for name in sizes.keys() & taken.keys():
            if sizes[name] != taken[name]:
                self._tell(name, "was changed after the run had taken it; write new records to new files")
        last = max(taken, default="")
        for name in names:
            if name < last:
                self._tell(name, f"appeared after {last}, whose name follows it; it is taken now, out of the order")

    def _whole(self, name: str, listed: int) -> tuple[int, float] | None:
        """Returns bytes and time of change of a file that is whole; None if it may still be written, or is gone."""
        if self._store is not None:  # whose objects appear whole
            return listed, self._store.changed(name) if self._settings.newest else math.inf
        try:
            found = os.stat(self._folder + name)
        except OSError:  # which the next list says
            return None
        whole = found.st_size, found.st_mtime
        before, since = self._seen.get(name, (None, 0.0))
        if whole != before:
            since = time.monotonic()
            self._seen[name] = whole, since
        # The clock of a file server may be another one, so that what was seen counts too.
        unchanged = max(time.time() - found.st_mtime, time.monotonic() - since)
        return whole if unchanged >= self._settings.settled else None

    def _looked_at(self, name: str, size: int, changed: float) -> FollowedFile | None:
        """Returns a file; None for one that is left where it is. Raises `UsageError` if it is damaged."""
        if self._settings.newest and time.time() - changed > self._settings.newest:
            self._tell(name, "is left out, because it is older than Follow.newest")
            return FollowedFile(name, size, 0)
        try:
            source = self._open(name) if size else ()
        except RecordsError as error:
            self._leave_out(name, error)
            return FollowedFile(name, size, 0)
        if not len(source):
            self._opened.pop(name, None)
            self._tell(name, "is empty, and is taken once it has records")
            return None
        return self._described(name, source, len(source))

    def _leave_out(self, name: str, error: RecordsError) -> None:
        """Counts a file as a damaged record; raises the error if the policy allows none."""
        if not self._bad.most:
            raise error
        leave_out(self._bad, BadRecordError(str(error), "the file", f"{safe_name(name)}-0"))

    def _tell(self, name: str, sentence: str) -> None:
        if (name, sentence) not in self._told:
            self._told.add((name, sentence))
            logging.warning("%s", f"{self._folder}{name} {sentence}" if name else sentence)


def _of_chief(workers: Workers, files: list[FollowedFile]) -> list[FollowedFile]:
    """Waits for the other workers; returns the chief's list."""
    if workers.count == 1:
        return files
    rows = workers.gather_tensors([[tf.constant(FollowedPosition(files).to_bytes())]])
    return FollowedPosition.from_bytes(rows[0][0].numpy()).files


def _followed(
    reader: RecordReader, context: InputContext, pattern: Any, follow: bool | Follow, block: int | None
) -> FollowedFiles:
    """Returns the files of a run; raises `UsageError` where it cannot follow them."""
    if not isinstance(pattern, str):
        raise RecordsError(
            f"context.records(follow=...) was given {shown(pattern)}; expected one pattern, such as "
            '"data/day-*.tfrecord", also of an object store'
        )
    if "**" in pattern and not is_remote(pattern):
        raise RecordsError(f"{pattern!r} has **, which local paths do not take; give a pattern for each level")
    if not context.training:
        raise DatasetError(
            "an evaluation cannot follow files, which have no end; name the files that it is to read, or evaluate the "
            "training itself, before each step"
        )
    if context.remote or context.share[1] > 1 or not isinstance(context.positions.pipeline_index, int):
        raise DatasetError(
            "files are followed by the processes that train, and here other ones read (parameter servers, or data "
            "workers); leave out follow, or train by another strategy and without --data_service"
        )
    if any(isinstance(reads.source, FollowedFiles) for reads in reader.reads):
        raise OrderError("dataset() follows files twice; follow one pattern, and read the other files by name")
    pattern = pattern if is_remote(pattern) else resolve(pattern, "the pattern of context.records(follow=...)")
    if (files := context.memory.followed) is None:
        settings = follow if isinstance(follow, Follow) else Follow()
        block = None if block is None else whole_number("block of context.records", block)
        files = context.memory.followed = FollowedFiles(context, pattern, settings, block)
    if files.pattern != pattern:
        raise RecordsError(
            f"dataset() follows {pattern}, and followed {files.pattern} before; expected one pattern during a run"
        )
    return files


def batches(
    reader: RecordReader, context: InputContext, pattern: Any, follow: bool | Follow, *,
    block: int | None, shuffle: bool, seeds: bool, name: str | None,
) -> tf.data.Dataset:  # fmt: skip
    """Makes the batches of files that are followed; see `InputContext.records`."""
    files, places = _followed(reader, context, pattern, follow, block), context.positions
    seed, size = context.order_seed(Ids(0), name), places.sizes.original
    call = DatasetCall(positions=places.training_batches(Epoch(1), 1), steps=None)
    context.requests.positioned = context.requests.part = True
    context.requests.calls.append(call)

    @tf.autograph.experimental.do_not_convert
    def picks(positions: tf.Tensor, stretches: tf.Tensor) -> tuple[Any, ...]:
        picked = RecordSelection(positions, positions, positions + 1)
        if shuffle:
            stretch = Stretch(*tf.unstack(stretches))
            within = block_picks(positions, stretch, seed, size)
            picked = RecordSelection(*(part + stretch.start for part in within))
        return picked, *([seeds_at(positions, seed, True)] if seeds else [])

    # The order in a file of two megabytes, if it were the first one.
    of_file = np.int64([0, 0, 2048, files.block_of(FollowedFile("", 2**21, 2048))])[:, np.newaxis, np.newaxis]
    call.order = lambda positions: picks(positions, of_file + tf.zeros_like(positions))[0]
    if places.only is None:
        shape = [None, context.per_replica_batch_size]
        specs = tf.TensorSpec(shape, tf.int64), tf.TensorSpec([4, *shape], tf.int64)
        enter = functools.partial(files.enter, places.start_step * places.replicas_per_pipeline)
        placed = read_in_turn(enter, functools.partial(files.following, places), specs, specs)
        placed = placed.apply(ENDLESS).prefetch(_AHEAD)
    else:
        alone = places.only[places.only < len(files), None, None]
        placed = tf.data.Dataset.from_tensor_slices((alone, np.stack([files.stretches(one) for one in alone])))
    picked = placed.map(picks, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    call.ids = picked.map(lambda picks, *_: picks.ids).unbatch()
    reads = RecordReads(files, shuffle, shuffle)
    reader.reads.append(reads)
    call.batches = as_batches(read_records(files, picked, reads, like=files.like()))
    return call.batches

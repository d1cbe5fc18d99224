"""Batches of loaders that keep their own order: pass after pass, entered at any batch by a state or by reading."""

import collections
import dataclasses
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import google_crc32c
import numpy as np
import tensorflow as tf
from absl import logging

from looplib.base.decoding import MisfitError
from looplib.base.messages import gist
from looplib.cluster.preemption import notice
from looplib.data import arrays, loader_state
from looplib.data.arrays import BatchFormat
from looplib.data.context import DatasetCall, InputContext
from looplib.data.loader_state import LoaderPosition, UnsavableStateError
from looplib.data.open_loader import OpenLoader
from looplib.errors import BatchSizeError, DatasetError, EmptyDataError

MISMATCHES = ("skip", "refuse", "warn")
ENDLESS = tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
_MARKS = 512  # batches whose states are held; more are not read ahead
_CHECKED = 4  # batches that a resume compares, of those that were used, and of those that had been read ahead
_STATE_SHARE = 0.05  # of the time of reading that taking states may cost
_CLOSING = 5.0  # seconds that the end of a run waits for a batch that is being read


@dataclasses.dataclass
class _BatchMark:
    """The place in front of a batch."""

    number: int  # of the batch, from the start of the run
    epoch: int
    index: int  # in its pass
    state: str | None
    digest: int = 0  # of the batch


_open: "weakref.WeakValueDictionary[int, LoaderReader]" = weakref.WeakValueDictionary()  # by the ids of loaders


class LoaderReader:
    """The batches of a loader, from a number on; numbers count from the start of the run.

    It holds the state in front of each batch that was read lately, because a pipeline reads ahead of the steps: a
    position is that behind the last batch that a step has used.

    Args:
      make: makes the loader.
      part: the part of the data that the loader gives, see `LoaderPosition`.
      size: the examples that each batch of a training has to have; None for batches of any size.
      training: whether passes follow one another without end; an evaluation has one.
      start: the number of the first batch to give.
      mismatch: what to do if a restored loader gives other batches than before, one of `MISMATCHES`.
      float_type: the type that floating-point numbers become; None keeps theirs.

    Attributes:
      who: the name of the loader's class.
      length: the batches of a pass; None if the loader does not say it.
      passed: batches that were read again, to get to the first one, and waits for a stream; it grows with both.
      first_digest: the digest of the first batch of all.
      first_size: its rows.
      endless: whether its batches never end; those of a stream end where the run is asked to end while it waits.
      batches: how many were handed out.
      seconds: how long reading these has taken.

    Raises:
      UsageError: if it makes no loader, or that has no batch.
    """

    def __init__(
        self, make: Callable[[], Any], part: str, *, size: int | None, training: bool, start: int, mismatch: str,
        float_type: str | None,
    ) -> None:  # fmt: skip
        self._make, self._part, self._size, self._training, self._mismatch = make, part, size, training, mismatch
        self._start, self._position, self.passed = start, None, 0
        self.batches, self.seconds = 0, 0.0
        self._lock = threading.Lock()  # held while a batch is read
        self._marks: collections.deque[_BatchMark] = collections.deque(maxlen=_MARKS)
        self._pending: collections.deque[list[np.ndarray]] = collections.deque()  # batches that were read already
        self._reading = self._taking = 0.0  # seconds
        self._why_no_state, self._warned = "", False
        self._source: OpenLoader | None = None
        self._entry = 0  # identifies the iterator that reads the batches
        self._is_new = False  # whether the loader was only looked at
        self._open()
        self.who, self.length = type(self._source.loader).__name__, self._source.length
        self.endless = training and not self._source.waits
        # The first batches of the pass that is open, with their places, until another one is opened.
        self._first = self._looked_at()
        if not self._first:
            raise EmptyDataError(f"{self.who} has no batch; check where the data is read from")
        self._format = BatchFormat(self.who, [batch for _, batch in self._first], float_type)
        self.first_size, self.first_digest = self._format.first_size, self._digest_of_first()
        self._is_new = not self._source.shares_its_state  # which the look has changed

    def dataset(self) -> tf.data.Dataset:
        """Makes a data set of the batches."""
        made = read_in_turn(self._enter, self._following, self._format.specs, self._format.structure)
        return (made.apply(ENDLESS) if self.endless else made).prefetch(2)

    def begin_at(self, saved: bytes | None) -> None:
        """Makes the next iterator begin at a position that `save` returned; without one, it reads up to its start.

        Raises:
          UsageError: if it is no position, or that of another part of the data.
        """
        self._position = None
        if not saved:
            return
        try:
            position = LoaderPosition.from_bytes(saved)
        except MisfitError as error:
            raise DatasetError(
                f"the checkpoint has no position of a loader ({error}), and the data is {self.who} now; restore the "
                "data set of that run, or start a new run from the weights (--warm_start)"
            ) from error
        if position.part != self._part:
            raise DatasetError(
                f"{position.loader} gave the run {position.part}, and gives {self._part} now: no state of a loader "
                f"tells where it is with other parts; continue with as many workers and replicas and the batch size "
                'that the run had, or set batches = "global" in a trainer, whose loader gives whole batches to any '
                "number of workers; or start a new run from the weights (--warm_start)"
            )
        self._position = position

    def save(self, consumed: int) -> bytes | None:
        """Returns the position behind the first `consumed` batches; None if it is found by reading alone."""
        with self._lock:
            marks = list(self._marks)
        known = {mark.number: mark for mark in marks}
        last = known.get(consumed - 1)
        if last is None:
            return None
        # Several batches are read again and compared, as one alone may be equal by chance; none of an earlier pass.
        used = [mark for mark in marks if mark.number < consumed and mark.epoch == last.epoch]
        used = [mark for mark in used if mark.state is not None] or used
        at = next((mark for mark in reversed(used) if mark.number <= consumed - _CHECKED), used[0])
        following = range(at.number, consumed + _CHECKED)
        digests = [known[number].digest for number in itertools.takewhile(known.__contains__, following)]
        return LoaderPosition(
            loader=self.who, part=self._part, consumed=consumed, number=at.number, epoch=at.epoch, index=at.index,
            state=at.state, digests=digests,
        ).to_bytes()  # fmt: skip

    def close(self) -> None:
        """Ends the threads and processes of the loader."""
        self._entry += 1  # which ends a wait
        if self._lock.acquire(timeout=_CLOSING):
            try:
                self._source.close()
                self._first = []
            finally:
                self._lock.release()

    def _looked_at(self) -> list[tuple[_BatchMark, Any]]:
        self._begin(0, 0, 0)
        found: list[tuple[_BatchMark, Any]] = []
        while len(found) < arrays.LOOKED_AT and len(found) != self.length and (one := self._next()) is not None:
            found.append((one[0], arrays.copied(one[1])))
        return found

    def _digest_of_first(self) -> int:
        """Returns the digest of the first batch; warns if a resumed run will have other ones."""
        digest = _digest(self._format.flat(self._first[0][1]))
        again = self._source.is_random
        if self._training and not again and self._source.is_read_again:
            self._first = self._looked_at()
            again = digest != _digest(self._format.flat(self._first[0][1]))
        if self._training and again:
            logging.warning(
                "two passes of the %s begin with different batches, or are shuffled by a generator of the process, so "
                "that a resumed run reads other batches than an uninterrupted one; give it a sampler with set_epoch, "
                "which gets the epoch, or a generator of its own (generator=torch.Generator()), whose seed looplib "
                "sets in each epoch, or let looplib shuffle the examples (context.records)",
                self.who,
            )
        return digest

    # Reading.

    def _open(self) -> None:
        """Makes the loader, unless it is new."""
        if self._source is not None:
            self._source.close()
        is_new, self._is_new = self._is_new, False
        if is_new:
            return
        self._source = OpenLoader(self._make)
        if self._source.shares_its_state:
            other = _open.get(id(self._source.loader))
            if other is not None and other._training != self._training:
                raise DatasetError(
                    f"one {type(self._source.loader).__name__} is read by the training and by an evaluation, and has "
                    "one state for both; make a loader for each, in the function that context.loader gets"
                )
            _open[id(self._source.loader)] = self

    def _enter(self) -> np.int64:
        """Brings the loader to the first batch to give; returns what identifies the iterator that reads it now."""
        with self._lock:
            self._entry += 1
            first, self._first = self._first, []
            self._marks.clear()
            self._pending.clear()
            if self._position is not None and self._position.consumed == self._start:
                self._restore(self._position)
            elif first and not self._start:
                self._is_new = False
                self._pending.extend(self._noted(mark, batch) for mark, batch in first)
            else:
                self._find(self._start)
            return np.int64(self._entry)

    def _find(self, number: int) -> None:
        """Opens the loader, and reads up to the batch of a number, in its pass if the length of passes is known."""
        self._open()
        epoch, index = divmod(number, self.length) if self.length and self._training else (0, number)
        self._skip(epoch, index, number)

    def _skip(self, epoch: int, index: int, number: int) -> None:
        """Begins a pass, and reads the batches before `index`, which has a number."""
        at_once = self._source.skips_at_once
        self._begin(epoch, index if at_once else 0, number if at_once else number - index)
        while self._number < number:
            if self._read() is None:
                return
            self.passed += 1

    def _restore(self, position: LoaderPosition) -> None:
        """Enters a position by its state, or else by reading; raises `UsageError` if other batches come."""
        why = self._restored(position, position.state) if position.state is not None else ""
        if position.state is not None and not why:
            return
        if why:
            sentence = (
                f"the {self.who} does not continue with the batches that it gave before, from the state that it had "
                f"at batch {position.number} ({why})"
            )
            if self._mismatch == "refuse":
                raise DatasetError(
                    f'{sentence}; pass mismatch="skip" to context.loader, which reads the pass from its start'
                )
            logging.warning("%s; the %d batches of the pass up to there are read again", sentence, position.index)
        if not (why := self._restored(position, None)):
            return
        sentence = (
            f"the {self.who} does not give the batches again that it gave in epoch {position.epoch + 1} ({why}): its "
            "order or its augmentation depends on something else than the epoch"
        )
        cure = "seed them by the run's seed and the epoch, such as by a sampler with set_epoch, which gets the epoch"
        if self._mismatch != "warn":
            raise DatasetError(
                f'{sentence}; {cure}, or pass mismatch="warn" to context.loader, which trains on what comes then'
            )
        logging.warning("%s; the run trains on what comes; %s", sentence, cure)

    def _restored(self, position: LoaderPosition, state: str | None) -> str:
        """Enters a position by a state, or by reading; returns how the batches differ from the saved digests, or ""."""
        self._open()
        self._marks.clear()
        self._pending.clear()
        if state is None:
            self._skip(position.epoch, position.index, position.number)
        else:
            try:
                self._source.restore(position.epoch, loader_state.unpack(state))
            except Exception as error:  # of the loader, which does not take its own state
                return f"it refuses the state: {gist(error)}"
            self._epoch, self._index, self._number, self._state = position.epoch, position.index, position.number, state
        why = ""
        for digest in position.digests:
            parts = self._read()
            mark = self._marks[-1] if parts is not None else None
            if mark is None or mark.digest != digest:
                why = why or f"batch {self._number} of the run is another one"
            if parts is not None and mark.number >= position.consumed:
                self._pending.append(parts)
        return why

    def _begin(self, epoch: int, index: int, number: int) -> None:
        self._source.begin(epoch, index)
        self._epoch, self._index, self._number = epoch, index, number
        self._state = self._taken()

    def _following(self, entry: np.int64) -> list[np.ndarray]:
        # Without the lock, which a save needs meanwhile.
        while entry == self._entry and not self._pending and not self._source.wait():
            self.passed += 1
            if notice.requested and not self.endless:
                raise StopIteration
        with self._lock:
            began = time.perf_counter()
            # An iterator that nobody reads may still be reading ahead.
            parts = None if entry != self._entry else self._pending.popleft() if self._pending else self._read()
            if parts is None:
                raise StopIteration
            self.batches, self.seconds = self.batches + 1, self.seconds + time.perf_counter() - began
            return parts

    def _read(self) -> list[np.ndarray] | None:
        """Reads the parts of the next batch; None at the end of an evaluation's pass."""
        found = self._next()
        return None if found is None else self._noted(*found)

    def _next(self) -> tuple[_BatchMark, Any] | None:
        """Reads the next batch, as the loader gives it, and its place; None at the end of an evaluation's pass."""
        began = time.perf_counter()
        if (batch := self._batch()) is None:
            return None
        self._reading += time.perf_counter() - began
        mark = _BatchMark(self._number, self._epoch, self._index, self._state)
        self._number, self._index, self._state = self._number + 1, self._index + 1, self._taken()
        return mark, batch

    def _batch(self) -> Any:
        """Returns the next batch as the loader gives it; None at the end of an evaluation's pass."""
        for _ in range(2):
            try:
                batch = self._source.next()
                if ended := self._index == self.length:
                    self._warn_of_length()
            except StopIteration:
                ended = True
                if self._index < (self.length or 0):
                    raise DatasetError(
                        f"{self.who} has {self.length} batches by its len(), and ended before the batch "
                        f"{self._index + 1} of epoch {self._epoch + 1}; give it the length that its passes have"
                    ) from None
            if ended and not self._training:
                return None
            if ended:
                self._begin(self._epoch + 1, 0, self._number)
                continue
            if batch is None:
                raise DatasetError(
                    f"{self.who} gave None in place of batch {self._index + 1} of epoch {self._epoch + 1}; leave out "
                    "what cannot be read, or raise an error there"
                )
            return batch
        raise DatasetError(
            f"{self.who} has no batch in epoch {self._epoch + 1}: it was read to its end before, and does not begin "
            "again; make a new loader in the function that context.loader gets"
        )

    def _warn_of_length(self) -> None:
        if not self._warned:
            self._warned = True
            logging.warning(
                "%s has %d batches by its len(), and epoch %d has more; looplib leaves out what is beyond the len() in "
                "each epoch: give it the length that its passes have",
                self.who, self.length, self._epoch + 1,
            )  # fmt: skip

    def _noted(self, mark: _BatchMark, batch: Any) -> list[np.ndarray]:
        """Returns the parts of a batch, which is of the form of all; holds its place."""
        parts = self._format.flat(batch)
        size = parts[0].shape[0]
        if not size or (self._training and self._size is not None and size != self._size):
            raise BatchSizeError(
                f"{self.who} gave {size} examples in batch {mark.index + 1} of epoch {mark.epoch + 1}; expected "
                f"{self._size or 'at least 1'}, which a step takes from this loader; batch by that number, and leave "
                "out the smaller batch at the end of a pass (drop_last, drop_remainder)"
            )
        mark.digest = _digest(parts)
        self._marks.append(mark)
        return parts

    def _taken(self) -> str | None:
        """Returns the state of the loader, if that costs little beside the reading."""
        if self._why_no_state or (self._index and self._taking > _STATE_SHARE * self._reading + 0.1):
            return None
        began = time.perf_counter()
        try:
            state = self._source.state()
            return None if state is None else loader_state.pack(state)
        except UnsavableStateError as error:
            self._why_no_state = str(error)
            logging.warning(
                "the state of %s cannot be saved (%s), so that a resume reads the batches of a pass again",
                self.who, self._why_no_state,
            )  # fmt: skip
            return None
        finally:
            self._taking += time.perf_counter() - began


def read_in_turn(
    enter: Callable[[], np.int64],
    following: Callable[[np.int64], list[np.ndarray]],
    specs: Sequence[tf.TensorSpec],
    structure: Any,
) -> tf.data.Dataset:
    """Makes a data set of unknown length that Python reads, in the thread that asks for the element.

    `Dataset.map` calls its function on other threads. To hand over to them takes longer than many batches, and they are
    few: one that waits for long would be missing to steps and evaluations.

    Args:
      enter: begins to read; returns what identifies an iterator.
      following: returns the parts of the next element of an iterator; raises `StopIteration` at the end.
      specs: of the parts.
      structure: of specs, of the elements.
    """

    def read(entry: tf.Tensor) -> list[tf.Tensor]:
        parts = tf.numpy_function(following, [entry], [spec.dtype for spec in specs])
        return [tf.ensure_shape(part, spec.shape) for part, spec in zip(parts, specs)]

    traced = tf.function(read, input_signature=[tf.TensorSpec([], tf.int64)], autograph=False).get_concrete_function()

    @tf.autograph.experimental.do_not_convert
    def elements(_: tf.Tensor) -> tf.data.Dataset:
        entries = tf.data.Dataset.from_tensors(tf.numpy_function(enter, [], tf.int64)).repeat()
        made = tf.raw_ops.MapDataset(
            input_dataset=tf.data.experimental.to_variant(entries), other_arguments=[], f=traced,
            output_types=[spec.dtype for spec in specs], output_shapes=[spec.shape for spec in specs],
            use_inter_op_parallelism=False, preserve_cardinality=False,
        )  # fmt: skip
        return tf.data.experimental.from_variant(made, structure)

    return tf.data.Dataset.from_tensors(0).flat_map(elements)


def _digest(parts: list[np.ndarray]) -> int:
    """Returns a checksum of a batch, of its types, shapes and values."""
    checksum = google_crc32c.Checksum()
    for array in parts:
        checksum.update(f"{array.dtype} {array.shape}".encode())
        is_text = array.dtype.kind in "OUS"
        values = repr(array.tolist()).encode() if is_text else np.ascontiguousarray(array).ravel().view(np.uint8)
        checksum.update(values)
    return int.from_bytes(checksum.digest(), "big")


def read(
    context: InputContext, make: Callable[[int, int], Any], mismatch: str, float_type: str | None = None
) -> tf.data.Dataset:
    """Makes the batches of a loader; see `InputContext.loader` and `LoaderReader`."""
    if mismatch not in MISMATCHES:
        raise DatasetError(f"mismatch of context.loader is {mismatch!r}; expected one of {', '.join(MISMATCHES)}")
    if not callable(make):
        raise DatasetError(
            f"context.loader got a {type(make).__name__}; expected a function that makes it, such as "
            "lambda index, count: loader"
        )
    requests, positions = context.requests, context.positions
    if positions.numbers is not None or not isinstance(positions.pipeline_index, int):
        raise DatasetError(
            "context.loader needs the process that trains, and parameter servers have workers that read by themselves; "
            "use context.indices there"
        )
    if requests.loader is not None:
        raise DatasetError("dataset() calls context.loader twice; make one loader that gives both parts of a batch")
    context.refuse_earlier_sizes(
        "a loader makes the batches, so that its state and the number of a batch mean other examples with another size"
    )
    index, count, size = positions.pipeline_index, context.num_pipelines, context.loader_batch_size
    reader = LoaderReader(
        lambda: make(index, count),
        f"part {index} of {count}, in batches of {size}",
        size=None if context.global_batches or context.batch_size_varies else size,
        training=context.training,
        start=positions.start_step,
        mismatch=mismatch,
        float_type=float_type,
    )
    requests.loader, requests.positioned, requests.part = reader, True, True
    if reader.length and context.training:
        context.steps_per_epoch = reader.length
    batches = reader.dataset()
    if context.replicas_per_pipeline > 1:
        if context.batch_size_varies:
            raise BatchSizeError(
                "the batches of context.loader are divided among replicas, and batch_size_varies gives them any size; "
                'leave that out, or set batches = "global" in the class'
            )
        batches = batches.rebatch(context.per_replica_batch_size, drop_remainder=context.training)
        batches = batches.apply(ENDLESS) if reader.endless else batches
    requests.calls.append(DatasetCall(positions=tf.data.Dataset.range(0), steps=None, batches=batches))
    return batches

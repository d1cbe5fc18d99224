"""The state of a `tf.data` iterator as bytes, restored from them if TensorFlow does that exactly."""

import hashlib
from collections.abc import Callable

import tensorflow as tf

from looplib.compat import tensorflow as _tf

# The most bytes of a saved state. TensorFlow 2.20 ends the process on a serialized tensor of 2 GB.
_MOST_BYTES = 256 * 2**20
# Pieces of an iterator's state that are serialized at once: one is slow, and many may come to 2 GB before the check.
_PIECES = 4
_DIGEST_BYTES = 16
# Which shuffle has ended, or not begun, in an epoch.
_FILE_SHUFFLE = (
    "such as that of list_files, which ends once all files are open; to resume from the state, repeat() directly "
    "behind that shuffle, in front of interleave"
)
_OTHER_SHUFFLE = "such as that of a part of a concatenate, or one in front of a take"
_FAIL = 2  # the op's policy: refuse what has state outside of the iterator
# Stages that TensorFlow 2.20 and 2.21 restore exactly, by their names in its states, see tests/data/sources_test.py.
TRIED = frozenset(
    """
    AssertCardinality BatchV2 Concatenate DenseToSparseBatch DirectedInterleave Filter FiniteRepeat FiniteSkip
    FiniteTake FixedLengthRecordV2 FlatMap ForeverRepeat FromTensor GlobalShuffle GroupByReducer GroupByWindow
    Interleave LegacyParallelInterleaveV2 List Load Map MapAndBatch MemoryCache MemoryCacheImpl PaddedBatchV2
    ParallelBatch ParallelFilter ParallelInterleaveV4 ParallelMapV2 ParseExampleV2 Prefetch Random Range RebatchV2
    Root Scan Shard Shuffle ShuffleAndRepeat Snapshot SnapshotDatasetReader SnapshotNestedDatasetReader
    SnapshotWriter TFRecord TakeWhile TensorSlice TextLine Unbatch Unique Window WriterIterator Zip
    """.split()
)


class UnsavableError(Exception):
    """An iterator has no state that could be saved and restored exactly; the message says why, as a clause."""


class BetweenEpochsError(Exception):
    """The state of a repeated data set lacks the seeds of a shuffle: in this epoch, it has ended or not begun.

    The message says which shuffle that is likely to be, as a clause.
    """


def handle(iterator: tf.data.Iterator) -> tf.Tensor:
    """Returns the resource behind an iterator."""
    return tf.nest.flatten(iterator, expand_composites=True)[0]


def digest(iterator: tf.data.Iterator, *kind: object) -> bytes:
    """Returns a hash of a new iterator's stages and buffer sizes, and of `kind`.

    A state is restored into an iterator of the same hash only, because any other state fails late.

    Raises:
      UnsavableError: if the iterator's state cannot be saved.
    """
    texts = _texts(_state(iterator))
    return hashlib.sha256(repr((*kind, _tf.keys_of_iterator_state(texts))).encode()).digest()[:_DIGEST_BYTES]


def save(iterator: tf.data.Iterator, dataset: tf.data.Dataset) -> tuple[bytes, set[str]]:
    """Returns the state of an iterator of a data set, and the names of its stages, those in functions included.

    Raises:
      BetweenEpochsError: if the seeds of a shuffle are not in it, so that a later epoch would have another order.
      UnsavableError: if it cannot be saved, or would be restored wrongly.
    """
    state = _state(iterator)
    texts = _texts(state)
    found = _tf.stages_of_iterator_state(texts)
    if not found:
        raise UnsavableError("TensorFlow saves it in a form that looplib does not know")
    if any("Repeat" in stage for stage in found):
        seeds = _tf.repeated_seeds(dataset)
        if seeds is None:
            raise UnsavableError("this version of TensorFlow does not tell which shuffles it repeats")
        if seeds.lacking(texts):
            raise BetweenEpochsError(_FILE_SHUFFLE if seeds.interleaved else _OTHER_SHUFFLE)
    if why := _tf.why_restored_wrongly(texts):
        raise UnsavableError(why)
    pieces, size = _pack(state, _MOST_BYTES)
    if size > _MOST_BYTES:
        raise UnsavableError(f"its buffers take more than {_MOST_BYTES // 2**20} MB")
    return tf.io.serialize_tensor(pieces).numpy(), found


def restore(iterator: tf.data.Iterator, packed: bytes) -> None:
    """Brings a new iterator to a saved position; raises `tf.errors.OpError` if the bytes are no state of its kind."""
    pieces = tf.io.parse_tensor(packed, tf.string)
    state = tf.stack([part for piece in pieces for part in tf.unstack(tf.io.parse_tensor(piece, tf.variant))])
    tf.raw_ops.DeserializeIterator(resource_handle=handle(iterator), serialized=state)


def restores_exactly(first: tf.data.Dataset, second: tf.data.Dataset, count: int) -> bool:
    """Returns whether a restored iterator continues like the one that was saved, of a pipeline that was built twice.

    `count` elements are read before the save, and twice as many are compared after it. The answer is False also for a
    pipeline that gives other elements each time.
    """
    original, restored = iter(first), iter(second)
    _read(original, count)
    packed, _ = save(original, first)
    expected = _read(original, 2 * count)
    try:
        restore(restored, packed)
        return _read(restored, 2 * count) == expected
    except tf.errors.OpError:
        return False


def _read(iterator: tf.data.Iterator, count: int) -> list[list[bytes]]:
    """Up to `count` elements, each as the bytes of its tensors."""
    elements = []
    while len(elements) < count and (element := iterator.get_next_as_optional()).has_value():
        tensors = tf.nest.flatten(element.get_value(), expand_composites=True)
        elements.append([tf.io.serialize_tensor(tensor).numpy() for tensor in tensors])
    return elements


def _state(iterator: tf.data.Iterator) -> tf.Tensor:
    """Returns the state of an iterator, variant `[n]`, one for each stage and each buffered element."""
    try:
        return tf.raw_ops.SerializeIterator(resource_handle=handle(iterator), external_state_policy=_FAIL)
    except tf.errors.OpError as error:
        raise UnsavableError(_tf.message_without_op(error)) from error


def _texts(state: tf.Tensor) -> list[bytes]:
    """Returns the parts of a state as text: the keys of its values, then the values (of tensors, the first numbers)."""
    return tf.strings.as_string(state).numpy().tolist()


@tf.function(input_signature=[tf.TensorSpec([None], tf.variant), tf.TensorSpec([], tf.int64)])
def _pack(state: tf.Tensor, most: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Serializes a state, variant `[n]`, piece by piece; returns the pieces up to `most` bytes, and their bytes."""
    count = -(-tf.size(state) // _PIECES)
    pieces = tf.TensorArray(tf.string, count, element_shape=[])
    size, i = tf.constant(0, tf.int64), 0
    while i < count and size <= most:
        piece = tf.io.serialize_tensor(state[i * _PIECES : (i + 1) * _PIECES])
        pieces = pieces.write(i, piece)
        size += tf.cast(tf.strings.length(piece), tf.int64)
        i += 1
    return pieces.stack(), size


class SavedPosition:
    """Saves and restores the position of a pipeline's iterators, if TensorFlow does that exactly.

    Args:
      renew: makes the pipeline again; None saves no position.
      count: elements of a step, which a trial of unknown stages reads.
      note: logs what a user has to know, a clause about the data set.

    Attributes:
      obstacle: why no position can be saved, as a clause; "" if nothing is in the way.
    """

    def __init__(self, renew: Callable[[], tf.data.Dataset] | None, count: int, note: Callable[[str], None]) -> None:
        self._renew, self._count, self._note = renew, count, note
        self.obstacle = ""
        self._digest = b""  # of the pipeline, in front of its states
        self._tried_out = self._warned_between_epochs = False  # stages that are not known; that a state is not complete

    def begin(self, iterator: tf.data.Iterator, *kind: object) -> bool:
        """Takes a new iterator of a kind; returns whether its position can be saved, as far as is known."""
        if self._possible:
            try:
                self._digest = digest(iterator, *kind)
            except UnsavableError as error:
                self._give_up(str(error))
        return self._possible

    @property
    def _possible(self) -> bool:
        return self._renew is not None and not self.obstacle

    def save(self, iterator: tf.data.Iterator, dataset: tf.data.Dataset) -> bytes | None:
        """Returns the position of an iterator of a data set; None if it has none that can be saved."""
        if not self._possible:
            return None
        try:
            packed, stages = save(iterator, dataset)
            untried = sorted(stages - TRIED)
            if untried and not self._tried_out:
                self._try_out(self._renew, dataset, untried)
                self._tried_out = True
            return self._digest + packed
        except BetweenEpochsError as error:
            if not self._warned_between_epochs:
                self._note(
                    "has a shuffle that has ended or not begun in this epoch, so that its state is not complete, and a "
                    f"run that resumes here will skip the data already used: {error}"
                )
            self._warned_between_epochs = True
            return None  # the next position can be saved again
        except UnsavableError as error:
            self._give_up(str(error))
            return None

    def restore(self, iterator: tf.data.Iterator, position: bytes) -> str:
        """Brings a new iterator to a position; returns why it is none of this pipeline, or ""."""
        size = len(self._digest)
        if position[:size] != self._digest:
            return "its stages, buffers, elements, batch size or length have changed"
        try:
            restore(iterator, position[size:])
        except (tf.errors.OpError, ValueError) as error:
            return str(error).partition("\n")[0][:200] or type(error).__name__
        return ""

    def _try_out(self, renew: Callable[[], tf.data.Dataset], dataset: tf.data.Dataset, stages: list[str]) -> None:
        """Saves and restores iterators of pipelines made for this; raises `UnsavableError` if that is not exact."""
        first, second = renew(), renew()
        named = ", ".join(stages)
        if first is dataset:  # whose shuffles would continue with the order of the next epoch
            raise UnsavableError(f"it is not known whether TensorFlow restores {named} exactly")
        if not restores_exactly(first, second, self._count):
            raise UnsavableError(f"in a trial, TensorFlow did not restore {named} exactly")

    def _give_up(self, why: str) -> None:
        """Logs this once; each further try may take seconds."""
        self.obstacle = why
        self._note(f"has no position that can be saved; a resumed run will skip the data already used: {why}")

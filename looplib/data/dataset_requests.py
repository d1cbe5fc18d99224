"""What a `dataset` function has asked of its input context, for whatever builds and reads its pipeline."""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any, Protocol

import tensorflow as tf

from looplib.base.messages import whole_number
from looplib.data.batches import Epoch


@dataclasses.dataclass
class BadRecords:
    """The damaged records that a run may leave out, counted over its data sets, workers and restarts.

    Raises:
      UsageError: if `most` is not a whole number of at least 0.
    """

    most: int = 0  # how many there may be
    # the folder where the processes of the run note them; None counts only in this process
    folder: str | None = None
    names: set[str] = dataclasses.field(default_factory=set, init=False)  # of those that are known to this process
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock, init=False)  # held while they are counted

    def __post_init__(self) -> None:
        self.most = whole_number("bad_records", self.most, least=0)


class Reads(Protocol):
    """How the records of a data set are read; tf.data itself shows only a map. `str` names the reader."""

    calls: list[int]  # of its stages
    records: int  # how many were read

    @property
    def at_once(self) -> int:
        """How many are read at once."""

    @property
    def advice(self) -> str:
        """What to change if reading takes the time."""


class Reader(Protocol):
    """Reads records for `InputContext.records`: see `records.reader.RecordReader`, called with the context."""

    reads: list[Reads]  # of each call

    def batches(
        self, source: Any, *, block: int | None, shuffle: bool, seeds: bool, whole_epochs: bool, name: str | None,
        repeat: bool,
    ) -> tf.data.Dataset:  # fmt: skip
        """Makes the data set of a call; see `InputContext.records`."""

    def fingerprint(self) -> dict[str, str]:
        """Returns checksums of a part of what is read, by the name of the file."""

    def name_of(self, number: int) -> str:
        """Returns the name, for errors, of the record with an id of the first call."""


@dataclasses.dataclass(kw_only=True)
class DatasetCall:
    """A call of `indices`, `records` or `resident`: what it makes."""

    positions: tf.data.Dataset  # chunks of the positions in the run of its batches, int64 `[k, b]`
    steps: int | tf.Tensor | None  # how many batches it makes of an evaluation; None for a training
    batches: tf.data.Dataset | None = None  # the data set that it returned
    ids: tf.data.Dataset | None = None  # the ids of each batch, int64 `[b]`, if each example has one; else None
    in_turn: bool = False  # whether the ids of each batch follow one another
    # Makes the ids in ops that XLA compiles: a function from the number of batches of this pipeline before (int64
    # scalar tensor) and how many to make, to int64 `[batches, b]`; None for other data.
    draw: Callable[[tf.Tensor, int], tf.Tensor] | None = None


@dataclasses.dataclass
class DatasetRequests:
    """What a `dataset` function has asked of its context."""

    part: bool = False  # whether it asked which part of the data is this pipeline's
    start: bool = False  # whether it asked after how many batches it starts
    positioned: bool = False  # whether the position of each batch in the run is known
    unnamed: int = 0  # how many calls had no name
    named: dict[str, int] = dataclasses.field(default_factory=dict)  # the examples of the calls with a name
    arrays: Any = None  # the argument of `resident`, or None
    examples: int | None = None  # the most examples of all calls; None without a call
    epoch: Epoch | None = None  # how many examples come in an epoch; None where that is not known
    reader: Reader | None = None  # what reads records, once `records` was called
    calls: list[DatasetCall] = dataclasses.field(default_factory=list)  # in their order

    @property
    def last(self) -> DatasetCall | None:
        """The last call."""
        return self.calls[-1] if self.calls else None

"""The run record: the state of a run, apart from its trainer and evaluators, that the next start needs.

Every checkpoint holds it as one JSON object. A field that this version does not know is kept and written
again, so that an older looplib loses nothing that a newer one has added. A change that an older looplib would
misunderstand raises `FORMAT`; a higher format is refused by name, and a record without one has format 1. Format 2 is
that of a run whose global batch size has changed; other records are written in format 1. A checkpoint may come from
somebody else, so that the type of every field is checked.
"""

import dataclasses
import json
import typing
from typing import Any

import tensorflow as tf

from looplib.base.decoding import MisfitError, decode, parse_json
from looplib.base.folders import is_name
from looplib.compat.tensorflow import python_state_key
from looplib.data.order import Batches, BatchSizePeriod
from looplib.errors import CheckpointError, UsageError

FORMAT = 2


@dataclasses.dataclass(frozen=True)
class EngineChoice:
    """The engine that `loop="auto"` has chosen for one split.

    Attributes:
      loop: "graph" or "xla".
      chunk: steps of one round of the inner loop.
      seconds_per_step: dict from the name of each candidate to its median time of a step.
    """

    loop: str
    chunk: int
    seconds_per_step: dict[str, float]

    def __post_init__(self) -> None:
        if self.loop not in ("graph", "xla") or self.chunk < 1:
            raise MisfitError

    @classmethod
    def from_json(cls, text: str) -> "EngineChoice":
        """Reads one choice; `ValueError` for a text that is none."""
        return decode(cls, parse_json(text), strict=True)


@dataclasses.dataclass(frozen=True)
class RunningTotals:
    """The training metrics that are accumulated since the last report.

    Attributes:
      names: of the metrics, in the order of their totals.
      totals: for each replica a list of numbers.
    """

    names: list[str]
    totals: list[list[float]]

    def __post_init__(self) -> None:
        if len({len(numbers) for numbers in self.totals}) > 1:
            raise MisfitError


@dataclasses.dataclass(frozen=True)
class VariableNames:
    """The names of a checkpoint's variables.

    Attributes:
      own: dict from a variable's path, from attribute to attribute, to its own name.
      slots: dict from the path of what is kept for another variable, such as a momentum, to its kind and the path of
        that variable.
    """

    own: dict[str, str]
    slots: dict[str, list[str]]

    def __post_init__(self) -> None:
        if any(len(slot) != 2 for slot in self.slots.values()):
            raise MisfitError


@dataclasses.dataclass(frozen=True)
class Contents:
    """A value that a table or a layer computes with and that no variable holds.

    Attributes:
      size: how many entries.
      digest: the SHA-256 of all of them, in their order.
      begins: the first of them, as text.
    """

    size: int
    digest: str
    begins: list[str]


@dataclasses.dataclass
class RunRecord:
    """The run record.

    Attributes:
      reported: dict from split to the global step of its last report.
      train: dict from name to number, the last reported training metrics.
      losses: the last reported losses, against which the next one is scored.
      running: the training metrics since the last report: `RunningTotals`, or a dict from name to number for a trainer
        of Orbit.
      input_offset: global batches that rollbacks have left out. The position in the data is the global step plus these.
      rollbacks: how often the run went back to a checkpoint.
      optimizers: dict from an optimizer's name to its class; None in a record of a program without a trainer.
      learning_rates: dict from an optimizer's name to the learning rate that it was built with.
      actions: dict from an action's name to what its `state` returned.
      engines: dict from split to `EngineChoice`.
      seed: the run's seed; None in a record that has none, like the next two.
      global_batch_size: the examples of one step.
      earlier_batches: the global batches of other sizes that came before.
      loop: the name of the engine.
      examples: how many examples the training data has; None where that is not known.
      order: a checksum of the order of the first examples that the run has read; None where that is not known.
      files: checksums of the files of the training data, see `RecordReader.fingerprint`; None where there are none.
      names: what the variables are called; None in a record that has none.
      contents: dict from the name of a table, or of a layer that has learned from data, to its `Contents`.
      unknown: the fields that only a newer looplib knows.
    """

    reported: dict[str, int] = dataclasses.field(default_factory=dict)
    train: dict[str, float] = dataclasses.field(default_factory=dict)
    losses: list[float] = dataclasses.field(default_factory=list)
    running: RunningTotals | dict[str, float] = dataclasses.field(default_factory=dict)
    input_offset: int = 0
    rollbacks: int = 0
    optimizers: dict[str, str] | None = None
    learning_rates: dict[str, float] = dataclasses.field(default_factory=dict)
    actions: dict[str, Any] = dataclasses.field(default_factory=dict)
    engines: dict[str, EngineChoice] = dataclasses.field(default_factory=dict)
    seed: int | None = None
    global_batch_size: int | None = None
    earlier_batches: list[BatchSizePeriod] = dataclasses.field(default_factory=list)
    loop: str | None = None
    examples: int | None = None
    order: int | None = None
    files: dict[str, str] | None = None
    names: VariableNames | None = None
    contents: dict[str, Contents] = dataclasses.field(default_factory=dict)
    unknown: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reported = {split: step for split, step in self.reported.items() if is_name(split)}  # else no writer's

    @property
    def saved_batches(self) -> Batches:
        """The global batches of the run that saved the record, if it has a size."""
        return Batches(self.global_batch_size, tuple(self.earlier_batches))

    def batches(self, step: int, size: int) -> Batches:
        """Returns the global batches of a run that continues from the record at a step, with a size from then on."""
        if self.global_batch_size is None:
            return Batches(size)
        return self.saved_batches.resized(size, step, step + self.input_offset)

    def batches_are(self, batches: Batches) -> None:
        """Takes the global batches that the run has from now on."""
        self.global_batch_size, self.earlier_batches = batches.size, list(batches.earlier)

    def to_json(self) -> str:
        """Returns the JSON text to save."""
        fields = dataclasses.asdict(self)
        number = FORMAT if self.earlier_batches else 1
        text = json.dumps({**fields.pop("unknown"), "format": number, **fields})
        RunRecord.from_json(text, "the checkpoint that is being saved")  # what cannot be read is not written
        return text

    @classmethod
    def in_checkpoint(cls, reader: Any, path: str) -> "RunRecord":
        """Returns the record of a checkpoint, from `tf.train.load_checkpoint` of a path, which is for messages.

        It is one without values for a checkpoint that another program wrote. Raises as `from_json` does.
        """
        key = python_state_key("run_state")
        return cls.from_json(reader.get_tensor(key), path) if reader.has_tensor(key) else cls()

    @classmethod
    def from_json(cls, text: str | bytes, path: str = "the checkpoint") -> "RunRecord":
        """Reads a record from the JSON text in the checkpoint at a path.

        Raises:
          UsageError: if it is not the text of a record, a field has another type, or its format is a newer one.
        """
        try:
            saved = parse_json(text)
        except (ValueError, TypeError) as error:
            raise _unreadable(path, str(error)) from error
        if not isinstance(saved, dict):
            raise _unreadable(path, f"it is {saved!r:.50}, expected a JSON object")
        number = saved.pop("format", 1)
        if type(number) is not int:
            raise _unreadable(path, f"its format is {number!r:.50}, expected a whole number")
        if number > FORMAT:
            raise CheckpointError(
                f"the run record in {path} has the format {number}, and this looplib reads formats up to {FORMAT}; "
                "install the version of looplib that wrote it"
            )
        fields = {}
        for name, kind in typing.get_type_hints(cls).items():
            if name != "unknown" and name in saved:
                value = saved.pop(name)
                try:
                    fields[name] = decode(kind, value, strict=True)
                except ValueError as error:
                    what = f"its field {name!r} is {value!r:.100}, expected {_describe(kind)}"
                    raise _unreadable(path, what) from error
        return cls(**fields, unknown=saved)


class RunState(tf.train.experimental.PythonState):
    """The `RunRecord` as a part of a checkpoint.

    Attributes:
      record: the `RunRecord`; another object after each restore.
    """

    def __init__(self) -> None:
        super().__init__()
        self.record = RunRecord()

    def serialize(self) -> str:
        """Returns the JSON text to save."""
        return self.record.to_json()

    def deserialize(self, string_value: str | bytes) -> None:
        """Takes the JSON text that was saved."""
        self.record = RunRecord.from_json(string_value)


def _unreadable(path: str, what: str) -> UsageError:
    return CheckpointError(
        f"the run record in {path} cannot be read: {what}; name another checkpoint, or move this one out of "
        "the run directory and run the same command again"
    )


def _describe(kind: Any) -> str:
    text = kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)
    return text.replace(f"{__name__}.", "").replace("typing.", "")

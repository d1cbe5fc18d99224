"""The run record: the state of a run, apart from its trainer and evaluators, that the next start needs.

Every checkpoint holds it as one JSON object. A field that this version does not know is kept and written
again, so that an older looplib loses nothing that a newer one has added. A change that an older looplib would
misunderstand raises `FORMAT`; a higher format is refused by name, and a record without one has format 1. A checkpoint
may come from somebody else, so that the type of every field is checked.
"""

import contextlib
import dataclasses
import json
import sys
import types
import typing
from typing import Any

import tensorflow as tf

from looplib import files
from looplib.errors import UsageError

FORMAT = 1


class _MisfitError(ValueError):
    """A JSON value is not of the type that is expected."""


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
            raise _MisfitError

    @classmethod
    def from_json(cls, text: str) -> "EngineChoice":
        """Reads a choice that is kept by itself.

        Args:
          text: a JSON object of the attributes.

        Raises:
          ValueError: if it is not the text of a choice.
        """
        return _parsed(files.parse_json(text), cls)


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
            raise _MisfitError


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
      optimizers: the class names of the optimizers; None in a record that has none.
      learning_rates: dict from an optimizer's number to the learning rate that it was built with.
      actions: dict from an action's name to what its `state` returned.
      engines: dict from split to `EngineChoice`.
      seed: the run's seed; None in a record that has none, like the next two.
      global_batch_size: the examples of one step.
      loop: the name of the engine.
      examples: how many examples the training data has; None where that is not known.
      files: checksums of the files of the training data, see `records.fingerprint`; None where there are none.
      unknown: the fields that only a newer looplib knows.
    """

    reported: dict[str, int] = dataclasses.field(default_factory=dict)
    train: dict[str, float] = dataclasses.field(default_factory=dict)
    losses: list[float] = dataclasses.field(default_factory=list)
    running: RunningTotals | dict[str, float] = dataclasses.field(default_factory=dict)
    input_offset: int = 0
    rollbacks: int = 0
    optimizers: list[str] | None = None
    learning_rates: dict[str, float] = dataclasses.field(default_factory=dict)
    actions: dict[str, Any] = dataclasses.field(default_factory=dict)
    engines: dict[str, EngineChoice] = dataclasses.field(default_factory=dict)
    seed: int | None = None
    global_batch_size: int | None = None
    loop: str | None = None
    examples: int | None = None
    files: dict[str, str] | None = None
    unknown: dict[str, Any] = dataclasses.field(default_factory=dict)

    def to_json(self) -> str:
        """Returns the JSON text to save."""
        fields = dataclasses.asdict(self)
        text = json.dumps({**fields.pop("unknown"), "format": FORMAT, **fields})
        RunRecord.from_json(text, "the checkpoint that is being saved")  # what cannot be read is not written
        return text

    @classmethod
    def from_json(cls, text: str | bytes, path: str = "the checkpoint") -> "RunRecord":
        """Reads a record.

        Args:
          text: the JSON text of a checkpoint.
          path: the checkpoint's, for the message.

        Raises:
          UsageError: if it is not the text of a record, a field has another type, or its format is a newer one.
        """
        try:
            saved = files.parse_json(text)
        except (ValueError, TypeError) as error:
            raise _unreadable(path, str(error)) from error
        if not isinstance(saved, dict):
            raise _unreadable(path, f"it is {saved!r:.50}, expected a JSON object")
        number = saved.pop("format", FORMAT)
        if type(number) is not int:
            raise _unreadable(path, f"its format is {number!r:.50}, expected a whole number")
        if number > FORMAT:
            raise UsageError(
                f"the run record in {path} has the format {number}, and this looplib reads formats up to {FORMAT}; "
                "install the version of looplib that wrote it"
            )
        fields = {}
        for name, kind in typing.get_type_hints(cls).items():
            if name != "unknown" and name in saved:
                value = saved.pop(name)
                try:
                    fields[name] = _parsed(value, kind)
                except _MisfitError as error:
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
    return UsageError(
        f"the run record in {path} cannot be read: {what}; name another checkpoint, or move this one out of "
        "the run directory and run the same command again"
    )


def _parsed(value: Any, kind: Any) -> Any:
    """Returns a JSON value as the type of a field: dataclasses are made of objects that have all their fields.

    Raises:
      _MisfitError: if it is not of that type.
    """
    of = typing.get_args(kind)
    if kind is Any:
        return value
    if typing.get_origin(kind) is types.UnionType:
        for one in of:
            with contextlib.suppress(_MisfitError):
                return _parsed(value, one)
    elif typing.get_origin(kind) is list and isinstance(value, list):
        return [_parsed(item, of[0]) for item in value]
    elif isinstance(value, dict) and typing.get_origin(kind) is dict:
        return {key: _parsed(item, of[1]) for key, item in value.items()}
    elif isinstance(value, dict) and dataclasses.is_dataclass(kind):
        kinds = typing.get_type_hints(kind)
        if kinds.keys() <= value.keys():
            return kind(**{name: _parsed(value[name], kinds[name]) for name in kinds})
    elif kind is float and type(value) is int and abs(value) <= sys.float_info.max:
        return value  # JSON has one kind of number
    elif kind is float and type(value) is bool:
        return int(value)  # older versions wrote Boolean metrics as they were
    elif type(value) is kind:  # a bool is not an int here
        return value
    raise _MisfitError


def _describe(kind: Any) -> str:
    text = kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)
    return text.replace(f"{__name__}.", "").replace("typing.", "")

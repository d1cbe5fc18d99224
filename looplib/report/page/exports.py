"""What the int8 exports of a run cost, read with bounds from the records in its folder of exports."""

import dataclasses
import os
import re
from typing import Any

from looplib.base import files
from looplib.run import values

_STEP = re.compile(r"step-(\d{1,15})$")
_MOST = 5  # exports that are shown, the newest


@dataclasses.dataclass(frozen=True)
class OutputDifference:
    """How much an output of an int8 model differs from the float one's, see `outputs.int8.OutputCost`."""

    name: str
    largest: float
    mean: float
    same_class: float | None


@dataclasses.dataclass(frozen=True)
class ShownInt8:
    """An int8 export.

    Attributes:
      step: of the weights.
      kind: "integer" or "dynamic range".
      bytes: its size; None if that is not known.
      float_bytes: of the weights as they were trained, from another file beside it; None if there is none.
      split: whose data it was compared on; "" for none.
      examples: of that data.
      outputs: how much they differ.
    """

    step: int
    kind: str
    bytes: int | None
    float_bytes: int | None
    split: str
    examples: int
    outputs: list[OutputDifference]


def read_int8(directory: str) -> list[ShownInt8]:
    """Returns the int8 exports of a run, of the newest steps, oldest first."""
    folder = os.path.join(directory, "export")
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    steps = sorted(int(found[1]) for found in map(_STEP.match, names) if found)
    read = (_read(step, os.path.join(folder, f"step-{step}", "export.json")) for step in steps[-_MOST:])
    return [one for one in read if one]


def _read(step: int, path: str) -> ShownInt8 | None:
    try:
        record = values.mapping(files.parse_json(files.read_text(path)))
    except (OSError, ValueError):
        return None
    cost, sizes = values.mapping(record.get("int8")), values.mapping(record.get("files"))
    if not cost:
        return None
    beside = [values.whole(sizes.get(name)) for name in ("model.tflite", "model.safetensors", "saved_model")]
    return ShownInt8(
        step=step,
        kind=values.text(cost.get("kind"), 40),
        bytes=values.whole(sizes.get("model.int8.tflite")),
        float_bytes=next((size for size in beside if size is not None), None),
        split=values.text(cost.get("split"), 100),
        examples=values.whole(cost.get("examples")) or 0,
        outputs=[one for one in map(_output, values.mapping(cost.get("outputs")).items()) if one],
    )


def _output(item: tuple[str, Any]) -> OutputDifference | None:
    name, cost = item[0], values.numbers(item[1])
    if not {"largest", "mean"} <= cost.keys():
        return None
    return OutputDifference(name, cost["largest"], cost["mean"], cost.get("same_class"))

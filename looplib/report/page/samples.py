"""Images, texts and histograms that a trainer wrote: the newest of each name, within bounds."""

import base64
import collections
import dataclasses
import os
from collections.abc import Iterable
from typing import Any

from looplib.base import files, folders
from looplib.run import values
from looplib.run.records import Record

FILE = "media.jsonl"
_FOLDER = "media"
_MOST_NAMES = 40  # of each kind
_MOST_STEPS = 6  # of each name, the newest
_MOST_IMAGES = 16  # of one record
_MOST_IMAGE_BYTES = 1 << 19
_MOST_BYTES = 2 << 20  # of all images together
_MOST_BINS = 512
_PNG = b"\x89PNG\r\n\x1a\n"


@dataclasses.dataclass(frozen=True)
class Sample:
    """What a trainer wrote at a step: one of images, as data URLs; texts; or a histogram."""

    name: str
    step: int
    images: list[str]
    texts: list[str]
    edges: list[float]
    counts: list[float]


@dataclasses.dataclass(frozen=True)
class Samples:
    """The samples by kind; grouped by name, oldest first. `left_out` counts images that are not shown."""

    images: list[Sample]
    texts: list[Sample]
    histograms: list[Sample]
    left_out: int


def read_samples(directory: str, records: Iterable[Record]) -> Samples:
    """Returns the samples of a run; what is not a sample is left out.

    Args:
      directory: the run directory, which has the images.
      records: the records of its `FILE`.
    """
    newest: dict[tuple[str, str], collections.deque[dict[str, Any]]] = {}
    for record in records:
        kind, split, name = (values.text(record.get(key), 200) for key in ("kind", "split", "name"))
        if kind in ("image", "text", "histogram") and values.whole(record.get("step")) is not None:
            key = kind, f"{split}/{name}"
            if key in newest or sum(known == kind for known, _ in newest) < _MOST_NAMES:
                newest.setdefault(key, collections.deque(maxlen=_MOST_STEPS)).append(record)
    left = _ImageBudget(_MOST_BYTES, 0)
    found: dict[str, list[Sample]] = {"image": [], "text": [], "histogram": []}
    for (kind, name), records in newest.items():
        samples = [_sample(directory, kind, name, record, left) for record in reversed(records)]
        found[kind] += [one for one in reversed(samples) if one.images or one.texts or one.counts]
    return Samples(found["image"], found["text"], found["histogram"], left.out)


@dataclasses.dataclass
class _ImageBudget:
    """The bytes left for images, and how many images had no room."""

    bytes: int
    out: int


def _sample(directory: str, kind: str, name: str, record: dict[str, Any], left: _ImageBudget) -> Sample:
    images, texts, edges, counts = [], [], [], []
    if kind == "image":
        for file in values.items(record.get("files"))[:_MOST_IMAGES]:
            if image := _image(directory, file, left):
                images.append(image)
    elif kind == "text":
        texts = [values.text(one) for one in values.items(record.get("texts"))[:_MOST_IMAGES]]
    else:
        counts = [values.number(one) or 0.0 for one in values.items(record.get("counts"))[:_MOST_BINS]]
        edges = [values.number(one) for one in values.items(record.get("edges"))[: len(counts) + 1]]
        if None in edges or len(edges) != len(counts) + 1:
            edges, counts = [], []
    return Sample(name, record["step"], images, texts, edges, counts)


def _image(directory: str, name: Any, left: _ImageBudget) -> str:
    """Returns a PNG file in the folder of a run's media as a data URL; "" if it cannot be shown."""
    folder = os.path.join(directory, _FOLDER)
    try:
        folders.check_folder(folder)
        with files.open_regular(folders.inside(folder, name)) as file:
            content = file.read(_MOST_IMAGE_BYTES + 1)
    except (ValueError, OSError):
        return ""
    if not content.startswith(_PNG):
        return ""
    if len(content) > min(_MOST_IMAGE_BYTES, left.bytes):
        left.out += 1
        return ""
    left.bytes -= len(content)
    return "data:image/png;base64," + base64.b64encode(content).decode()

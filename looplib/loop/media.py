"""Media of a step, from the device to what writers show."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.errors import UsageError
from looplib.report.shown import Histogram, Images, Shown, Texts
from looplib.task.media import Media

_LONGEST = 10_000  # characters of a text


def as_shown(media: Mapping[str, Media]) -> dict[str, Shown]:
    """Returns media for the writers, by their names.

    Args:
      media: with tensors of the host.

    Raises:
      UsageError: if `decode` of a text does not return text.
    """
    return {name: _shown(name, each) for name, each in media.items()}


def _shown(name: str, media: Media) -> Shown:
    values = [np.asarray(tensor) for tensor in media.tensors]
    if media.kind == "image":
        return Images(values[0])
    if media.kind == "text":
        return Texts(tuple(_text(name, media, value) for value in values[0]))
    if media.kind == "histogram":
        (low, high), counts = values[0].tolist(), values[1].tolist()
        return Histogram(tuple(np.linspace(low, high, len(counts) + 1).tolist()), tuple(counts))
    raise NotImplementedError(f"nothing shows a looplib.{media.kind}")


def _text(name: str, media: Media, value: Any) -> str:
    text = media.decode(value) if media.decode else value.decode(errors="replace")
    if not isinstance(text, str):
        raise UsageError(f"decode of the text {name!r} returned a {type(text).__name__}; expected a str")
    text = text.encode(errors="backslashreplace").decode()  # lone surrogates
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def with_tensors(media: Mapping[str, Media], tensors: Mapping[str, Sequence[tf.Tensor]]) -> dict[str, Media]:
    """Returns media of a traced step with the values that it has computed, by their names."""
    return {name: Media(each.kind, tuple(tensors[name]), each.decode) for name, each in media.items()}

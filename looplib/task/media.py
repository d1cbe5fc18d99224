"""What a step shows besides numbers: images, texts and histograms."""

import dataclasses
from collections.abc import Callable

import numpy as np
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Media:
    """Something to look at; made by `image`, `text` and `histogram`.

    Attributes:
      kind: the name of the function that made it.
      tensors: an image's uint8 `[n, height, width, channels]`; a text's strings, or integers, `[n, ...]`; a histogram's
        least and largest value, float32 `[2]`, and its counts, int32 `[bins]`.
      decode: for a text of integers: the function that turns the integers of one example into text.
    """

    kind: str
    tensors: tuple[tf.Tensor, ...]
    decode: Callable[[np.ndarray], str] | None = None

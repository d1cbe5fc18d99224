"""Media that writers record besides metrics, on the host: images, texts and histograms."""

import dataclasses
import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `status`, which imports this, does without it
    import numpy as np


@dataclasses.dataclass(frozen=True)
class Images:
    """Images.

    Attributes:
      pixels: uint8 `[number, height, width, channels]`.
    """

    pixels: "np.ndarray"

    @functools.cached_property
    def files(self) -> tuple[bytes, ...]:
        """Each image as the content of a PNG file; encoded on first use, in the thread of a writer."""
        import tensorflow as tf  # here, because tools that read no images do without it

        with tf.device("cpu:0"):
            return tuple(tf.io.encode_png(self.pixels).numpy().tolist())  # one op for all of them


@dataclasses.dataclass(frozen=True)
class Texts:
    """Texts.

    Attributes:
      texts: the texts.
    """

    texts: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Histogram:
    """Counts of values by bins.

    Attributes:
      edges: the edges of the bins, one more than there are bins, in ascending order.
      counts: number of values in each bin.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]


Shown = Images | Texts | Histogram

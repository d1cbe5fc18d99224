"""What writers show besides metrics, as it is on the host: images, texts and histograms."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Images:
    """Images.

    Attributes:
      files: the content of a PNG file for each.
      height, width: their size in pixels.
    """

    files: tuple[bytes, ...]
    height: int
    width: int


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
      counts: how many values are in each bin.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]


Shown = Images | Texts | Histogram

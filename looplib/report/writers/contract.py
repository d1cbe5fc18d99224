"""Writers: the contract, what they take, and the names of those that are on by default."""

import abc
import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

from looplib.base.numbers import Progress

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


Setting = bool | int | float | str

GROUP = "looplib.writers"
DEFAULT_WRITERS = ("console", "tensorboard", "jsonl", "media")
"""The names of the writers that a `Controller` has by default."""


class Writer(abc.ABC):
    """Takes the metrics of every loop and evaluation."""

    @abc.abstractmethod
    def write(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
        """Records metrics.

        Args:
          step: int, the global step.
          split: "train" or an evaluator's name.
          metrics: dict from name to int or float.
        """

    def show(self, step: int, split: str, shown: Mapping[str, Shown]) -> None:
        """Records images, texts and histograms; does nothing by default.

        Args:
          step: the global step.
          split: as of `write`.
          shown: dict from name to what is shown.
        """

    def settings(self, settings: Mapping[str, Setting]) -> None:
        """Takes the settings of the run, when a training starts; does nothing by default.

        Args:
          settings: dict from name to value: `config.<field>` of the program's own, and what the loops are set to.
        """

    def progress(self, progress: Progress | None) -> None:
        """Takes where the training stands: when it starts, before each report and around each evaluation.

        Args:
          progress: the `Progress`; None when the training has ended, however it ended.
        """

    def resume(self, step: int, reported: dict[str, int]) -> None:
        """Takes out the records that a training is about to make again; called when the training starts.

        Args:
          step: the global step that the training continues from.
          reported: dict from split to the last step whose record holds: for "train" the last one that was reported
            when the checkpoint of `step` was saved, because the next window of steps is incomplete. Later records of
            these splits are void, and records after `step` of any other.
        """

    def note(self, sentence: str) -> bool:
        """Shows a sentence about the run, such as where it continues.

        Returns:
          Whether it is shown, which it is not by default. If no writer shows it, it is logged.
        """
        return False

    def flush(self) -> None:
        """Makes sure that what was written can be read by others."""

    def sync(self) -> None:
        """Puts on the disk what was flushed, so that a power cut does not undo it; called from another thread."""

    def close(self) -> None:
        """Flushes and closes files."""
        self.flush()

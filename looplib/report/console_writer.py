"""ConsoleWriter: a line for each report on the screen, and a progress bar on a terminal."""

import math
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, TextIO

from looplib import console
from looplib.report.writer import Writer

if TYPE_CHECKING:
    import tqdm


class ConsoleWriter(Writer):
    """One line for each loop and evaluation on standard output, and on a terminal a progress bar below them.

    Args:
      stream: where to write; default `sys.stdout`.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._given = stream
        self._bar: tqdm.tqdm | None = None
        self._target: int | None = None

    def write(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
        """Prints one line."""
        numbers = "  ".join(f"{name} {format_number(value)}" for name, value in metrics.items())
        self._print(f"step {step:>7}  {split:<5}  {numbers}")

    def note(self, sentence: str) -> None:
        """Prints the sentence."""
        self._print(sentence)

    @property
    def _stream(self) -> TextIO | None:
        return self._given or sys.stdout  # of this moment: it is replaced while a run trains

    def _print(self, line: str) -> None:
        if self._bar is None:
            console.say(line, self._stream)
            return
        with console.swallowing():
            self._bar.write(line, file=self._stream)

    def progress(self, step: int, target: int | None) -> None:
        """Moves the bar, on a terminal."""
        with console.swallowing():
            if self._stream is None or not self._stream.isatty():
                return
            if self._bar is None or self._target != target:
                import tqdm  # costs start-up time, and only a terminal needs it

                self.close()
                self._target = target
                self._bar = tqdm.tqdm(total=target, initial=step, unit="step", file=self._stream, leave=False)
            self._bar.update(step - self._bar.n)
            self._bar.refresh()

    def flush(self) -> None:
        """Flushes the stream."""
        with console.swallowing():
            if self._stream is not None:
                self._stream.flush()

    def close(self) -> None:
        """Takes the bar away."""
        bar, self._bar = self._bar, None
        if bar is not None:
            with console.swallowing():
                bar.close()


def format_number(value: float) -> str:
    """Formats a number for a person: whole numbers as they are, others with four significant digits.

    Args:
      value: int or float.

    Returns:
      str, such as `1797`, `0.9833`, `1.2e-05`.
    """
    if isinstance(value, int) or (abs(value) >= 1000 and math.isfinite(value)):
        return f"{value:.0f}"
    return f"{value:.4g}"

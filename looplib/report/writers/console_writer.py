"""ConsoleWriter: a line for each report on the screen; on a terminal and in a notebook, a progress bar."""

import math
import os
import sys
import time
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

from looplib.base import console
from looplib.base.numbers import Progress, forecast, format_number, headline
from looplib.report.writers.contract import Writer

if TYPE_CHECKING:
    import tqdm

_DRAWN_SECONDS = 0.05  # between two reports that the bar shows, because drawing may take longer than a short loop
_BAR_COLUMNS = 20  # "100%|", the bar, "| " and the cursor
_STALE_SECONDS = 1.0  # without a report, after which the bar shows the step alone


class ConsoleWriter(Writer):
    """One line for each loop and evaluation on standard output.

    On a terminal and in a notebook, reports of the training move a progress bar instead. The newest one is also printed
    above the lines of an evaluation, and when the training ends.

    Args:
      stream: where to write; default `sys.stdout`.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._given = stream
        self._bar: tqdm.tqdm | None = None
        self._progress: Progress | None = None
        self._headline = ""
        self._drawn = -math.inf  # when the bar last showed a report
        self._held: str | None = None  # the newest report of the training, while the bar stands for it

    def write(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
        """Prints one line, or moves the bar."""
        line = f"step {step:>7}  {split:<5}  {_joined(metrics, '  ')}"
        if split != "train":
            self._print_held()
            self._print(line)
            return
        now = self._progress if self._progress and self._progress.step == step else Progress(step)
        percent = f"{step / now.end:.0%} of {now.end:,} steps" if now.end else ""
        if known := ", ".join(filter(None, (percent, forecast(now)))):
            line += f"  ({known})"
        if self._bar is None:
            self._print(line)
        else:
            self._held, self._headline = line, _joined(headline(metrics), ", ")
            if time.monotonic() > self._drawn + _DRAWN_SECONDS:
                self._drawn = time.monotonic()
                self._draw()

    def note(self, sentence: str) -> bool:
        """Prints the sentence."""
        self._print(sentence)
        return True

    def progress(self, progress: Progress | None) -> None:
        """Moves the bar, on a terminal or in a notebook."""
        before, self._progress = self._progress, progress
        if progress is None:
            self._take_away()
            return
        with console.noting_errors():
            if self._bar is None:
                self._bar = _make_bar(self._stream, progress)
        changed = before is None or before.evaluating != progress.evaluating
        if changed or time.monotonic() > self._drawn + _STALE_SECONDS:
            self._draw()

    @property
    def _stream(self) -> TextIO | None:
        return self._given or sys.stdout  # of this moment: it is replaced while a run trains

    def _draw(self) -> None:
        if self._bar is None or self._progress is None:
            return
        now = self._progress
        steps = f"{now.step:,}/{now.end:,}" if now.end else f"step {now.step:,}"
        rate = f"{format_number(now.rate)} steps/s" if now.rate else ""
        with console.noting_errors():
            self._bar.total, self._bar.n = now.end, now.step
            self._bar.set_description_str(self._fitting(steps, rate, forecast(now).split(", ")), refresh=False)
            self._bar.refresh()
            console.bar_is_drawn.set()

    def _fitting(self, steps: str, rate: str, forecast: list[str]) -> str:
        """Joins as much as fits beside the bar, because a part of a number would read as another number."""
        width = _room(self._stream)
        for count in range(len(forecast), -1, -1):
            text = " | ".join(filter(None, (steps, rate, ", ".join(forecast[:count]), self._headline)))
            if len(text) <= width:
                return text
        return " | ".join(filter(None, (steps, rate)))

    def _print(self, line: str) -> None:
        if self._bar is None:
            console.say(line, self._stream)
            return
        with console.noting_errors():
            self._bar.write(line, file=self._stream)
            console.bar_is_drawn.set()

    def _print_held(self) -> None:
        held, self._held = self._held, None
        if held:
            self._print(held)

    def _take_away(self) -> None:
        bar, self._bar, self._headline = self._bar, None, ""
        if bar is not None:
            with console.noting_errors():
                bar.close()
        self._print_held()

    def flush(self) -> None:
        """Flushes the stream."""
        with console.noting_errors():
            if self._stream is not None:
                self._stream.flush()

    def close(self) -> None:
        """Takes the bar away."""
        self._take_away()


def _make_bar(stream: TextIO | None, progress: Progress) -> "tqdm.tqdm | None":
    """Returns a bar, or None where the stream is neither a terminal's nor a notebook's."""
    in_notebook = _in_notebook() and stream is sys.stdout
    if stream is None or not (in_notebook or (stream.isatty() and os.environ.get("TERM") != "dumb")):
        return None
    import tqdm  # costs start-up time, and only a bar needs it

    kind = tqdm.tqdm
    if in_notebook:
        with warnings.catch_warnings():  # without ipywidgets the bar is text
            warnings.simplefilter("ignore")
            import tqdm.auto

        kind = tqdm.auto.tqdm

    class Bar(kind):
        monitor_interval = 0  # no thread, which would draw into the prompt of a debugger

        def refresh(self, *args: Any, **settings: Any) -> bool | None:
            drawn = super().refresh(*args, **settings)
            if not in_notebook:
                # Messages of TensorFlow's runtime, which nothing here sees, then replace the bar.
                self.fp.write("\r")
                self.fp.flush()
            return drawn

    bar = "{bar}" if in_notebook else "{bar:12}"  # a notebook's fills the line
    return Bar(
        total=progress.end,
        initial=progress.step,
        file=stream,
        leave=False,
        dynamic_ncols=True,
        bar_format="{desc}" if progress.end is None else "{percentage:3.0f}%|" + bar + "| {desc}",
    )


def _room(stream: TextIO | None) -> float:
    """Returns the columns beside a bar; infinity where lines have no end."""
    if stream is None or _in_notebook():
        return math.inf
    try:
        return os.get_terminal_size(stream.fileno()).columns - _BAR_COLUMNS
    except (OSError, ValueError):
        return math.inf


def _in_notebook() -> bool:
    """Returns whether this process is the kernel of a notebook."""
    shell = sys.modules.get("ipykernel.zmqshell")
    return shell is not None and shell.ZMQInteractiveShell.initialized()


def _joined(metrics: Mapping[str, float], between: str) -> str:
    return between.join(f"{name} {format_number(value)}" for name, value in metrics.items())

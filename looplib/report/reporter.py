"""The reporter: all that a run says of itself, to its writers, in `run.json`, on its page and on the console."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from looplib.diagnosis import diagnosis
from looplib.report.clock import Clock, Pace
from looplib.report.page import Page
from looplib.report.run_json import RunReport, path_of, settings_of
from looplib.report.shown import Shown
from looplib.report.writers import Writer, Writers, make_writers

Metrics = dict[str, float]


class Reporter:
    """All that a run says of itself.

    Args:
      model_dir: the run directory, if it can be written; None reports on the console only.
      writers: the user's writers, or their names; None for the defaults.
      is_chief: whether this process reports for all workers.
      trains: whether the run trains; an evaluation job has a report of its own, and no page.
      check: raises `UsageError` if the run directory is not this process's any more.
      clock: adds up the time of the run by phase.
      facts: further fields of `RunReport`.

    Attributes:
      report: `run.json`, with the page of the run.
      writers: all writers as one.
      clock: the clock.
      pace: how fast the training goes.
      last_evaluation: the metrics of the last evaluation, by evaluator.
      end: the step that the newest training goes to; None before it starts, and where it is not known.
      ended_at: the step at which the newest training has ended; None while one trains.
    """

    def __init__(
        self,
        model_dir: str | None,
        *,
        writers: Sequence[Writer | str] | None,
        is_chief: bool,
        trains: bool,
        check: Callable[[], None],
        clock: Clock,
        **facts: Any,
    ) -> None:
        place = model_dir if is_chief else None
        self.clock, self._check, self._is_chief, self._save_noted = clock, check, is_chief, False
        self.writers = make_writers(writers, place, check) if is_chief else Writers([])
        self.report = RunReport(
            path=path_of(place, trains) if place else None,
            clock=clock,
            check=check,
            page=Page(place if trains else None, self._flush_for_page),
            **facts,
        )
        self.pace = Pace(clock)
        self.last_evaluation: dict[str, Metrics] = {}
        self.end: int | None = None
        self.ended_at: int | None = None

    def _flush_for_page(self) -> None:
        self.writers.flush()  # the page is made of what they have written
        self._check()

    @contextlib.contextmanager
    def training(self, restored_from: str | None, flags: Mapping[str, Any], step: Callable[[], int]) -> Iterator[None]:
        """Reports a training, the `with` block, in `run.json`, and gives the writers its settings.

        Args:
          restored_from: path of the checkpoint that it continues from, or None.
          flags: its settings by the names of flags.
          step: returns the global step.
        """
        self.ended_at = None
        try:
            with self.report.of_a_start(restored_from):
                self.writers.settings(settings_of(flags, self.report.config))
                try:
                    yield
                finally:
                    self.ended_at = step() if self.ended_at is None else self.ended_at
        finally:
            self.writers.progress(None)

    def say(self, sentence: str) -> None:
        """Shows the user a sentence about the run, on the console, or in the log where there is no console."""
        if not self.writers.note(sentence):
            logging.info("%s", sentence)

    def write(self, split: str, step: int, metrics: Metrics) -> None:
        """Gives metrics to the writers."""
        self._check()
        if split == "train":
            self.report.points.note(step)
        self.writers.write(step, split, metrics)
        self.report.page.note_news()

    def show(self, split: str, step: int, shown: Mapping[str, Shown]) -> None:
        """Gives media to the writers, if there are any."""
        if shown:
            self._check()
            with self.clock.phase("report"):
                self.writers.show(step, split, shown)

    def show_progress(self, step: int, evaluation: int | None, evaluating: bool = False) -> None:
        """Gives the writers the position of the training.

        Args:
          step: the global step.
          evaluation: the step of the next evaluation, or None.
          evaluating: whether the evaluation of this step comes now.
        """
        self.writers.progress(self.pace.at(step, self.end, evaluation, evaluating))

    def note_first_save(self) -> None:
        """Writes in `run.json`, once, that the run has a checkpoint, so that it does not start over unasked."""
        if not self._save_noted:
            self._save_noted = True
            self.report.write("running")

    def note_rollback(self, from_step: int, to_step: int, reason: str) -> None:
        """Writes that the run has gone back to a checkpoint, see `RunReport.note_rollback`."""
        self.ended_at = None
        self.report.note_rollback(from_step, to_step, reason)

    def note_end(self, step: int) -> None:
        """Notes in `run.json` that an action has restored another checkpoint at the end of a training."""
        if step != self.ended_at:
            self.report.write("done")

    def note_speed(self, strategy: tf.distribute.Strategy, steps: int) -> None:
        """Notes the share of the devices' peak that the steps of this start have reached, unless they were short."""
        seconds = self.clock.of("train") + self.clock.of("input")
        if self.report.speed and self._is_chief and steps:
            with self.clock.phase("report"):
                self.report.speed = diagnosis().speed_of_ended(self.report.speed, strategy, steps, seconds)

    def close(self) -> None:
        """Closes the writers, and then writes the page, also where a writer fails."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.report.page.close)
            stack.callback(self.writers.close)

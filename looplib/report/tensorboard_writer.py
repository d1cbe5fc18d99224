"""TensorBoardWriter: the metrics of a run in event files."""

import contextlib
import os
import platform
from collections.abc import Callable, Mapping

from absl import logging

from looplib import files
from looplib.report.event_files import (
    Event,
    EventFile,
    event_of,
    event_of_media,
    has_metrics,
    keep_void_events,
    names_in,
    read_events,
    rewrite,
    same_record,
)
from looplib.report.hparams import event_of_settings, has_settings
from looplib.report.ownership import event_files
from looplib.report.shown import Shown
from looplib.report.writer import Setting, Writer


class TensorBoardWriter(Writer):
    """Metrics and media for TensorBoard, in `train/` and `eval/` (`eval/<name>/` for a named evaluator).

    The metrics of each (step, split) are one event, and so are its media; each stands once in all event files together:
    a record written again with other values replaces the first one. A record cut short by a crash is cut off; outside
    `train/` only in files of this host, because another host's job may be about to complete it. Events that are taken
    out of a file are kept beside it, in a file with "voided" in place of "tfevents" in its name. Event files of other
    programs stay as they are, see `ownership`. The settings are in an event file of `directory` itself.

    Args:
      directory: the run directory.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._files: dict[str, EventFile] = {}  # by split: the one that is open
        self._known: dict[str, set[tuple[int, str]]] = {}  # by split: `_keys` of all its files, once they were read

    def resume(self, step: int, reported: dict[str, int]) -> None:
        """Takes out the records that the run will make again."""
        self.close()
        named = os.path.join(self._directory, "eval")
        names = [name.rstrip("/") for name in names_in(named)]
        for split in {"train", "eval", *reported, *names}:
            if os.path.islink(self._folder(split)):
                continue
            self._keep(split, lambda event, last=reported.get(split, step): event.step <= last)

    def write(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
        """Writes one event."""
        self._write(split, event_of(step, metrics))

    def show(self, step: int, split: str, shown: Mapping[str, Shown]) -> None:
        """Writes one event."""
        self._write(split, event_of_media(step, shown))

    def settings(self, settings: Mapping[str, Setting]) -> None:
        """Writes the settings for the HParams plugin, in place of earlier ones, into `directory` itself."""
        try:
            event = event_of_settings(settings)
        except ImportError:  # TensorFlow is installed without TensorBoard
            return
        for path in self._files_of(self._directory):
            events = read_events(path)[0]
            if any(has_settings(other, settings) for other in events):
                return
            if any(has_settings(other) for other in events):
                rewrite(path, [other for other in events if not has_settings(other)])
        file = EventFile(self._directory)
        file.write(event)
        file.close()
        files.make_durable(file.path)

    def _write(self, split: str, event: Event) -> None:
        """Writes an event, in place of one of this step with the same tags."""
        if split in self._files and not self._files[split].intact():
            self._files.pop(split).close()
            del self._known[split]
        if split not in self._known:
            self._keep(split, lambda other: True)
        if not self._known[split].isdisjoint(_keys(event)):
            earlier = [e for path in self._paths(split) for e in read_events(path)[0] if same_record(e, event)]
            # As bytes, in which a number that is not one equals itself.
            if [e.summary.SerializeToString() for e in earlier] == [event.summary.SerializeToString()]:
                return
            self._keep(split, lambda other: not same_record(other, event))
        if split not in self._files:
            self._files[split] = EventFile(self._directory, *_names(split))
        self._files[split].write(event)
        self._known[split].update(_keys(event))

    def sync(self) -> None:
        """See `Writer`."""
        for file in list(self._files.values()):
            with contextlib.suppress(FileNotFoundError):  # another job has rewritten it
                files.make_durable(file.path)
                files.make_durable(os.path.dirname(file.path))

    def close(self) -> None:
        """Closes the event files."""
        for file in self._files.values():
            file.close()
        self._files, self._known = {}, {}

    def _folder(self, split: str) -> str:
        return os.path.join(self._directory, *_names(split))

    def _paths(self, split: str) -> list[str]:
        return self._files_of(self._folder(split))

    def _files_of(self, folder: str) -> list[str]:
        paths = [os.path.join(folder, name) for name in event_files(self._directory, names_in(folder))]
        return [path for path in paths if files.is_remote(path) or (os.path.isfile(path) and not os.path.islink(path))]

    def _keep(self, split: str, condition: Callable[[Event], bool]) -> None:
        """Removes the other events from the split's files; files without any are unchanged."""
        known: set[tuple[int, str]] = set()
        for path in self._paths(split):
            events, whole = read_events(path)
            kept = [event for event in events if condition(event)]
            void = [event for event in events if not condition(event)]
            ours = split == "train" or f".{platform.node()}." in os.path.basename(path)
            if len(kept) < len(events) or (ours and not whole):
                if split in self._files and self._files[split].path == path:
                    self._files.pop(split).close()
                elif files.is_open_here(path):  # by `tf.summary`, whose next events would be lost with the old file
                    logging.warning("%s is open in this process, so %d void events stay in it", path, len(void))
                    continue
                if void:
                    keep_void_events(path, void)
                rewrite(path, kept)
            else:
                files.make_durable(path)  # of an earlier process, or closed here since the last `sync`
            known.update(key for event in kept for key in _keys(event))
        self._known[split] = known


def _names(split: str) -> tuple[str, ...]:
    return (split,) if split in ("train", "eval") else ("eval", split)


def _keys(event: Event) -> set[tuple[int, str]]:
    """Returns what two events share if one may replace the other: of metrics the step, of others the step and a tag."""
    if has_metrics(event):
        return {(event.step, "")}
    return {(event.step, value.tag) for value in event.summary.value}

"""MediaWriter: the images, texts and histograms of a run in files."""

import contextlib
import hashlib
import os
from collections.abc import Mapping

import tensorflow as tf
from absl import logging

from looplib.base import files, folders
from looplib.base.messages import with_cure
from looplib.report.writers.contract import Writer
from looplib.report.writers.shown import Histogram, Images, Shown
from looplib.run.records import Record, RecordFile

FOLDER, FILE = "media", "media.jsonl"


class MediaWriter(Writer):
    """A JSON object a line in `media.jsonl`, and the images as PNG files in `media/`.

    A line has "step", "split", "name" and "kind", with "files" (names in `media/`) of an "image", "texts" of a "text",
    "edges" and "counts" of a "histogram". Each (step, split, name) stands once, see `RecordFile`. A file's name has a
    checksum of its content, so that none is ever replaced by another image.

    Args:
      directory: the run directory.
    """

    def __init__(self, directory: str) -> None:
        self._directory, self._folder = directory, os.path.join(directory, FOLDER)
        self._file = RecordFile(os.path.join(directory, FILE), lambda r: (r["step"], r["split"], str(r.get("name"))))
        self._failed = False
        self._new: list[str] = []  # paths of images that may not be on the disk yet

    def write(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
        """Does nothing: metrics are in other files."""

    def show(self, step: int, split: str, shown: Mapping[str, Shown]) -> None:
        """Appends one line for each name, and writes the images; what cannot be written is a warning, once."""
        for name, each in shown.items():
            try:
                self._file.write({"step": step, "split": split, "name": name, **self._fields(step, split, name, each)})
            except (OSError, ValueError, tf.errors.OpError) as error:
                if not self._failed:
                    logging.warning("media cannot be written to %s: %s", self._folder, with_cure(error))
                self._failed = True

    def resume(self, step: int, reported: dict[str, int]) -> None:
        """Takes out the lines that the run will make again; their images stay."""
        self._file.resume(step, reported)

    def sync(self) -> None:
        """See `Writer`."""
        new, self._new = self._new, []
        for path in [*new, *([self._folder] if new else [])]:
            with contextlib.suppress(FileNotFoundError):  # somebody has tidied up
                files.make_durable(path)
        self._file.sync()

    def _fields(self, step: int, split: str, name: str, shown: Shown) -> Record:
        if isinstance(shown, Images):
            begin = f"{files.safe_name(split)}.{files.safe_name(name)}.{step:08}"
            folders.make_folder(self._directory, FOLDER)
            return {"kind": "image", "files": [self._write(begin, i, png) for i, png in enumerate(shown.files)]}
        if isinstance(shown, Histogram):
            return {"kind": "histogram", "edges": list(shown.edges), "counts": list(shown.counts)}
        return {"kind": "text", "texts": list(shown.texts)}

    def _write(self, begin: str, number: int, png: bytes) -> str:
        """Writes an image; returns the name of its file."""
        name = f"{begin}.{number}.{hashlib.sha256(png).hexdigest()[:8]}.png"
        path = os.path.join(self._folder, name)
        files.write_whole(path, png, durable=False)
        self._new.append(path)
        return name

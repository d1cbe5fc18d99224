"""RunDir: what is in a run directory, opened when asked for. Nobody else knows the names and forms of its files."""

import os
from typing import TypeVar

from absl import logging

from looplib.base import files, folders
from looplib.base.decoding import READ, SHOWN, Limits, decode, parse_json
from looplib.run.records import RecordLog, aside_of
from looplib.run.report import RunReport, read_report

T = TypeVar("T")
RUN_JSON, METRICS, MEDIA, LOCK = "run.json", "metrics.jsonl", "media.jsonl", "lock"
PAGE, CONFIG, DIFF = "report.html", "config.yaml", "code.diff"
EVAL_JSON = "run_eval.json"  # the report of a job that does not train

# What a run directory holds; docs/reference/run_directory.md is made of it. The name of a folder ends with a slash.
CONTENTS = {
    "checkpoints/": "The checkpoints.",
    "checkpoints/set_aside/": "Damaged and unfinished checkpoints, which a start has moved there.",
    "metrics.jsonl": "The metrics, one JSON object a line: `step`, `split` and numbers.",
    "metrics.voided.jsonl": "Lines of `metrics.jsonl` whose steps a resume or a rollback has repeated.",
    "media.jsonl": "The images, texts and histograms that were shown.",
    "media.voided.jsonl": "Lines of `media.jsonl` whose steps were repeated.",
    "media/": "Their files.",
    "run.json": "Configuration, versions, strategy, last metrics, time by phase, all starts.",
    "run_eval.json": "The same of a job that does not train.",
    "config.yaml": "The settings of the program, for `--config_file`; secrets are masked.",
    "code.diff": "What differed from the git commit that `run.json` names.",
    "report.html": "The page about the run.",
    "train/": "TensorBoard events of the training, and the profile of `--profile`.",
    "eval/": "TensorBoard events of the evaluation; an evaluator of another name has its own folder.",
    "events.out.tfevents.*": "TensorBoard events with the settings, for its HParams page.",
    "alerts.log": "What `--alert` has told, and what could not be sent.",
    "csv/": "CSV files of `--trackers=csv`.",
    "wandb/": "What `--trackers=wandb` keeps.",
    "evaluations/": "The records of evaluation jobs on other machines, of a run in an object store.",
    "predictions/": "What `--mode=predict` writes.",
    "export/": "What `--mode=export` and `looplib.ExportBest` write.",
    "bad_records/": "Damaged records that `--bad_records` left out.",
    "audit.jsonl": "The intervals that `python -m looplib rerun --from` has repeated.",
    "lock": "Held by the process that trains.",
}
RECORDS = (METRICS, MEDIA)
"""Files of records, to which a training and evaluation jobs add."""
REPORTS = (*RECORDS, *(aside_of(name) for name in RECORDS), RUN_JSON, EVAL_JSON, CONFIG, DIFF)
"""Files that say what the run has come to."""


class RunDir:
    """A run directory, whose contents may be anything, and which need not exist.

    Args:
      path: the directory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)

    def report(self, limits: Limits = READ, mask: bool = False) -> RunReport | None:
        """Returns the report of its training, as far as it is one; None if there is none that can be read.

        Args:
          limits: bounds of what it holds; the file has at most 16 MiB.
          mask: whether to mask secrets, which an older looplib or another program may have written.
        """
        return read_report(self.report_path(), limits, mask)

    def report_path(self, trains: bool = True) -> str:
        """Returns the path of the report of a training, or of an evaluation job."""
        return os.path.join(self.path, RUN_JSON if trains else EVAL_JSON)

    def records(self, name: str = METRICS, voided: bool = False) -> RecordLog:
        """Returns the reader of a file of records; `voided` of those that a resume or a rollback has repeated."""
        return RecordLog(os.path.join(self.path, aside_of(name) if voided else name))

    def text(self, name: str) -> str:
        """Returns the text of a file of at most 16 MiB; "" if it cannot be read."""
        try:
            return files.read_text(os.path.join(self.path, name))
        except (ValueError, OSError):
            return ""

    def decoded(self, name: str, kind: type[T]) -> T | None:
        """Returns the content of a JSON file as a dataclass, bounded by `SHOWN`; None if it cannot be read."""
        try:
            return decode(kind, parse_json(self.text(name)), SHOWN, strict=False)
        except ValueError:
            return None

    def last_written(self) -> float:
        """Returns when a run has written a record or its report; if there is none, when it started; 0 if not known."""
        return max(map(self._changed, (METRICS, RUN_JSON))) or self._changed(LOCK)

    def _changed(self, name: str) -> float:
        try:
            return os.lstat(os.path.join(self.path, name)).st_mtime
        except OSError:
            return 0.0

    @property
    def has_reported(self) -> bool:
        """Whether it has a report or records, which are files and no links."""
        paths = [os.path.join(self.path, name) for name in (RUN_JSON, METRICS)]
        return any(os.path.isfile(path) and not os.path.islink(path) for path in paths)


def check_inside(model_dir: str, writes: bool) -> None:
    """Checks that what a run writes stays inside of its directory, which may come from somebody else.

    Args:
      model_dir: the run directory.
      writes: whether this process writes there; it then moves something else that stands where a file of the run
        belongs, such as a directory or a FIFO, out of the way, with a line for each.

    Raises:
      UsageError: if a folder of the run is a symbolic link or not a directory.
    """
    names = [name for name in CONTENTS if "*" not in name]
    for name in (name for name in names if name.endswith("/")):
        folders.check_folder(os.path.join(model_dir, name.rstrip("/")))  # a slash would lead through a link
    for folder in (model_dir, os.path.join(model_dir, "checkpoints")) if writes else ():
        folders.remove_unfinished(folder)
    for name in (name for name in names if writes and not name.endswith("/")):
        path = os.path.join(model_dir, name)
        if os.path.lexists(path) and (os.path.islink(path) or not os.path.isfile(path)):
            logging.warning("%s is not a file; moved to %s", path, folders.move_aside(model_dir, name))

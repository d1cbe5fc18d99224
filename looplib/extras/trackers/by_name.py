"""Trackers by the names of --trackers."""

import importlib.util
from collections.abc import Sequence

from looplib.errors import UsageError
from looplib.extras.trackers.background import BackgroundWriter
from looplib.extras.trackers.csv_writer import CsvWriter
from looplib.extras.trackers.mlflow_writer import MlflowWriter
from looplib.extras.trackers.wandb_writer import WandbWriter
from looplib.report.writer import Writer

NAMES = {"csv": CsvWriter, "mlflow": MlflowWriter, "wandb": WandbWriter}


def is_installed(name: str) -> bool:
    """Returns whether the package that a tracker needs is there."""
    return name == "csv" or importlib.util.find_spec(name) is not None


def make(names: Sequence[str], model_dir: str) -> list[Writer]:
    """Returns a writer for each name, which runs in a thread of its own.

    Args:
      names: keys of `NAMES`.
      model_dir: the run directory.

    Raises:
      UsageError: for another name, or a package that is missing.
    """
    for name in names:
        if name not in NAMES:
            raise UsageError(f"--trackers has {name!r}; expected names among {', '.join(NAMES)}")
        if not is_installed(name):
            raise UsageError(f"--trackers={name} needs the package {name}: pip install 'looplib[{name}]'")
    return [BackgroundWriter(NAMES[name](model_dir)) for name in dict.fromkeys(names)]

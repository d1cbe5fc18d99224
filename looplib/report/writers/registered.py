"""The writers by name: functions of the run directory. Other packages add theirs to the group `looplib.writers`.

The trackers among them each run in threads of their own.
"""

import importlib.util
from collections.abc import Callable, Mapping

from looplib.base import plugins
from looplib.errors import PluginError
from looplib.report.background import BackgroundWriter
from looplib.report.writers.console_writer import ConsoleWriter
from looplib.report.writers.contract import GROUP, Writer
from looplib.report.writers.csv_writer import CsvWriter
from looplib.report.writers.media_writer import MediaWriter
from looplib.report.writers.mlflow_writer import MlflowWriter
from looplib.report.writers.opentelemetry_writer import OpenTelemetryWriter
from looplib.report.writers.tensorboard_writer import TensorBoardWriter
from looplib.report.writers.wandb_writer import WandbWriter


def is_installed(package: str) -> bool:
    """Returns whether a package that a tracker needs is there."""
    return importlib.util.find_spec(package) is not None


def console(directory: str) -> Writer:
    """Returns the writer of the screen."""
    return ConsoleWriter()


def csv(directory: str) -> Writer:
    """Returns the tracker of tables."""
    return BackgroundWriter(CsvWriter(directory))


def media(directory: str) -> Writer:
    """Returns the writer of `media.jsonl`."""
    return MediaWriter(directory)


def mlflow(directory: str) -> Writer:
    """Returns the tracker of MLflow."""
    return BackgroundWriter(_needing("mlflow", MlflowWriter)(directory))


def opentelemetry(directory: str) -> Writer:
    """Returns the tracker of OpenTelemetry, whose SDK has the threads."""
    if not all(map(is_installed, ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter"))):
        raise PluginError("the writer opentelemetry needs its SDK and exporter: pip install 'looplib[opentelemetry]'")
    return OpenTelemetryWriter(directory)


def tensorboard(directory: str) -> Writer:
    """Returns the writer of TensorBoard's event files."""
    return TensorBoardWriter(directory)


def wandb(directory: str) -> Writer:
    """Returns the tracker of Weights & Biases."""
    return BackgroundWriter(_needing("wandb", WandbWriter)(directory))


def _needing(package: str, kind: type[Writer]) -> type[Writer]:
    if not is_installed(package):
        raise PluginError(f"the writer {package} needs the package {package}: pip install 'looplib[{package}]'")
    return kind


OWN: Mapping[str, Callable[[str], Writer]] = {
    "console": console,
    "csv": csv,
    "media": media,
    "mlflow": mlflow,
    "opentelemetry": opentelemetry,
    "tensorboard": tensorboard,
    "wandb": wandb,
}


def names() -> list[str]:
    """Returns the names of all writers, also of other packages."""
    return sorted({*OWN, *plugins.names(GROUP)})


def named(name: str) -> Callable[[str], Writer]:
    """Returns what makes the writer of a name, of looplib or another package, for a run directory.

    Raises:
      UsageError: if there is none, or it cannot be imported.
    """
    return plugins.load(GROUP, name, OWN)

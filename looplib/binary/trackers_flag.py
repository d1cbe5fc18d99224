"""TrackersFlag: --trackers, the names of further writers."""

from collections.abc import Mapping, Sequence
from typing import Any

from looplib.binary.command_line import FlagPlugin
from looplib.config.settings import Flag
from looplib.errors import WriterError
from looplib.report.writers import registered
from looplib.report.writers.contract import DEFAULT_WRITERS, Writer


class TrackersFlag(FlagPlugin):
    """The flag --trackers, which names writers besides the default ones."""

    flags = (Flag("trackers", list, None, "Further writers of metrics: csv, mlflow, opentelemetry, wandb, or others."),)

    def check(self, values: Mapping[str, Any]) -> None:
        """Raises `UsageError` for a name that is not known."""
        known = [name for name in registered.names() if name not in DEFAULT_WRITERS]
        for name in values["trackers"] or ():
            if name not in known:
                raise WriterError(f"--trackers has {name!r}; expected names among {', '.join(known)}")

    def writers(self, values: Mapping[str, Any]) -> Sequence[Writer]:
        """Returns the writers; `UsageError` if a package is missing."""
        return [registered.named(name)(values["model_dir"]) for name in dict.fromkeys(values["trackers"] or ())]

"""AlertFlags: --alert and --alert_when, which have a process beside the training tell what happens to it."""

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from looplib.base import files
from looplib.base.messages import gist
from looplib.binary.command_line import TRAINING_MODES, FlagPlugin
from looplib.config.settings import Flag
from looplib.errors import CommandError, FlagError
from looplib.processes.child import Child, CommandLine
from looplib.report.alerts import Condition, check_url
from looplib.task.actions import Action

LOG = "alerts.log"  # in the run directory
_SECONDS = "2"  # between two looks


class AlertFlags(FlagPlugin):
    """The flags --alert and --alert_when."""

    flags = (
        Flag("alert", tuple, None, "URL that gets alerts, of a webhook or of apprise; may be given several times."),
        Flag("alert_when", tuple, None, "Condition for an alert, such as eval/loss>2.5; may be given several times."),
    )

    def check(self, values: Mapping[str, Any]) -> None:
        """Raises `UsageError` for an address or a condition that cannot be used."""
        for url in values["alert"] or ():
            check_url(url)
        for text in values["alert_when"] or ():
            Condition.parse(text)
        if values["alert_when"] and not values["alert"]:
            raise FlagError("--alert_when says when to alert, and there is no --alert=URL that says whom; give both")
        if values["alert"] and values["mode"] not in TRAINING_MODES:
            raise FlagError(f"--alert is for trainings, and --mode={values['mode']} does not train; leave it out")

    def actions(self, values: Mapping[str, Any]) -> Sequence[Action]:
        """Returns the action that starts the process."""
        if not values["alert"] or values["dry_run"] or values["estimate"]:
            return ()
        return (WatchedBeside(values["alert"], values["alert_when"] or ()),)


class WatchedBeside(Action):
    """Starts `python -m looplib status --watch` for the run of this process, which ends with the training.

    The process is not a part of the training: it costs no step, and tells of the training's death too.

    Args:
      urls: see `alerts.Sender`.
      conditions: see `alerts.Condition`.
    """

    def __init__(self, urls: Sequence[str], conditions: Sequence[str]) -> None:
        self._urls, self._conditions = urls, conditions
        self._process: Child | None = None

    def on_start(self, controller: Any) -> None:
        """Starts the process; where that fails, it is a warning."""
        is_watched = self._process is not None and self._process.poll() is None
        if is_watched or not controller.is_chief or not controller.model_dir:
            return
        command = [sys.executable, "-m", "looplib", "status", controller.model_dir, "--watch", "--until_end"]
        command += [f"--interval={_SECONDS}", f"--process={os.getpid()}"]
        command += [f"--alert_when={text}" for text in self._conditions]
        command += ["--alert=-"]  # all users of a machine can read a command line
        try:
            with (
                files.open_to_append(os.path.join(controller.model_dir, LOG)) as log,
                tempfile.TemporaryFile() as urls,
            ):
                urls.write("\n".join(self._urls).encode())
                urls.seek(0)
                environment = {"TF_CPP_MIN_LOG_LEVEL": "3"}
                self._process = Child(CommandLine(command), environment, stdin=urls, output=log, ends_by=None)
        except (OSError, CommandError) as error:
            logging.warning("there will be no alerts: %s", gist(error))

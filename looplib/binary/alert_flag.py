"""AlertFlags: --alert and --alert_when, which have a process beside the training tell what happens to it."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from looplib.base import files
from looplib.base.messages import gist
from looplib.binary.command_line import TRAINING_MODES, FlagPlugin
from looplib.commands.watch import URLS
from looplib.config.settings import Flag
from looplib.errors import FlagError
from looplib.report.alert import Condition
from looplib.report.sending import check_url
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
    """Starts `python -m looplib watch` for the run of this process, which ends with the training.

    The process is not a part of the training: it costs no step, and tells of the training's death too.

    Args:
      urls: see `sending.Sender`.
      conditions: see `alert.Condition`.
    """

    def __init__(self, urls: Sequence[str], conditions: Sequence[str]) -> None:
        self._urls, self._conditions = urls, conditions
        self._process: subprocess.Popen | None = None

    def on_start(self, controller: Any) -> None:
        """Starts the process; where that fails, it is a warning."""
        is_watched = self._process is not None and self._process.poll() is None
        if is_watched or not controller.is_chief or not controller.model_dir:
            return
        command = [sys.executable, "-m", "looplib", "watch", controller.model_dir, "--until_end", f"--every={_SECONDS}"]
        command += [f"--process={os.getpid()}", *(f"--alert_when={text}" for text in self._conditions)]
        environment = {**os.environ, URLS: "\n".join(self._urls), "TF_CPP_MIN_LOG_LEVEL": "3"}
        try:
            with files.open_to_append(os.path.join(controller.model_dir, LOG)) as log:
                self._process = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
        except OSError as error:
            logging.warning("there will be no alerts: %s", gist(error))

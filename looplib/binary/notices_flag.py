"""NoticesFlag: --notices, which clouds and cluster managers a training listens to."""

from collections.abc import Mapping, Sequence
from typing import Any

from looplib.actions.listener import SOURCES, NoticeListener
from looplib.binary.command_line import TRAINING_MODES, FlagPlugin
from looplib.config.settings import Flag
from looplib.errors import FlagError
from looplib.task.actions import Action


class NoticesFlag(FlagPlugin):
    """The flag --notices."""

    flags = (
        Flag("notices", tuple, None, f"Ends a training, saved, when {', '.join(SOURCES[:-1])} or {SOURCES[-1]} says "
             "that the machine goes; may be given several times."),
    )  # fmt: skip

    def check(self, values: Mapping[str, Any]) -> None:
        """Raises `UsageError` for a name that is not known, a job that does not train, or a variable of no address."""
        for name in values["notices"] or ():
            if name not in SOURCES:
                raise FlagError(f"--notices is {name!a:.100}; expected one of {', '.join(SOURCES)}")
        if values["notices"] and values["mode"] not in TRAINING_MODES:
            raise FlagError(f"--notices is for trainings, and --mode={values['mode']} does not train; leave it out")
        NoticeListener(values["notices"] or ())

    def actions(self, values: Mapping[str, Any]) -> Sequence[Action]:
        """Returns the action that listens."""
        if not values["notices"] or values["dry_run"]:
            return ()
        return (NoticeListener(values["notices"]),)

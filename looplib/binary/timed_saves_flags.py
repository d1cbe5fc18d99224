"""TimedSavesFlags: --checkpoint_every and --checkpoint_budget."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from looplib.actions.timed_saves import TimedSaves
from looplib.base.messages import duration
from looplib.binary.command_line import TRAINING_MODES, FlagPlugin
from looplib.config.settings import Flag
from looplib.errors import FlagError


class TimedSavesFlags(FlagPlugin):
    """The flags --checkpoint_every and --checkpoint_budget."""

    flags = (
        Flag("checkpoint_every", str, None, "Also saves after this time: 90 (seconds), 10m, 1h30m."),
        Flag("checkpoint_budget", str, None, "Also saves as often as this share of the time allows, such as 1%."),
    )

    def check(self, values: Mapping[str, Any]) -> None:
        """Raises `UsageError` for a value of another form, or a job that does not train."""
        for name in ("checkpoint_every", "checkpoint_budget"):
            if values[name] and values["mode"] not in TRAINING_MODES:
                raise FlagError(f"--{name} saves a training, and --mode={values['mode']} does not train; leave it out")
        self.actions(values)

    def actions(self, values: Mapping[str, Any]) -> Sequence[TimedSaves]:
        """Returns the action that saves."""
        every, budget = values["checkpoint_every"], values["checkpoint_budget"]
        if every and budget:
            raise FlagError("--checkpoint_every and --checkpoint_budget both say when to save; give one of them")
        if every:
            return (TimedSaves(every=duration("--checkpoint_every", every)),)
        if not budget:
            return ()
        found = re.fullmatch(r"(\d{1,2}(?:\.\d{1,6})?)%", budget)
        if not found or not float(found[1]):
            raise FlagError(f"--checkpoint_budget is {budget!r:.100}; expected a share of the time such as 1% or 0.5%")
        return (TimedSaves(budget=float(found[1]) / 100),)

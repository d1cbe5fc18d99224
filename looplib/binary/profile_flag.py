"""ProfileFlag: --profile, the steps that a run profiles."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from looplib.actions.profiling import Profile
from looplib.binary.command_line import TRAINING_MODES, FlagPlugin
from looplib.config.settings import Flag
from looplib.errors import FlagError


class ProfileFlag(FlagPlugin):
    """The flag --profile."""

    flags = (Flag("profile", str, None, "START:STEPS: profiles so many steps after step START; none: no profile."),)

    def check(self, values: Mapping[str, Any]) -> None:
        """Raises `UsageError` for a value of another form, a job that does not train, or steps after its end."""
        for profile in self.actions(values):
            if values["mode"] not in TRAINING_MODES:
                mode = values["mode"]
                raise FlagError(f"--profile records training steps, and --mode={mode} does not train; leave it out")
            profile.check_end(values["train_steps"])

    def actions(self, values: Mapping[str, Any]) -> Sequence[Profile]:
        """Returns the profile that the flag asks for."""
        if not (text := values["profile"]):
            return ()
        if not (found := re.fullmatch(r"(\d{1,18}):(\d{1,18})", text)) or not int(found[2]):
            raise FlagError(
                f"--profile is {text!r}; expected START:STEPS, such as 200:20 for the 20 steps after step 200"
            )
        return (Profile(int(found[1]), int(found[2])),)

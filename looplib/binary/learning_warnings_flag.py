"""LearningWarningsFlag: --learning_warnings, whether a training is looked at for a loss of meaning."""

from collections.abc import Mapping, Sequence
from typing import Any

from looplib.binary.command_line import FlagPlugin
from looplib.config.settings import Flag
from looplib.task.actions import Action


class LearningWarningsFlag(FlagPlugin):
    """The flag --learning_warnings."""

    flags = (
        Flag("learning_warnings", bool, True, "Warns of constant predictions, weights that no longer change, "
             "and exploding norms."),
    )  # fmt: skip

    def actions(self, values: Mapping[str, Any]) -> Sequence[Action]:
        """Returns the action that warns."""
        if not values["learning_warnings"] or values["dry_run"] or values["estimate"]:
            return ()
        from looplib.actions.learning_warnings import LearningWarnings  # here, as no other start needs it

        return (LearningWarnings(),)

"""IntegrityFlags: --check_replicas."""

from collections.abc import Mapping, Sequence
from typing import Any

from looplib.actions.agreement import DEFAULT_EVERY, ReplicaAgreement
from looplib.binary.command_line import TRAINING_MODES, FlagPlugin
from looplib.config.settings import Flag
from looplib.errors import FlagError
from looplib.task.actions import Action


class IntegrityFlags(FlagPlugin):
    """The flag --check_replicas."""

    flags = (
        Flag("check_replicas", int, None, "Steps between comparisons of the variables of all replicas; 0: never; "
             f"none: {DEFAULT_EVERY:,}, or steps_per_loop if that is higher.", least=0),
    )  # fmt: skip

    def check(self, values: Mapping[str, Any]) -> None:
        """Raises `UsageError` for a job that does not train, or comparisons that are more frequent than reports."""
        every, per_loop = values["check_replicas"] or 0, values["steps_per_loop"] or 0
        if every and values["mode"] not in TRAINING_MODES:
            raise FlagError(
                f"--check_replicas is for trainings, and --mode={values['mode']} does not train; leave it out"
            )
        if 0 < every < per_loop:
            raise FlagError(
                f"--check_replicas is {every}, and --steps_per_loop is {per_loop}; expected at least as many steps, "
                "because the replicas are compared at reports"
            )

    def actions(self, values: Mapping[str, Any]) -> Sequence[Action]:
        """Returns the action that compares."""
        every = values["check_replicas"]
        return [] if every == 0 else [ReplicaAgreement(every)]

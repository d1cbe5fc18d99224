"""IntegrityFlags: --check_replicas and --check_copies."""

from collections.abc import Mapping, Sequence
from typing import Any

from looplib.command_line import TRAINING_MODES, FlagPlugin
from looplib.errors import FlagError
from looplib.extras.integrity.agreement import DEFAULT_EVERY, ReplicaAgreement
from looplib.extras.integrity.copies import CopyCheck
from looplib.settings import Flag
from looplib.task.actions import Action


class IntegrityFlags(FlagPlugin):
    """The flags --check_replicas and --check_copies."""

    flags = (
        Flag("check_replicas", int, None, "Steps between comparisons of the variables of all replicas; 0: never; "
             f"none: {DEFAULT_EVERY:,}, or steps_per_loop if that is higher.", least=0),
        Flag("check_copies", int, 0, "Compares every Nth batch on its device with what it was on the host; 0: none.",
             least=0),
    )  # fmt: skip

    def check(self, values: Mapping[str, Any]) -> None:
        """Raises `UsageError` for a job that does not train, or comparisons that are more frequent than reports."""
        for name in ("check_replicas", "check_copies"):
            if values[name] and values["mode"] not in TRAINING_MODES:
                raise FlagError(f"--{name} is for trainings, and --mode={values['mode']} does not train; leave it out")
        every, per_loop = values["check_replicas"] or 0, values["steps_per_loop"] or 0
        if 0 < every < per_loop:
            raise FlagError(
                f"--check_replicas is {every}, and --steps_per_loop is {per_loop}; expected at least as many steps, "
                "because the replicas are compared at reports"
            )

    def actions(self, values: Mapping[str, Any]) -> Sequence[Action]:
        """Returns the actions that compare."""
        found: list[Action] = []
        if values["check_replicas"] != 0:
            found.append(ReplicaAgreement(values["check_replicas"]))
        if values["check_copies"]:
            found.append(CopyCheck(values["check_copies"]))
        return found

"""AuditFlag: notes in `run.json` what an audit has to know, and ends the trainings that an audit has started."""

from collections.abc import Mapping, Sequence
from typing import Any

from looplib.binary.command_line import FlagPlugin
from looplib.processes import order
from looplib.run import machine
from looplib.task.actions import Action


class AuditFlag(FlagPlugin):
    """No flag: every training notes its kind of machine, and one of an audit ends at the step that is asked for."""

    flags = ()

    def check(self, values: Mapping[str, Any]) -> None:
        """Raises `UsageError` if the environment asks for an audit in another form."""
        order.requested()

    def actions(self, values: Mapping[str, Any]) -> Sequence[Action]:
        """Returns the action that notes and ends."""
        if values["dry_run"] or values["estimate"]:
            return ()
        step = order.requested()
        return (NotesMachine(),) if step is None else (EndsForAudit(step),)


class NotesMachine(Action):
    """Notes the kind of machine in `run.json`, once."""

    _noted = False

    def on_start(self, controller: Any) -> None:
        """Notes it."""
        if not self._noted:
            self._noted = True
            found = machine.this_machine()
            controller.report.note(
                machine.NOTE, cpu=found.cpu, cores=found.cores, devices=found.devices, variables=found.variables
            )


class EndsForAudit(NotesMachine):
    """Ends a training at a step, with its save.

    Args:
      step: the global step.
    """

    def __init__(self, step: int) -> None:
        self._step = step

    def stops(self) -> tuple[int, ...]:
        """See `Action`."""
        return (self._step,)

    def on_reaching(self, step: int, controller: Any) -> None:
        """Ends the training."""
        controller.stop()

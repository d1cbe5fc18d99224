"""Ordered: a training does what another process of looplib has ordered of it, and notes its kind of machine."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from looplib.base import orders
from looplib.binary.command_line import FlagPlugin
from looplib.cluster import environment
from looplib.errors import EXIT_PREEMPTED
from looplib.run.report import this_machine
from looplib.task.actions import Action, Event


class Ordered(FlagPlugin):
    """No flag: tells a launcher what it has to know if the number of workers may change, and ends where it is to."""

    flags = ()

    def check(self, values: Mapping[str, Any]) -> None:
        """Refuses an order that cannot be read; tells the size of the global batch, which a launcher divides.

        If the workers cannot share it, it ends the process. The launcher then starts another number of them.
        """
        if not orders.current().tells_batch:
            return
        cluster, size = environment.resolve(), values["global_batch_size"]
        if cluster is None or cluster.index is None or not size or size < 1:
            return
        if cluster.is_chief:
            orders.tell_batch(size)
        if size % len(cluster.workers):
            sys.exit(EXIT_PREEMPTED)

    def actions(self, values: Mapping[str, Any]) -> Sequence[Action]:
        """Returns the actions that note, tell and end."""
        if values["dry_run"]:
            return ()
        order = orders.current()
        tells: list[Action] = [TellsFirstReport()] if order.tells_batch else []
        return tells if values["estimate"] else [*tells, EndsWhereOrdered(order.until)]


class TellsFirstReport(Action):
    """Tells a launcher of the first report: only after that are workers ended so that there can be more."""

    _is_told = False

    def __call__(self, event: Event) -> None:
        """Tells it, once."""
        if not self._is_told and event.controller.is_chief:
            orders.tell_batch()
        self._is_told = True


class EndsWhereOrdered(Action):
    """Notes the kind of machine in `run.json`, once, and ends a training at a step, with its save.

    Args:
      step: the global step; 0 for the training's own end.
    """

    def __init__(self, step: int) -> None:
        self._step, self._noted = step, False

    def on_start(self, controller: Any) -> None:
        """Notes it."""
        if not self._noted:
            self._noted = True
            controller.report.note(this_machine())

    def stops(self) -> tuple[int, ...]:
        """See `Action`."""
        return (self._step,) if self._step else ()

    def on_reaching(self, step: int, controller: Any) -> None:
        """Ends the training."""
        controller.stop()

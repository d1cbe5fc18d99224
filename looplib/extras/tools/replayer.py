"""A run once more up to a step, in the process of its own program: the part of `replay` and `diff` that trains.

`python -m looplib replay DIR` starts the run's command with `LOOPLIB_REPLAY` in its environment, in a run directory of
its own that holds one checkpoint. The binary builds and restores everything as always, and passes its controller to
`answer`, which trains without reports, saves, evaluations and actions.
"""

import dataclasses
import json
import os
from typing import TYPE_CHECKING

from looplib.extras.tools.player import VARIABLE, Answer, Order, Player

if TYPE_CHECKING:
    from looplib.controller import Controller


def requested() -> bool:
    """Returns whether this process was started for a replay."""
    return VARIABLE in os.environ


def answer(controller: "Controller", evaluate_every: int | None) -> None:
    """Trains to the step that the environment names, and writes what was found to its file.

    Args:
      controller: restored, before its first step.
      evaluate_every: steps between the run's evaluations; None for a training without any.

    Raises:
      UsageError: for a trainer with a loop of its own, or a step that cannot be reached.
    """
    from looplib.extras.tools import step_view  # here, because every start of a binary imports this file

    order = Order(**json.loads(os.environ[VARIABLE]))
    player = Player(controller, evaluate_every)
    found = Answer([], traces=player.trace(order.step)) if order.trace else step_view.look(player, order)
    with open(order.to, "w") as file:
        json.dump(dataclasses.asdict(found), file)

"""A run once more up to a step, in the process of its own program: the part of `replay` and `diff` that trains.

`python -m looplib replay DIR` starts the run's command with `LOOPLIB_REPLAY` in its environment, in a run directory of
its own that holds one checkpoint. The binary builds and restores everything as always, and passes its controller to
`answer`, which trains without reports, saves, evaluations and actions.
"""

import contextlib
import dataclasses
import json
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from looplib.base import files
from looplib.guards.watchdog import Watchdog
from looplib.replay.player import VARIABLE, Answer, Order, Player

if TYPE_CHECKING:
    from looplib.controller import Controller

_NEWS_SECONDS = 0.5


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
    import numpy as np  # here, because every start of a binary imports this file

    from looplib.replay import normalization, step_view

    order = Order(**json.loads(os.environ[VARIABLE]))
    player = Player(controller, evaluate_every, order.batch_size)
    watchdog = Watchdog(controller.clock, player.progress, lambda: None, controller.guards.stall_limit)
    with _telling(player, order), controller.clock.phase("train"), watchdog.watching():
        if order.weights:
            values = normalization.recompute(player, order.weights, order.step - player.step)
            np.savez(f"{order.to}.npz", **values)
            found = Answer([])
        else:
            found = Answer([], traces=player.trace(order.step)) if order.trace else step_view.look(player, order)
    files.write_whole(order.to, json.dumps(dataclasses.asdict(found)), durable=False)


@contextlib.contextmanager
def _telling(player: Player, order: Order) -> Iterator[None]:
    """Writes what the player is doing to a file, again and again while a `with` block runs."""
    ended = threading.Event()

    def tell() -> None:
        furthest = 0  # as the last step is run several times, each from the state before it
        while not ended.wait(_NEWS_SECONDS):
            stream, furthest = player.loop.data.stream, max(furthest, player.step)
            skips = 0 < stream.passed < stream.skipped
            batches = f", reading its data again: {stream.passed:,} of {stream.skipped:,} batches" * skips
            files.write_whole(order.news, f"at step {furthest:,} of {order.step:,}{batches}")

    thread = threading.Thread(target=tell, name="looplib-replay-news", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()

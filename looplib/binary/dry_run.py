"""A dry run: two steps of everything that a binary does."""

from collections.abc import Sequence
from typing import Any

from looplib.controller import Controller
from looplib.errors import CheckError

_STEPS = 2


def settings(mode: str) -> dict[str, Any]:
    """Returns the flags of a dry run, by name, for a job of a mode."""
    return {
        "mode": "train" if mode == "train" else "train_and_eval",
        "checkpoint": "final",
        "steps_per_loop": 1,
        "checkpoint_interval": 1,
    }


def keep_inside(actions: Sequence[Any]) -> None:
    """Points actions that would write to a place of the user's to the temporary run directory."""
    from looplib.actions.plateau import ExportBest  # here, because every start of a binary imports this file

    for action in actions:
        if isinstance(action, ExportBest):
            action.directory = None


def try_out(controller: Controller) -> str:
    """Trains, evaluates, saves and restores; returns a sentence of what went well."""
    start = controller.global_step
    if controller.loops.keys() - {"train"}:
        results = controller.train_and_evaluate(start + _STEPS, eval_interval=start + _STEPS, eval_steps=_STEPS)
        evaluated = f"an evaluation of at most {_STEPS} steps ({', '.join(results)})"
    else:
        controller.train(start + _STEPS)
        evaluated = "no evaluation, as --mode=train has none"
    done = controller.global_step
    path = controller.save_checkpoint()
    if controller.restore_checkpoint(path) != path or controller.global_step != done:
        raise CheckError(f"the checkpoint of step {done} was restored as one of step {controller.global_step}")
    return f"dry run: all went well: {done - start} steps, {evaluated}, a save and a restore; nothing is kept"

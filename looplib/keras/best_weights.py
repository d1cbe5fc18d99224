"""The best weights of `EarlyStopping(restore_best_weights=True)`, taken from a checkpoint of the run."""

from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from looplib.keras import callback_kinds
from looplib.run import commits
from looplib.run.commits import Commit


class BestWeights:
    """The steps of the best weights, by the names of the callbacks that restore them.

    A checkpoint of such a step is kept as long as it is the best one, now or in the memory that was saved last. Without
    a `model_dir` there is none, and the callbacks themselves hold the weights.

    Attributes:
      restoring: whether a checkpoint is being restored for its weights.
    """

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}
        self._saved: dict[str, int] = {}
        self._held: dict[str, Any] = {}  # without a model_dir, the weights at the end of the last call of train
        self.restoring = False

    def state(self) -> dict[str, int]:
        """Returns the steps, to be saved."""
        return self._steps

    def saved(self, steps: Mapping[str, int]) -> None:
        """Takes what a checkpoint holds that is written or read now."""
        self._saved = dict(steps)

    def check(self, steps: Any) -> None:
        """Raises `ValueError` for what are no steps of a checkpoint."""
        if not isinstance(steps, dict) or any(type(step) is not int for step in steps.values()):
            raise ValueError(f"the steps of the best weights are {steps!r:.100}; expected a dict of whole numbers")

    def load(self, steps: Mapping[str, int], named: Sequence[tuple[str, Any]]) -> None:
        """Takes the steps of a checkpoint, and leaves the weights there until they are needed."""
        known = [name for name, callback in named if callback_kinds.restores_best(callback)]
        self._steps = {name: step for name, step in steps.items() if name in known}
        self.saved(self._steps)
        for name, callback in named:
            if name in known:
                callback.best_weights = self._held.get(name, []) if name in self._steps else None

    def forget(self) -> None:
        """Begins without any."""
        self._steps = {}

    def select(self, kept: Sequence[Commit]) -> list[Commit]:
        """See `KeepRule`."""
        steps = {*self._steps.values(), *self._saved.values()}
        return [done for done in kept if done.step in steps]

    def forget_lost(self, controller: Any, named: Sequence[tuple[str, Any]]) -> None:
        """Lets callbacks whose best checkpoint is gone begin again, with a warning."""
        if not self._steps or controller.model_dir is None:
            return
        found = {
            controller.global_step,
            *(done.step for done in commits.committed(commits.checkpoint_folder(controller.model_dir))),
        }
        for name, callback in named:
            if (step := self._steps.get(name)) not in (None, *found):
                logging.warning(
                    "the best weights of %s were those of step %d, whose checkpoint is gone; it begins with a fresh "
                    "memory, and will restore the best weights of the epochs to come", name, step,
                )  # fmt: skip
                self._steps = {other: at for other, at in self._steps.items() if other != name}
                callback.on_train_begin({})

    def end_epoch(self, name: str, callback: Any, epoch: int, logs: dict[str, float], step: int) -> bool:
        """Ends an epoch for a callback; returns whether its weights are the best since then."""
        if not callback_kinds.restores_best(callback):
            callback.on_epoch_end(epoch, logs)
            return False
        before = callback.best_weights
        callback.on_epoch_end(epoch, logs)
        if callback.best_weights is before:
            return False
        self._steps = {**self._steps, name: step}
        return True

    def restore(self, name: str, callback: Any, model: Any, controller: Any) -> None:
        """Gives the model the best weights that a callback is to restore, by the checkpoint that has them."""
        step = self._steps.get(name)
        if step is None:
            return
        if controller.model_dir is None:
            self._held[name] = callback.best_weights
            return
        if step != controller.global_step:
            self.restoring = True
            try:
                controller.restore_checkpoint(step)
            finally:
                self.restoring = False
        callback.best_weights = model.get_weights()

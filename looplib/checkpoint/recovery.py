"""Recovery: which state may be committed, and where a run continues after a guard has found something."""

from typing import Any

from absl import logging

from looplib.checkpoint.directory import RunDirectory
from looplib.checkpoint.store import Rollback, Store
from looplib.cluster.collectives import Workers
from looplib.errors import DivergenceError, join_names
from looplib.health.guards import Guards, Trouble
from looplib.health.non_finite import StateCheck
from looplib.task.state import variables_of


class Recovery:
    """Keeps values that are not finite out of checkpoints, and finds the checkpoint to go back to.

    Made once the state is that of the start of the run: variables that are not finite by then are intended.

    Args:
      store: `Store`.
      directory: `RunDirectory`.
      guards: `Guards`.
      workers: `Workers`.
      objects: dict from attribute name to trackable object, whose variables are checked.
    """

    def __init__(
        self, store: Store, directory: RunDirectory, guards: Guards, workers: Workers, objects: dict[str, Any]
    ) -> None:
        self._store = store
        self._directory = directory
        self._guards = guards
        self._workers = workers
        self._state_check = StateCheck(variables_of(objects))

    def check(self, step: int) -> None:
        """Raises `Trouble` if a variable is not finite; workers wait for each other."""
        if self._guards.non_finite == "off" or self._store.saved_step == step:
            return
        if names := self._not_finite():
            policy = "rollback" if self._guards.non_finite == "rollback" else "halt"
            raise Trouble(f"after step {step}, {_say(names)}", policy, good_before=step - 1, resume_after=step)

    def may_save(self, step: int) -> bool:
        """Returns whether the state may be committed. With the policy "off" it may not if a variable is not finite.

        Raises:
          Trouble: if a variable is not finite, with the other policies.
        """
        self.check(step)
        if self._guards.non_finite == "off" and self._store.saved_step != step and (names := self._not_finite()):
            logging.error("the checkpoint of step %d is left out: %s", step, _say(names))
            return False
        return True

    def trouble_in_step(self, step: int, names: list[str]) -> Trouble:
        """Returns the `Trouble` of losses and gradients that were not finite in a step; it names variables too."""
        others = self._not_finite()
        what = f"at step {step}, {_say(names)}" + (f", and now {_say(others)}" if others else "")
        return Trouble(what, self._guards.non_finite, good_before=step - 1, resume_after=step)

    def go_back(self, trouble: Trouble, hint: str) -> Rollback:
        """Finds the newest good checkpoint, and sets newer ones aside; workers wait for each other.

        Args:
          trouble: what a guard has found.
          hint: what shows its cause, as the end of the sentence of an error; "" for nothing.

        Returns:
          The `Rollback` to it, and to the data after the bad steps.

        Raises:
          DivergenceError: if the policy is to halt, or the run may not or cannot go back.
        """
        kept, done = self._directory.latest, self._store.record.rollbacks
        advice = f"the newest checkpoint, {kept}, is good" if kept else "no checkpoint was saved"
        advice += f"; {hint}" if hint else ""
        if trouble.policy == "halt":
            raise DivergenceError(
                f"{trouble.what}; {advice}; check the data and the learning rate, or use the policy skip or rollback "
                "to continue automatically (--non_finite)"
            ) from None
        if done >= self._guards.rollbacks:
            raise DivergenceError(f"{trouble.what}, and the run has used all {done} rollbacks; {advice}") from None
        target = None
        if self._directory.checkpoints:
            self._store.set_newer_aside(trouble.good_before)
            target = self._directory.newest_intact()
        if target is None:
            raise DivergenceError(f"{trouble.what}, and there is no checkpoint to roll back to; {advice}") from None
        logging.warning(
            "%s: rolling back to step %d and continuing with the data after step %d (rollback %d of %d)",
            trouble.what, target.step, trouble.resume_after, done + 1, self._guards.rollbacks
        )  # fmt: skip
        offset = trouble.resume_after + self._store.input_offset - target.step
        record = self._store.record
        batches = None if record.global_batch_size is None else record.saved_batches.back_to(target.step)
        return Rollback(target.path, done + 1, offset, batches)

    def _not_finite(self) -> list[str]:
        """Returns the names of the variables that are not finite here, or else on another worker."""
        names = self._state_check.find()
        return names or (["a variable on another worker"] if self._workers.any_of(bool(names)) else [])


def _say(names: list[str]) -> str:
    return f"{join_names(names)} {'is' if len(names) == 1 else 'are'} not finite"

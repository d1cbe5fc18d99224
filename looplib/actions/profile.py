"""Profile: an action that profiles some steps."""

import os
from typing import Any

import tensorflow as tf
from absl import logging

from looplib.base import folders
from looplib.base.messages import gist, whole_number
from looplib.errors import ActionError, MissingPartError
from looplib.task.actions import Action


class Profile(Action):
    """Records a profile of exactly some steps, host and devices.

    It writes `train/plugins/profile` in the run directory, for TensorBoard (`pip install tensorboard-plugin-profile`).
    A run that resumes after these steps has no profile. Of several workers, the chief's steps are recorded. A profile
    that cannot be taken is a warning and does not end the run.

    Args:
      start: the global step after which it starts; one past the first steps leaves out what these have to prepare.
      steps: the number of steps.

    Raises:
      UsageError: for bad input.

    Example:
        ```python
        looplib.Controller(..., model_dir="/tmp/run", actions=[looplib.Profile(start=200, steps=20)])
        ```
    """

    def __init__(self, start: int, steps: int) -> None:
        self._start = whole_number("start of a Profile", start, least=0)
        self._end = self._start + whole_number("steps of a Profile", steps)
        self._records = self._done = False

    def stops(self) -> tuple[int, ...]:
        """See `Action`."""
        return self._start, self._end

    def check_end(self, train_steps: int) -> None:
        """Refuses a profile that begins after the training, and warns of one that the end of the training cuts.

        Args:
          train_steps: the last step of the training; -1 for the end of its data.

        Raises:
          UsageError: if no step would be profiled.
        """
        if 0 <= train_steps <= self._start:
            raise ActionError(
                f"the profile starts after step {self._start}, and the training ends at step {train_steps}; give "
                f"--profile a START below {train_steps}, or train for more steps"
            )
        if 0 <= train_steps < self._end:
            logging.warning(
                "the training ends at step %d, so the profile has %d steps in place of %d",
                train_steps,
                train_steps - self._start,
                self._end - self._start,
            )

    def on_start(self, controller: Any) -> None:
        """Refuses a run without a directory."""
        if not controller.model_dir:
            raise MissingPartError("a profile needs a run directory to be written to; give Controller(model_dir=...)")
        if controller.global_step > self._start and not self._done:
            logging.info("steps %d to %d are past, and are not profiled again", self._start + 1, self._end)

    def on_leaving(self, step: int, controller: Any) -> None:
        """Starts the profile."""
        if step != self._start or self._done or not controller.is_chief:
            return
        folder = os.path.join(controller.model_dir, "train")
        try:
            if self._records:  # a rollback has led to before its start
                tf.profiler.experimental.stop(save=False)
            for name in ("plugins", os.path.join("plugins", "profile")):
                folders.check_folder(os.path.join(folder, name))
            tf.profiler.experimental.start(folder)
            self._records = True
        except Exception as error:
            self._records, self._done = False, True
            logging.warning("no profile is taken: %s", gist(error))

    def on_reaching(self, step: int, controller: Any) -> None:
        """Ends the profile."""
        if step == self._end:
            self._finish(step, controller.model_dir)

    def on_end(self, controller: Any) -> None:
        """Ends the profile, if the training has ended before the last of its steps."""
        self._finish(controller.global_step, controller.model_dir)

    def on_exception(self, error: BaseException, controller: Any) -> None:
        """See `on_end`."""
        self.on_end(controller)

    def _finish(self, step: int, model_dir: str) -> None:
        if not self._records:
            return
        self._records, self._done = False, True
        try:
            tf.profiler.experimental.stop()
            logging.info("profiled steps %d to %d: tensorboard --logdir=%s", self._start + 1, step, model_dir)
        except Exception as error:
            logging.warning("the profile cannot be written: %s", gist(error))

"""Profile: an action that records a profile of some steps, for TensorBoard, Perfetto and the run's report."""

import os
from typing import Any

import tensorflow as tf
from absl import logging

from looplib.actions import op_times
from looplib.base import folders
from looplib.base.messages import gist, whole_number
from looplib.errors import ActionError, MissingPartError
from looplib.task.actions import Action

_LOGGED = 10  # ops


class Profile(Action):
    """Records a profile of exactly some steps, host and devices.

    It writes `train/plugins/profile` in the run directory, for TensorBoard (`pip install tensorboard-plugin-profile`);
    `profile.trace.json.gz`, for https://ui.perfetto.dev; and `profile.json`, the ops that took the most time. A run
    that resumes after these steps has no profile. Of several workers, the chief's steps are recorded. A profile that
    cannot be taken is a warning and does not end the run.

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
        self._known: set[str] | None = None  # the files of earlier profiles, while this one is recorded
        self._done = False

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
            if self._known is not None:  # a rollback has led to before its start
                tf.profiler.experimental.stop(save=False)
            self._known = _recorded(folder)
            tf.profiler.experimental.start(folder)
        except Exception as error:
            self._known, self._done = None, True
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
        known, self._known = self._known, None
        if known is None:
            return
        self._done = True
        folder = os.path.join(model_dir, "train")
        try:
            tf.profiler.experimental.stop()
            paths = sorted(_recorded(folder) - known)
            steps = step - self._start
            profile = op_times.read_profile(paths)
            if profile is None:
                logging.info("profiled steps %d to %d: tensorboard --logdir=%s", self._start + 1, step, model_dir)
                return
            op_times.write(profile, self._start, steps, model_dir)
            logging.info(
                "profiled steps %d to %d: tensorboard --logdir=%s, or %s in https://ui.perfetto.dev\n"
                "the most time in all of these steps:\n%s",
                self._start + 1,
                step,
                model_dir,
                os.path.join(model_dir, op_times.TRACE),
                op_times.table(profile.ops[:_LOGGED]),
            )
        except Exception as error:
            logging.warning("the profile cannot be written: %s", gist(error))


def _recorded(folder: str) -> set[str]:
    """Returns the paths of the profiles in a folder."""
    for name in ("plugins", os.path.join("plugins", "profile")):
        folders.check_folder(os.path.join(folder, name))
    return set(tf.io.gfile.glob(os.path.join(folder, "plugins", "profile", "*", "*.xplane.pb")))

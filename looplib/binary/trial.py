"""The flags --dry_run and --estimate, which do something else than the job, in a directory that is removed."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from looplib.base import files
from looplib.binary.command_line import TRAINING_MODES, FlagPlugin, flag_plugins
from looplib.config.settings import Flag
from looplib.controller import Controller
from looplib.errors import CheckError, EndlessDataError, FlagError
from looplib.run import commits
from looplib.task.actions import Action

if TYPE_CHECKING:
    from looplib.binary.estimate import Forecast, Stopwatch

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
    from looplib.actions.export_every import ExportEvery  # here, because every start of a binary imports this file
    from looplib.actions.plateau import ExportBest

    for action in actions:
        if isinstance(action, ExportEvery):
            action.writes = False
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


class TrialFlags(FlagPlugin):
    """The flags --dry_run and --estimate.

    A trial needs its own run directory before the program's settings are read, so `launch` asks for it by `redirect`.
    """

    flags = (
        Flag("dry_run", bool, False, "Tries two steps, an evaluation, a save and a restore; keeps nothing."),
        Flag("estimate", bool, False, "Measures some steps, and says what the run will take; keeps nothing."),
    )

    def __init__(self) -> None:
        self._values: Mapping[str, Any] = {}
        self._watch: Stopwatch | None = None
        self._start = 0
        self._notes: list[str] = []

    def redirect(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Points the flags of this process to a temporary run directory, and to what a trial does.

        Args:
          values: the value of each flag, by name.

        Returns:
          dict from flag to its new value; empty if no trial is asked for.

        Raises:
          UsageError: for several processes, which would not share the directory.
        """
        if not values["dry_run"] and not values["estimate"]:
            return {}
        name = "--estimate" if values["estimate"] else "--dry_run"
        if values["dry_run"] and values["estimate"]:
            raise FlagError("--dry_run and --estimate both replace the job; give one of them")
        if (strategy := values["strategy"]) in ("multi_worker", "parameter_server"):
            raise CheckError(
                f"{name} tries the program in one process; leave out --strategy={strategy}, and give "
                "--num_virtual_devices=2 for two replicas"
            )
        if values["estimate"]:
            self._start = self._reached(values["model_dir"])
        folder = self._folder(values["model_dir"] if values["estimate"] else None)
        changed = {"model_dir": folder, **(settings(values["mode"]) if values["dry_run"] else {})}
        for name, value in changed.items():  # a program's own settings may read the flags, and do not override these
            flags.FLAGS[name].value = value
            flags.FLAGS[name].present = 1
        return changed

    def check(self, values: Mapping[str, Any]) -> None:
        """Raises `UsageError` for a job of which there is no estimate."""
        if not values["estimate"]:
            return
        if values["mode"] not in TRAINING_MODES:
            raise FlagError(f"--estimate is for trainings, and --mode={values['mode']} does not train; leave it out")
        if values["continue_from"]:
            raise FlagError("--estimate measures from step 0 on; leave out --continue_from, which changes no number")
        if values["train_steps"] > 0:
            self._refuse_finished(values["train_steps"])
        self._values = values

    def actions(self, values: Mapping[str, Any]) -> Sequence[Action]:
        """Returns the action that measures an estimate."""
        if not values["estimate"]:
            return ()
        from looplib.binary.estimate import Stopwatch  # here, because every start of a binary imports this

        self._watch = Stopwatch()
        return (self._watch,)

    def try_out(self, controller: Controller, actions: Sequence[Any]) -> str:
        """Makes the trial that `redirect` has prepared; returns what it found.

        Args:
          controller: in the temporary run directory.
          actions: those of the program.
        """
        keep_inside(actions)
        if self._watch is None:
            return try_out(controller)
        return str(self._estimate(controller, self._watch, actions))

    def _estimate(self, controller: Controller, watch: "Stopwatch", actions: Sequence[Any]) -> "Forecast":
        """Measures, and returns the forecast."""
        from looplib.actions.timed_saves import Timed, TimedSaves
        from looplib.binary import estimate

        values = self._values
        mode, steps, every = values["mode"], self._end(controller), values["eval_interval"]
        if isinstance(every, dict):
            every = min(every.values())
            self._notes.append(f"evaluators have intervals of their own, and each counts every {every} steps here")
        measured = estimate.measure(controller, watch, None if mode == "train" else values["eval_steps"])
        plan = estimate.RunPlan(
            self._start,
            steps,
            values["checkpoint_interval"],
            every if mode == "train_and_eval" else None,
            evaluates_at_end=mode != "train",
        )
        if values["loop"] == "auto" and "train" not in controller.engines:
            self._notes.append("--loop=auto has not chosen an engine within these steps, and may become faster")
        if controller.report.facts.flags.get("phases"):
            self._notes.append("the training has phases, and the first one was measured")
        asked = (*actions, *(action for plugin in flag_plugins() for action in plugin.actions(values)))
        timed = [each.timed for each in asked if isinstance(each, TimedSaves)]
        return estimate.Forecast(
            plan,
            measured,
            controller.steps_per_loop,
            controller.policy.keep,
            timed[0] if timed else Timed(),
            tuple(self._notes),
        )

    def _end(self, controller: Controller) -> int:
        """Returns the step to train to: --train_steps, or the end of the data before it."""
        asked, training = self._values["train_steps"], controller.loops["train"]
        length = None if training.endless else controller.steps_per_epoch
        if asked == -1 and length is None:
            raise EndlessDataError(
                "--estimate needs the number of steps, and --train_steps=-1 trains to the end of data whose length is "
                "not known; give a number"
            )
        if length is None or 0 < asked <= int(length):
            return asked
        self._refuse_finished(int(length))
        self._notes.append(f"the data ends after {int(length):,} steps")
        return int(length)

    def _refuse_finished(self, end: int) -> None:
        if end <= self._start:
            raise CheckError(
                f"the run is at step {self._start} already, and the training ends at step {end}, so that there is no "
                "step to estimate; give a higher --train_steps"
            )

    def _reached(self, model_dir: str | None) -> int:
        """Returns the step from which a run would continue."""
        if not model_dir:
            return 0
        if files.is_remote(model_dir):
            self._notes.append("a run directory in a store is taken to be new, and copying to it takes no time")
            return 0
        found = commits.committed(os.path.join(model_dir, "checkpoints"))
        return found[0].step if found else 0

    def _folder(self, model_dir: str | None) -> str:
        """Makes the temporary run directory, on the disk of the run directory where saves are measured."""
        place = None
        if model_dir and not files.is_remote(model_dir):
            beside = os.path.dirname(os.path.abspath(model_dir))
            if os.access(beside, os.W_OK) and os.stat(beside).st_dev != os.stat(tempfile.gettempdir()).st_dev:
                place = beside
        return tempfile.mkdtemp(prefix="looplib-trial-", dir=place)


TRIALS = TrialFlags()


def trial_flags() -> TrialFlags:
    """Returns the group of flags, of which there is one, as its flags and its trial belong together."""
    return TRIALS

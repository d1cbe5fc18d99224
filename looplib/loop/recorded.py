"""The parts of a training that are no variables, and whose state is in the run record of a checkpoint."""

from absl import logging

from looplib import plugins
from looplib.compat import keras as _keras
from looplib.loop.loops import Loops
from looplib.loop.window import Window
from looplib.task.actions import ActionStates
from looplib.task.learning_rates import LearningRates
from looplib.task.record import RunRecord
from looplib.task.trainer import Trainer


class RecordedParts:
    """The parts of a training whose state is in the run record.

    Args:
      trainer: the trainer, before a checkpoint is restored.
      loops: its loop, and those of the evaluators, with their settings.
      window: the steps since the last report.
      actions: the states of the actions.

    Attributes:
      optimizers: dict from the name of each of the trainer's optimizers to its class.
    """

    def __init__(self, trainer: Trainer, loops: Loops, window: Window, actions: ActionStates) -> None:
        self.optimizers = {name: type(value).__name__ for name, value in _keras.optimizers(trainer).items()}
        self._learning_rates = LearningRates(trainer)
        self._loops = loops
        self._window = window
        self._actions = actions

    def fill_in(self, record: RunRecord) -> None:
        """Sets the fields of the record that are not kept up to date while the run trains."""
        config = self._loops.config
        record.running = self._loops.training.reducer.state()
        record.optimizers = self.optimizers
        record.learning_rates = self._learning_rates.built
        record.actions = self._actions.save()
        record.engines = self._loops.engines
        record.seed, record.global_batch_size, record.loop = config.seed, config.global_batch_size, config.loop
        record.examples, record.files = self._loops.training.examples, self._loops.training.fingerprint

    def restore(self, record: RunRecord, step: int, position: bytes | None) -> None:
        """Restores all parts from the record of a checkpoint.

        Args:
          record: the record of the checkpoint.
          step: the global step of the checkpoint.
          position: the position in the data; None if the step determines it.
        """
        self._warn_of_other_data(record, step)
        self._learning_rates.after_restore(record.learning_rates, step)
        self._actions.load(record.actions)
        batches = self._loops.batches_after(record, step)
        if batches:
            record.batches_are(batches)
        self._loops.training.rewind(step + record.input_offset, position, batches)
        self._loops.training.reducer.load(record.running)
        self._window.start = step

    def _warn_of_other_data(self, record: RunRecord, step: int) -> None:
        examples, files = self._loops.training.examples, self._loops.training.fingerprint
        found = []
        if record.files and files:
            found = plugins.load("looplib.parts", "changes_of_files")(record.files, files)
        order = ""
        if None not in (examples, record.examples) and examples != record.examples:
            found.insert(0, f"it has {examples} examples, and had {record.examples}")
            order = ", in another order"
        if found:
            logging.warning(
                "the training data is not the one of step %d: %s; the steps that follow train on this data%s. If files "
                "are missing or were replaced, stop the run, restore them and start it again",
                step, "; ".join(found), order,
            )  # fmt: skip

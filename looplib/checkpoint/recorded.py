"""The parts of a checkpoint that are not variables: position in the data, metrics, actions, rates, averages."""

import contextlib
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from absl import logging

from looplib.base.messages import join_names
from looplib.compat import keras as _keras
from looplib.loop.loops import Loops
from looplib.loop.task_loop import Window
from looplib.task.actions import Actions
from looplib.task.learning_rates import LearningRates, updating
from looplib.task.record import RunRecord
from looplib.task.state import Constants, starting
from looplib.task.trainer import Trainer


class RecordedParts:
    """Saves the parts of a run that are in the run record, and restores them after the variables.

    Args:
      trainer: the trainer, before a checkpoint is restored; None for a run that only evaluates.
      objects: dict from attribute name to trackable object, once the steps are traced.
      loops: the loops of the trainer and the evaluators, with their settings.
      window: the steps since the last report; None without a trainer.
      actions: the states of the actions.

    Attributes:
      optimizers: dict from the name of each of the trainer's optimizers to its class.
    """

    def __init__(
        self,
        trainer: Trainer | None,
        objects: Mapping[str, Any],
        loops: Loops,
        window: Window | None,
        actions: Actions,
    ) -> None:
        self.trainer, self.loops, self.window = trainer, loops, window
        optimizers = _keras.optimizers(trainer) if trainer else {}
        self.optimizers = {name: type(value).__name__ for name, value in optimizers.items()}
        self._learning_rates = LearningRates(trainer) if trainer else None
        self._objects, self._actions = objects, actions
        self._constants = Constants(objects)

    def fill_in(self, record: RunRecord) -> None:
        """Sets the fields of the record that are not kept up to date while the run trains."""
        config, training = self.loops.config, self.loops.training
        record.running = training.reducer.state()
        record.optimizers = self.optimizers
        record.learning_rates = self._learning_rates.at(int(self.loops.global_step))
        record.actions = self._actions.save()
        record.engines = self.loops.engines
        record.seed, record.global_batch_size, record.loop = config.seed, config.global_batch_size, config.loop
        record.examples, record.files = training.examples, training.fingerprint
        record.order = self._order(record, int(self.loops.global_step))

    def restore(self, record: RunRecord, step: int, position: bytes | None) -> None:
        """Restores the parts of a training from the record of a checkpoint.

        Args:
          record: the record of the checkpoint.
          step: the global step of the checkpoint.
          position: the position in the data; None if the step determines it.
        """
        self._warn_of_other_data(record, step, position)
        self._learning_rates.after_restore(record.learning_rates, step)
        self._actions.load(record.actions)
        batches = self.loops.batches_after(record, step)
        if batches:
            record.batches_are(batches)
        self.loops.training.rewind(step + record.input_offset, position, batches)
        self.loops.training.reducer.load(record.running)
        self.window.start = step

    def warn_of_updates(self, step: int) -> None:
        """Warns of optimizers whose count of updates is neither 0 nor the step at which a run begins."""
        for path, optimizer in _keras.optimizers(self.trainer).items():
            updates = int(tf.identity(_keras.tf_variable(updating(optimizer).iterations)))
            if updates not in (0, step):
                logging.warning(
                    "the run begins at step %d, and the trainer's %s has made %d updates before: its learning rate and "
                    "its averages continue after these; build a new optimizer to begin with the first update",
                    step, path, updates,
                )  # fmt: skip

    def averages_start(self, restores: bool) -> contextlib.AbstractContextManager[None]:
        """Starts averages of weights from the values that the weights get in a `with` block, see `derived.starting`."""
        return starting(self.trainer, self._objects, restores)

    def renew_constants(self) -> None:
        """Traces the steps again where layers compute with other constants than before the restore."""
        if layers := join_names(self._constants.renew()):
            logging.info("the steps are traced again, with the restored constants of %s", layers)
            self.loops.retrace(layers)

    def _order(self, record: RunRecord, step: int) -> int | None:
        """Returns a checksum of the order of the examples up to a step, or of the first of them."""
        order = self.loops.training.order
        number = min(len(order), record.saved_batches.before(step + record.input_offset)) if order else 0
        return order[number - 1] if number else None

    def _warn_of_other_data(self, record: RunRecord, step: int, position: bytes | None) -> None:
        training = self.loops.training
        examples, files = training.examples, training.fingerprint
        found = []
        if record.files and files:
            from looplib.data.records.reader import changes  # here, as few starts need it

            found = changes(record.files, files)
        elif record.files:
            found = [f"it was {join_names(list(record.files))} of context.records, and is read otherwise now"]
        order = ""
        if examples is None and record.examples is not None and not found:
            found = [f"it had {record.examples} examples by number, and is read otherwise now"]
        elif record.examples is None and examples is not None and position:
            found.append(f"it was a pipeline with a position of its own, and has {examples} examples by number now")
        elif None not in (examples, record.examples) and examples != record.examples:
            found.insert(0, f"it has {examples} examples, and had {record.examples}")
            order = ", in another order"
        saved, now = ((of.seed, of.global_batch_size) for of in (record, self.loops.config))
        orders = {record.order, self._order(record, step)}
        if not found and saved == now and len(orders - {None}) > 1:
            logging.warning(
                "the examples come in another order than that of step %d (shuffle, block, name, whole_epochs and plans "
                "of context.indices, records and resident decide it), so that some come twice, and others do not come",
                step,
            )  # fmt: skip
        if found:
            logging.warning(
                "the training data is not the one of step %d: %s; the steps that follow train on this data%s. If files "
                "are missing or were replaced, stop the run, restore them and start it again",
                step, "; ".join(found), order,
            )  # fmt: skip

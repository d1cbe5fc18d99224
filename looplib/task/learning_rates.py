"""Learning rates: of the current step, and after a resume, because optimizers keep this setting as state.

A Keras optimizer holds a constant learning rate in a variable, so a checkpoint holds it too. All other settings of a
program take effect at the step at which a run is started with new ones, and here the learning rate does too: a number
that differs from that of the run's last start replaces the restored one. An unchanged number does not, because an
action may have changed the restored one.
"""

from typing import Any

import tensorflow as tf
from absl import logging

from looplib.compat import keras as _keras
from looplib.compat.tensorflow import not_converted
from looplib.task.trainer import Trainer


class LearningRates:
    """The constant learning rates that a trainer's optimizers were built with.

    Args:
      trainer: the `Trainer`, before a checkpoint is restored.

    Attributes:
      built: dict from the path of the optimizer's attribute to its learning rate; optimizers with a schedule are left
        out.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._phases = trainer.training_phases
        self._optimizers = {path: updating(one) for path, one in _keras.optimizers(trainer).items()}
        rates = {path: constant_rate(optimizer) for path, optimizer in self._optimizers.items()}
        self.built = {path: rate for path, rate in rates.items() if rate is not None}

    def at(self, step: int) -> dict[str, float]:
        """Returns the learning rates that this program has set by the end of a step: `built`, or those of phases."""
        return self._phases.rates(step, self.built, self._optimizers) if self._phases else self.built

    def after_restore(self, recorded: dict[str, float], step: int) -> None:
        """Sets the learning rates that this start was built with where they are new, and logs the result.

        `recorded` are the rates `at` this step of the start that saved its checkpoint.
        """
        for path, rate in self.at(step).items():
            optimizer = self._optimizers[path]
            restored = constant_rate(optimizer)
            name = type(optimizer).__name__
            if restored is None or restored == rate:
                continue
            if recorded.get(path, rate) != rate:
                optimizer.learning_rate = rate
                logging.warning(
                    "the learning rate of %s is %g from step %d, as set by this program; the checkpoint has %g",
                    name, rate, step, restored,
                )  # fmt: skip
            else:
                logging.warning(
                    "the learning rate of %s is %g, from the checkpoint of step %d, where the program had changed "
                    "it; it was built with %g",
                    name, restored, step, rate,
                )  # fmt: skip


@not_converted
def learning_rate(optimizer: Any) -> tf.Tensor:
    """Returns the learning rate of the update that follows, to report as `looplib.last` of it; in `step_fn`.

    Call it before the update, because an update counts on to the next step of a schedule.

    Args:
      optimizer: Keras optimizer of either family.

    Example:
        ```python
        rate = looplib.learning_rate(self.optimizer)
        self.optimizer.apply_gradients(zip(gradients, variables))
        return {"loss": losses, "learning_rate": looplib.last(rate)}
        ```
    """
    optimizer = updating(optimizer)
    if _keras.family(optimizer) == "keras":
        return tf.convert_to_tensor(optimizer.learning_rate)
    with tf.init_scope():  # legacy optimizers make their variables when they are first asked for them
        rate, iterations = optimizer.learning_rate, optimizer.iterations
    rate = _keras.rate_or_schedule(optimizer, rate)
    return tf.convert_to_tensor(rate(iterations) if callable(rate) else rate)


def updating(optimizer: object) -> object:
    """Returns the optimizer that updates the weights: inside of a loss-scaling optimizer, the inner one."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def constant_rate(optimizer: object) -> float | None:
    """Returns the learning rate of a Keras optimizer; None for a schedule, or where its configuration has none."""
    try:
        rate = optimizer.get_config().get("learning_rate")
    except (AttributeError, NotImplementedError, TypeError):  # an optimizer of one's own without a configuration
        return None
    return float(rate) if isinstance(rate, (int, float)) or type(rate).__module__ == "numpy" else None

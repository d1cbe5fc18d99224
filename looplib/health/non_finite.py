"""Guards against NaN and infinite values.

In a step, on the device, these watch the losses (metrics with "loss" in their names) and every gradient that goes
through a Keras optimizer. Between steps, before anything is committed, they check every floating-point variable of the
state.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from looplib import _keras
from looplib.health.guards import Trouble

GRADIENT_OF = "the gradient of "  # before the name of a variable, in the names of watched values
_step = threading.local()


def note_gradients(gradients: Sequence[Any], variables: Sequence[Any] | None) -> None:
    """Notes the gradients that an optimizer is given for `run_watched`, if that runs the step.

    Args:
      gradients: tensors, `tf.IndexedSlices` or None.
      variables: the variables of the gradients, of Keras or TensorFlow; None if they are not known.
    """
    noted = getattr(_step, "gradients", None)
    if noted is not None:
        for number, (gradient, variable) in enumerate(zip(gradients, variables or [None] * len(gradients))):
            name = f"variable {number}" if variable is None else _keras.variable_path(variable)
            noted.append((GRADIENT_OF + name, gradient))


def run_watched(step_fn: Callable[[Any], Any], inputs: Any) -> tuple[Any, list[tuple[str, tf.Tensor]]]:
    """Runs a step and measures the gradients that it computes; in replica context.

    Returns:
      `(outputs, norms)`: what `step_fn` returned, and a list of (name, float32 scalar: half the squared norm) of the
      gradients that are visible outside of the step. Gradients inside of a condition or a function are not.
    """
    _step.gradients = []
    try:
        outputs = step_fn(inputs)
        noted = _step.gradients
    finally:
        _step.gradients = None
    return outputs, _norms(noted)


@tf.autograph.experimental.do_not_convert
def _norms(noted: list[tuple[str, Any]]) -> list[tuple[str, tf.Tensor]]:
    norms = []
    for name, gradient in noted:
        gradient = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
        if gradient is None or not gradient.dtype.is_floating:
            continue
        if not tf.executing_eagerly() and gradient.graph is not tf.compat.v1.get_default_graph():
            continue
        norms.append((name, tf.nn.l2_loss(tf.cast(gradient, tf.float32) if gradient.dtype.size < 4 else gradient)))
    return norms


class StateCheck:
    """Finds variables whose values are not finite.

    Args:
      variables: list of (name, `tf.Variable`). Those that are not floating-point are left out, and so are those that
        are not finite when the check is made, which are intended.
    """

    def __init__(self, variables: Sequence[tuple[str, tf.Variable]]) -> None:
        variables = [(name, variable) for name, variable in variables if variable.dtype.is_floating]
        self._names = [name for name, _ in variables]
        self._variables = [variable for _, variable in variables]
        # Without a trace, for which the start of a training need not wait.
        self._intended = {name for name, finite in zip(self._names, self._finite_now()) if not finite}
        self._finite = tf.function(self._finite_now, autograph=False)

    def _finite_now(self) -> list[tf.Tensor]:
        return [tf.reduce_all(tf.math.is_finite(variable)) for variable in self._variables]

    def find(self) -> list[str]:
        """Returns the names of the variables that are not finite now."""
        finite = zip(self._names, self._finite())
        return [name for name, ok in finite if not ok and name not in self._intended]


def check_skipped(step: int, metrics: Mapping[str, float], steps: int) -> None:
    """Raises `Trouble` if every one of at least ten steps was skipped, because no later step will be better.

    Args:
      step: the global step of the report.
      metrics: dict of the training metrics, of which `skipped_steps` is read.
      steps: how many steps the report is over.
    """
    if steps >= 10 and metrics.get("skipped_steps", 0) >= steps:
        raise Trouble(
            f"all {steps} steps up to step {step} had non-finite values and were skipped", "halt", step - steps, step
        )

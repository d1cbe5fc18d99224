"""Exponential moving averages of weights."""

import contextlib
import dataclasses
import numbers
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from looplib import _keras
from looplib.errors import UsageError


@dataclasses.dataclass(frozen=True)
class _Averaged:
    """The variables that are averaged; TensorFlow does not save what it holds, which is not part of the averages."""

    variables: list[tf.Variable]


class WeightAverages(tf.Module):
    """Exponential moving averages of variables, which start at the variables' values.

    After each update, `average = decay * average + (1 - decay) * variable` (Polyak and Juditsky, 1992). The averages
    are variables themselves, one for each variable, and part of a checkpoint.

    An evaluator runs on the averages if it keeps this object as its attribute `averages`.

    Args:
      variables: floating-point variables, of Keras or TensorFlow.
      decay: float in (0, 1).

    Raises:
      UsageError: for another decay.

    Example:
        ```python
        averages = looplib.WeightAverages(model.trainable_variables, 0.999)
        averages.update()  # in step_fn, after the optimizer
        with averages.in_use():
            model.save("/tmp/averaged.keras")
        ```
    """

    def __init__(self, variables: Sequence[Any], decay: float) -> None:
        super().__init__(name="weight_averages")
        if not isinstance(decay, numbers.Real) or not 0 < decay < 1:
            raise UsageError(
                f"the decay of weight averages is {decay!r}; expected a number between 0 and 1, such as 0.999"
            )
        self._decay = decay
        self._averaged = _Averaged([_keras.tf_variable(variable) for variable in variables])
        self.values = [
            tf.Variable(variable.read_value(), trainable=False, name=f"average_{number}")
            for number, variable in enumerate(self._averaged.variables)
        ]

    @property
    def originals(self) -> list[tf.Variable]:
        """The variables that are averaged, in the order of `values`."""
        return self._averaged.variables

    @tf.autograph.experimental.do_not_convert
    def update(self) -> None:
        """Moves the averages towards the variables; in replica context."""
        for average, variable in zip(self.values, self._averaged.variables):
            value = variable.read_value()
            average.assign(average + tf.cast(1 - self._decay, value.dtype) * (value - average))

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Exchanges the averages and the variables while a `with` block runs; outside of a `tf.function`."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for average, variable in zip(self.values, self._averaged.variables):
            value = tf.identity(variable)
            variable.assign(tf.identity(average))
            average.assign(value)

"""Exponential moving averages of weights."""

import contextlib
import dataclasses
import numbers
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from looplib.compat import keras as _keras
from looplib.compat.row_updates import is_divided
from looplib.compat.tensorflow import not_converted
from looplib.errors import ClosedError, SettingError

_in_use: list["WeightAverages"] = []  # exchanged with their variables, in this order


@dataclasses.dataclass(frozen=True)
class _Averaged:
    """The averaged variables. TensorFlow does not track this object, because they are no part of the averages."""

    variables: list[tf.Variable]
    made: list[int]  # checksums of the values that the averages were made with


class WeightAverages(tf.Module):
    """Exponential moving averages of variables, which start at the variables' values.

    In a `Controller` these are the values after `Trainer.initialize`, a warm start or a restored checkpoint, unless
    that has values for the averages as well, or the program has assigned some before.

    After each update, `average = decay * average + (1 - decay) * variable` (Polyak and Juditsky, 1992). The averages
    are variables themselves, one for each variable, and part of a checkpoint.

    An evaluator runs on the averages if it keeps this object as its attribute `averages`.

    Args:
      variables: floating-point variables, of Keras or TensorFlow.
      decay: float in (0, 1).

    Raises:
      UsageError: for another decay, or for tables whose parts several workers hold.

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
            raise SettingError(
                f"the decay of weight averages is {decay!r}; expected a number between 0 and 1, such as 0.999"
            )
        if any(map(is_divided, variables)):
            raise SettingError(
                "weight averages (average_decay) would copy the parts of a ShardedEmbedding to all workers, and each "
                "worker holds its own alone; average the other weights, by looplib.WeightAverages"
            )
        self._decay = decay
        names = [f"average/{_keras.variable_path(variable)}" for variable in variables]
        averaged = list(map(_keras.tf_variable, variables))
        self.values = [tf.Variable(one.read_value(), trainable=False, name=name) for one, name in zip(averaged, names)]
        self._averaged = _Averaged(averaged, list(map(_checksum, self.values)))

    @property
    def unchanged(self) -> list[tuple[tf.Variable, tf.Variable]]:
        """(variable, its average) of each average that still has its initial value."""
        made = zip(self._averaged.variables, self.values, self._averaged.made)
        return [(variable, average) for variable, average, checksum in made if _checksum(average) == checksum]

    @property
    def pairs(self) -> list[tuple[tf.Variable, tf.Variable]]:
        """(variable, its average) of all averages."""
        return list(zip(self._averaged.variables, self.values))

    @not_converted
    def update(self, variables: Sequence[Any] | None = None, when: tf.Tensor | None = None) -> None:
        """Moves the averages towards all variables, or some of them; in replica context.

        Args:
          variables: those whose averages move; None for all.
          when: boolean scalar tensor, whether this step has updated them, which one that only accumulates gradients
            does not; None for yes.
        """
        some = None if variables is None else {id(_keras.tf_variable(variable)) for variable in variables}
        for variable, average in (pair for pair in self.pairs if some is None or id(pair[0]) in some):
            value = variable.read_value()
            moved = average + tf.cast(1 - self._decay, value.dtype) * (value - average)
            average.assign(moved if when is None else tf.where(when, moved, average))

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Exchanges the averages and the variables while a `with` block runs; outside of a `tf.function`.

        Within another such block of these averages, nothing is exchanged: they are in use already. Evaluations,
        predictions and exports in the block are of the averages. A checkpoint that is saved there has both in their
        places, and a training is refused.
        """
        if any(averages is self for averages in _in_use):
            yield
            return
        self._exchange()
        _in_use.append(self)
        try:
            yield
        finally:
            _in_use.remove(self)
            self._exchange()

    def _exchange(self) -> None:
        for variable, average in self.pairs:
            value = tf.identity(variable)
            variable.assign(tf.identity(average))
            average.assign(value)


@contextlib.contextmanager
def at_rest() -> Iterator[None]:
    """Puts averages that are in use and their variables back into their places while a `with` block runs."""
    exchanged = list(_in_use)
    _in_use.clear()
    for averages in reversed(exchanged):
        averages._exchange()
    try:
        yield
    finally:
        for averages in exchanged:
            averages._exchange()
        _in_use.extend(exchanged)


def refuse_in_use(what: str) -> None:
    """Raises `UsageError` if averages are in use, for a call `what` that updates the weights."""
    if _in_use:
        raise ClosedError(
            f"{what} was called while averages are in use, so that it would update these in place of the weights; call "
            "it after the block of averages.in_use()"
        )


def _checksum(variable: tf.Variable) -> int:
    return zlib.crc32(tf.identity(variable).numpy().tobytes())

"""What derives from weights: averages of them, which start once the weights have the values that a run starts with."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from looplib import _keras
from looplib.task.averages import WeightAverages
from looplib.task.state import held_by, variables_of
from looplib.task.trainer import Trainer


@contextlib.contextmanager
def starting(trainer: Trainer | None, objects: Mapping[str, Any], restores: bool) -> Iterator[None]:
    """Starts averages of weights from the values that the weights get in a `with` block.

    These are all `WeightAverages` and those of Keras optimizers with `use_ema`. An average that gets a value itself in
    the block keeps it; after an error all have the values from before, unless they got others.

    Args:
      trainer: the trainer; None for a run that only evaluates, whose averages stay as they are.
      objects: dict from attribute name to trackable object, the state of the run.
      restores: whether a checkpoint is restored in the block, so that the values before it do not count; otherwise an
        average that the program has assigned before keeps its value too.
    """
    pairs = _pairs(trainer, objects, restores) if trainer else []
    starts = [tf.identity(average) for _, average in pairs]
    for _, average in pairs:
        average.assign(tf.fill(average.shape, tf.constant(math.nan, average.dtype)))  # until a value is loaded
    try:
        yield
        starts = [tf.identity(variable) for variable, _ in pairs]
    finally:
        for (_, average), start in zip(pairs, starts):
            if tf.reduce_all(tf.math.is_nan(tf.identity(average))):
                average.assign(start)


def _pairs(trainer: Trainer, objects: Mapping[str, Any], restores: bool) -> list[tuple[tf.Variable, tf.Variable]]:
    found = [value for value in held_by(objects) if isinstance(value, WeightAverages)]
    pairs = [pair for averages in found for pair in (averages.pairs if restores else averages.unchanged)]
    variables = [variable for _, variable in variables_of(objects)]
    for optimizer in _keras.with_inner(_keras.optimizers(trainer).values()):
        pairs += _keras.averaged(optimizer, variables, with_updated=restores)
    return [(variable, average) for variable, average in pairs if average.dtype.is_floating]

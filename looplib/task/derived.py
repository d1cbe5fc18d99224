"""What derives from variables, and follows when these get other values than the program has given them.

Averages of weights start once the weights have the values that a run starts with. Layers compute with constants that
they have made of their variables.
"""

import contextlib
import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from looplib.compat import keras as _keras
from looplib.task.averages import WeightAverages, at_rest
from looplib.task.plain import as_array, as_bytes
from looplib.task.state import held_by, variables_of
from looplib.task.trainer import Trainer


@contextlib.contextmanager
def starting(trainer: Trainer | None, objects: Mapping[str, Any], restores: bool) -> Iterator[None]:
    """Starts averages of weights from the values that the weights get in a `with` block.

    These are `WeightAverages`, and averages in Keras optimizers with `use_ema`. An average that gets a value itself in
    the block keeps it; after an error all have the values from before, unless they got others.

    Args:
      trainer: None for a run that only evaluates, whose averages do not change.
      objects: the state of the run, by attribute name.
      restores: whether a checkpoint is restored in the block, so that the values before it do not count; otherwise an
        average that the program has assigned before keeps its value too.
    """
    with at_rest():
        yield from _starting(_pairs(trainer, objects, restores) if trainer else [])


def _starting(pairs: list[tuple[tf.Variable, tf.Variable]]) -> Iterator[None]:
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


class Constants:
    """The constants that layers derive from their variables or from data, such as the mean of a `Normalization`.

    A step or a data set computes with those of the time when it was traced. `objects` is the state of the run, by
    attribute name, whose steps have just been traced.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._layers = list(filter(_keras.finalizes, _keras.sublayers(list(objects.values()))))
        self._sources = list(map(_sources, self._layers))

    def renew(self) -> list[str]:
        """Makes the constants again where their sources have changed; returns the names of these layers."""
        changed = []
        for number, layer in enumerate(self._layers):
            if _sources(layer) != self._sources[number]:
                layer.finalize_state()
                self._sources[number] = _sources(layer)
                changed.append(layer.name)
        return changed


def _sources(layer: Any) -> list[Any]:
    """Returns what the constants of a layer are made of, for comparison: checksums of its variables, its tables."""
    checksums = [zlib.crc32(as_bytes(as_array(variable))) for _, variable in variables_of({"layer": layer})]
    tables = [value for value in held_by({"layer": layer}) if isinstance(value, tf.lookup.StaticHashTable)]
    return [*checksums, *tables, *_keras.given_constants(layer)]

"""The state of a run: the objects that a checkpoint holds, and constants that were adapted to the data."""

import contextlib
import io
import math
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import tensorflow as tf
from absl import logging

from looplib.base.messages import gist
from looplib.cluster.collectives import Workers
from looplib.compat import keras as _keras
from looplib.compat import tensorflow as _tf
from looplib.errors import CheckpointError, StateError
from looplib.task.averages import WeightAverages, at_rest
from looplib.task.plain import as_array, as_bytes
from looplib.task.trainer import Trainer

_UNREADABLE = (ValueError, TypeError, KeyError, OSError, EOFError, zipfile.BadZipFile, zlib.error, tf.errors.OpError)

# What `tf.train.Checkpoint` takes. It has no public name, and is asked by type, because an object that is refused comes
# with its whole text: of a list of variables, all values.
_TRACKABLE = (
    *(kind for kind in tf.Module.__mro__ if kind.__name__ == "Trackable"), tf.Module, tf.Variable,
    tf.types.experimental.PolymorphicFunction,
)  # fmt: skip


class InputState(tf.train.experimental.PythonState):
    """The position in the training data, kept in the checkpoint as bytes.

    Attributes:
      position: the bytes that `TaskLoop.position` returned; b"" where the step alone decides the position.
    """

    def __init__(self) -> None:
        super().__init__()
        self.position = b""

    def serialize(self) -> bytes:
        """Returns the bytes to save."""
        return self.position

    def deserialize(self, string_value: bytes) -> None:
        """Takes the bytes that were saved."""
        self.position = string_value


class ReplicaState(tf.train.experimental.PythonState):
    """The values that differ between replicas, such as moving statistics of batch normalization, kept as bytes.

    A checkpoint itself holds one value of each variable (the first replica's, or the mean). A run on another number of
    replicas, or an evaluation, continues with that value.

    Args:
      strategy: `tf.distribute.Strategy`.
      variables: the distributed variables whose replicas may differ, by a name that other starts give them too.
    """

    def __init__(self, strategy: tf.distribute.Strategy, variables: Mapping[str, tf.Variable]) -> None:
        super().__init__()
        self._workers = Workers(strategy)
        self._parts = {name: strategy.experimental_local_results(variable) for name, variable in variables.items()}
        self._saved = b""

    def serialize(self) -> bytes:
        """Returns the values of the variables that differ, as the bytes of an `.npz` file; b"" if none differs.

        Workers wait for each other.
        """
        arrays = {}
        local = [np.stack([as_array(part) for part in parts]) for parts in self._parts.values()]
        contents = [[as_bytes(values[at : at + 1]) for at in range(len(values))] for values in local]
        differs = [len(set(parts)) > 1 for parts in contents]
        if local and self._workers.count > 1:
            hashes = [zlib.crc32(parts[0]) for parts in contents]
            differs = self._workers.gather(np.int64(differs)).any(axis=0) | np.ptp(
                self._workers.gather(np.int64(hashes)), axis=0
            ).astype(bool)
        for name, values, differ in zip(self._parts, local, differs):
            if differ:
                arrays[name] = self._of_all_workers(values)
        if not arrays:
            return b""
        with io.BytesIO() as file:
            np.savez(file, **arrays)
            return file.getvalue()

    def _of_all_workers(self, values: np.ndarray) -> np.ndarray:
        if values.dtype.kind != "O":
            return self._workers.gather(values).reshape(-1, *values.shape[1:])
        rows = self._workers.gather_tensors([[tf.constant(values, tf.string)]])
        strings = tf.io.serialize_tensor(tf.concat([part for (part,) in rows], axis=0))
        return np.frombuffer(strings.numpy(), np.uint8)  # numpy's files have strings as Python's pickles only

    def deserialize(self, string_value: bytes) -> None:
        """Takes the bytes that were saved, for `apply`."""
        self._saved = string_value

    def apply(self) -> None:
        """Gives each replica its own values again, after everything else is restored; `UsageError` for bad bytes."""
        saved = self._saved_arrays()
        if others := sorted(saved.keys() - self._parts.keys()):
            logging.warning("each replica had a value of its own of %s, which is not here by that name", others)
        for name, values in saved.items():
            parts = self._parts.get(name, ())
            if len(parts) * self._workers.count == len(values) and parts[0].shape == values.shape[1:]:
                for part, value in zip(parts, values[self._workers.index * len(parts) :]):
                    part.assign(value)

    def _saved_arrays(self) -> dict[str, np.ndarray]:
        if not self._saved:
            return {}
        try:
            with np.load(io.BytesIO(self._saved)) as arrays:
                found = dict(arrays.items())
            for name, values in found.items():
                kind = self._parts[name][0].dtype.as_numpy_dtype if name in self._parts else values.dtype
                if values.dtype.kind == "V":  # numpy's files have no name for bfloat16
                    found[name] = values = values.view(kind)
                elif kind is object and values.dtype == np.uint8:
                    found[name] = values = tf.io.parse_tensor(values.tobytes(), tf.string).numpy()
                if values.ndim == 0 or values.dtype != kind:
                    raise ValueError(f"its array {name:.100} is of another type")
        except _UNREADABLE as error:
            raise CheckpointError(
                f"the values of each replica in the checkpoint cannot be read ({gist(error)}); name another "
                "checkpoint, or move this one away"
            ) from error
        return found


def differing_variables(
    strategy: tf.distribute.Strategy, task: Trainer, objects: Mapping[str, Any]
) -> list[tf.Variable]:
    """Lists the variables of a trainer's state whose replicas may differ: all except weights and optimizers' variables.

    There are none on one replica. Raises `StateError` for a variable that TensorFlow cannot read on several.
    """
    if strategy.num_replicas_in_sync == 1:
        return []
    alone = (tf.VariableSynchronization.ON_READ, tf.VariableAggregation.NONE)
    for name, (_, variable) in ((key, one) for key in objects for one in variables_of({key: objects[key]})):
        if (variable.synchronization, variable.aggregation) == alone:
            raise StateError(f"a variable in {name!r} has no aggregation, so it cannot be saved; use SUM, say")
    several = Workers(strategy).count > 1
    return [one for one in no_weights(task, objects) if several or len(strategy.experimental_local_results(one)) > 1]


def no_weights(task: Trainer, objects: Mapping[str, Any]) -> list[tf.Variable]:
    """Lists the variables of a trainer's state, by attribute name, that are neither weights nor an optimizer's."""
    known = {id(variable) for _, variable in variables_of({"all": list(_keras.optimizers(task).values())})}
    found = (variable for _, variable in variables_of(objects))
    return [variable for variable in found if not variable.trainable and id(variable) not in known]


def state_of(task: Any) -> dict[str, Any]:
    """Returns the attributes to save of a trainer or evaluator, of looplib or of Orbit, by name.

    Where TensorFlow cannot track an object of Keras 3, or all that it holds, its state, or the rest of it as
    `<name>_untracked`, is a list of variables and optimizers. Lists and dicts are searched.
    """
    state = {}
    for name, value in vars(task).items():
        if name == "global_step":
            continue  # the controller's own
        untracked = _keras.untracked_variables(value)
        if _trackable(value):
            state[name] = value
            if untracked:
                state[f"{name}_untracked"] = untracked
        elif untracked:
            state[name] = untracked
    return state


def state_of_model(model: Any) -> dict[str, Any]:
    """Returns what holds the variables of a model, of its optimizers and metrics."""
    return {"model": model, "untracked": _keras.untracked_variables(model)}


@contextlib.contextmanager
def state_kept(model: Any) -> Iterator[None]:
    """Gives the values back that a call of a model changes in a `with` block, such as states of recurrent layers."""
    trained = {id(_keras.tf_variable(variable)) for variable in getattr(model, "trainable_variables", ())}
    others = [variable for _, variable in variables_of(state_of_model(model)) if id(variable) not in trained]
    before = [tf.identity(variable) for variable in others]
    try:
        yield
    finally:
        for variable, value in zip(others, before):
            if not tf.reduce_all(tf.equal(variable, value)):
                variable.assign(value)


def _trackable(value: object) -> bool:
    if isinstance(value, (list, tuple, dict)):
        return any(_trackable(item) for item in (value.values() if isinstance(value, dict) else value))
    if value is None or isinstance(value, (bool, int, float, str, bytes, tf.Tensor, tf.data.Dataset)):
        return False
    return isinstance(value, _TRACKABLE)


def variables_of(objects: Mapping[str, Any]) -> list[tuple[str, tf.Variable]]:
    """Lists the variables that some objects hold, as (name, `tf.Variable`).

    Raises:
      UsageError: for an attribute that TensorFlow cannot save, such as a dict of variables whose keys are no strings.
    """
    try:
        found = list(_variables_below(objects))
    except ValueError as error:  # of TensorFlow's wrappers of dicts and lists
        raise StateError(
            f"a checkpoint cannot hold the attributes of {', '.join(objects)}: {gist(error)}; use dicts with str keys, "
            "and lists that are only appended to"
        ) from error
    names = {id(variable): name for name, variable in reversed(found)}  # a Keras variable and the tf.Variable in it
    variables = {id(variable): variable for _, variable in found}
    return [(names[key], variables[key]) for key in variables]


def unheld(
    strategy: tf.distribute.Strategy,
    variables: Iterable[tf.Variable],
    objects: Mapping[str, Any],
    own: Iterable[Any] = (),
) -> list[str]:
    """Returns the names of those variables that neither the objects nor `own` hold."""
    held = [*(variable for _, variable in variables_of(objects)), *own]
    parts_of = strategy.experimental_local_results  # also of a variable that is traced: a generator of tf_keras has one
    known = {_tf.identity_of(part) for variable in held for part in parts_of(variable)}
    return [one.name for one in variables if known.isdisjoint(map(_tf.identity_of, parts_of(one)))]


def tables_of(objects: Mapping[str, Any]) -> list[Any]:
    """Lists the lookup tables that some objects hold and a step can change."""
    kinds = (tf.lookup.experimental.MutableHashTable, tf.lookup.experimental.DenseHashTable)
    return [value for value in held_by(objects) if isinstance(value, kinds)]


def held_by(objects: Mapping[str, Any]) -> list[Any]:
    """Lists everything below some objects, by name, that a checkpoint of them holds."""
    root = tf.train.Checkpoint(**objects)  # a view holds its root by a weak reference only
    return tf.train.TrackableView(root).descendants()


@runtime_checkable
class SlotOptimizer(Protocol):
    """An optimizer of `tf_keras.optimizers.legacy` or of TensorFlow 1, whose slots are not its children."""

    def get_slot_names(self) -> list[str]:
        """Returns the names of its slots."""

    def get_slot(self, var: tf.Variable, slot_name: str) -> tf.Variable | None:
        """Returns one slot of a variable."""


def _variables_below(objects: Mapping[str, Any]) -> Iterator[tuple[str, tf.Variable]]:
    """Yields (name, `tf.Variable`) of all that objects hold, the one in a Keras 3 variable twice."""
    for value in held_by(objects):
        if _keras.is_variable(value):
            yield value.path, value.value
        elif isinstance(value, tf.Variable):
            yield value.name, value
        elif isinstance(value, SlotOptimizer):
            for variable in value.variables():
                yield variable.name, variable


@contextlib.contextmanager
def values_kept(variables: Sequence[tf.Variable]) -> Iterator[None]:
    """Gives variables, after a `with` block, the values from before it."""
    before = [variable.read_value() for variable in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, before):
            variable.assign(value)


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

"""Checks of a traced step: Python values that have changed since, and metrics that replicas cannot sum."""

import contextlib
import dataclasses
import dis
import functools
import inspect
import itertools
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from looplib.base.messages import join_names
from looplib.compat import keras as _keras
from looplib.compat import optimizers as _optimizers
from looplib.compat import tensorflow as _tf
from looplib.errors import MetricError, StaleTraceError, StepError
from looplib.loop.step import Step
from looplib.task.plain import gaps
from looplib.task.state import state_of, variables_of

_ENTRIES = ("step_fn", "loss_fn", "call", "train_step", "test_step", "compute_loss")
_IMMUTABLE = (bool, int, float, complex, str, bytes, type(None), np.generic)
_MOST_ITEMS = 1000
_NOWHERE = object()
_MOST_BATCHES = 8  # of the data, until each metric has changed
_DRAWS = 16  # of the random numbers of a step that draws some
_SURE = 5  # standard errors that stand out of their noise
_ROUNDING, _MOST_NOISE = 1e-3, 0.05  # the least difference, and the least that noise may hide
KEPT = (
    "a step of {} computes {} from the batch, so that each replica would keep a value of its own, and an export has "
    "the first one's; use one replica, or let the step take what all replicas have (looplib.all_gather)"
)
_CANCELLED = 1e-6  # the least difference in relation to the largest sum, where sums cancel each other


class TracedValues:
    """The values that the step of a task had in Python when it was traced.

    These are the attributes of the task and of its layers that the code of the step reads: numbers, strings, and lists,
    dicts and dataclasses of them, and functions such as an activation; also whether each layer is trainable, which
    models the task holds, and which optimizers it and its layers hold. An attribute that the step itself assigns is
    left out, because it may count the traces; so is a symbolic tensor, which each trace assigns anew, such as the
    quantized kernel that a wrapper gives its layer. `others` are further methods that the step calls.
    """

    def __init__(self, task: Any, *others: str) -> None:
        self._values = [
            (holder, name, who, value, repr(value))  # the text, as a list may change in place
            for holder, who in _holders(task)
            for name, value in _values_of(holder, others)
        ]

    def check(self, step_name: str) -> None:
        """Raises `UsageError` if a value has changed since `step_name`, such as `Classifier.step_fn`, was traced."""
        for holder, name, who, value, then in self._values:
            now = getattr(holder, name, None)
            plain = _is_plain(value)
            if now is value and (isinstance(value, _IMMUTABLE) or not plain):  # nothing changes inside of it
                continue
            if plain and repr(now) == then:
                continue
            cure = (
                "give GradientTrainer(phases=[...]), or start the run again with it and with --partial_restore "
                "(Start(partial=True)), which keeps what still fits: docs/phases.md shows how"
                if name == "trainable"
                else "keep a value that changes in a tf.Variable, and assign to that"
            )
            raise StaleTraceError(
                f"{who}.{name} is {now!r:.50} and was {then:.50} when {step_name} was traced, so that the change (by "
                f"an action, a callback or loop_end) would have no effect; {cure}"
            )


def _holders(task: Any) -> Iterator[tuple[Any, str]]:
    yield task, type(task).__name__
    for layer in _keras.sublayers(list(vars(task).values())):
        yield layer, layer.name


def _values_of(holder: Any, others: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yields the attributes of a task or layer that a traced step has read as constants."""
    names = _read_by(type(holder), others)
    if _keras.is_layer(holder):
        yield "trainable", holder.trainable
        names = [name for name in names if not name.startswith("_") and name != "trainable"]  # others are Keras's own
    for name in sorted(names):
        value = inspect.getattr_static(holder, name, _NOWHERE)
        constant = isinstance(value, (tf.Tensor, tf.lookup.StaticHashTable))  # such as what `adapt` has learned
        if tf.is_symbolic_tensor(value):
            continue
        if constant or _is_plain(value) or (callable(value) and name in vars(holder)):  # such as an activation
            yield name, value
    for name, value in vars(holder).items():
        if _keras.is_optimizer(value) or (_keras.is_layer(value) and not _keras.is_layer(holder)):
            yield name, value


def _is_plain(value: Any) -> bool:
    todo = [value]
    for item in todo:
        if isinstance(item, dict):
            todo.extend([*item.keys(), *item.values()])
        elif isinstance(item, (list, tuple, set)):
            todo.extend(item)
        elif dataclasses.is_dataclass(item) and not isinstance(item, type):
            todo.extend(getattr(item, field.name) for field in dataclasses.fields(item))
        elif not isinstance(item, _IMMUTABLE):
            return False
        if len(todo) > _MOST_ITEMS:
            return False
    return True


@functools.cache
def _read_by(kind: type, others: tuple[str, ...]) -> frozenset[str]:
    """Returns the names of attributes that the code of a class's step reads, and does not assign itself."""
    read, assigned, todo, seen = set(), set(), [*_ENTRIES, *others], set()
    while todo:
        name = todo.pop()
        method = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
        method = method.__wrapped__ if isinstance(getattr(method, "__wrapped__", None), types.FunctionType) else method
        method = method.fget if isinstance(method, property) else method
        module = getattr(method, "__module__", None) or ""  # None in a notebook's `exec`
        if name in seen or not isinstance(method, types.FunctionType) or module.startswith("looplib."):
            continue
        seen.add(name)
        codes = [method.__code__]
        for code in codes:
            codes.extend(const for const in code.co_consts if isinstance(const, types.CodeType))
            for instruction in dis.get_instructions(code):
                if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                    read.add(instruction.argval)
                    todo.append(instruction.argval)
                elif instruction.opname == "STORE_ATTR":
                    assigned.add(instruction.argval)
    return frozenset(name for name in read - assigned if not name.startswith("__"))


def check_metrics(step: Step, who: str, metrics: Mapping[str, Any]) -> None:
    """Checks metrics of classes that are not Keras's own, by trial steps that are undone.

    TensorFlow sums what replicas keep for a metric. That is the metric of the global batch only where every step adds
    to it, and adds a number that does not depend on the steps before: not for a maximum or a moving average.

    The step, of the user's method `who`, is one on several replicas, and returns these Keras metrics by name. Warns of
    metrics that the first batches leave unchanged, or that random numbers hide. Raises `UsageError` for a metric that
    is not such a sum.
    """
    updated, parts_of = _tf.updated_by(step.function), step.strategy.experimental_local_results
    kept = {f"the variable {_keras.variable_path(v)} of the metric {name!r}": v for name, v in _foreign(metrics)}
    kept = {name: v for name, v in kept.items() if any(_tf.identity_of(part) in updated for part in parts_of(v))}
    if not kept:
        return
    unknown = (
        "%s (%s) %s, so that it is not known whether it is a sum over examples, as on several replicas it has to be"
    )
    with _trial(step) as (before, batches):
        own = {id(part) for variable in kept.values() for part in parts_of(variable)}
        for batch in itertools.islice(batches, _MOST_BATCHES):
            at_first = _sums_of_first_replica(step, kept)
            pairs = []
            for _ in range(_DRAWS if step.random_ops else 1):
                _put_back(before)
                step.contribution(batch)
                first = _sums_of_first_replica(step, kept)
                _put_back((variable, value) for variable, value in before if id(variable) not in own)
                step.contribution(batch)
                pairs.append((first, _sums_of_first_replica(step, kept)))
            _put_back(before)
            for name in [name for name in kept if np.any(pairs[0][0][name] != at_first[name])]:
                first, second = (np.stack([pair[side][name] for pair in pairs]) for side in range(2))
                finite = np.isfinite(first).all(axis=0) & np.isfinite(second).all(axis=0)
                change = first[:, finite] - at_first[name][finite]
                sums = _equal_but_for_noise(change, second[:, finite] - first[:, finite])
                if np.any(at_first[name]) or sums is False or not is_summed(kept[name]):
                    raise MetricError(
                        f"{name} ({who}) is not a sum over examples that begins with zero and that replicas sum (a "
                        "maximum, a moving average, or what derives from sums, say), so that the metric would be wrong "
                        "on several replicas; keep sums in add_weight's default aggregation, compute the rest in "
                        "result(), or use one replica"
                    )
                if sums is None:
                    logging.warning(unknown, name, who, "depends on random numbers more than on the steps before")
                if not finite.all():
                    logging.warning(unknown, name, who, "is not finite after one batch")
                del kept[name]
            if not kept:
                return
    for name in kept:
        logging.warning(unknown, name, who, f"does not change in the first {_MOST_BATCHES} batches")


def _equal_but_for_noise(some: np.ndarray, others: np.ndarray) -> bool | None:
    """Returns whether two changes, float64 `[draws, n]`, are equal on average; None where the draws differ too much.

    Elements that random numbers leave alone are compared one by one, and the others together.
    """
    apart, sizes = others - some, np.abs(some.mean(axis=0))
    steady = np.ptp(apart, axis=0) == 0
    limit = np.maximum(_ROUNDING * sizes, _CANCELLED * sizes.max(initial=0))
    if np.any((np.abs(apart[0]) > limit)[steady]):
        return False
    if steady.all():
        return True
    apart, size = apart[:, ~steady], np.linalg.norm(sizes[~steady])
    noise = np.sqrt(np.sum(np.var(apart, axis=0, ddof=1)) / len(apart))
    if np.linalg.norm(apart.mean(axis=0)) > max(_SURE * noise, _ROUNDING * size):
        return False
    return None if _SURE * noise > _MOST_NOISE * size else True


def check_own_updates(step: Step, who: str, task: Any) -> None:
    """Checks that a step leaves equal values on all replicas in what it updates without an optimizer of Keras.

    It does one step, which is undone. Compared are, on the replicas of this process, the trainable variables that no
    optimizer of the task updates, and what layers of other packages keep, such as ranges of numbers. Of a task with an
    optimizer of tf_keras, which does not say what it updates, no trainable variables are compared. Warns of layers.

    Raises:
      UsageError: if weights differ, because each replica has followed its own gradient.
    """
    updated, parts_of = _tf.updated_by(step.function), step.strategy.experimental_local_results
    optimizers = _keras.with_inner(_keras.optimizers(task).values())
    state, of_tf_keras = state_of(task), any(_keras.family(optimizer) == "tf_keras" for optimizer in optimizers)
    for optimizer in optimizers:  # looplib sums what these get
        given = map(_keras.tf_variable, _optimizers.variables_of(optimizer))
        updated -= {_tf.identity_of(part) for variable in given for part in parts_of(variable)}

    def changes(variable: tf.Variable) -> bool:
        parts = parts_of(variable)
        return len(parts) > 1 and any(_tf.identity_of(part) in updated for part in parts)

    own = [(name, one) for name, one in variables_of(state) if one.trainable and not of_tf_keras]
    weights = [(name, parts_of(one)) for name, one in own if changes(one)]
    layers = {id(_keras.tf_variable(one)) for layer in _keras.sublayers(state) for one in layer.variables}
    kept = [one for one in shared_variables(state) if not one.trainable and id(one) in layers and changes(one)]
    if not weights and not kept:
        return
    with _trial(step) as (_, batches):
        if (batch := next(batches, None)) is None:
            return
        old = [parts[0].numpy() for _, parts in weights]
        step.contribution(batch)
        new = [[part.numpy() for part in parts] for _, parts in weights]
        if names := kept_apart(step.strategy, kept):
            logging.warning("%s", KEPT.format(type(task).__name__, join_names(names)))
        moved = [gaps(parts[0], value) for parts, value in zip(new, old)]
        most = [1e-3 * change.max(initial=0, where=np.isfinite(change)) for change in moved]
        apart = [
            name
            for (name, _), limit, (first, *others) in zip(weights, most, new)
            if any(np.any(gaps(part, first) > limit) for part in others)
        ]
    if apart:
        raise StepError(
            f"{join_names(apart)} of {type(task).__name__} would differ between the replicas, as {who} updates weights "
            "by the gradient of each replica's own examples; sum it before the update, by "
            "tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, gradients), or use an "
            "optimizer of Keras, which looplib gives the sum"
        )


def kept_apart(strategy: tf.distribute.Strategy, variables: Iterable[tf.Variable]) -> list[str]:
    """Returns the names of variables that differ between the replicas of this process."""
    kept = []
    for variable in variables:
        first, *others = [part.numpy().astype(np.float64) for part in strategy.experimental_local_results(variable)]
        if any(np.any(gaps(part, first) > 1e-5 * np.abs(first) + 1e-20) for part in others):
            kept.append(_keras.variable_path(variable))
    return kept


def shared_variables(objects: Mapping[str, Any]) -> list[tf.Variable]:
    """Returns the variables of objects without metrics, seeds, and what layers of Keras compute from a batch."""
    layers = [each for each in _keras.sublayers(objects) if _keras.is_own_class(each)]
    recurrent = [each for each in layers if _keras.is_a(each, "layers", "RNN")]
    others = [each for each in layers if not _keras.is_model(each)]
    others += filter(_keras.is_metric, _keras.parts(objects))
    own = [variable for other in others for variable in other.variables]
    own += [state for each in recurrent for state in tf.nest.flatten(each.states) if state is not None]
    known = {id(_keras.tf_variable(variable)) for variable in own}
    held = [variable for _, variable in variables_of(objects)]
    return [one for one in held if one.dtype.is_floating and (one.trainable or id(one) not in known)]


@contextlib.contextmanager
def _trial(step: Step) -> Iterator[tuple[list[tuple[tf.Variable, tf.Tensor]], Iterator[Any]]]:
    """Yields the values of the variables of a step, which are put back, and the first batches of the data."""
    before = [(variable, tf.identity(variable)) for variable in step.variables]
    iterator = step.stream.iterate()

    def batches() -> Iterator[Any]:
        while step.stream.has_value(optional := step.stream.next_as_optional(iterator)):
            yield step.stream.get_value(optional)

    try:
        yield before, batches()
    finally:
        _put_back(before)
        step.stream.end(iterator)


def _foreign(metrics: Mapping[str, Any]) -> Iterable[tuple[str, tf.Variable]]:
    """Yields the variables of metrics that are not of Keras's own classes; those all keep sums."""
    for metric in metrics.values():
        for one in _keras.inner_metrics(metric):
            if not _keras.is_own_class(one):
                yield from ((one.name, _keras.tf_variable(variable)) for variable in one.variables)


def is_summed(variable: tf.Variable) -> bool:
    """Returns whether each replica keeps its own value of a variable, and reading it sums them."""
    sums = (tf.VariableSynchronization.ON_READ, tf.VariableAggregation.SUM)
    return (variable.synchronization, variable.aggregation) == sums


def _sums_of_first_replica(step: Step, kept: Mapping[str, tf.Variable]) -> dict[str, np.ndarray]:
    """Returns what the first replica of this process keeps, float64 `[n]` of each variable."""
    parts = {name: step.strategy.experimental_local_results(variable)[0] for name, variable in kept.items()}
    return {name: part.numpy().astype(np.float64).ravel() for name, part in parts.items()}


def _put_back(values: Iterable[tuple[tf.Variable, tf.Tensor]]) -> None:
    for variable, value in values:
        variable.assign(value)

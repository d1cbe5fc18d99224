"""Predictions that are constant, found on batches of the evaluators' data."""

import functools
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from looplib.actions.finding import LearningFinding, key
from looplib.base.messages import gist
from looplib.cluster import runtime
from looplib.cluster.updates import Share
from looplib.compat import keras as _keras
from looplib.compat import tensorflow as _tf
from looplib.compat.tensorflow import leaves_no_trace
from looplib.data.streams import HostStream
from looplib.loop import additions
from looplib.loop.contracts import Loop
from looplib.loop.task_loop import TaskLoop
from looplib.task.trainer import Evaluator


def stream_of(loop: Loop) -> HostStream | None:
    """Returns the stream of a loop that reads its data by a plain iterator of this process; None for any other."""
    stream = loop.data.stream if isinstance(loop, TaskLoop) else None
    return stream if isinstance(stream, HostStream) else None


def batches(loop: Loop) -> Iterator[Any] | None:
    """Returns the batches of a replica, as `step_fn` gets them, from where the loop's data was built to begin.

    An iterator of its own reads them. None where that could change what the loop reads: where the pipeline has a
    state that its iterators share, such as the seeds of a shuffle or a Python function.
    """
    stream = stream_of(loop)
    if stream is None:
        return None
    context = stream.context()
    known = [call.batches for call in context.requests.calls if call.batches is not None] if context else []
    if not leaves_no_trace(stream.dataset, known):
        return None
    reads = context is not None and context.requests.reader is not None
    return _read(stream.dataset, stream.arrays, reads)


def first_rows(batch: Any, most: int) -> Any:
    """Returns the first examples of a batch; all, where not every part of it can be cut."""
    leaves = tf.nest.flatten(batch)
    if not all(isinstance(leaf, (tf.Tensor, tf.RaggedTensor)) for leaf in leaves):
        return batch
    return tf.nest.map_structure(lambda leaf: leaf[:most] if leaf.shape.rank else leaf, batch)


def _read(dataset: tf.data.Dataset, arrays: Any, calls_python: bool) -> Iterator[Any]:
    """Yields the batches of a data set, whose functions may call Python."""
    options = tf.data.Options()
    options.autotune.enabled = False  # the end of an iterator that tunes itself may take long, see `HostStream.end`
    dataset = dataset.with_options(options)
    iterator = iter(dataset)
    try:
        while (batch := iterator.get_next_as_optional()).has_value():  # the end of a loop over it would be logged
            yield _rows(batch.get_value(), arrays)
    finally:
        if calls_python:  # in an op, which lets other threads run Python; the end of a Python object would not
            handle, *_ = tf.nest.flatten(iterator, expand_composites=True)
            nothing = tf.data.experimental.to_variant(dataset.take(0))
            with tf.device("/cpu:0"):
                tf.raw_ops.MakeIterator(dataset=nothing, iterator=handle)


def _rows(batch: Any, arrays: Any) -> Any:
    """Returns a batch without what tells a replica its share, and with rows in place of their numbers."""
    batch = batch.inputs if isinstance(batch, Share) else batch
    return batch if arrays is None else tf.nest.map_structure(lambda array: tf.gather(array, batch), arrays)


CONSTANT = "constant predictions"
_EXAMPLES, _FEWEST = 32, 8  # of a batch: predicted for, and different ones that a verdict needs
_ALIKE = 8.0  # roundings by which outputs may differ, in units of the largest
_SATURATED = 1e-6  # probabilities this close to 0 and 1 are equal for examples that a model is sure of
_OF_COMPILING = 0.25  # share of the seconds that the run has compiled, which a prediction may take to trace
_LEAST_SECONDS = 0.1
_REFUSED = ("PyFunc", "Collective", "Nccl")  # Python, which may keep a state; a wait for other workers


class ConstantOutputs:
    """Predicts for one batch of an evaluator's data at its evaluations, and compares the examples.

    The batch is read once. What predicts is the evaluator's `predict_fn`, or else its Keras model in inference. It is
    traced once, and called only if the graph updates no variable, draws no random number and waits for no worker.
    """

    def __init__(self) -> None:
        self._predictors: dict[str, tuple[Loop, Callable[[], list[np.ndarray]] | None]] = {}
        self._since: dict[str, int] = {}  # the first of the evaluations in a row with constant outputs
        self._seconds: dict[str, float] = {}  # that a prediction took

    def seconds(self, name: str, loop: Loop, compiled: float) -> float:
        """Returns the seconds that the next check of an evaluator may take, in a run that has compiled for so many."""
        if name in self._predictors and self._predictors[name][0] is loop:
            return self._seconds.get(name, 0.0)
        return max(_LEAST_SECONDS, _OF_COMPILING * compiled)

    def check(self, name: str, loop: Loop, step: int, ending: bool, known: Collection[str]) -> list[LearningFinding]:
        """Looks at what a model predicts; twice in a row, or at the end of a training, constant outputs are a finding.

        Args:
          name: of the evaluator.
          loop: of the evaluator.
          step: the global step.
          ending: whether no evaluation follows.
          known: the keys of earlier findings.
        """
        if key(CONSTANT, name) in known:
            return []
        if name not in self._predictors or self._predictors[name][0] is not loop:
            self._predictors[name] = loop, _predictor(name, loop)
        _, predict = self._predictors[name]
        started = time.perf_counter()
        outputs = predict() if predict is not None else []
        self._seconds[name] = time.perf_counter() - started
        if not step or not outputs or not are_constant(outputs):
            self._since.pop(name, None)
            return []
        since = self._since.setdefault(name, step)
        return [_finding(name, since, len(outputs[0]))] if ending or since < step else []


def are_constant(outputs: list[np.ndarray]) -> bool:
    """Returns whether outputs `[examples, ...]` are equal for all examples, up to rounding.

    False for probabilities that are all 0 or 1, which a model that is sure of all examples gives.
    """
    for output in outputs:
        rows = output.reshape(len(output), -1).astype(np.float64)
        largest = np.abs(rows).max(initial=0.0)
        # Numbers of 16 bits are equal for examples that differ little.
        rounding = _ALIKE * np.finfo(output.dtype).eps * largest if output.dtype.itemsize >= 4 else 0.0
        if not np.isfinite(largest) or np.ptp(rows, axis=0).max(initial=0.0) > rounding:
            return False
    values = np.concatenate([output.ravel().astype(np.float64) for output in outputs])
    is_sure = abs(np.abs(values).max(initial=0.0) - 1) <= _SATURATED
    return not (is_sure and np.abs(values - np.round(values)).max() <= _SATURATED)


def _finding(name: str, since: int, examples: int) -> LearningFinding:
    return LearningFinding(
        CONSTANT,
        (name,),
        since,
        f"the predictions of {name!r} are equal for all {examples} examples of a batch that differ, since the "
        f"evaluation of step {since:,}",
        "look for layers that are dead (a ReLU whose inputs are all negative) or a collapse of the loss; lower the "
        "learning rate, check that inputs are scaled, and that they reach the model",
    )


def _predictor(name: str, loop: Loop) -> Callable[[], list[np.ndarray]] | None:
    """Returns a function that predicts for a batch of a loop's data; None where that could leave a trace."""
    try:
        predict, stream = _predict_fn(loop.task), stream_of(loop)
        if predict is None or stream is None or runtime.is_remote(stream.strategy):
            return None
        batch = next(batches(loop) or iter(()), None)
        if batch is None:
            return None
        batch = first_rows(batch, _EXAMPLES)
        hashes = additions.hash_of_each(batch)
        if hashes is None or len(np.unique(hashes.numpy())) < _FEWEST:
            return None
        strategy = stream.strategy

        @tf.function
        def outputs(inputs: Any) -> Any:
            return strategy.run(predict, args=(tf.nest.map_structure(lambda leaf: leaf, inputs),))

        traced = outputs.get_concrete_function(batch)
        types = {node.op for node in _tf.nodes_in(traced.graph.as_graph_def())}
        if _tf.updated_by(traced) or types & _tf.RANDOM_OPS or any(part in op for op in types for part in _REFUSED):
            return None
        given = [leaf.numpy() for leaf in tf.nest.flatten(batch) if isinstance(leaf, tf.Tensor)]
        return functools.partial(_outputs, lambda: outputs(batch), strategy, int(hashes.shape[0]), given)
    except Exception as error:  # what only a check calls may need more than it has here
        logging.info("what %s predicts is not looked at: %s", name, gist(error))
        return None


def _predict_fn(task: Any) -> Callable[[Any], Any] | None:
    """Returns what predicts for a batch: `predict_fn`, or the one Keras model of an evaluator; None without either."""
    if not isinstance(task, Evaluator):
        return None
    of_other_data = type(task).predict_dataset is not Evaluator.predict_dataset
    if type(task).predict_fn is not Evaluator.predict_fn and not of_other_data:
        return task.predict_fn
    models = list({id(value): value for value in vars(task).values() if _keras.is_model(value)}.values())
    if len(models) != 1:
        return None

    def predict(inputs: Any) -> Any:
        return models[0](inputs[0] if isinstance(inputs, (tuple, list)) else inputs, training=False)

    return predict


def _outputs(
    predict: Callable[[], Any], strategy: tf.distribute.Strategy, examples: int, given: list[np.ndarray]
) -> list[np.ndarray]:
    """Returns the floating-point outputs of the first replica that have a row for each example, and are not given."""
    found = []
    for leaf in tf.nest.flatten(predict()):
        value = strategy.experimental_local_results(leaf)[0]
        if isinstance(value, tf.Tensor) and value.dtype.is_floating and value.shape.rank:
            output = value.numpy()
            if len(output) == examples and not any(np.array_equal(output, one) for one in given):  # such as labels
                found.append(output)
    return found

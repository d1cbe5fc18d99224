"""Whether the metric functions of a compiled model can be computed for the parts of a batch."""

from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from looplib.compat import keras as _keras
from looplib.extras.compat.methods import alone
from looplib.extras.keras import models, rows
from looplib.messages import join_names

_WRAPPER = "MeanMetricWrapper"  # in which Keras keeps the functions that it gets as metrics
_TOLERANCE = 1e-3


def warn_of_functions(model: Any, batch: tuple) -> None:
    """Warns of metric functions whose mean over two halves of a batch is not their value for the batch.

    A function that returns a number for each example passes. One that returns a scalar, such as a maximum or an F1
    score, is computed by each replica for its own examples, so that the reported mean depends on the number of
    replicas.

    Args:
      model: a compiled model with one output, on several replicas; others are not looked into.
      batch: examples, as arguments x, y and sample_weight.
    """
    functions = [
        metric for outer in model.metrics for metric in _keras.inner_metrics(outer) if type(metric).__name__ == _WRAPPER
    ]
    size = min(int(part.shape[0]) for part in tf.nest.flatten(batch) if part is not None)
    targets = models.unpacked(model, batch)[1]
    if not functions or size < 2 or not isinstance(targets, (np.ndarray, tf.Tensor)):
        return
    ids = rows.by_content(batch, size // 2 * 2)
    halves = [rows.take(batch, part) for part in np.split(np.asarray(ids), 2)]
    try:
        first, second, both = (_values(model, functions, part) for part in (*halves, rows.take(batch, ids)))
    except Exception:  # of the user's functions, which shows what is wrong when they are traced
        logging.debug("the metrics of %s could not be tried", type(model).__name__, exc_info=True)
        return
    mean = (first + second) / 2
    near = np.abs(mean - both) <= _TOLERANCE * np.maximum(np.abs(both), 1e-3)  # NaN of a part is not
    apart = np.isfinite(both) & ~near
    if apart.any():
        found = [f"{metric.name} ({mean[i]:.4g} for {both[i]:.4g})" for i, metric in enumerate(functions) if apart[i]]
        logging.warning(
            "the mean over the parts of a batch is not the value for the batch of %s: reports on %d replicas differ "
            "from those on one device; have the function return a number for each example, or use a keras Metric "
            "that keeps sums", join_names(found), model.distribute_strategy.num_replicas_in_sync,
        )  # fmt: skip


def _values(model: Any, functions: list[Any], batch: tuple) -> np.ndarray:
    """Returns the value of each function for a batch, in float64; the metrics are reset."""

    def on_replica() -> list[tf.Tensor]:
        with alone():
            x, y, _ = models.unpacked(model, batch)
            predicted, found = model(x), []
            for metric in functions:
                metric.reset_state()
                metric.update_state(y, predicted)
                found.append(tf.cast(metric.result(), tf.float64))
                metric.reset_state()
            return found

    strategy = model.distribute_strategy
    found = strategy.run(tf.function(on_replica, autograph=False))
    return np.array([strategy.experimental_local_results(value)[0].numpy() for value in found])

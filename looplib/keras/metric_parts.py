"""Whether the metrics of a compiled model have on several replicas the values that they have on one device."""

from typing import Any

import numpy as np
from absl import logging

from looplib.base.messages import gist, join_names
from looplib.compat import keras as _keras
from looplib.keras import rows
from looplib.keras.step_trial import StepTrial, ordered

_DRAWS = 16  # of the random numbers of a step that draws some
_ORDERS = 8  # of the examples, for a step of a fixed batch size
_SURE, _NOISY = 4, 0.1  # standard errors, and the least difference, that stand out of such noise


def warn_of_others(model: Any, batch: Any) -> None:
    """Warns of metrics that replicas compute otherwise than one device, and says which were not looked at.

    A function that returns a number for each example passes, and so does a metric that keeps sums. A function that
    returns a scalar, such as a maximum or an F1 score, is computed by each replica for its own examples, so that the
    reported mean depends on the number of replicas.

    What is tried is the test step, or a `train_step` of the model's own: its metrics after a batch as a whole, and
    after its parts. For a fixed batch size it is its parts, in several orders.

    Args:
      model: a compiled model, whose variables exist, on several replicas.
      batch: examples, as arguments x, y and sample_weight.
    """
    metrics = [one for outer in model.metrics for one in _keras.inner_metrics(outer) if not _holds_others(one)]
    if not metrics:
        return
    named, replicas = f"metrics of {type(model).__name__}", model.distribute_strategy.num_replicas_in_sync
    try:
        if min(rows.sizes(batch)) < 2:
            raise ValueError("the first batch has one example")
        parts, whole = _tried(model, metrics, batch)
    except Exception as error:  # of the user's code
        logging.warning(
            "whether the %s have on %d replicas the values of one device could not be tried, and is not known (%s); "
            "`python -m looplib check replicas` compares whole trainings", named, replicas, gist(error),
        )  # fmt: skip
        return
    unknown = [metric.name for metric, one in zip(metrics, whole) if not np.isfinite(one).all()]
    if unknown:
        logging.warning(
            "whether %s of the %s have on %d replicas the values of one device is not known: they are not finite for "
            "the examples that were tried", join_names(unknown), named, replicas,
        )  # fmt: skip
    limit = 0.05 if _keras.computes_in(model, "float16", "bfloat16") else 1e-3
    apart = [_standing_out(one, other, limit) for one, other in zip(parts, whole)]
    found = [
        f"{metric.name} ({_shown(parts[i])} for {_shown(whole[i])})" for i, metric in enumerate(metrics) if apart[i]
    ]
    if found:
        logging.warning(
            "metrics of the parts of a batch are not the values for the batch of %s: reports on %d replicas differ "
            "from those on one device; have the function return a number for each example, or use a keras Metric "
            "that keeps sums", join_names(found), replicas,
        )  # fmt: skip


def _holds_others(metric: Any) -> bool:
    return len(_keras.inner_metrics(metric)) > 1


def _tried(model: Any, metrics: list[Any], batch: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns the results of each metric by parts and as a whole, float64 `[draws, n]`; one draw without noise."""
    step = model.train_step if _keras.has_own_step(model) else model.test_step
    fixed, batch = _keras.fixed_batch(model), ordered(model, batch)
    with StepTrial(model, step, metrics) as trial:
        trial.sized = trial.sized or fixed is not None
        if fixed is not None:
            return _exchanged(trial, batch)

        def pair() -> tuple[list[np.ndarray], list[np.ndarray]]:
            whole = trial.whole(batch)
            return trial.in_parts(batch).results, whole.results

        pairs = [pair(), pair()]
        draws = not _are_close(pairs[0][1], pairs[1][1])
        pairs = [*pairs, *(pair() for _ in range(_DRAWS - 2))] if draws else pairs[:1]
    parts, whole = ([np.stack(of_metric) for of_metric in zip(*side)] for side in zip(*pairs))
    return parts, whole


def _exchanged(trial: StepTrial, batch: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns the least and the greatest results of parts of a batch in several orders, which are equal for sums."""
    if not _are_close(trial.in_parts(batch).results, trial.in_parts(batch).results):
        raise ValueError("the step draws random numbers, and is made for batches of one size")
    chance, size = np.random.default_rng(0), rows.sizes(batch)[0]
    orders = [range(size), *(chance.permutation(size) for _ in range(_ORDERS))]
    found = [trial.in_parts(rows.take(batch, order)).results for order in orders]
    by_metric = [np.stack(results) for results in zip(*found)]
    return [each.min(axis=0)[None] for each in by_metric], [each.max(axis=0)[None] for each in by_metric]


def _are_close(some: list[np.ndarray], others: list[np.ndarray]) -> bool:
    return all(np.allclose(one, other, rtol=1e-6, equal_nan=True) for one, other in zip(some, others))


def _standing_out(parts: np.ndarray, whole: np.ndarray, limit: float) -> bool:
    """Returns whether results, float64 `[draws, n]`, differ by more than rounding, or than the noise of the draws."""
    if not (np.isfinite(parts).all() and np.isfinite(whole).all()):
        return bool(np.isfinite(whole).all())  # what is known of the whole alone is another value
    apart, size = parts - whole, np.maximum(np.abs(whole).mean(axis=0), 1e-3)
    if len(apart) == 1:
        return bool((np.abs(apart) > limit * size).any())
    noise = _SURE * apart.std(axis=0, ddof=1) / np.sqrt(len(apart))
    return bool((np.abs(apart.mean(axis=0)) > np.maximum(_NOISY * size, noise)).any())


def _shown(values: np.ndarray) -> str:
    mean = values.mean(axis=0)
    return f"{mean[0]:.4g}" if mean.size == 1 else str(mean.round(4).tolist())

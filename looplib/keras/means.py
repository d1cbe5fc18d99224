"""Whether a compiled model has on several replicas the loss and metrics of one device: both are tried on one batch.

What the configuration of Keras's losses says is done, see `losses`. Whether the rest of a step is a mean over examples
is in the user's code, so the step runs as in a training: on a batch whole, and on its parts by the replicas, equal and
unequal, from the first weights and from others. What cannot be tried is refused.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from looplib.base.messages import gist, join_names
from looplib.compat import keras as _keras
from looplib.errors import LossError, UsageError
from looplib.keras import rows
from looplib.keras.step_trial import Computed, StepTrial, leaves, ordered
from looplib.loop.step import raise_refusal
from looplib.loop.step_checks import KEPT

EXAMPLES = 32  # that are enough to try
_MOVES = 3  # of the weights, as conditions on values may hold in some states only
_DRAWS = 12  # of the random numbers of a model that draws some
_ORDERS = 8  # of the examples, for the metrics of a step of a fixed batch size
_SURE, _NOISY = 4, 0.1  # standard errors, and the least difference, that stand out of such noise
_ROUNDING, _MOST_ROUNDING = 30, 0.2  # times the difference that another order of the examples makes
_OR = (
    "use one replica, or say that each replica is to train on its own examples as if it were alone: "
    "KerasTrainer(..., per_replica=True)"
)


_Pair = tuple[Computed, Computed]  # of a batch as a whole, and of its parts


@dataclasses.dataclass
class _Found:
    pairs: Sequence[_Pair]  # of the first weights, as many as there are draws
    fault: str = ""
    kept: list[str] = dataclasses.field(default_factory=list)  # variables that differ between replicas
    draws: bool = False  # whether the step draws random numbers
    without_effect: list[str] = dataclasses.field(default_factory=list)  # losses that were always 0


def check(model: Any, batch: Any, begin: Callable[[], None] | None = None) -> None:
    """Checks that the replicas together compute for a batch what one device computes for it.

    What is compared are the gradients that optimizers get, summed over replicas as in a training. Nothing is updated.
    Left out are the statistics of a replica's own examples in batch normalization.

    Of metrics, it warns, and says which are not known. A function that returns a number for each example passes, and so
    does a metric that keeps sums. A function that returns a scalar, such as a maximum or an F1 score, is computed by
    each replica for its own examples, so that the reported mean depends on the number of replicas.

    Args:
      model: a compiled model, whose variables exist, on several replicas.
      batch: examples, as arguments x, y and sample_weight.
      begin: sets what the callbacks of the training set when it begins; called if the step cannot be tried without.

    Raises:
      UsageError: if they do not, or if it cannot be tried.
    """
    fixed, sample, batch = _keras.fixed_batch(model), batch, ordered(model, batch)
    own, every = _keras.has_own_step(model), (one for outer in model.metrics for one in _keras.inner_metrics(outer))
    metrics, compare = [one for one in every if len(_keras.inner_metrics(one)) < 2], _exchanged if fixed else _tried
    try:
        with StepTrial(model, metrics=metrics) as trial:
            found = compare(model, trial, batch)
        if found.draws and not found.fault and not own:  # what dropout hides
            with StepTrial(model, lambda batch: _evaluated(model, batch), metrics) as trial:
                second = compare(model, trial, batch)
                found.fault, found.pairs = second.fault, second.pairs
    except UsageError:
        raise
    except Exception as error:
        raise_refusal(error)
        if begin is not None:
            begin()
            return check(model, sample)
        raise LossError(
            f"whether {type(model).__name__} trains alike on any number of replicas could not be tried "
            f"({gist(error)}); let its step take any number of examples{_graphs(batch)}, set what a callback would set "
            f"when a training begins, {_OR}"
        ) from error
    if fixed and own:
        raise LossError(
            f"{type(model).__name__} is made for batches of {fixed}, so that its train_step cannot be tried with the "
            f"batch of all replicas; leave out the size of the batch, {_OR}"
        )
    if found.kept:
        raise LossError(
            f"{KEPT.format(type(model).__name__, join_names(found.kept))}, or say that each replica is to train as if "
            "it were alone: KerasTrainer(..., per_replica=True)"
        )
    if found.fault:
        raise LossError(f"the loss of {type(model).__name__} is no mean over examples: {found.fault}; {_OR}")
    if found.without_effect:
        logging.warning(
            "%s of %s was 0 when looplib tried whether replicas compute it as one device does, so that nothing is "
            "known of it; `python -m looplib check replicas` compares whole trainings",
            join_names(found.without_effect), type(model).__name__,
        )  # fmt: skip
    _warn_of_metrics(model, metrics, sample, found.pairs)


def _graphs(batch: Any) -> str:
    """Returns what to do where parts of a batch have different numbers of rows, which may belong together."""
    sizes = rows.sizes(batch)
    if len(set(sizes)) < 2:
        return ""
    return (
        f", where rows of its parts of {join_names(list(map(str, sizes)))} belong together, such as nodes and edges "
        "of a graph, write a looplib.GradientTrainer that makes the batches of each replica"
    )


def _tried(model: Any, trial: StepTrial, batch: Any) -> _Found:
    """Compares the parts of a batch with the whole."""
    size = leaves(batch)[0].shape[0]
    alike = len(set(rows.sizes(batch))) == 1
    first, again = trial.whole(batch), trial.whole(batch)
    rounding = _apart(first, trial.whole(rows.take(batch, range(size)[::-1]))) if alike else 0  # deep models have more
    tolerance = max(0.05 if _keras.computes_in(model, "float16", "bfloat16") else 1e-3, _ROUNDING * rounding)
    found = _Found((), draws=_apart(first, again) > 1e-6 or tolerance > _MOST_ROUNDING)
    if not np.isfinite(_apart(first, again)):
        found.fault = "its gradients are not finite with the first weights, so that it cannot be tried"
        return found
    replicas = model.distribute_strategy.num_replicas_in_sync
    shares = _unequal(size, replicas) if alike and not trial.sized else None

    def differs(batch: Any, shares: list[int] | None) -> float:
        nonlocal first
        draws = range(_DRAWS if found.draws else 1)
        pairs = [(trial.whole(batch), trial.in_parts(batch, shares)) for _ in draws]
        found.pairs, (first, parts) = found.pairs or pairs, pairs[0]
        return _stands_out(*zip(*pairs)) if found.draws else _over(_apart(parts, first), tolerance)

    weighted = None if found.draws else _weighted(model, batch)
    even = not shares or not found.draws  # many draws are not made twice
    far = (even and differs(batch, None)) or (shares and differs(batch, shares))
    far = far or (weighted is not None and differs(weighted, None))
    found.kept, nothing = trial.apart, first.losses == 0
    if not far:
        for number in range(1 if found.draws else _MOVES):
            trial.move(number)
            far, nothing = differs(batch, None), nothing & (first.losses == 0)
            if far:
                break
        if not far and trial.move_later():
            far, nothing = differs(batch, None), nothing & (first.losses == 0)
        found.without_effect = [name for name, zero in zip(trial.names, nothing) if zero]
    if far and not alike:
        found.fault = (
            f"on {replicas} replicas the gradients differ by {far:.2%} from those of one device where its parts, of "
            f"{join_names(list(map(str, rows.sizes(batch))))} rows, are divided each by its rows, as for examples that "
            "are labelled and unlabelled; where rows belong together, such as the nodes and edges of a graph, write a "
            "looplib.GradientTrainer that makes the batches of each replica"
        )
    elif far:
        found.fault = (
            f"on {replicas} replicas the gradients differ by {far:.2%} from those of one device (it sums over the "
            "examples, divides by a fixed number or by something else than examples, such as tokens, or compares "
            "examples with each other); divide by the examples that a step gets, return a value for each element for a "
            "loss of Keras to mask, weigh and divide, or write a looplib.GradientTrainer that returns "
            "looplib.mean(losses, weights), or compares by looplib.all_gather"
        )
    return found


def _exchanged(model: Any, trial: StepTrial, batch: Any) -> _Found:
    """Compares the parts of a batch with those of it in other orders, for a step of a fixed batch size."""
    trial.sized, chance, size = True, np.random.default_rng(0), leaves(batch)[0].shape[0]
    first, again = trial.in_parts(batch), trial.in_parts(batch)
    orders = [np.argsort(np.arange(size) % 2, kind="stable"), *(chance.permutation(size) for _ in range(_ORDERS))]
    others = [trial.in_parts(rows.take(batch, order)) for order in orders[: None if first.results else 1]]
    far, draws = _over(_apart(first, others[0]), 1e-3), _apart(first, again) > 1e-3
    fault = f"the gradients differ by {far:.2%} where replicas get other parts of a batch" if far and not draws else ""
    every = [np.stack(one) * (np.nan if draws else 1) for one in zip(*(each.results for each in (first, *others)))]
    most, least = (dataclasses.replace(first, results=[how(one, axis=0) for one in every]) for how in (np.max, np.min))
    return _Found([(most, least)], fault, trial.apart, draws)


def _evaluated(model: Any, batch: Any) -> None:
    """Computes the loss as Keras's `train_step` does, but without what a layer draws in a training."""
    x, y, sample_weight = _keras.unpacked(model, batch)
    with tf.GradientTape() as tape:
        predicted = model(x, training=False)
        loss = model.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=sample_weight)
    model.compute_metrics(x, y, predicted, sample_weight)
    variables = model.trainable_variables
    model.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))


def _weighted(model: Any, batch: Any) -> Any:
    """Returns a batch with other weights of the examples; None without any."""
    weights = _keras.unpacked(model, batch)[2]
    if weights is None:
        return None
    known, chance = {id(leaf) for leaf in tf.nest.flatten(weights)}, np.random.default_rng(0)

    def other(leaf: Any) -> Any:
        dense = isinstance(leaf, (tf.Tensor, np.ndarray)) and tf.as_dtype(leaf.dtype).is_floating
        if id(leaf) not in known or not dense:
            return leaf
        return leaf * tf.cast(chance.uniform(0.2, 3, [leaf.shape[0], *[1] * (len(leaf.shape) - 1)]), leaf.dtype)

    return tf.nest.map_structure(other, batch)


def _unequal(size: int, replicas: int) -> list[int]:
    """Returns shares of a batch, of which every second one is larger than the next."""
    each, rest = divmod(size, replicas)
    move = max(1, each // 3)
    shares = [each - move if number % 2 else each + move for number in range(replicas)]
    if replicas % 2:
        shares[-1] = each
    shares[-1] += rest
    return shares


def _apart(one: Computed, other: Computed) -> float:
    """Returns how much a result differs from another, relative to that; NaN if most of the other is not finite."""
    finite = np.isfinite(other.compared)
    if finite.sum() < finite.size / 2:
        return np.nan
    first, second = one.compared[finite], other.compared[finite]
    if not np.isfinite(first).all():
        return np.inf
    return float(np.linalg.norm(first - second) / max(np.linalg.norm(second), 1e-30))


def _over(value: float, limit: float) -> float:
    return value if value > limit else 0.0


def _stands_out(wholes: tuple[Computed, ...], parts: tuple[Computed, ...]) -> float:
    """Returns how much the means of results that random numbers change differ; 0 if that may be noise."""
    whole, part = (np.stack([each.gradients for each in some]) for some in (wholes, parts))
    if np.isfinite(whole).all() and not np.isfinite(part).all():
        return np.inf
    apart, count = whole - part, len(wholes)
    others = (whole.sum(axis=0) - whole) / (count - 1)  # for each draw, the mean of the others
    square = np.mean(np.sum(whole * others, axis=1))  # of the mean gradient, without the noise
    if square > 0.05 * np.mean(np.sum(whole * whole, axis=1)):  # else noise alone
        along = np.sum(apart * others, axis=1) / square
        if abs(along.mean()) > max(_NOISY, _SURE * along.std(ddof=1) / np.sqrt(count)):
            return float(abs(along.mean()))
        noise = np.sum(np.var(apart, axis=0, ddof=1)) / count
        far = np.sum(np.square(apart.mean(axis=0)))
        if far > max(_SURE**2 * noise, _NOISY**2 * square):
            return float(np.sqrt(far / square))
    losses = [np.stack([each.losses for each in some]) for some in (parts, wholes)]
    return float(_differing(*losses, least=1e-30).max(initial=0.0))


def _differing(parts: np.ndarray, whole: np.ndarray, least: float) -> np.ndarray:
    """Returns by how much of their size, or of `least`, the means of draws `[draws, n]` differ; 0 for noise."""
    apart, size = parts - whole, np.maximum(np.abs(whole).mean(axis=0), least)
    far, noise = np.abs(apart.mean(axis=0)), _SURE * apart.std(axis=0, ddof=1) / np.sqrt(len(apart))
    return np.where(far > np.maximum(_NOISY * size, noise), far / size, 0.0)


def _warn_of_metrics(model: Any, metrics: list[Any], batch: Any, pairs: Sequence[_Pair]) -> None:
    """Warns of metrics whose results differ between replicas and one device, and of those that are not known."""
    named, replicas = f"metrics of {type(model).__name__}", model.distribute_strategy.num_replicas_in_sync
    if metrics and min(rows.sizes(batch)) < 2:
        logging.warning(
            "whether the %s have on %d replicas the values of one device is not known, as the first batch has one "
            "example; `python -m looplib check replicas` compares whole trainings", named, replicas,
        )  # fmt: skip
        return
    whole, parts = ([np.stack(one) for one in zip(*(each.results for each in side))] for side in zip(*pairs))
    unknown = [metric.name for metric, one in zip(metrics, whole) if not np.isfinite(one).all()]
    if unknown:
        logging.warning(
            "whether %s of the %s have on %d replicas the values of one device is not known: they are not finite for "
            "the examples that were tried, or no two times the same", join_names(unknown), named, replicas,
        )  # fmt: skip
    limit = 0.05 if _keras.computes_in(model, "float16", "bfloat16") else 1e-3
    apart = [_is_other(one, other, limit) for one, other in zip(parts, whole)]
    found = [
        f"{metric.name} ({_shown(parts[i])} for {_shown(whole[i])})" for i, metric in enumerate(metrics) if apart[i]
    ]
    if found:
        logging.warning(
            "metrics of the parts of a batch are not the values for the batch of %s: reports on %d replicas differ "
            "from those on one device; have the function return a number for each example, or use a keras Metric "
            "that keeps sums", join_names(found), replicas,
        )  # fmt: skip


def _is_other(parts: np.ndarray, whole: np.ndarray, limit: float) -> bool:
    """Returns whether results, float64 `[draws, n]`, differ by more than rounding, or than the noise of the draws."""
    if not (np.isfinite(parts).all() and np.isfinite(whole).all()):
        return bool(np.isfinite(whole).all())  # what is known of the whole alone is another value
    if len(parts) == 1:
        return bool((np.abs(parts - whole) > limit * np.maximum(np.abs(whole), 1e-3)).any())
    return bool(_differing(parts, whole, least=1e-3).any())


def _shown(values: np.ndarray) -> str:
    mean = values.mean(axis=0)
    return f"{mean[0]:.4g}" if mean.size == 1 else str(mean.round(4).tolist())

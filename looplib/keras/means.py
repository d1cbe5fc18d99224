"""Whether a compiled model trains on several replicas as on one device: its step is tried both ways on one batch.

What the configuration of Keras's losses says is done, see `losses`. Whether the rest of a step is a mean over examples
is in the user's code, so the step runs as in a training: on a batch whole, and on its parts by the replicas, equal and
unequal, from the first weights and from others. What cannot be tried is refused.
"""

import dataclasses
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

EXAMPLES = 32  # that are enough to try
_MOVES = 3  # of the weights, as conditions on values may hold in some states only
_DRAWS = 12  # of the random numbers of a model that draws some
_SURE, _NOISY = 4, 0.1  # standard errors, and the least difference, that stand out of such noise
_ROUNDING, _MOST_ROUNDING = 30, 0.2  # times the difference that another order of the examples makes
_OR = (
    "use one replica, or say that each replica is to train on its own examples as if it were alone: "
    "KerasTrainer(..., per_replica=True)"
)


@dataclasses.dataclass
class _Found:
    fault: str = ""
    kept: list[str] = dataclasses.field(default_factory=list)  # variables that differ between replicas
    draws: bool = False  # whether the step draws random numbers
    without_effect: list[str] = dataclasses.field(default_factory=list)  # losses that were always 0


def check(model: Any, batch: Any) -> None:
    """Checks that the replicas together compute for a batch what one device computes for it.

    What is compared are the gradients that optimizers get, summed over replicas as in a training. Nothing is updated.
    Left out are the statistics of a replica's own examples in batch normalization.

    Args:
      model: a compiled model, whose variables exist, on several replicas.
      batch: examples, as arguments x, y and sample_weight.

    Raises:
      UsageError: if they do not, or if it cannot be tried.
    """
    fixed, batch = _keras.fixed_batch(model), ordered(model, batch)
    own = _keras.has_own_step(model)
    try:
        with StepTrial(model) as trial:
            found = _exchanged(trial, batch) if fixed else _tried(model, trial, batch)
        if found.draws and not found.fault and not own and not fixed:  # what dropout hides
            with StepTrial(model, lambda batch: _evaluated(model, batch)) as trial:
                found.fault = _tried(model, trial, batch).fault
    except UsageError:
        raise
    except Exception as error:
        raise_refusal(error)
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
            f"a step of {type(model).__name__} computes {join_names(found.kept)} from the batch, so that each replica "
            "would keep a value of its own, and an export has the first one's; use one replica, or a looplib.Trainer "
            "whose step takes what all replicas have (looplib.all_gather), or say that each replica is to train as if "
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
    found = _Found(draws=_apart(first, again) > 1e-6 or tolerance > _MOST_ROUNDING)
    if not np.isfinite(_apart(first, again)):
        found.fault = "its gradients are not finite with the first weights, so that it cannot be tried"
        return found
    replicas = model.distribute_strategy.num_replicas_in_sync
    shares = _unequal(size, replicas) if alike and not trial.sized else None

    def differs(batch: Any, shares: list[int] | None) -> float:
        nonlocal first
        first, parts = trial.whole(batch), trial.in_parts(batch, shares)
        if not found.draws:
            return _over(_apart(parts, first), tolerance)
        pairs = [(first, parts), *((trial.whole(batch), trial.in_parts(batch, shares)) for _ in range(_DRAWS - 1))]
        return _stands_out(*zip(*pairs))

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


def _exchanged(trial: StepTrial, batch: Any) -> _Found:
    """Compares the parts of a batch with those of the batch in another order, for a step of a fixed batch size."""
    trial.sized = True
    parts = trial.in_parts(batch)
    other = trial.in_parts(rows.take(batch, np.argsort(np.arange(leaves(batch)[0].shape[0]) % 2, kind="stable")))
    far = _over(_apart(parts, other), 1e-3)
    same = _over(_apart(parts, trial.in_parts(batch)), 1e-3)
    fault = f"the gradients differ by {far:.2%} where replicas get other parts of a batch" if far and not same else ""
    return _Found(fault, trial.apart)


def _evaluated(model: Any, batch: Any) -> None:
    """Computes the loss as Keras's `train_step` does, but without what a layer draws in a training."""
    x, y, sample_weight = _keras.unpacked(model, batch)
    with tf.GradientTape() as tape:
        predicted = model(x, training=False)
        loss = model.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=sample_weight)
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
    losses = np.stack([one.losses - other.losses for one, other in zip(wholes, parts)])
    mean = np.abs(np.mean([one.losses for one in wholes], axis=0))
    noise = _SURE * losses.std(axis=0, ddof=1) / np.sqrt(count)
    relative = np.abs(losses.mean(axis=0)) / np.maximum(mean, 1e-30)
    standing = relative[np.abs(losses.mean(axis=0)) > np.maximum(_NOISY * mean, noise)]
    return float(standing.max(initial=0.0))

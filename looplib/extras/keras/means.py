"""Whether the loss of a compiled model is a mean over examples, so that each replica can compute a part of it."""

import contextlib
import dataclasses
import inspect
import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from looplib.cluster.updates import refuse_others
from looplib.compat import keras as _keras
from looplib.compat import tensorflow as _tf
from looplib.compat.optimizers import Replacement
from looplib.errors import LossError, UsageError
from looplib.extras.compat.methods import alone
from looplib.extras.keras import models, rows
from looplib.extras.keras.building import state_of_model
from looplib.messages import gist, join_names
from looplib.task.state import unheld, variables_of

EXAMPLES = 32  # that are enough to try
_DRAWS = 24  # of the random numbers of a model that draws some
_ROUNDING, _MOST_ROUNDING = 30, 0.2  # times the difference that another order of the examples makes
_ELEMENTS = 2**16  # of each gradient that are compared
_OR = (
    "use one replica, or say that each replica is to train on its own examples as if it were alone: "
    "KerasTrainer(..., per_replica=True)"
)


@dataclasses.dataclass(frozen=True)
class _Values:
    """What a step computes for a batch.

    Attributes:
      losses: float64 `[n]`, the losses that it returns.
      gradients: float64 `[m]`, elements of all gradients that optimizers get; [0] for a step without an optimizer.
    """

    losses: np.ndarray
    gradients: np.ndarray

    @property
    def compared(self) -> np.ndarray:
        """The gradients, or the losses where there are none."""
        return self.gradients if self.gradients.size else self.losses


def check(model: Any, batch: tuple) -> None:
    """Checks that the loss of a batch is the mean over its parts, by computing both.

    What is compared are the gradients that optimizers get. Where `train_step` is Keras's own, layers compute as in an
    evaluation, without dropout. Nothing is updated. Batch normalization in a `train_step` of the model's own is not
    counted as a difference.

    Args:
      model: a compiled model, whose variables exist, on several replicas.
      batch: examples, as arguments x, y and sample_weight.

    Raises:
      UsageError: if it is not.
    """
    half = min(EXAMPLES, _size(batch)) // 2
    if not half:
        return
    try:
        ids = rows.by_content(batch, 2 * half)  # so that the halves have other numbers of tokens
        first, second, backwards = (rows.take(batch, each) for each in (ids[:half], ids[half:], ids[half - 1 :: -1]))
        own, kept = models.has_own_step(model), []
        with _Runs(model, trains=own) as run:
            one, again, reversed_one = run(first), run(first), run(backwards)
            rounding = _ROUNDING * _apart(one, reversed_one)  # deep models have more than others
            tolerance = max(0.05 if _keras.computes_in(model, "float16", "bfloat16") else 1e-3, rounding)
            copies = _joined(first, first)
            if _apart(one, again) > 1e-6 or tolerance > _MOST_ROUNDING:
                fault = _of_draws(
                    [one, again, *(run(first) for _ in range(_DRAWS - 2))], [run(copies) for _ in range(_DRAWS)]
                )
            else:
                fault = _of_parts(model, one, run(second), run(_joined(first, second)), run(copies), tolerance)
            if own:
                kept = run.kept_apart(first, second)
        if not own and any(not variable.trainable for variable in _shared(model)):
            with _Runs(model, trains=True) as run:
                kept = run.kept_apart(first, second)
    except UsageError:
        raise
    except Exception as error:  # of the user's step, which shows what is wrong when it is traced
        logging.warning(
            "whether %s trains alike on any number of replicas could not be tried (%s); `python -m looplib check "
            "replicas` compares whole trainings", type(model).__name__, gist(error),
        )  # fmt: skip
        return
    if fault:
        raise LossError(f"the loss of {type(model).__name__} is no mean over examples: {fault}; {_OR}")
    if kept:
        raise LossError(
            f"a step of {type(model).__name__} computes {join_names(kept)} from the batch, so that each replica "
            "would keep a value of its own, and an export has the first one's; use one replica, or a looplib.Trainer "
            "whose step takes what all replicas have (looplib.all_gather), or say that each replica is to train as if "
            "it were alone: KerasTrainer(..., per_replica=True)"
        )


def _of_parts(model: Any, first: _Values, second: _Values, both: _Values, copies: _Values, tolerance: float) -> str:
    """Returns what is wrong with a step that computes the same thing each time; "" for nothing."""
    mean = _Values((first.losses + second.losses) / 2, (first.gradients + second.gradients) / 2)
    if _apart(mean, both) <= tolerance:
        return ""
    if _apart(first, copies) > tolerance:
        return _of_copies(_ratio(copies.compared, first.compared))
    if any(map(models.is_batch_normalization, _keras.sublayers(model))):
        return ""  # which takes the statistics of each replica's examples; docs/from_keras_differences.md
    return (
        f"the mean of those of two halves of a batch differs from that of the batch by {_apart(mean, both):.2%} (it "
        "divides by something else than examples, such as its tokens or the sum of its weights, or uses statistics of "
        "the batch), so that replicas with other parts would compute another one; give weights or a mask as "
        "sample_weight, with the default reduction of keras.losses, or write a looplib.GradientTrainer that returns "
        "looplib.mean(losses, weights)"
    )


def _of_draws(ones: list[_Values], copies: list[_Values]) -> str:
    """Returns what is wrong with a step that draws random numbers; "" for nothing that stands out of their noise."""
    if ones[0].gradients.size:
        pairs = itertools.combinations([found.gradients for found in ones], 2)
        square = np.mean([first @ second for first, second in pairs])
        product = np.mean([one.gradients @ copy.gradients for one in ones for copy in copies])
        if square > 0.05 * np.mean([found.gradients @ found.gradients for found in ones]):  # else noise alone
            factor = product / square
            if not 2**-0.5 < factor < 2**0.5:
                return _of_copies(factor)
    losses, twice = (np.stack([found.losses for found in each]) for each in (ones, copies))
    noise = 3 * (losses.std(axis=0) + twice.std(axis=0)) / np.sqrt(_DRAWS)
    mean = losses.mean(axis=0)
    apart = np.abs(twice.mean(axis=0) - mean) > 0.1 * np.abs(mean) + noise
    return _of_copies(_ratio(twice.mean(axis=0)[apart], mean[apart])) if apart.any() else ""


def _of_copies(factor: float) -> str:
    return (
        f"with each example twice, a batch has {factor:.3g} times the loss or the gradient that it has without (it "
        "sums over the examples, divides by a fixed number, or compares examples with each other), so that both would "
        "depend on the number of replicas; divide by the examples that it gets (the default reduction of keras.losses, "
        "tf.reduce_mean), or compare by looplib.all_gather in a looplib.GradientTrainer"
    )


class _Runs:
    """Runs a step without its updates, in a `with` block; afterwards all variables are as before.

    Each run begins with the variables that the model has, apart from whole numbers: the state of random numbers.

    Args:
      model: the compiled model.
      trains: whether the step is `train_step`, or else only its loss, as in an evaluation.
    """

    def __init__(self, model: Any, trains: bool) -> None:
        self._model, self._strategy, self._trains = model, model.distribute_strategy, trains
        self._given: list[Any] = []  # gradients, in one trace
        self._before: list[tuple[tf.Variable, tf.Tensor]] = []
        self._traced: Any = None
        self._replaced = contextlib.ExitStack()

    def __enter__(self) -> "_Runs":
        for optimizer in _keras.optimizers(self._model).values() if self._trains else ():
            name = "apply" if _keras.family(optimizer) == "keras" else "apply_gradients"
            taken = self._takes_gradients if name == "apply" else self._takes_pairs
            replacement = Replacement(optimizer, name, lambda _, taken=taken: taken)
            self._replaced.callback(replacement.undo)
        return self

    def __exit__(self, *error: object) -> None:
        self._put_back(lambda variable: True)
        self._replaced.close()

    def __call__(self, batch: tuple) -> _Values:
        found = self._run(batch, batch, False)
        self._put_back(lambda variable: variable.dtype.is_floating)
        return found

    def kept_apart(self, first: tuple, second: tuple) -> list[str]:
        """Returns the variables that differ between replicas after a step on different batches."""
        self._run(first, second, True)
        kept = []
        for variable in _shared(self._model):
            parts = self._strategy.experimental_local_results(_keras.tf_variable(variable))
            if any(tf.reduce_any(abs(part - parts[0]) > 1e-5 * abs(parts[0]) + 1e-20) for part in parts[1:]):
                kept.append(_keras.variable_path(variable))
        return kept

    def _run(self, batch: tuple, other: tuple, mixed: bool) -> _Values:
        leaves = [
            tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf
            for leaf in (*_leaves(batch), *_leaves(other))
        ]
        if self._traced is None:
            self._trace(batch, leaves)
        losses, gradients = self._traced(tf.constant(mixed), *leaves)
        return _Values(losses.numpy(), gradients.numpy())

    def _trace(self, batch: tuple, leaves: list[Any]) -> None:
        @tf.function(autograph=False)
        def function(mixed: tf.Tensor, *leaves: Any) -> tuple[tf.Tensor, tf.Tensor]:
            found = self._strategy.run(self._on_replica, args=(batch, mixed, leaves))
            return tuple(self._strategy.experimental_local_results(part)[0] for part in found)

        specs = [tf.TensorSpec([], tf.bool), *map(rows.spec, leaves)]
        self._traced = function.get_concrete_function(*specs)
        updated = _tf.updated_by(self._traced)
        # Generators of tf_keras are traced as they are; of other variables, each replica's part is.
        parts = itertools.chain.from_iterable(map(self._strategy.experimental_local_results, self._traced.variables))
        self._before = [(part, tf.identity(part)) for part in parts if _tf.identity_of(part) in updated]
        refuse_others(self._strategy, unheld(self._strategy, self._traced.variables, state_of_model(self._model)))

    def _on_replica(self, batch: tuple, mixed: tf.Tensor, leaves: list[Any]) -> tuple[tf.Tensor, tf.Tensor]:
        """Does a step with the first half of some leaves; with the second half on every second replica if `mixed`."""
        half, self._given = len(leaves) // 2, []
        odd = tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group % 2, 1)
        leaves = tf.cond(mixed & odd, lambda: list(leaves[half:]), lambda: list(leaves[:half]))
        batch = _packed(batch, leaves)
        with alone():
            losses = self._of_train_step(batch) if self._trains else self._losses(batch)
        gradients = [_flat(gradient) for gradient in self._given if gradient is not None]
        empty = [tf.zeros([0], tf.float64)]
        return tf.concat(losses or empty, axis=0), tf.concat(gradients or empty, axis=0)

    def _of_train_step(self, batch: tuple) -> list[tf.Tensor]:
        logs = self._model.train_step(batch)
        return [_flat(logs[name]) for name in sorted(logs) if "loss" in name] if isinstance(logs, dict) else []

    def _losses(self, batch: tuple) -> list[tf.Tensor]:
        """Computes the loss as Keras's `train_step` does, but without what a layer does only in a training."""
        x, y, sample_weight = models.unpacked(self._model, batch)
        known = inspect.signature(self._model.call).parameters
        training = {"training": False} if "training" in known else {}
        with tf.GradientTape() as tape:
            predicted = self._model(x, **training)
            loss = self._model.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=sample_weight)
        self._given = tape.gradient(loss, [_keras.tf_variable(each) for each in self._model.trainable_variables])
        return [_flat(loss)]

    def _takes_gradients(self, grads: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        self._given += list(grads)

    def _takes_pairs(self, grads_and_vars: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        self._given += [gradient for gradient, _ in grads_and_vars]

    def _put_back(self, chosen: Any) -> None:
        for variable, value in self._before:
            if chosen(variable):
                variable.assign(value)


def _shared(model: Any) -> list[Any]:
    """Returns the variables of a model without metrics, seeds, and what layers of Keras compute from a batch."""
    layers = [layer for layer in _keras.sublayers(model) if _keras.is_own_class(layer) and not _keras.is_model(layer)]
    others = [*layers, *filter(_keras.is_metric, _keras.parts(model))]
    known = {id(_keras.tf_variable(variable)) for other in others for variable in other.variables}
    held = [variable for _, variable in variables_of(state_of_model(model))]
    own = [variable for variable in held if variable.trainable or id(variable) not in known]
    return [variable for variable in own if variable.dtype.is_floating]


def _flat(value: Any) -> tf.Tensor:
    flat = tf.reshape(tf.convert_to_tensor(value), [-1])
    return tf.cast(flat[:: max(1, (flat.shape[0] or 0) // _ELEMENTS)], tf.float64)


def _apart(one: _Values, other: _Values) -> float:
    """Returns how much two results differ, relative to the second."""
    first, second = one.compared, other.compared
    return float(np.linalg.norm(first - second) / max(np.linalg.norm(second), 1e-30))


def _ratio(values: np.ndarray, to: np.ndarray) -> float:
    return float(values @ to / max(to @ to, 1e-30))


def _leaves(batch: tuple) -> list[Any]:
    return [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]


def _packed(batch: tuple, leaves: Iterable[Any]) -> tuple:
    leaves = iter(leaves)
    filled = [None if leaf is None else next(leaves) for leaf in tf.nest.flatten(batch)]
    return tf.nest.pack_sequence_as(batch, filled)


def _size(batch: tuple) -> int:
    return min(int(leaf.shape[0]) for leaf in _leaves(batch))


def _joined(first: tuple, second: tuple) -> tuple:
    pairs = zip(_leaves(first), _leaves(second))
    return _packed(first, [_concatenated([one, other]) for one, other in pairs])


def _concatenated(parts: list[Any]) -> Any:
    return tf.sparse.concat(0, parts) if isinstance(parts[0], tf.SparseTensor) else tf.concat(parts, axis=0)

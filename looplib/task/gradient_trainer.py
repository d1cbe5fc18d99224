"""GradientTrainer: a Trainer that takes a loss to an update of the weights."""

import abc
import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from looplib.base.messages import join_names, whole_number
from looplib.cluster import updates
from looplib.compat import keras as _keras
from looplib.compat import optimizers as _optimizers
from looplib.compat.row_updates import changes_owners, is_table
from looplib.compat.tensorflow import TensorLike, converted, not_converted
from looplib.errors import LossError, MetricError, SettingError, StaleTraceError
from looplib.task import micro_batches as splitting
from looplib.task import parts, reductions
from looplib.task.averages import WeightAverages
from looplib.task.learning_rates import learning_rate
from looplib.task.reductions import Reduction
from looplib.task.trainer import Exported, Trainer

Loss = TensorLike | Reduction
_START, _GROWS_AFTER = 2.0**15, 2000  # of the scale of the loss
_SMALL = 1e-3  # the least norm of a unit's weights in adaptive clipping, so that zero weights can move


@dataclasses.dataclass(frozen=True)
class Clipping:
    """Limits for gradients, applied in the order of the attributes; None is no limit.

    Attributes:
      value: limit for the absolute value of each element.
      norm: limit for the Euclidean norm of each variable's gradient.
      global_norm: limit for the norm of all gradients together (Pascanu et al., 2013, arXiv:1211.5063).
      adaptive: limit for the norm of each unit's gradient over the norm of its weights (Brock et al., 2021,
        arXiv:2102.06171, which uses 0.01). A unit is all of a variable except the last dimension; a bias or scale is
        one unit.

    Raises:
      UsageError: for a limit that is not positive.
    """

    value: float | None = None
    norm: float | None = None
    global_norm: float | None = None
    adaptive: float | None = None

    def __post_init__(self) -> None:
        for name, limit in dataclasses.asdict(self).items():
            number = isinstance(limit, numbers.Real) and not isinstance(limit, bool)
            if limit is not None and not (number and limit > 0):
                raise SettingError(f"clip_{name} is {limit!r}; expected a positive number, or None for no clipping")

    @property
    def any(self) -> bool:
        """Whether there is a limit."""
        return self != Clipping()

    @not_converted
    def clip(self, gradients: Sequence[tf.Tensor], weights: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the clipped gradients; one that is not finite stays so, for the guards to see."""
        gradients = list(gradients)
        if self.value is not None:
            # An infinite element would become the limit, and the fault invisible.
            gradients = [
                tf.where(tf.math.is_finite(g), tf.clip_by_value(g, -self.value, self.value), g) for g in gradients
            ]
        if self.norm is not None:
            gradients = [tf.clip_by_norm(g, self.norm) for g in gradients]
        if self.global_norm is not None:
            gradients, _ = tf.clip_by_global_norm(gradients, self.global_norm)
        if self.adaptive is not None:
            gradients = [self._clip_units(g, w) for g, w in zip(gradients, weights)]
        return gradients

    def _clip_units(self, gradient: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
        limit = self.adaptive * tf.maximum(_unit_norm(weight), _SMALL)
        norm = _unit_norm(gradient)
        return tf.where(norm > limit, gradient * (limit / tf.maximum(norm, 1e-6)), gradient)


def _unit_norm(value: tf.Tensor) -> tf.Tensor:
    axes = list(range(value.shape.rank - 1)) if value.shape.rank > 1 else None
    return tf.sqrt(tf.reduce_sum(tf.square(value), axis=axes, keepdims=True))


@not_converted
def global_norm(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the Euclidean norm of all values together: float32 scalar."""
    return tf.sqrt(tf.add_n([2 * tf.nn.l2_loss(tf.cast(value, tf.float32)) for value in values]))


class DynamicLossScale(tf.Module):
    """A factor for the loss that keeps float16 gradients in range (Micikevicius et al., 2018, arXiv:1710.03740).

    It starts at 2**15, is halved by each step whose gradients overflow, and doubled after 2,000 steps in a row without
    an overflow. Both numbers are variables, and part of a checkpoint.

    Attributes:
      scale: float32 scalar variable.
    """

    def __init__(self) -> None:
        super().__init__(name="loss_scale")
        self.scale = tf.Variable(_START, trainable=False, name="loss_scale")
        self._good_steps = tf.Variable(0, trainable=False, dtype=tf.int64, name="steps_since_overflow")

    @not_converted
    def adjust(self, finite: tf.Tensor) -> None:
        """Adjusts the factor after a step by whether all gradients were finite on all replicas; in replica context."""
        steps = tf.where(finite, self._good_steps + 1, tf.zeros_like(self._good_steps))
        grows = steps >= _GROWS_AFTER
        doubled, halved = tf.minimum(2 * self.scale, tf.float32.max / 2), tf.maximum(self.scale / 2, 1.0)
        self.scale.assign(tf.where(grows, doubled, tf.where(finite, self.scale, halved)))
        self._good_steps.assign(tf.where(grows, tf.zeros_like(steps), steps))


@dataclasses.dataclass
class _Backward:
    """The results of one replica for one batch, or a part of it."""

    data: list[Any]  # gradients of the sum of the losses over the global batch size, in the order of the variables
    auxiliary: list[Any]  # gradients of the model's own losses, where they cannot be a part of `data`; else []
    # float32 [2], the sum of the losses' weights and the number of examples; None if the global batch size divides
    weight: tf.Tensor | None
    metrics: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class UpdatePlan:
    """The variables that each optimizer trains. It has no state, and TensorFlow does not track it."""

    trained: list[Any]
    trainable: list[Any]  # the trainable variables of the layers; `freeze` may leave out some
    parts: list[tuple[str, Any, list[Any]]]  # (pattern, optimizer, variables)


class GradientTrainer(Trainer):
    """A trainer that is a loss; everything from there to the updated weights is built in.

    A subclass defines `dataset` and `loss_fn`. One step computes the gradient of the mean loss over the global batch,
    on any number of replicas: it sums the gradients over micro-batches, then once over replicas, divides, clips, and
    gives them to the optimizer. Losses that the model's layers add (regularization, in `model.losses`) are added once
    a step. The metric `loss` leaves them out; `regularization_loss` reports them, unless `loss_fn` returns a metric of
    that name. The sum of both is the `loss` of `fit`. Everything else is off by default.

    Args:
      model: Keras model of either family, or a `tf.Module`, that has its variables; an attribute of the trainer.
      optimizer: Keras optimizer of the model's family. Or a dict from regular expression to optimizer: a variable is
        updated by the optimizer of the first expression that `re.search` finds in its name; "" matches all.
      micro_batches: int, number of parts of the per-replica batch that are computed one after the other, in the memory
        of one part. The update equals the whole batch's, also for parts of unequal weight. "auto" tries the divisors
        of the per-replica batch, from 1 upwards, on a batch of zeros, and takes the first whose memory suffices.
      clip_value: float, limit for each element of the gradient of the global batch; see `Clipping`. The limits are
        applied in this order.
      clip_norm: float, limit for the norm of each variable's gradient.
      clip_global_norm: float, limit for the norm of all gradients together.
      clip_adaptive: float, limit for each unit's gradient in relation to its weights.
      average_decay: float, keeps exponential moving averages of the trained weights with this decay, as the attribute
        `averages`. Give it to an evaluator as its attribute `averages`, and the evaluation runs on them.
      loss_scale: "auto" scales the loss dynamically if the model computes in float16; "dynamic" always; None never. A
        step with an overflow updates nothing, on any replica, and counts as a step; the total `overflows` reports it.
      freeze: regular expressions; variables whose names match are not trained. See `parts.freeze`.
      phases: list of `looplib.Phase`, parts of the training that train other variables, or at another rate. What no
        phase trains is frozen.
      rematerialize: regular expressions; layers whose names match compute their activations twice, in less memory. They
        may have no dropout, batch normalization or other state. A block of a deep model is a good choice.
      no_decay: regular expressions; the optimizer's weight decay leaves out variables whose names match, such as
        ("bias", "gamma", "beta").
      jit_compile: bool, whether XLA compiles the loss and its gradients, a micro-batch at a time. The sum over replicas
        and the update stay outside, so that it works on any number of replicas and workers, and with `loop="graph"`.
        Each new shape of a batch is compiled once, gradients are dense, and XLA leaves out assertions. `loop="eager"`
        computes op by op nevertheless.
      report: metrics to add, each the last step's: "learning_rate" (of its update), "gradient_norm" (before clipping),
        "weight_norm" (after the update), "update_norm", and "layer_norms" (the gradient norm of each variable).

    Attributes:
      micro_batches: the number of parts; None until "auto" is decided, when the step is traced.
      averages: `WeightAverages`, or None.
      loss_scale: `DynamicLossScale`, or None.
      update_plan: `UpdatePlan`; within a step, that of its phase.

    Raises:
      UsageError: for bad input, as a sentence.

    Example:
        ```python
        class Line(looplib.GradientTrainer):
            def __init__(self):
                model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
                super().__init__(model, keras.optimizers.SGD(0.1), clip_global_norm=1.0)
                self.x = np.linspace(-1, 1, 256, dtype="float32")[:, None]

            def dataset(self, context):
                return context.indices(256).map(lambda i: (tf.gather(self.x, i), tf.gather(2 * self.x, i)))

            def loss_fn(self, inputs):
                x, y = inputs
                return tf.square(self.model(x, training=True) - y)[:, 0]
        ```
    """

    step_method, base_initialized = "loss_fn", False

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        *,
        micro_batches: int | str = 1,
        clip_value: float | None = None,
        clip_norm: float | None = None,
        clip_global_norm: float | None = None,
        clip_adaptive: float | None = None,
        average_decay: float | None = None,
        loss_scale: str | None = "auto",
        freeze: Sequence[str] | str | None = None,
        phases: Sequence[Any] | None = None,
        rematerialize: Sequence[str] | str | None = None,
        no_decay: Sequence[str] | str | None = None,
        jit_compile: bool = False,
        report: Sequence[str] | None = None,
    ) -> None:
        self.model, self.optimizer, self.base_initialized = model, optimizer, True
        self.micro_batches = None if micro_batches == "auto" else whole_number("micro_batches", micro_batches)
        self._gradient_clipping = Clipping(clip_value, clip_norm, clip_global_norm, clip_adaptive)
        if not isinstance(jit_compile, bool):
            raise SettingError(f"jit_compile is {jit_compile!r}; expected True or False")
        self._gradients_compiled = jit_compile
        self._gradient_report = parts.checked_reports(report or ())
        parts.check_model(model)
        trained = parts.freeze(model, freeze)
        if phases is not None:
            from looplib.task.phases import PhasedTraining  # here, as few trainers need it

            self.training_phases = PhasedTraining(phases, model, trained)
            trained = self.training_phases.trained
        if rematerialize:
            parts.rematerialize(model, rematerialize)
        optimizers = optimizer if isinstance(optimizer, Mapping) else {"": optimizer}
        self.update_plan = UpdatePlan(trained, list(model.trainable_variables), parts.divided(optimizers, trained))
        parts.leave_out_of_decay(self.update_plan.parts, no_decay)
        _keras.check_one_family({"model": model, **{f"optimizer {p!r}": each for p, each, _ in self.update_plan.parts}})
        for _, each, variables in self.update_plan.parts:
            parts.check_optimizer(each)
            each.build(variables)
        if phases is not None:
            self.training_phases.divide(self.update_plan)
        if average_decay is not None and any(map(changes_owners, trained)):
            raise SettingError(
                "average_decay averages the rows of a DynamicEmbedding over the ids that have had them; leave it out"
            )
        self.averages = None if average_decay is None else WeightAverages(trained, average_decay)
        self.loss_scale = _make_loss_scale(model, loss_scale)
        self._own_losses_checked = self._outside_checked = False

    @abc.abstractmethod
    def loss_fn(self, inputs: Any, /) -> Loss | tuple[Loss, Mapping[str, Any]]:
        """Computes the loss of one batch, or of a micro-batch, on one replica.

        Args:
          inputs: the batch, with the structure of `dataset`'s elements.

        Returns:
          The losses, or `(losses, metrics)`. Losses are a float tensor `[batch]`, one value an example (further
          dimensions are averaged), or `looplib.mean(losses, weights)`, for the weighted mean over all elements of the
          global batch: of tokens with a mask, say. Metrics are a dict as `Trainer.step_fn` returns it; the losses are
          added to it under `loss_name`.
        """

    @not_converted
    def step_fn(self, inputs: Any, /) -> dict[str, Any]:
        """See `Trainer.step_fn`; calls `loss_fn` and updates the weights."""
        _check_trainable(type(self).__name__, self.model, self.update_plan.trainable)
        if self.micro_batches is None:
            self.micro_batches = splitting.fitting(self._probe, inputs)
        backward = self._computed(inputs)
        reported = self._update(backward)
        if both := sorted(backward.metrics.keys() & reported.keys()):
            raise MetricError(
                f"{type(self).__name__}.loss_fn returned the metric {both[0]!r}, which GradientTrainer reports; rename "
                "yours"
            )
        return {**backward.metrics, **reported}

    @property
    def frozen_variables(self) -> list[Any]:
        """The variables of the model that are not trained, because `freeze` or their layers say so."""
        trained = {id(variable) for variable in self.update_plan.trained}
        return [one for one in _keras.without_vocabularies(self.model.variables) if id(one) not in trained]

    def export(self) -> Exported:
        """See `Trainer.export`; with the averages."""
        return dataclasses.replace(super().export(), averages=self.averages)

    # The gradient of a batch on one replica.

    def _computed(self, inputs: Any) -> _Backward:
        whole = self.micro_batches == 1 and not self._gradients_compiled
        return self._backward(inputs) if whole else self._accumulated(inputs)

    @not_converted
    def _backward(self, inputs: Any) -> _Backward:
        with tf.GradientTape(persistent=True) as tape:
            losses, metrics = _losses_and_metrics(type(self), converted(self.loss_fn)(inputs), inputs)
            target, weight, auxiliary, own_metrics = self._targets(losses, inputs)
        if not self._outside_checked:
            parts.warn_of_untrained(type(self).__name__, self.model, tape, target)
            self._outside_checked = True
        variables = [_keras.tf_variable(variable) for variable in self.update_plan.trained]
        data = tape.gradient(target, variables)
        own = [] if auxiliary is None else tape.gradient(auxiliary, variables)
        if all(gradient is None for gradient in (*data, *own)):
            raise LossError(
                f"the losses of {type(self).__name__}.loss_fn depend on none of the trained variables; compute them "
                "with the model, by differentiable operations"
            )
        return _Backward(data, own, weight, {self.loss_name: losses, **own_metrics, **metrics})

    @not_converted
    def _targets(
        self, losses: Any, inputs: Any
    ) -> tuple[tf.Tensor, tf.Tensor | None, tf.Tensor | None, dict[str, Any]]:
        """Returns (sum of losses over the global batch size, their weight, own losses), scaled, and metrics."""
        weight, share = None, updates.current()
        examples = splitting.examples_of(losses.value if isinstance(losses, Reduction) else losses, inputs)
        examples = updates.counted(examples)
        if isinstance(losses, Reduction):
            values = _at_least_float32(losses.value)
            weights = tf.ones_like(values) if losses.weight is None else tf.cast(losses.weight, values.dtype)
            _check_weights(type(self).__name__, values, weights)
            weights = updates.counted(tf.stop_gradient(tf.broadcast_to(weights, tf.shape(values))))
            target = tf.reduce_sum(tf.math.multiply_no_nan(values, weights)) / self.global_batch_size
            weight = tf.reduce_sum(weights)
        else:
            target = self.global_mean(losses)
            if self.batch_size_varies and share is None:  # a share knows the size of its global batch
                weight = tf.cast(tf.shape(losses)[0], target.dtype)
        auxiliary, metrics = None, {}
        if own := list(self.model.losses) if _keras.is_layer(self.model) else []:
            self._check_own(own, inputs)
            auxiliary = tf.add_n([tf.cast(loss, target.dtype) for loss in own])
            metrics["regularization_loss"] = reductions.mean(auxiliary, examples)
            auxiliary *= tf.cast(examples, target.dtype)
            if weight is None:
                of = self.global_batch_size if share is None else share.of
                target, auxiliary = target + auxiliary / tf.cast(of, target.dtype), None
        if weight is not None:
            weight = tf.stack([weight, tf.cast(examples, weight.dtype)])
        scale = None if self.loss_scale is None else self.loss_scale.scale
        return updates.times(target, scale), weight, updates.times(auxiliary, scale), metrics

    def _check_own(self, own: Sequence[tf.Tensor], inputs: Any) -> None:
        """Raises `UsageError`, once, if the model's own losses cannot be computed in the parts that a step has."""

        def losses_of(batch: Any) -> Sequence[tf.Tensor]:
            converted(self.loss_fn)(batch)
            return self.model.losses

        if not self._own_losses_checked and tf.distribute.get_strategy().num_replicas_in_sync * self.micro_batches > 1:
            self._own_losses_checked = True
            splitting.check_means(type(self).__name__, losses_of, own, inputs)

    def _probe(self, inputs: Any, count: int) -> list[tf.Tensor]:
        """Computes the gradients in `count` parts, for `fitting`."""
        self.micro_batches = count
        try:
            backward = self._computed(inputs)
        finally:
            self.micro_batches = None
        return _flattened(backward, self.update_plan.trained)

    def _accumulated(self, inputs: Any) -> _Backward:
        """Computes micro-batch after micro-batch, compiled or not; its gradients are dense."""
        metric_sums, structure = splitting.MetricSums(), {}

        def compute(part: Any, number: tf.Tensor) -> list[tf.Tensor]:
            with updates.in_micro_batch(number if self.micro_batches > 1 else None):
                backward = self._backward(part)
            structure.update(
                auxiliary=len(backward.auxiliary), weighted=backward.weight is not None,
                missing=[gradient is None for gradient in backward.data],
            )  # fmt: skip
            return _flattened(backward, self.update_plan.trained) + metric_sums.pack(backward.metrics, part, number)

        if self.micro_batches > 1 and not self.uneven_parts:
            inputs = splitting.checked(type(self).__name__, inputs)
        sums = splitting.summed(compute, inputs, self.micro_batches, self._gradients_compiled)
        count = len(self.update_plan.trained)
        data = [None if no else gradient for no, gradient in zip(structure["missing"], sums)]
        sums = sums[count:]
        auxiliary, sums = sums[: structure["auxiliary"]], sums[structure["auxiliary"] :]
        weight, sums = (sums[0], sums[1:]) if structure["weighted"] else (None, sums)
        return _Backward(data, auxiliary, weight, metric_sums.unpack(sums))

    # The update.

    @not_converted
    def _update(self, backward: _Backward) -> dict[str, Any]:
        """Updates the weights with the gradients of all replicas; returns the metrics of `report`."""
        gradients = self._global_gradients(backward)
        used = [number for number, gradient in enumerate(gradients) if gradient is not None]
        weights = [_keras.tf_variable(self.update_plan.trained[number]) for number in used]
        metrics = self._learning_rates()  # before the update, which counts on
        reports_norms = {"gradient_norm", "layer_norms"} & set(self._gradient_report)
        if self._gradient_clipping.any or self.loss_scale is not None or reports_norms:
            # Rows of a sparse gradient may repeat, so that their norm is not the gradient's.
            dense = [tf.convert_to_tensor(gradients[number]) for number in used]
            metrics.update(self._gradient_norms(dense, used))
            for number, gradient in zip(used, self._gradient_clipping.clip(dense, weights)):
                gradients[number] = gradient
        before = [tf.identity(weight) for weight in weights] if "update_norm" in self._gradient_report else []
        if self.loss_scale is None:
            self._apply(gradients)
        else:
            metrics.update(self._apply_if_finite(gradients))
        if "weight_norm" in self._gradient_report:
            metrics["weight_norm"] = reductions.last(global_norm([w.read_value() for w in weights]))
        if before:
            moves = [weight.read_value() - old for weight, old in zip(weights, before)]
            metrics["update_norm"] = reductions.last(global_norm(moves))
        return metrics

    def _global_gradients(self, backward: _Backward) -> list[Any]:
        """Returns the gradients of the mean loss over the global batch: one sum over replicas, unscaled."""
        strategy, weight = tf.distribute.get_strategy(), backward.weight
        values = [*backward.data, *backward.auxiliary, *([] if weight is None else [weight])]
        if strategy.num_replicas_in_sync > 1:
            # The updates of tables join the rows of replicas by themselves.
            tables = [number for number, one in enumerate(self.update_plan.trained) if is_table(one)]
            own = [values[number] for number in tables]
            values = updates.over_replicas([None if i in tables else value for i, value in enumerate(values)])
            for number, value in zip(tables, own):
                values[number] = value
        count, factor = len(backward.data), None
        inverse = None if self.loss_scale is None else 1 / self.loss_scale.scale
        data, auxiliary = values[:count], values[count : count + len(backward.auxiliary)]
        if weight is not None:
            factor = tf.math.divide_no_nan(tf.cast(self.global_batch_size, weight.dtype), values[-1][0])
        data = [updates.times(updates.times(gradient, factor), inverse) for gradient in data]
        if auxiliary:
            auxiliary = [updates.times(own, tf.math.reciprocal_no_nan(values[-1][1])) for own in auxiliary]
            data = [_added(gradient, updates.times(own, inverse)) for gradient, own in zip(data, auxiliary)]
        return data

    def _apply(self, gradients: Sequence[Any]) -> None:
        number_of = {id(variable): number for number, variable in enumerate(self.update_plan.trained)}
        for _, optimizer, variables in self.update_plan.parts:
            own = [gradients[number_of[id(variable)]] for variable in variables]
            if _keras.family(optimizer) == "keras":
                # Keras 3 squares the rows of a sparse gradient that belong to one row of the variable one by one.
                # The updates of tables sum these rows.
                own = [
                    tf.convert_to_tensor(gradient)
                    if isinstance(gradient, tf.IndexedSlices) and not is_table(variable)
                    else gradient
                    for gradient, variable in zip(own, variables)
                ]
            accumulating = [] if self.averages is None else _optimizers.accumulating(optimizer)
            before = [tf.identity(one.iterations) for one, _ in accumulating]  # which counts updates
            others = updates.update_tables(optimizer, own, variables)
            if others[0]:
                self.apply_gradients(optimizer, zip(*others), summed=True)
            if self.averages is not None:
                counted = {id(variable) for _, held in accumulating for variable in held}
                self.averages.update([variable for variable in variables if id(variable) not in counted])
                for (one, held), count in zip(accumulating, before):
                    self.averages.update(held, when=tf.not_equal(one.iterations, count))

    def _apply_if_finite(self, gradients: Sequence[Any]) -> dict[str, Any]:
        """Updates nothing if a gradient has overflowed, which all replicas see alike in the sum."""
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in gradients if g is not None])
        held = [*self.update_plan.trained, *(one for _, each, _ in self.update_plan.parts for one in each.variables)]
        state = [*map(_keras.tf_variable, held), *(self.averages.values if self.averages else ())]
        before = [variable.read_value() for variable in state]
        self._apply([None if g is None else tf.where(finite, g, tf.zeros_like(g)) for g in gradients])
        for variable, value in zip(state, before):
            variable.assign(tf.where(finite, variable.read_value(), value))
        self.loss_scale.adjust(finite)
        first = tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, 0)
        overflow = tf.logical_and(first, tf.logical_not(finite))
        return {
            "overflows": reductions.total(tf.cast(overflow, tf.int32)),
            "loss_scale": reductions.last(self.loss_scale.scale),
        }

    # Reports.

    def _learning_rates(self) -> dict[str, Any]:
        metrics = {}
        if "learning_rate" in self._gradient_report:
            for pattern, optimizer, _ in self.update_plan.parts:
                name = f"learning_rate/{pattern or 'rest'}" if len(self.update_plan.parts) > 1 else "learning_rate"
                metrics[name] = reductions.last(learning_rate(optimizer))
        return metrics

    def _gradient_norms(self, dense: Sequence[tf.Tensor], used: Sequence[int]) -> dict[str, Any]:
        metrics = {}
        if "gradient_norm" in self._gradient_report:
            metrics["gradient_norm"] = reductions.last(global_norm(dense))
        if "layer_norms" in self._gradient_report:
            for gradient, number in zip(dense, used):
                name = f"gradient_norm/{_keras.variable_path(self.update_plan.trained[number])}"
                metrics[name] = reductions.last(global_norm([gradient]))
        return metrics


def _make_loss_scale(model: Any, kind: str | None) -> DynamicLossScale | None:
    if kind not in ("auto", "dynamic", None):
        raise SettingError(f'loss_scale is {kind!r}; expected "auto", "dynamic" or None')
    if kind == "auto":
        kind = "dynamic" if _keras.computes_in(model, "float16") else None
    return DynamicLossScale() if kind else None


def _at_least_float32(value: tf.Tensor) -> tf.Tensor:
    return value if value.dtype == tf.float64 else tf.cast(value, tf.float32)


@not_converted
def _flattened(backward: _Backward, variables: Sequence[Any]) -> list[tf.Tensor]:
    """Returns the gradients, dense, and the weight, if there is one."""
    flat = []
    for gradients in (backward.data, backward.auxiliary):
        for gradient, variable in zip(gradients, variables):
            zeros = tf.zeros(variable.shape, variable.dtype)
            dense = zeros if gradient is None else tf.convert_to_tensor(gradient)
            flat.append(tf.ensure_shape(dense, variable.shape))
    return flat + ([] if backward.weight is None else [backward.weight])


def _added(gradient: Any, other: Any) -> Any:
    if gradient is None or other is None:
        return other if gradient is None else gradient
    return tf.convert_to_tensor(gradient) + tf.convert_to_tensor(other)


def _losses_and_metrics(trainer: type[Trainer], returned: Any, inputs: Any) -> tuple[Any, dict[str, Any]]:
    """Checks what a `loss_fn` returned for a batch, or a part of it."""
    who = trainer.__name__
    losses, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if not isinstance(metrics, dict):
        raise MetricError(
            f"{who}.loss_fn returned a {type(metrics).__name__} after the losses; expected a dict of metrics, or "
            "looplib.mean(losses, weights) for weighted losses"
        )
    if trainer.loss_name in metrics:
        raise MetricError(
            f"{who}.loss_fn returned a metric {trainer.loss_name!r}, which is the losses' own name; rename it"
        )
    if isinstance(losses, Reduction) and losses.kind == "mean":
        return losses, metrics
    if not isinstance(losses, tf.Tensor) or not losses.dtype.is_floating or losses.shape.rank == 0:
        tensor = isinstance(losses, tf.Tensor)
        found = f"a {losses.dtype.name} tensor of shape {losses.shape}" if tensor else repr(losses)
        raise LossError(
            f"{who}.loss_fn returned {found}; expected one loss per example, a float tensor [batch], or "
            "looplib.mean(losses, weights): a mean that is taken already would be wrong for micro-batches and replicas"
        )
    splitting.check_per_example(f"what {who}.loss_fn returned as losses", losses, inputs, LossError)
    return losses, metrics


def _check_weights(who: str, values: tf.Tensor, weights: tf.Tensor) -> None:
    """Raises `UsageError` if weights do not broadcast to the losses, as far as the shapes are known."""
    try:
        fits = tf.broadcast_static_shape(values.shape, weights.shape).is_compatible_with(values.shape)
    except ValueError:
        fits = False
    if not fits:
        raise LossError(
            f"{who}.loss_fn returned losses of shape {values.shape} with weights of shape {weights.shape}; expected "
            "weights that broadcast to the losses"
        )


def _check_trainable(who: str, model: Any, before: Sequence[Any]) -> None:
    """Raises `UsageError` if other variables of a model are trainable than when the trainer was built."""
    then, now = ({id(variable): variable for variable in each} for each in (before, model.trainable_variables))
    if changed := [_keras.variable_path({**then, **now}[key]) for key in then.keys() ^ now.keys()]:
        raise StaleTraceError(
            f"trainable has changed for {join_names(sorted(changed))} since {who}.__init__, where the optimizer got "
            "its variables; set it before, or give GradientTrainer(freeze=...)"
        )

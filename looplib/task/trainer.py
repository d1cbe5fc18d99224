"""What a user subclasses: Trainer, Evaluator and Adapter, with the functions that they export."""

import abc
import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import tensorflow as tf

from looplib.cluster import updates
from looplib.compat import keras as _keras
from looplib.compat.tensorflow import DatasetLike, not_converted
from looplib.data.context import InputContext
from looplib.errors import ExportError, StepError
from looplib.task.actions import Event
from looplib.task.averages import WeightAverages


@dataclasses.dataclass(frozen=True)
class Exported:
    """A function and its model, exported for programs without looplib.

    Attributes:
      function: function of one argument, a batch, in TensorFlow; returns a tensor or a structure of tensors.
      signature: the structure of `tf.TensorSpec`s of this argument.
      model: the Keras model or `tf.Module` that holds the variables and tables that the function uses.
      averages: `WeightAverages` that an export may use in place of the weights; None for none.

    Example:
        ```python
        def export(self):
            serve = lambda images: {"class": tf.argmax(self.model(images, training=False), 1)}
            return looplib.Exported(serve, tf.TensorSpec([None, 28, 28, 1], name="images"), self.model)
        ```
    """

    function: Callable[[Any], Any]
    signature: Any
    model: Any
    averages: WeightAverages | None = None

    def with_names(self) -> "Exported":
        """Returns this with a name for each input of the signature, which serving programs use.

        Raises:
          UsageError: for names that a SavedModel cannot have, or that it would not tell apart.
        """
        flat = tf.nest.flatten(self.signature)
        default = ["inputs"] if len(flat) == 1 else [f"inputs_{number}" for number in range(len(flat))]
        names = [spec.name or name for spec, name in zip(flat, default)]
        wrong = [name for name in names if not re.fullmatch(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*", name) or name == "self"]
        kept = [re.sub(r"\W", "_", name) for name in names]
        wrong = wrong or [name for name, one in zip(names, kept) if kept.count(one) > 1]
        if wrong:
            raise ExportError(
                f"no export can have inputs named {', '.join(map(repr, wrong))}; give each another name of letters, "
                "digits and underscores: of its Input layer, its key in a dict, or its tf.TensorSpec"
            )
        named = [tf.TensorSpec(spec.shape, spec.dtype, name) for spec, name in zip(flat, names)]
        return dataclasses.replace(self, signature=tf.nest.pack_sequence_as(self.signature, named))


def of_model(who: str, model: Any, averages: WeightAverages | None = None) -> Exported:
    """Returns the default export of a task of the class `who`: the model's outputs in inference, for any batch size."""
    signature = _keras.input_specs(model) if _keras.is_model(model) else None
    if signature is None:
        found = "a model without Input layers" if _keras.is_model(model) else "no Keras model as its attribute model"
        raise ExportError(
            f"{who} has {found}, so it is not known what to export; define {who}.export, which returns "
            "looplib.Exported(function, signature, model)"
        )
    return Exported(lambda inputs: model(inputs, training=False), signature, model, averages)


Specification = TypeVar("Specification")
Loop = TypeVar("Loop")
_LATER: Any = None  # until a controller sets it, before the methods that use it


class Adapter:
    """A further base class of a trainer or an evaluator, for what only the controller asks it for.

    Example:
        ```python
        class LanguageModel(looplib.Adapter, looplib.GradientTrainer):
            @property
            def rates(self):
                return {"tokens_per_second": self.global_batch_size * 128}
        ```
    """

    @property
    def own_actions(self) -> Sequence[Callable[[Event], object]]:
        """Actions of this object, which the controller calls before the user's.

        The trainer's come before the evaluators'.
        """
        return ()

    @property
    def rates(self) -> Mapping[str, float]:
        """Metrics in proportion to the speed of a training: dict from name to the value at one step a second.

        Each report has them, multiplied by its `steps_per_second`. Comparisons of runs leave out metrics whose names
        end in "per_second" or "share_of_peak".
        """
        return {}

    def own_steps_per_loop(self, global_batch_size: int | None, of_epoch: bool = False) -> int | None:
        """Returns the controller's `steps_per_loop` where it is not given; None leaves it to looplib.

        Args:
          global_batch_size: examples of a step.
          of_epoch: whether a training by epochs needs the steps of one, for which the data may be read once.
        """
        del global_batch_size, of_epoch
        return None


class OwnLoop(abc.ABC, Generic[Specification, Loop]):
    """A trainer or evaluator whose steps run in its own loop, which looplib calls.

    Its type parameters are classes of `loop.contracts`, in a room above this one.
    """

    @abc.abstractmethod
    def make_loop(self, specification: Specification) -> Loop:
        """Returns the loop that the controller calls for this object."""


def rates_of(task: object) -> Mapping[str, float]:
    """Returns the `Adapter.rates` of a trainer or an evaluator; {} without any."""
    return task.rates if isinstance(task, Adapter) else {}


class Trainer(abc.ABC):
    """A model, its optimizer, its data and one step on one replica.

    A subclass creates its model, optimizer and Keras metrics in `__init__`, under `strategy.scope()`, and keeps them as
    attributes. The `Controller` finds them there and saves and restores them by attribute name. It does not save plain
    Python and numpy attributes.

    Attributes:
      global_batch_size: int, the number of examples of a step over all replicas; set by the `Controller`.
      global_step: int64 scalar `tf.Variable`, the number of steps done; set by the `Controller`, which owns it. Read it
        in `step_fn` (for a schedule, say), never assign it.
      run_seed: int, the run's seed; set by the `Controller`.
      batches: "per_replica", or "global" where `dataset` makes batches of `global_batch_size` examples, as those for
        Keras `fit` and `experimental_distribute_dataset` are. looplib divides these among the replicas; a smaller one,
        such as the last of the data, too, and `global_mean` divides by its number of examples. `context` then describes
        one pipeline for one replica: each worker makes all batches, and the same (give a shuffle a seed).
      batch_size_varies: bool, whether `dataset` makes batches of other sizes than `per_replica_batch_size`, such
        as by tokens; the loss is then not for `global_mean`. Default False: other sizes end the run, static
        ones before the first step.
      uneven_parts: bool, whether the tensors of a global batch may have different numbers of rows, such as labelled and
        unlabelled examples. On several replicas and in micro-batches each is then divided by its own rows, and the
        first one tells the number of examples, which weighs the results of a replica. Default False: these are refused.
      loss_name: str, the training metric that the guards look at; default "loss".

    Example:
        ```python
        class Line(looplib.Trainer):
            def __init__(self):
                self.model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
                self.optimizer = keras.optimizers.SGD(0.1)
                self.x = np.linspace(-1, 1, 256, dtype="float32")[:, None]

            def dataset(self, context):
                return context.indices(256).map(lambda i: (tf.gather(self.x, i), tf.gather(2 * self.x, i)))

            def step_fn(self, inputs):
                x, y = inputs
                with tf.GradientTape() as tape:
                    losses = tf.square(self.model(x, training=True) - y)[:, 0]
                    loss = self.global_mean(losses)
                variables = self.model.trainable_variables
                self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
                return {"loss": losses}
        ```
    """

    global_batch_size: int = _LATER
    global_step: tf.Variable = _LATER
    run_seed: int = 0
    batches: str = "per_replica"
    batch_size_varies: bool = False
    uneven_parts: bool = False
    loss_name: str = "loss"
    training_phases: Any = None  # of a `GradientTrainer` with phases
    step_method: ClassVar[str] = "step_fn"  # what a subclass defines, for messages
    base_initialized: bool = True  # False where a base class has an `__init__` that was not called

    @abc.abstractmethod
    def dataset(self, context: InputContext, /) -> DatasetLike:
        """Returns the training data of one input pipeline.

        Args:
          context: `looplib.InputContext` with the batch sizes, this pipeline's index and count, and the seed.

        Returns:
          A `tf.data.Dataset` of batches of `context.per_replica_batch_size` examples: built on `context.indices(n)`
          for an order that is the same on any number of replicas and resumes at once, or any other pipeline. A dataset
          that ends is trained to its end by `train(steps=-1)`, up to the last step that has a batch for every replica
          (with `batches = "global"`, to the last example).
        """

    @abc.abstractmethod
    def step_fn(self, inputs: Any, /) -> Mapping[str, Any]:
        """Does one training step on one replica: forward, backward, update.

        Args:
          inputs: one batch of this replica, with the structure of `dataset`'s elements.

        Returns:
          A dict from metric name to a tensor `[per_replica_batch, ...]` (one value an example, averaged over
          examples), `looplib.mean`, `looplib.total`, `looplib.last` or a Keras metric object that was updated.
          The controller reduces each exactly over steps, replicas and workers. Names of metrics that looplib adds
          to reports, such as `epoch` and `examples`, are refused.
        """

    def initialize(self) -> None:
        """Loads pre-trained initial weights; does nothing by default.

        Called once, under `strategy.scope()`, when a run starts without a checkpoint of its own, after all variables
        exist and before the first step. A run that resumes never calls it.
        """

    def export(self) -> Exported:
        """Returns what `Controller.export` and `--mode=export` write where there is no evaluator.

        By default the Keras model that is the attribute `model`, in inference.
        """
        return of_model(type(self).__name__, vars(self).get("model"))

    def loop_end(self, metrics: dict[str, Any]) -> Mapping[str, Any]:
        """Finishes the metrics of a loop; returns them unchanged by default.

        Args:
          metrics: dict from name to a Python number, or a numpy array for a `looplib.total` or `looplib.last` that is
            not a scalar.

        Returns:
          The dict to report, with numbers only: of Python, or scalars of numpy or TensorFlow, also Boolean ones, which
          are reported as 0 or 1. Derive numbers from arrays, and leave the arrays out.
        """
        return metrics

    @not_converted
    def step_seed(self, salt: int = 0) -> tf.Tensor:
        """Returns a seed of this step for `tf.random.stateless_*`; in `step_fn`.

        It is a function of the run's seed, the global step, the replica, the micro-batch and `salt`. A resumed run
        therefore draws the numbers of an uninterrupted one, and there is no state to save.

        Args:
          salt: int, another number for another draw in the same step.

        Returns:
          int32 tensor `[2]`.

        Example:
            ```python
            noise = tf.random.stateless_normal(tf.shape(x), seed=self.step_seed())
            ```
        """
        seed = tf.stack([tf.constant(self.run_seed, tf.int64), tf.cast(self.global_step, tf.int64)])
        replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int64)
        seed = tf.random.fold_in(tf.random.fold_in(seed, replica), tf.constant(salt, tf.int64))
        if (part := updates.micro_batch()) is not None:
            seed = tf.random.fold_in(seed, tf.cast(part, tf.int64))
        return tf.bitcast(seed, tf.int32)[:, 0] if seed.dtype == tf.int64 else seed

    def apply_gradients(
        self, optimizer: Any, grads_and_vars: Iterable[tuple[Any, Any]], *, summed: bool = False
    ) -> None:
        """Updates weights with the sum of the gradients over all replicas, as one device does; in `step_fn`.

        The guards see the gradients as each replica computed them. They are summed before the optimizer clips or
        accumulates them, also where it would sum afterwards itself. An optimizer that is an attribute of the trainer
        may as well be called by itself.

        Args:
          optimizer: Keras optimizer of either family.
          grads_and_vars: pairs of a gradient, of a loss by `global_mean`, and its variable.
          summed: whether the gradients are those of the global batch already, as `GradientTrainer` passes them.
        """
        updates.apply_gradients(optimizer, grads_and_vars, summed=summed)

    @not_converted
    def global_mean(self, values: Any, weights: Any = None) -> tf.Tensor:
        """Returns the sum of `values` over this replica divided by the global batch's examples, or its sum of weights.

        Optimizers sum gradients over replicas, so the sum is the gradient of the mean over the global batch, on any
        number of replicas.

        Args:
          values: float tensor `[per_replica_batch, ...]`; without weights, further dimensions are averaged.
          weights: real tensor that broadcasts to `values`, such as a mask of the real tokens. The result is then the
            sum of `values * weights` over this replica, divided by the sum of the weights over all replicas; a value
            whose weight is 0 is ignored. Default: each example counts alike.

        Returns:
          float32 scalar tensor (float64 for float64 values).

        Raises:
          UsageError: before a `Controller` has taken this trainer, because the global batch size is not yet known.
        """
        if self.global_batch_size is None:
            raise StepError(
                f"{type(self).__name__}.global_mean was called before a Controller took the trainer, so the global "
                "batch size is not known; build looplib.Controller(trainer=...) first, or set "
                "trainer.global_batch_size in a unit test"
            )
        values = tf.convert_to_tensor(values)
        if values.dtype != tf.float64:
            values = tf.cast(values, tf.float32)
        if weights is not None:
            weights = tf.stop_gradient(tf.broadcast_to(tf.cast(weights, values.dtype), tf.shape(values)))
            weights = updates.counted(weights)
            context = tf.distribute.get_replica_context()
            divisor = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.reduce_sum(weights))
            return tf.math.divide_no_nan(tf.reduce_sum(tf.math.multiply_no_nan(values, weights)), divisor)
        if values.shape.rank is None or values.shape.rank > 1:
            values = tf.reduce_mean(values, axis=tf.range(1, tf.rank(values)))
        share = updates.current()
        if share is None:
            return tf.reduce_sum(values) / tf.cast(self.global_batch_size, values.dtype)
        mean = tf.reduce_sum(values) / tf.cast(share.of, values.dtype)
        return tf.where(share.examples > 0, mean, tf.zeros_like(mean))


class Evaluator(abc.ABC):
    """A model, a data set that ends and one evaluation step on one replica.

    The model is the trainer's own object, kept under the same attribute name; an evaluation job that runs without a
    trainer restores it from the trainer's checkpoint by that name. Keras metrics belong to one evaluation: they are
    reset before it and are not part of a checkpoint.

    Args:
      model: the trainer's model, kept as the attribute `model`; None for a subclass that keeps its own attributes.

    Attributes:
      global_batch_size: int, examples of a step over all replicas; None takes the controller's.
      batches: "per_replica" or "global", see `Trainer`.
      uneven_parts: bool, see `Trainer`.
      predicts_only: bool, whether there is no data to evaluate on, so that an evaluation is refused. Default False.
      global_step: int64 scalar `tf.Variable`, the training steps that the weights have seen; set by the `Controller`.
      averages: `looplib.WeightAverages` of the trainer, under its attribute name; if set, the evaluation runs on the
        averaged weights. None by default.

    Example:
        ```python
        class LineError(looplib.Evaluator):
            def dataset(self, context):
                return context.indices(100).map(lambda i: tf.cast(i, tf.float32)[:, None] / 100)

            def step_fn(self, inputs):
                return {"error": tf.abs(self.model(inputs, training=False) - 2 * inputs)}
        ```
    """

    global_batch_size: int | None = None
    batches: str = "per_replica"
    uneven_parts: bool = False
    predicts_only: bool = False
    global_step: tf.Variable = _LATER
    averages: WeightAverages | None = None
    step_method: ClassVar[str] = "step_fn"  # as in a trainer
    base_initialized: bool = True  # as in a trainer

    def __init__(self, model: Any = None) -> None:
        if model is not None:
            self.model = model

    @abc.abstractmethod
    def dataset(self, context: InputContext, /) -> DatasetLike:
        """Returns the evaluation data of one input pipeline.

        Args:
          context: `looplib.InputContext`.

        Returns:
          A `tf.data.Dataset` of batches of at most `context.per_replica_batch_size` examples which ends. With
          `context.indices(n)` each example comes once for any number of replicas and workers; another pipeline takes
          its part by `dataset.shard(context.num_pipelines, context.pipeline_index)` and keeps its last, smaller batch.
        """

    @abc.abstractmethod
    def step_fn(self, inputs: Any, /) -> Mapping[str, Any]:
        """Evaluates one batch on one replica.

        Args:
          inputs: one batch of this replica; its batch may be smaller than the others, or empty, at the end. A replica
            with an empty batch takes part in a step that joins the replicas, such as by `all_reduce`. It adds no
            example to metrics. Any other step is left out there.

        Returns:
          A dict as `Trainer.step_fn` returns it. The number of examples is added as `examples`, counted from the
          first dimension of the first tensor of `inputs`.
        """

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager that an evaluation runs in, up to its report.

        For changes that are undone after the evaluation. By default the weights are exchanged with `averages`, if set.
        """
        return contextlib.nullcontext() if self.averages is None else self.averages.in_use()

    def predict_dataset(self, context: InputContext) -> DatasetLike:
        """Returns the data to predict for, such as new rows without labels; by default that of `dataset`.

        Args:
          context: as for `dataset`.
        """
        return self.dataset(context)

    def predict_checksum(self) -> str:
        """Returns a checksum of the data to predict for; "" if it is not known, as by default.

        With one, predictions that are continued or repeated in a folder are refused if the data has changed. Without,
        a change is found only in the number of examples and in the last record of what was written.
        """
        return ""

    def predict_fn(self, inputs: Any, /) -> Mapping[str, Any]:
        """Predicts for one batch on one replica, for `Controller.predict` and `--mode=predict`.

        Args:
          inputs: one batch of `predict_dataset`.

        Returns:
          A dict from name to a dense or ragged tensor `[batch, ...]` of numbers, booleans or strings, with a row for
          each example.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no predict_fn")

    def export(self) -> Exported:
        """Returns what `Controller.export` and `--mode=export` write; the evaluator decides it, if there is one.

        By default the Keras model that is the attribute `model`, in inference.
        """
        return of_model(type(self).__name__, vars(self).get("model"), self.averages)

    def collect(self, outputs: list[dict[str, Any]]) -> None:
        """Takes the values that a step returned as `looplib.each`; on the host, once a step, in order.

        Args:
          outputs: list with a dict for each replica that had examples, of all workers, from metric name to the
            structure of eager tensors that its `step_fn` returned.
        """
        raise NotImplementedError(f"{type(self).__name__}.step_fn returns looplib.each, and there is no collect")

    def loop_end(self, metrics: dict[str, Any]) -> Mapping[str, Any]:
        """Finishes the metrics of an evaluation; returns them unchanged by default. See `Trainer.loop_end`."""
        return metrics

"""Trainer: the class that a researcher subclasses to train a model."""

import abc
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import tensorflow as tf

from looplib.cluster import replicas, updates
from looplib.data.input_context import InputContext
from looplib.errors import StepError
from looplib.task import exported
from looplib.task.exported import Exported


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

    global_batch_size: int | None = None
    global_step: tf.Variable | None = None
    run_seed: int = 0
    batches: str = "per_replica"
    batch_size_varies: bool = False
    uneven_parts: bool = False
    loss_name: str = "loss"
    training_phases: Any = None  # of a `GradientTrainer` with phases
    step_method: ClassVar[str] = "step_fn"  # what a subclass defines, for messages

    @abc.abstractmethod
    def dataset(self, context: InputContext) -> tf.data.Dataset:
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
    def step_fn(self, inputs: Any) -> dict[str, Any]:
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
        return exported.of_model(type(self).__name__, vars(self).get("model"))

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

    @tf.autograph.experimental.do_not_convert
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
        if (part := replicas.micro_batch()) is not None:
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

    @tf.autograph.experimental.do_not_convert
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
            weights = replicas.counted(weights)
            context = tf.distribute.get_replica_context()
            divisor = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.reduce_sum(weights))
            return tf.math.divide_no_nan(tf.reduce_sum(tf.math.multiply_no_nan(values, weights)), divisor)
        if values.shape.rank is None or values.shape.rank > 1:
            values = tf.reduce_mean(values, axis=tf.range(1, tf.rank(values)))
        share = replicas.current()
        if share is None:
            return tf.reduce_sum(values) / tf.cast(self.global_batch_size, values.dtype)
        mean = tf.reduce_sum(values) / tf.cast(share.of, values.dtype)
        return tf.where(share.examples > 0, mean, tf.zeros_like(mean))

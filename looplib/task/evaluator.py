"""Evaluator: the class that a researcher subclasses to evaluate a model."""

import abc
import contextlib
from collections.abc import Mapping
from typing import Any, ClassVar

import tensorflow as tf

from looplib.data.input_context import InputContext
from looplib.task import exported
from looplib.task.averages import WeightAverages
from looplib.task.exported import Exported


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
    global_step: tf.Variable | None = None
    averages: WeightAverages | None = None
    step_method: ClassVar[str] = "step_fn"  # as in a trainer

    def __init__(self, model: Any = None) -> None:
        if model is not None:
            self.model = model

    @abc.abstractmethod
    def dataset(self, context: InputContext) -> tf.data.Dataset:
        """Returns the evaluation data of one input pipeline.

        Args:
          context: `looplib.InputContext`.

        Returns:
          A `tf.data.Dataset` of batches of at most `context.per_replica_batch_size` examples which ends. With
          `context.indices(n)` each example comes once for any number of replicas and workers; another pipeline takes
          its part by `dataset.shard(context.num_pipelines, context.pipeline_index)` and keeps its last, smaller batch.
        """

    @abc.abstractmethod
    def step_fn(self, inputs: Any) -> dict[str, Any]:
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

    def predict_fn(self, inputs: Any) -> dict[str, Any]:
        """Predicts for one batch on one replica, for `Controller.predict` and `--mode=predict`.

        Args:
          inputs: one batch of `dataset`, as in `step_fn`.

        Returns:
          A dict from name to a dense or ragged tensor `[batch, ...]` of numbers, booleans or strings, with a row for
          each example.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no predict_fn")

    def export(self) -> Exported:
        """Returns what `Controller.export` and `--mode=export` write; the evaluator decides it, if there is one.

        By default the Keras model that is the attribute `model`, in inference.
        """
        return exported.of_model(type(self).__name__, vars(self).get("model"), self.averages)

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

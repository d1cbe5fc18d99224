"""The data of workers that read by themselves, as the coordinator of a parameter server strategy sees it."""

import dataclasses
from typing import Any, Protocol

import tensorflow as tf

from looplib.data.stream import Stream


class MakesPipeline(Protocol):
    """Makes the pipeline of a worker; for the arguments see `InputContext`."""

    def __call__(
        self, pipeline_index: Any = 0, num_pipelines: int = 1, numbers: tf.data.Dataset | None = None
    ) -> tf.data.Dataset:
        """Makes the pipeline."""


@dataclasses.dataclass
class DataPosition:
    """A position in the data of a `RemoteStream`, which the loop advances.

    Attributes:
      step: number of steps before it.
      skipped: steps that a pipeline which is no function of the number of the batch leaves out to begin there.
    """

    step: int
    skipped: int


@dataclasses.dataclass(kw_only=True)
class RemoteStream(Stream):
    """A `Stream` for workers that read by themselves, each its own batches. Its iterators are `DataPosition`s.

    `dataset` was made on the coordinator, which reads only its properties.

    Attributes:
      make: makes the pipeline of a worker, in a `tf.function` there.
      by_number: whether that makes a batch for each number it is given.
    """

    make: MakesPipeline

    def __post_init__(self) -> None:
        context, cardinality = self.context(), int(self.dataset.cardinality())
        endless_or_all = (
            tf.data.INFINITE_CARDINALITY if self.training else context.asked.last.steps if context.asked.last else None
        )
        self.by_number = context.asked.positioned and cardinality == endless_or_all

    @property
    def training(self) -> bool:
        """Returns whether this is training data."""
        return self.renew is not None

    @property
    def element_spec(self) -> Any:
        """The spec of a batch; in a training, of (a batch, the number of steps before it: int64 scalar)."""
        spec = self.dataset.element_spec
        return (spec, tf.TensorSpec([], tf.int64)) if self.training else spec

    def iterate(self, position: bytes | None = None) -> DataPosition:
        """See `Stream`."""
        if self.start_step:
            others = "by a new pipeline on each worker, which skips its share of the batches"
            self._note(f"resumes after step {self.start_step} {'from its position' if self.by_number else others}")
        return DataPosition(self.start_step, self.skipped)

    def next_as_optional(self, iterator: DataPosition) -> tf.experimental.Optional:
        """Returns the first batch, always: the coordinator only checks whether there is one."""
        return iter(self.dataset).get_next_as_optional()

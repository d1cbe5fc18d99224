"""Examples for an exported function: batches of the evaluation data, or else of the training data, on the host."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.data.context import InputContext
from looplib.errors import ExportError
from looplib.loop.contracts import Request
from looplib.loop.loops import Loops
from looplib.task import reductions
from looplib.task.trainer import Evaluator, Trainer

MOST_EXAMPLES = 1000
MOST_BYTES = 1 << 28  # of their inputs

Inputs = dict[str, np.ndarray]  # one batch, by the names in the signature


@dataclasses.dataclass(frozen=True)
class ModelInputs:
    """Examples.

    Attributes:
      split: whose data they are of: the name of an evaluator, or "train".
      batches: their inputs.
    """

    split: str
    batches: list[Inputs]

    @property
    def examples(self) -> int:
        """How many they are."""
        return sum(_rows(batch) for batch in self.batches)

    def first(self, most: int) -> "ModelInputs":
        """Returns the first of them, at most so many."""
        return ModelInputs(self.split, list(_cut(self.batches, most)))

    def of_one_size(self, most: int) -> "ModelInputs":
        """Returns the first of them, at most so many, without batches of another size than the first one."""
        batches = self.first(most).batches
        return ModelInputs(self.split, [batch for batch in batches if _rows(batch) == _rows(batches[0])])


def _rows(batch: Inputs) -> int:
    return next(iter(batch.values())).shape[0]


def _cut(batches: list[Inputs], most: int) -> Iterator[Inputs]:
    for batch in batches:
        if most > 0:
            yield {name: value[:most] for name, value in batch.items()}
        most -= _rows(batch)


def take_samples(loops: Loops, split: str, task: Trainer | Evaluator, signature: Any, most: int) -> ModelInputs:
    """Returns the first examples of the data of a task, at most so many; all workers call it.

    Args:
      loops: the loops of the run.
      split: "train", or the name of the evaluator.
      task: the trainer or evaluator.
      signature: that of the exported function, whose specs have names.
      most: the number of examples.

    Raises:
      ExportError: if no part of a batch fits the signature.
    """
    sampling = _Sampling(task, signature)
    loop = loops.prediction_loop("export", sampling, 0)
    per_replica = loop.data.stream.properties.batch_size
    size = (per_replica or 1) * loops.strategy.num_replicas_in_sync
    try:
        for _ in range(-(-most // size)):  # as many in each worker
            ran = loop.run(Request(1), "evaluate")
            if ran.stopped or not ran.done:
                break
    finally:
        loop.close()
    return ModelInputs(split, list(_cut(sampling.taken, most)))


class _Sampling(Evaluator):
    """Takes the inputs of an exported function out of the data of a task.

    Args:
      task: has the data.
      signature: that of the function.

    Attributes:
      taken: the inputs so far, of at most `MOST_BYTES`.
    """

    def __init__(self, task: Trainer | Evaluator, signature: Any) -> None:
        self._task, self._signature = task, signature
        self._names = [spec.name for spec in tf.nest.flatten(signature)]
        self.taken: list[Inputs] = []
        self._bytes = 0
        self.batches = task.batches
        if isinstance(task, Evaluator):
            self.global_batch_size = task.global_batch_size

    def dataset(self, context: InputContext, /) -> tf.data.Dataset:
        """See `Evaluator`."""
        return self._task.dataset(context)

    def step_fn(self, inputs: Any, /) -> dict[str, Any]:
        """See `Evaluator`."""
        found = find_inputs(inputs, self._signature)
        if found is None:
            wanted = ", ".join(f"{spec.dtype.name} {spec.shape}" for spec in tf.nest.flatten(self._signature))
            raise ExportError(
                f"no part of a batch of {type(self._task).__name__}.dataset fits the inputs of the exported function "
                f"({wanted}); let dataset return (inputs, ...)"
            )
        specs = tf.nest.flatten(self._signature)
        return {"inputs": reductions.each([tf.cast(part, spec.dtype) for part, spec in zip(found, specs)])}

    def collect(self, outputs: list[dict[str, Any]]) -> None:
        """See `Evaluator`."""
        for output in outputs:
            batch = dict(zip(self._names, [part.numpy() for part in output["inputs"]]))
            if _rows(batch) and self._bytes < MOST_BYTES:
                self._bytes += sum(value.nbytes for value in batch.values())
                self.taken.append(batch)


@tf.autograph.experimental.do_not_convert
def find_inputs(batch: Any, signature: Any) -> list[tf.Tensor] | None:
    """Returns the tensors of a batch that fit a signature, flat; None if there are none.

    They are the batch itself, or its first part that fits; of a dict, the entries with the names of the inputs. A part
    of the types of the signature goes before one whose numbers would have to be converted.
    """
    specs = tf.nest.flatten(signature)
    parts = [batch, *(batch if isinstance(batch, (tuple, list)) else [])]
    named: list[Any] = []
    for part in parts:
        if isinstance(part, Mapping) and all(spec.name in part for spec in specs):
            named.append([part[spec.name] for spec in specs])
    for exact in (True, False):
        for part in [*parts, *named]:
            flat = tf.nest.flatten(part)
            alike = any(part is one for one in named) or _is_alike(part, signature)
            if alike and len(flat) == len(specs) and all(_fits(*pair, exact) for pair in zip(flat, specs)):
                return flat
    return None


def _is_alike(part: Any, signature: Any) -> bool:
    try:
        tf.nest.assert_same_structure(part, signature, check_types=False)
    except (ValueError, TypeError):
        return False
    return True


def _fits(tensor: Any, spec: tf.TensorSpec, exact: bool) -> bool:
    if not isinstance(tensor, tf.Tensor) or not spec.shape.is_compatible_with(tensor.shape):
        return False
    if tensor.shape.rank != spec.shape.rank:
        return False
    kinds = [dtype.is_floating or dtype.is_integer for dtype in (tensor.dtype, spec.dtype)]
    return tensor.dtype == spec.dtype or (not exact and all(kinds))

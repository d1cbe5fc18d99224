"""What looplib itself adds to the steps of each training."""

from looplib.data.stream import BatchProperties
from looplib.loop import example_checksum
from looplib.loop.base import Specification, StepAddition
from looplib.loop.batch_sizes import BatchSizes


def of_training(spec: Specification, batches: BatchProperties) -> list[StepAddition]:
    """Returns what is added to the steps of a training, of which the batches are known."""
    found: list[StepAddition] = []
    if example_checksum.enabled():
        found.append(example_checksum.ExampleChecksum())
    if not batches.sized:
        found.append(BatchSizes(spec.who, batches.batch_size, spec.strategy.num_replicas_in_sync))
    return found

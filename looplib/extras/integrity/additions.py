"""What looplib itself adds to the steps of each training, beside the actions that a program or a flag asks for."""

from looplib.data.stream import BatchProperties
from looplib.extras.integrity.batch_sizes import BatchSizes
from looplib.extras.stragglers import own_times
from looplib.extras.tools import example_checksum
from looplib.loop.base import Specification, StepAddition


def step_additions(spec: Specification, batches: BatchProperties) -> list[StepAddition]:
    """Returns what is added to the steps of a training, of which the batches are known."""
    found: list[StepAddition] = []
    if example_checksum.enabled():
        found.append(example_checksum.ExampleChecksum())
    if times := own_times.addition(spec):
        found.append(times)
    if not batches.sized:
        found.append(BatchSizes(spec.who, batches.batch_size, spec.strategy.num_replicas_in_sync))
    return found

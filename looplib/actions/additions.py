"""What looplib itself adds to each training, beside the actions that a program or a flag asks for."""

import tensorflow as tf

from looplib.actions.watching import Stragglers
from looplib.cluster.collectives import Workers
from looplib.data.stream import BatchProperties
from looplib.loop import example_checksum
from looplib.loop.base import Specification, StepAddition
from looplib.loop.batch_sizes import BatchSizes
from looplib.task.actions import Action


def run_actions(strategy: tf.distribute.Strategy) -> list[Action]:
    """Returns actions of a training, to be called before all others, which may save when they are called."""
    return [Stragglers(strategy)] if Workers(strategy).count > 1 else []


def step_additions(spec: Specification, batches: BatchProperties) -> list[StepAddition]:
    """Returns what is added to the steps of a training, of which the batches are known."""
    found: list[StepAddition] = []
    if example_checksum.enabled():
        found.append(example_checksum.ExampleChecksum())
    if not batches.sized:
        found.append(BatchSizes(spec.who, batches.batch_size, spec.strategy.num_replicas_in_sync))
    return found

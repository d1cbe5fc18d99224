"""A binary that remembers the example ids of each step in a variable, and may wait long for a data worker or not."""

import dataclasses
import os

import keras
import tensorflow as tf

import looplib
from looplib import launch
from looplib.data import service
from looplib.guards import watchdog

STEPS, BATCH, EXAMPLES = 300, 8, 50


@dataclasses.dataclass
class Config:
    """Settings of a test."""

    step_ops: int = 0  # work of a step, so that a test can interfere
    patience: float = 20.0  # seconds without a step, after which the data workers are asked


class Remembering(looplib.Trainer):
    """Sees ids."""

    def __init__(self, config: Config) -> None:
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        self.model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        self.seen = tf.Variable(tf.fill([STEPS, BATCH // replicas], tf.constant(-1, tf.int64)), trainable=False)
        self.at = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.config = config

    def dataset(self, context: looplib.InputContext) -> tf.data.Dataset:
        """Ids and what a data worker makes of them."""
        return context.indices(EXAMPLES).map(lambda ids: (ids, tf.cast(ids, tf.float32)))

    def step_fn(self, inputs: tuple[tf.Tensor, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Notes the ids, after some work."""
        ids, values = inputs
        work = tf.while_loop(lambda n, _: n < self.config.step_ops, lambda n, x: (n + 1, x * 0.5), (0, 1.0))[1]
        self.seen.assign(tf.tensor_scatter_nd_update(self.seen, self.at[None, None], ids[None]))
        self.at.assign_add(1)
        return {"loss": values + 0.0 * work}


def build(config: Config) -> tuple[Remembering, None]:
    """See `launch.run`."""
    watchdog._UNANSWERED, service._ANSWER = config.patience, min(config.patience, service._ANSWER)
    print(f"process {os.getpid()}", flush=True)
    return Remembering(config), None


if __name__ == "__main__":
    launch.run(
        build, Config(), train_steps=STEPS, global_batch_size=BATCH, steps_per_loop=10, checkpoint_interval=10,
    )  # fmt: skip

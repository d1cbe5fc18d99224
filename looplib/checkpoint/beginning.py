"""The start of a run without a checkpoint: initial values, or a checkpoint of another run."""

import os
from typing import Any

import tensorflow as tf
from absl import logging

from looplib import plugins
from looplib.checkpoint.policy import CheckpointPolicy
from looplib.task.trainer import Trainer

NUDGE = "LOOPLIB_NUDGE"  # of the environment: a number, by which `looplib check replicas` has initial weights changed


def begin(
    trainer: Trainer | None,
    objects: dict[str, Any],
    global_step: tf.Variable,
    policy: CheckpointPolicy,
    strategy: tf.distribute.Strategy,
) -> tuple[str | None, int]:
    """Gives a run its first state.

    Args:
      trainer: the trainer, or None for a run that only evaluates.
      objects: dict from attribute name to trackable object.
      global_step: the variable that counts training steps.
      policy: says where the values come from.
      strategy: the strategy of the trainer's variables.

    Returns:
      `(path, step)`: the checkpoint of another program that the run continues from, or None; and the global step.

    Raises:
      UsageError: if a checkpoint that the policy names does not fit.
    """
    if policy.continue_from:
        path, step = plugins.load("looplib.parts", "weights").continue_from(objects, global_step, policy.continue_from)
        logging.info("continuing from step %d of %s; the data starts from the beginning", step, path)
        return path, step
    if trainer:
        with strategy.scope():
            trainer.initialize()
        if policy.warm_start:
            plugins.load("looplib.parts", "weights").warm_start(objects, policy.warm_start)
        if os.environ.get(NUDGE):
            plugins.load("looplib.parts", "nudge")(strategy, objects)
    return None, 0

"""Moving statistics of batch normalization, computed again from batches of the training data."""

from typing import Any

import numpy as np
import tensorflow as tf

from looplib.base.messages import join_names
from looplib.compat import keras as _keras
from looplib.compat import tensorflow as _tf
from looplib.errors import ReplayError
from looplib.loop.contracts import Request
from looplib.replay.player import Player
from looplib.task.plain import as_array
from looplib.task.state import state_of, variables_of
from looplib.weights.loading import warm_start
from looplib.weights.restoring import objects_of


def recompute(player: Player, weights: str, steps: int) -> dict[str, np.ndarray]:
    """Computes the statistics that fit other weights, as stochastic weight averaging does.

    Each is the mean of what the batches have: of their means, and of their variances (Izmailov et al., 2018,
    arXiv:1803.05407, section 3.2; `torch.optim.swa_utils.update_bn`). The batches go through steps of the training
    itself, with all that belongs to them, from the beginning of the data on; then the updates are undone. Layers that
    the run has frozen keep their statistics.

    Args:
      player: of the run, before its first step.
      weights: path of the checkpoint with the weights.
      steps: number of batches.

    Returns:
      dict from the key in that checkpoint to the value, in the type of the variable.

    Raises:
      UsageError: for a trainer without batch normalization, too few batches, or a value that is not finite.
    """
    loop, task = player.loop, player.loop.task
    held = filter(_keras.is_batch_normalization, _keras.sublayers(list(vars(task).values())))
    layers = [layer for layer in held if layer.built]
    if not layers:
        raise ReplayError(f"{loop.who} has no layer of batch normalization; leave out --statistics_steps")
    state = state_of(task)
    warm_start(state, weights)
    statistics = [_keras.tf_variable(one) for layer in layers for one in (layer.moving_mean, layer.moving_variance)]
    own = {id(variable) for variable in statistics}
    others = [one for _, one in variables_of(state) if one.dtype.is_floating and id(one) not in own]
    before = [tf.identity(variable) for variable in others]
    for layer in layers:
        layer.momentum = 0.0  # each batch leaves its own mean and variance
    loop.retrace(join_names([layer.name for layer in layers]))
    loop.rewind(0)
    sums = [np.zeros(variable.shape, np.float64) for variable in statistics]
    for number in range(1, steps + 1):
        ran = loop.run(Request(1), "train")
        if not ran.finite or ran.done < 1:
            reason = "the data ends there" if ran.finite else "a value in it is not finite"
            raise ReplayError(f"batch {number} of {steps} cannot be used: {reason}; give another --statistics_steps")
        for total, variable in zip(sums, statistics):
            total += _over_replicas(variable)
        for variable, value in zip(others, before):
            variable.assign(value)
    keys = _keys(state, weights)
    values = [(total / steps).astype(variable.dtype.as_numpy_dtype) for total, variable in zip(sums, statistics)]
    return {keys[id(variable)]: value for variable, value in zip(statistics, values)}


def _over_replicas(variable: tf.Variable) -> np.ndarray:
    """Returns the mean over the replicas, each of which has seen its part of the batch."""
    parts = variable.values if isinstance(variable, tf.distribute.DistributedValues) else (variable,)
    return np.mean([as_array(part).astype(np.float64) for part in parts], axis=0)


def _keys(state: dict[str, Any], path: str) -> dict[int, str]:
    """Returns the key in a checkpoint of each variable here, by the variable's id."""
    graph = _tf.object_graph(tf.train.load_checkpoint(path))
    found = objects_of(graph, tf.train.Checkpoint(**state)).items()
    return {
        id(_keras.tf_variable(value)): attribute.checkpoint_key
        for number, value in found
        for attribute in graph.nodes[number].attributes
        if attribute.name == "VARIABLE_VALUE"
    }

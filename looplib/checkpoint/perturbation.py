"""Changes initial weights by their last bit, to measure how far rounding errors alone drive two runs apart.

`looplib check replicas` takes the distance of such a run from an unchanged one as the measure of rounding.
"""

import numpy as np
import tensorflow as tf

from looplib.base import orders
from looplib.task.state import variables_of

_BITS = {tf.float16: 10, tf.bfloat16: 7, tf.float32: 23, tf.float64: 52}  # of the fraction


def nudge(strategy: tf.distribute.Strategy, objects: dict[str, object]) -> None:
    """Changes each trainable weight by about one unit in the last place, up or down at random, if that is ordered.

    Args:
      strategy: under whose scope the weights were made.
      objects: dict from name to trackable object, the state of a run.
    """
    if not (number := orders.current().perturbation):
        return
    random = np.random.default_rng(number)  # decides the signs
    with strategy.scope():
        for _, variable in variables_of(objects):
            if variable.trainable and variable.dtype in _BITS:
                signs = tf.constant(random.choice([-1.0, 1.0], size=variable.shape), variable.dtype)
                variable.assign(variable.read_value() * (1 + signs * 2.0 ** -_BITS[variable.dtype]))

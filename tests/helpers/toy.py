"""A softmax regression small enough to train again in numpy, and what it should come to."""

import flat_config
import keras as keras3
import numpy as np
import tensorflow as tf

import looplib
from looplib.checkpoint.directory import RunDirectory
from looplib.checkpoint.saving import Checkpoints
from looplib.cluster.collectives import Workers

NUM_EXAMPLES, NUM_FEATURES, NUM_CLASSES = 37, 5, 3
_random = np.random.RandomState(0)
X = _random.randn(NUM_EXAMPLES, NUM_FEATURES).astype(np.float32)
Y = _random.randint(0, NUM_CLASSES, NUM_EXAMPLES).astype(np.int64)
KERNEL = _random.randn(NUM_FEATURES, NUM_CLASSES).astype(np.float32)


# What SGD is given besides; each changes every step of a training.
OPTIONS = {
    "clipnorm": dict(clipnorm=0.2),
    "clipvalue": dict(clipvalue=0.05),
    "global_clipnorm": dict(global_clipnorm=0.2),
    "weight_decay": dict(weight_decay=0.3, global_clipnorm=0.5),
    "average": dict(use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=3, clipnorm=0.5),
    "accumulate": dict(gradient_accumulation_steps=3, global_clipnorm=0.2),  # Keras 3 only
}


class Regression(looplib.Trainer):
    """Softmax regression that notes the order of its examples. Built under the strategy's scope."""

    def __init__(self, keras=keras3, optimizer="sgd", num_examples=NUM_EXAMPLES):
        self.model = keras.Sequential([keras.layers.InputLayer((NUM_FEATURES,)), keras.layers.Dense(NUM_CLASSES)])
        self.model.layers[-1].set_weights([KERNEL, np.zeros(NUM_CLASSES, np.float32)])
        make = {"sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9), "adam": lambda: keras.optimizers.Adam(0.05)}
        if optimizer in OPTIONS:
            make[optimizer] = lambda: keras.optimizers.SGD(0.1, momentum=0.9, **OPTIONS[optimizer])
        self.optimizer = make[optimizer]()
        self.accuracy = keras.metrics.SparseCategoricalAccuracy()
        self.num_examples = num_examples
        self.order = []

    def dataset(self, context):
        return context.indices(self.num_examples).map(lambda i: (i, tf.gather(X, i), tf.gather(Y, i)))

    def step_fn(self, inputs):
        ids, x, y = inputs
        with tf.GradientTape() as tape:
            logits = self.model(x, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
            loss = self.global_mean(losses)
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        self.accuracy.update_state(y, logits)
        return {"loss": losses, "keras_accuracy": self.accuracy, "ids": looplib.total(self._in_global_batch(ids))}

    def _in_global_batch(self, ids):
        """[global batch]: this replica's ids at their places, 0 elsewhere; the sum over replicas is the order."""
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        size = tf.shape(ids)[0]
        before = replica * size
        padded = tf.pad(ids, [[before, self.global_batch_size - size - before]])
        return tf.ensure_shape(padded, [self.global_batch_size])

    def loop_end(self, metrics):
        """Keeps the ids, which come one step a loop, and reports the rest."""
        self.order.append(metrics.pop("ids"))
        return metrics

    def weights(self):
        return [np.array(weight) for weight in self.model.get_weights()]


class RegressionEvaluator(looplib.Evaluator):
    """Evaluates the regression on the first `num_examples` examples."""

    def __init__(self, model, num_examples=NUM_EXAMPLES):
        self.model = model
        self.num_examples = num_examples

    def dataset(self, context):
        return context.indices(self.num_examples).map(lambda i: (tf.gather(X, i), tf.gather(Y, i)))

    def step_fn(self, inputs):
        x, y = inputs
        logits = self.model(x, training=False)
        return {"accuracy": tf.equal(tf.argmax(logits, 1), y)}


def build(strategy, keras=keras3, optimizer="sgd"):
    """Returns (trainer, evaluator) under the strategy's scope."""
    with strategy.scope():
        trainer = Regression(keras, optimizer)
        return trainer, RegressionEvaluator(trainer.model)


def controller(strategy, trainer, evaluator=None, **settings):
    """A quiet controller of one step a loop and a global batch of 8."""
    settings = {"global_batch_size": 8, "steps_per_loop": 1, "writers": [], **settings}
    return flat_config.controller(trainer=trainer, evaluator=evaluator, strategy=strategy, **settings)


def _softmax(z):
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def numpy_losses_and_weights(order, optimizer, keras=keras3):
    """Trains the same regression in float64 numpy on the given global batches.

    Args:
      order: the ids of each global batch.
      optimizer: "sgd", "adam" or a name in `OPTIONS`.
      keras: averages of tf_keras start with the first weights, those of Keras 3 with the first updated ones.

    Returns:
      (loss of each step before its update, [kernel, bias] after the last).
    """
    options = OPTIONS.get(optimizer, {})
    every, overwrite = options.get("gradient_accumulation_steps", 1), options.get("ema_overwrite_frequency", 10**9)
    kernel, bias = KERNEL.astype(np.float64), np.zeros(NUM_CLASSES)
    parameters = [kernel, bias]
    first, second, held = ([np.zeros_like(p) for p in parameters] for _ in range(3))
    averages = list(parameters)
    losses = []
    for step, ids in enumerate(order, 1):
        x, y = X[ids].astype(np.float64), np.eye(NUM_CLASSES)[Y[ids]]
        probabilities = _softmax(x @ parameters[0] + parameters[1])
        losses.append(-np.log((probabilities * y).sum(1)).mean())
        error = (probabilities - y) / len(ids)
        held = [sum(pair) for pair in zip(held, [x.T @ error, error.sum(0)])]
        if step % every:
            continue
        gradients, held = _clipped([gradient / every for gradient in held], options), [0, 0]
        for i, gradient in enumerate(gradients):
            if optimizer != "adam":
                parameters[i] = parameters[i] * (1 - 0.1 * options.get("weight_decay", 0))
                first[i] = 0.9 * first[i] - 0.1 * gradient
                parameters[i] = parameters[i] + first[i]
            else:
                first[i] = 0.9 * first[i] + 0.1 * gradient
                second[i] = 0.999 * second[i] + 0.001 * gradient**2
                # Keras adds epsilon before the bias correction, the "epsilon hat" of Kingma and Ba (2014), section 2.
                rate = 0.05 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
                parameters[i] = parameters[i] - rate * first[i] / (np.sqrt(second[i]) + 1e-7)
            momentum = 0 if step == 1 and keras is keras3 else options.get("ema_momentum", 0)
            averages[i] = momentum * averages[i] + (1 - momentum) * parameters[i]
        if step % overwrite == 0:
            parameters = list(averages)
    return np.array(losses), parameters


def _clipped(gradients, options):
    norms = [np.sqrt((gradient**2).sum()) for gradient in gradients]
    if limit := options.get("clipnorm"):
        return [gradient * min(1, limit / norm) for gradient, norm in zip(gradients, norms)]
    if limit := options.get("global_clipnorm"):
        return [gradient * min(1, limit / np.hypot(*norms)) for gradient in gradients]
    limit = options.get("clipvalue", np.inf)
    return [np.clip(gradient, -limit, limit) for gradient in gradients]


def numpy_accuracy(weights, num_examples=NUM_EXAMPLES):
    """The accuracy of [kernel, bias] on the first examples."""
    logits = X[:num_examples] @ weights[0] + weights[1]
    return float((logits.argmax(1) == Y[:num_examples]).mean())


def checkpoints(folder, objects):
    """The checkpoints of a run directory, as a training without a controller."""
    policy, workers = looplib.CheckpointPolicy(), Workers(tf.distribute.get_strategy())
    run = RunDirectory(str(folder), policy, looplib.Start(), True, workers, lambda: run.release())
    return Checkpoints(run, objects, lambda: None)

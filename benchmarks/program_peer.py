"""One XLA program of TensorFlow over the steps of a loop, written by hand: the limit of what `loop="xla"` can reach.

Adam is written out, data stays on the device, and only the ids of the examples are fed. It has no guards.
"""

import tensorflow as tf

from benchmarks.workloads import means, shuffled_ids, timed

_BETA_1, _BETA_2, _EPSILON, _RATE = 0.9, 0.999, 1e-7, 1e-3  # those of Keras


def program_loop(task):
    """Builds the loop of a multi-layer perceptron: one call of the program for `steps_per_loop` steps."""
    x, y = task.arrays
    weights = [tf.Variable(weight.numpy()) for weight in task.model.trainable_variables]
    moments = [[tf.Variable(tf.zeros_like(weight)) for weight in weights] for _ in range(2)]
    number = tf.Variable(0.0)
    ids = shuffled_ids(task.examples)

    def step(batch):
        with tf.GradientTape() as tape:
            losses, right = _losses(weights, tf.gather(x, batch), tf.gather(y, batch))
            loss = tf.reduce_mean(losses)
        number.assign_add(1.0)
        rate = _RATE * tf.sqrt(1 - _BETA_2**number) / (1 - _BETA_1**number)
        for gradient, weight, first, second in zip(tape.gradient(loss, weights), weights, *moments):
            first.assign_add((gradient - first) * (1 - _BETA_1))
            second.assign_add((gradient**2 - second) * (1 - _BETA_2))
            weight.assign_sub(rate * first / (tf.sqrt(second) + _EPSILON))
        return tf.stack([tf.reduce_sum(losses), tf.reduce_sum(right), tf.cast(tf.size(losses), tf.float32)])

    @tf.function(jit_compile=True)
    def program(batches):
        sums = tf.zeros(3)
        for i in tf.range(task.steps_per_loop):
            sums += step(batches[i])
        return sums

    def run(steps):
        for _ in range(steps // task.steps_per_loop):
            batches = ids(task.steps_per_loop * task.workload.batch).reshape(task.steps_per_loop, -1)
            metrics = means(program(tf.constant(batches)))
        return metrics

    return timed(run, lambda: float(tf.reduce_mean(_losses(weights, *task.some_examples())[0])))


def _losses(weights, x, y):
    for weight, bias in zip(weights[:-2:2], weights[1:-2:2]):
        x = tf.nn.relu(x @ weight + bias)
    logits = x @ weights[-2] + weights[-1]
    right = tf.cast(tf.equal(tf.argmax(logits, axis=1), y), tf.float32)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits), right

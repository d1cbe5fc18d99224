"""A classifier as a user of Orbit writes it, after orbit/examples/single_task."""

import numpy as np
import orbit
import tensorflow as tf
import tf_keras
import toy


def data(batch=8, shuffled=True):
    pipeline = tf.data.Dataset.from_tensor_slices((toy.X, toy.Y))
    if shuffled:
        pipeline = pipeline.shuffle(toy.NUM_EXAMPLES, seed=1)
    return pipeline.batch(batch, drop_remainder=shuffled)


class Classifier(orbit.StandardTrainer):
    """Built under the strategy's scope; shuffled data that never ends unless it is given other."""

    def __init__(self, train_dataset=None, options=None, counts=1, keras=tf_keras):
        self.strategy = tf.distribute.get_strategy()
        if train_dataset is None:
            train_dataset = orbit.utils.make_distributed_dataset(self.strategy, lambda: data().repeat())
        self.model = keras.Sequential(
            [keras.layers.InputLayer((toy.NUM_FEATURES,)), keras.layers.Dense(toy.NUM_CLASSES)]
        )
        self.model.layers[-1].set_weights([toy.KERNEL, np.zeros(toy.NUM_CLASSES, np.float32)])
        self.optimizer = keras.optimizers.Adam(0.05)
        self.global_step = orbit.utils.create_global_step()
        self.train_loss = keras.metrics.Mean("training_loss", dtype=tf.float32)
        self.accuracy = keras.metrics.SparseCategoricalAccuracy("accuracy")
        self.counts = counts
        super().__init__(train_dataset, options)

    def train_loop_begin(self):
        self.train_loss.reset_state()
        self.accuracy.reset_state()

    def train_step(self, iterator):
        def step_fn(inputs):
            x, y = inputs
            with tf.GradientTape() as tape:
                logits = self.model(x, training=True)
                loss = self.loss(x, y, logits)
                scaled = loss / self.strategy.num_replicas_in_sync
            variables = self.model.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(scaled, variables), variables))
            self.train_loss.update_state(loss)
            self.accuracy.update_state(y, logits)

        self.strategy.run(step_fn, args=(next(iterator),))
        self.global_step.assign_add(self.counts)

    def loss(self, x, y, logits):
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))

    def train_loop_end(self):
        return {"training_loss": self.train_loss.result(), "train": {"accuracy": self.accuracy.result()}}

    def weights(self):
        return [np.array(weight) for weight in self.model.get_weights()]


class ClassifierEvaluator(orbit.StandardEvaluator):
    """Evaluates all examples, the last batch being smaller."""

    def __init__(self, model, eval_dataset=None, keras=tf_keras, options=None):
        self.strategy = tf.distribute.get_strategy()
        if eval_dataset is None:
            eval_dataset = orbit.utils.make_distributed_dataset(self.strategy, lambda: data(shuffled=False))
        self.model = model
        self.metrics = [keras.metrics.SparseCategoricalAccuracy("accuracy")]
        super().__init__(eval_dataset, options)

    def eval_begin(self):
        for metric in self.metrics:
            metric.reset_state()

    def eval_step(self, iterator):
        def step_fn(inputs):
            x, y = inputs
            self.metrics[0].update_state(y, self.model(x, training=False))

        self.strategy.run(step_fn, args=(next(iterator),))

    def eval_end(self):
        return {metric.name: metric.result() for metric in self.metrics}

"""The program that the runs in goldens/ were begun with: earlier.py MODEL FAMILY REPLICAS MODEL_DIR STEPS."""

import sys

import keras
import numpy as np
import tensorflow as tf
import tf_keras

import looplib

X = np.random.default_rng(0).normal(size=(96, 8)).astype("float32")
Y = (X.sum(1) > 0).astype("int64")


def build(name, family):
    layers = family.layers
    parts = [layers.Dense(8, "relu"), layers.BatchNormalization(), layers.Dropout(0.2), layers.Dense(2)]
    if name == "seq":
        return family.Sequential([family.Input((8,)), *parts])

    class Sub(family.Model):
        def __init__(self):
            super().__init__()
            self.blocks = parts

        def call(self, inputs, training=False):
            for block in self.blocks:
                changes = isinstance(block, (layers.BatchNormalization, layers.Dropout))
                inputs = block(inputs, training=training) if changes else block(inputs)
            return inputs

    model = Sub()
    model(X[:1])
    return model


class Trainer(looplib.GradientTrainer):
    def __init__(self, name, family):
        super().__init__(build(name, family), family.optimizers.Adam(0.01), average_decay=0.9)

    def dataset(self, context):
        return context.indices(96).map(lambda i: (tf.gather(X, i), tf.gather(Y, i)))

    def loss_fn(self, inputs):
        logits = self.model(inputs[0], training=True)
        return tf.nn.sparse_softmax_cross_entropy_with_logits(inputs[1], logits)


def main(name, family, replicas, model_dir, steps):
    family = {"keras": keras, "tf_keras": tf_keras}[family]
    strategy = tf.distribute.get_strategy()
    if int(replicas) > 1:
        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * int(replicas))
        strategy = tf.distribute.MirroredStrategy([f"CPU:{number}" for number in range(int(replicas))])
    family.utils.set_random_seed(3)
    if family is tf_keras:
        tf_keras.backend.experimental.enable_tf_random_generator()
    with strategy.scope():
        trainer = Trainer(name, family)
    policy = looplib.CheckpointPolicy(every_steps=10)
    with looplib.Controller(
        looplib.RunConfig(global_batch_size=16, steps_per_loop=5),
        trainer=trainer,
        strategy=strategy,
        model_dir=model_dir,
        checkpoints=policy,
    ) as controller:  # fmt: skip
        controller.train(int(steps))
        print("restored from", controller.restored_from)
    np.savez(model_dir + ".npz", *trainer.model.get_weights(), *(value.numpy() for value in trainer.averages.values))


if __name__ == "__main__":
    main(*sys.argv[1:])

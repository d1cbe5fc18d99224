"""Predicts the last column of a CSV file: `python -m examples.regression --model_dir=/tmp/regression`."""

import keras
import numpy as np
import tensorflow as tf

import looplib

TRAIN, TEST = np.split(np.loadtxt("examples/diabetes.csv", np.float32, delimiter=",", skiprows=1), [350])


class Regression(looplib.GradientTrainer):
    def __init__(self):
        scale = keras.layers.Normalization(mean=TRAIN.mean(0)[:-1], variance=TRAIN.var(0)[:-1])
        model = keras.Sequential([keras.Input((10,)), scale, keras.layers.Dense(32, "relu"), keras.layers.Dense(1)])
        super().__init__(model, keras.optimizers.Adam(0.01))

    def dataset(self, context):
        return context.resident(TRAIN)

    def loss_fn(self, rows):
        return tf.square(self.model(rows[:, :-1], training=True)[:, 0] - rows[:, -1])


class Errors(looplib.Evaluator):
    def dataset(self, context):
        return context.resident(TEST)

    def step_fn(self, rows):
        return {"error": tf.abs(self.model(rows[:, :-1], training=False)[:, 0] - rows[:, -1])}


if __name__ == "__main__":
    looplib.launch.run(lambda _: (trainer := Regression(), Errors(trainer.model)), train_steps=500, eval_interval=100)

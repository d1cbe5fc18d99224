"""The trainer: a compiled Keras model, with the arguments of `fit`."""

import keras
import looplib

from my_project import data
from my_project.model import make_model
from my_project.settings import Config


def make_trainer(config: Config) -> looplib.KerasTrainer:
    """Returns the trainer with its model."""
    model = make_model(config)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(config.learning_rate), loss, metrics=["accuracy"])
    features, classes = data.read(config, "train")
    return looplib.KerasTrainer(model, features, classes)

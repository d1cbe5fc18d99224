"""The model. To train your own, return it here: logits [batch, classes] for features [batch, columns]."""

import keras

from my_project import data
from my_project.settings import Config


def make_model(config: Config) -> keras.Model:
    """Returns the model with its initial weights."""
    features, classes = data.read(config, "train")
    return keras.Sequential(
        [
            keras.Input(features.shape[1:]),
            keras.layers.Normalization(mean=features.mean(axis=0), variance=features.var(axis=0)),
            keras.layers.Dense(config.width, "relu"),
            keras.layers.Dense(config.width, "relu"),
            keras.layers.Dense(int(classes.max()) + 1),
        ]
    )

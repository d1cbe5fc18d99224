"""The model. To train your own, return it here: logits [batch, classes] for features [batch, columns]."""

import keras
import numpy as np

from my_project import data
from my_project.settings import Config


def make_model(config: Config) -> keras.Model:
    """Returns the model with its initial weights."""
    features, classes = data.read(config, "train")
    variance = np.where(np.ptp(features, axis=0) > 0, features.var(axis=0), 1)  # a constant column is not scaled
    return keras.Sequential(
        [
            keras.Input(features.shape[1:]),
            keras.layers.Normalization(mean=features.mean(axis=0), variance=variance),
            keras.layers.Dense(config.width, "relu"),
            keras.layers.Dense(config.width, "relu"),
            keras.layers.Dense(int(classes.max()) + 1),
        ]
    )

"""Twelve compiled models in the manner of the Keras guides, each small, with made data and the arguments of its fit.

Each function takes `keras` or `tf_keras` and returns `(model, arguments)`. As a binary it trains one of them:
`python tests/programs/keras_scripts.py --config.script=cnn --model_dir=...`.
"""

import dataclasses
import importlib

import numpy as np
import tensorflow as tf

import looplib
from looplib import launch

EXAMPLES, BATCH, EPOCHS = 49, 16, 3  # the last batch of an epoch has one


def _noise(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=(EXAMPLES, *shape)).astype("float32")


def _labels(classes, seed=1):
    return np.random.default_rng(seed).integers(0, classes, EXAMPLES)


def _sparse(keras):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def mlp(keras):
    """MNIST by a multi-layer perceptron."""
    layers = keras.layers
    inputs = keras.Input((28, 28))
    hidden = layers.Dense(16, activation="relu", kernel_regularizer=keras.regularizers.L2(1e-2))(
        layers.Flatten()(inputs)
    )
    model = keras.Model(inputs, layers.Dense(10)(hidden))
    model.compile(keras.optimizers.Adam(0.01), _sparse(keras), metrics=["accuracy"])
    return model, dict(x=_noise(28, 28), y=_labels(10))


def cnn(keras):
    """MNIST by convolutions."""
    layers = keras.layers
    model = keras.Sequential([layers.InputLayer((12, 12, 1)), layers.Conv2D(4, 3, activation="relu")])
    for layer in (layers.MaxPooling2D(), layers.Flatten(), layers.Dense(10, activation="softmax")):
        model.add(layer)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model, dict(x=_noise(12, 12, 1), y=_labels(10), validation_data=(_noise(12, 12, 1, seed=2), _labels(10, 3)))


def text(keras):
    """Reviews, padded, by the mean of embeddings."""
    layers = keras.layers
    inputs = keras.Input((10,), dtype="int32")
    embedded = layers.Embedding(50, 8, mask_zero=True)(inputs)
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(layers.GlobalAveragePooling1D()(embedded)))
    model.compile(keras.optimizers.RMSprop(0.01), "binary_crossentropy", metrics=["accuracy"])
    return model, dict(x=np.random.default_rng(4).integers(0, 50, (EXAMPLES, 10)), y=_labels(2))


def regression(keras):
    """A number, of a model that is not built yet, with example weights."""
    x = _noise(5)
    model = keras.Sequential([keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], weighted_metrics=["mse"])
    return model, dict(x=x, y=x.sum(axis=1), sample_weight=np.linspace(0, 2, EXAMPLES).astype("float32"))


def multi_output(keras):
    """Two inputs, two outputs, loss weights."""
    layers = keras.layers
    first, second = keras.Input((4,), name="first"), keras.Input((3,), name="second")
    hidden = layers.Dense(8, activation="relu")(layers.Concatenate()([first, second]))
    outputs = {"price": layers.Dense(1, name="price")(hidden), "kind": layers.Dense(3, name="kind")(hidden)}
    model = keras.Model({"first": first, "second": second}, outputs)
    losses = {"price": "mse", "kind": _sparse(keras)}
    model.compile("adam", losses, loss_weights={"price": 0.5, "kind": 2.0}, metrics={"kind": ["accuracy"]})
    return model, dict(
        x={"first": _noise(4), "second": _noise(3, seed=5)}, y={"price": _noise(1, seed=6), "kind": _labels(3)}
    )


def custom_train_step(keras):
    """A subclass with a training step and a metric of its own, without a compiled loss."""

    class Model(keras.Model):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.mean_loss, self.error = keras.metrics.Mean(name="loss"), keras.metrics.MeanAbsoluteError(name="mae")

        @property
        def metrics(self):
            return [self.mean_loss, self.error]

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                predicted = self(x, training=True)
                loss = tf.reduce_mean(tf.square(y - predicted[:, 0]))
                scaled = loss / tf.distribute.get_replica_context().num_replicas_in_sync
            gradients = tape.gradient(scaled, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
            self.mean_loss.update_state(loss, sample_weight=tf.shape(x)[0])
            self.error.update_state(y[:, None], predicted)
            return {metric.name: metric.result() for metric in self.metrics}

    inputs = keras.Input((5,))
    model = Model(inputs, keras.layers.Dense(1)(keras.layers.Dense(8, activation="tanh")(inputs)))
    model.compile(keras.optimizers.SGD(0.05))
    return model, dict(x=_noise(5), y=_noise(5).sum(axis=1))


def subclassed(keras):
    """A subclass that is not built, with a loss of its own beside the compiled one."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden, self.out = keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)

        def call(self, inputs):
            hidden = self.hidden(inputs)
            self.add_loss(1e-2 * tf.reduce_mean(tf.square(hidden)))
            return self.out(hidden)

    model = Model()
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model, dict(x=_noise(5), y=_noise(1, seed=7))


def class_weights(keras):
    """Rare classes that weigh more."""
    model = keras.Sequential([keras.layers.InputLayer((6,)), keras.layers.Dense(3)])
    model.compile(keras.optimizers.Adagrad(0.1), _sparse(keras), metrics=["accuracy"])
    return model, dict(x=_noise(6), y=_labels(3), class_weight={0: 1.0, 1: 5.0, 2: 0.5})


def time_series(keras):
    """The next value, by a recurrent network."""
    layers = keras.layers
    model = keras.Sequential([layers.InputLayer((7, 2)), layers.LSTM(6), layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mae")
    return model, dict(x=_noise(7, 2), y=_noise(1, seed=8))


def autoencoder(keras):
    """Inputs as targets, and batch normalization (whose statistics differ between replicas)."""
    layers = keras.layers
    hidden = layers.Dense(4, use_bias=False)  # whose gradient would be rounding alone, which Adam makes large
    model = keras.Sequential([layers.InputLayer((12,)), hidden, layers.BatchNormalization(), layers.Dense(12)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model, dict(x=_noise(12), y=_noise(12))


def segmentation(keras):
    """A class for each pixel."""
    layers = keras.layers
    model = keras.Sequential([layers.InputLayer((8, 8, 3)), layers.Conv2D(4, 3, strides=2, padding="same")])
    model.add(layers.Conv2DTranspose(2, 3, strides=2, padding="same"))
    model.compile(keras.optimizers.Adam(0.01), _sparse(keras), metrics=["accuracy"])
    return model, dict(x=_noise(8, 8, 3), y=np.random.default_rng(9).integers(0, 2, (EXAMPLES, 8, 8, 1)))


def embedding(keras):
    """Ratings of films by people, as products of two embeddings; the data is a tuple of inputs."""
    layers = keras.layers
    user, film = keras.Input((1,), dtype="int32"), keras.Input((1,), dtype="int32")
    vectors = [layers.Flatten()(layers.Embedding(9, 4)(inputs)) for inputs in (user, film)]
    model = keras.Model((user, film), layers.Dot(1)(vectors))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model, dict(x=(_labels(9)[:, None], _labels(9, seed=10)[:, None]), y=_noise(1, seed=11))


SCRIPTS = {
    function.__name__: function
    for function in (mlp, cnn, text, regression, multi_output, custom_train_step, subclassed, class_weights, time_series,
                     autoencoder, segmentation, embedding)
}  # fmt: skip


def build(name, keras):
    """Returns the model of a script and its arguments; always with the same first weights."""
    keras.utils.set_random_seed(3)
    return SCRIPTS[name](keras)


def fitted(name, keras, **others):
    """Returns (weights, history) after fit."""
    model, arguments = build(name, keras)
    history = model.fit(**arguments, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0, **others)
    return [np.array(variable) for variable in model.trainable_variables], history.history


@dataclasses.dataclass
class Config:
    script: str = "mlp"
    keras: str = "keras"
    shuffle: bool = True


def _build(config):
    model, arguments = build(config.script, importlib.import_module(config.keras))
    trainer = looplib.KerasTrainer(model, **arguments, shuffle=config.shuffle)
    return trainer, trainer.evaluator() if "validation_data" in arguments else None


if __name__ == "__main__":
    launch.run(_build, Config(), train_steps=20, global_batch_size=16, eval_interval=10)

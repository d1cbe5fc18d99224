"""Programs with packages for tf_keras in the manner of their tutorials: Recommenders, Model Optimization, Hub; rows of the matrix.

Their packages are imported by the rows, so that the others need none. Recommenders takes tf_keras from `tf.keras`, so
that its rows need the environment variable TF_USE_LEGACY_KERAS=1.
"""

import functools
import tempfile

import numpy as np
import tensorflow as tf
from fit_rows import BATCH, labels, noise, rows_of, sparse_loss
from fit_steps import LAST_BATCH

NAMES = [f"name{number}" for number in range(9)]
GENRES = [f"genre{number}" for number in range(6)]


def _ratings():
    """Returns batches of made ratings: who, what, and how good."""
    parts = {"user": np.array(NAMES)[labels(9)], "item": np.array(GENRES)[labels(6, seed=2)]}
    parts["rating"] = labels(5, 1, seed=3).astype("float32") + 1
    return tf.data.Dataset.from_tensor_slices(parts).batch(BATCH)


def _tower(keras, vocabulary):
    layers = keras.layers
    return keras.Sequential([layers.StringLookup(vocabulary=vocabulary), layers.Embedding(len(vocabulary) + 1, 4)])


def tfrs_retrieval(keras):
    """Two towers of TensorFlow Recommenders with its `Retrieval`: the other items of the batch are the wrong ones"""
    import tensorflow_recommenders as tfrs

    class Towers(tfrs.Model):
        def __init__(self):
            super().__init__()
            self.user, self.item = _tower(keras, NAMES), _tower(keras, GENRES)
            candidates = tf.data.Dataset.from_tensor_slices(GENRES).batch(4).map(self.item)
            self.task = tfrs.tasks.Retrieval(metrics=tfrs.metrics.FactorizedTopK(candidates, ks=(1, 3)))

        def compute_loss(self, inputs, training=False):
            return self.task(self.user(inputs["user"]), self.item(inputs["item"]), compute_metrics=not training)

    model = Towers()
    model.compile(keras.optimizers.Adagrad(0.1))
    return model, dict(x=_ratings(), validation_data=_ratings())


def tfrs_ranking(keras):
    """A ranking of TensorFlow Recommenders with its `Ranking`, by the ratings"""
    import tensorflow_recommenders as tfrs

    class Ranking(tfrs.Model):
        def __init__(self):
            super().__init__()
            self.user, self.item = _tower(keras, NAMES), _tower(keras, GENRES)
            self.ratings = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
            self.task = tfrs.tasks.Ranking(
                keras.losses.MeanSquaredError(), metrics=[keras.metrics.RootMeanSquaredError()]
            )

        def call(self, inputs):
            return self.ratings(tf.concat([self.user(inputs["user"]), self.item(inputs["item"])], axis=1))

        def compute_loss(self, inputs, training=False):
            return self.task(labels=inputs["rating"], predictions=self(inputs))

    model = Ranking()
    model.compile(keras.optimizers.Adagrad(0.1))
    return model, dict(x=_ratings(), validation_data=_ratings())


def _images(keras):
    layers = keras.layers
    parts = [layers.Conv2D(4, 3, activation="relu"), layers.MaxPooling2D(2), layers.Flatten(), layers.Dense(3)]
    return keras.Sequential([layers.InputLayer((8, 8, 1)), *parts])


def qat(keras):
    """Quantization-aware training: `quantize_model` of Model Optimization"""
    import tensorflow_model_optimization as tfmot

    model = tfmot.quantization.keras.quantize_model(_images(keras))
    model.compile(keras.optimizers.Adam(0.003), sparse_loss(keras), metrics=["accuracy"])
    return model, dict(x=noise(8, 8, 1), y=labels(3), validation_data=(noise(8, 8, 1, seed=3), labels(3, seed=4)))


def pruning(keras):
    """Pruning to half of the weights by `prune_low_magnitude` of Model Optimization, with its `UpdatePruningStep`"""
    import tensorflow_model_optimization as tfmot

    sparsity = tfmot.sparsity.keras
    schedule = sparsity.PolynomialDecay(0.2, 0.5, begin_step=0, end_step=4, frequency=1)
    model = sparsity.prune_low_magnitude(_images(keras), pruning_schedule=schedule)
    model.compile(keras.optimizers.Adam(0.003), sparse_loss(keras), metrics=["accuracy"])
    return model, dict(x=noise(8, 8, 1), y=labels(3), callbacks=[sparsity.UpdatePruningStep()])


def pruning_begun(keras):
    """The same, whose pruning step is set before the trainer is made"""
    model, arguments = pruning(keras)
    for layer in model.layers:
        if isinstance(layer, type(model.layers[0])):  # a wrapper of a layer that is pruned
            layer.pruning_step.assign(0)
    return model, arguments


@functools.cache
def _module(kind):
    """Returns a folder with a made module, which exists as long as the process."""
    shape = (16, 4) if kind == "texts" else (12, 4)
    table = tf.Variable(np.random.default_rng(0).normal(size=shape).astype("float32"), name="table")

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
    def texts(sentences):
        words = tf.strings.split(sentences)
        vectors = tf.gather(table, tf.strings.to_hash_bucket_fast(words.values, 16))
        return tf.math.segment_mean(vectors, words.value_rowids())

    @tf.function(input_signature=[tf.TensorSpec([None, 8, 8, 3]), tf.TensorSpec([], tf.bool)])
    def images(pixels, training):
        patches = tf.image.extract_patches(pixels, [1, 2, 2, 1], [1, 2, 2, 1], [1, 1, 1, 1], "VALID")
        return tf.reduce_mean(tf.nn.relu(tf.matmul(patches, table)), axis=[1, 2])

    module = tf.train.Checkpoint(variables=[table], trainable_variables=[table], regularization_losses=[])
    module.__call__ = texts if kind == "texts" else images
    folder = tempfile.TemporaryDirectory()
    tf.saved_model.save(module, folder.name)
    return folder


def hub_module_texts(keras):
    """A classifier of texts on a trainable `KerasLayer` of TensorFlow Hub, whose module gets strings"""
    import tensorflow_hub as hub

    layer = hub.KerasLayer(_module("texts").name, input_shape=[], dtype=tf.string, trainable=True)
    model = keras.Sequential([layer, keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), keras.losses.BinaryCrossentropy(from_logits=True), metrics=["accuracy"])
    texts = np.array([f"{NAMES[first]} {GENRES[second]}" for first, second in zip(labels(9), labels(6))])
    y = labels(2, 1).astype("float32")
    return model, dict(x=tf.data.Dataset.from_tensor_slices((texts, y)).batch(BATCH))


def hub_module_images(keras):
    """A new head on a frozen `KerasLayer` of TensorFlow Hub, whose module gets images and `training`"""
    import tensorflow_hub as hub

    layers = keras.layers
    features = hub.KerasLayer(_module("images").name, input_shape=(8, 8, 3), trainable=False)
    model = keras.Sequential([layers.InputLayer((8, 8, 3)), features, layers.Dense(3)])
    model.compile(keras.optimizers.Adam(0.01), sparse_loss(keras), metrics=["accuracy"])
    return model, dict(x=noise(8, 8, 3), y=labels(3), validation_data=(noise(8, 8, 3, seed=3), labels(3, seed=4)))


def _of(*packages):
    return dict(families=("tf_keras",), needs=packages)


_LOSSES = dict.fromkeys(("loss", "total_loss", "val_loss", "val_total_loss"), LAST_BATCH)
_RECOMMENDERS = dict(**_of("tensorflow_recommenders"), not_compared=_LOSSES)
ROWS = rows_of(
    (tfrs_retrieval, _RECOMMENDERS), (tfrs_ranking, _RECOMMENDERS), (qat, _of("tensorflow_model_optimization")),
    (pruning, _of("tensorflow_model_optimization")), (pruning_begun, _of("tensorflow_model_optimization")), (hub_module_texts, _of("tensorflow_hub")),
    (hub_module_images, _of("tensorflow_hub")),
)  # fmt: skip

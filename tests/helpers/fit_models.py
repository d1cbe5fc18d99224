"""Compiled models of the kinds that people train with `fit`, with the training step of Keras; rows of the matrix."""

import numpy as np
import tensorflow as tf
from fit_rows import BATCH, EXAMPLES, labels, noise, padded, rows_of, sparse_loss

RANDOM = "Layers that draw random numbers, such as dropout, draw different numbers for the parts of a batch"
STATISTICS = "Batch normalization uses the statistics of each replica's own examples"


def _dense(keras, outputs=1, features=5, **arguments):
    """A small network of one input."""
    layers = keras.layers
    return keras.Sequential(
        [layers.InputLayer((features,)), layers.Dense(8, "tanh"), layers.Dense(outputs, **arguments)]
    )


def _regression(keras, model, optimizer=None, loss="mse", **others):
    model.compile(optimizer or keras.optimizers.SGD(0.1), loss, **others)
    return model, dict(x=noise(5), y=noise(1, seed=1))


def scalar_loss(keras):
    """A loss function that returns the mean of the batch."""
    return _regression(keras, _dense(keras), loss=lambda y, found: tf.reduce_mean(tf.square(y - found)))


def summed_loss(keras):
    """A loss with `reduction="sum"`."""
    loss = keras.losses.MeanSquaredError(reduction="sum")
    return _regression(keras, _dense(keras), keras.optimizers.SGD(0.01), loss)


def loss_class(keras):
    """A loss that is a class, and is not a mean of its own."""

    class Focal(keras.losses.Loss):
        def call(self, y_true, y_pred):
            right = tf.where(y_true > 0, y_pred, 1 - y_pred)
            return tf.reduce_mean(-tf.square(1 - right) * tf.math.log(right), axis=-1)

    model = _dense(keras, activation="sigmoid")
    model.compile(keras.optimizers.Adam(0.01), Focal(), metrics=["accuracy"])
    return model, dict(x=noise(5), y=labels(2, 1).astype("float32"))


def masked_scalar_loss(keras):
    """A loss function that returns the mean over the tokens of the batch that are no padding, as of a translator."""

    def masked(y, logits):
        losses = sparse_loss(keras, reduction="none")(y, logits)
        mask = tf.cast(y > 0, losses.dtype)
        return tf.reduce_sum(losses * mask) / tf.reduce_sum(mask)

    layers = keras.layers
    model = keras.Sequential([layers.InputLayer((6,), dtype="int32"), layers.Embedding(9, 4), layers.Dense(9)])
    model.compile(keras.optimizers.SGD(0.5), masked)
    return model, dict(x=padded(9, 6), y=padded(9, 6))


def masked_sequence(keras):
    """A class for each token by an LSTM, with the mask of an embedding."""
    layers = keras.layers
    inputs = keras.Input((6,), dtype="int32")
    hidden = layers.LSTM(4, return_sequences=True)(layers.Embedding(9, 4, mask_zero=True)(inputs))
    model = keras.Model(inputs, layers.Dense(3)(hidden))
    model.compile(keras.optimizers.SGD(0.5), sparse_loss(keras), weighted_metrics=["accuracy"])
    return model, dict(x=padded(9, 6), y=labels(3, 6))


def transformer(keras):
    """A classifier of texts by attention, with positions and layer normalization."""
    layers = keras.layers
    inputs = keras.Input((6,), dtype="int32")
    hidden = layers.Embedding(9, 8)(inputs)
    hidden = layers.LayerNormalization()(hidden + layers.MultiHeadAttention(2, 4)(hidden, hidden))
    model = keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(hidden)))
    model.compile(keras.optimizers.SGD(0.1), sparse_loss(keras), metrics=["accuracy"])
    return model, dict(x=labels(9, 6), y=labels(3))


def stateful(keras):
    """A stateful LSTM, of batches of a fixed size."""
    layers = keras.layers
    model = keras.Sequential([layers.InputLayer(batch_input_shape=(BATCH, 3, 2)) if keras.__name__ == "tf_keras"
                              else layers.InputLayer(batch_shape=(BATCH, 3, 2))])  # fmt: skip
    model.add(layers.LSTM(4, stateful=True))
    model.add(layers.Dense(1))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model, dict(x=noise(3, 2, examples=2 * BATCH), y=noise(1, seed=1, examples=2 * BATCH))


def weighted_outputs(keras):
    """Two outputs, each with weights of its examples."""
    inputs = keras.Input((5,))
    outputs = [keras.layers.Dense(1, name="left")(inputs), keras.layers.Dense(1, name="right")(inputs)]
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.1), ["mse", "mae"], loss_weights=[1.0, 0.5])
    weights = [np.linspace(0, 2, EXAMPLES).astype("float32"), np.ones(EXAMPLES, "float32")]
    return model, dict(x=noise(5), y=[noise(1, seed=1), noise(1, seed=2)], sample_weight=weights)


def soft_labels(keras):
    """Labels that are probabilities, with class weights."""
    model = _dense(keras, 3, activation="softmax")
    model.compile(keras.optimizers.SGD(0.1), "categorical_crossentropy", metrics=["accuracy"])
    y = np.random.default_rng(4).dirichlet([1, 1, 1], EXAMPLES).astype("float32")
    return model, dict(x=noise(5), y=y, class_weight={0: 1.0, 1: 4.0, 2: 0.5})


def soft_binary(keras):
    """One probability as a label, with class weights."""
    model = _dense(keras, activation="sigmoid")
    model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy")
    y = np.linspace(0.05, 0.95, EXAMPLES).astype("float32")[:, None]
    return model, dict(x=noise(5), y=y, class_weight={0: 1.0, 1: 4.0})


def own_metric(keras):
    """A metric whose result is its variable, as Keras's documentation writes them."""

    class Positives(keras.metrics.Metric):
        def __init__(self, name="positives"):
            super().__init__(name=name)
            self.count = self.add_weight(name="count", shape=(), initializer="zeros")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.count.assign(self.count + tf.reduce_sum(tf.cast(y_pred > 0.5, tf.float32)))

        def result(self):
            return self.count

    model = _dense(keras, activation="sigmoid")
    model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", metrics=[Positives()])
    return model, dict(x=noise(5), y=labels(2, 1))


def maximum_metric(keras):
    """A metric that keeps a maximum."""

    class Largest(keras.metrics.Metric):
        def __init__(self, name="largest"):
            super().__init__(name=name)
            self.value = self.add_weight(name="value", shape=(), initializer="zeros")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.value.assign(tf.maximum(self.value, tf.reduce_max(tf.abs(y_true))))

        def result(self):
            return tf.identity(self.value)

    return _regression(keras, _dense(keras), metrics=[Largest()])


def listed_metrics(keras):
    """Metric objects in a list: AUC, precision, recall."""
    model = _dense(keras, activation="sigmoid")
    metrics = [keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="precision"), "accuracy"]
    model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", metrics=metrics)
    return model, dict(x=noise(5), y=labels(2, 1), validation_data=(noise(5, seed=3), labels(2, 1, seed=4)))


def normalization(keras):
    """A Normalization that the first program adapts, and later ones do not."""
    layers = keras.layers
    model = keras.Sequential([layers.InputLayer((5,)), layers.Normalization(), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model, dict(x=5 * noise(5) + 3, y=noise(1, seed=1))


def _adapt_at_first(model, first):
    if first:
        model.layers[0].adapt(5 * noise(5) + 3)


TEXTS = np.array([f"word{i % 5} word{i % 3} rare{i}" for i in range(EXAMPLES)])


def text_vectorization(keras):
    """Strings, by an adapted TextVectorization in the model."""
    layers = keras.layers
    vectorize = layers.TextVectorization(max_tokens=12, output_sequence_length=4)
    vectorize.adapt(TEXTS)
    inputs = keras.Input((), dtype="string")
    hidden = layers.GlobalAveragePooling1D()(layers.Embedding(12, 4)(vectorize(inputs)))
    model = keras.Model(inputs, layers.Dense(1)(hidden))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model, dict(x=tf.data.Dataset.from_tensor_slices((TEXTS, noise(1))).batch(BATCH))


def other_vocabulary(keras):
    """A StringLookup that later programs adapt with other words."""
    layers = keras.layers
    inputs = keras.Input((1,), dtype="string")
    lookup = layers.StringLookup(max_tokens=5, output_mode="one_hot", pad_to_max_tokens=True)
    model = keras.Model(inputs, layers.Dense(1)(lookup(inputs)))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    words = np.array(["red", "green", "blue", "white"])[labels(4, 1)]
    return model, dict(x=tf.data.Dataset.from_tensor_slices((words, noise(1))).batch(BATCH))


def _adapt_otherwise_later(model, first):
    words = ["red", "red", "green", "green", "blue", "white"]
    model.layers[1].adapt(np.array(words if first else ["white", "white", *words[::-1]]))


def feature_tables(keras):
    """Features of a table, each by a lookup, a hash or bins of its own."""
    layers = keras.layers
    columns = {"color": keras.Input((1,), dtype="string", name="color"), "age": keras.Input((1,), name="age")}
    columns["place"] = keras.Input((1,), dtype="int64", name="place")
    lookup = layers.StringLookup(vocabulary=["red", "green"], output_mode="one_hot")
    found = [lookup(columns["color"]), layers.Discretization([-1.0, 0.0, 1.0], output_mode="one_hot")(columns["age"])]
    found.append(layers.Hashing(4, output_mode="one_hot")(columns["place"]))
    model = keras.Model(columns, layers.Dense(1, activation="sigmoid")(layers.Concatenate()(found)))
    model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", metrics=["accuracy"])
    x = {"color": np.array(["red", "green", "blue"])[labels(3, 1)], "age": noise(1), "place": labels(100, 1)}
    return model, dict(x=tf.data.Dataset.from_tensor_slices((x, labels(2, 1, seed=5))).batch(BATCH))


def batch_norm(keras):
    """Convolutions with batch normalization, and an evaluation."""
    layers = keras.layers
    model = keras.Sequential([layers.InputLayer((6, 6, 1)), layers.Conv2D(4, 3), layers.BatchNormalization()])
    for layer in (layers.ReLU(), layers.GlobalAveragePooling2D(), layers.Dense(3)):
        model.add(layer)
    model.compile(keras.optimizers.SGD(0.1), sparse_loss(keras), metrics=["accuracy"])
    held_out = (noise(6, 6, 1, seed=3), labels(3, seed=4))
    return model, dict(x=noise(6, 6, 1), y=labels(3), validation_data=held_out)


def synchronized_norm(keras):
    """Batch normalization with the statistics of all replicas."""
    layers = keras.layers
    norm = layers.BatchNormalization(synchronized=True)
    model = keras.Sequential([layers.InputLayer((5,)), layers.Dense(8), norm, layers.Dense(1)])
    return _regression(keras, model)


def dropout(keras):
    """Dropout."""
    layers = keras.layers
    return _regression(keras, keras.Sequential([layers.InputLayer((5,)), layers.Dropout(0.5), layers.Dense(1)]))


def frozen_base(keras):
    """A frozen base with batch normalization in inference, and a new head."""
    layers = keras.layers
    base = keras.Sequential([layers.InputLayer((5,)), layers.Dense(8), layers.BatchNormalization()])
    base.trainable = False
    inputs = keras.Input((5,))
    return _regression(keras, keras.Model(inputs, layers.Dense(1)(base(inputs, training=False))))


def activity(keras):
    """A layer whose outputs are regularized."""
    layers = keras.layers
    hidden = layers.Dense(8, activity_regularizer=keras.regularizers.L2(0.1))
    return _regression(keras, keras.Sequential([layers.InputLayer((5,)), hidden, layers.Dense(1)]))


def spectral_norm(keras):
    """Layers with spectral normalization, and a constraint."""
    layers = keras.layers
    hidden = layers.SpectralNormalization(layers.Dense(8))
    last = layers.Dense(1, kernel_constraint=keras.constraints.MaxNorm(0.5))
    return _regression(keras, keras.Sequential([layers.InputLayer((5,)), hidden, last]))


def weight_norm(keras):
    """A layer of one's own, with weights of a length that is learned."""

    class WeightNorm(keras.layers.Layer):
        def build(self, input_shape):
            self.v = self.add_weight(name="v", shape=(input_shape[-1], 4), initializer="glorot_uniform")
            self.g = self.add_weight(name="g", shape=(4,), initializer="ones")

        def call(self, inputs):
            return tf.matmul(inputs, self.g * tf.math.l2_normalize(tf.convert_to_tensor(self.v), axis=0))

    layers = keras.layers
    return _regression(keras, keras.Sequential([layers.InputLayer((5,)), WeightNorm(), layers.Dense(1)]))


def added_loss(keras):
    """A variational autoencoder, by a layer that adds a loss; the noise comes from the data."""

    class Sampling(keras.layers.Layer):
        def call(self, inputs):
            mean, log_variance, chance = inputs
            kl = 1 + log_variance - tf.square(mean) - tf.exp(log_variance)
            self.add_loss(-0.5 * tf.reduce_mean(kl))
            return mean + tf.exp(0.5 * log_variance) * chance

    layers = keras.layers
    inputs = (keras.Input((6,)), keras.Input((2,)))
    hidden = layers.Dense(8, "relu")(inputs[0])
    code = Sampling()([layers.Dense(2)(hidden), layers.Dense(2)(hidden), inputs[1]])
    model = keras.Model(inputs, layers.Dense(6)(code))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model, dict(x=(noise(6), noise(2, seed=1)), y=noise(6))


def ctc(keras):
    """Texts in images: an endpoint layer adds the loss, a number for each example, as in the public example."""

    class Endpoint(keras.layers.Layer):
        def call(self, y_true, y_pred):
            rows = tf.shape(y_true)[0]
            self.add_loss(
                tf.nn.ctc_loss(tf.cast(y_true, tf.int32), tf.transpose(y_pred, [1, 0, 2]), tf.fill([rows], 2),
                               tf.fill([rows], 6), blank_index=0)
            )  # fmt: skip
            return y_pred

    layers = keras.layers
    images, target = keras.Input((6, 4), name="image"), keras.Input((2,), name="label")
    logits = layers.Dense(5)(layers.Bidirectional(layers.GRU(4, return_sequences=True))(images))
    model = keras.Model({"image": images, "label": target}, Endpoint()(target, logits))
    model.compile(keras.optimizers.SGD(0.01))
    return model, dict(x={"image": noise(6, 4), "label": (labels(4, 2) + 1).astype("float32")})


def clipped(keras):
    """Gradients that are clipped by the norm of each variable."""
    return _regression(keras, _dense(keras), keras.optimizers.SGD(0.5, clipnorm=0.05))


def globally_clipped(keras):
    """Gradients that are clipped by their common norm, weight decay, and a schedule of learning rates."""
    rate = keras.optimizers.schedules.CosineDecay(0.05, 10)
    return _regression(keras, _dense(keras), keras.optimizers.AdamW(rate, global_clipnorm=0.05))


def accumulated(keras):
    """Gradients that the optimizer accumulates over two steps."""
    return _regression(keras, _dense(keras), keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))


def averaged(keras):
    """An optimizer that keeps averages of the weights."""
    return _regression(keras, _dense(keras), keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9))


def mixed_precision(keras):
    """Layers in float16, with a scaled loss."""
    layers = keras.layers
    scaled = keras.mixed_precision if keras.__name__ == "tf_keras" else keras.optimizers
    policy = keras.mixed_precision.Policy if keras.__name__ == "tf_keras" else keras.dtype_policies.DTypePolicy
    hidden = layers.Dense(8, "tanh", dtype=policy("mixed_float16"))
    model = keras.Sequential([layers.InputLayer((5,)), hidden, layers.Dense(1, dtype="float32")])
    return _regression(keras, model, scaled.LossScaleOptimizer(keras.optimizers.SGD(0.1)))


def ragged(keras):
    """A data set of ragged rows."""
    layers = keras.layers
    rows = tf.ragged.constant([[1 + i % 4] * (1 + i % 3) for i in range(EXAMPLES)])
    inputs = keras.Input((None,), dtype="int32", ragged=True)
    hidden = layers.GlobalAveragePooling1D()(layers.Embedding(6, 4)(inputs))
    model = keras.Model(inputs, layers.Dense(1)(hidden))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model, dict(x=tf.data.Dataset.from_tensor_slices((rows, noise(1))).batch(BATCH))


def sparse(keras):
    """A data set of sparse rows."""
    layers = keras.layers
    dense = noise(5) * (noise(5, seed=3) > 0)
    rows = tf.sparse.from_dense(dense)
    model = keras.Sequential([keras.Input((5,), sparse=True), layers.Dense(4), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model, dict(x=tf.data.Dataset.from_tensor_slices((rows, noise(1))).batch(BATCH))


def no_targets(keras):
    """A data set whose targets are None; the model adds its loss."""

    class Reconstruction(keras.layers.Layer):
        def call(self, inputs):
            self.add_loss(tf.reduce_mean(tf.square(inputs[0] - inputs[1])))
            return inputs[1]

    inputs = keras.Input((6,))
    code = keras.layers.Dense(6)(keras.layers.Dense(2)(inputs))
    model = keras.Model(inputs, Reconstruction()([inputs, code]))
    model.compile(keras.optimizers.SGD(0.1))
    return model, dict(x=tf.data.Dataset.from_tensor_slices(noise(6)).batch(BATCH).map(lambda rows: (rows, None)))


def tuple_inputs(keras):
    """Inputs in a tuple, without targets; the model adds its loss."""

    class Distance(keras.layers.Layer):
        def call(self, inputs):
            self.add_loss(tf.reduce_mean(tf.square(inputs[0] - inputs[1])))
            return inputs[1]

    inputs = (keras.Input((4,)), keras.Input((4,)))
    model = keras.Model(inputs, Distance()([inputs[0], keras.layers.Dense(4)(inputs[1])]))
    model.compile(keras.optimizers.SGD(0.1))
    return model, dict(x=(noise(4), noise(4, seed=1)))


def unknown_length(keras):
    """A data set whose length is not known, as it is filtered."""
    model, arguments = _regression(keras, _dense(keras))
    rows = tf.data.Dataset.from_tensor_slices((arguments["x"], arguments["y"]))
    return model, dict(x=rows.filter(lambda x, y: x[0] > -1.0).batch(BATCH))


def uneven(keras):
    """A last batch that cannot be divided among replicas."""
    model, _ = _regression(keras, _dense(keras), metrics=["mae"])
    return model, dict(x=noise(5, examples=21), y=noise(1, seed=1, examples=21))


def unbuilt(keras):
    """A subclass without Input layers, built by its first batch, that draws at random from a generator of its own."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.out = keras.layers.Dense(1)
            self.noise = keras.layers.GaussianNoise(0.1, seed=3)

        def call(self, inputs, training=False):
            return self.out(self.noise(inputs, training=training))

    return _regression(keras, Model())


ROWS = rows_of(
    scalar_loss, summed_loss, loss_class, masked_scalar_loss, masked_sequence, transformer, stateful, weighted_outputs,
    soft_labels, soft_binary, own_metric, maximum_metric, listed_metrics, (normalization, dict(prepare=_adapt_at_first)),
    text_vectorization, (other_vocabulary, dict(prepare=_adapt_otherwise_later)), feature_tables, (batch_norm, dict(said={"replicas": STATISTICS})), synchronized_norm,
    (dropout, dict(said={"replicas": RANDOM})), frozen_base, activity, (spectral_norm, dict(families=("keras",))), weight_norm, added_loss, ctc,
    clipped, globally_clipped, (accumulated, dict(families=("keras",))),
    (averaged, dict(after=lambda model: model.optimizer.finalize_variable_values(model.trainable_variables))),
    (mixed_precision, dict(tolerance=5e-3)), ragged, sparse, no_targets,
    tuple_inputs, unknown_length, uneven, (unbuilt, dict(said={"replicas": RANDOM})),
)  # fmt: skip

"""What the contestants of a comparison share: the model, its initial weights, the optimizer, the data and the step."""

import dataclasses
import time
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Workload:
    """What every contestant of a table does.

    Attributes:
      title: what it is, in words.
      model: makes the Keras model.
      arrays: makes the data, a pair of numpy arrays: inputs and int64 labels.
      batch: examples of a step.
      loop: steps of one call into the device, after which metrics are read; 0 for an evaluation.
      checked: steps after which all contestants must have come to the same.
      tolerance: relative difference that counts as the same; float32 sums in another order, and XLA's, differ by less.
      contestants: the names of those that take part, of `contestants.CONTESTANTS`; an optional one is left out if its
        package is missing.
      family: the Keras that the model is of, "keras" or "tf_keras".
    """

    title: str
    model: Callable
    arrays: Callable
    batch: int
    loop: int
    contestants: tuple[str, ...]
    checked: int = 100
    tolerance: float = 1e-3
    family: str = "keras"


# Models.


def mlp(*widths):
    """Returns a function that makes a multi-layer perceptron of these widths, from its input's to its output's."""
    features, *hidden, classes = widths

    def make():
        layers = [keras.layers.Dense(width, activation="relu") for width in hidden]
        return keras.Sequential([keras.Input((features,)), *layers, keras.layers.Dense(classes)])

    return make


def cnn(channels=16):
    """Makes a network of two convolutions for images of 28x28."""
    layers = []
    for _ in range(2):
        layers += [keras.layers.Conv2D(channels, 3, padding="same", activation="relu"), keras.layers.MaxPooling2D()]
    return keras.Sequential([keras.Input((28, 28, 1)), *layers, keras.layers.Flatten(), keras.layers.Dense(10)])


class Positions(keras.layers.Layer):
    """Adds a learnt vector to each position of a sequence."""

    def build(self, shape):
        """Makes the vectors."""
        self.vectors = self.add_weight(shape=shape[1:], initializer="random_normal")

    def call(self, inputs):
        """Adds them."""
        return inputs + self.vectors


def transformer(vocabulary=1000, length=32, width=64, heads=4, blocks=2):
    """Makes a causal language model with layer normalization before attention and feed-forward layers."""
    layers = keras.layers
    tokens = keras.Input((length,), dtype="int32")
    x = Positions()(layers.Embedding(vocabulary, width)(tokens))
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(heads, width // heads)(y, y, use_causal_mask=True)
        y = layers.LayerNormalization()(x)
        x = x + layers.Dense(width)(layers.Dense(4 * width, activation="relu")(y))
    return keras.Model(tokens, layers.Dense(vocabulary)(layers.LayerNormalization()(x)))


def resnet18():
    """Makes the Model Garden's ResNet-18 for images of 32x32, and a dense layer for 10 classes on top."""
    import tf_keras
    from official.vision.modeling import backbones

    backbone = backbones.ResNet(18, tf_keras.layers.InputSpec(shape=[None, 32, 32, 3]))
    features = backbone(backbone.inputs)
    pooled = tf_keras.layers.GlobalAveragePooling2D()(features[max(features)])
    return tf_keras.Model(backbone.inputs, tf_keras.layers.Dense(10)(pooled))


# Data, which there is something to learn from.


def classified(examples, *shape, classes=10):
    """Returns a function that makes normal features and the labels that a random linear map gives them."""

    def make():
        rng = np.random.default_rng(0)
        features = rng.normal(size=(examples, *shape)).astype("float32")
        scores = features.reshape(examples, -1) @ rng.normal(size=(np.prod(shape), classes))
        return features, np.argmax(scores, axis=1)

    return make


def sentences(examples=2000, length=32, vocabulary=1000):
    """Makes sequences in which nine of ten tokens follow from the one before, and as labels the next tokens."""
    rng = np.random.default_rng(0)
    following = rng.permutation(vocabulary)
    tokens = rng.integers(vocabulary, size=(examples, length + 1))
    for i in range(length):
        tokens[:, i + 1] = np.where(rng.random(examples) < 0.9, following[tokens[:, i]], tokens[:, i + 1])
    return tokens[:, :-1].astype("int32"), tokens[:, 1:]


_PEERS = ("bare", "orbit", "keras", "keras, XLA", "step a call")
_ALL = ("looplib", "looplib, graph", "looplib, own input", "looplib, unguarded", *_PEERS)
_LIMITS = ("one program", "jax", "lightning")
_FEW = ("looplib", "looplib, graph", "bare", "orbit", "keras", "keras, XLA")
_COMPILED = ("looplib, KerasTrainer", "looplib, KerasTrainer, graph", "bare", "keras", "keras, XLA")
_SMALL = dict(model=mlp(64, 64, 10), arrays=classified(10_000, 64), batch=32)

WORKLOADS = {
    "W1": Workload(
        "trains an MLP of 784-128-128-10, batch 128",
        mlp(784, 128, 128, 10), classified(10_000, 784), 128, 100, (*_ALL, *_LIMITS),
    ),
    "W2": Workload("trains an MLP of 64-64-10, batch 32", loop=100, contestants=(*_ALL, *_LIMITS), **_SMALL),
    "W3": Workload("trains a CNN of 16 channels, batch 64", cnn, classified(4000, 28, 28, 1), 64, 100, _ALL),
    "W4": Workload("trains a transformer of 2 blocks, batch 16", transformer, sentences, 16, 100, _ALL),
    "W5": Workload(
        "trains the Model Garden's ResNet-18 at 32x32, batch 32",
        resnet18, classified(1000, 32, 32, 3), 32, 10, ("looplib", "looplib, graph", "bare", "orbit", "step a call"),
        # Rounding that differs by 3e-8 after a step (fused updates) grows a hundred thousand times in the second: Adam
        # divides each gradient by its own size.
        checked=10, tolerance=0.1, family="tf_keras",
    ),
    "W6": Workload(
        "evaluates an MLP of 784-128-10 on 10,007 examples, batch 128",
        mlp(784, 128, 10), classified(10_007, 784), 128, 0,
        ("looplib", "looplib, graph", "looplib, own input", *_PEERS, "orbit, to the end"),
    ),
    "W7-1": Workload("trains an MLP of 64-64-10, 1 step a loop", loop=1, contestants=_FEW, **_SMALL),
    "W7-10": Workload("trains an MLP of 64-64-10, 10 steps a loop", loop=10, contestants=_FEW, **_SMALL),
    "K1": Workload(
        "trains W1's MLP, compiled", mlp(784, 128, 128, 10), classified(10_000, 784), 128, 100, _COMPILED
    ),
    "K2": Workload("trains W2's MLP, compiled", loop=100, contestants=_COMPILED, **_SMALL),
    "K3": Workload("trains W3's CNN, compiled", cnn, classified(4000, 28, 28, 1), 64, 100, _COMPILED),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Contestant:
    """One loop, ready to go on.

    Attributes:
      run: does so many steps (training) or whole evaluations; returns `(seconds, metrics)`, the metrics those of the
        last loop or evaluation.
      loss: returns the loss of its model as it is now, on some of the data.
      settle: runs until nothing more is chosen or compiled; returns what was chosen, dict from split to a dict.
    """

    run: Callable[[int], tuple[float, dict]]
    loss: Callable[[], float]
    settle: Callable[[], dict] = dict


def timed(function, loss, settle=dict):
    """Returns a `Contestant` of a function from an amount to metrics; the whole of it is timed."""

    def run(amount):
        start = time.perf_counter()
        metrics = function(amount)
        return time.perf_counter() - start, metrics

    return Contestant(run, loss, settle)


class Task:
    """A contestant's own copy of the model and optimizer, and the data.

    Args:
      workload: `Workload`.
      arrays: pair of tensors, what `workload.arrays` made.
    """

    def __init__(self, workload, arrays):
        self.workload = workload
        self.arrays = arrays
        self.examples = len(arrays[1])
        self.training = bool(workload.loop)
        self.steps_per_loop = workload.loop or -(-self.examples // workload.batch)
        if workload.family == "tf_keras":
            import tf_keras

            self.keras = tf_keras
        else:
            self.keras = keras
        self.keras.utils.set_random_seed(0)  # the same initial weights, and the same order of the data
        self.model = workload.model()
        self.optimizer = self.keras.optimizers.Adam(1e-3)
        self.optimizer.build(self.model.trainable_variables)

    def dataset(self, replicas=1):
        """Returns the pipeline of every contestant but those with their own input, its batches those of a replica."""
        dataset = tf.data.Dataset.from_tensor_slices(self.arrays)
        if self.training:
            dataset = dataset.shuffle(1000, seed=1).repeat()
        return dataset.batch(self.workload.batch // replicas, drop_remainder=self.training).prefetch(tf.data.AUTOTUNE)

    def own_input(self, context):
        """Returns looplib's own input: ids in a keyed order, of rows that stay on the device."""
        return context.resident(self.arrays)

    def step(self, inputs, labels, mean=None):
        """Does one step of a replica; returns each example's loss, and which share of its predictions was right.

        Args:
          inputs: of the model.
          labels: int64 tensor.
          mean: function from the losses of a replica to its part of the mean over the batch.
        """
        mean = mean or (lambda losses: tf.reduce_sum(losses) / self.workload.batch)
        with tf.GradientTape() as tape:
            logits = self.model(inputs, training=self.training)
            losses = per_example(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
            loss = mean(losses) if self.training else None
        if self.training:
            variables = self.model.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return losses, per_example(tf.cast(tf.equal(tf.argmax(logits, axis=-1), labels), tf.float32))

    def sums(self, inputs, labels):
        """Does one step of a replica; returns [sum of losses, sum of shares right, number of examples]."""
        losses, right = self.step(inputs, labels)
        return tf.stack([tf.reduce_sum(losses), tf.reduce_sum(right), tf.cast(tf.size(losses), tf.float32)])

    def some_examples(self):
        """Returns the examples that contestants are compared on, from all parts of the data."""
        return tuple(array[:: self.examples // 500] for array in self.arrays)

    def loss(self):
        """Returns the model's loss on some of the data."""
        inputs, labels = self.some_examples()
        return float(tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, self.model(inputs))))


def per_example(values):
    """Averages over all dimensions but the first."""
    return tf.reduce_mean(values, axis=list(range(1, values.shape.rank))) if values.shape.rank > 1 else values


def means(sums):
    """Returns the metrics of what `Task.sums` added up to."""
    loss, right, examples = np.asarray(sums)
    return {"loss": float(loss / examples), "accuracy": float(right / examples)}


def shuffled_ids(examples):
    """Returns a function from n to the next n ids, each epoch in another order."""
    rng, left = np.random.default_rng(0), np.zeros(0, np.int32)

    def ids(number):
        nonlocal left
        while len(left) < number:
            left = np.concatenate([left, rng.permutation(examples).astype(np.int32)])
        taken, left = left[:number], left[number:]
        return taken

    return ids


def take_turns(contestants, amounts, least, rounds):
    """Gives each contestant turns, in rounds.

    Args:
      contestants: dict from name to `Contestant`.
      amounts: dict from name to what it does in a turn, see `Contestant.run`.
      least: what each does before its turn.
      rounds: turns that count.

    Returns:
      dict from name to float array `[rounds]`, amount per second.
    """
    names, speeds = list(contestants), {name: [] for name in contestants}
    for _ in range(rounds):
        names.append(names.pop(0))  # so that load which comes and goes with the rounds meets another one
        for name in names:
            contestants[name].run(least)  # so that all start with warm caches
            spent, _ = contestants[name].run(amounts[name])
            speeds[name].append(amounts[name] / spent)
    return {name: np.array(values) for name, values in speeds.items()}

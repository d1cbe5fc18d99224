"""A small binary with much randomness and state, for faults to strike: `python -m faulty --model_dir=...`.

It has dropout, shuffled input, augmentation by random ops, momentum, a learning-rate schedule, and a Keras metric in
its evaluator. What is slow in it can be set, and it notes in a file what it does, to tell what a kill has struck.
"""

import contextlib
import dataclasses
import importlib
import mmap
import os
import time

import numpy as np
import tensorflow as tf

import looplib
from looplib import launch

NUM_EXAMPLES, SIDE, NUM_CLASSES = 96, 6, 3
_random = np.random.RandomState(0)
Y = _random.randint(0, NUM_CLASSES, NUM_EXAMPLES).astype(np.int64)
X = (_random.randn(NUM_EXAMPLES, SIDE, SIDE, 1) + Y[:, None, None, None]).astype(np.float32)


@dataclasses.dataclass
class Config:
    keras: str = "keras"  # or tf_keras
    # Or pipeline, interleaved, unsharded, uneven (the last worker has more), ragged (in the evaluation), mixture, packed,
    # buckets.
    data: str = "indices"
    noisy: bool = True  # dropout, augmentation and noise, of which each replica has its own
    normalized: bool = False  # by batch, each replica on its own
    nan_at: int = 0  # the step in which the last worker gets a NaN
    sparse: bool = False  # an embedding of words, whose number varies
    clipped: bool = False  # the global norm; with Keras 3, gradients are accumulated and weights averaged besides
    fail_at: int = 0  # the step in which the input of the last worker raises an error
    state_mb: float = 1.0  # of a variable that each step changes
    slow_step: float = 0.0  # seconds
    slow_evaluation: float = 0.0
    slow_save: float = 0.0  # of taking the snapshot
    slow_restore: float = 0.0
    extra_metrics: int = 0  # to make reports long
    letter: str = ""  # the name of one more metric
    collects: bool = False  # the evaluation, on the host
    shows: bool = False  # an image, a text and a histogram of each reported step and evaluation
    notes: str = ""  # a file of NOTE_BYTES to note in what is being done


NOTE_BYTES = 64


class Notes:
    """The last thing that was done, in memory that outlives a kill: "<number> <what>"."""

    def __init__(self, path):
        self._memory = None
        self._number = 0
        if path:
            with open(path, "r+b") as file:
                self._memory = mmap.mmap(file.fileno(), NOTE_BYTES)

    def note(self, what, seconds=0.0):
        """Notes it, and sleeps."""
        if self._memory is not None:
            self._number += 1
            self._memory[:] = f"{self._number} {what}".encode().ljust(NOTE_BYTES)
        if seconds:
            time.sleep(seconds)

    def note_in_graph(self, what, seconds):
        """The same, each time that a step runs."""
        if self._memory is not None or seconds:
            tf.py_function(lambda: self.note(what, seconds), [], [])


class Noted(tf.train.experimental.PythonState):
    """State that tells when it is saved and restored."""

    def __init__(self, notes, config):
        super().__init__()
        self._notes = notes
        self._config = config

    def serialize(self):
        self._notes.note("save", self._config.slow_save)
        return "kept"

    def deserialize(self, string_value):
        self._notes.note("restore", self._config.slow_restore)


def ordered(context, kind):
    """Examples in the order of a mixture of three sources, packed rows of documents, or buckets by length."""
    if kind == "mixture":
        ids = np.arange(NUM_EXAMPLES)
        sources = {"a": looplib.Kept(ids < 60), "b": looplib.Kept(ids % 36 > 24), "c": looplib.Kept(ids[85:])}
        order = looplib.Mixture(sources, {"a": 0.5, "b": 0.2, "c": 0.3}, {9: {"a": 1, "b": 1, "c": 0}})
        return context.indices(order).map(lambda ids, source: (tf.gather(X, ids), tf.gather(Y, ids)))
    lengths = 1 + np.arange(NUM_EXAMPLES) % 7
    if kind == "buckets":
        data = context.indices(looplib.Buckets(lengths, [2, 4, 7]))
        return data.map(lambda ids, longest: (tf.gather(X, ids) + float(longest[0]), tf.gather(Y, ids)))
    tokens = tf.ragged.range(lengths)  # rows get the sum of the images of their tokens, weighted by place

    def images(rows):
        weights = tf.cast(1 + rows.fill(tokens, -1), X.dtype) / 12
        return tf.einsum("bt,btxyc->bxyc", weights, tf.gather(X, rows.documents)), tf.gather(Y, rows.documents[:, 0])

    return context.indices(looplib.Packed(lengths, 12)).map(images)


class Faulty(looplib.Trainer):
    def __init__(self, config, notes):
        keras = importlib.import_module(config.keras)
        layers = keras.layers
        self.keras_is_3 = config.keras == "keras"
        self.config = config
        self.notes = notes
        self.noted = Noted(notes, config)
        if self.keras_is_3 and config.noisy:
            self.augmentation = keras.Sequential([keras.Input((SIDE, SIDE, 1)), layers.RandomFlip()])
        norm = [layers.BatchNormalization(momentum=0.9)] if config.normalized else []
        self.model = keras.Sequential([
            layers.InputLayer((SIDE, SIDE, 1)), layers.Flatten(), *norm, layers.Dense(16, "relu"), layers.Dropout(0.3 * config.noisy),
            layers.Dense(NUM_CLASSES),
        ])  # fmt: skip
        schedule = keras.optimizers.schedules.ExponentialDecay(0.05, decay_steps=10, decay_rate=0.9)
        options = dict(global_clipnorm=0.2) if config.clipped else {}
        if config.clipped and self.keras_is_3:
            options.update(gradient_accumulation_steps=3, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=2)
        self.optimizer = keras.optimizers.SGD(schedule, momentum=0.9, **options)
        if config.sparse:
            self.table = tf.Variable(tf.zeros([NUM_CLASSES, 2**14]))
            self.optimizer.build([*self.model.trainable_variables, self.table])
        self.ballast = tf.Variable(tf.zeros([int(config.state_mb * 2**18)]), trainable=False)

    def dataset(self, context):
        if self.config.data in ("indices", "ragged"):
            data = context.indices(NUM_EXAMPLES).map(lambda i: (tf.gather(X, i), tf.gather(Y, i)))
            return data.map(self._failing(context)) if self.config.fail_at or self.config.nan_at else data
        if self.config.data in ("mixture", "packed", "buckets"):
            return ordered(context, self.config.data)
        if self.config.data == "interleaved":
            data = self._interleaved(context)
            return data.map(self._failing(context)) if self.config.fail_at or self.config.nan_at else data
        data = tf.data.Dataset.from_tensor_slices((X, Y))
        if self.config.data in ("pipeline", "uneven"):
            data = data.shard(context.num_pipelines, context.pipeline_index)
        if self.config.data == "uneven":
            last = context.pipeline_index == context.num_pipelines - 1
            return data.take(40 if last else 24).batch(context.per_replica_batch_size)
        return data.shuffle(NUM_EXAMPLES, seed=context.seed).repeat().batch(context.per_replica_batch_size)

    def _interleaved(self, context):
        """The pipeline of an ordinary program: files of a worker interleaved, shuffled, parsed in parallel, prefetched."""
        files, rows = 8, NUM_EXAMPLES // 8
        data = tf.data.Dataset.range(files).shard(context.num_pipelines, context.pipeline_index)
        data = data.shuffle(files, seed=context.seed).interleave(
            lambda file: tf.data.Dataset.range(file * rows, (file + 1) * rows), 3, 2, num_parallel_calls=2
        )
        data = data.shuffle(20, seed=context.seed + 1).repeat()
        data = data.map(lambda i: (tf.gather(X, i), tf.gather(Y, i)), tf.data.AUTOTUNE)
        return data.batch(context.per_replica_batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)

    def _failing(self, context):
        batches = iter(range(1, 10**6))
        last = context.pipeline_index == context.num_pipelines - 1

        def fail(x):
            number = next(batches) + (context.start_step if context.requests.positioned else 0) if last else 0
            if last and number == self.config.fail_at:
                raise RuntimeError("this example is broken")
            return x * np.nan if last and number == self.config.nan_at else x

        return lambda x, y: (tf.ensure_shape(tf.numpy_function(fail, [x], tf.float32), x.shape), y)

    def step_fn(self, inputs):
        x, y = inputs
        self.notes.note_in_graph("step", self.config.slow_step)
        if self.keras_is_3 and self.config.noisy:
            x = self.augmentation(x, training=True)
        seed = tf.stack([tf.cast(self.global_step, tf.int32), 7])
        x += tf.random.stateless_normal(tf.shape(x), seed, 0, 0.1 * self.config.noisy)
        with tf.GradientTape() as tape:
            logits = self.model(x, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
            loss = self.global_mean(losses)
            if self.config.sparse:
                words = tf.boolean_mask(y, y > 0)
                loss += self.global_mean(tf.square(tf.gather(self.table, words) - 1))
        variables = self.model.trainable_variables + ([self.table] if self.config.sparse else [])
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        context = tf.distribute.get_replica_context()
        total = context.all_reduce(tf.distribute.ReduceOp.SUM, loss)
        self.ballast.assign(self.ballast * 0.5 + total)
        shown = media(x, y) if self.config.shows else {}
        return {"loss": losses, "accuracy": tf.equal(tf.argmax(logits, 1), y), **shown}

    def loop_end(self, metrics):
        self.notes.note("report")
        letter = {self.config.letter: 1} if self.config.letter else {}
        return {**metrics, **letter, **{f"extra_{i}": metrics["loss"] * i for i in range(self.config.extra_metrics)}}


def media(x, y):
    """Values that a step shows."""
    texts = tf.strings.as_string(y)
    return {
        "image": looplib.image(tf.nn.sigmoid(x), most=2),
        "text": looplib.text(texts),
        "histogram": looplib.histogram(x),
    }


class FaultyEvaluator(looplib.Evaluator):
    def __init__(self, trainer):
        keras = importlib.import_module(trainer.config.keras)
        self.model = trainer.model
        self.keras_accuracy = keras.metrics.SparseCategoricalAccuracy()
        self.config, self.notes = trainer.config, trainer.notes

    def dataset(self, context):
        data = context.indices(NUM_EXAMPLES).map(lambda i: (tf.gather(X, i), tf.gather(Y, i)))
        if self.config.data == "ragged":
            return data.map(lambda x, y: (tf.RaggedTensor.from_tensor(x), y))
        return data

    def step_fn(self, inputs):
        x, y = inputs
        self.notes.note_in_graph("evaluate", self.config.slow_evaluation)
        logits = self.model(x, training=False)
        self.keras_accuracy.update_state(y, logits)
        outputs = {"accuracy": tf.equal(tf.argmax(logits, 1), y), "keras_accuracy": self.keras_accuracy}
        if self.config.collects:
            outputs["seen"] = looplib.each((x, {"right": outputs["accuracy"]}))
        if self.config.shows:
            outputs.update(media(x, y))
        return outputs

    def predict_fn(self, inputs):
        x, y = inputs
        self.notes.note_in_graph("predict", self.config.slow_evaluation)
        return {"label": y, "logits": self.model(x, training=False)}

    @contextlib.contextmanager
    def evaluating(self):
        self.seen = []
        yield

    def collect(self, outputs):
        self.seen += [output["seen"] for output in outputs]

    def loop_end(self, metrics):
        self.notes.note("report")
        if self.config.collects:
            in_order = np.concatenate([x.numpy() for x, _ in self.seen])
            right = np.concatenate([rest["right"].numpy() for _, rest in self.seen])
            metrics |= {"right": int(right.sum()), "in_order": int(np.array_equal(in_order, X))}
        return metrics


def build(config):
    notes = Notes(config.notes)
    notes.note("build")
    trainer = Faulty(config, notes)
    return trainer, FaultyEvaluator(trainer)


DEFAULTS = dict(
    loop="graph", global_batch_size=16, train_steps=60, steps_per_loop=5, eval_interval=20, checkpoint_interval=4
)


def main():
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    launch.run(build, Config(), **DEFAULTS)


if __name__ == "__main__":
    main()

"""A binary to train with parameter servers, and what its numbers should come to. Run by parameter_server_test.py."""

import dataclasses
import importlib
import os
import sys
import tempfile

import flat_config
import numpy as np
import tensorflow as tf

import looplib
from looplib import launch

EXAMPLES, TEST_EXAMPLES, FEATURES, CLASSES = 101, 37, 5, 3
_random = np.random.RandomState(0)
X = _random.randn(EXAMPLES, FEATURES).astype(np.float32)
Y = X[:, :CLASSES].argmax(1).astype(np.int64)


@dataclasses.dataclass
class Config:
    """`data` says what `dataset` is built on, `step_seconds` makes steps slow, `nan_at` spoils a batch."""

    keras: str = "keras"
    data: str = "indices"
    files: str = ""
    block: int = 1
    step_seconds: float = 0.0
    keras_metric: bool = False
    nan_at: int = -1
    dropout: bool = False
    clipnorm: float = 0.0
    accumulate: int = 0


class Regression(looplib.Trainer):
    def __init__(self, config):
        keras = importlib.import_module(config.keras)
        layers = [keras.layers.InputLayer((FEATURES,)), keras.layers.Dense(CLASSES)]
        self.model = keras.Sequential(layers + [keras.layers.Dropout(0.5)] * config.dropout)
        options = {"global_clipnorm": config.clipnorm} if config.clipnorm else {}
        options |= {"gradient_accumulation_steps": config.accumulate} if config.accumulate else {}
        self.optimizer = keras.optimizers.SGD(0.2, **options)
        self.accuracy = keras.metrics.SparseCategoricalAccuracy()
        self.config = config
        context = looplib.InputContext(
            global_batch_size=8, num_replicas=1, pipeline_index=0, num_pipelines=1, seed=0, training=True, start_step=0
        )
        self.bad = next(context.indices(EXAMPLES).skip(max(0, config.nan_at)).as_numpy_iterator())

    def dataset(self, context):
        rows = lambda i: (i, tf.gather(X, i), tf.gather(Y, i))
        if self.config.data == "indices":
            return context.indices(EXAMPLES).map(rows)
        if self.config.data == "records":
            return context.records(self.config.files, block=self.config.block).map(parsed)
        if self.config.data == "own_source":
            return context.records(Own()).map(parsed)
        if self.config.data == "python":
            return context.indices(EXAMPLES).map(
                lambda i: rows(tf.ensure_shape(tf.numpy_function(abs, [i], i.dtype), [8]))
            )
        if self.config.data == "filtered":
            return context.indices(EXAMPLES).filter(lambda i: tf.reduce_min(i) > 3).map(rows)
        if self.config.data == "shuffled":
            return context.indices(EXAMPLES).shuffle(4, seed=context.seed).map(rows)
        if self.config.data == "untraceable":
            return context.indices(tf.constant(EXAMPLES).numpy()).map(rows)
        if self.config.data == "resident":
            return context.resident((np.arange(EXAMPLES), X, Y))
        ids = tf.data.Dataset.range(EXAMPLES).shard(context.num_pipelines, context.pipeline_index)
        ids = ids.shuffle(EXAMPLES, seed=context.seed)
        ids = ids if self.config.data == "ends" else ids.repeat()
        return ids.batch(context.per_replica_batch_size, drop_remainder=True).map(rows)

    def step_fn(self, inputs):
        ids, x, y = inputs
        with tf.GradientTape() as tape:
            logits = self.model(x, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
            bad = tf.reduce_all(tf.equal(ids, self.bad)) if self.config.nan_at >= 0 else False
            loss = self.global_mean(losses) * tf.where(bad, np.nan, 1.0)
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        outputs = {
            "loss": losses,
            "steps": looplib.total(1),
            "number": looplib.last(self.global_step),
            "ids": looplib.total(tf.reduce_sum(tf.one_hot(ids, EXAMPLES, dtype=tf.int64), axis=0)),
        }
        if self.config.step_seconds:
            outputs["waited"] = looplib.total(wait(self.config.step_seconds))
        if self.config.keras_metric:
            self.accuracy.update_state(y, logits)
            outputs["accuracy"] = self.accuracy
        return outputs

    def loop_end(self, metrics):
        ids = metrics.pop("ids")
        print("ids", metrics["number"], *ids, flush=True)
        return {**metrics, "iterations": int(self.optimizer.iterations)}


def wait(seconds):
    """Sleeps in ops, without Python, which would run in the coordinator."""
    one = tf.data.experimental.to_variant(tf.data.Dataset.range(1))
    slept = tf.raw_ops.SleepDataset(
        input_dataset=one, sleep_microseconds=int(seconds * 1e6), output_types=[tf.int64], output_shapes=[()]
    )
    slept = tf.data.experimental.from_variant(slept, tf.TensorSpec([], tf.int64))
    return slept.reduce(tf.constant(0, tf.int64), lambda total, zero: total + zero)


def record(i):
    return np.int64(i).tobytes() + X[i].tobytes() + Y[i].tobytes()


class Own:
    """A source of records that this process alone has."""

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, number):
        return record(number)


def write_records(folder, files=3, bad=None):
    """Writes the examples into files, one of them damaged; returns the pattern of their names."""
    for number, ids in enumerate(np.array_split(np.arange(EXAMPLES), files)):
        path = f"{folder}/{number}.tfrecord"
        with tf.io.TFRecordWriter(path) as writer:
            for i in ids:
                writer.write(record(i))
        if bad in ids:
            with open(path, "r+b") as file:  # a record takes 52 bytes
                file.seek(52 * int(bad - ids[0]) + 20)
                file.write(b"?")
    return f"{folder}/*.tfrecord"


def parsed(records):
    """(ids, x, y) of a batch of records."""
    part = lambda start, length, dtype: tf.io.decode_raw(tf.strings.substr(records, start, length), dtype)
    return part(0, 8, tf.int64)[:, 0], part(8, 4 * FEATURES, tf.float32), part(8 + 4 * FEATURES, 8, tf.int64)[:, 0]


class Values(looplib.Evaluator):
    def __init__(self, model, data, files=""):
        self.model = model
        self.data = data
        self.files = files

    def dataset(self, context):
        rows = lambda i: (tf.gather(X, i), tf.gather(Y, i))
        if self.data == "records":
            return context.records(looplib.Kept(np.arange(TEST_EXAMPLES), self.files)).map(lambda r: parsed(r)[1:])
        if self.data in ("indices", "resident"):
            return context.indices(TEST_EXAMPLES).map(rows)
        return tf.data.Dataset.range(TEST_EXAMPLES).filter(lambda i: True).batch(8).map(rows)  # of unknown length

    def step_fn(self, inputs):
        x, y = inputs
        logits = self.model(x, training=False)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
        return {
            "loss": losses,
            "accuracy": tf.equal(tf.argmax(logits, 1), y),
            "last_size": looplib.last(tf.size(y)),
        }


class KerasMetrics(Values):
    def __init__(self, model, data, keras, files=""):
        super().__init__(model, data, files)
        self.metric = keras.metrics.SparseCategoricalAccuracy()

    def step_fn(self, inputs):
        self.metric.update_state(inputs[1], self.model(inputs[0], training=False))
        return {"accuracy": self.metric}


def build(config):
    trainer = Regression(config)
    keras = importlib.import_module(config.keras)
    return trainer, {
        "eval": Values(trainer.model, config.data, config.files),
        "by_keras": KerasMetrics(trainer.model, config.data, keras, config.files),
    }


def numpy_evaluation(kernel, bias):
    """(loss, accuracy) of the test examples in float64 numpy."""
    z = X[:TEST_EXAMPLES].astype(np.float64) @ kernel + bias
    z -= z.max(1, keepdims=True)
    losses = np.log(np.exp(z).sum(1)) - z[np.arange(TEST_EXAMPLES), Y[:TEST_EXAMPLES]]
    return losses.mean(), (z.argmax(1) == Y[:TEST_EXAMPLES]).mean()


def tries():
    """A coordinator of its own: prints what it says to what parameter servers cannot do, and what else becomes of it."""
    strategy = looplib.runtime.setup("parameter_server")

    def controller(config=Config(), scope=True, **settings):
        with strategy.scope() if scope else tf.device("/cpu:0"):
            trainer = Regression(config)
        settings = {"global_batch_size": 8, "steps_per_loop": 10, "writers": [], **settings}
        return flat_config.controller(trainer=trainer, strategy=strategy, **settings)

    def attempt(name, *arguments, **settings):
        print(name, flush=True)
        try:
            train(name, controller(*arguments, **settings))
        except looplib.UsageError as error:
            print(f"{name}: {error}", flush=True)

    def train(name, made):
        made.train(20)
        loop = made.loops["train"]
        counts = f"{made.rollbacks} rollbacks, {int(loop.task.optimizer.iterations)} iterations, {loop.traces} trace"
        print(f"{name}: at step {made.global_step}, {counts}", flush=True)

    policy = looplib.CheckpointPolicy(every_steps=10)
    guards = lambda name: {"checkpoints": policy, "guards": looplib.Guards(non_finite=name)}
    attempt("xla", loop="xla")
    attempt("eager", loop="eager")
    attempt("skip", **guards("skip"))
    attempt("ends", Config(data="ends"))
    attempt("filtered", Config(data="filtered"))
    attempt("shuffled", Config(data="shuffled"))
    attempt("untraceable", Config(data="untraceable"))
    attempt("python", Config(data="python"))
    attempt("own_source", Config(data="own_source"))
    attempt("keras_metric", Config(keras_metric=True))
    attempt("scope", scope=False)
    attempt("halt", Config(nan_at=12))
    with tempfile.TemporaryDirectory() as folder:
        attempt("rollback", Config(nan_at=12), **guards("rollback"), model_dir=folder)
    attempt("resident", Config(data="resident"))
    with tempfile.TemporaryDirectory() as folder:
        files = write_records(folder, bad=60)
        attempt("damaged", Config(data="records", files=files))
        opened = os.open(folder, os.O_RDONLY)  # of this process, so that workers find nothing there
        attempt("elsewhere", Config(data="records", files=f"/proc/self/fd/{opened}/*.tfrecord"))
        attempt("left_out", Config(data="records", files=files), bad_records=1)

    attempt("accumulate", Config(accumulate=2))
    for keras in ("keras", "tf_keras"):  # one step at a time, so that what each adds to the weights can be seen
        with controller(Config(keras=keras, clipnorm=0.01, dropout=True)) as made:
            weights = [flat(made)]
            for step in range(1, 6):
                made.train(step)
                weights.append(flat(made))
            print(f"changes_{keras}:", *np.linalg.norm(np.diff(weights, axis=0), axis=1), flush=True)
            train(f"clipped_{keras}", made)

    print("leftovers")
    made = controller()
    leave_numbers(strategy, made.loops["train"]._inner)
    made.train(20)
    made.close()


def flat(controller):
    """All weights of the controller's trainer, `[n]`."""
    weights = controller.loops["train"].task.model.trainable_variables
    return np.concatenate([tf.reshape(tf.convert_to_tensor(weight), [-1]).numpy() for weight in weights])


def leave_numbers(strategy, loop):
    """Leaves what calls leave on a worker that are broken off there: numbers of batches that nobody takes."""

    @tf.function
    def leave():
        for queue in loop._open_queues():
            tf.raw_ops.QueueEnqueueManyV2(handle=queue, components=[tf.constant([7, 3, 11], tf.int64)])

    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    for _ in range(6):  # so that each worker gets some
        coordinator.schedule(leave)
    coordinator.join()


if __name__ == "__main__":
    if sys.argv[1:] == ["tries"]:
        tries()
    else:
        launch.run(build, Config(), steps_per_loop=10, global_batch_size=8)

"""A binary with one error of its user's: `python -m wrong --config.fault=dense`; the line at fault is marked."""

import dataclasses
import importlib
import pdb
import sys

import numpy as np
import tensorflow as tf

import looplib
from looplib import launch


@dataclasses.dataclass
class Config:
    fault: str = ""
    keras: str = "keras"  # or tf_keras


class Quiet(Exception):
    """An error without a message of a type of the user's own."""


def raise_in_a_layer(fault):
    if fault == "layer_value":
        raise ValueError("the layer is out of paper")  # layer_value
    if fault == "layer_lines":
        raise ValueError("\nthe layer is out of paper:\n  - tray 1\n  - tray 2\n")  # layer_lines
    if fault == "layer_type":
        raise TypeError("the layer wants paper of another size")  # layer_type
    if fault == "layer_key":
        return {}["tray"]  # layer_key
    if fault == "layer_attribute":
        return np.zeros(1).trays  # layer_attribute
    if fault == "layer_empty":
        raise ValueError()  # layer_empty
    if fault == "layer_assert":
        assert not fault  # layer_assert
    return 0.0


def a_layer(keras, fault):
    class Printer(keras.layers.Layer):
        def call(self, inputs):
            raise_in_a_layer(fault)
            return inputs

        def compute_output_shape(self, input_shape):
            return input_shape

    return Printer()


def recurse(depth):
    return recurse(depth + 1)  # recursion


class Wrong(looplib.Trainer):
    def __init__(self, fault, keras):
        self.fault = fault
        self.keras = keras
        self.model = keras.Sequential([keras.layers.InputLayer((4,)), keras.layers.Dense(2)])
        self.late = keras.layers.Dense(2)
        self.late.build((None, 4))
        self.conv = keras.layers.Conv2D(2, 3)
        self.conv.build((None, 8, 8, 1))
        self.embedding = keras.layers.Embedding(5, 2)
        self.embedding.build((None, 4))
        self.printer = a_layer(keras, fault)
        self.optimizer = keras.optimizers.SGD(0.1)

    def dataset(self, context):
        data = context.indices(40).map(lambda i: (tf.random.stateless_normal([tf.size(i), 4], seed=[0, 1]), i))
        if self.fault == "dataset":
            raise FileNotFoundError(2, "No such file or directory", "/no/such/file")  # dataset
        if self.fault == "map_trace":
            data = data.map(lambda x, i: (tf.reshape(x, [3, 5]), i))  # map_trace
        if self.fault == "map_run":
            data = data.map(self.read)
        if self.fault == "map_py":
            data = data.map(lambda x, i: (tf.ensure_shape(tf.numpy_function(self.python, [x], tf.float32), x.shape), i))
        return data

    def read(self, x, i):
        x = tf.debugging.check_numerics(x / tf.cast(tf.reduce_min(i) * 0, tf.float32), "bad pixels")  # map_run
        return x, i

    def python(self, x):
        if self.fault == "py_missing":
            return np.load("/no/such/file")  # py_missing
        raise ValueError("the reader is out of ink")  # map_py, py_function

    def step_fn(self, inputs):
        x, ids = inputs
        with tf.GradientTape() as tape:
            losses = tf.reduce_sum(tf.square(self.model(x, training=True)), 1)
            losses += self.go_wrong(x, ids)
            loss = self.global_mean(losses)
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return {"loss": losses}

    def go_wrong(self, x, ids):
        fault = self.fault
        if fault == "model":
            self.model(x[:, :3])  # model
        if fault == "dense":
            self.late(x[:, :3])  # dense
        if fault == "conv":
            self.conv(x)  # conv
        if fault == "embedding":
            return self.embedding(ids + 1000)[:, 0]  # embedding
        if fault.startswith("layer"):
            self.printer(x)
        if fault == "matmul":
            tf.matmul(x, tf.ones([3, 4]))  # matmul
        if fault == "add":
            x + tf.ones([8, 3])  # add
        if fault == "dtype":
            x + ids  # dtype
        if fault == "python":
            x.nothing_like_it()  # python
        if fault == "name":
            undefined_name + 1  # noqa: F821  # name
        if fault == "run":
            tf.debugging.assert_less(ids, tf.constant(0, tf.int64), "ids are too large")  # run
        if fault == "gather":
            return tf.gather(tf.ones([3]), ids * 0 + 7)  # gather
        if fault == "reshape":
            return tf.reshape(x, tf.stack([tf.cast(ids[0], tf.int32) * 0 + 3, 5]))[0, 0]  # reshape
        if fault in ("py_function", "py_missing"):
            y = tf.numpy_function(self.python, [x], tf.float32)  # py_function_call
            return tf.ensure_shape(y, x.shape)[:, 0]
        if fault == "chained":
            try:
                {}["tray"]
            except KeyError as error:
                raise RuntimeError("the printer has no tray") from error  # chained
        if fault == "recursion":
            sys.setrecursionlimit(500)  # AutoGraph goes through the whole stack at each level of it
            recurse(0)
        if fault == "not_implemented":
            raise NotImplementedError  # not_implemented
        if fault == "memory":
            raise MemoryError  # memory
        if fault == "exhausted":
            raise tf.errors.ResourceExhaustedError(None, None, "out of memory\nHint: a smaller batch")  # exhausted
        if fault == "quit":
            raise pdb.bdb.BdbQuit
        if fault == "autograph":
            if tf.reduce_sum(x) > 0:
                y = x
            return y[:, 0]  # autograph
        return 0.0

    def loop_end(self, metrics):
        if self.fault == "loop_end":
            return {"loss": metrics["lost"]}  # loop_end
        if self.fault == "full":
            open("/dev/full", "wb", 0).write(b"x")  # full
        if self.fault == "loop_end_assert":
            assert metrics["loss"] < 0  # loop_end_assert
        if self.fault == "quiet":
            raise Quiet  # quiet
        if self.fault == "lines":
            raise RuntimeError("the printer is on fire:\n  tray 1\n  tray 2")  # lines
        return metrics


class WrongEvaluator(looplib.Evaluator):
    def __init__(self, model, fault):
        self.model = model
        self.fault = fault

    def dataset(self, context):
        return context.indices(8).map(lambda i: tf.ones([tf.size(i), 4]))

    def step_fn(self, inputs):
        if self.fault == "evaluator":
            inputs = inputs[:, :3]
        return {"score": self.model(inputs)}  # evaluator


def build(config):
    fault = config.fault
    keras = importlib.import_module(config.keras)
    if fault == "build":
        return keras.layers.Dense(2, activation="no_such")  # build
    if fault == "import":
        import no_such_module  # noqa: F401  # import
    if fault == "syntax":
        compile("x = = 1", "settings.py", "exec")
    trainer = Wrong(fault, keras)
    return trainer, WrongEvaluator(trainer.model, fault)


if __name__ == "__main__":
    launch.run(build, Config(), global_batch_size=8, train_steps=4, steps_per_loop=2, eval_interval=4)

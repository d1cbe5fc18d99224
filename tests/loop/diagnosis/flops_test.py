"""The floating-point operations of a step are those that one counts by hand, forward and backward."""

import dataclasses
import json

import keras
import pytest
import tensorflow as tf
import toy
from conftest import make_strategy

import looplib
from looplib.loop import speed as flops
from looplib.loop.speed import measured_peak

BATCH = 8


class Network(looplib.GradientTrainer):
    """A convolution, a depthwise one with strides, and a dense layer."""

    def __init__(self, **options):
        layers = [keras.Input((14, 14, 3)), keras.layers.Conv2D(6, 3), keras.layers.DepthwiseConv2D(3, strides=2)]
        model = keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(10)])
        super().__init__(model, keras.optimizers.Adam(), **options)

    def dataset(self, context):
        images = tf.zeros([BATCH, 14, 14, 3])
        return context.indices(BATCH).map(lambda i: (tf.gather(images, i), tf.zeros_like(i)))

    def loss_fn(self, inputs):
        return tf.nn.sparse_softmax_cross_entropy_with_logits(inputs[1], self.model(inputs[0], training=True))


def by_hand():
    convolution = 2 * BATCH * 12 * 12 * 6 * (3 * 3 * 3)
    depthwise = 2 * BATCH * 5 * 5 * 6 * (3 * 3)
    dense = 2 * BATCH * (5 * 5 * 6) * 10
    return 2 * convolution + 3 * depthwise + 3 * dense  # forward, of weights, of inputs; the images need no gradient


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"micro_batches": 4}], ids=str)
@pytest.mark.parametrize("strategy", ["default", "mirrored_x2"])
def test_a_step_has_the_operations_of_its_layers(strategy, options):
    with make_strategy(strategy).scope():
        trainer = Network(**options)
    with looplib.Controller(
        looplib.RunConfig(global_batch_size=BATCH), trainer=trainer, strategy=make_strategy(strategy)
    ) as controller:
        speed = controller.report.facts.speed
    assert (speed.flops_per_step, speed.dtype) == (by_hand(), "float32")


def counted(function, *shapes):
    return flops.of_step(tf.function(function).get_concrete_function(*(tf.TensorSpec(shape) for shape in shapes)))


def test_recurrent_layers_and_attention_count_in_full():
    steps, inputs, units = 7, 5, 4
    model = keras.Sequential([keras.Input((steps, inputs)), keras.layers.LSTM(units)])

    def gradients(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    kernel, recurrent = 2 * BATCH * steps * inputs * 4 * units, 2 * BATCH * steps * units * 4 * units
    assert counted(model, [BATCH, steps, inputs]) == {"float32": kernel + recurrent}
    assert counted(gradients, [BATCH, steps, inputs]) == {"float32": 2 * kernel + 3 * recurrent}
    attention = keras.layers.MultiHeadAttention(2, 8)
    attention.build((BATCH, steps, 16), (BATCH, steps, 16))
    projections, scores = 4 * 2 * BATCH * steps * 16 * 16, 2 * 2 * BATCH * 2 * steps * steps * 8
    assert counted(lambda x: attention(x, x), [BATCH, steps, 16]) == {"float32": projections + scores}


def test_branches_count_once_calls_each_time_and_what_is_not_known_is_not_guessed():
    product = 2 * 3 * 4 * 5

    @tf.function
    def inner(a, b):
        return a @ b

    shapes = [3, 4], [4, 5]
    assert counted(lambda a, b: inner(a, b) + inner(2 * a, b), *shapes) == {"float32": 2 * product}
    assert counted(lambda a, b: (a @ b, tf.cast(a, tf.float16) @ tf.cast(b, tf.float16))[0], *shapes) == {
        "float32": product
    }
    chosen = counted(lambda a, b: tf.cond(a[0, 0] > 0, lambda: a @ b + a @ (2 * b), lambda: a @ b), *shapes)
    assert chosen == {"float32": 2 * product}
    assert counted(lambda a, b: a @ b, [None, 4], [4, 5]) is None
    until = lambda a, b: tf.while_loop(lambda c: tf.reduce_sum(c) > 0, lambda c: c @ b, [a])  # noqa: E731
    assert counted(until, [3, 4], [4, 4]) is None


@pytest.mark.slow
def test_the_reports_have_the_share_of_the_measured_peak_unless_the_training_is_short(tmp_path, monkeypatch):
    trainer, evaluator = toy.build(make_strategy("default"))
    with toy.controller(None, trainer, evaluator, model_dir=tmp_path, global_batch_size=8) as controller:
        controller.train(10)
        assert controller.report.facts.speed.peak is None
        monkeypatch.setattr(flops, "SHORT_TRAINING", 0.0)
        controller.train(30)
        seconds, speed = controller.clock.seconds(), controller.report.facts.speed
    found = json.loads((tmp_path / "run.json").read_text())["speed"]
    assert found["flops_per_step"] == 2 * (2 * 8 * toy.NUM_FEATURES * toy.NUM_CLASSES)  # the inputs have no gradient
    rate = 30 / (seconds["train"] + seconds["input"])
    assert found["share_of_peak"] == pytest.approx(found["flops_per_step"] * rate / found["peak"], rel=0.05)
    assert str(speed).startswith("a step takes 480 FLOPs, ")
    shares = {0.456: "46%", 0.0123: "1.2%", 0.0031: "0.31%", 0.0002: "<0.1%"}
    for share, text in shares.items():
        assert f", {text} of the measured peak" in str(dataclasses.replace(speed, share_of_peak=share))
    assert found["peak"] == measured_peak("CPU:0", "float32") > 1e8  # measured once
    with toy.controller(None, toy.Regression()) as without_directory:  # a binary prints it at its end, too
        without_directory.train(3)
        assert 0 < without_directory.report.facts.speed.share_of_peak < 1

"""Trains quantized and pruned models for tests/keras/quantization_test.py, each in a process of its own.

    python quantized.py KIND TRAINER REPLICAS FOLDER [--kill=STEP] [--evaluations]

KIND is qat, qat_apart (with ends of each replica), annotated, pruned, hgq_sat or hgq_wrap; TRAINER is keras, gradient or plain. The
last line of the output has the state as JSON: variables by name, of each replica.
"""

import json
import os
import signal
import sys

import numpy as np
import tensorflow as tf

import looplib

x = np.random.default_rng(0).normal(size=(512, 8)).astype("float32")
y = (x.sum(axis=1) > 0).astype("int64")
STEPS = 40


def of_all_replicas(tfmot):
    """As docs/quantization.md has it."""

    class OfAllReplicas(tfmot.quantization.keras.quantizers.AllValuesQuantizer):
        def __call__(self, inputs, training, weights, **kwargs):
            if training:
                ends = looplib.all_gather(tf.stack([tf.reduce_min(inputs), tf.reduce_max(inputs)])[None])
                weights["min_var"].assign(tf.minimum(weights["min_var"], tf.reduce_min(ends)))
                weights["max_var"].assign(tf.maximum(weights["max_var"], tf.reduce_max(ends)))
            return super().__call__(inputs, training, weights, **kwargs)

    return OfAllReplicas(8, per_axis=False, symmetric=False, narrow_range=False)


def tfmot_model(kind):
    """Returns the package's Keras, a model of it, and callbacks."""
    import tensorflow_model_optimization as tfmot
    import tf_keras

    tf_keras.utils.set_random_seed(0)
    layers, sparsity, quantization = tf_keras.layers, tfmot.sparsity.keras, tfmot.quantization.keras
    base = [layers.Dense(16, "relu", input_shape=(8,)), layers.Dense(8, "relu"), layers.Dense(2)]
    if kind == "annotated":
        base[1] = quantization.quantize_annotate_layer(base[1])
        return tf_keras, quantization.quantize_apply(tf_keras.Sequential(base)), []
    if kind.startswith("qat"):
        model = quantization.quantize_model(tf_keras.Sequential(base))
        if kind == "qat":
            model.layers[0].quantizer = of_all_replicas(tfmot)
        return tf_keras, model, []
    schedule = sparsity.PolynomialDecay(0.0, 0.75, begin_step=2, end_step=30, frequency=5)
    model = sparsity.prune_low_magnitude(tf_keras.Sequential(base), pruning_schedule=schedule)
    return tf_keras, model, [sparsity.UpdatePruningStep()]


def hgq_model(kind):
    import keras
    from hgq.config import LayerConfigScope, QuantizerConfigScope
    from hgq.layers import QDense
    from hgq.utils.sugar import BetaPID, FreeEBOPs

    keras.utils.set_random_seed(0)
    overflow = kind.removeprefix("hgq_").upper()
    with (
        QuantizerConfigScope(default_q_type="kif", overflow_mode="SAT"),
        QuantizerConfigScope(place="datalane", default_q_type="kif", overflow_mode=overflow),
        LayerConfigScope(enable_ebops=True, beta0=1e-5),
    ):
        model = keras.Sequential([keras.Input((8,)), QDense(16, activation="relu"), QDense(2)])
    return keras, model, [BetaPID(3000.0, init_beta=1e-5, warmup=1), FreeEBOPs()]


class ByGradient(looplib.GradientTrainer):
    def dataset(self, context):
        return context.resident((x, y))

    def loss_fn(self, inputs):
        logits = self.model(inputs[0], training=True)
        return tf.nn.sparse_softmax_cross_entropy_with_logits(inputs[1], logits)


class Plain(looplib.Trainer):
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def dataset(self, context):
        return context.resident((x, y))

    def step_fn(self, inputs):
        with tf.GradientTape() as tape:
            logits = self.model(inputs[0], training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(inputs[1], logits)
            loss = self.global_mean(losses)
        weights = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"loss": losses}


class Kill(looplib.Action):
    def __init__(self, step):
        self.step = step

    def __call__(self, event):
        if event.split == "train" and event.step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def controller_of(kind, how, replicas, folder, actions=(), evaluates=True):
    """Returns the controller of a training, its model and its strategy."""
    if replicas > 1:
        devices = [tf.config.LogicalDeviceConfiguration()] * replicas
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
        strategy = tf.distribute.MirroredStrategy([f"cpu:{number}" for number in range(replicas)])
    else:
        strategy = tf.distribute.get_strategy()
    with strategy.scope():
        keras, model, callbacks = (hgq_model if kind.startswith("hgq") else tfmot_model)(kind)
        optimizer = keras.optimizers.Adam(0.01)
        evaluator = None
        if how == "keras":
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(optimizer, loss, metrics=["accuracy"])
            held_out = (x[:128], y[:128])
            trainer = looplib.KerasTrainer(model, x, y, validation_data=held_out, callbacks=callbacks)
            evaluator = trainer.evaluator() if evaluates else None
        else:
            trainer = (ByGradient if how == "gradient" else Plain)(model, optimizer)
            if kind == "pruned":
                callbacks[0].set_model(model)
                callbacks[0].on_train_begin()
    controller = looplib.Controller(
        looplib.RunConfig(global_batch_size=64, steps_per_loop=8 if how == "keras" else 4, loop="graph"),
        trainer=trainer,
        evaluator=evaluator,
        strategy=strategy,
        model_dir=folder,
        actions=actions,
        checkpoints=looplib.CheckpointPolicy(every_steps=4),
    )
    return controller, model, strategy


def values(model, strategy):
    """Returns each variable of a model by its name, as lists of the values of its replicas."""
    found = {}
    for variable in model.variables:
        inner = variable if isinstance(variable, tf.Variable) else variable.value
        parts = strategy.experimental_local_results(inner)
        name = getattr(variable, "path", variable.name)
        assert name not in found
        found[name] = [np.asarray(part, "float64").tolist() for part in parts]
    return found


def main(kind, how, replicas, folder, *flags):
    killed = [int(flag.removeprefix("--kill=")) for flag in flags if flag.startswith("--kill=")]
    controller, model, strategy = controller_of(
        kind, how, int(replicas), folder, [Kill(step) for step in killed], "--no_evaluations" not in flags
    )
    if how == "keras" and "--no_evaluations" not in flags:
        controller.train_and_evaluate(steps=STEPS, eval_interval=8)
    else:
        controller.train(steps=STEPS)
    print(json.dumps(values(model, strategy)))


if __name__ == "__main__":
    main(*sys.argv[1:])

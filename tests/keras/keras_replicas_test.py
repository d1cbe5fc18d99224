"""Compiled models whose losses Keras does not divide by the number of replicas, and those that replicas cannot divide."""

import keras as keras3
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from conftest import make_strategy

import looplib
from looplib.compat import keras as _keras
from looplib.compat.patches import alone
from looplib.errors import LossError, MetricError, ModelError, StepError

FAMILIES = {"keras": keras3, "tf_keras": tf_keras}

ROWS, BATCH, STEPS = 39, 16, 3  # the last batch of an epoch has 7 rows, and replicas have 4 and 3
X = np.random.default_rng(0).normal(size=(ROWS, 6)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def mean_error(y, predicted):
    return tf.reduce_mean(tf.square(y - predicted))


def scalar_loss(keras):
    """A loss function that returns a mean."""
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), mean_error)
    return model


def scalar_beside_mean(keras):
    """Two outputs: a loss that Keras divides by the number of replicas, and one that it does not."""
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(4, "tanh", kernel_regularizer="l2")(inputs)
    outputs = {name: keras.layers.Dense(1, name=name)(hidden) for name in "ab"}
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.1), {"a": "mse", "b": mean_error})
    return model


def stepping(keras, compute, outputs=None, optimizer="sgd", returns=None):
    """A model whose `train_step` minimizes `compute(model, x, y)`, and tracks that, or returns it by a name."""

    class Model(keras.Model):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.tracker = keras.metrics.Mean(name="loss")

        @property
        def metrics(self):
            return [self.tracker]

        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = compute(self, *data)
            variables = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
            if returns is not None:
                return {returns: loss}
            self.tracker.update_state(loss, sample_weight=tf.shape(data[0])[0])
            return {"loss": self.tracker.result()}

    inputs = keras.Input((6,))
    model = Model(inputs, outputs(inputs) if outputs else keras.layers.Dense(1)(inputs))
    model.compile(optimizer)
    return model


def own_step(keras):
    """A `train_step` with plain means, and a tracker of them."""
    outputs = lambda inputs: keras.layers.Dense(1)(keras.layers.Dense(4, "tanh")(inputs))
    loss = lambda model, x, y: mean_error(y, model(x, training=True))
    return stepping(keras, loss, outputs, keras.optimizers.SGD(0.1, momentum=0.5))


def scaled_tracker(keras):
    """A `train_step` that tracks a loss of Keras, which Keras divides by the number of replicas."""
    error = keras.losses.MeanSquaredError()
    loss = lambda model, x, y: error(y, model(x, training=True))
    return stepping(keras, loss, optimizer=keras.optimizers.SGD(0.1))


def endpoint(keras):
    """A layer that adds the loss."""

    class Endpoint(keras.layers.Layer):
        def call(self, values):
            predicted, y = values
            self.add_loss(mean_error(y, predicted))
            return predicted

    x, y = keras.Input((6,), name="x"), keras.Input((1,), name="y")
    model = keras.Model({"x": x, "y": y}, Endpoint()([keras.layers.Dense(1)(x), y]))
    model.compile(keras.optimizers.SGD(0.1))
    return model


def trained(make, keras, strategy, x, y, **arguments):
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = make(keras)
        trainer = looplib.KerasTrainer(model, x, y, shuffle=False, **arguments)
    reports = []
    controller = looplib.Controller(
        looplib.RunConfig(global_batch_size=BATCH, steps_per_loop=STEPS),
        trainer=trainer,
        evaluator=trainer.evaluator() if "validation_data" in arguments else None,
        strategy=strategy,
        actions=[lambda event: reports.append(event.metrics["loss"])],
        writers=[],
    )  # fmt: skip
    controller.train(2 * STEPS)
    if "validation_data" in arguments:
        controller.evaluate()
    controller.close()
    return [np.array(variable) for variable in model.trainable_variables], reports


@pytest.fixture(params=FAMILIES)
def keras(request):
    return FAMILIES[request.param]


@pytest.mark.slow
@pytest.mark.parametrize("make", [scalar_loss, scalar_beside_mean, own_step, scaled_tracker, endpoint])
def test_replicas_train_and_report_as_fit_does_on_one_device(make, keras):
    x = {"x": X, "y": Y} if make is endpoint else X
    y = None if make is endpoint else {"a": Y, "b": 2 * Y} if make is scalar_beside_mean else Y
    if make is scaled_tracker and keras is tf_keras:
        pytest.skip("tf_keras refuses a loss that divides by the batch, on several replicas, in a step of one's own")
    keras.utils.set_random_seed(1)
    model = make(keras)
    history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    weights, losses = trained(make, keras, make_strategy("mirrored_x2"), x, y)
    for ours, theirs in zip(weights, model.trainable_variables, strict=True):
        np.testing.assert_allclose(ours, np.array(theirs), rtol=1e-4, atol=1e-6)
    # tf_keras does not weigh an added loss by examples, so that those of 4 and of 3 examples count alike.
    unweighed = make is endpoint and keras is tf_keras
    np.testing.assert_allclose(losses, history["loss"], rtol=0.01 if unweighed else 1e-4)


def masked(keras):
    """A loss for each step of a sequence, with a mask, whose mean Keras takes over the steps that count."""
    layers = [keras.Input((5,), dtype="int32"), keras.layers.Embedding(9, 4, mask_zero=True)]
    model = keras.Sequential([*layers, keras.layers.LSTM(3, return_sequences=True), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model, TOKENS, np.repeat(Y[:, None], 5, axis=1), None


def void(keras):
    """Classes of pixels, some of which do not count, behind batch normalization over all replicas."""
    layers = [keras.Input((3, 3, 2)), keras.layers.Conv2D(4, 3, padding="same")]
    layers += [keras.layers.BatchNormalization(synchronized=True, momentum=0.5), keras.layers.Conv2D(3, 1)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
    model.compile(keras.optimizers.SGD(0.1), loss)
    chance = np.random.default_rng(3)
    pixels = chance.normal(size=[ROWS, 3, 3, 2]).astype("float32")
    classes = np.where(chance.random([ROWS, 3, 3]) < np.linspace(0, 1, ROWS)[:, None, None], -1, 1)
    return model, pixels, classes, None


def divided_by_weights(keras):
    """A mean that is divided by the sum of the weights, some of which are large, of one output of two."""
    inputs = keras.Input((6,))
    model = keras.Model(inputs, {name: keras.layers.Dense(2, name=name)(inputs) for name in "ab"})
    mean = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    model.compile(keras.optimizers.SGD(0.02), {"a": mean, "b": "mae"}, loss_weights={"a": 0.5, "b": 2.0})
    weights = np.where(np.arange(ROWS) % 11 == 3, 60, 1).astype("float32")
    targets = np.concatenate([Y, -Y], axis=1)
    return model, X, {"a": targets, "b": 2 * targets}, {"a": weights, "b": weights}


def summed(keras):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.002), keras.losses.MeanSquaredError(reduction="sum"))
    return model, X, np.concatenate([Y, -Y], axis=1), None


def own_normalization(keras):
    """A layer that takes the statistics of all replicas, and adds a loss of them."""

    class Normalization(keras.layers.Layer):
        def call(self, x, training=False):
            context = tf.distribute.get_replica_context()
            sums = tf.stack([tf.ones_like(x), x, tf.square(x)])
            sums = tf.reduce_sum(sums, axis=1, keepdims=True)
            count, total, squares = tf.unstack(context.all_reduce("SUM", sums) if context else sums)
            mean = total / count
            self.add_loss(0.1 * tf.reduce_sum(tf.square(mean)))
            return (x - mean) / tf.sqrt(squares / count - tf.square(mean) + 0.1)

    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), Normalization(), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model, X, Y, None


def own_step_of_void(keras):
    """A `train_step` that calls a loss of Keras which leaves out a class."""
    error = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    loss = lambda model, x, y: error(y, model(x, training=True))
    model = stepping(keras, loss, keras.layers.Dense(3), keras.optimizers.SGD(0.1))
    return model, X, (np.arange(ROWS) // 5 % 3)[:, None], None


def counting(keras, compute, dtype="float32", share=1):
    """A layer that adds a loss of its counter of training steps, or of a share that grows with them, and its input."""

    class Adds(keras.layers.Layer):
        def build(self, shape):
            self.steps = self.add_weight(shape=(), initializer="zeros", dtype=dtype, trainable=False, name="steps")

        def call(self, x, training=False):
            if training:
                self.steps.assign_add(share)
            self.add_loss(compute(tf.cast(tf.convert_to_tensor(self.steps), tf.float32), x))
            return x

    return Adds()


def annealed_mean(keras):
    """A loss that a layer adds, a mean, whose share grows from zero with the steps."""
    adds = counting(keras, lambda steps, x: 0.1 * steps * tf.reduce_mean(tf.square(x)), "int32")
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), adds, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.02), "mse")
    return model, X, Y, None


TOKENS = np.where(np.arange(5) <= np.arange(ROWS)[:, None] // 8, 1 + np.arange(ROWS)[:, None] % 7, 0)
DIVIDED = [masked, void, divided_by_weights, summed, own_normalization, own_step_of_void, annealed_mean]


@pytest.mark.slow
@pytest.mark.parametrize("make", DIVIDED)
def test_what_a_loss_divides_by_is_that_of_the_global_batch(make, keras):
    """Masks, void classes, weights and sums, and sums over replicas in a layer; parts of batches differ in size."""
    if keras is tf_keras and make in (divided_by_weights, own_step_of_void):
        pytest.skip("tf_keras has no such reduction, and refuses a mean in a step of one's own on several replicas")
    keras.utils.set_random_seed(1)
    model, x, y, weights = make(keras)
    settings = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(x, y, sample_weight=weights, **settings).history
    arguments = {"sample_weight": weights}
    if make is not own_step_of_void:  # which has no loss in an evaluation
        evaluated = model.evaluate(x, y, sample_weight=weights, batch_size=BATCH, verbose=0, return_dict=True)
        history["loss"].append(evaluated["loss"])
        arguments["validation_data"] = x, y, weights
    two = make_strategy("mirrored_x2")
    found, losses = trained(lambda keras: make(keras)[0], keras, two, x, y, **arguments)
    for ours, theirs in zip(found, model.trainable_variables, strict=True):
        np.testing.assert_allclose(ours, np.array(theirs), rtol=2e-4, atol=1e-6)
    # tf_keras does not weigh an added loss by examples; and behind a sum over replicas, Keras reports that of all.
    unweighed = make is own_normalization or (make is annealed_mean and keras is tf_keras)
    np.testing.assert_allclose(losses, history["loss"], rtol=0.05 if unweighed else 1e-4)


def fixed_divisor(keras):
    """A `train_step` that divides by a number of its own."""
    outputs = lambda inputs: keras.layers.Dense(1)(keras.layers.BatchNormalization()(inputs))
    loss = lambda model, x, y: tf.reduce_sum(tf.square(y - model(x, training=True))) / BATCH
    return stepping(keras, loss, outputs, returns="error")


def contrastive(keras, noise=0.0):
    """A loss that compares examples with the others of the batch."""

    def loss(model, x, _):
        codes = [model(x + noise * tf.random.normal(tf.shape(x)), training=True) for _ in range(2)]
        logits = tf.matmul(codes[0], codes[1], transpose_b=True)
        labels = tf.range(tf.shape(x)[0])
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))

    return stepping(keras, loss, keras.layers.Dense(4), returns="loss")


def noisy_contrastive(keras):
    return contrastive(keras, 0.1)


def drawn(kind, keras):
    """A `train_step` that draws noise, whose loss is a mean or a sum."""
    reduce = {"mean": tf.reduce_mean, "sum": tf.reduce_sum}[kind]

    def loss(model, x, y):
        return reduce(tf.square(y - model(x + 0.2 * tf.random.normal(tf.shape(x)), training=True)))

    def outputs(inputs):
        return keras.layers.Dense(1)(keras.layers.Dropout(0.2)(keras.layers.Dense(8, "relu")(inputs)))

    return stepping(keras, loss, outputs, returns="loss")


def drawn_sum(keras):
    return drawn("sum", keras)


def added(keras, compute):
    """A layer that adds a loss, or changes its output, in a training alone."""

    class Layer(keras.layers.Layer):
        def call(self, x, training=False):
            return compute(self, x) if training else x

    hidden = [keras.layers.Dense(4), Layer(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((6,)), *hidden])
    model.compile(keras.optimizers.SGD(0.02), "mse")
    return model


def sum_in_training(keras):
    def compute(layer, x):
        layer.add_loss(0.05 * tf.reduce_sum(tf.square(x)))
        return x

    return added(keras, compute)


def normalized_in_training(keras):
    return added(keras, lambda layer, x: (x - tf.reduce_mean(x, 0)) / (1e-3 + tf.math.reduce_std(x, 0)))


def not_finite_for_few(keras):
    return added(keras, lambda layer, x: x + tf.where(tf.shape(x)[0] > 24, 0.0, np.nan))


def adding(keras, *layers):
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile("sgd", "mse")
    return model


def sum_behind_zeros(keras):
    """A sum over the examples that is zero before the first update."""
    adds = counting(keras, lambda steps, x: 0.05 * tf.reduce_sum(tf.square(x)))
    return adding(keras, keras.layers.Dense(1, kernel_initializer="zeros"), adds)


def annealed_sum(keras):
    """A sum over the examples, whose share grows from zero."""
    adds = counting(keras, lambda share, x: share * tf.reduce_sum(tf.square(x)), share=0.01)
    return adding(keras, keras.layers.Dense(1), adds)


def sum_by_a_counter(keras):
    """A sum over the examples, whose share grows with steps that a floating-point number counts."""
    share = lambda steps: tf.minimum(1.0, tf.square(steps / 100))
    return adding(keras, keras.layers.Dense(1), counting(keras, lambda n, x: share(n) * tf.reduce_sum(tf.square(x))))


def void_in_a_function(keras):
    """A function that takes the mean over some elements itself, behind batch normalization that is frozen."""

    def mean(y, predicted):
        counts = tf.cast(y > 0, tf.float32)
        return tf.reduce_sum(counts * tf.square(y - predicted)) / tf.reduce_sum(counts)

    frozen = keras.layers.BatchNormalization(trainable=False)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), frozen, keras.layers.Dense(1)])
    model.compile("sgd", mean)
    return model


def condition_in_a_layer(keras):
    """A layer that AutoGraph converts, and whose sum is the loss of a `train_step`."""

    class Task(keras.layers.Layer):
        def call(self, x):
            if tf.reduce_mean(x) > 1000.0:
                x = x / 1000.0
            return tf.reduce_sum(tf.square(x))

    model = stepping(keras, lambda model, x, y: model.task(model(x, training=True) - y), returns="error")
    model.task = Task()
    return model


def build(make, keras, **arguments):
    strategy = make_strategy("mirrored_x2")
    with strategy.scope():
        keras.utils.set_random_seed(1)
        return looplib.KerasTrainer(make(keras), X, Y, **arguments)


REFUSED = [fixed_divisor, contrastive, noisy_contrastive, drawn_sum, sum_in_training, normalized_in_training]
REFUSED += [
    not_finite_for_few,
    sum_behind_zeros,
    annealed_sum,
    sum_by_a_counter,
    void_in_a_function,
    condition_in_a_layer,
]


@pytest.mark.slow
@pytest.mark.parametrize("make", REFUSED)
def test_a_loss_that_replicas_cannot_divide_is_refused(make, keras):
    if make is condition_in_a_layer and keras is keras3:
        pytest.skip("Keras 3 does not convert what a layer calls")
    with pytest.raises(LossError, match="no mean over examples.*GradientTrainer.*per_replica=True"):
        build(make, keras)
    assert build(make, keras, per_replica=True)


def test_a_step_that_cannot_be_tried_is_refused_and_may_be_trained_nevertheless():
    def fixed(keras):
        class Model(type(own_step(keras))):
            def train_step(self, data):
                return super().train_step((tf.reshape(data[0], [8, 6]), data[1]))

        inputs = keras.Input((6,))
        model = Model(inputs, keras.layers.Dense(1)(inputs))
        model.compile("sgd")
        return model

    def with_size(keras):
        inputs = keras.Input((6,), batch_size=8)
        model = type(own_step(keras))(inputs, keras.layers.Dense(1)(inputs))
        model.compile("sgd")
        return model

    with pytest.raises(LossError, match="could not be tried.*per_replica=True"):
        build(fixed, keras3)
    with pytest.raises(LossError, match="batches of 8.*per_replica=True"):
        build(with_size, keras3)
    assert build(fixed, keras3, per_replica=True)


@pytest.mark.parametrize("scale", [2.0**15, 1.0])
def test_a_scaled_loss_that_overflows_at_first_is_compared_without_its_scale(scale):
    def scaled(keras):
        class Model(keras.Model):
            def train_step(self, data):
                with tf.GradientTape() as tape:
                    loss = mean_error(1e3 * tf.cast(data[1], tf.float16), self(data[0], training=True))
                    scaled = self.optimizer.scale_loss(loss)
                gradients = tape.gradient(scaled, self.trainable_variables)
                self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
                return {"loss": loss}

        inputs = keras.Input((6,), dtype="float16")
        model = Model(inputs, keras.layers.Dense(1, dtype="mixed_float16")(inputs))
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=scale))
        return model

    trainer = build(scaled, keras3)
    assert float(tf.convert_to_tensor(trainer.optimizer.dynamic_scale)) == scale


def test_a_loss_without_effect_when_it_is_tried_is_named(caplog):
    def hinge(keras):
        adds = counting(keras, lambda steps, x: tf.reduce_sum(tf.nn.relu(tf.square(x) - 1e6)))
        return adding(keras, keras.layers.Dense(1), adds)

    build(hinge, keras3)
    assert "model.losses[0]" in caplog.text


@pytest.mark.slow
def test_a_sum_is_refused_with_the_random_numbers_that_binaries_have():
    import tf_keras

    tf_keras.backend.experimental.enable_tf_random_generator()
    try:
        with pytest.raises(LossError):
            build(drawn_sum, tf_keras)
        with pytest.raises(LossError):
            build(noisy_contrastive, tf_keras)
        assert build(lambda keras: drawn("mean", keras), tf_keras)
    finally:
        tf_keras.backend.experimental.disable_tf_random_generator()


def queue(keras):
    """A `train_step` that keeps the newest examples, as contrastive methods do."""

    class Model(type(own_step(keras))):
        def train_step(self, data):
            logs = super().train_step(data)
            self.newest.assign(tf.concat([data[0][:2], tf.convert_to_tensor(self.newest)[:-2]], axis=0))
            return logs

    inputs = keras.Input((6,))
    model = Model(inputs, keras.layers.Dense(1)(inputs))
    model.newest = tf.Variable(tf.zeros([4, 6]), trainable=False, name="newest")
    model.compile("sgd")
    return model


def codebook(keras):
    """A layer that keeps an average of its batches."""

    class Average(keras.layers.Layer):
        def build(self, shape):
            self.mean = self.add_weight(name="mean", shape=(shape[-1],), initializer="zeros", trainable=False)

        def call(self, values, training=False):
            if training:
                self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(values, axis=0))
            return values - self.mean

    model = keras.Sequential([keras.Input((6,)), Average(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def by_hand(keras):
    """A `train_step` that updates the kernel of a layer of Keras itself, without an optimizer."""

    class Model(type(own_step(keras))):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = mean_error(y, self(x, training=True))
            variables = self.trainable_variables
            for variable, gradient in zip(variables, tape.gradient(loss, variables)):
                variable.assign(variable - 0.1 * gradient)
            return {"loss": loss}

    inputs = keras.Input((6,))
    model = Model(inputs, keras.layers.Dense(1, name="line")(inputs))
    model.compile(keras.optimizers.SGD(0.1))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("make, name", [(queue, "newest"), (codebook, "mean"), (by_hand, "line/kernel")])
def test_state_that_each_replica_would_compute_from_its_own_examples_is_refused(make, name, keras):
    with pytest.raises(LossError, match=f".*{name}.*batch.*per_replica=True"):
        build(make, keras)
    assert build(make, keras, per_replica=True)


def target_network(keras):
    """A model that keeps averages of its weights, which are equal on all replicas."""

    class Model(type(own_step(keras))):
        def train_step(self, data):
            logs = super().train_step(data)
            for average, weight in zip(self.target.weights, self.weights[:2]):
                average.assign(0.9 * average + 0.1 * weight)
            return logs

    inputs = keras.Input((6,))
    model = Model(inputs, keras.layers.Dense(1)(inputs))
    model.target = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile("sgd")
    return model


def batch_normalized(keras):
    model = keras.Sequential([keras.Input((6,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


def batch_normalized_step(keras):
    outputs = lambda inputs: keras.layers.Dense(1)(keras.layers.BatchNormalization()(inputs))
    return stepping(keras, lambda model, x, y: mean_error(y, model(x, training=True)), outputs, "adam")


def drawn_mean(keras):
    return drawn("mean", keras)


@pytest.mark.slow
@pytest.mark.parametrize("make", [batch_normalized, batch_normalized_step, target_network, drawn_mean])
def test_a_model_whose_layers_see_the_batch_or_draw_noise_is_not_refused_and_not_changed(make, keras):
    trainer = build(make, keras)
    make_strategy("default")
    keras.utils.set_random_seed(1)
    fresh = make(keras)
    for ours, theirs in zip(trainer.model.variables, fresh.variables, strict=True):
        if "seed" not in ours.name:
            np.testing.assert_array_equal(_value(ours), _value(theirs), ours.name)
    assert all(np.sum(_value(variable)) == 0 for metric in trainer.metrics for variable in metric.variables)


def _value(variable):
    return _keras.tf_variable(variable).numpy()


def test_a_replica_is_alone_only_where_it_is_asked_to_be():
    strategy = make_strategy("mirrored_x2")

    def seen():
        context = tf.distribute.get_replica_context()
        before = context.num_replicas_in_sync
        with alone():
            inside = context.num_replicas_in_sync, tf.distribute.get_strategy().num_replicas_in_sync
            gathered = context.all_gather(tf.random.normal([3, 1]), axis=0)
            outside = context.merge_call(lambda strategy: strategy.num_replicas_in_sync)
        return before, *inside, tf.shape(gathered)[0], outside, context.num_replicas_in_sync

    found = tf.function(lambda: strategy.run(seen), autograph=False)()
    assert [int(strategy.experimental_local_results(each)[-1]) for each in found] == [2, 1, 1, 6, 2, 2]


def test_a_strategy_that_counts_its_replicas_in_another_way_is_refused():
    class Other(tf.distribute.MirroredStrategy):
        num_replicas_in_sync = 2

    def step():
        with alone():
            return tf.constant(0)

    with pytest.raises(StepError):
        Other(["CPU:0", "CPU:1"]).run(step)


@pytest.mark.slow
def test_a_compiled_metric_of_ones_own_that_keeps_a_maximum_is_refused(keras):
    class Largest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="largest")
            self.kept = self.add_weight(name="kept", shape=(), initializer="zeros")

        def update_state(self, targets, predicted, sample_weight=None):
            self.kept.assign(tf.maximum(tf.convert_to_tensor(self.kept), tf.reduce_max(tf.abs(predicted))))

        def result(self):
            return tf.convert_to_tensor(self.kept)

    def make(keras):
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=[Largest()])
        return model

    with pytest.raises(MetricError):
        trained(make, keras, make_strategy("mirrored_x2"), X, Y)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_with_a_metric_that_is_named_continues_on_another_number_of_replicas(family, tmp_path):
    def trained(strategy, steps):
        keras = FAMILIES[family]
        with strategy.scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
            trainer = looplib.KerasTrainer(model, X, (Y[:, 0] > 0).astype("int32"))
        config = looplib.RunConfig(global_batch_size=16)
        with looplib.Controller(
            config, trainer=trainer, strategy=strategy, model_dir=tmp_path, writers=[]
        ) as controller:
            return controller.train(steps)

    trained(make_strategy("default"), 2)
    assert 0 <= trained(make_strategy("mirrored_x2"), 4)["accuracy"] <= 1


def semi_supervised(keras):
    """A `train_step` on unlabelled and labelled examples, each with a mean of its own."""

    class Semi(keras.Model):
        def __init__(self):
            super().__init__()
            self.net = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
            self.tracker = keras.metrics.Mean(name="loss")

        @property
        def metrics(self):
            return [self.tracker]

        def call(self, inputs):
            return self.net(inputs)

        def train_step(self, data):
            free, (x, y) = data
            with tf.GradientTape() as tape:
                loss = mean_error(y, self.net(x)) + tf.reduce_mean(tf.square(self.net(free)))
            variables = self.net.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
            self.tracker.update_state(loss)
            return {"loss": self.tracker.result()}

    keras.utils.set_random_seed(1)
    model = Semi()
    model.compile(keras.optimizers.SGD(0.1))
    model(X[:2])
    return model


@pytest.mark.parametrize("keras", FAMILIES.values(), ids=FAMILIES)
def test_labelled_and_unlabelled_examples_train_on_replicas_as_on_one_device(keras):
    def data():
        labelled = tf.data.Dataset.from_tensor_slices((X[:12], Y[:12])).batch(4)
        return tf.data.Dataset.zip((tf.data.Dataset.from_tensor_slices(X[:36]).batch(12), labelled))

    fit, strategy = semi_supervised(keras), make_strategy("mirrored_x2")
    history = fit.fit(data(), epochs=2, verbose=0).history
    with strategy.scope():
        model = semi_supervised(keras)
        trainer = looplib.KerasTrainer(model, data())
    config = looplib.RunConfig(global_batch_size=12)
    with looplib.Controller(config, trainer=trainer, strategy=strategy, writers=[]) as controller:
        found = controller.train(epochs=2)
    assert found["loss"] == pytest.approx(history["loss"][-1], rel=1e-5)
    for ours, theirs in zip(model.get_weights()[:2], fit.get_weights()[:2], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_graphs_whose_edges_name_nodes_are_refused_on_replicas_before_the_first_step():
    class Graphs(type(semi_supervised(keras3))):
        def train_step(self, data):
            nodes, (edges, y) = data
            with tf.GradientTape() as tape:
                neighbors = tf.gather(nodes, edges % tf.shape(nodes)[0])
                loss = mean_error(y, self.net(neighbors))
            variables = self.net.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
            return {"error": loss}

    edges = tf.data.Dataset.from_tensor_slices(((np.arange(16) * 5 % 12).astype("int32"), Y[:16])).batch(16)
    data = tf.data.Dataset.zip((tf.data.Dataset.from_tensor_slices(X[:12]).batch(12), edges))
    with make_strategy("mirrored_x2").scope():
        model = Graphs()
        model.compile("sgd")
        model(X[:2])
        with pytest.raises(LossError, match="12.*16 rows.*nodes and edges"):
            looplib.KerasTrainer(model, data)


SENTENCES = np.random.default_rng(3).normal(size=(ROWS, 5, 3)).astype("float32") + 1
SENTENCES[np.arange(5) >= np.random.default_rng(4).integers(1, 6, ROWS)[:, None]] = 0  # nothing after the end of each


def masked_normalization(keras):
    keras.utils.set_random_seed(1)
    layers = [keras.Input((5, 3)), keras.layers.Masking()]
    layers += [keras.layers.BatchNormalization(momentum=0.5, synchronized=True), keras.layers.LSTM(2)]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


class ByLoss(looplib.GradientTrainer):
    batches = "global"

    def dataset(self, context):
        data = context.indices(ROWS, shuffle=False, whole_epochs=True)
        return data.map(lambda i: (tf.gather(SENTENCES, i), tf.gather(Y, i)))

    def loss_fn(self, inputs):
        return tf.square(self.model(inputs[0], training=True) - inputs[1])[:, 0]


class ByStep(looplib.Trainer):
    batches, dataset = "global", ByLoss.dataset

    def __init__(self, model, optimizer):
        self.parts = {"of": [model]}
        self.optimizer = optimizer

    def step_fn(self, inputs):
        model = self.parts["of"][0]
        with tf.GradientTape() as tape:
            losses = tf.square(model(inputs[0], training=True) - inputs[1])[:, 0]
            loss = self.global_mean(losses)
        variables = model.trainable_variables
        self.apply_gradients(self.optimizer, zip(tape.gradient(loss, variables), variables))
        return {"loss": losses}


@pytest.mark.slow
@pytest.mark.parametrize("make", [None, ByLoss, ByStep])
def test_synchronized_statistics_leave_out_masked_steps_of_all_replicas(make, keras):
    strategy = make_strategy("mirrored_x2")
    with strategy.scope():
        model = masked_normalization(keras)
        if make is None:
            trainer = looplib.KerasTrainer(model, SENTENCES, Y, shuffle=False)
        else:
            trainer = make(model, model.optimizer)
    with looplib.Controller(
        looplib.RunConfig(global_batch_size=BATCH, steps_per_loop=STEPS), trainer=trainer, strategy=strategy, writers=[]
    ) as controller:
        controller.train(2 * STEPS)
    theirs = masked_normalization(keras)
    theirs.fit(SENTENCES, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    for found, expected in zip(model.variables, theirs.variables, strict=True):
        for part in strategy.experimental_local_results(_keras.tf_variable(found)):
            np.testing.assert_allclose(part.numpy(), np.array(expected), 1e-3, 1e-5, err_msg=found.name + part.device)


def test_an_unknown_way_to_synchronize_is_refused(monkeypatch):
    monkeypatch.setattr(keras3.layers.BatchNormalization, "_moments", lambda self, inputs, mask, weights: None)
    with make_strategy("mirrored_x2").scope():
        model = masked_normalization(keras3)
        with pytest.raises(ModelError, match="batch_normalization.*synchronized"):
            looplib.KerasTrainer(model, SENTENCES, Y)


@pytest.mark.parametrize("keras", FAMILIES.values(), ids=FAMILIES)
def test_examples_are_compared_with_those_of_all_replicas_as_on_one_device(keras):
    def loss(model, x, y):
        codes = tf.concat([model(x, training=True), y], axis=1)
        logits = tf.matmul(codes, looplib.all_gather(codes), transpose_b=True)
        labels = looplib.global_positions(codes)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))

    def make(keras):
        return stepping(keras, loss, keras.layers.Dense(3), keras.optimizers.SGD(0.05))

    def fitted():
        keras.utils.set_random_seed(1)
        model = make(keras)
        model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        return model.trainable_variables

    weights, _ = trained(make, keras, make_strategy("mirrored_x2"), X, Y)
    for ours, theirs in zip(weights, fitted(), strict=True):
        np.testing.assert_allclose(ours, np.array(theirs), rtol=1e-4, atol=1e-6)


def test_a_model_with_a_test_step_of_its_own_has_its_compiled_metrics_on_replicas():
    class Model(keras3.Model):
        def test_step(self, data):
            return {"loss": self.compute_loss(data[0], data[1], self(data[0]))}

    def make(keras):
        inputs = keras.Input((6,))
        model = Model(inputs, keras.layers.Dense(1)(inputs))
        model.compile("sgd", "mse", metrics=["mae"])
        return model

    assert build(make, keras3).evaluator(X, Y)

"""Models with a training step of their own, in the manner of Keras's public examples; rows of the matrix.

What the examples draw at random comes from the data here, so that trainings can be compared.
"""

import math

import numpy as np
import tensorflow as tf
from fit_rows import BATCH, labels, noise, padded, rows_of, sparse_loss

COUNTED = "A metric that a `train_step` updates without a sample weight counts both parts of an uneven batch equally."
DRAWN = "| numbers that a `train_step` draws from `tf.random`, or from `keras.random` without a seed generator of the model |"
OF_ANOTHER_REPLICA = "`model.losses` that a `train_step` reads after `apply_gradients` are those of another replica"
LAST_BATCH = "| other numbers that a `train_step` returns | those of the last batch"


def _apply(optimizer, tape, loss, variables):
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))


def _functional(keras, kind, outputs=1, features=5):
    """Returns a model of a class, of one input and a small network."""
    inputs = keras.Input((features,))
    return kind(inputs, keras.layers.Dense(outputs)(keras.layers.Dense(8, "tanh")(inputs)))


def _network(keras, features, *units, last=None):
    layers = keras.layers
    hidden = [layers.Dense(size, "tanh") for size in units[:-1]]
    return keras.Sequential([layers.InputLayer((features,)), *hidden, layers.Dense(units[-1], last)])


def _tracked(keras, *names):
    """Returns a class of models that track the mean of each loss."""

    class Tracked(keras.Model):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            for name in names:
                setattr(self, f"{name}_tracker", keras.metrics.Mean(name=name))

        @property
        def metrics(self):
            return [getattr(self, f"{name}_tracker") for name in names]

        def track(self, **values):
            for name, value in values.items():
                getattr(self, f"{name}_tracker").update_state(value)
            return {metric.name: metric.result() for metric in self.metrics}

    return Tracked


def compiled_step(keras):
    """A training step with the compiled loss and metrics, as in Keras's guide."""

    class Model(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(y=y, y_pred=y_pred)
            _apply(self.optimizer, tape, loss, self.trainable_variables)
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss)
                else:
                    metric.update_state(y, y_pred)
            return {metric.name: metric.result() for metric in self.metrics}

    model = _functional(keras, Model)
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    return model, dict(x=noise(5), y=noise(1, seed=1))


def plain_step(keras):
    """A training step with a loss and trackers of its own, as in Keras's guide."""

    class Model(_tracked(keras, "loss")):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = tf.reduce_mean(keras.losses.mean_squared_error(y, y_pred))
            _apply(self.optimizer, tape, loss, self.trainable_variables)
            return self.track(loss=loss)

    model = _functional(keras, Model)
    model.compile(keras.optimizers.SGD(0.1))
    return model, dict(x=noise(5), y=noise(1, seed=1))


def vector_loss(keras):
    """A training step whose loss has a number for each example, as in a masked language model."""

    class Model(_tracked(keras, "loss")):
        def train_step(self, data):
            tokens, targets, weights = data
            with tf.GradientTape() as tape:
                logits = self(tokens, training=True)
                loss = sparse_loss(keras, reduction="none")(targets, logits, sample_weight=weights)
            _apply(self.optimizer, tape, loss, self.trainable_variables)
            self.loss_tracker.update_state(loss, sample_weight=weights)
            return {"loss": self.loss_tracker.result()}

    inputs = keras.Input((6,), dtype="int32")
    model = Model(inputs, keras.layers.Dense(9)(keras.layers.Embedding(9, 4)(inputs)))
    model.compile(keras.optimizers.SGD(0.01))
    tokens = padded(9, 6)
    return model, dict(x=tokens, y=tokens, sample_weight=(tokens > 0).astype("float32"))


def weighted_step(keras):
    """A training step that passes sample weights on, and a test step, as in Keras's guide."""

    class Model(keras.Model):
        def train_step(self, data):
            x, y, sample_weight = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(y=y, y_pred=y_pred, sample_weight=sample_weight)
            _apply(self.optimizer, tape, loss, self.trainable_variables)
            return self.update(y, y_pred, loss, sample_weight)

        def test_step(self, data):
            x, y = data
            y_pred = self(x, training=False)
            return self.update(y, y_pred, self.compute_loss(y=y, y_pred=y_pred), None)

        def update(self, y, y_pred, loss, sample_weight):
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss)
                else:
                    metric.update_state(y, y_pred, sample_weight=sample_weight)
            return {metric.name: metric.result() for metric in self.metrics}

    model = _functional(keras, Model)
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    weights = np.linspace(0, 2, 24).astype("float32")
    held_out = (noise(5, seed=3), noise(1, seed=4))
    return model, dict(x=noise(5), y=noise(1, seed=1), sample_weight=weights, validation_data=held_out)


def own_compute_loss(keras):
    """A model that overrides `compute_loss`, with a metric of its own."""

    class Model(keras.Model):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.tracker = keras.metrics.Mean(name="distance")

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **others):
            loss = tf.reduce_mean(tf.square(y_pred - y)) + 0.1 * tf.reduce_mean(tf.abs(y_pred))
            self.tracker.update_state(loss)
            return loss

        @property
        def metrics(self):
            return [self.tracker]

    model = _functional(keras, Model)
    model.compile(keras.optimizers.SGD(0.1))
    return model, dict(x=noise(5), y=noise(1, seed=1))


def returned_numbers(keras):
    """A training step that returns numbers, without any metric objects."""

    class Model(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
            _apply(self.optimizer, tape, loss, self.trainable_variables)
            return {"own_loss": loss}

    model = _functional(keras, Model)
    model.compile(keras.optimizers.SGD(0.1))
    return model, dict(x=noise(5), y=noise(1, seed=1))


def gan(keras):
    """A GAN with two optimizers and a `compile` of its own."""

    class GAN(_tracked(keras, "d_loss", "g_loss")):
        def __init__(self, discriminator, generator):
            super().__init__()
            self.discriminator, self.generator = discriminator, generator

        def compile(self, d_optimizer, g_optimizer, loss_fn):
            super().compile()
            self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

        def train_step(self, data):
            real, latent = data
            rows = tf.shape(real)[0]
            both = tf.concat([self.generator(latent), real], axis=0)
            kinds = tf.concat([tf.ones([rows, 1]), tf.zeros([rows, 1])], axis=0)
            with tf.GradientTape() as tape:
                d_loss = self.loss_fn(kinds, self.discriminator(both))
            _apply(self.d_optimizer, tape, d_loss, self.discriminator.trainable_variables)
            with tf.GradientTape() as tape:
                g_loss = self.loss_fn(tf.zeros([rows, 1]), self.discriminator(self.generator(latent)))
            _apply(self.g_optimizer, tape, g_loss, self.generator.trainable_variables)
            return self.track(d_loss=d_loss, g_loss=g_loss)

    model = GAN(_network(keras, 6, 8, 1), _network(keras, 3, 8, 6))
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.01, global_clipnorm=0.1), loss)
    return model, dict(x=noise(6), y=noise(3, seed=1))


def one_optimizer_gan(keras):
    """A GAN whose two networks share one optimizer, with one step on the difference of two losses."""

    class GAN(_tracked(keras, "d_loss", "g_loss")):
        def __init__(self, discriminator, generator):
            super().__init__()
            self.discriminator, self.generator = discriminator, generator

        def train_step(self, data):
            real, latent = data
            with tf.GradientTape(persistent=True) as tape:
                fake = self.discriminator(self.generator(latent))
                d_loss = tf.reduce_mean(tf.nn.softplus(-self.discriminator(real)) + tf.nn.softplus(fake))
                g_loss = tf.reduce_mean(tf.nn.softplus(-fake))
            variables = [*self.discriminator.trainable_variables, *self.generator.trainable_variables]
            gradients = [
                *tape.gradient(d_loss, self.discriminator.trainable_variables),
                *tape.gradient(g_loss, self.generator.trainable_variables),
            ]
            self.optimizer.apply_gradients(zip(gradients, variables))
            return self.track(d_loss=d_loss, g_loss=g_loss)

    model = GAN(_network(keras, 6, 8, 1), _network(keras, 3, 8, 6))
    model.compile(keras.optimizers.SGD(0.1))
    return model, dict(x=noise(6), y=noise(3, seed=1))


def wgan_gp(keras):
    """A Wasserstein GAN with a gradient penalty, whose critic takes two steps for each of the generator."""

    class WGAN(_tracked(keras, "d_loss", "g_loss")):
        def __init__(self, critic, generator):
            super().__init__()
            self.critic, self.generator = critic, generator

        def compile(self, d_optimizer, g_optimizer):
            super().compile()
            self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

        def penalty(self, real, fake):
            mixed = 0.5 * (real + fake)
            with tf.GradientTape() as tape:
                tape.watch(mixed)
                found = self.critic(mixed, training=True)
            norm = tf.sqrt(tf.reduce_sum(tf.square(tape.gradient(found, [mixed])[0]), axis=1) + 1e-6)
            return tf.reduce_mean(tf.square(norm - 1.0))

        def train_step(self, data):
            real, latent = data
            for _ in range(2):
                with tf.GradientTape() as tape:
                    fake = self.generator(latent, training=True)
                    cost = tf.reduce_mean(self.critic(fake, training=True)) - tf.reduce_mean(self.critic(real))
                    d_loss = cost + 10.0 * self.penalty(real, fake)
                _apply(self.d_optimizer, tape, d_loss, self.critic.trainable_variables)
            with tf.GradientTape() as tape:
                g_loss = -tf.reduce_mean(self.critic(self.generator(latent, training=True), training=True))
            _apply(self.g_optimizer, tape, g_loss, self.generator.trainable_variables)
            return self.track(d_loss=d_loss, g_loss=g_loss)

    model = WGAN(_network(keras, 6, 8, 1), _network(keras, 3, 8, 6))
    model.compile(keras.optimizers.SGD(0.01), keras.optimizers.SGD(0.01))
    return model, dict(x=noise(6), y=noise(3, seed=1))


def vae(keras):
    """A variational autoencoder with three trackers, as in the public example."""

    class VAE(_tracked(keras, "loss", "reconstruction_loss", "kl_loss")):
        def __init__(self, encoder, decoder):
            super().__init__()
            self.encoder, self.decoder = encoder, decoder

        def train_step(self, data):
            x, chance = data
            with tf.GradientTape() as tape:
                mean, log_variance = tf.split(self.encoder(x), 2, axis=1)
                found = self.decoder(mean + tf.exp(0.5 * log_variance) * chance)
                reconstruction = tf.reduce_mean(tf.reduce_sum(tf.square(x - found), axis=1))
                kl = -0.5 * (1 + log_variance - tf.square(mean) - tf.exp(log_variance))
                kl = tf.reduce_mean(tf.reduce_sum(kl, axis=1))
                total = reconstruction + kl
            _apply(self.optimizer, tape, total, self.trainable_weights)
            return self.track(loss=total, reconstruction_loss=reconstruction, kl_loss=kl)

    model = VAE(_network(keras, 6, 8, 4), _network(keras, 2, 8, 6))
    model.compile(keras.optimizers.Adam(0.01))
    return model, dict(x=noise(6), y=noise(2, seed=1))


def vq_vae(keras):
    """A vector-quantized autoencoder, whose quantizer adds its losses and passes gradients straight through."""

    class Quantizer(keras.layers.Layer):
        def build(self, input_shape):
            self.codes = self.add_weight(name="codes", shape=(input_shape[-1], 8), initializer="random_uniform")

        def call(self, x):
            codes = tf.convert_to_tensor(self.codes)
            distances = tf.reduce_sum(x**2, axis=1, keepdims=True) + tf.reduce_sum(codes**2, axis=0) - 2 * x @ codes
            quantized = tf.matmul(tf.one_hot(tf.argmin(distances, axis=1), 8), codes, transpose_b=True)
            self.add_loss(0.25 * tf.reduce_mean((tf.stop_gradient(quantized) - x) ** 2))
            self.add_loss(tf.reduce_mean((quantized - tf.stop_gradient(x)) ** 2))
            return x + tf.stop_gradient(quantized - x)

    class Trainer(_tracked(keras, "loss", "reconstruction_loss", "vq_loss")):
        def __init__(self, vqvae):
            super().__init__()
            self.vqvae = vqvae

        def train_step(self, x):
            with tf.GradientTape() as tape:
                reconstruction = tf.reduce_mean((x - self.vqvae(x)) ** 2) / 0.5
                loss = reconstruction + sum(self.vqvae.losses)
            _apply(self.optimizer, tape, loss, self.vqvae.trainable_variables)
            return self.track(loss=loss, reconstruction_loss=reconstruction, vq_loss=sum(self.vqvae.losses))

    inputs = keras.Input((6,))
    code = Quantizer()(keras.layers.Dense(3)(inputs))
    model = Trainer(keras.Model(inputs, keras.layers.Dense(6)(code)))
    model.compile(keras.optimizers.Adam(0.01))
    return model, dict(x=noise(6))


def contrastive(keras):
    """SimCLR: the other examples of the batch are the negatives, so that parts of a batch have other losses."""

    class SimCLR(_tracked(keras, "loss")):
        def __init__(self, encoder):
            super().__init__()
            self.encoder = encoder

        def train_step(self, data):
            first, second = data
            with tf.GradientTape() as tape:
                left = tf.math.l2_normalize(self.encoder(first, training=True), axis=1)
                right = tf.math.l2_normalize(self.encoder(second, training=True), axis=1)
                similar = tf.matmul(left, right, transpose_b=True) / 0.5
                same = tf.range(tf.shape(left)[0])
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(same, similar))
            _apply(self.optimizer, tape, loss, self.encoder.trainable_variables)
            return self.track(loss=loss)

    model = SimCLR(_network(keras, 6, 8, 4))
    model.compile(keras.optimizers.SGD(0.5))
    return model, dict(x=noise(6), y=noise(6) + 0.1 * noise(6, seed=1))


def siamese(keras):
    """A siamese network with a triplet loss, whose inputs are three."""

    class Siamese(_tracked(keras, "loss")):
        def __init__(self, network, margin=0.5):
            super().__init__()
            self.network, self.margin = network, margin

        def call(self, inputs):
            anchor, positive, negative = (self.network(part) for part in inputs)
            return tf.reduce_sum((anchor - positive) ** 2, 1), tf.reduce_sum((anchor - negative) ** 2, 1)

        def train_step(self, data):
            with tf.GradientTape() as tape:
                near, far = self(data)
                loss = tf.reduce_mean(tf.maximum(near - far + self.margin, 0.0))
            _apply(self.optimizer, tape, loss, self.network.trainable_weights)
            return self.track(loss=loss)

    model = Siamese(_network(keras, 6, 8, 4))
    model.compile(keras.optimizers.SGD(0.1))
    triplets = (noise(6), noise(6, seed=1), noise(6, seed=2))
    return model, dict(x=tf.data.Dataset.from_tensor_slices(triplets).batch(BATCH))


def distiller(keras):
    """Distillation by a frozen teacher, with a `compile` of its own."""

    class Distiller(_tracked(keras, "loss", "distillation_loss")):
        def __init__(self, student, teacher):
            super().__init__()
            self.student, self.teacher = student, teacher
            self.teacher.trainable = False

        def compile(self, optimizer, student_loss, distillation_loss, alpha=0.1, temperature=3.0):
            super().compile(optimizer=optimizer)
            self.student_loss, self.distillation_loss = student_loss, distillation_loss
            self.alpha, self.temperature = alpha, temperature

        def call(self, x):
            return self.student(x)

        def train_step(self, data):
            x, y = data
            soft = tf.nn.softmax(self.teacher(x, training=False) / self.temperature)
            with tf.GradientTape() as tape:
                found = self.student(x, training=True)
                distilled = self.distillation_loss(soft, tf.nn.softmax(found / self.temperature))
                loss = self.alpha * self.student_loss(y, found) + (1 - self.alpha) * distilled
            _apply(self.optimizer, tape, loss, self.student.trainable_variables)
            return self.track(loss=loss, distillation_loss=distilled)

    model = Distiller(_network(keras, 6, 4, 3), _network(keras, 6, 8, 3))
    model.compile(keras.optimizers.SGD(0.5), sparse_loss(keras), keras.losses.KLDivergence())
    return model, dict(x=noise(6), y=labels(3))


def accumulating_step(keras):
    """A training step that adds up gradients in variables, and applies them every second time by `tf.cond`."""

    class Model(_tracked(keras, "loss")):
        def build(self, input_shape):
            super().build(input_shape)
            self.seen = tf.Variable(0, trainable=False)
            self.sums = [tf.Variable(tf.zeros(v.shape), trainable=False) for v in self.trainable_variables]

        def apply_sums(self):
            self.optimizer.apply_gradients(zip([total / 2 for total in self.sums], self.trainable_variables))
            for total in self.sums:
                total.assign(tf.zeros_like(total))
            return True

        def train_step(self, data):
            x, y = data
            self.seen.assign_add(1)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
            for total, gradient in zip(self.sums, tape.gradient(loss, self.trainable_variables)):
                total.assign_add(gradient)
            tf.cond(tf.equal(self.seen % 2, 0), self.apply_sums, lambda: False)
            return self.track(loss=loss)

    model = _functional(keras, Model)
    model.build((None, 5))
    model.compile(keras.optimizers.SGD(0.1))
    return model, dict(x=noise(5), y=noise(1, seed=1))


def clipping_step(keras):
    """A training step that clips its gradients itself, by their common norm."""

    class Model(_tracked(keras, "loss")):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
            gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, self.trainable_variables), 0.05)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
            return self.track(loss=loss)

    model = _functional(keras, Model)
    model.compile(keras.optimizers.SGD(0.5))
    return model, dict(x=noise(5), y=noise(1, seed=1))


def diffusion(keras):
    """A denoising model with an adapted normalizer and an average of its network."""

    class Diffusion(_tracked(keras, "n_loss", "i_loss")):
        def __init__(self, network, average):
            super().__init__()
            self.normalizer = keras.layers.Normalization()
            self.network, self.average = network, average
            self.average.set_weights(self.network.get_weights())

        def train_step(self, data):
            images, chance = data
            images, noises, times = self.normalizer(images, training=True), chance[:, 1:], chance[:, :1]
            signal = tf.cos(tf.abs(times) * math.pi / 4)
            noisy = signal * images + tf.sqrt(1 - signal**2) * noises
            with tf.GradientTape() as tape:
                found = self.network(tf.concat([noisy, times], axis=1), training=True)
                loss = tf.reduce_mean(tf.abs(noises - found))
                image_loss = tf.reduce_mean(tf.abs(images - (noisy - tf.sqrt(1 - signal**2) * found) / signal))
            _apply(self.optimizer, tape, loss, self.network.trainable_weights)
            for weight, average in zip(self.network.weights, self.average.weights):
                average.assign(0.9 * average + 0.1 * weight)
            return self.track(n_loss=loss, i_loss=image_loss)

    model = Diffusion(_network(keras, 7, 8, 6), _network(keras, 7, 8, 6))
    model.normalizer.adapt(3 * noise(6) + 1)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9))
    return model, dict(x=3 * noise(6) + 1, y=noise(7, seed=1))


def unseeded(keras):
    """A training step that draws from Keras's generator without a seed of its own."""

    class Model(_tracked(keras, "loss")):
        def train_step(self, data):
            x, y = data
            chance = keras.random.normal(tf.shape(x)) if keras.__name__ == "keras" else tf.random.normal(tf.shape(x))
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x + 0.1 * chance, training=True) - y))
            _apply(self.optimizer, tape, loss, self.trainable_variables)
            return self.track(loss=loss)

    model = _functional(keras, Model)
    model.compile(keras.optimizers.SGD(0.1))
    return model, dict(x=noise(5), y=noise(1, seed=1))


def feature_queue(keras):
    """Nearest neighbours among the examples of the steps before, which a variable keeps, as in NNCLR."""

    class Queue(_tracked(keras, "loss")):
        def __init__(self, encoder):
            super().__init__()
            self.encoder = encoder
            self.queue = self.add_weight(name="queue", shape=(32, 4), initializer="random_normal", trainable=False)

        def train_step(self, data):
            first, second = data
            with tf.GradientTape() as tape:
                found = tf.math.l2_normalize(self.encoder(first, training=True), axis=1)
                queue = tf.convert_to_tensor(self.queue)
                near = tf.gather(queue, tf.argmax(tf.matmul(found, queue, transpose_b=True), axis=1))
                other = tf.math.l2_normalize(self.encoder(second, training=True), axis=1)
                loss = tf.reduce_mean(tf.reduce_sum(tf.square(near - other), axis=1))
            _apply(self.optimizer, tape, loss, self.encoder.trainable_variables)
            self.queue.assign(tf.concat([found, self.queue[: -tf.shape(found)[0]]], axis=0))
            return self.track(loss=loss)

    model = Queue(_network(keras, 6, 8, 4))
    model.compile(keras.optimizers.SGD(0.1))
    return model, dict(x=noise(6), y=noise(6, seed=1))


def annealed(keras):
    """A loss whose weight follows a counter that the training step keeps in a variable."""

    class Model(_tracked(keras, "loss")):
        def build(self, input_shape):
            super().build(input_shape)
            self.counter = tf.Variable(0.0, trainable=False, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)

        def train_step(self, data):
            x, y = data
            self.counter.assign_add(1.0)
            with tf.GradientTape() as tape:
                loss = tf.minimum(self.counter / 4.0, 1.0) * tf.reduce_mean(tf.square(self(x, training=True) - y))
            _apply(self.optimizer, tape, loss, self.trainable_variables)
            return self.track(loss=loss)

    model = _functional(keras, Model)
    model.build((None, 5))
    model.compile(keras.optimizers.SGD(0.1))
    return model, dict(x=noise(5), y=noise(1, seed=1))


def actor_critic(keras):
    """An actor and a critic with a common network, whose loss adds three kinds."""

    class ActorCritic(_tracked(keras, "actor_loss", "critic_loss", "entropy")):
        def train_step(self, data):
            states, (actions, returns) = data
            with tf.GradientTape() as tape:
                logits, values = self(states, training=True)
                advantage = returns - values[:, 0]
                chosen = tf.nn.sparse_softmax_cross_entropy_with_logits(actions, logits)
                actor = tf.reduce_mean(chosen * tf.stop_gradient(advantage))
                critic = keras.losses.Huber()(returns[:, None], values)
                entropy = -tf.reduce_mean(tf.reduce_sum(tf.nn.softmax(logits) * tf.nn.log_softmax(logits), axis=1))
                loss = actor + critic - 0.01 * entropy
            _apply(self.optimizer, tape, loss, self.trainable_variables)
            return self.track(actor_loss=actor, critic_loss=critic, entropy=entropy)

    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(8, "relu")(inputs)
    model = ActorCritic(inputs, [keras.layers.Dense(3)(hidden), keras.layers.Dense(1)(hidden)])
    model.compile(keras.optimizers.SGD(0.05))
    return model, dict(x=noise(4), y=(labels(3), noise(seed=1)))


def target_network(keras):
    """Q learning: targets of a second network that follows the first."""

    class Agent(_tracked(keras, "loss")):
        def __init__(self, network, target):
            super().__init__()
            self.network, self.target = network, target
            self.target.set_weights(self.network.get_weights())

        def train_step(self, data):
            states, actions, rewards = data
            goal = rewards + 0.9 * tf.reduce_max(self.target(states), axis=1)
            with tf.GradientTape() as tape:
                values = tf.reduce_sum(self.network(states) * tf.one_hot(actions, 3), axis=1)
                loss = keras.losses.Huber()(goal[:, None], values[:, None])
            _apply(self.optimizer, tape, loss, self.network.trainable_variables)
            for variable, followed in zip(self.target.trainable_variables, self.network.trainable_variables):
                variable.assign(0.1 * followed + 0.9 * variable)
            return self.track(loss=loss)

    model = Agent(_network(keras, 4, 8, 3), _network(keras, 4, 8, 3))
    model.compile(keras.optimizers.RMSprop(0.01))
    return model, dict(x=noise(4), y=labels(3), sample_weight=noise(seed=1))


def physics(keras):
    """A physics-informed network: the loss has the derivative of the outputs by the inputs."""

    class Physics(_tracked(keras, "loss")):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    found = self(x, training=True)
                slope = inner.gradient(found, x)
                loss = tf.reduce_mean(tf.square(found - y)) + 0.1 * tf.reduce_mean(tf.square(slope[:, :1] + found))
            _apply(self.optimizer, tape, loss, self.trainable_variables)
            return self.track(loss=loss)

    model = _functional(keras, Physics)
    model.compile(keras.optimizers.SGD(0.1))
    return model, dict(x=noise(5), y=noise(1, seed=1))


def regularized_step(keras):
    """A training step that adds the model's regularization to a mean of its own."""

    class Model(_tracked(keras, "loss")):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x, training=True) - y)) + sum(self.losses)
            _apply(self.optimizer, tape, loss, self.trainable_variables)
            return self.track(loss=loss)

    inputs = keras.Input((5,))
    hidden = keras.layers.Dense(8, "tanh", kernel_regularizer=keras.regularizers.L2(0.1))(inputs)
    model = Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile(keras.optimizers.SGD(0.1))
    return model, dict(x=noise(5), y=noise(1, seed=1))


ROWS = rows_of(
    (compiled_step, dict(said={"replicas": COUNTED})), plain_step, vector_loss,
    (weighted_step, dict(said={"replicas": COUNTED})), own_compute_loss,
    (returned_numbers, dict(not_compared={"own_loss": LAST_BATCH})), gan, one_optimizer_gan, wgan_gp, vae,
    (vq_vae, dict(said={"replicas": OF_ANOTHER_REPLICA})),
    contrastive, siamese, distiller, accumulating_step, clipping_step, diffusion,
    (unseeded, dict(said={"replicas": DRAWN, "resumed": DRAWN})), feature_queue, annealed,
    actor_critic, target_network, physics, regularized_step,
)  # fmt: skip

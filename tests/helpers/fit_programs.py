"""Whole programs in the manner of Keras's and TensorFlow's public examples, each as a small model; rows of the matrix.

What the examples draw at random comes from the data here, so that trainings can be compared.
"""

import numpy as np
import scipy.optimize
import tensorflow as tf
from fit_rows import BATCH, EXAMPLES, labels, noise, padded, rows_of, sparse_loss
from fit_steps import LAST_BATCH
from fit_steps import _apply as apply
from fit_steps import _tracked as tracked

UNSEEN = "What the trial does not see: a difference that none of its 32 examples shows"
FEWER = EXAMPLES // 2  # examples with labels, beside those without


def _positions(keras, length, width):
    """Returns a layer that adds a learned vector to each position."""

    class Positions(keras.layers.Layer):
        def build(self, input_shape):
            self.table = keras.layers.Embedding(length, width)
            self.table.build((length,))

        def call(self, x):
            return x + self.table(tf.range(length))

    return Positions()


def _attention_block(keras, x, width=8):
    """Returns a layer of a vision transformer: attention and a small network, each with a shortcut."""
    layers = keras.layers
    normal = layers.LayerNormalization(epsilon=1e-6)(x)
    x = layers.Add()([layers.MultiHeadAttention(2, 4)(normal, normal), x])
    hidden = layers.Dense(2 * width, "gelu")(layers.LayerNormalization(epsilon=1e-6)(x))
    return layers.Add()([layers.Dense(width)(hidden), x])


def _convolution(keras, channels=3, filters=4, strides=2, size=8, activation="relu"):
    """Returns an encoder of images of one convolution."""
    layers = keras.layers
    return keras.Sequential(
        [
            layers.InputLayer((size, size, channels)),
            layers.Conv2D(filters, 3, strides, "same", activation=activation),
            layers.Flatten(),
            layers.Dense(6, "tanh"),
        ]
    )


# Translation


def _translator(keras):
    """Returns a translator: a bidirectional encoder, a decoder, attention between them, and masks of padding."""
    layers = keras.layers

    class Translator(keras.Model):
        def __init__(self):
            super().__init__()
            self.words, self.others = layers.Embedding(9, 8, mask_zero=True), layers.Embedding(7, 8, mask_zero=True)
            self.encoder = layers.Bidirectional(layers.GRU(4, return_sequences=True))
            self.decoder = layers.GRU(8, return_sequences=True)
            self.attention, self.normal = layers.MultiHeadAttention(1, 8), layers.LayerNormalization()
            self.out = layers.Dense(7)

        def call(self, inputs, training=False):
            context, target = inputs
            context = self.encoder(self.words(context))
            target = self.decoder(self.others(target))
            found = self.attention(query=target, value=context)
            return self.out(self.normal(target + found))

    return Translator()


def _sentences():
    target = padded(7, 6)
    context, given = padded(9, 5, seed=3).astype("int32"), np.roll(target, 1, axis=1).astype("int32")
    given[:, 0] = 1
    return (context, given), target


def nmt(keras):
    """A translator with attention, whose loss is a function of the mean over what is no padding, as in TensorFlow's tutorial."""

    def masked(y, logits):
        losses = sparse_loss(keras, reduction="none")(y, logits)
        mask = tf.cast(y != 0, losses.dtype)
        return tf.reduce_sum(losses * mask) / tf.reduce_sum(mask)

    model = _translator(keras)
    model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), masked)
    x, y = _sentences()
    return model, dict(x=x, y=y)


def nmt_masked(keras):
    """The same translator with Keras's loss and a weighted metric, which leave out the padding by Keras's masks"""
    model = _translator(keras)
    model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), sparse_loss(keras), weighted_metrics=["accuracy"])
    x, y = _sentences()
    return model, dict(x=x, y=y, sample_weight=(y != 0).astype("float32"))


# Images


def vit(keras):
    """A vision transformer: patches, learned positions, attention, and AdamW"""
    layers = keras.layers

    class Patches(layers.Layer):
        def call(self, images):
            patches = tf.image.extract_patches(images, [1, 4, 4, 1], [1, 4, 4, 1], [1, 1, 1, 1], "VALID")
            return tf.reshape(patches, [tf.shape(images)[0], 4, 48])

    inputs = keras.Input((8, 8, 3))
    hidden = _positions(keras, 4, 8)(layers.Dense(8)(Patches()(inputs)))
    for _ in range(2):
        hidden = _attention_block(keras, hidden)
    hidden = layers.Flatten()(layers.LayerNormalization(epsilon=1e-6)(hidden))
    model = keras.Model(inputs, layers.Dense(3)(layers.Dense(8, "gelu")(hidden)))
    metrics = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top_2")]
    model.compile(keras.optimizers.AdamW(0.003, weight_decay=1e-3, epsilon=1e-3), sparse_loss(keras), metrics=metrics)
    held_out = (noise(8, 8, 3, seed=3), labels(3, seed=4))
    return model, dict(x=noise(8, 8, 3), y=labels(3), validation_data=held_out)


def _simclr(keras, gather):
    """Returns SimCLR with a probe of its features, as in Keras's example; `gather` gives what all replicas have."""
    layers = keras.layers

    class SimCLR(tracked(keras, "c_loss", "c_acc", "p_loss", "p_acc")):
        def __init__(self):
            super().__init__()
            self.encoder = _convolution(keras)
            self.projection = keras.Sequential([layers.InputLayer((6,)), layers.Dense(6, "relu"), layers.Dense(4)])
            self.probe = keras.Sequential([layers.InputLayer((6,)), layers.Dense(3)])
            self.c_acc_tracker = keras.metrics.SparseCategoricalAccuracy(name="c_acc")
            self.p_acc_tracker = keras.metrics.SparseCategoricalAccuracy(name="p_acc")

        def compile(self, contrastive_optimizer, probe_optimizer):
            super().compile()
            self.contrastive_optimizer, self.probe_optimizer = contrastive_optimizer, probe_optimizer
            self.probe_loss = sparse_loss(keras)

        def contrast(self, first, second):
            first, second = (tf.math.l2_normalize(each, axis=1) for each in (first, second))
            similar = tf.matmul(first, gather(second), transpose_b=True) / 0.1
            same = tf.argmax(tf.matmul(tf.stop_gradient(first), gather(first), transpose_b=True), axis=1)
            self.c_acc_tracker.update_state(same, similar)
            return tf.nn.sparse_softmax_cross_entropy_with_logits(same, similar)

        def train_step(self, data):
            (free, shifts), (known, numbers) = data
            images = tf.concat([free, known], axis=0)
            with tf.GradientTape() as tape:
                first = self.projection(self.encoder(images, training=True), training=True)
                noisy = images + tf.concat([shifts, tf.reverse(known, [2])], axis=0)
                second = self.projection(self.encoder(noisy, training=True), training=True)
                c_loss = tf.reduce_mean(self.contrast(first, second) + self.contrast(second, first)) / 2
            variables = self.encoder.trainable_weights + self.projection.trainable_weights
            apply(self.contrastive_optimizer, tape, c_loss, variables)
            self.c_loss_tracker.update_state(c_loss)
            with tf.GradientTape() as tape:
                logits = self.probe(self.encoder(known, training=False), training=True)
                p_loss = self.probe_loss(numbers, logits)
            apply(self.probe_optimizer, tape, p_loss, self.probe.trainable_weights)
            self.p_loss_tracker.update_state(p_loss)
            self.p_acc_tracker.update_state(numbers, logits)
            return {metric.name: metric.result() for metric in self.metrics}

    model = SimCLR()
    model.compile(keras.optimizers.Adam(0.003), keras.optimizers.Adam(0.003))
    images = (noise(8, 8, 3), 0.3 * noise(8, 8, 3, seed=1))
    free = tf.data.Dataset.from_tensor_slices(images).batch(BATCH)
    known = (noise(8, 8, 3, seed=2, examples=FEWER), labels(3, examples=FEWER))
    known = tf.data.Dataset.from_tensor_slices(known).batch(BATCH // 2)
    return model, dict(x=tf.data.Dataset.zip((free, known)))


def simclr(keras):
    """SimCLR with a linear probe: images without and with labels in batches of two sizes, and two optimizers"""
    return _simclr(keras, gather=lambda rows: rows)


def cyclegan(keras):
    """A CycleGAN: four networks with four optimizers, cycle and identity losses, and one persistent tape"""
    layers = keras.layers

    def generator():
        normal = layers.GroupNormalization(groups=-1, epsilon=1e-3)
        parts = [layers.Conv2D(4, 3, padding="same"), normal, layers.ReLU(), layers.Conv2DTranspose(3, 3, 1, "same")]
        return keras.Sequential([layers.InputLayer((6, 6, 3)), *parts, layers.Activation("tanh")])

    def discriminator():
        return keras.Sequential([layers.InputLayer((6, 6, 3)), layers.Conv2D(4, 3, 2), layers.LeakyReLU(),
                                 layers.Conv2D(1, 2)])  # fmt: skip

    class CycleGAN(keras.Model):
        def __init__(self):
            super().__init__()
            self.gen_g, self.gen_f, self.disc_x, self.disc_y = (
                generator(),
                generator(),
                discriminator(),
                discriminator(),
            )

        def compile(self, make_optimizer, square, absolute):
            super().compile()
            self.g_optimizer, self.f_optimizer, self.x_optimizer, self.y_optimizer = (
                make_optimizer() for _ in range(4)
            )
            self.square, self.absolute = square, absolute

        def of_generator(self, fake, cycled, same, real):
            adversarial = self.square(tf.ones_like(fake), fake)
            return adversarial + 10.0 * self.absolute(real, cycled) + 5.0 * self.absolute(real, same)

        def of_discriminator(self, real, fake):
            return 0.5 * (self.square(tf.ones_like(real), real) + self.square(tf.zeros_like(fake), fake))

        def train_step(self, data):
            x, y = data
            with tf.GradientTape(persistent=True) as tape:
                fake_y, fake_x = self.gen_g(x, training=True), self.gen_f(y, training=True)
                cycled_x, cycled_y = self.gen_f(fake_y, training=True), self.gen_g(fake_x, training=True)
                same_x, same_y = self.gen_f(x, training=True), self.gen_g(y, training=True)
                of_fake_x, of_fake_y = self.disc_x(fake_x, training=True), self.disc_y(fake_y, training=True)
                g_loss = self.of_generator(of_fake_y, cycled_y, same_y, y)
                f_loss = self.of_generator(of_fake_x, cycled_x, same_x, x)
                x_loss = self.of_discriminator(self.disc_x(x, training=True), of_fake_x)
                y_loss = self.of_discriminator(self.disc_y(y, training=True), of_fake_y)
            apply(self.g_optimizer, tape, g_loss, self.gen_g.trainable_variables)
            apply(self.f_optimizer, tape, f_loss, self.gen_f.trainable_variables)
            apply(self.x_optimizer, tape, x_loss, self.disc_x.trainable_variables)
            apply(self.y_optimizer, tape, y_loss, self.disc_y.trainable_variables)
            return {"G_loss": g_loss, "F_loss": f_loss, "D_X_loss": x_loss, "D_Y_loss": y_loss}

    model = CycleGAN()
    losses = keras.losses.MeanSquaredError(), keras.losses.MeanAbsoluteError()
    model.compile(lambda: keras.optimizers.Adam(0.002, beta_1=0.5, epsilon=1e-2), *losses)
    images = (noise(6, 6, 3), noise(6, 6, 3, seed=1))
    return model, dict(x=tf.data.Dataset.from_tensor_slices(images).batch(BATCH))


def _adamatch(keras, threshold):
    """Returns AdaMatch; `threshold` makes one of the probabilities of the source, `[b, classes]`."""

    class AdaMatch(tracked(keras, "loss")):
        def __init__(self, network):
            super().__init__()
            self.network, self.steps = network, tf.Variable(0.0, trainable=False)

        def train_step(self, data):
            (target_weak, target_strong), (weak, strong, numbers, chance) = data
            source = tf.concat([weak, strong], axis=0)
            target = tf.concat([target_weak, target_strong], axis=0)
            rows, free = tf.shape(source)[0], tf.shape(target_weak)[0]
            with tf.GradientTape() as tape:
                both = self.network(tf.concat([source, target], axis=0), training=True)
                alone = self.network(source, training=True)
                share = tf.concat([chance, chance], axis=0)[:, None]
                mixed = share * both[:rows] + (1.0 - share) * alone
                of_weak = tf.nn.softmax(mixed[: rows // 2])
                pseudo = tf.nn.softmax(both[rows : rows + free])
                mean = tf.reduce_mean(pseudo, axis=0) if threshold is tf.reduce_mean else 1.0
                expected = tf.reduce_mean(of_weak, axis=0) if threshold is tf.reduce_mean else 1.0
                aligned = pseudo * expected / mean
                aligned = aligned / tf.reduce_sum(aligned, axis=1, keepdims=True)
                sure = tf.reduce_max(of_weak, axis=1)
                mask = tf.cast(tf.reduce_max(aligned, axis=1) >= 0.9 * threshold(sure), tf.float32)
                source_loss = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.tile(numbers, [2]), mixed)
                guessed = tf.stop_gradient(tf.argmax(aligned, axis=1))
                target_loss = tf.nn.sparse_softmax_cross_entropy_with_logits(guessed, both[rows + free :]) * mask
                growth = 0.5 - tf.cos(tf.minimum(np.pi, 2 * np.pi * self.steps / 20)) / 2
                loss = tf.reduce_mean(source_loss) + growth * tf.reduce_mean(target_loss)
            apply(self.optimizer, tape, loss, self.network.trainable_variables)
            self.steps.assign_add(1.0)
            return self.track(loss=loss)

    layers = keras.layers
    network = keras.Sequential([layers.InputLayer((5,)), layers.Dense(8, "relu"), layers.LayerNormalization(),
                                layers.Dense(3)])  # fmt: skip
    model = AdaMatch(network)
    model.compile(keras.optimizers.SGD(0.1))
    target = (noise(5), noise(5) + 0.5 * noise(5, seed=1))
    weak, chance = noise(5, seed=2, examples=FEWER), np.random.default_rng(5).uniform(size=FEWER).astype("float32")
    source = (weak, weak + 0.5 * noise(5, seed=3, examples=FEWER), labels(3, examples=FEWER), chance)
    parts = [(target, BATCH), (source, BATCH // 2)]
    return model, dict(x=tf.data.Dataset.zip(*(tf.data.Dataset.from_tensor_slices(part).batch(n) for part, n in parts)))


def adamatch(keras):
    """AdaMatch: a source and a target in batches of two sizes, aligned by means over the batch, with a relative threshold"""
    return _adamatch(keras, tf.reduce_mean)


def pseudo_labels(keras):
    """The same with a fixed threshold and without an alignment: each example has a loss of its own"""
    return _adamatch(keras, lambda sure: 0.4)


# Detection


def _boxes():
    """Returns made boxes, `[examples, 2, 4]` as centers and sizes, and their classes, of which -1 is none."""
    boxes = np.random.default_rng(6).uniform(0.2, 0.6, (EXAMPLES, 2, 4)).astype("float32")
    classes = labels(3, 2, seed=7)
    classes[np.arange(EXAMPLES) % 3 == 0, 1] = -1
    return boxes, classes


def retinanet(keras):
    """RetinaNet: a pyramid of features, two heads with shared weights, anchors, and a focal loss for each image"""
    layers = keras.layers

    class Loss(keras.losses.Loss):
        def call(self, y_true, y_pred):
            boxes, kinds = y_true[:, :, :4], y_true[:, :, 4]
            known = tf.one_hot(tf.cast(kinds, tf.int32), 3)
            chance = tf.nn.sigmoid(y_pred[:, :, 4:])
            right = tf.where(known == 1.0, chance, 1 - chance)
            alpha = tf.where(known == 1.0, 0.25, 0.75)
            cross = tf.nn.sigmoid_cross_entropy_with_logits(known, y_pred[:, :, 4:])
            focal = tf.reduce_sum(alpha * tf.pow(1.0 - right, 2.0) * cross, axis=-1)
            off = tf.abs(boxes - y_pred[:, :, :4])
            smooth = tf.reduce_sum(tf.where(off < 1.0, 0.5 * off**2, off - 0.5), axis=-1)
            positive, ignored = tf.cast(kinds > -1.0, tf.float32), tf.cast(kinds == -2.0, tf.float32)
            focal, smooth = focal * (1 - ignored), smooth * positive
            count = tf.reduce_sum(positive, axis=-1)
            found = [tf.math.divide_no_nan(tf.reduce_sum(part, axis=-1), count) for part in (focal, smooth)]
            return found[0] + found[1]

    def head(outputs, bias="zeros"):
        parts = [layers.Conv2D(4, 3, padding="same", activation="relu"),
                 layers.Conv2D(outputs, 3, padding="same", bias_initializer=bias)]  # fmt: skip
        return keras.Sequential([layers.InputLayer((None, None, 4)), *parts])

    inputs = keras.Input((8, 8, 3))
    fine = layers.Conv2D(4, 3, 2, "same", activation="relu")(inputs)
    coarse = layers.Conv2D(4, 3, 2, "same", activation="relu")(fine)
    pyramid = [layers.Add()([layers.Conv2D(4, 1)(fine), layers.UpSampling2D(2)(layers.Conv2D(4, 1)(coarse))])]
    pyramid.append(layers.Conv2D(4, 1)(coarse))
    of_boxes, of_classes = head(4), head(3, keras.initializers.Constant(-2.0))
    reshaped = [
        layers.Concatenate()([layers.Reshape((-1, 4))(of_boxes(part)), layers.Reshape((-1, 3))(of_classes(part))])
        for part in pyramid
    ]
    model = keras.Model(inputs, layers.Concatenate(axis=1)(reshaped))
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), Loss())
    return model, dict(
        x=noise(8, 8, 3), y=_of_anchors(*_boxes()), validation_data=(noise(8, 8, 3, seed=3), _of_anchors(*_boxes()))
    )


def _of_anchors(boxes, classes):
    """Returns what the anchors of a grid of 4 and one of 2 shall find, `[examples, 20, 5]`: a box and its class."""
    centers = [((np.arange(n) + 0.5) / n, 1.0 / n) for n in (4, 2)]
    anchors = np.concatenate([[(x, y, size, size) for y in places for x in places] for places, size in centers])
    low, high = (boxes[:, :, None, :2] + sign * boxes[:, :, None, 2:] / 2 for sign in (-1, 1))
    anchor_low, anchor_high = (anchors[:, :2] + sign * anchors[:, 2:] / 2 for sign in (-1, 1))
    shared = np.prod(np.clip(np.minimum(high, anchor_high) - np.maximum(low, anchor_low), 0, None), axis=-1)
    union = np.prod(boxes[:, :, None, 2:], axis=-1) + np.prod(anchors[:, 2:], axis=-1) - shared
    overlap = np.where(classes[:, :, None] >= 0, shared / union, 0)
    best = np.argmax(overlap, axis=1)
    most = np.max(overlap, axis=1)
    matched = np.take_along_axis(boxes, best[:, :, None], axis=1)
    offsets = np.concatenate(
        [(matched[..., :2] - anchors[:, :2]) / anchors[:, 2:], np.log(matched[..., 2:] / anchors[:, 2:])], -1
    )
    kinds = np.where(most >= 0.2, np.take_along_axis(classes, best, axis=1), np.where(most < 0.1, -1, -2))
    return np.concatenate([offsets, kinds[..., None]], axis=-1).astype("float32")


def _detr(keras, by_image):
    """Returns DETR, whose loss is divided by the objects of each image or of the batch."""
    layers = keras.layers

    def matched(classes, boxes, known, expected):
        """Returns for each object the query that the least cost pairs with it, `[b, objects]`."""
        cost = -np.take_along_axis(classes, np.maximum(known, 0)[:, None, :], axis=2)
        cost = cost + 5 * np.abs(boxes[:, :, None] - expected[:, None]).sum(-1)
        cost = np.where(known[:, None, :] >= 0, cost, 0)
        return np.stack([_column_order(*scipy.optimize.linear_sum_assignment(each)) for each in cost])

    class Detector(tracked(keras, "loss", "class_loss", "box_loss")):
        def train_step(self, data):
            images, (boxes, kinds) = data
            present = tf.cast(kinds >= 0, tf.float32)
            with tf.GradientTape() as tape:
                logits, found = self(images, training=True)
                given = [tf.nn.softmax(logits), found, kinds, boxes]
                pairs = tf.numpy_function(lambda *arrays: matched(*arrays), given, tf.int64)
                pairs = tf.ensure_shape(pairs, [None, 2])
                places = tf.one_hot(pairs, 4) * present[:, :, None]
                expected = tf.einsum("boq,bo->bq", places, tf.cast(kinds, tf.float32)) + 3 * (
                    1 - tf.reduce_sum(places, 1)
                )
                cross = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(expected, tf.int32), logits)
                weights = tf.where(expected == 3, 0.1, 1.0)
                off = tf.reduce_sum(tf.abs(tf.gather(found, pairs, batch_dims=1) - boxes), axis=-1) * present
                if by_image:
                    class_loss = tf.reduce_mean(tf.reduce_sum(cross * weights, 1) / tf.reduce_sum(weights, 1))
                    box_loss = tf.reduce_mean(tf.reduce_sum(off, 1) / tf.reduce_sum(present, 1))
                else:
                    class_loss = tf.reduce_sum(cross * weights) / tf.reduce_sum(weights)
                    box_loss = tf.reduce_sum(off) / tf.reduce_sum(present)
                loss = class_loss + 5 * box_loss
            apply(self.optimizer, tape, loss, self.trainable_variables)
            return self.track(loss=loss, class_loss=class_loss, box_loss=box_loss)

    class Queries(layers.Layer):
        def build(self, input_shape):
            self.queries = self.add_weight(name="queries", shape=(4, 8), initializer="random_normal")

        def call(self, memory):
            return tf.tile(tf.convert_to_tensor(self.queries)[None], [tf.shape(memory)[0], 1, 1])

    inputs = keras.Input((8, 8, 3))
    memory = layers.Reshape((4, 8))(layers.Conv2D(8, 4, 4, activation="relu")(inputs))
    memory = _attention_block(keras, _positions(keras, 4, 8)(memory))
    queries = Queries()(memory)
    found = layers.LayerNormalization()(layers.Add()([queries, layers.MultiHeadAttention(2, 4)(queries, memory)]))
    model = Detector(inputs, [layers.Dense(4)(found), layers.Dense(4, "sigmoid")(layers.Dense(8, "relu")(found))])
    model.compile(keras.optimizers.AdamW(0.003, epsilon=1e-3, clipnorm=0.1), jit_compile=False)  # numpy runs in it
    return model, dict(x=noise(8, 8, 3), y=_boxes())


def _column_order(rows, columns):
    return rows[np.argsort(columns)]


def detr(keras):
    """DETR: queries that Hungarian matching (scipy) pairs with the objects; its losses divide by the objects of the batch"""
    return _detr(keras, by_image=False)


def detr_by_image(keras):
    """The same with losses that divide by the objects of each image"""
    return _detr(keras, by_image=True)


# Graphs


def _molecules():
    """Returns made molecules: atoms `[24, 5, 4]`, bonds `[24, 5, 5]` and how many atoms each has."""
    sizes = 2 + labels(4, seed=8)
    bonds = (labels(2, 5, 5, seed=9) + np.eye(5, k=1, dtype=int) + np.eye(5, dtype=int)) > 0
    there = np.arange(5) < sizes[:, None]
    return noise(5, 4) * there[:, :, None], (bonds & there[:, :, None] & there[:, None, :]), sizes


def _messages(keras, layers, steps=2):
    """Returns a layer that passes messages along pairs of atoms, and updates the atoms by a GRU."""

    class MessagePassing(layers.Layer):
        def build(self, input_shape):
            self.send, self.update = layers.Dense(4), layers.GRUCell(4)
            self.send.build((None, 4)), self.update.build((None, 4))

        def call(self, inputs):
            atoms, pairs = inputs
            for _ in range(steps):
                sent = tf.gather(self.send(atoms), pairs[:, 1])
                arrived = tf.math.unsorted_segment_sum(sent, pairs[:, 0], tf.shape(atoms)[0])
                atoms, _ = self.update(arrived, [atoms])
            return atoms

    return MessagePassing()


def mpnn(keras):
    """Message passing in molecules, which a data set joins to one graph for each batch: atoms, pairs and molecules by number"""
    layers = keras.layers
    atoms, bonds, sizes = _molecules()
    y = labels(2, 1).astype("float32")

    def batches():
        for start in range(0, EXAMPLES, BATCH):
            chosen = range(start, min(start + BATCH, EXAMPLES))
            first = np.concatenate([[0], np.cumsum(sizes[chosen.start : chosen.stop])])
            pairs = [np.argwhere(bonds[one]) + first[number] for number, one in enumerate(chosen)]
            features = np.concatenate([atoms[one, : sizes[one]] for one in chosen])
            molecules = np.repeat(np.arange(len(chosen)), sizes[chosen.start : chosen.stop])
            yield (features, np.concatenate(pairs), molecules), y[chosen.start : chosen.stop]

    class Readout(layers.Layer):
        def call(self, inputs):
            rows = tf.cast(tf.reduce_max(inputs[1]) + 1, tf.int32)
            return tf.math.unsorted_segment_mean(inputs[0], inputs[1], rows)

    inputs = (keras.Input((4,)), keras.Input((2,), dtype="int64"), keras.Input((), dtype="int64"))
    hidden = _messages(keras, layers)([layers.Dense(4, "tanh")(inputs[0]), inputs[1]])
    outputs = layers.Dense(1, "sigmoid")(layers.Dense(8, "relu")(Readout()([hidden, inputs[2]])))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["AUC"])
    specs = (tf.TensorSpec([None, 4]), tf.TensorSpec([None, 2], tf.int64), tf.TensorSpec([None], tf.int64))
    graphs = tf.data.Dataset.from_generator(batches, output_signature=(specs, tf.TensorSpec([None, 1])))
    return model, dict(x=graphs.apply(tf.data.experimental.assert_cardinality(2)))


def mpnn_padded(keras):
    """The same with molecules that are padded to five atoms, and bonds in a matrix"""
    layers = keras.layers
    atoms, bonds, sizes = _molecules()

    class MessagePassing(layers.Layer):
        def build(self, input_shape):
            self.send, self.update = layers.Dense(4), layers.Dense(4, "tanh")
            self.send.build((None, 4)), self.update.build((None, 8))

        def call(self, inputs):
            atoms, bonds, there = inputs
            for _ in range(2):
                arrived = tf.matmul(bonds, self.send(atoms))
                atoms = self.update(tf.concat([atoms, arrived], axis=-1)) * there[:, :, None]
            return tf.reduce_sum(atoms, axis=1) / tf.reduce_sum(there, axis=1, keepdims=True)

    inputs = (keras.Input((5, 4)), keras.Input((5, 5)), keras.Input((5,)))
    found = MessagePassing()([layers.Dense(4, "tanh")(inputs[0]), inputs[1], inputs[2]])
    model = keras.Model(inputs, layers.Dense(1, "sigmoid")(layers.Dense(8, "relu")(found)))
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["AUC"])
    there = (np.arange(5) < sizes[:, None]).astype("float32")
    return model, dict(x=(atoms, bonds.astype("float32"), there), y=labels(2, 1).astype("float32"))


def forward_forward(keras):
    """Forward-forward: each layer has an optimizer and takes steps of its own, with right and wrong labels in the inputs"""

    class Layer(keras.layers.Layer):
        def __init__(self, units, optimizer):
            super().__init__()
            self.dense, self.optimizer = keras.layers.Dense(units), optimizer
            self.seen = keras.metrics.Mean(name="layer_loss")

        def build(self, input_shape):
            self.dense.build(input_shape)

        def call(self, x):
            return tf.nn.relu(self.dense(x / (tf.norm(x, axis=1, keepdims=True) + 1e-4)))

        def learn(self, right, wrong, steps=2):
            for _ in range(steps):
                with tf.GradientTape() as tape:
                    good, bad = (tf.reduce_mean(tf.square(self(x)), axis=1) for x in (right, wrong))
                    loss = tf.reduce_mean(tf.nn.softplus(tf.concat([0.5 - good, bad - 0.5], axis=0)))
                apply(self.optimizer, tape, loss, self.dense.trainable_weights)
                self.seen.update_state(loss)
            return tf.stop_gradient(self(right)), tf.stop_gradient(self(wrong)), self.seen.result()

    class Network(keras.Model):
        def __init__(self):
            super().__init__()
            self.steps = [Layer(8, keras.optimizers.Adam(0.01)), Layer(8, keras.optimizers.Adam(0.01))]
            self.loss_sum = keras.metrics.Mean(name="loss")

        @property
        def metrics(self):
            return [self.loss_sum, *(layer.seen for layer in self.steps)]

        def overlay(self, x, numbers):
            return tf.concat([tf.one_hot(numbers, 3) * tf.reduce_max(x, axis=1, keepdims=True), x[:, 3:]], axis=1)

        def call(self, x):
            goodness = []
            for number in range(3):
                hidden, total = self.overlay(x, tf.fill([tf.shape(x)[0]], number)), 0.0
                for layer in self.steps:
                    hidden = layer(hidden)
                    total += tf.reduce_mean(tf.square(hidden), axis=1)
                goodness.append(total)
            return tf.argmax(tf.stack(goodness, axis=1), axis=1)

        def train_step(self, data):
            x, numbers, others = data
            right, wrong = self.overlay(x, numbers), self.overlay(x, (numbers + 1 + others) % 3)
            for layer in self.steps:
                right, wrong, loss = layer.learn(right, wrong)
                self.loss_sum.update_state(loss)
            return {"FinalLoss": self.loss_sum.result()}

    model = Network()
    model.compile(keras.optimizers.Adam(0.01))
    return model, dict(x=noise(8), y=labels(3), sample_weight=labels(2, seed=5))


ROWS = rows_of(
    nmt, nmt_masked, vit, simclr, (cyclegan, dict(not_compared=dict.fromkeys(("G_loss", "F_loss", "D_X_loss", "D_Y_loss"), LAST_BATCH))),
    (adamatch, dict(said={"replicas": UNSEEN})), pseudo_labels, retinanet, detr, detr_by_image, (mpnn, dict(settings={"batch_size_varies": True})), mpnn_padded, forward_forward,
)  # fmt: skip

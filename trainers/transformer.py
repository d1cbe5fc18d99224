"""A decoder-only transformer, and the generation of text with it."""

import dataclasses
import math
import time

import keras
import tensorflow as tf

Pair = tuple[tf.Tensor, tf.Tensor]

_MATMUL_SIZE, _MATMULS = 1024, 10


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of a decoder.

    Attributes:
      width: elements of a token's vector.
      layers: number of blocks.
      heads: attention heads of a block; width / heads is even.
    """

    width: int
    layers: int
    heads: int


class Block(keras.layers.Layer):
    """A pre-norm block: attention, then two dense layers with a squared ReLU between them (So et al., 2021, Primer).

    Args:
      size: the size of the decoder.
      name: the layer's name.
    """

    def __init__(self, size: Size, name: str) -> None:
        super().__init__(name=name)
        self._heads = size.heads
        small = keras.initializers.RandomNormal(0.5 / math.sqrt(size.width))
        self.before_attention = keras.layers.RMSNormalization(name="before_attention")
        self.qkv = _dense(3 * size.width, "qkv", small)
        self.merge = _dense(size.width, "merge", "zeros")
        self.before_dense = keras.layers.RMSNormalization(name="before_dense")
        self.widen = _dense(4 * size.width, "widen", small)
        self.narrow = _dense(size.width, "narrow", "zeros")

    def call(
        self, x: tf.Tensor, rotation: Pair, visible: tf.Tensor, cache: Pair | None = None, here: tf.Tensor | None = None
    ) -> tuple[tf.Tensor, Pair]:
        """Computes the next vectors of tokens.

        Args:
          x: float `[batch, length, width]`.
          rotation: cosines and sines, float `[batch, 1, length, width / heads / 2]`, for pairs of elements.
          visible: bool, broadcasts to `[batch, 1, length, keys]`: the keys that each token attends to.
          cache: keys and values of all positions, `[batch, heads, keys, width / heads]`; None where `x` has them all.
          here: bool `[keys, 1]`, the position in the cache of the one token of `x`.

        Returns:
          Vectors `[batch, length, width]`, and the keys and values with those of `x`.
        """
        shape = tf.shape(x)
        parts = tf.reshape(self.qkv(self.before_attention(x)), [shape[0], shape[1], 3, self._heads, -1])
        queries, keys, values = tf.unstack(tf.transpose(parts, [2, 0, 3, 1, 4]))
        queries, keys = _rotated(queries, rotation), _rotated(keys, rotation)
        if cache is not None:
            keys, values = tf.where(here, keys, cache[0]), tf.where(here, values, cache[1])
        scores = tf.cast(tf.matmul(queries, keys, transpose_b=True), tf.float32) / math.sqrt(queries.shape[-1])
        weights = tf.cast(tf.nn.softmax(tf.where(visible, scores, -1e9)), values.dtype)
        attended = tf.reshape(tf.transpose(tf.matmul(weights, values), [0, 2, 1, 3]), shape)
        x = x + self.merge(attended)
        return x + self.narrow(tf.square(tf.nn.relu(self.widen(self.before_dense(x))))), (keys, values)


class Decoder(keras.Model):
    """Predicts the next token: rotary positions, pre-norm blocks, one table for the tokens of input and output.

    Documents stand one after the other in a row. A token attends to itself and the earlier tokens of its document, and
    positions count from the document's beginning.

    Args:
      tokens: number of different tokens.
      start: the token that starts a document.
      size: its size.
    """

    def __init__(self, tokens: int, start: int, size: Size) -> None:
        super().__init__(name="decoder")
        self.size, self._start = size, start
        self.blocks = [Block(size, f"block_{number}") for number in range(size.layers)]
        self.before_logits = keras.layers.RMSNormalization(name="before_logits")
        deviation = keras.initializers.RandomNormal(1 / math.sqrt(size.width))
        self.table = self.add_weight(shape=(tokens, size.width), initializer=deviation, name="table")
        self(tf.fill([1, 1], start))  # creates the variables

    def call(self, tokens: tf.Tensor) -> tf.Tensor:
        """Returns the logits of the next tokens, float32 `[batch, length, tokens]`, for int32 `[batch, length]`."""
        documents, places = tf.cumsum(tf.cast(tokens == self._start, tf.int32), axis=1), tf.range(tf.shape(tokens)[1])
        visible = (documents[:, :, None] == documents[:, None, :]) & (places[:, None] >= places)
        rotation = self._rotation(tf.reduce_sum(tf.cast(visible, tf.int32), axis=2) - 1)
        x = self._vectors(tokens)
        for block in self.blocks:
            x, _ = block(x, rotation, visible[:, None])
        return self._logits(x)

    @tf.function(reduce_retracing=True)
    def generate(
        self, tokens: tf.Tensor, known: tf.Tensor, temperature: tf.Tensor, top_p: tf.Tensor, seed: tf.Tensor
    ) -> tf.Tensor:
        """Continues documents, with a cache of the keys and values of earlier tokens.

        Args:
          tokens: int32 `[batch, length]`; rows start with the token `start` and have the known tokens; others are
            replaced.
          known: int32 scalar, number of known tokens, at least 1.
          temperature: float32 scalar, the divisor of logits; 0 takes the most probable token.
          top_p: float32 scalar; a token is drawn from the most probable ones whose probabilities sum to at least this
            (Holtzman et al., 2020, nucleus sampling).
          seed: int32 scalar; equal seeds draw equal tokens.

        Returns:
          int32 `[batch, length]`.
        """
        batch, length = tf.shape(tokens)[0], tf.shape(tokens)[1]
        heads = self.size.heads
        empty = tf.zeros([batch, heads, length, self.size.width // heads], self.compute_dtype)
        caches = [(empty, empty) for _ in self.blocks]
        places = tf.range(length)
        for place in tf.range(length - 1):
            x, rotation = self._vectors(tokens[:, place, None]), self._rotation(tf.fill([1, 1], place))
            kept = []
            for block, cache in zip(self.blocks, caches):
                x, pair = block(x, rotation, places <= place, cache, (places == place)[:, None])
                kept.append(pair)
            caches = kept
            drawn = _drawn(self._logits(x)[:, 0], temperature, top_p, tf.stack([seed, place]))
            replaced = (places == place + 1) & (places >= known)
            tokens = tf.where(replaced, drawn[:, None], tokens)
        return tokens

    def _vectors(self, tokens: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.gather(self.table, tokens), self.compute_dtype) * math.sqrt(self.size.width)

    def _logits(self, x: tf.Tensor) -> tf.Tensor:
        table = tf.cast(self.table, self.compute_dtype)
        return tf.cast(tf.matmul(self.before_logits(x), table, transpose_b=True), tf.float32)

    def _rotation(self, positions: tf.Tensor) -> Pair:
        """Returns cosines and sines, `[batch, 1, length, half]`, of positions int32 `[batch, length]`."""
        half = self.size.width // self.size.heads // 2
        frequencies = 10_000.0 ** (-tf.range(half, dtype=tf.float32) / half)
        angles = tf.cast(positions, tf.float32)[:, None, :, None] * frequencies
        return tf.cast(tf.cos(angles), self.compute_dtype), tf.cast(tf.sin(angles), self.compute_dtype)


def training_flops(model: Decoder, length: int) -> float:
    """Returns the floating-point operations of training on one token.

    They are 6 for each weight, which multiplies once forward and twice backward, and 12 * layers * width * length for
    attention to a row's tokens (Chowdhery et al., 2022, PaLM, appendix B), of which masked ones count too.

    Args:
      model: the model.
      length: tokens of a row.
    """
    return 6.0 * model.count_params() + 12.0 * model.size.layers * model.size.width * length


def measured_peak(dtype: str) -> float:
    """Measures the floating-point operations a second of a product of matrices on the default device.

    Args:
      dtype: the type that the model computes in.
    """
    matrix = tf.cast(tf.random.stateless_normal([_MATMUL_SIZE] * 2, seed=[0, 0]), dtype)
    seconds = []
    for _ in range(_MATMULS):
        started = time.perf_counter()
        tf.matmul(matrix, matrix).numpy()
        seconds.append(time.perf_counter() - started)
    return 2 * _MATMUL_SIZE**3 / min(seconds)


def _dense(units: int, name: str, initializer: str | keras.Initializer) -> keras.layers.Dense:
    return keras.layers.Dense(units, use_bias=False, kernel_initializer=initializer, name=name)


def _rotated(x: tf.Tensor, rotation: Pair) -> tf.Tensor:
    """Rotates pairs of elements by angles that grow with the position (Su et al., 2021, RoFormer)."""
    cosines, sines = rotation
    first, second = tf.split(x, 2, axis=-1)
    return tf.concat([first * cosines - second * sines, first * sines + second * cosines], axis=-1)


def _drawn(logits: tf.Tensor, temperature: tf.Tensor, top_p: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Draws tokens int32 `[batch]`, from logits float32 `[batch, tokens]`; see `Decoder.generate`."""
    best = tf.argmax(logits, axis=-1, output_type=tf.int32)
    logits = logits / tf.where(temperature > 0, temperature, 1.0)
    ordered, order = tf.math.top_k(logits, k=tf.shape(logits)[-1])
    before = tf.cumsum(tf.nn.softmax(ordered), axis=-1, exclusive=True)
    ordered = tf.where((before < top_p) | (tf.range(tf.shape(logits)[-1]) == 0), ordered, -1e9)
    number = tf.random.stateless_categorical(ordered, 1, seed, dtype=tf.int32)
    return tf.where(temperature > 0, tf.gather(order, number, batch_dims=1)[:, 0], best)

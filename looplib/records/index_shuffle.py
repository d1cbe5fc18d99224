"""The keyed permutation of `tf.random.experimental.index_shuffle`, from integer ops that XLA compiles.

XLA makes vector instructions of these ops, which compute the same numbers, many at once, in less than the op's time.
"""

import math

import tensorflow as tf

_CONSTANT, _BITS, _LEAST_WIDTH = 0xFFFFFFFC, 0x7369F885192C0EF5, 16


def index_shuffle(index: tf.Tensor, key: tuple[int, tf.Tensor], max_index: int, rounds: int) -> tf.Tensor:
    """Returns where permutations of 0 to `max_index` take numbers.

    The permutation is a cipher of blocks of an even number of bits (Simon: Beaulieu and others, 2013), applied until
    the number is in the range.

    Args:
      index: int64 `[n]`, the numbers.
      key: the seed, and int64 `[n]`, the second part of each number's key; the third is 0.
      max_index: the largest number.
      rounds: of the cipher, an even number of at least 4.

    Returns:
      int64 `[n]`, that of `tf.raw_ops.RandomIndexShuffle`.
    """
    if max_index == 0:
        return tf.zeros_like(index)
    width = math.ceil(math.log2(max_index))
    word = max(width + width % 2, _LEAST_WIDTH) // 2
    kinds = (tf.uint8, tf.uint16, tf.uint32, tf.uint64)
    kind, wide = next(pair for pair in zip(kinds, kinds[1:]) if word <= 8 * pair[0].size)
    mask = tf.constant(2**word - 1, kind)
    seed, other = key
    zero = tf.zeros_like(index, kind)
    keys = [zero + tf.constant(seed % 2**word, kind), tf.cast(other % 2**word, kind), zero]
    for i in range(3, rounds):
        bit = _BITS % 2**word >> i - 3 & 1
        before = keys[-1]
        turned = _turned(before, word - 3, word, mask) ^ _turned(before, word - 4, word, mask)
        keys.append(keys[-3] ^ turned ^ tf.constant(_CONSTANT % 2**word ^ bit, kind))

    def encrypt(left: tf.Tensor, right: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        for first, second in zip(keys[::2], keys[1::2]):
            left = left ^ _mixed(right, word, mask) ^ first
            right = right ^ _mixed(left, word, mask) ^ second
        return left, right

    def whole(left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
        return tf.bitwise.left_shift(tf.cast(left, wide), tf.constant(word, wide)) | tf.cast(right, wide)

    def outside(left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
        return whole(left, right) > tf.constant(min(max_index, wide.max), wide)

    def again(left: tf.Tensor, right: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        new, out = encrypt(left, right), outside(left, right)
        return tf.where(out, new[0], left), tf.where(out, new[1], right)

    half = tf.bitwise.right_shift(index, tf.constant(word, tf.int64)) % 2**word
    start = encrypt(tf.cast(half, kind), tf.cast(index % 2**word, kind))
    return tf.cast(whole(*tf.while_loop(lambda *now: tf.reduce_any(outside(*now)), again, start)), tf.int64)


def _turned(x: tf.Tensor, places: int, word: int, mask: tf.Tensor) -> tf.Tensor:
    """Rotates words of so many bits to the left."""
    if places % word == 0:
        return x
    left = tf.bitwise.left_shift(x, tf.constant(places, x.dtype))
    return (left | tf.bitwise.right_shift(x, tf.constant(word - places, x.dtype))) & mask


def _mixed(x: tf.Tensor, word: int, mask: tf.Tensor) -> tf.Tensor:
    return _turned(x, 1, word, mask) & _turned(x, 8, word, mask) ^ _turned(x, 2, word, mask)

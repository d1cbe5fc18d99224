"""Integer checksums of tensors in which each changed bit shows, alike on every device and in XLA."""

import collections
import math
from collections.abc import Sequence

import tensorflow as tf

_UNSIGNED = {1: tf.uint8, 2: tf.uint16, 4: tf.uint32}  # by the bytes of a number
_OTHERS = (tf.bool, tf.string, tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128)
_SUMMED = frozenset({*_OTHERS, *_UNSIGNED.values(), tf.uint64, tf.int8, tf.int16, tf.int32, tf.int64})
_COLUMNS = 1024  # of a vector that is longer, so that no temporary tensor is much larger than the vector
_SMALL = 2**14  # elements of a tensor that is joined with others, which copies it
_FACTOR = 0x1E3779B97F4A7C15  # odd, and without a pattern


def can_sum(dtype: tf.DType) -> bool:
    """Returns whether tensors of a type have checksums."""
    return dtype in _SUMMED


@tf.autograph.experimental.do_not_convert
def checksums(value: tf.Tensor) -> tf.Tensor:
    """Returns two checksums of a tensor of any shape, int64 `[2]`.

    The first is the sum of the words of its content, which changes for certain if one bit does, or if all changed bits
    are in one word. The second weights each word by its place, so that it shows most other changes. Sums wrap around.
    """
    return _sums(_words(value))


@tf.autograph.experimental.do_not_convert
def checksums_together(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns two checksums of many tensors, int64 `[2]`, by few ops; comparable for tensors of equal static shapes."""
    small, large = collections.defaultdict(list), []
    for words in map(_words, values):
        count = words.shape.num_elements()
        if count is None or count > _SMALL:
            large.append(words)
        else:
            small[words.dtype].append(tf.reshape(words, [count]))
    sums = tf.zeros([2], tf.int64)
    for number, words in enumerate([*(tf.concat(parts, axis=0) for parts in small.values()), *large]):
        sums += _sums(words) * (2 * number + 1)  # odd: no changed bit vanishes
    return sums


def _sums(words: tf.Tensor) -> tf.Tensor:
    matrix = _matrix(words)
    rows, columns = (tf.cast(tf.reduce_sum(matrix, axis=axis), tf.int64) for axis in (1, 0))
    weighted = tf.reduce_sum(rows * _odd_numbers(rows)) + _FACTOR * tf.reduce_sum(columns * _odd_numbers(columns))
    return tf.stack([tf.reduce_sum(rows), weighted])


def _odd_numbers(like: tf.Tensor) -> tf.Tensor:
    return 2 * tf.range(tf.size(like, tf.int64)) + 1


def _words(value: tf.Tensor) -> tf.Tensor:
    """Returns the content of a tensor as integers of 32 or 64 bits, without a copy where it has that size already."""
    if value.dtype == tf.string:
        return tf.strings.to_hash_bucket_fast(value, 2**62)
    if value.dtype.is_complex:
        value = tf.stack([tf.math.real(value), tf.math.imag(value)], axis=-1)
    if value.dtype == tf.bool:
        return tf.cast(value, tf.uint32)
    if value.dtype.size == 8:
        return tf.bitcast(value, tf.int64)
    return tf.cast(tf.bitcast(value, _UNSIGNED[value.dtype.size]), tf.uint32)


def _matrix(words: tf.Tensor) -> tf.Tensor:
    """Returns words as `[rows, columns]`, with zeros at the end of a long vector."""
    shape = words.shape
    if shape.rank is not None and shape.rank > 1:
        sizes = shape.as_list() if shape.is_fully_defined() else tf.unstack(tf.shape(words), shape.rank)
        return tf.reshape(words, [math.prod(sizes[:-1]), sizes[-1]])
    count = shape.num_elements()
    if count is not None and count <= _COLUMNS:
        return tf.reshape(words, [1, count])
    words = tf.reshape(words, [-1])
    missing = -tf.size(words) % _COLUMNS
    return tf.reshape(tf.concat([words, tf.zeros([missing], words.dtype)], axis=0), [-1, _COLUMNS])

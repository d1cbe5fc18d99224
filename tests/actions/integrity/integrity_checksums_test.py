"""The checksums of `integrity`: each changed bit shows, and every device, XLA and data set computes the same."""

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from benchmarks.corruptions import with_flipped_bit
from looplib.actions.checksums import can_sum, checksums, checksums_together

BITS = np.random.default_rng(0).integers(0, 256, [5, 3, 16], np.uint8)
KINDS = [
    np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32,
    np.int64, np.uint64, np.complex64, np.complex128,
]  # fmt: skip
VALUES = {np.dtype(kind).name: BITS.view(kind) for kind in KINDS}
VALUES |= {
    "bool": BITS[..., 0] > 127,
    "scalar": np.float32(1.5),
    "vector": np.arange(5, dtype=np.float32),
    "long vector": np.zeros(3001, np.float32),
    "zeros": np.zeros([4, 4], np.float32),
}
EMPTY = [np.zeros(shape, np.float32) for shape in ([0], [0, 3], [3, 0], [0, 0])]


def sums(value):
    return tuple(checksums(tf.constant(value)).numpy())


def by_numpy(value):
    """The first checksum: the sum of the words, in Python's whole numbers; rows of 32-bit words wrap around."""
    value = np.asarray(value)
    if value.dtype == bool:
        words = value.astype(np.uint32)
    elif value.dtype.kind == "c":
        words = np.stack([value.real, value.imag], axis=-1)
    else:
        words = value
    words = words.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[words.dtype.itemsize])
    bits = 64 if words.dtype.itemsize == 8 else 32
    rows = words.reshape(-1, words.shape[-1]) if words.ndim > 1 else words.reshape(1, -1)
    total = sum(sum(map(int, row)) % 2**bits for row in rows)
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("kind", [name for name in VALUES if name != "long vector"])
def test_every_single_bit_shows(kind):
    value = VALUES[kind]
    assert can_sum(tf.as_dtype(value.dtype)) and sums(value)[0] == by_numpy(value)
    expected, bits = sums(value)[0], 1 if value.dtype == bool else 8 * value.dtype.itemsize
    elements = min(value.size, 3)
    for element in range(elements):
        for bit in range(bits):
            changed = with_flipped_bit(value, element * (value.size // elements), bit)
            assert sums(changed)[0] != expected, (element, bit)


def test_places_count():
    value = np.random.default_rng(1).normal(size=[6, 7]).astype(np.float32)
    for one, other in [((0, 0), (0, 1)), ((0, 0), (1, 0)), ((2, 3), (5, 1))]:
        changed = value.copy()
        changed[one], changed[other] = value[other], value[one]
        assert sums(changed)[0] == pytest.approx(sums(value)[0], abs=2**40) and sums(changed) != sums(value)
    long = np.arange(3001, dtype=np.float32)
    assert sums(long) != sums(long[::-1].copy()) and sums(long)[0] % 2**32 == int(long.view(np.uint32).sum()) % 2**32


@pytest.mark.parametrize("value", EMPTY, ids=str)
def test_nothing_sums_to_nothing(value):
    assert sums(value) == (0, 0)


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("kind", [*VALUES, "strings"])
def test_graphs_xla_and_data_sets_compute_the_same(kind):
    value = tf.constant([["a", ""], ["bc", "d"]]) if kind == "strings" else tf.constant(VALUES[kind])
    expected = checksums(value).numpy().tolist()
    unknown = tf.function(checksums, input_signature=[tf.TensorSpec([None] * value.shape.rank, value.dtype)])
    (in_data,) = tf.data.Dataset.from_tensors(value).map(checksums)
    found = [unknown(value), in_data]
    if kind != "strings":  # which XLA does not have
        found.append(tf.function(checksums, jit_compile=True)(value))
    assert [one.numpy().tolist() for one in found] == [expected] * len(found)


@pytest.mark.slow
def test_each_of_many_joined_tensors_counts():
    def together(values):
        return checksums_together([tf.constant(value) for value in values]).numpy().tolist()

    values = [*VALUES.values(), np.zeros([200, 200], np.float32), *EMPTY]
    for number, value in enumerate(values):
        if value.size:
            changed = [*values[:number], with_flipped_bit(value, value.size - 1, 0), *values[number + 1 :]]
            assert together(changed)[0] != together(values)[0], number

"""How long data lasts on workers with shares of any lengths, against a step by step count."""

import itertools

import pytest
import tensorflow as tf

from looplib.data.streams import ShareLengths

ENDLESS, UNKNOWN = tf.data.INFINITE_CARDINALITY, tf.data.UNKNOWN_CARDINALITY


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_data_lasts_as_long_as_each_replica_gets_a_batch(replicas):
    for shares in itertools.product([0, 1, 4, 7], repeat=3):
        rest, steps = list(shares), 0
        while all(count >= replicas for count in rest):
            rest, steps = [count - replicas for count in rest], steps + 1
        lengths = ShareLengths(shares, replicas)
        assert lengths.steps == steps
        for worker, count in enumerate(rest):
            assert (f"{count} of worker {worker}" in lengths.left_out()) == bool(count)


def test_what_is_not_known_is_not_said():
    assert ShareLengths([3, UNKNOWN], 1).steps is None and ShareLengths([3, UNKNOWN], 1).left_out() == ""
    assert ShareLengths([ENDLESS] * 2, 1).steps is None and ShareLengths([ENDLESS] * 2, 1).left_out() == ""
    assert (
        ShareLengths([ENDLESS, 3], 1).steps == 3
        and "all further of worker 0" in ShareLengths([ENDLESS, 3], 1).left_out()
    )
    assert ShareLengths([5], 2).left_out() == "5 batches for 2 replicas, of which the last 1 are left out"
    assert ShareLengths([6], 2).left_out() == ""

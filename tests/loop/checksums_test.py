"""The checksum of examples: of their content and step alone."""

import itertools
import json

import numpy as np
import pytest
import tensorflow as tf
import toy
from conftest import make_strategy
from ordered import ordered

import looplib
from looplib.loop.additions import examples_checksum, hash_of_each, of_parts

BATCHES = {
    "numbers": tf.reshape(tf.range(8.0), [4, 2]),
    "strings": tf.constant([["a", "bc"], ["", "x"], ["a", "bc"], ["y", "y"]]),
    "no columns": tf.zeros([4, 0]),
    "no strings": tf.zeros([4, 0], tf.string),
    "ragged": tf.ragged.constant([[1, 2], [], [3, 4, 5], [6]]),
    "twice ragged": tf.ragged.constant([[["a"], ["b", "c"]], [], [["d"]], [[]]]),
    "sparse": tf.sparse.from_dense([[1, 0], [0, 2], [0, 0], [3, 4]]),
}
BATCHES["all"] = (dict(BATCHES), tf.constant(3))


def part(value, start, end):
    if isinstance(value, tf.SparseTensor):
        return tf.sparse.slice(value, [start, 0], [end - start, value.shape[1]])
    return value[start:end] if value.shape.rank else value


def summed(parts):
    return of_parts(parts.numpy())


def together(*sums):
    """(The checksum, the count) of several."""
    return sum(one for one, _ in sums) % 2**53, sum(count for _, count in sums)


def by_numpy(columns, step):
    """The checksum of rows of words, in numpy."""
    np.seterr(over="ignore")

    def mix(words):
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
        return words ^ (words >> np.uint64(31))

    def hashed(rows):
        rows = np.ascontiguousarray(rows.reshape(len(rows), -1))
        words = mix(rows.view(np.uint64)) if rows.itemsize == 8 else rows.view(np.uint32).astype(np.uint64)
        keys = mix(np.arange(1, words.shape[1] + 1, dtype=np.uint64)) | np.uint64(1)
        return mix((words * keys).sum(axis=1, dtype=np.uint64))

    rows = np.stack([*map(hashed, columns), np.full(len(columns[0]), step, np.uint64)], axis=1)
    return sum(int(number) % 2**53 for number in hashed(rows)) % 2**53


def test_the_checksum_is_the_sum_of_hashes_of_content_and_step():
    features = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    columns = np.arange(8, dtype=np.int64), features
    assert summed(examples_checksum(tuple(map(tf.constant, columns)), 7)) == (by_numpy(columns, 7), 8)
    changed = features.copy()
    changed[7].view(np.uint8)[1] ^= 1
    assert summed(examples_checksum((tf.constant(columns[0]), tf.constant(changed)), 7))[0] != by_numpy(columns, 7)


@pytest.mark.slow
@pytest.mark.parametrize("kind", BATCHES)
def test_parts_of_a_batch_sum_to_the_whole(kind):
    whole = summed(examples_checksum(BATCHES[kind], 5))
    assert whole[1] == 4 and 0 <= whole[0] < 2**53
    for cuts in ([0, 1, 4], [0, 2, 4], [0, 4, 4]):
        parts = [tf.nest.map_structure(lambda v: part(v, a, b), BATCHES[kind]) for a, b in zip(cuts, cuts[1:])]
        assert together(*(summed(examples_checksum(p, 5)) for p in parts)) == whole
    assert summed(examples_checksum(BATCHES[kind], 6)) != whole
    assert summed(tf.function(examples_checksum)(BATCHES[kind], tf.constant(5))) == whole


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    "kind", [tf.uint8, tf.float32, tf.int64, tf.bool, tf.float16, tf.float64, tf.complex64, tf.int16]
)
def test_xla_computes_the_same(kind):
    batch = tf.cast(tf.random.stateless_uniform([4, 5, 3], [1, 2], -9, 9), kind), tf.range(4)
    compiled = tf.function(examples_checksum, jit_compile=True)
    assert summed(compiled(batch, tf.constant(5))) == summed(examples_checksum(batch, 5))


def test_rows_that_differ_have_other_hashes():
    for kind in (tf.float32, tf.float64):
        rows = tf.constant(list(itertools.product([-1, 0, 1, 2], repeat=7)), kind)
        assert len(set(hash_of_each(rows).numpy().tolist())) == 4**7


def test_what_belongs_together_counts():
    x, y = tf.range(4), tf.range(4) * 10
    assert summed(examples_checksum((x, y), 0)) != summed(examples_checksum((x, y[::-1]), 0))
    assert summed(examples_checksum((x, y), 0)) == summed(examples_checksum((x[::-1], y[::-1]), 0))
    assert summed(examples_checksum((x, y, tf.constant([1, 2, 3])), 0)) == summed(
        examples_checksum((x, y, tf.constant([1, 2, 4])), 0)
    )  # no examples, so left out
    assert examples_checksum(tf.constant(1), 0) is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", [tf.int64, tf.float32, tf.string])
def test_padding_to_the_longest_of_a_batch_does_not_count(kind):
    rows = [[3, 1, 4], [1], [5, 0, 2, 6], [5, 3]]
    number = lambda row: tf.strings.as_string(row) if kind == tf.string else tf.cast(row, kind)

    def padded(some):
        data = tf.data.Dataset.from_generator(lambda: iter(some), output_signature=tf.TensorSpec([None], tf.int64))
        return data.map(number).padded_batch(4, padded_shapes=[None])

    def checksum(some):
        (spec,) = [padded(some).element_spec]
        hashed = tf.function(lambda batch: examples_checksum(batch, 5), input_signature=[spec])
        return summed(hashed(next(iter(padded(some)))))

    assert checksum(rows) == together(checksum(rows[:2]), checksum(rows[2:]))  # of length 4, 3 and 4
    assert checksum(rows) == together(*(checksum([row]) for row in rows))
    assert checksum(rows) != checksum([[1, 3, 4], *rows[1:]])
    assert checksum(rows) != checksum([[0, 3, 1, 4], *rows[1:]])


class Quiet(toy.Regression):
    """Reports nothing of what it is given."""

    def loop_end(self, metrics):
        assert "examples_checksum" not in metrics
        return {"loss": metrics["loss"]}


def run(name, folder, steps, engine="graph"):
    strategy = make_strategy(name)
    with strategy.scope():
        trainer = Quiet()
    settings = dict(model_dir=folder, steps_per_loop=10, loop=engine, writers=[looplib.JsonlWriter(f"{folder}/m")])
    toy.controller(strategy, trainer, **settings).train(steps)
    return [json.loads(line) for line in (folder / "m").read_text().splitlines()]


@pytest.mark.slow
def test_one_number_on_any_strategy_engine_and_across_a_resume(monkeypatch, tmp_path, caplog):
    for name, path in ordered(example_checksums=True).items():
        monkeypatch.setenv(name, path)
    whole = [record["examples_checksum"] for record in run("default", tmp_path / "whole", 20)]
    assert len(set(whole)) == 2 and all(0 < number < 2**53 for number in whole)
    others = [run(name, tmp_path / name, 20) for name in ["mirrored_x2", "mirrored_x4"]]
    others.append(run("default", tmp_path / "eager", 20, "eager"))
    run("default", tmp_path / "stopped", 15, "eager")
    others.append(run("mirrored_x2", tmp_path / "stopped", 20))
    for records in others:
        assert [record["examples_checksum"] for record in records] == whole
    assert "not saved" not in caplog.text  # the step reads the counter, which is the controller's own


@pytest.mark.slow
def test_nothing_is_added_unasked(monkeypatch, tmp_path):
    monkeypatch.delenv("LOOPLIB_ORDER", raising=False)
    (record,) = run("default", tmp_path, 10)
    assert record.keys() == {"step", "split", "loss", "steps_per_second", "epoch"}

"""How batches come to the replicas, and the place in the data, saved and found again."""

import gc
import itertools
import logging
import time

import numpy as np
import pytest
import tensorflow as tf
import toy
from conftest import make_strategy, more

import looplib
from looplib.data import iterator_state, pipelines
from looplib.data.streams import Stream
from looplib.loop import task_loop
from looplib.loop.contracts import Request, Specification
from looplib.report.clock import Clock
from looplib.task import checks

GLOBAL_BATCH = 8


@pytest.fixture(autouse=True)
def drop_iterators():
    """Drops a test's iterators at its end: TensorFlow may wait for as long as one has lived."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Six TFRecord files of ten to fifteen records."""
    folder = tmp_path_factory.mktemp("records")
    for i in range(6):
        with tf.io.TFRecordWriter(str(folder / f"{i}.tfrecord")) as writer:
            for j in range(10 + i):
                writer.write(f"{i}-{j}".encode())
    return sorted(str(path) for path in folder.glob("*"))


def square(ids):
    return ids * ids


def ragged(ids):
    lengths = ids % 3
    rows = tf.RaggedTensor.from_row_lengths(tf.repeat(ids, lengths), lengths)
    return {"rows": rows, "nested": (tf.strings.as_string(ids), {"id": ids})}


def parallel(context, files=None, buffer=20):
    data = tf.data.Dataset.range(37).shuffle(buffer, seed=context.seed).repeat()
    data = data.batch(context.per_replica_batch_size, drop_remainder=True)
    return data.map(square, num_parallel_calls=4).prefetch(tf.data.AUTOTUNE)


def interleaved(context, files):
    data = tf.data.Dataset.from_tensor_slices(files).shuffle(6, seed=context.seed).repeat()
    data = data.interleave(tf.data.TFRecordDataset, cycle_length=3, num_parallel_calls=2, deterministic=True)
    return data.shuffle(10, seed=1).batch(context.per_replica_batch_size, drop_remainder=True).prefetch(3)


def nested(context, files):
    data = tf.data.Dataset.range(37).cache().shuffle(37, seed=context.seed).repeat()
    return data.batch(context.per_replica_batch_size, drop_remainder=True).map(ragged, num_parallel_calls=2)


def finite(context, files):
    return tf.data.Dataset.range(93).shuffle(20, seed=context.seed).batch(context.per_replica_batch_size).prefetch(2)


def random(context, files=None):
    """Sequential and seeded, but its state is outside of the iterator."""
    data = tf.data.Dataset.range(37).repeat().map(lambda i: tf.random.uniform([], seed=4) + tf.cast(i, tf.float32))
    return data.batch(context.per_replica_batch_size, drop_remainder=True)


def stream(strategy, make, start_step=0, training=True, how="auto"):
    task = type(
        "Data",
        (),
        {"dataset": lambda self, context: make(context), "batch_size_varies": False, "batches": "per_replica"},
    )()
    config = looplib.RunConfig(global_batch_size=GLOBAL_BATCH, seed=3, distribute=how)
    return pipelines.Pipelines(strategy, task, config, training=training, start_step=start_step).distribute()


def plain(value):
    value = value.numpy() if isinstance(value, tf.Tensor) else value
    return value.to_list() if isinstance(value, tf.RaggedTensor) else value.tolist()


def expected(strategy, make, steps, training=True):
    """The batches of [step][replica] as tf.data gives them."""
    replicas = strategy.num_replicas_in_sync
    settings = dict(global_batch_size=GLOBAL_BATCH, num_replicas=replicas, seed=3, training=training, start_step=0)
    batches = iter(make(looplib.InputContext(pipeline_index=0, num_pipelines=1, **settings)))
    batches = [
        [plain(leaf) for leaf in tf.nest.flatten(batch)] for batch in itertools.islice(batches, steps * replicas)
    ]
    return [batches[i : i + replicas] for i in range(0, len(batches), replicas)]


def read(stream, iterator, steps):
    """The batches of [step][replica] as a stream gives them, fewer steps if it ends."""
    taken = []
    while len(taken) < steps and stream.has_value(batch := stream.next_as_optional(iterator)):
        values = [stream.strategy.experimental_local_results(leaf) for leaf in tf.nest.flatten(stream.get_value(batch))]
        taken.append([[plain(leaf) for leaf in leaves] for leaves in zip(*values)])
    return taken


@pytest.mark.slow(spread=1)
@pytest.mark.slow(pairs=True)
@pytest.mark.parametrize("make", [parallel, interleaved, nested, finite])
@pytest.mark.parametrize("stop", [*more([1]), 3, 11])
def test_a_pipeline_resumes_from_its_saved_state(strategy, make, stop, files, caplog):
    caplog.set_level(logging.INFO, logger="absl")
    whole = expected(strategy, lambda context: make(context, files), stop + 6)
    if len(whole[-1]) < strategy.num_replicas_in_sync:
        whole.pop()  # the last step would have had no batch for one of the replicas
    first = stream(strategy, lambda context: make(context, files))
    iterator = first.iterate()
    assert read(first, iterator, stop) == whole[:stop]
    position = first.position(iterator, 0)
    assert read(first, iterator, 6) == whole[stop:]  # saving takes nothing away
    again = stream(strategy, lambda context: make(context, files), start_step=stop)
    iterator = again.iterate(position)
    assert read(again, iterator, 6) == whole[stop:]
    assert f"resumes after step {stop} from its saved state ({len(position)} bytes" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("make", [parallel, nested])
def test_what_was_skipped_to_can_be_saved(strategy, make, caplog):
    caplog.set_level(logging.INFO, logger="absl")
    whole = expected(strategy, lambda context: make(context, None), 12)
    skipped = stream(strategy, lambda context: make(context, None), start_step=5)
    iterator = skipped.iterate()
    assert f"after step 5 by skipping {5 * strategy.num_replicas_in_sync} batches" in caplog.text
    assert read(skipped, iterator, 2) == whole[5:7]
    again = stream(strategy, lambda context: make(context, None), start_step=7)
    assert read(again, again.iterate(skipped.position(iterator, 0)), 5) == whole[7:]


@pytest.mark.slow(spread=1)
def test_state_outside_of_the_iterator_is_skipped_to(strategy, caplog):
    caplog.set_level(logging.INFO, logger="absl")
    whole = expected(strategy, random, 9)
    first = stream(strategy, random)
    iterator = first.iterate()
    assert read(first, iterator, 4) == whole[:4]
    assert first.position(iterator, 0) is None and first.position(iterator, 0) is None
    assert caplog.text.count("no position that can be saved") == 1 and "RandomUniform is stateful" in caplog.text
    again = stream(strategy, random, start_step=4)
    assert read(again, again.iterate(), 5) == whole[4:]


def other_elements(context):
    return parallel(context).map(lambda ids: (ids, ids))


def no_shuffle(context):
    data = tf.data.Dataset.range(37).repeat().batch(context.per_replica_batch_size, drop_remainder=True)
    return data.map(square, num_parallel_calls=4).prefetch(tf.data.AUTOTUNE)


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize(
    "changed", [other_elements, no_shuffle, lambda c: parallel(c, buffer=10), *more([lambda c: parallel(c, buffer=30)])]
)
def test_a_changed_pipeline_is_skipped_to_with_a_warning(changed, caplog):
    caplog.set_level(logging.INFO, logger="absl")
    strategy = make_strategy("mirrored_x2")
    first = stream(strategy, parallel)
    iterator = first.iterate()
    read(first, iterator, 3)
    again = stream(strategy, changed, start_step=3)
    iterator = again.iterate(first.position(iterator, 0))
    assert "is not the pipeline whose state was saved" in caplog.text and "by skipping 6 batches" in caplog.text
    assert read(again, iterator, 4) == expected(strategy, changed, 7)[3:]


def test_bytes_that_are_no_state_are_skipped_over(caplog):
    again = stream(make_strategy("default"), parallel, start_step=3)
    again.iterate()
    for position in (b"", b"nonsense", again._saved._digest + b"nonsense"):
        iterator = again.iterate(position)
        assert "is not the pipeline whose state was saved" in caplog.text
        assert read(again, iterator, 4) == expected(make_strategy("default"), parallel, 7)[3:]


def test_another_batch_size_is_a_changed_pipeline(caplog):
    """The iterator would otherwise continue with the batches of the old size that were prefetched."""
    small, large = make_strategy("mirrored_x2"), make_strategy("default")
    first = stream(small, lambda context: finite(context, None))
    iterator = first.iterate()
    read(first, iterator, 3)
    again = stream(large, lambda context: finite(context, None), start_step=3)
    rest = read(again, again.iterate(first.position(iterator, 0)), 4)
    assert rest == expected(large, lambda context: finite(context, None), 7)[3:]
    assert "batch size or length have changed" in caplog.text


def test_a_large_state_is_not_kept(monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="absl")
    monkeypatch.setattr(iterator_state, "_MOST_BYTES", 2 * 2**20)

    def make(context):
        data = tf.data.Dataset.range(100).map(lambda i: tf.random.stateless_normal([1000, 100], [i, i])).shuffle(20)
        return data.batch(context.per_replica_batch_size, drop_remainder=True)

    large = stream(make_strategy("default"), make)
    iterator = large.iterate()
    read(large, iterator, 1)
    assert large.position(iterator, 0) is None
    assert "its buffers take more than 2 MB" in caplog.text


def test_a_cache_in_files_is_not_kept(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="absl")
    make = lambda c: tf.data.Dataset.range(64).cache(str(tmp_path / "cache")).batch(8, drop_remainder=True).repeat()
    cached = stream(make_strategy("default"), make)
    iterator = cached.iterate()
    read(cached, iterator, 9)
    assert cached.position(iterator, 0) is None and "it caches in files" in caplog.text


@pytest.mark.slow(spread=1)
def test_indices_need_no_state(strategy, caplog):
    caplog.set_level(logging.INFO, logger="absl")
    make = lambda context: context.indices(37)
    first = stream(strategy, make)
    iterator = first.iterate()
    whole = read(first, iterator, 9)
    assert first.position(iterator, 0) is None
    again = stream(strategy, make, start_step=5)
    assert read(again, again.iterate(), 4) == whole[5:]
    assert "resumes after step 5 from its position" in caplog.text and "skipping" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("n", [17, *more([24, 29])])
def test_every_example_is_evaluated_once_in_elements_of_any_kind(strategy, n):
    def every_kind(ids):
        dense = tf.stack([ids, ids + 1], axis=1)
        return {**ragged(ids), "sparse": tf.sparse.from_dense(dense), "scalar": tf.constant(1)}

    def make(context):
        return tf.data.Dataset.range(n).batch(context.per_replica_batch_size).map(every_kind)

    seen = []
    data = stream(strategy, make, training=False)
    iterator = data.iterate()

    @tf.function(input_signature=[data.element_spec])
    def step(batch):
        def count(batch):
            rows = [tf.size(batch["nested"][0]), batch["rows"].nrows(out_type=tf.int32)]
            rows += [tf.cast(batch["sparse"].dense_shape[0], tf.int32)]
            return tf.stack(rows), batch["nested"][1]["id"]

        return strategy.run(count, args=(batch,))

    while data.has_value(batch := data.next_as_optional(iterator)):
        rows, ids = (strategy.experimental_local_results(value) for value in step(data.get_value(batch)))
        assert [list(r) for r in rows] == [[len(i)] * 3 for i in ids]
        seen += np.concatenate(ids).tolist()
    assert seen == list(range(n))


# The loop of a trainer over such data.


def loop_of(strategy, make, start_step=0, distribute="auto"):
    class Pipeline(toy.Regression):
        def dataset(self, context):
            data = make(context).map(lambda i: (i, tf.gather(toy.X, i), tf.gather(toy.Y, i)))
            return data

    with strategy.scope():
        trainer = Pipeline()
    trainer.global_batch_size = GLOBAL_BATCH
    checks.build_optimizers(trainer, strategy, "graph")
    config = looplib.RunConfig(global_batch_size=GLOBAL_BATCH, seed=3, steps_per_loop=1, distribute=distribute)
    return task_loop.TaskLoop(Specification("train", trainer, strategy, Clock(), config, start_step=start_step))


def order(loop, steps):
    for _ in range(steps):
        loop.run(Request(1), "train")
        loop.read_metrics()
    taken = np.stack(loop.task.order)
    loop.task.order.clear()
    return taken


def shuffled(context):
    data = tf.data.Dataset.range(37).shuffle(37, seed=context.seed).repeat()
    return data.batch(context.per_replica_batch_size, drop_remainder=True).prefetch(2)


@pytest.mark.slow
def test_a_training_rewinds_to_a_position(strategy):
    loop = loop_of(strategy, shuffled)
    assert loop.position(0) is None
    whole = order(loop, 12)
    loop.rewind()
    np.testing.assert_array_equal(order(loop, 7), whole[:7])
    position = loop.position(0)
    np.testing.assert_array_equal(order(loop, 5), whole[7:])
    loop.rewind(7, position)
    assert loop.position(0) == position  # also before the first step
    np.testing.assert_array_equal(order(loop, 5), whole[7:])
    assert loop.traces == 1
    other = loop_of(strategy, shuffled, start_step=7)
    other.rewind(7, position)
    np.testing.assert_array_equal(order(other, 5), whole[7:])


# What TPUs get, on CPUs: the iterators of tf.distribute.


@pytest.mark.slow
def test_tf_distribute_hands_out_the_same_batches(strategy, caplog):
    caplog.set_level(logging.INFO, logger="absl")
    loop = loop_of(strategy, shuffled, distribute="tf")
    assert type(loop.data.stream) is Stream
    whole = order(loop, 12)
    assert loop.position(0) is None and loop.traces == 1
    make = lambda context: shuffled(context)
    np.testing.assert_array_equal(whole, np.array(expected(strategy, make, 12)).reshape(12, GLOBAL_BATCH))
    late = loop_of(strategy, shuffled, start_step=7, distribute="tf")
    late.rewind(7, b"a position saved on other devices")
    np.testing.assert_array_equal(order(late, 5), whole[7:])
    assert "resumes after step 7 by skipping" in caplog.text


@pytest.mark.parametrize("n, training", [(33, True), *more([(37, True), (37, False), (33, False), (32, True)])])
@pytest.mark.parametrize("name", ["mirrored_x2", *more(["default", "one_device", "mirrored_x4"])])
def test_tf_distribute_hands_out_the_last_batches_alike(name, n, training):
    strategy = make_strategy(name)
    replicas = strategy.num_replicas_in_sync
    share = GLOBAL_BATCH // replicas
    batches = -(-n // share)
    steps = batches // replicas if training else -(-batches // replicas)  # no replica trains on no example
    make = lambda context: tf.data.Dataset.range(n).batch(context.per_replica_batch_size)
    data = stream(strategy, make, training=training, how="tf")
    taken = read(data, data.iterate(), 100)
    assert len(taken) == steps
    ids = [i for step in taken for replica in step for i in replica[0]]
    assert ids == list(range(min(n, steps * replicas * share)))


def ending(context):
    return tf.data.Dataset.range(32).batch(context.per_replica_batch_size)


@pytest.mark.slow
@pytest.mark.parametrize("name, make", [
    ("mirrored_x2", shuffled),
    *more([("mirrored_x2", ending), ("default", shuffled), ("one_device", ending), ("mirrored_x4", shuffled)]),
])  # fmt: skip
def test_a_run_with_either_iterators_has_the_same_examples_and_weights_also_where_one_continues_the_other(
    name, make, tmp_path
):
    strategy = make_strategy(name)

    def train(folder, *parts):
        found = []
        for steps, distribute in parts:
            with strategy.scope():
                trainer = toy.Regression()
            trainer.dataset = lambda context: make(context).map(lambda i: (i, tf.gather(toy.X, i), tf.gather(toy.Y, i)))
            with toy.controller(strategy, trainer, model_dir=folder, distribute=distribute) as controller:
                controller.train(steps)
            found += trainer.order
        return np.stack(found), trainer.weights()

    ids, weights = train(tmp_path / "auto", (4, "auto"))
    found = train(tmp_path / "mixed", (1, "auto"), (2, "tf"), (3, "tf"), (4, "auto"))
    np.testing.assert_array_equal(found[0], ids)
    for ours, expected in zip(found[1], weights):
        np.testing.assert_array_equal(ours, expected)


class Unseeded(toy.Regression):
    """Its shuffles have no seed of their own."""

    def dataset(self, context):
        data = tf.data.Dataset.range(toy.NUM_EXAMPLES).shuffle(20).repeat().shuffle(5)
        data = data.batch(context.per_replica_batch_size, drop_remainder=True)
        return data.map(lambda i: (i, tf.gather(toy.X, i), tf.gather(toy.Y, i)))


@pytest.mark.slow
@pytest.mark.parametrize("stops", [(7, 12, 20), *more([((3, 20),)])])  # an epoch has 4.6 steps
def test_shuffles_without_a_seed_resume_in_later_epochs_where_the_run_is_seeded(stops, tmp_path):
    def order(folder, *stops):
        found = []
        for until in stops:
            tf.random.set_seed(0)  # as runtime.setup does in each process
            trainer, _ = toy.build(make_strategy("default"))
            with toy.controller(make_strategy("default"), trainer, model_dir=folder) as controller:
                controller.train(until)
            found += [ids.tolist() for ids in trainer.order]
        return found

    whole = order(tmp_path / "whole", 20)
    assert len(whole) == 20 and whole == order(tmp_path / "parts", *stops)


@pytest.mark.slow(spread=1)
def test_an_iterator_that_is_let_go_ends_by_itself(strategy):
    def tuned(context):
        data = tf.data.Dataset.range(10**9).map(lambda i: i + 1, num_parallel_calls=tf.data.AUTOTUNE)
        return data.batch(context.per_replica_batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)

    data = stream(strategy, tuned, training=False)
    for _ in range(5):
        iterator = data.iterate()
        assert len(read(data, iterator, 2)) == 2
        data.end(iterator)
        until = time.monotonic() + 60
        while read(data, iterator, 1):  # it still has its data, or is at its end
            assert time.monotonic() < until
            time.sleep(0.01)
        assert len(read(data, data.iterate(), 2)) == 2


def between_epochs(context, files=None):
    """At the end of an epoch, the state that TensorFlow saves lacks the shuffle."""
    return tf.data.Dataset.range(37).shuffle(37, seed=context.seed).batch(context.per_replica_batch_size).repeat()


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("steps", [*more([1, 2, 3, 6, 8, 9]), 4, 5, 7])  # an epoch has 5
def test_a_position_between_epochs_is_saved_only_if_the_next_epochs_keep_their_order(steps):
    whole = stream(make_strategy("default"), between_epochs)
    iterator = whole.iterate()
    for _ in range(steps):
        next(iterator)
    time.sleep(0.05)  # TensorFlow reads ahead
    position = whole.position(iterator, 0)
    expected = [next(iterator).numpy().tolist() for _ in range(15)]
    again = stream(make_strategy("default"), between_epochs, start_step=steps)
    resumed = again.iterate(position)
    assert [next(resumed).numpy().tolist() for _ in range(15)] == expected

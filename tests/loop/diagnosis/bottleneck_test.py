"""A run that waits for its data names the stage that takes the time and what to change, and the change helps."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf

import looplib
from looplib.data import causes

Data = tf.data.Dataset


class Slow:
    """A function of numbers that takes 4 ms a call, whatever it is called with; counts the calls at once."""

    def __init__(self):
        self.now = self.most = 0
        self._lock = threading.Lock()

    def __call__(self, value):
        def work(value):
            with self._lock:
                self.now += 1
                self.most = max(self.most, self.now)
            time.sleep(0.004)
            with self._lock:
                self.now -= 1
            return value

        return tf.ensure_shape(tf.numpy_function(work, [value], tf.int64), value.shape)


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Four compressed files of 150 records of 200 kB."""
    folder = tmp_path_factory.mktemp("records")
    for number in range(4):
        with tf.io.TFRecordWriter(str(folder / f"{number}.tfr"), "GZIP") as writer:
            for _ in range(150):
                writer.write(bytes([number]) * 200_000)
    return [str(path) for path in sorted(folder.glob("*"))]


def generated():
    while True:
        time.sleep(0.002)
        yield 1


def slowest(data, elements):
    iterator = iter(data)
    for _ in range(elements):
        next(iterator)
    return causes.of(iterator)


@pytest.mark.slow
def test_the_stage_that_takes_the_time_is_named(records):
    zipped = lambda path: tf.data.TFRecordDataset(path, "GZIP")
    numbers = Data.range(10**6)
    big = Data.from_tensors(tf.zeros([2**18])).repeat()
    feature = tf.train.Feature(float_list=tf.train.FloatList(value=range(5000)))
    example = tf.train.Example(features=tf.train.Features(feature={"x": feature})).SerializeToString()
    parse = tf.data.experimental.parse_example_dataset({"x": tf.io.FixedLenFeature([5000], tf.float32)})
    cases = {
        "decode": Data.from_tensors([example] * 32).repeat().apply(parse).prefetch(1),
        "map": numbers.shuffle(50, seed=1).map(Slow()).batch(4).prefetch(1),
        "read": zipped(records).prefetch(2),
        "batch": big.batch(32).prefetch(2),
        "generator": Data.from_generator(generated, output_signature=tf.TensorSpec([], tf.int64)).map(abs).batch(4),
    }
    for kind, data in cases.items():
        found = slowest(data, 60)
        assert (found.kind, found.parallel) == (kind, 1), found
        assert found.share > 0.3 and found.advice, found
    # Most of the files are read to their end, of which tf.data keeps no statistics.
    data = Data.from_tensor_slices(records).repeat().interleave(zipped, 2, num_parallel_calls=2)
    found = slowest(data.map(tf.strings.length), 400)
    assert found.kind == "read" and found.share > 0.3, found


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize(
    "parallel, advice", [(None, "read several files at once"), (tf.data.AUTOTUNE, "move the files")]
)
def test_advice_that_was_followed_is_not_given_again(records, parallel, advice):
    zipped = lambda path: tf.data.TFRecordDataset(path, "GZIP")
    data = Data.from_tensor_slices(records).repeat().interleave(zipped, 2, num_parallel_calls=parallel)
    found = slowest(data.map(tf.strings.length).prefetch(1), 200)
    assert found.kind == "read" and found.advice.startswith(advice), found


def seconds_of(data):
    """(the slowest stage, the seconds of 20 elements)."""
    iterator = iter(data)
    next(iterator)
    start = time.perf_counter()
    for _ in range(20):
        next(iterator)
    return causes.of(iterator), time.perf_counter() - start


def with_threads(data):
    options = tf.data.Options()
    options.threading.private_threadpool_size = 16
    return data.with_options(options)


def test_the_advice_for_a_slow_function_of_flat_map_helps():
    read = lambda number: Data.from_tensors(Slow()(number)).repeat(2)
    numbers = Data.range(10**6)
    found, before = seconds_of(numbers.flat_map(read).batch(8).prefetch(1))
    assert found.kind == "expand" and found.share > 0.5 and found.parallel == 1, found
    assert "TFRecord" not in found.advice
    assert found.advice.endswith("in a map in front of it, map(read, num_parallel_calls=tf.data.AUTOTUNE)")
    done = numbers.map(Slow(), tf.data.AUTOTUNE).flat_map(lambda number: Data.from_tensors(number).repeat(2))
    found, after = seconds_of(done.batch(8).prefetch(1))
    assert after < 0.8 * before and (found.kind, found.tuned) == ("map", True), (found, before, after)


@pytest.mark.slow
def test_the_advice_for_a_slow_map_in_a_parallel_interleave_helps():
    def pipeline(make, count=2):
        return Data.range(50).repeat().interleave(lambda _: make(Data.range(64)), count, num_parallel_calls=count)

    found, before = seconds_of(pipeline(lambda numbers: numbers.map(Slow())).batch(8).prefetch(1))
    assert (found.kind, found.parallel) == ("map", 2) and "2 at once" in str(found), found
    assert found.advice.startswith("batch before it") and "AUTOTUNE" not in found.advice
    *_, batched = seconds_of(pipeline(lambda numbers: numbers.batch(8).map(Slow())).prefetch(1))
    assert "num_parallel_calls=16 and options.threading.private_threadpool_size = 16" in found.advice
    *_, threads = seconds_of(with_threads(pipeline(lambda numbers: numbers.map(Slow()), 16).batch(8).prefetch(1)))
    assert max(batched, threads) < 0.6 * before, (before, batched, threads)


def test_a_slow_map_of_batches_is_not_told_to_batch_and_its_advice_helps():
    context = looplib.InputContext(
        global_batch_size=8, num_replicas=1, pipeline_index=0, num_pipelines=1, seed=3, training=True, start_step=0
    )
    batches = (Data.range(10**6).batch(8), context.indices(10**6), context.indices(10**6).batch(4))  # as looplib chunks
    for data in batches:
        found, before = seconds_of(data.map(Slow(), tf.data.AUTOTUNE).prefetch(1))
        assert (found.kind, found.tuned) == ("map", True) and "as many at once as tf.data chooses" in str(found), found
        assert found.advice.startswith("make its function cheaper, or cache() it; if it waits")
    *_, after = seconds_of(with_threads(data.map(Slow(), 16).prefetch(1)))
    assert after < 0.6 * before, (before, after)


class Own:
    """A source of numbers, each of which takes 4 ms."""

    def __len__(self):
        return 10_000

    def __getitem__(self, number):
        time.sleep(0.004)
        return np.int64(number)


class Threaded(Own):
    def __getitems__(self, numbers):
        with ThreadPoolExecutor(16) as pool:
            return list(pool.map(self.__getitem__, numbers))


@pytest.mark.slow
def test_a_slow_source_of_records_is_named_and_the_advice_helps():
    def read(source, block):
        context = looplib.InputContext(
            global_batch_size=8, num_replicas=1, pipeline_index=0, num_pipelines=1, seed=3, training=True, start_step=0
        )
        iterator = iter(context.records(source, block=block))
        start = time.perf_counter()
        for _ in range(100):  # several chunks of 32
            next(iterator)
        return causes.of(iterator, requests=context.requests), time.perf_counter() - start

    found, before = read(Own(), 1)
    assert "of the pipeline's time is read (Own.__getitem__: " in str(found) and "record, 1 at once" in str(found)
    assert found.advice.startswith("give context.records block=16 or more: 16 blocks are read at once; or give Own a")
    found, blocks = read(Own(), 16)
    assert "block" not in found.advice
    found, threads = read(Threaded(), 1)
    assert "__getitem__" not in found.advice
    assert max(blocks, threads) < 0.75 * before, (before, blocks, threads)


def test_a_copy_to_a_device_that_takes_longer_is_named():
    iterator = iter(Data.range(100).map(Slow()).batch(4))
    for _ in range(10):
        next(iterator)
    assert causes.of(iterator, copy=0.001).kind == "map"  # 16 ms for a batch
    assert str(causes.of(iterator, copy=1.0)).endswith("is copy (to the device: 1000 ms for an element, 1 at once)")


def test_iterators_without_statistics_have_no_slowest_stage():
    options = tf.data.Options()
    options.autotune.enabled = False
    assert slowest(Data.range(100).map(Slow()).with_options(options), 5) is None
    assert causes.of(object()) is None


def loaded():
    while True:
        time.sleep(0.004)
        yield np.arange(64)


class Counted(looplib.Trainer):
    """Steps that take less time than the order of their examples, the function of their map, or their loader."""

    def __init__(self, function):
        self.function, self.weight = function, tf.Variable(0.0)

    def dataset(self, context):
        if self.function == "resident":
            return context.resident(np.arange(500))
        if self.function == "loader":
            return context.loader(lambda index, count: loaded())
        return context.indices(500).map(self.function)

    def step_fn(self, inputs):
        self.weight.assign_add(1.0)
        return {"loss": tf.cast(inputs, tf.float32)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "function, kind, advice",
    [
        (lambda ids: ids + 1, "order", "use larger batches, or context.resident for arrays"),
        ("resident", "order", "use larger batches: the steps are shorter"),
        (Slow(), "map", "give that map"),
        ("loader", "loader", "let it read in processes of its own"),
    ],
)
def test_the_order_of_the_examples_is_no_map_of_the_users(function, kind, advice):
    config = looplib.RunConfig(global_batch_size=64, steps_per_loop=50)
    with looplib.Controller(config, trainer=Counted(function), writers=[]) as controller:
        controller.train(200)
    what, advised = controller.clock.of_input()
    assert f"of the pipeline's time is {kind} (" in what and advised.startswith(advice), (what, advised)


class Waiting(looplib.Trainer):
    def __init__(self, make):
        self.make, self.weight = make, tf.Variable(0.0)

    def dataset(self, context):
        return self.make(Data.counter(), context.per_replica_batch_size)

    def step_fn(self, inputs):
        self.weight.assign_add(1.0)
        return {"loss": tf.cast(inputs, tf.float32)}


def train(make):
    """(what is said about the input after 40 steps of 8 examples, the seconds that these waited)."""
    with looplib.Controller(
        looplib.RunConfig(global_batch_size=8, steps_per_loop=10), trainer=Waiting(make), writers=[]
    ) as controller:
        controller.train(10)  # compiles
        before = controller.clock.of("input")
        controller.train(50)
        waited = controller.clock.of("input") - before
        assert controller.clock.waits_for_input
    return *controller.clock.of_input(), waited  # also of a closed controller


@pytest.mark.slow
@pytest.mark.alone
def test_the_slowest_stage_is_named_and_the_advice_helps():
    """A map that is slow for each call: first alone, then in parallel, as advised, then on whole batches, as advised."""
    alone, together = Slow(), Slow()
    what, advice, serial = train(lambda data, n: data.map(alone).batch(n))
    assert "of the pipeline's time is map (map" in what and "1 at once)" in what and alone.most == 1, what
    assert advice == "give that map num_parallel_calls=tf.data.AUTOTUNE"

    what, advice, parallel = train(lambda data, n: data.map(together, num_parallel_calls=4).batch(n))
    assert together.most > 1 and parallel < 0.7 * serial, (parallel, serial)
    assert "of the pipeline's time is map" in what and "4 at once)" in what, what
    assert "batch before it so that it works on whole batches" in advice

    *_, batched = train(lambda data, n: data.batch(n).map(Slow(), num_parallel_calls=4))
    assert batched < 0.5 * parallel, (batched, parallel)

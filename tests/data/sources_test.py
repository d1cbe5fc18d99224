"""Every source and transformation of tf.data, stopped in the middle and resumed: by state or by skipping, exactly.

Each case goes through looplib's own stream. A stream that cannot resume from its state has to say why.
"""

import contextlib
import functools
import gzip
import logging
import pathlib
import shutil
import sys
import types
import uuid

import csv_reader
import numpy as np
import pytest
import tensorflow as tf
import toy
from conftest import more, repetitions
from tensorflow.python.data.experimental.ops import global_shuffle_op  # behind tf.data's option of that name

from looplib.compat import tensorflow as _tf
from looplib.config.run_config import RunConfig
from looplib.data import iterator_state, pipelines

Data, X = tf.data.Dataset, tf.data.experimental
READ, STOPS = repetitions(24, 34), repetitions((8,), (1, 8, 21))
FILES = types.SimpleNamespace()  # paths, made by the fixture
MOST = 400


@pytest.fixture(scope="module", autouse=True)
def files(tmp_path_factory):
    """Three files of 20 records in each format."""
    folder = FILES.folder = tmp_path_factory.mktemp("sources")
    examples = [
        [tf.train.Feature(int64_list=tf.train.Int64List(value=[20 * i + j])) for j in range(20)] for i in range(3)
    ]
    examples = [
        [tf.train.Example(features=tf.train.Features(feature={"a": a})).SerializeToString() for a in file]
        for file in examples
    ]
    rows = [[f"{100 * i + j},{j / 2}" for j in range(20)] for i in range(3)]
    contents = {
        "txt": [("\n".join(r) + "\n").encode() for r in rows],
        "bin": [bytes(range(i, i + 80)) for i in range(3)],
    }
    contents["csv"] = [b"a,b\n" + text for text in contents["txt"]]
    for kind, parts in contents.items():
        paths = [folder / f"{i}.{kind}" for i in range(3)]
        for path, part in zip(paths, parts):
            path.write_bytes(part)
            (folder / f"{path.name}.gz").write_bytes(gzip.compress(part))
        setattr(FILES, kind, [str(path) for path in paths])
        setattr(FILES, f"{kind}_gz", [f"{path}.gz" for path in paths])
    for kind, compression in (("tfr", ""), ("tfr_gz", "GZIP")):
        setattr(FILES, kind, [str(folder / f"{i}.{kind}") for i in range(3)])
        for path, records in zip(getattr(FILES, kind), examples):
            with tf.io.TFRecordWriter(path, compression) as writer:
                for record in records:
                    writer.write(record)
    FILES.saved = str(folder / "saved")
    Data.range(MOST).save(FILES.saved, shard_func=lambda i: i % 3)
    yield
    case.cache_clear()


def numbers(count=MOST):
    return Data.range(count)


def tens(count=6):
    """A function for interleave and its like."""
    return lambda i: Data.range(count).map(lambda j: 10 * i + j)


def lines(count=MOST):
    """Vectors of zero to six numbers."""
    return Data.range(count).map(lambda i: tf.range(i % 7))


def csv(paths, **settings):
    return X.CsvDataset(paths, [tf.int32, tf.float32], header=True, **settings)


def options(**settings):
    made = tf.data.Options()
    for name, value in settings.items():
        *path, last = name.split("__")
        setattr(functools.reduce(getattr, path, made), last, value)
    return big().with_options(made)


def big():
    return numbers(17).shuffle(10, seed=3).repeat().map(lambda i: 2 * i, num_parallel_calls=2).batch(2).prefetch(2)


def table():
    keys = tf.range(40, dtype=tf.int64)
    return tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, 3 * keys), -1)


def mixed(count=MOST):
    return [numbers(count), numbers(count).map(lambda i: i + 1000)]


def some_fail():
    return numbers().map(lambda i: tf.debugging.check_numerics(1 / tf.cast(i % 4, tf.float32), ""))


def resampled():
    return numbers().map(lambda i: i % 3), lambda i: tf.cast(i, tf.int32), [0.2, 0.3, 0.5], [0.33, 0.33, 0.34]


FEATURES = {"a": tf.io.FixedLenFeature([], tf.int64)}
GENERATED = lambda: Data.from_generator(lambda: iter(range(MOST)), output_signature=tf.TensorSpec([], tf.int64))
# Functions of a folder for what they write.
BY_STATE = {
    # Sources.
    "from_tensors": lambda _: Data.from_tensors([1, 2]).repeat(50),
    "from_tensor_slices": lambda _: Data.from_tensor_slices({"a": np.arange(50), "b": (np.eye(50), [str(i) for i in range(50)])}),
    "sparse slices": lambda _: Data.from_tensor_slices(tf.sparse.from_dense(np.diag(np.arange(50)))),
    "ragged slices": lambda _: Data.from_tensor_slices(tf.ragged.range(tf.range(50) % 5)),
    "from_list": lambda _: X.from_list([(i, str(i)) for i in range(50)]),
    "range": lambda _: numbers(),
    "counter": lambda _: Data.counter(3, 2),
    "Counter": lambda _: X.Counter(3, 2),
    "random": lambda _: Data.random(seed=4, rerandomize_each_iteration=True).take(7).repeat(),
    "random, alike": lambda _: Data.random(seed=4, rerandomize_each_iteration=False).take(7).repeat(),
    "random, unseeded": lambda _: X.RandomDataset().take(50),
    "list_files": lambda _: Data.list_files(str(FILES.folder / "*.csv"), seed=2).repeat(),
    "list_files, in order": lambda _: Data.list_files(str(FILES.folder / "*.csv"), shuffle=False).repeat(),
    "text": lambda _: tf.data.TextLineDataset(FILES.txt),
    "text, small buffer": lambda _: tf.data.TextLineDataset(FILES.txt, buffer_size=16),
    "text, zipped": lambda _: tf.data.TextLineDataset(FILES.txt_gz, "GZIP"),
    "text, parallel": lambda _: tf.data.TextLineDataset(FILES.txt, num_parallel_reads=2),
    "records": lambda _: tf.data.TFRecordDataset(FILES.tfr),
    "records, small buffer": lambda _: tf.data.TFRecordDataset(FILES.tfr, buffer_size=16),
    "records, zipped": lambda _: tf.data.TFRecordDataset(FILES.tfr_gz, "GZIP"),
    "records, parallel": lambda _: tf.data.TFRecordDataset(FILES.tfr_gz, "GZIP", num_parallel_reads=3),
    "fixed": lambda _: tf.data.FixedLengthRecordDataset(FILES.bin, 4, header_bytes=8, footer_bytes=4, buffer_size=8).repeat(),
    "fixed, zipped": lambda _: tf.data.FixedLengthRecordDataset(FILES.bin_gz, 4, compression_type="GZIP"),
    "fixed, parallel": lambda _: tf.data.FixedLengthRecordDataset(FILES.bin, 4, num_parallel_reads=2),
    "make_batched_features_dataset": lambda _: X.make_batched_features_dataset(FILES.tfr, 2, FEATURES, shuffle_seed=3, shuffle_buffer_size=9),
    "load": lambda _: Data.load(FILES.saved),
    "load, interleaved": lambda _: X.load(FILES.saved, reader_func=lambda shards: shards.interleave(lambda d: d, cycle_length=3)),
    "snapshot": lambda folder: numbers(27).shuffle(9, seed=1).snapshot(f"{folder}/snapshot").repeat(),
    "snapshot, applied": lambda folder: numbers(27).apply(X.snapshot(f"{folder}/snapshot")),
    "snapshot, written": lambda _: Data.range(MOST).snapshot(str(FILES.folder / "written")),
    # Mixtures.
    "choose_from_datasets": lambda _: Data.choose_from_datasets(mixed(), numbers(2).repeat(20)),
    "choose_from_datasets, X": lambda _: X.choose_from_datasets(mixed(), numbers(2).repeat(20)),
    "sample_from_datasets": lambda _: Data.sample_from_datasets(mixed(9), [0.3, 0.7], seed=3, stop_on_empty_dataset=True, rerandomize_each_iteration=True).repeat(),
    "sample_from_datasets, X": lambda _: X.sample_from_datasets(mixed(), [0.3, 0.7], seed=3),
    "sample_from_datasets, of shuffles": lambda _: Data.sample_from_datasets([numbers(9).shuffle(9, seed=1).repeat(), numbers(7).repeat()], seed=3),
    "zip": lambda _: Data.zip((numbers().shuffle(10, seed=2), numbers(7).repeat())),
    "concatenate": lambda _: numbers(10).concatenate(numbers(5)).repeat(),
    "interleave": lambda _: numbers().interleave(tens(), cycle_length=3, block_length=2),
    "interleave, parallel": lambda _: numbers().interleave(tens(), cycle_length=3, block_length=2, num_parallel_calls=2, deterministic=True),
    "interleave, tuned": lambda _: numbers().interleave(tens(), num_parallel_calls=tf.data.AUTOTUNE),
    "interleave, of files": lambda _: Data.from_tensor_slices(FILES.tfr).shuffle(3, seed=1).repeat().interleave(tf.data.TFRecordDataset, cycle_length=2, num_parallel_calls=2).shuffle(9, seed=1),
    "parallel_interleave": lambda _: numbers().apply(X.parallel_interleave(tens(), cycle_length=3, block_length=2)),
    "flat_map": lambda _: numbers().flat_map(lambda i: Data.range(i % 4)),
    "flat_map, buffered": lambda _: numbers().flat_map(lambda i: tens()(i).prefetch(2)).prefetch(3),
    # One to one.
    "map": lambda _: numbers().map(lambda i: 2 * i),
    "map, parallel": lambda _: numbers().map(lambda i: 2 * i, num_parallel_calls=4),
    "map, tuned": lambda _: numbers().map(lambda i: 2 * i, num_parallel_calls=tf.data.AUTOTUNE),
    "map, stateless random": lambda _: numbers().map(lambda i: tf.random.stateless_uniform([], [i, 1])),
    "map, table": lambda _: numbers().map(table().lookup),
    "map, mutable table": lambda _: numbers().map(tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1).lookup),
    "table_from_dataset": lambda _: numbers().map(X.table_from_dataset(Data.zip((numbers(9), numbers(9))), default_value=-1, key_dtype=tf.int64).lookup),
    "index_table_from_dataset": lambda _: numbers().map(tf.strings.as_string).map(X.index_table_from_dataset(numbers(9).map(tf.strings.as_string)).lookup),
    "map, print": lambda folder: numbers().map(lambda i: (tf.print(i, output_stream=f"file://{folder}/printed"), i)[1]),
    "map, compiled": lambda _: numbers().map(tf.function(lambda i: 2 * i, jit_compile=True)),
    "map, stateless numpy_function": lambda _: numbers().map(lambda i: tf.numpy_function(lambda j: 2 * j, [i], tf.int64, stateful=False)),
    "filter": lambda _: numbers().filter(lambda i: i % 3 > 0),
    "scan": lambda _: numbers().scan(tf.constant(0, tf.int64), lambda total, i: (total + i, total)),
    "scan, X": lambda _: numbers().apply(X.scan(tf.constant([1, 2]), lambda seed, i: (seed + 1, tf.random.stateless_uniform([], seed)))),
    "enumerate": lambda _: numbers().enumerate(5),
    "enumerate_dataset": lambda _: numbers().apply(X.enumerate_dataset(5)),
    "parse_example_dataset": lambda _: tf.data.TFRecordDataset(FILES.tfr).batch(1).apply(X.parse_example_dataset(FEATURES, num_parallel_calls=2)),
    "assert_cardinality": lambda _: numbers(80).filter(lambda i: i % 2 == 0).apply(X.assert_cardinality(40)),
    "pad_to_cardinality": lambda _: Data.from_tensor_slices({"a": np.arange(20)}).apply(X.pad_to_cardinality(40)),
    "from_variant": lambda _: X.from_variant(X.to_variant(numbers()), tf.TensorSpec([], tf.int64)),
    # Batches.
    "batch": lambda _: numbers(43).batch(2),
    "batch, parallel": lambda _: numbers().batch(2, num_parallel_calls=2),
    "map_and_batch": lambda _: numbers().apply(X.map_and_batch(lambda i: 2 * i, 2, num_parallel_calls=2)),
    "padded_batch": lambda _: lines().padded_batch(2),
    "ragged_batch": lambda _: lines().ragged_batch(2),
    "dense_to_ragged_batch": lambda _: lines().apply(X.dense_to_ragged_batch(2)),
    "sparse_batch": lambda _: lines().sparse_batch(2, [7]),
    "dense_to_sparse_batch": lambda _: lines().apply(X.dense_to_sparse_batch(2, [7])),
    "unbatch": lambda _: lines().ragged_batch(7).unbatch(),
    "unbatch, X": lambda _: numbers().batch(7).apply(X.unbatch()),
    "rebatch": lambda _: numbers().batch(5).rebatch([2, 3, 1]),
    "rebatch, to one size": lambda _: numbers().batch(5).rebatch(3, drop_remainder=True),
    "bucket_by_sequence_length": lambda _: lines(11).shuffle(11, seed=1).repeat().bucket_by_sequence_length(tf.size, [3, 5], [2, 3, 2]),
    "bucket_by_sequence_length, X": lambda _: lines().apply(X.bucket_by_sequence_length(tf.size, [3, 5], [2, 3, 2])),
    "group_by_window": lambda _: numbers().group_by_window(lambda i: i % 3, lambda key, window: window.batch(2), 4),
    "group_by_window, X": lambda _: numbers().apply(X.group_by_window(lambda i: i % 3, lambda key, window: window.batch(2), 4)),
    "group_by_reducer": lambda _: numbers(100).apply(X.group_by_reducer(lambda i: i % 50, X.Reducer(lambda key: tf.constant(0, tf.int64), lambda total, i: total + i, lambda total: total))),
    "window": lambda _: numbers().window(4, 2).flat_map(lambda window: window.batch(4)),
    "window, of each third": lambda _: numbers().window(3, 5, 2, True).flat_map(lambda window: window),
    # Parts and repetitions.
    "take": lambda _: numbers(60).take(7).repeat(),
    "take_while": lambda _: numbers().take_while(lambda i: i < 33),
    "take_while, X": lambda _: numbers().apply(X.take_while(lambda i: i < 33)),
    "skip": lambda _: numbers(13).skip(5).repeat(),
    "shard": lambda _: numbers().shard(3, 1),
    "repeat": lambda _: numbers(7).repeat(),
    "unique": lambda _: numbers(9).map(lambda i: i * i % 7).unique().repeat(),
    "unique, X": lambda _: numbers().apply(X.unique()),
    "shuffle": lambda _: numbers(17).shuffle(10, seed=3).repeat(),
    "shuffle, one order": lambda _: numbers(17).shuffle(10, seed=3, reshuffle_each_iteration=False).repeat(),
    "shuffle, unseeded": lambda _: numbers(17).shuffle(50).repeat(),
    "shuffle, one unseeded order": lambda _: numbers(17).shuffle(10, reshuffle_each_iteration=False).repeat(),
    "shuffle, of a shuffle": lambda _: numbers(19).shuffle(10, seed=3).shuffle(5).take(18).repeat().shuffle(4, seed=1),
    "shuffle_and_repeat": lambda _: numbers(17).apply(X.shuffle_and_repeat(10, 3, seed=3)),
    "global shuffle": lambda _: global_shuffle_op._global_shuffle(numbers(17), seed=3).repeat(),
    "global shuffle, of three epochs": lambda _: global_shuffle_op._global_shuffle(numbers(17).repeat(3)),
    # Buffers.
    "cache": lambda _: numbers(13).cache().repeat(),
    "cache, shuffled": lambda _: numbers(13).cache().shuffle(13, seed=1).repeat(),
    "cache, of a shuffle": lambda _: numbers(13).shuffle(13, seed=1).cache().repeat().prefetch(10),
    "cache, two": lambda _: Data.zip((numbers(13).cache().repeat(), numbers(7).cache().repeat())),
    "prefetch": lambda _: numbers().prefetch(5),
    "prefetch, tuned": lambda _: numbers().prefetch(tf.data.AUTOTUNE),
    # Options.
    "options, deterministic": lambda _: options(deterministic=True),
    "options, not tuned": lambda _: options(autotune__enabled=False),
    "options, threading": lambda _: options(threading__private_threadpool_size=2),
    "options, slack": lambda _: options(experimental_slack=True),
    "options, plain": lambda _: options(experimental_optimization__apply_default_optimizations=False),
    "options, fused": lambda _: options(experimental_optimization__map_and_batch_fusion=True, experimental_optimization__shuffle_and_repeat_fusion=True),
    "options, parallel": lambda _: numbers().filter(lambda i: i % 3 > 0).with_options(filter_parallel()),
}  # fmt: skip


def filter_parallel():
    made = tf.data.Options()
    made.experimental_optimization.filter_parallelization = True
    return made


# Other names of a stage, or settings of a source whose kind another source has: run with --all.
REPEATED = [
    "Counter", "random, alike", "list_files, in order", "text, small buffer", "text, zipped", "text, parallel",
    "records, small buffer", "fixed, zipped", "fixed, parallel", "snapshot, applied", "choose_from_datasets, X",
    "sample_from_datasets, X", "interleave, tuned", "map, tuned", "index_table_from_dataset", "scan, X",
    "enumerate_dataset", "dense_to_ragged_batch", "dense_to_sparse_batch", "unbatch, X", "rebatch, to one size",
    "bucket_by_sequence_length, X", "group_by_window, X", "take_while, X", "unique, X", "prefetch, tuned",
    "random, unseeded", "load, interleaved", "sample_from_datasets, of shuffles", "interleave, of files", "flat_map, buffered",
    "window, of each third", "shuffle, one unseeded order", "global shuffle, of three epochs", "cache, two",
    "options, not tuned", "options, threading", "options, slack", "options, plain",
]  # fmt: skip
FEW = [name for name in BY_STATE if name not in REPEATED]
# Those of least cost in which each stage occurs that a run may save.
EACH_STAGE = [
    "cache", "parse_example_dataset", "snapshot", "snapshot, written", "load", "random", "counter", "options, fused",
    "choose_from_datasets", "bucket_by_sequence_length", "batch, parallel", "shard", "skip", "assert_cardinality", "concatenate",
    "parallel_interleave", "global shuffle", "rebatch", "from_list", "fixed", "text", "sparse_batch", "options, parallel",
    "unbatch", "interleave", "unique", "take_while", "group_by_reducer",
]  # fmt: skip
OF_TIME = ["make_batched_features_dataset", "shuffle, of a shuffle", "cache, of a shuffle", "cache, shuffled"]

# The clause with which each says that it skips.
CSV, RANDOM, SHARED, ENDED = "it reads CSV files", "RandomUniform is stateful", "share a cache", "it mixes with others"
BY_SKIPPING = {
    "CsvDataset": (CSV, lambda _: csv(FILES.csv)),
    "CsvDataset, zipped": (CSV, lambda _: csv(FILES.csv_gz, compression_type="GZIP").repeat()),
    "CsvDataset, in interleave": (CSV, lambda _: Data.from_tensor_slices(FILES.csv).interleave(csv, cycle_length=2)),
    "CsvDataset, in parallel interleave": (CSV, lambda _: Data.from_tensor_slices(FILES.csv).interleave(csv, num_parallel_calls=2)),
    "CsvDataset, in flat_map twice": (CSV, lambda _: numbers(2).flat_map(lambda _: Data.from_tensor_slices(FILES.csv).flat_map(csv))),
    "make_csv_dataset": (CSV, lambda _: X.make_csv_dataset(FILES.csv, 2, num_epochs=1, shuffle=False)),
    "make_csv_dataset, shuffled": (CSV, lambda _: X.make_csv_dataset(FILES.csv, 2, label_name="b", shuffle_buffer_size=50, shuffle_seed=3)),
    "make_csv_dataset, parallel": (CSV, lambda _: X.make_csv_dataset(FILES.csv, 2, num_parallel_reads=3, shuffle=False)),
    "make_csv_dataset, cached": (CSV, lambda _: X.make_csv_dataset(FILES.csv, 2, num_epochs=1, shuffle=False).cache().repeat()),
    "sample_from_datasets, one ended": (ENDED, lambda _: Data.sample_from_datasets([numbers(3), numbers(25)], seed=3)),
    "cache, shared": (SHARED, lambda _: (lambda data: Data.zip((data.repeat(), data.shuffle(10, seed=1).repeat())))(numbers(13).cache())),
    "cache, in a file": ("it caches in files", lambda folder: numbers(13).cache(f"{folder}/{uuid.uuid4()}").repeat()),
    "cache, in interleave": ("MemoryCache", lambda _: numbers().interleave(lambda i: tens()(i).cache().repeat(2), cycle_length=2)),
    "shuffle, in interleave": ("SeedGenerator", lambda _: numbers(3).interleave(lambda i: tens()(i).shuffle(6), cycle_length=3).repeat()),
    "from_generator": ("PyFunc is stateful", lambda _: GENERATED()),
    "map, py_function": ("EagerPyFunc is stateful", lambda _: numbers().map(lambda i: tf.py_function(lambda j: 2 * j, [i], tf.int64))),
    "map, numpy_function": ("PyFunc is stateful", lambda _: numbers().map(lambda i: tf.numpy_function(lambda j: 2 * j, [i], tf.int64))),
    "map, random": (RANDOM, lambda _: numbers().map(lambda i: tf.random.uniform([], seed=3))),
    "map, random in a condition": (RANDOM, lambda _: numbers().map(lambda i: tf.cond(i > 3, lambda: tf.random.uniform([], seed=1), lambda: 1.0))),
    "map, random, cached": (RANDOM, lambda _: numbers(13).map(lambda i: tf.random.uniform([], seed=3)).cache().repeat()),
    "map, generator": ("RngReadAndSkip", lambda _: (lambda random: numbers().map(lambda i: random.uniform([])))(tf.random.Generator.from_seed(3))),
    "map, variable": ("ReadVariableOp", lambda _: (lambda variable: numbers().map(lambda i: i + variable))(tf.Variable(3, dtype=tf.int64))),
    "get_single_element": ("is stateful", lambda _: numbers().map(lambda i: i + X.get_single_element(Data.range(1)) + Data.range(1).get_single_element())),
    "reduce": ("is stateful", lambda _: numbers().window(4).map(lambda window: window.reduce(tf.constant(0, tf.int64), lambda a, b: a + b))),
    "ignore_errors": ("", lambda _: some_fail().ignore_errors()),
    "ignore_errors, X": ("", lambda _: some_fail().apply(X.ignore_errors())),
    "rejection_resample": (RANDOM, lambda _: (lambda data, *how: data.rejection_resample(*how, seed=2))(*resampled())),
    "rejection_resample, X": (RANDOM, lambda _: (lambda data, *how: data.apply(X.rejection_resample(*how, seed=2)))(*resampled())),
    "prefetch_to_device": ("", lambda _: numbers().apply(X.prefetch_to_device("/cpu:0"))),
    "copy_to_device": ("", lambda _: numbers().apply(X.copy_to_device("/cpu:0")).prefetch(1)),
    "service": ("", lambda _: numbers().apply(X.service.distribute("parallel_epochs", service().target))),
}  # fmt: skip

SKIP_ALIKE = ["CsvDataset, zipped", "CsvDataset, in parallel interleave", "make_csv_dataset, shuffled", "make_csv_dataset, parallel",
              "ignore_errors, X", "rejection_resample, X", "CsvDataset, in flat_map twice", "make_csv_dataset, cached",
              "map, random, cached", "map, random in a condition", "map, numpy_function", "reduce", "prefetch_to_device"]  # fmt: skip


@functools.cache
def service():
    dispatcher = X.service.DispatchServer()
    address = dispatcher.target.partition("://")[2]
    dispatcher.worker = X.service.WorkerServer(X.service.WorkerConfig(dispatcher_address=address))
    return dispatcher


def stream(make, start_step=0):
    tf.random.set_seed(0)  # as runtime.setup does in each process
    task = types.SimpleNamespace(dataset=lambda context: make(), batches="per_replica", batch_size_varies=True)
    config = RunConfig(global_batch_size=2, seed=3)
    found = pipelines.Pipelines(tf.distribute.get_strategy(), task, config, training=True, start_step=start_step)
    return found.distribute()


def read(iterator, count):
    """Up to so many elements, as lists of arrays' bytes (of a sparse tensor's parts, a ragged one's)."""
    elements = []
    while len(elements) < count and (element := iterator.get_next_as_optional()).has_value():
        tensors = tf.nest.flatten(element.get_value(), expand_composites=True)
        elements.append([np.asarray(tensor.numpy()).tolist() for tensor in tensors])
    return elements


class Log(logging.Handler):
    def __init__(self):
        super().__init__()
        self.text = ""

    def emit(self, record):
        self.text += record.getMessage() + "\n"


@functools.cache
def case(make):
    """Reads a pipeline once in peace (by default, by the stream that was saved), and from each of STOPS on after a stop.

    Returns:
      The elements; those after each stop; what the log said; the names of the stages that were saved.
    """
    log, stages = Log(), set()
    logger = logging.getLogger("absl")
    before, log.level = logger.level, logging.INFO
    logger.addHandler(log)
    logger.setLevel(logging.INFO)
    folders = [str(FILES.folder / f"{id(make)}_{i}") for i in range(1 + len(STOPS))]
    for folder in folders:
        pathlib.Path(folder).mkdir()
    try:
        whole, rests = repetitions(list, lambda: read(stream(lambda: make(folders[-1])).iterate(), READ))(), []
        for folder, stop in zip(folders, STOPS):
            first = stream(lambda folder=folder: make(folder))
            iterator = first.iterate()
            start = read(iterator, stop)
            position = first.position(iterator, 0)
            if position is not None:
                with contextlib.suppress(iterator_state.BetweenEpochsError):  # it has read on since
                    stages |= iterator_state.save(iterator, first.dataset)[1]
            if whole:
                assert start == whole[:stop]
            else:
                whole = start + read(iterator, READ - stop)
            del iterator, first
            again = stream(lambda folder=folder: make(folder), stop)
            rests.append(read(again.iterate(position), READ - stop))
    finally:
        logger.removeHandler(log)
        logger.setLevel(before)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    return whole, rests, log.text, stages


@pytest.mark.slow(spread=3)
@pytest.mark.parametrize("name", [*FEW, *more(REPEATED)])
def test_resumes_from_its_state(name):
    whole, rests, log, _ = case(BY_STATE[name])
    assert len(whole) > STOPS[-1]
    assert rests == [whole[stop:] for stop in STOPS]
    # How far these have read ahead of a stop is a matter of time: the seeds of a shuffle may be missing in the state, and
    # a cache may be full for one iterator and not for another.
    of_time = name in OF_TIME
    skips = log.count("by skipping")
    assert log.count("from its saved state") + skips == len(STOPS)
    assert skips <= (max(1, len(STOPS) - 1) if of_time else 0)
    assert of_time or "no position" not in log


def parts():
    """Two shuffles, one after the other."""
    return numbers(6).shuffle(6, seed=3), numbers(5).map(lambda i: i + 10).shuffle(5, seed=4)


# Pipelines whose state lacks the seeds of a shuffle at times: it has ended, or not begun, in the epoch.
SEEDS = {
    "a shuffle that has ended before its epoch": lambda: (
        numbers(9).shuffle(9, seed=3).take(8).repeat().shuffle(3, seed=1)
    ),
    "one after the other": lambda: parts()[0].concatenate(parts()[1]).repeat(),
    "one of them cached": lambda: parts()[0].cache().concatenate(parts()[1]).repeat(),
    "each repeated": lambda: parts()[0].repeat(2).concatenate(parts()[1].repeat(2)).repeat(),
    "random numbers": lambda: Data.zip((numbers(5), Data.random(seed=1, rerandomize_each_iteration=True))).repeat(),
    "batches taken apart": lambda: numbers(9).shuffle(9, seed=1).batch(4).repeat().unbatch().shuffle(2, seed=3),
}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", SEEDS)
def test_an_epoch_keeps_its_order_wherever_the_one_before_was_left(name, monkeypatch):
    """By the state where it has all seeds, and else by skipping."""
    monkeypatch.setattr(sys.modules[__name__], "STOPS", repetitions((5, 13), range(1, 30, 3)))
    whole, rests, _, _ = case(lambda _: SEEDS[name]())
    assert rests == [whole[stop:] for stop in STOPS]


@pytest.mark.slow
def test_a_shuffle_of_files_that_are_all_open_is_explained_and_the_advice_helps():
    def pipeline(first, last):
        files = first(Data.list_files(str(FILES.folder / "?.tfr"), seed=2))
        return last(files.interleave(tf.data.TFRecordDataset, 3, num_parallel_calls=2).shuffle(60, seed=1).batch(2))

    def repeat(data):
        return data.repeat()

    def once(data):
        return data

    for first, last in ((once, repeat), (repeat, once)):
        whole, rests, log, _ = case(lambda _, first=first, last=last: pipeline(first, last))
        assert rests == [whole[stop:] for stop in STOPS]
        assert ("repeat() directly behind that shuffle" in log) == ("by skipping" in log) == (first is once)


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("name", [*(name for name in BY_SKIPPING if name not in SKIP_ALIKE), *more(SKIP_ALIKE)])
def test_skips_and_says_why(name):
    why, make = BY_SKIPPING[name]
    whole, rests, log, _ = case(make)
    assert len(whole) > STOPS[-1]
    assert rests == [whole[stop:] for stop in STOPS]
    if why == SHARED and log.count("from its saved state") == len(STOPS):
        return  # what was read ahead had filled both parts of the cache
    assert why in log.partition("a resumed run will skip the data already used: ")[2] and "by skipping" in log


@pytest.mark.slow
@pytest.mark.parametrize("repeated", [False, *more([True])])
def test_a_run_on_a_csv_file_resumes_exactly(repeated, tmp_path):
    """The case that was seen: one epoch of 80 steps, stopped at step 30 and continued, ended at step 41."""
    csv_reader.write(tmp_path / "rows.csv")

    def order(folder, *stops):
        found = []
        for until in stops:
            tf.random.set_seed(0)
            trainer = csv_reader.Reader(tmp_path / "rows.csv", repeated)
            with toy.controller(tf.distribute.get_strategy(), trainer, model_dir=tmp_path / folder) as controller:
                controller.train(until)
            found += [ids.tolist() for ids in trainer.order]
        return found

    end = 100 if repeated else -1
    whole = order("whole", end)
    assert len(whole) == (100 if repeated else 80)
    assert order("parts", 30, end) == whole


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("name, make", [
    ("interleave", lambda: numbers(10).interleave(tens(), cycle_length=3, num_parallel_calls=2, deterministic=False)),
    ("sloppy", lambda: numbers(10).apply(X.parallel_interleave(tens(), cycle_length=3, sloppy=True))),
    ("map", lambda: numbers(60).map(lambda i: i, num_parallel_calls=4, deterministic=False)),
])  # fmt: skip
def test_what_has_no_order_loses_and_repeats_nothing(name, make):
    first = stream(make)
    iterator = first.iterate()
    seen = read(iterator, 21)
    rest = read(stream(make, 21).iterate(first.position(iterator, 0)), 100)
    everything = [10 * i + j for i in range(10) for j in range(6)] if name != "map" else list(range(60))
    assert sorted(number for (number,) in seen + rest) == sorted(everything)


@pytest.mark.slow
def test_each_stage_that_is_called_exact_was_tried_and_is():
    stages = set()
    for name in EACH_STAGE:
        whole, rests, _, found = case(BY_STATE[name])
        assert rests == [whole[stop:] for stop in STOPS], name
        stages |= found
    assert stages == iterator_state.TRIED


# What is no source or transformation, or none of a stream's.
OTHER = """
AUTOTUNE AutoShardPolicy AutotuneAlgorithm AutotuneOptions Dataset DatasetInitializer DatasetSpec DistributeOptions
ExternalStatePolicy INFINITE_CARDINALITY Iterator IteratorSpec NumpyIterator OptimizationOptions Optional Reducer SHARD_HINT
ServiceOptions TFRecordWriter ThreadingOptions UNKNOWN_CARDINALITY as_numpy_iterator at cardinality distributed_save
element_spec enable_debug_mode fingerprint get_model_proto get_next_as_optional get_structure make_saveable_from_iterator
options save service with_options SqlDataset
""".split()


def test_every_name_of_tf_data_is_tried_or_known_to_be_something_else():
    text = pathlib.Path(__file__).read_text()
    names = {name for place in (Data, tf.data, X) for name in dir(place) if not name.startswith("_")} - {"experimental"}
    assert [name for name in sorted(names - set(OTHER)) if f".{name}(" not in text] == []


def unknown(monkeypatch, make):
    """The stream of a pipeline whose first stage nobody has tried, after three of its elements."""
    monkeypatch.setattr(iterator_state, "TRIED", iterator_state.TRIED - {"Range"})
    monkeypatch.setattr(_tf, "why_restored_wrongly", lambda texts: "")
    made = stream(make)
    iterator = made.iterate()
    read(iterator, 3)
    return made, iterator


def test_a_stage_that_is_not_known_is_tried_out(monkeypatch):
    """Also CSV files are found out so, where they are not known."""
    made, iterator = unknown(monkeypatch, lambda: numbers(40).shuffle(9))
    position = made.position(iterator, 0)
    assert read(stream(lambda: numbers(40).shuffle(9), 3).iterate(position), 40) == read(iterator, 40)
    made, iterator = unknown(monkeypatch, lambda: csv(FILES.csv))
    assert made.position(iterator, 0) is None
    assert made._saved.obstacle == "in a trial, TensorFlow did not restore CSV exactly"


def test_a_stage_that_is_not_known_and_cannot_be_tried_out_skips(monkeypatch):
    made, iterator = unknown(monkeypatch, numbers)
    made._saved._renew = lambda: made.dataset
    assert (
        made.position(iterator, 0) is None
        and "it is not known whether TensorFlow restores Range" in made._saved.obstacle
    )


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("name, doubt", [
    ("from_generator", "its Python code depends on its arguments only"),
    ("map, random", "its random ops have seeds"),
    ("map, generator", "have the values from the start of the run"),
    ("map, variable", "have the values from the start of the run"),
])  # fmt: skip
def test_a_resume_warns_of_what_skipping_may_not_repeat(name, doubt, caplog):
    caplog.set_level(logging.WARNING, logger="absl")
    make = lambda: BY_SKIPPING[name][1](None)
    stream(make).iterate()
    # TensorFlow 2.22 takes a variable of the name `random` for Python's module, and warns of it.
    assert not [record for record in caplog.records if record.name == "absl"]
    stream(make, 5).iterate()
    assert doubt in caplog.text

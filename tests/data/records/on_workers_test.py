"""Records that workers of a coordinator read: the batches of any other strategy. Here, one process is both."""

import pathlib
import struct

import numpy as np
import pytest
import tensorflow as tf

import looplib
from looplib.cluster import parameter_servers
from looplib.data.context import BadRecords

TOTAL = 90


def content(number):
    return struct.pack("<q", number) + bytes([65 + number % 26]) * 32


def write_tfrecords(folder):
    for shard in range(3):
        with tf.io.TFRecordWriter(f"{folder}/{shard}.tfrecord") as writer:
            for number in range(30 * shard, 30 * shard + 30):
                writer.write(content(number))
    return f"{folder}/*.tfrecord"


def write_lines(folder):
    pathlib.Path(folder, "a[1].txt").write_text("".join(f"{number}\n" for number in range(TOTAL)))
    return f"{folder}/a[[]1].txt"


def write_binary(folder):
    pathlib.Path(folder, "a.bin").write_bytes(b"head" + b"".join(map(content, range(TOTAL))))
    return looplib.open_records(f"{folder}/a.bin", "binary", record_bytes=np.int64(40), header_bytes=4)


def write_array_records(folder):
    module = pytest.importorskip("array_record.python.array_record_module")
    writer = module.ArrayRecordWriter(f"{folder}/a.array_record", "group_size:4")
    for number in range(TOTAL):
        writer.write(content(number))
    writer.close()
    return f"{folder}/a.array_record"


def write_parquet(folder):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"x": np.arange(TOTAL), "y": np.arange(TOTAL) / 2, "z": ["a"] * TOTAL})
    parquet.write_table(table, f"{folder}/a.parquet", row_group_size=7)
    return looplib.open_records(f"{folder}/a.parquet", columns=("x", "y"))


def kept(folder):
    return looplib.Kept(np.arange(TOTAL) % 3 > 0, write_tfrecords(folder))


def mixture(folder):
    records = looplib.open_records(write_tfrecords(folder))
    sources = {"all": records, "some": looplib.Kept(np.arange(TOTAL) < 40, write_binary(folder))}
    return looplib.Mixture(sources, {"all": 3, "some": 1})


def buckets(folder):
    return looplib.Buckets(np.arange(TOTAL) % 20, [8, 12, 20], write_tfrecords(folder))


SOURCES = [
    (write_tfrecords, 1), (write_tfrecords, 4), (write_lines, 1), (write_binary, 3), (write_array_records, 4),
    (write_parquet, None), (kept, 1), (kept, 4), (mixture, None), (buckets, None),
]  # fmt: skip


def context(training=True, start=0, bad=None, **settings):
    return looplib.InputContext(
        global_batch_size=8, num_replicas=1, pipeline_index=0, num_pipelines=1, seed=3, training=training,
        start_step=start, bad_records=bad, **settings,
    )  # fmt: skip


def on_worker(dataset, steps, **settings):
    """The batches of some steps, as a worker makes them: in a function, by their numbers."""

    @tf.function
    def make():
        numbers = tf.data.Dataset.from_tensor_slices(tf.constant(steps, tf.int64))
        return dataset(context(numbers=numbers, remote=True, **settings))

    return list(make().as_numpy_iterator())


def check_equal(found, expected):
    found, expected = (tf.nest.flatten(batches) for batches in (found, expected))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow(spread=10)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("write", "block"), SOURCES)
def test_workers_make_the_batches_of_their_numbers_from_files_of_every_kind(tmp_path, write, block, training):
    source, steps = write(tmp_path), [5, 0, 11, 1, 2]
    if not training:  # a filter leaves fewer
        steps = [5, 0, 1, 2]
    dataset = lambda context: context.records(source, block=block if context.training else None, seeds=True)
    expected = [next(dataset(context(training, step)).as_numpy_iterator()) for step in steps]
    check_equal(on_worker(dataset, steps, training=training), expected)


PLANS = {
    "all": lambda files: files,
    "kept": lambda files: looplib.Kept(np.arange(TOTAL) % 3 > 0, files),
    "mixture": lambda files: looplib.Mixture({"a": files, "b": looplib.Kept(np.arange(50), files)}, {"a": 1, "b": 2}),
}


@pytest.mark.slow(spread=3)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("plan", PLANS)
def test_workers_leave_out_the_damaged_records_that_one_process_does(tmp_path, plan, training):
    files = write_tfrecords(tmp_path)
    damage(tmp_path / "1.tfrecord", 4)  # record 34 of all, which is kept
    dataset = lambda context: context.records(PLANS[plan](files), seeds=True)
    local = dataset(context(training, bad=BadRecords(1))).take(12)
    expected = list(local.as_numpy_iterator())
    folder = tmp_path / "bad"
    bad = BadRecords(1, str(folder))
    check_equal(on_worker(dataset, list(range(len(expected))), training=training, bad=bad), expected)
    (note,) = folder.iterdir()
    assert note.name.startswith("1_tfrecord-4-")
    with pytest.raises(tf.errors.InvalidArgumentError, match="BadRecordError: record 4 of .*1.tfrecord, at byte 224"):
        on_worker(dataset, list(range(len(expected))), training=training)


def damage(path, number, at=30):
    raw = bytearray(path.read_bytes())
    raw[number * 56 + at] ^= 1
    path.write_bytes(raw)


def test_a_worker_that_sees_other_files_is_refused(tmp_path):
    files = write_tfrecords(tmp_path)

    @tf.function
    def make():
        return context(remote=True).records(files).take(1)

    traced = make.get_concrete_function()  # on the coordinator
    damage(tmp_path / "2.tfrecord", 0)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="RecordsError.*2.tfrecord has another content.*all workers"
    ):
        traced()
    (tmp_path / "2.tfrecord").unlink()
    with pytest.raises(tf.errors.InvalidArgumentError, match="RecordsError.*2.tfrecord' matches no file.*all workers"):
        traced()


class Counted:
    def __len__(self):
        return 100

    def __getitem__(self, number):
        return number


def test_the_coordinator_reads_what_it_alone_has_for_all_workers():
    mixture = looplib.Mixture({"one": Counted(), "other": Counted()}, {"one": 1, "other": 2})
    for source in (Counted(), mixture, looplib.Kept(np.arange(20), Counted())):
        dataset = lambda context: context.records(source)
        expected = list(dataset(context()).take(4).as_numpy_iterator())
        check_equal(on_worker(dataset, [3, 0, 2, 1]), [expected[step] for step in (3, 0, 2, 1)])

    @tf.function
    def make():
        return context(remote=True).records(Counted())

    devices = [
        node.device
        for f in make.get_concrete_function().graph.as_graph_def().library.function
        for node in f.node_def
        if node.op == "PyFunc"
    ]
    assert (
        len(devices) == 1 and tf.DeviceSpec.from_string(devices[0]).job
    )  # the process that made it, by TensorFlow's API


def test_a_worker_calls_functions_of_looplib_alone():
    with pytest.raises(tf.errors.InvalidArgumentError, match="no part of looplib"):
        parameter_servers.called(pathlib.PurePath, ["a"], tf.string)

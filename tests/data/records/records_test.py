"""`context.records`: the order, the position and the evaluation of `indices`, for records in files of every format."""

import collections
import gzip
import os
import pathlib
import re
import shutil
import struct

import numpy as np
import pytest
import tensorflow as tf
from conftest import more, repetitions

import looplib
from looplib.data import causes
from looplib.data.context import BadRecords
from looplib.data.records import blocks
from looplib.errors import DataError, RecordsError

ROOT = pathlib.Path(__file__).absolute().parents[3]
COUNTS = (40, 0, 123, 1, 57)  # of the shards
TOTAL = sum(COUNTS)


def content(number):
    """The record of a number: the number itself, and a tail whose length depends on it."""
    return struct.pack("<q", number) + bytes([number % 251]) * (number * 37 % 200)


def write(folder):
    numbers = iter(range(TOTAL))
    for shard, count in enumerate(COUNTS):
        with tf.io.TFRecordWriter(str(folder / f"data.tfrecord-{shard:05d}-of-00005")) as writer:
            for _ in range(count):
                writer.write(content(next(numbers)))
    return f"{folder}/data.tfrecord-*"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write(tmp_path_factory.mktemp("records"))


@pytest.fixture
def copy(files, tmp_path):
    """Files of its own for a test that damages them."""
    for path in pathlib.Path(files).parent.iterdir():
        shutil.copy2(path, tmp_path / path.name)
    return tmp_path


def context(batch=20, replicas=1, worker=0, workers=1, training=True, start=0, bad_records=0):
    return looplib.InputContext(
        global_batch_size=batch, num_replicas=replicas, pipeline_index=worker, num_pipelines=workers, seed=3,
        training=training, start_step=start, bad_records=BadRecords(bad_records),
    )  # fmt: skip


def numbers(dataset, count=-1):
    """The numbers of the records of each batch, whose contents are checked."""
    found = []
    for batch in dataset.take(count).as_numpy_iterator():
        found.append([struct.unpack("<q", record[:8])[0] for record in batch])
        assert [content(number) for number in found[-1]] == list(batch)
    return found


def in_step_order(pipelines, replicas, steps):
    """The global batches of pipelines, each with its share of the replicas."""
    own = replicas // len(pipelines)
    return [
        [number for batches in pipelines for batch in batches[step * own : (step + 1) * own] for number in batch]
        for step in range(steps)
    ]


def test_a_full_shuffle_has_the_order_of_indices(files):
    expected = [list(batch) for batch in context().indices(TOTAL).take(30).as_numpy_iterator()]
    assert numbers(context().records(files, block=1), 30) == expected
    in_order = numbers(context().records(files, shuffle=False), 30)
    assert np.concatenate(in_order).tolist() == [position % TOTAL for position in range(600)]


@pytest.mark.parametrize("block", [*more([1]), 7])
def test_the_order_is_the_same_for_any_number_of_replicas_and_workers(files, block):
    steps = 25  # two epochs and a part, 221 is no multiple of 20
    expected = numbers(context().records(files, block=block), steps)
    epochs = np.concatenate(expected)[: 2 * TOTAL].reshape(2, TOTAL)
    assert [sorted(epoch) for epoch in epochs.tolist()] == 2 * [list(range(TOTAL))]
    assert list(epochs[0]) != list(epochs[1])
    for replicas, workers in repetitions(((4, 2),), ((2, 1), (4, 2), (4, 4))):
        pipelines = [
            numbers(context(20, replicas, worker, workers).records(files, block=block), steps * replicas // workers)
            for worker in range(workers)
        ]
        assert in_step_order(pipelines, replicas, steps) == expected


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 7])
def test_any_position_is_entered_with_the_same_seeds(files, block):
    pairs = list(context().records(files, block=block, seeds=True).take(25).as_numpy_iterator())
    ids_and_seeds = list(context().indices(TOTAL, seeds=True).take(25).as_numpy_iterator())
    for start in (1, 11, 24):
        records, seeds = next(context(start=start).records(files, block=block, seeds=True).as_numpy_iterator())
        assert list(records) == list(pairs[start][0])
        np.testing.assert_array_equal(seeds, pairs[start][1])
        np.testing.assert_array_equal(seeds, ids_and_seeds[start][1])  # they belong to positions, not to the order


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("total, batch, block", [(1000, 64, 10), (1003, 60, 16), (37, 16, 5), (997, 200, 7), (5, 2, 9)])
def test_blocks_are_read_whole_by_one_lane_after_another(total, batch, block):
    order = blocks.BlockOrder(total, 7, block, batch)
    assert batch % blocks.lanes_of(batch) == 0 and blocks.lanes_of(batch) <= 64
    picks = [part.numpy() for part in order.picks(tf.range(4 * total, dtype=tf.int64))]
    for epoch in range(4):
        lanes = collections.defaultdict(list)  # by a plain loop over the positions: the pieces and ids of each lane
        for position in range(epoch * total, (epoch + 1) * total):
            slot = position % batch
            lanes[slot // (batch // blocks.lanes_of(batch))].append(tuple(int(part[position]) for part in picks))
        ids = [pick[0] for lane in lanes.values() for pick in lane]
        assert sorted(ids) == list(range(total))
        for lane in lanes.values():
            pieces = list(dict.fromkeys(pick[1:] for pick in lane))
            for start, stop in pieces:
                together = [pick[0] for pick in lane if pick[1:] == (start, stop)]
                assert sorted(together) == list(range(start, stop)) and start // block == (stop - 1) // block
            assert [pick[1:] for pick in lane] == [piece for piece in pieces for _ in range(*piece)]


def test_pieces_and_blocks_are_shuffled_evenly():
    size, trials = 60, 3000
    picks = blocks.BlockOrder(size, 7, size, 1).picks(tf.range(size * trials, dtype=tf.int64))
    ids = picks.ids.numpy().reshape(trials, size)
    for column in (ids[:, 0], ids[:, 37], (ids[:, 5] - ids[:, 4]) % size, (ids[:, 11] - ids[:, 3]) % size):
        counts = np.bincount(column, minlength=size)
        counts = counts[counts > 0] if counts[0] == 0 else counts
        deviation = np.square(counts - counts.mean()).sum() / counts.mean() / (len(counts) - 1)
        assert 0.5 < deviation < 1.7  # chi-squared over its degrees of freedom; its deviation is 0.18
    neighbours = [np.corrcoef(ids[trial], ids[trial + 1])[0, 1] for trial in range(500)]
    assert np.std(neighbours) < 1.3 / np.sqrt(size)


def test_an_evaluation_has_each_record_once(files):
    pipelines = [numbers(context(20, 4, worker, 2, False).records(files)) for worker in range(2)]
    ids = [number for batches in pipelines for batch in batches for number in batch]
    assert sorted(ids) == list(range(TOTAL))
    assert np.concatenate(numbers(context(training=False).records(files))).tolist() == list(range(TOTAL))


@pytest.mark.slow
def test_each_worker_reads_its_own_part(tmp_path):
    with tf.io.TFRecordWriter(str(tmp_path / "a.tfrecord")) as writer:
        for number in range(10_000):
            writer.write(struct.pack("<q", number) + bytes(1000))
    source = looplib.open_records(f"{tmp_path}/a.tfrecord")
    size = os.path.getsize(tmp_path / "a.tfrecord")

    def read_by_the_kernel():
        return int(pathlib.Path("/proc/self/io").read_text().split()[1])

    for block in (1, 16):
        before = read_by_the_kernel()
        dataset = context(100, 2, 1, 2).records(source, block=block)
        assert sum(len(batch) for batch in dataset.take(600)) == 30_000  # half of 6 epochs, and some read ahead
        assert read_by_the_kernel() - before < 1.2 * 6 * size / 2


@pytest.mark.slow
def test_the_index_is_built_once_and_again_for_other_files(copy, monkeypatch):
    monkeypatch.setenv("LOOPLIB_CACHE", str(copy / "cache"))
    pattern = f"{copy}/data.tfrecord-*"
    for path in copy.glob(".looplib-*"):
        path.unlink()
    looplib.open_records(pattern)
    (index,) = copy.glob(".looplib-*")
    written, good = index.stat().st_mtime_ns, index.read_bytes()
    assert len(looplib.open_records(pattern)) == TOTAL and index.stat().st_mtime_ns == written
    for damaged in (good[:-8], good[:-1] + bytes([good[-1] ^ 1]), b"", b"looplib", bytes(len(good))):
        index.write_bytes(damaged)
        assert numbers(context(training=False).records(pattern))[-1][-1] == TOTAL - 1
        assert index.read_bytes() == good
    with tf.io.TFRecordWriter(str(copy / "data.tfrecord-00001-of-00005")) as writer:
        writer.write(b"one more")
    assert len(looplib.open_records(pattern)) == TOTAL + 1 and index.read_bytes() != good
    index.unlink()
    index.mkdir()  # where it cannot be written, it is in the cache directory
    (index / "file").touch()
    assert len(looplib.open_records(pattern)) == TOTAL + 1 and len(list((copy / "cache").iterdir())) == 1


def flip(path, byte):
    raw = bytearray(path.read_bytes())
    raw[byte] ^= 16
    times = os.stat(path).st_atime_ns, os.stat(path).st_mtime_ns
    path.write_bytes(raw)
    os.utime(path, ns=times)  # as a disk damages a file


def offset(shard, row):
    first = sum(COUNTS[:shard])
    return sum(len(content(number)) + 16 for number in range(first, first + row))


def test_damage_is_named_by_file_record_and_offset(copy):
    pattern, shard = f"{copy}/data.tfrecord-*", copy / "data.tfrecord-00002-of-00005"
    looplib.open_records(pattern)
    good, at = shard.read_bytes(), offset(2, 17)
    flip(shard, at + 12)
    for block, training in ((1, True), (7, True), (None, False)):
        dataset = context(20, training=training).records(pattern, block=block)
        with pytest.raises(tf.errors.OpError, match=f"record 17 of {shard}, at byte {at}, is damaged: its checksum"):
            numbers(dataset, 12)
    shard.write_bytes(good[: at + 5])
    with pytest.raises(RecordsError, match=f"{shard}.*17.*{at}"):
        looplib.open_records(pattern)
    shard.write_bytes(good)
    flip(shard, at + 2)
    os.utime(shard)
    with pytest.raises(RecordsError, match=f"17.*{shard}.*{at}"):
        looplib.open_records(pattern)
    shard.write_bytes(gzip.compress(good))
    with pytest.raises(RecordsError):
        looplib.open_records(pattern)


def test_a_file_that_changes_during_the_run_ends_it(copy):
    pattern, shard = f"{copy}/data.tfrecord-*", copy / "data.tfrecord-00002-of-00005"
    for change in (lambda: os.utime(shard), lambda: shard.write_bytes(shard.read_bytes()[:-100]), shard.unlink):
        source = looplib.open_records(pattern)
        source.files._checked.clear()  # as if no file was looked at just now
        change()
        with pytest.raises(RecordsError, match=f"{shard}.*.*while|cannot"):
            source[41]
        shutil.copy(copy / "data.tfrecord-00004-of-00005", shard)
    assert len(looplib.open_records(pattern)) == TOTAL - COUNTS[2] + COUNTS[4]


@pytest.mark.slow
def test_files_that_other_libraries_read_are_guarded_too(tmp_path):
    import pyarrow
    import pyarrow.parquet
    from array_record.python import array_record_module

    array, table = tmp_path / "a.array_record", tmp_path / "a.parquet"
    writer = array_record_module.ArrayRecordWriter(str(array), "group_size:1,uncompressed")
    for number in range(TOTAL):
        writer.write(content(number))
    writer.close()
    flip(array, array.read_bytes().index(content(150)) + 20)
    batches = context().records(str(array), block=7)
    with pytest.raises(tf.errors.OpError, match=f"record 150 of {array} is damaged: .*at byte .*bad_records=skip:N"):
        list(batches.take(12))
    found = np.concatenate(numbers(context(bad_records=1).records(str(array), shuffle=False), 12))
    assert found[:TOTAL].tolist() == [number + (number == 150) for number in range(TOTAL)]
    source = looplib.open_records(array)
    os.truncate(array, array.stat().st_size // 2)
    with pytest.raises(RecordsError, match=f"{array}"):
        source[TOTAL - 1]

    rows = pyarrow.table({"text": [f"text {number:06d}" for number in range(300)]})
    pyarrow.parquet.write_table(
        rows, table, row_group_size=100, compression="none", use_dictionary=False, write_page_checksum=True
    )
    source = looplib.open_records(table)
    flip(table, table.read_bytes().index(b"text 000150"))
    assert source[99] == {"text": "text 000099"}
    with pytest.raises(RecordsError, match=f"1.*100.*{table}.*100.*.*from"):
        source[199]
    source = looplib.open_records(table)
    os.utime(table)
    with pytest.raises(RecordsError, match=f"{table}"):
        source[0]


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, *more([7])])
def test_a_few_damaged_records_are_left_out(copy, block, caplog):
    pattern = f"{copy}/data.tfrecord-*"
    whole = numbers(context().records(pattern, block=block), 25)
    bad = {40 + 17: 40 + 19, 40 + 18: 40 + 19, TOTAL - 1: 0}  # by number, and what comes in place
    for shard, row in ((2, 17), (2, 18), (4, 56)):
        flip(copy / f"data.tfrecord-0000{shard}-of-00005", offset(shard, row) + 13)
    expected = [[bad.get(number, number) for number in batch] for batch in whole]
    caplog.set_level("WARNING", logger="absl")
    assert numbers(context(bad_records=3).records(pattern, block=block), 25) == expected
    assert "left out a damaged record, 3 of at most 3" in caplog.text and caplog.text.count("left out") == 3
    assert numbers(context(bad_records=3, start=11).records(pattern, block=block), 14) == expected[11:]
    with pytest.raises(tf.errors.OpError, match="3 records are damaged, and --bad_records allows 2 in a run"):
        numbers(context(bad_records=2).records(pattern, block=block), 25)
    # The one that was too many is named, but not counted, so that a restart that allows more needs nothing else.
    refused, restarted = context(), context()
    refused.bad_records, restarted.bad_records = (BadRecords(most, f"{copy}/bad_records") for most in (2, 3))
    with pytest.raises(
        tf.errors.OpError, match="record .* at byte .* --bad_records=skip:3 or more, and delete nothing"
    ):
        numbers(refused.records(pattern, block=block), 25)
    notes = {path.name for path in (copy / "bad_records").iterdir()}
    assert len(notes) == 2
    assert numbers(restarted.records(pattern, block=block), 25) == expected
    assert notes < {path.name for path in (copy / "bad_records").iterdir()}
    evaluated = np.concatenate(numbers(context(training=False, bad_records=3).records(pattern))).tolist()
    assert evaluated == [number for number in range(TOTAL) if number not in bad]
    pairs = context(training=False, bad_records=3).records(pattern, seeds=True)
    assert all(len(records) == len(seeds) for records, seeds in pairs)


class Refusing(looplib.Trainer):
    """Refuses record 17 of the third file."""

    def __init__(self, files, **settings):
        self.files, self.settings, self.weight = files, settings, tf.Variable(0.0)

    def dataset(self, context):
        def parse(records):
            numbers = tf.io.decode_raw(tf.strings.substr(records, 0, 8), tf.int64)[:, 0]
            with tf.control_dependencies([tf.debugging.assert_none_equal(numbers, np.int64(40 + 17))]):
                return tf.identity(numbers)

        return context.records(self.files, **self.settings).map(parse, tf.data.AUTOTUNE)

    def step_fn(self, inputs):
        self.weight.assign_add(1.0)
        return {"loss": tf.cast(inputs, tf.float32)}


def refused_by(trainer, context, step):
    trainer.dataset(context)
    return causes.find(trainer.dataset, context, step)


@pytest.mark.slow
def test_a_record_that_the_program_refuses_is_named(files):
    shard = files.replace("*", "00002-of-00005")
    said = f"record 17 of {shard}, at byte {offset(2, 17)}"
    for settings in ({"block": 1}, {"block": 7}):
        order = numbers(context().records(files, **settings), 12)
        step = next(step for step, batch in enumerate(order) if 40 + 17 in batch)
        place = order[step].index(40 + 17)
        for replicas, workers in ((1, 1), (2, 1), (2, 2)):
            worker = place // 10 if workers == 2 else 0
            assert refused_by(Refusing(files, **settings), context(20, replicas, worker, workers), step) == said
    assert refused_by(Refusing(files), context(training=False), 2) == said
    kept = looplib.Kept(np.arange(TOTAL) % 3 == 0, files)  # 40 + 17 is one of them
    assert refused_by(Refusing(kept, block=2), context(), 0) == said

    with looplib.Controller(
        looplib.RunConfig(global_batch_size=20, loop="eager", seed=3, steps_per_loop=5),
        trainer=Refusing(files),
        writers=[],
    ) as controller:
        with pytest.raises(DataError, match=f"{said}.*Refusing.dataset"):
            controller.train(40)


@pytest.mark.parametrize("training", [True, False])
def test_a_file_without_any_good_record_is_a_sentence(training, tmp_path):
    path = tmp_path / "data.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        writer.write(b"one")
        writer.write(b"two")
    content = bytearray(path.read_bytes())
    content[12] ^= 1
    content[12 + 19] ^= 1
    path.write_bytes(content)
    with pytest.raises(RecordsError, match="2"):
        context(training=training, batch=1, bad_records=9).records(str(path))


@pytest.mark.slow
def test_lines_records_of_one_length_and_parquet(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\r\n\nfour")
    (tmp_path / "b.txt").write_bytes(b"five\n")
    assert list(looplib.open_records(f"{tmp_path}/*.txt")) == [b"one", b"two", b"", b"four", b"five"]
    (tmp_path / "images").write_bytes(b"HH" + bytes(range(12)))
    source = looplib.open_records(f"{tmp_path}/images", "binary", record_bytes=4, header_bytes=2)
    assert list(source) == [bytes(range(first, first + 4)) for first in (0, 4, 8)]
    with pytest.raises(RecordsError, match="14.*0.*4"):
        looplib.open_records(f"{tmp_path}/images", "binary", record_bytes=4)
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"number": list(range(50)), "name": [f"n{number}" for number in range(50)]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=8)
    rows = context(10).records(f"{tmp_path}/a.parquet").take(5)
    found = [pair for row in rows.as_numpy_iterator() for pair in zip(row["number"], row["name"])]
    assert sorted(found) == [(number, b"n%d" % number) for number in range(50)]
    assert [number for number, _ in found] != list(range(50))
    batches = [context(10).records(source, block=4).take(9) for source in (f"{tmp_path}/a.parquet", list(range(50)))]
    found = [[list(batch["number"]) for batch in batches[0]], [list(batch) for batch in batches[1]]]
    assert found[0] == found[1]  # a block that is given has one order in all formats


def test_fields_of_records_are_found_by_their_names(tmp_path):
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    newer = {"a": np.arange(8, 16), "aa": np.arange(8)}  # a column that older files do not have
    for name, columns in {
        "1": {"a": np.arange(8), "b": np.zeros(8)},
        "2": {**newer, "b": np.ones(8)},
        "3": newer,
    }.items():
        parquet.write_table(arrow.table(columns), tmp_path / f"{name}.parquet")
    evaluated = lambda *names: context(8, training=False).records([str(tmp_path / f"{name}.parquet") for name in names])
    found = [batch for batch in evaluated("1", "2").as_numpy_iterator()]
    assert [batch.keys() for batch in found] == 2 * [{"a", "b"}]
    assert np.concatenate([batch["a"] for batch in found]).tolist() == list(range(16))
    assert np.concatenate([batch["b"] for batch in found]).tolist() == [0] * 8 + [1] * 8
    said = r"a record is \{a: int64 \[\], aa: int64 \[\]\}, and the first one \{a: int64 \[\], b: float64 \[\]\}"
    with pytest.raises(Exception, match=said):
        list(evaluated("1", "3"))
    with pytest.raises(Exception, match=r"a record is \(int64 \[\]\), and the first one \(int64 \[\], int64 \[\]\)"):
        list(context(8, training=False).records([(1, 2), (1,)]))


@pytest.mark.slow
def test_the_page_of_records_opens_files_as_printed(tmp_path):
    import pyarrow
    import pyarrow.parquet
    from array_record.python import array_record_module

    page = (ROOT / "docs/data_files.md").read_text().replace("/data/", f"{tmp_path}/")
    array = array_record_module.ArrayRecordWriter(f"{tmp_path}/a.array_record", "group_size:1")
    with tf.io.TFRecordWriter(f"{tmp_path}/train-0.tfrecord") as writer:
        for _ in range(20):
            writer.write(b"record")
            array.write(b"record")
    array.close()
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n' * 20)
    (tmp_path / "a.bin").write_bytes(bytes(20 * 3073))
    pyarrow.parquet.write_table(pyarrow.table({"a": list(range(20))}), tmp_path / "a.parquet")

    calls = [call for call in re.findall(r"`(context\.records\([^`]*\))`", page) if tmp_path.name in call]
    calls = [call for call in calls if "follow=" not in call]  # which only a run can wait for
    found = [next(iter(eval(call, {"context": context(), "looplib": looplib}))) for call in calls]
    assert len(calls) == 5 and all(len(tf.nest.flatten(batch)[0]) == 20 for batch in found)


class Lists(list):
    """A source that takes lists of numbers alone, as TFDS's do."""

    def __getitems__(self, numbers):
        return [self[number] for number in numbers] if numbers and type(numbers) is list else []


@pytest.mark.slow
def test_a_record_that_an_installed_package_cannot_read_is_named_and_may_be_left_out(tmp_path):
    from array_record.python import array_record_data_source, array_record_module

    path = tmp_path / "a.array_record"
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1,uncompressed")
    for number in range(TOTAL):
        writer.write(content(number))
    writer.close()
    flip(path, path.read_bytes().index(content(150)) + 20)
    source = array_record_data_source.ArrayRecordDataSource([str(path)])
    said = "record 150 of the ArrayRecordDataSource cannot be read: .*at byte .*bad_records=skip:N"
    with pytest.raises(tf.errors.OpError, match=said):
        list(context().records(source, block=1).take(12))
    found = np.concatenate(numbers(context(bad_records=1).records(source, shuffle=False), 12))
    assert found[:TOTAL].tolist() == [number + (number == 150) for number in range(TOTAL)]

    class Ends:  # as the library raises where reading ahead outlives the program
        def __getitems__(self, numbers):
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    files = looplib.open_records(path)
    files._source = Ends()
    with pytest.raises(RuntimeError, match="cannot schedule new futures"):
        files[3]


@pytest.mark.slow
def test_data_sources_of_other_libraries(tmp_path):
    from array_record.python import array_record_module

    writer = array_record_module.ArrayRecordWriter(str(tmp_path / "a.array_record"), "group_size:1")
    for number in range(TOTAL):
        writer.write(content(number))
    writer.close()
    expected = numbers(context().records([content(number) for number in range(TOTAL)], block=7), 12)
    assert numbers(context().records(f"{tmp_path}/a.array_record", block=7), 12) == expected
    lists = Lists(content(number) for number in range(TOTAL))
    assert numbers(context().records(lists, block=1), 3) == numbers(context().records(list(lists), block=1), 3)
    arrays = [{"x": np.full([2, 3], number), "y": np.int64(number)} for number in range(30)]
    batch = next(context(10).records(arrays, block=4).as_numpy_iterator())
    assert batch["x"].shape == (10, 2, 3) and list(batch["x"][:, 1, 1]) == list(batch["y"])
    ragged = [np.zeros(size) for size in range(1, 11)]
    with pytest.raises(tf.errors.OpError, match="the records have arrays of different shapes"):
        next(iter(context(10).records(ragged)))


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize(
    "source, message",
    [
        ("/nowhere/*.tfrecord", "'/nowhere/"),
        ([], "the training data set is empty"),
        ("https://example.com/a.tfrecord", "cannot be looked up .*download files of the web first"),
        (os.path.dirname(__file__), "records.*records/"),
        (3, "__len__.*__getitem__"),
    ],
)
def test_what_is_no_source_is_a_sentence(source, message):
    with pytest.raises(looplib.UsageError, match=message):
        context().records(source)


def test_files_of_no_known_format_are_a_sentence(tmp_path):
    (tmp_path / "train-00000").touch()
    with pytest.raises(RecordsError, match="looplib.open_records"):
        context().records(f"{tmp_path}/train-*")
    with pytest.raises(RecordsError, match="'zip'.*array_record"):
        looplib.open_records(f"{tmp_path}/train-*", "zip")
    for format, options in (("binary", {}), ("tfrecord", {"columns": ["a"]}), ("parquet", {"record_bytes": 3})):
        with pytest.raises(RecordsError, match=format):
            looplib.open_records(f"{tmp_path}/train-*", format, **options)
    for format in ("parquet", "array_record"):
        said = f"train-00000, 0 bytes, cannot be opened as {format}: .*; it was truncated .*; restore it from a copy"
        with pytest.raises(RecordsError, match=said):
            looplib.open_records(f"{tmp_path}/train-*", format)


def test_a_name_with_signs_of_patterns_is_the_file_or_refused_where_it_matches_others(tmp_path):
    def content(pattern):
        source = looplib.open_records(f"{tmp_path}/{pattern}")
        return [source[number] for number in range(len(source))]

    for name in ("a[1].txt", "b*.txt", "c?.txt", "d{1,2}.txt", "sub[1]/e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{name}\n")
        assert content(name) == [name.encode()]  # nothing else matches
    for other in ("a1.txt", "bx.txt", "c1.txt", "d1.txt", "sub1/e.txt"):
        (tmp_path / other).parent.mkdir(exist_ok=True)
        (tmp_path / other).write_text("another\n")
    for name, escaped in (("a[1].txt", "a[[]1].txt"), ("b*.txt", "b[*].txt"), ("c?.txt", "c[?].txt")):
        with pytest.raises(RecordsError, match="the name of a file"):
            content(name)
        assert content(escaped) == [name.encode()]
    assert content("d{1,2}.txt") == [b"d{1,2}.txt"]  # no pattern
    assert content("[ab]1.txt") == [b"another"] and len(content("*.txt")) == 8
    with pytest.raises(RecordsError, match="level"):
        content("**/*.txt")


def test_the_one_of_several_files_that_cannot_be_opened_is_named(tmp_path):
    import pyarrow
    import pyarrow.parquet

    for name in "abc":
        pyarrow.parquet.write_table(pyarrow.table({"a": [1, 2]}), tmp_path / f"{name}.parquet")
    os.truncate(tmp_path / "b.parquet", 50)
    with pytest.raises(RecordsError, match="b.parquet.*50"):
        looplib.open_records(f"{tmp_path}/*.parquet")


def test_columns_of_parquet_that_hold_no_tensor_are_a_sentence(tmp_path):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"a": [1, 2], "b": ["x", None]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(RecordsError, match="rows.parquet"):
        looplib.open_records(tmp_path / "rows.parquet", columns=["a", "c"])
    with pytest.raises(RecordsError, match="rows.parquet"):
        next(iter(context(2).records(tmp_path / "rows.parquet")))
    batches = context(2).records(looplib.open_records(tmp_path / "rows.parquet", columns=["a"]))
    assert next(iter(batches))["a"].shape == [2]

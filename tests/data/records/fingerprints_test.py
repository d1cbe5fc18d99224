"""Fingerprints of data: a run that resumes on other files is told which, and one on a copy of its files is not."""

import itertools
import logging
import os
import shutil
import time

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tensorflow as tf
import toy
from array_record.python import array_record_module
from conftest import make_strategy

import looplib
from looplib.data.records.reader import changes, fingerprint


def tfrecord(path, rows):
    with tf.io.TFRecordWriter(str(path)) as writer:
        for row in rows:
            writer.write(row)


def array_record(path, rows):
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1,uncompressed")
    for row in rows:
        writer.write(row)
    writer.close()


def parquet(path, rows):
    table = pyarrow.table({"row": rows})
    pyarrow.parquet.write_table(table, path, compression="none", use_dictionary=False, write_statistics=False)


WRITERS = {
    "tfrecord": tfrecord,
    "array_record": array_record,
    "parquet": parquet,
    "jsonl": lambda path, rows: path.write_bytes(b"\n".join(rows) + b"\n"),
    "bin": lambda path, rows: path.write_bytes(b"".join(rows)),
}


def write(folder, kind, start=0, shards=(0, 1, 2)):
    """Files of 200 records of 40 bytes, whose content begins at a number."""
    for shard in shards:
        rows = [b"%040d" % (start + number) for number in range(200 * shard, 200 * shard + 200)]
        WRITERS[kind](folder / f"part-{shard}.{kind}", rows)
    return f"{folder}/part-*.{kind}"


def opened(pattern):
    options = {"format": "binary", "record_bytes": 40} if pattern.endswith("bin") else {}
    return looplib.open_records(pattern, **options)


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("kind", WRITERS)
def test_a_file_with_another_content_of_equal_length_is_named_and_a_copy_is_the_same(kind, tmp_path):
    (tmp_path / "first").mkdir()
    pattern = write(tmp_path / "first", kind)
    before = fingerprint([opened(pattern)])
    assert list(before) == [f"part-{shard}.{kind}" for shard in range(3)] and len(set(before.values())) == 3
    (tmp_path / "second" / "folder").mkdir(parents=True)
    for path in (tmp_path / "first").glob("part-*"):
        shutil.copy(path, tmp_path / "second" / "folder")
    assert changes(before, fingerprint([opened(pattern.replace("first", "second/folder"))])) == []

    sizes = [path.stat().st_size for path in sorted((tmp_path / "first").glob("part-*"))]
    write(tmp_path / "first", kind, 10_000, [1])
    assert sizes == [path.stat().st_size for path in sorted((tmp_path / "first").glob("part-*"))]
    assert changes(before, fingerprint([opened(pattern)])) == [f"part-1.{kind} has another content"]
    write(tmp_path / "first", kind, 0, [1])
    os.rename(tmp_path / "first" / f"part-0.{kind}", tmp_path / "first" / f"part-3.{kind}")
    found = changes(before, fingerprint([opened(pattern)]))
    assert found == [f"part-0.{kind} is missing", f"part-3.{kind} is new"]


def tfds_source(folder):
    """A data source of TFDS of 200 rows in one file, and the file."""
    import tensorflow_datasets as tfds

    rows = tf.data.Dataset.range(200).map(lambda number: {"row": tf.strings.as_string(number, width=40, fill="0")})
    builder = tfds.dataset_builders.store_as_tfds_dataset(
        name="rows", version="1.0.0", data_dir=folder, features=tfds.features.FeaturesDict({"row": tfds.features.Text()}),
        split_datasets={"train": rows}, file_format="array_record", disable_shuffling=True,
    )  # fmt: skip
    (path,) = builder.info.splits["train"].filepaths
    return builder.as_data_source("train"), path


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, where",
    {
        "tfrecord": r"at record \d+ \(byte \d+\)",
        "array_record": r"at record \d+",
        "parquet": r"at row group 0 \(from row 0, byte \d+\)",
        "jsonl": r"at record \d+ \(byte \d+\)",
        "bin": r"at record \d+ \(byte \d+\)",
        "tfds": r"at record \d+",
    }.items(),
)
def test_a_file_that_changes_while_it_is_read_ends_the_run_with_its_name_and_a_record(kind, where, tmp_path):
    """Files are truncated, as an interrupted copy leaves them, replaced, and removed, while batches are read."""
    for change in ("truncated", "replaced", "removed"):
        (folder := tmp_path / change).mkdir()
        source, path = (
            tfds_source(folder) if kind == "tfds" else (opened(write(folder, kind)), f"{folder}/part-1.{kind}")
        )
        context = looplib.InputContext(
            global_batch_size=8, num_replicas=1, pipeline_index=0, num_pipelines=1, seed=0, training=True, start_step=0
        )
        batches = iter(context.records(source, block=1))
        next(batches)
        size = os.path.getsize(path)
        if change == "truncated":
            os.truncate(path, size // 2)
            said = f"{path} was changed while it was read, {where}: it had {size} bytes .* has {size // 2} now"
        elif change == "replaced":
            shutil.copy(path, f"{path}.new")
            os.utime(f"{path}.new", (1, 1))
            os.replace(f"{path}.new", path)
            said = f"{path} was changed while it was read, {where}: .* another time of change now"
        else:
            os.unlink(path)
            said = f"{path}, of which {where.removeprefix('at ')} is read, cannot be found"
        begin = time.monotonic()
        with pytest.raises(tf.errors.OpError, match=said):
            while time.monotonic() < begin + 10:
                next(batches)
        assert time.monotonic() < begin + 2.5  # files are looked at once a second


@pytest.mark.slow
def test_plans_and_sources_of_any_kind_have_fingerprints(tmp_path, caplog):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, other = write(tmp_path / "a", "jsonl"), write(tmp_path / "b", "jsonl", 7)

    def of(source):
        context = looplib.InputContext(
            global_batch_size=4, num_replicas=1, pipeline_index=0, num_pipelines=1, seed=0, training=True, start_step=0
        )
        context.records(source)
        return context.requests.reader.fingerprint()

    mixed = of(looplib.Mixture({"one": one, "other": other}, {"one": 1, "other": 1}))
    assert list(mixed) == [f"{folder}/part-{shard}.jsonl" for folder in "ab" for shard in range(3)]
    assert list(of(looplib.Kept(np.arange(600) % 2 > 0, one))) == [f"part-{shard}.jsonl" for shard in range(3)]
    backwards = of([f"{tmp_path}/a/part-{shard}.jsonl" for shard in (1, 0, 2)])
    assert changes(of(one), backwards) == ["its files come in another order"]

    rows = [{"x": np.full([2], number), "name": f"row {number}"} for number in range(50)]
    assert of(rows) == of(list(rows)) and list(of(rows)) == ["list"]
    assert changes(of(rows), of(rows[:-1] + rows[:1])) == ["list has another content"]
    numbers = itertools.count()

    class Random(list):
        def __getitem__(self, number):
            return next(numbers)

    assert of(Random(range(50))) == {}  # each read gives something else
    assert caplog.text.count("Random gives other values where a record is read again") == 1

    class Bad(list):
        def __getitem__(self, number):
            if number == 49:
                raise OSError("no such file")
            return super().__getitem__(number)

    assert changes(of(Bad(range(50))), of(Bad(range(50)))) == []  # a bad record does not hide the others
    assert changes(of(Bad(range(50))), of(Bad(range(1, 51)))) == ["Bad has another content"]
    assert caplog.text.count("gives other values") == 1


class Reader(toy.Regression):
    """Reads what it trains on from files."""

    def __init__(self, pattern):
        super().__init__()
        self.pattern = pattern

    def dataset(self, context):
        ids = context.records(self.pattern).map(lambda rows: tf.strings.to_number(rows, tf.int64) % self.num_examples)
        return ids.map(lambda i: (i, tf.gather(toy.X, i), tf.gather(toy.Y, i)))


@pytest.mark.slow
def test_a_resume_on_replaced_files_names_them(tmp_path, caplog):
    caplog.set_level(logging.WARNING, logger="absl")
    pattern = write(tmp_path, "jsonl")

    def train(steps):
        caplog.clear()
        trainer = Reader(pattern) if pattern else toy.Regression()
        with toy.controller(make_strategy("default"), trainer, model_dir=tmp_path / "run") as controller:
            controller.train(steps)
        return caplog.text

    assert "training data" not in train(2)
    for path in tmp_path.glob("part-*"):
        os.utime(path, (1, 1))
    assert "training data" not in train(4)
    write(tmp_path, "jsonl", 50_000, [2])
    said = train(6)
    assert "the training data is not the one of step 4: part-2.jsonl has another content; the steps" in said
    assert "another order" not in said and "training data" not in train(8)
    (tmp_path / "part-0.jsonl").unlink()
    said = train(10)
    assert (
        "of step 8: it has 400 examples, and had 600; part-0.jsonl is missing; the steps that follow train on" in said
    )
    pattern = None
    assert "it was part-1.jsonl, part-2.jsonl of context.records, and is read otherwise now" in train(12)

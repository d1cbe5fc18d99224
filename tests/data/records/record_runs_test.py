"""Runs that read records of files: checked by looplib's own checks, on one and two workers, with damage and kills."""

import functools
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import sklearn.datasets
import tensorflow as tf

import looplib
from looplib.commands.compare import compare
from looplib.run.records import read_jsonl

ROOT = pathlib.Path(__file__).absolute().parents[3]


def digits(folder):
    """The digits in three TFRecord files of examples."""
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    images = (images * 255 / 16).astype(np.uint8).reshape(-1, 8, 8, 1)
    for shard in range(3):
        with tf.io.TFRecordWriter(str(folder / f"digits-{shard}.tfrecord")) as writer:
            for image, label in zip(images[shard::3], labels[shard::3]):
                image = tf.train.Feature(bytes_list=tf.train.BytesList(value=[tf.io.encode_png(image).numpy()]))
                label = tf.train.Feature(int64_list=tf.train.Int64List(value=[label]))
                feature = {"image/encoded": image, "image/class/label": label}
                writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
    return f"{folder}/digits-*.tfrecord"


def damage(folder, sizes, number):
    """Flips a bit of a record, by its number among all, or flips it back; returns what an error says of it."""
    shard, row = divmod(number, 599)
    at = sum(sizes[shard * 599 : number])
    path = folder / f"digits-{shard}.tfrecord"
    raw = bytearray(path.read_bytes())
    raw[at + 40] ^= 16
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_bytes(raw)
    os.utime(path, ns=times)  # as a disk damages a file
    return f"record {row} of {path}, at byte {at}, is damaged: its checksum does not match"


@pytest.mark.slow
def test_a_run_leaves_out_so_many_damaged_records_over_kills_and_workers_and_no_more(nursery, tmp_path):
    flags = [
        f"--config.files={digits(tmp_path)}", "--config.block=1", "--seed=3", "--mode=train", "--global_batch_size=32",
        "--train_steps=60", "--steps_per_loop=5", "--checkpoint_interval=5",
    ]  # fmt: skip
    start = functools.partial(nursery.life_of, "recorded", f"--model_dir={tmp_path}/run", *flags)
    sizes = [len(record) + 16 for record in looplib.open_records(flags[0].partition("=")[2])]
    context = looplib.InputContext(
        global_batch_size=32, num_replicas=1, pipeline_index=0, num_pipelines=1, seed=3, training=True, start_step=0
    )
    order = np.concatenate(list(context.indices(len(sizes)).take(56).as_numpy_iterator()))
    first, second, third = (int(order[step * 32 + 5]) for step in (40, 45, 50))  # with steps from 32 on, read at once
    named = damage(tmp_path, sizes, first)
    refused = start()
    line = refused.output().strip().splitlines()[-1] if refused.code(300) == 1 else refused.output()
    assert named in line and "--bad_records=skip:N" in line and "the same command resumes from" in line, line

    killed = start("--bad_records=skip:2")
    while not killed.ended(0.01) and not list((tmp_path / "run").glob("checkpoints/ckpt-4*.commit")):
        pass
    killed.kill()
    assert "left out a damaged record, 1 of at most 2" in killed.output() and "restored step 30" in killed.output()
    damage(tmp_path, sizes, second)
    workers = nursery.workers(
        2, tmp_path / "run", *flags, "--bad_records=skip:2", "--train_steps=120", binary="recorded"
    )
    for worker in workers:
        assert worker.code(300) == 0, worker.output()
    notes = sorted((tmp_path / "run" / "bad_records").iterdir())
    assert len(notes) == 2 and any(named in note.read_text() for note in notes)

    damage(tmp_path, sizes, first)
    named = damage(tmp_path, sizes, third)
    refused = start("--bad_records=skip:2", "--train_steps=240")
    assert refused.code(300) == 1
    line = refused.output().strip().splitlines()[-1]
    assert "3 records are damaged, and --bad_records allows 2 in a run" in line and named in line, line
    assert "run again with --bad_records=skip:3 or more" in line, line
    assert sorted((tmp_path / "run" / "bad_records").iterdir()) == notes
    allowed = start("--bad_records=skip:3", "--train_steps=240")
    assert allowed.code(300) == 0, allowed.output()
    assert set(notes) < set((tmp_path / "run" / "bad_records").iterdir())


def run(command):
    """Runs a binary of this folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)


KINDS = {  # ways to read, of those that `recorded` has
    "records": ["--config.block=1"],
    "blocks": ["--config.block=16"],
    "mixture": ["--config.data=mixture"],
    "packed": ["--config.data=packed"],
    "pipeline": ["--config.data=pipeline"],
}
CHECKS = {
    "resume": (["resume", "--kills=2"], [], []),
    "replicas": (["replicas", "--counts=1,2,4"], [], []),
    "resume of two workers": (
        ["resume", "--kills=2"],
        [sys.executable, "-m", "looplib", "launch", "--workers=2", "--"],
        ["--strategy=multi_worker"],
    ),
}


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return [f"--config.files={digits(tmp_path_factory.mktemp('digits'))}", "--mode=train", "--global_batch_size=32"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, check", [("pipeline", "resume"), ("blocks", "replicas"), ("mixture", "resume of two workers")]
)
def test_a_run_that_reads_files_passes_the_checks(python, flags, tmp_path, check, kind):
    workers = ["--workers=2"] if check == "replicas" and kind != "pipeline" else []  # whose order depends on them
    check, launch, more_flags = CHECKS[check]
    python = sys.executable if launch else python  # a fork of the tests' server may outlive the group that is killed
    result = run([
        sys.executable, "-m", "looplib", "check", *check, *workers, f"--dir={tmp_path}/runs", "--", *launch, python,
        "tests/programs/recorded.py", *flags, *KINDS[kind], *more_flags, "--train_steps=60", "--checkpoint_interval=10",
    ])  # fmt: skip
    assert result.returncode == 0 and "EQUAL" in result.stdout and "(with the examples" in result.stdout, result


# workers_test has a run that does so, and records_test the order of records for any number of workers.
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["blocks", "records", "mixture", "packed"])
def test_a_run_goes_from_one_worker_to_two_and_back_with_the_same_examples(kind, nursery, flags, tmp_path):
    flags = [*flags, *KINDS[kind], "--steps_per_loop=5"]
    lives = [nursery.life_of("recorded", f"--model_dir={tmp_path}/whole", *flags, "--train_steps=60")]
    for workers, steps in ((1, 20), (2, 40), (1, 60)):
        part = [*flags, f"--train_steps={steps}"]
        if workers == 1:
            lives.append(nursery.life_of("recorded", f"--model_dir={tmp_path}/parts", *part))
        else:
            lives += nursery.workers(2, tmp_path / "parts", *part, binary="recorded")
        for life in lives:
            assert life.code(300) == 0, life.output()
    assert "restored step 40" in lives[-1].output()
    examples = [
        [record["examples_checksum"] for record in read_jsonl(f"{tmp_path}/{run}/metrics.jsonl")] for run in ("whole", "parts")
    ]  # fmt: skip
    assert examples[0] == examples[1] and len(set(examples[0])) == 12
    assert compare(tmp_path / "whole", tmp_path / "parts", rtol=1e-4, atol=1e-5).differences == []

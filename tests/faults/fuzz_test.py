"""Random changes to markers, side files and the saved state: a start works, or is refused in a sentence."""

import json
import os
import random
import shutil

import hostile_test
import numpy as np
import pytest
import tensorflow as tf
from conftest import repetitions
from tampering import RUN_STATE, mutate_fields, mutated, rewrite_run_state, rewrite_tensors, sign

import looplib
from looplib.__main__ import main as cli
from looplib.errors import CheckpointError, UsageError
from looplib.report.writers.files import JsonlWriter
from looplib.report.writers.tensorboard_writer import TensorBoardWriter
from looplib.run import commits
from looplib.run.directory import RunDir

# Fixtures: a run that stopped at step 6, a copy of it, and what must not be touched.
stopped, folder = hostile_test.stopped, hostile_test.folder
victim, untouched = hostile_test.victim, hostile_test.untouched
MUTATIONS = int(os.environ.get("LOOPLIB_MUTATIONS", repetitions(28, 40)))
OF_THE_STATE = MUTATIONS // 4  # each is a whole start


def test_no_mutation_of_a_marker_or_side_file_hangs_or_crashes_or_touches_anything_else(stopped, victim, tmp_path):
    """Does what a start does with them, without the training: list, verify, tidy, read records and reports, inspect."""
    chance = random.Random(1)
    kinds = ["checkpoints/ckpt-6.commit", "checkpoints/ckpt-4.commit", "metrics.jsonl", "run.json", "lock"]
    outcomes = {"newest": 0, "older": 0, "none": 0, "refused": 0}
    for number in range(MUTATIONS):
        run = shutil.copytree(stopped, tmp_path / "run")
        path = run / chance.choice([*kinds, f"train/{os.listdir(run / 'train')[0]}"])
        if path.suffix == ".commit" and chance.random() < 0.5:
            fields = json.loads(path.read_text())
            mutate_fields(fields, chance)
            sign(path, fields)
        else:
            path.write_bytes(mutated(path.read_bytes(), chance))
        try:
            found = commits.newest_intact(str(run / "checkpoints"), tidy=True)
            outcomes["none" if found is None else {6: "newest", 4: "older"}[found.step]] += 1
            for saved in looplib.list_checkpoints(run):
                commits.remove(saved)
        except UsageError as error:  # a higher format number, with a checksum that fits
            outcomes["refused"] += 1
            assert "has the format" in str(error), number
        RunDir(run).report()
        JsonlWriter(str(run / "metrics.jsonl")).resume(4, {"train": 3})
        TensorBoardWriter(str(run)).resume(4, {"train": 3})
        assert cli(["inspect", str(run)]) in (0, 1, 2)
        shutil.rmtree(run)
    # Most leave a checkpoint, as one of two is changed at most; some hit the newest one, and a few ask for a newer looplib.
    print(outcomes)
    assert outcomes["newest"] > MUTATIONS / 4 and outcomes["older"] > MUTATIONS / 20 and outcomes["none"] == 0
    assert outcomes["refused"] < MUTATIONS / 10


def mutate_state(run, chance):
    """Changes what the newest checkpoint holds of looplib's own, and makes all checksums right again."""
    marker, way = run / "checkpoints" / "ckpt-6.commit", chance.randrange(8)

    def change(tensors):
        if way == 0:
            tensors[RUN_STATE] = tf.constant(mutated(tensors[RUN_STATE].numpy(), chance))
        elif way == 1:
            step = chance.choice([-1, 0, 5, 2**62, [6], 6.0])
            tensors["global_step/.ATTRIBUTES/VARIABLE_VALUE"] = tf.constant(np.array(step))
        elif way == 2:
            name = chance.choice(["replica_state", "input_state"])
            tensors[f"{name}/.ATTRIBUTES/py_state"] = tf.constant(bytes(chance.randrange(256) for _ in range(40)))
        elif way == 3:
            tensors[RUN_STATE] = tf.constant(chance.choice([b"[" * 100_000, b"null", b"[]", b"7", b"\xff", b""]))

    if way < 4:
        rewrite_tensors(marker, change)
    else:
        rewrite_run_state(marker, lambda values: mutate_fields(values, chance))


@pytest.mark.slow
def test_no_mutation_of_the_saved_state_hangs_or_crashes_or_touches_anything_else(stopped, victim, tmp_path):
    """With checksums that fit, so that the state itself is read."""
    chance = random.Random(2)
    outcomes = {"works": 0, "refused": 0}
    for number in range(OF_THE_STATE):
        run = shutil.copytree(stopped, tmp_path / "run")
        mutate_state(run, chance)
        try:
            assert hostile_test.train(run, 7).global_step == 7, number
            outcomes["works"] += 1
        except UsageError as error:
            outcomes["refused"] += 1
            assert "is not a checkpoint that looplib can read" in str(error) or "; " in str(error), (number, error)
        except BaseException as error:
            raise AssertionError(f"mutation {number}") from error
        shutil.rmtree(run)
    print(outcomes)
    # Every field has a type, so that most changes are refused; about one in five of those to fields leaves the types.
    assert min(outcomes.values()) > OF_THE_STATE / 20


@pytest.mark.slow
def test_a_value_of_another_type_in_the_saved_state_is_named(folder, victim):
    rewrite_run_state(folder / "checkpoints" / "ckpt-6.commit", lambda values: values.update({"engines": [[None]]}))
    with pytest.raises(
        CheckpointError,
        match="ckpt-6.*'engines'",
    ):
        hostile_test.start(folder)
    for path in (folder / "checkpoints").glob("ckpt-6*"):  # as it advises
        path.rename(path.with_name(f"aside-{path.name}"))
    assert hostile_test.train(folder, 8).restored_from.endswith("ckpt-4")

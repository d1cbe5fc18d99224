"""The run record: what is saved is restored, old and newer records are read, and no other type gets through."""

import dataclasses
import json
import re

import pytest
import tensorflow as tf
import toy
from conftest import make_strategy

from looplib.checkpoint import commits
from looplib.checkpoint.restoring import peek
from looplib.data.batches import BatchSizePeriod
from looplib.errors import UsageError
from looplib.task.record import EngineChoice, RunningTotals, RunRecord

RECORD = RunRecord(
    reported={"train": 4},
    train={"loss": 0.5, "examples": 2**60, "bad": float("inf")},
    losses=[0.5, 1],
    running=RunningTotals(["loss"], [[1.0, 2.0]]),
    input_offset=-3,
    rollbacks=1,
    optimizers={"optimizer": "Adam"},
    learning_rates={"0": 0.1},
    actions={"Stopping": [1, {"best": None}]},
    engines={"train": EngineChoice("graph", 4, {"graph": 0.001})},
    seed=2**62,
    global_batch_size=8,
    earlier_batches=[BatchSizePeriod(4, 1, 16)],
    loop="auto",
    examples=7,
    files={"a.tfrecord": "00ff"},
)
# As looplib wrote it before records had a format.
OLD = {
    "reported": {"train": 4, "eval": 4},
    "losses": [0.5],
    "running": {"names": ["loss"], "totals": [[1.0, 2.0]]},
    "optimizers": {"optimizer": "Adam"},
    "learning_rates": {"0": 0.1},
    "actions": {},
    "engines": {"train": {"loop": "xla", "chunk": 2, "seconds_per_step": {"graph": 1e-3}}},
    "seed": 0,
    "global_batch_size": None,
    "loop": "auto",
    "train": {"loss": 0.5},
}


def test_a_record_is_written_whole_and_read_again():
    text = RECORD.to_json()
    assert RunRecord.from_json(text) == RECORD
    fields = {field.name for field in dataclasses.fields(RunRecord)} - {"unknown"}
    assert json.loads(text).keys() == {*fields, "format"}


def test_a_record_of_before_formats_is_read_and_lacks_nothing():
    record = RunRecord.from_json(json.dumps(OLD).encode())
    assert record.running == RunningTotals(["loss"], [[1.0, 2.0]]) and record.engines["train"].chunk == 2
    assert record.rollbacks == record.input_offset == 0 and record.unknown == {}
    again = json.loads(record.to_json())
    assert {name: again[name] for name in OLD} == OLD
    assert RunRecord.from_json("{}") == RunRecord()


def test_metrics_of_no_step_are_a_record_too():
    record = RunRecord(running=RunningTotals([], []))
    assert RunRecord.from_json(record.to_json()) == record


def test_the_running_metrics_of_an_orbit_trainer_are_numbers_by_name():
    record = RunRecord.from_json('{"running": {"loss": 0.5, "names": 1}}')
    assert record.running == {"loss": 0.5, "names": 1}
    assert RunRecord.from_json(record.to_json()).running == record.running


def test_a_field_that_a_newer_version_added_is_kept_and_refuses_nothing():
    newer = {**OLD, "format": 1, "color": {"deep": ["blue"]}}
    newer["engines"] = {"train": {**OLD["engines"]["train"], "reason": "time"}}
    record = RunRecord.from_json(json.dumps(newer))
    record.rollbacks = 2
    again = json.loads(record.to_json())
    assert again["color"] == {"deep": ["blue"]} and again["rollbacks"] == 2


def test_a_newer_format_is_refused_by_name():
    with pytest.raises(UsageError, match=r"in a/ckpt-1 has the format 3, and this looplib reads formats up to 2; ins"):
        RunRecord.from_json('{"format": 3, "reported": 7}', "a/ckpt-1")


VALUES = [None, True, 1.5, 10**400, "x", [], [[]], {}, {"a": None}, {"a": "x"}, {"a": [1]}, [None], ["x"], [{}]]


@pytest.mark.parametrize("name", sorted({*OLD, "input_offset", "rollbacks", "earlier_batches", "format"} - {"actions"}))
def test_a_value_is_of_its_fields_type_or_refused_in_a_sentence(name):
    refused = 0
    for value in VALUES:
        try:
            record = RunRecord.from_json(json.dumps({**OLD, name: value}), "a/ckpt-1")
        except UsageError as error:
            refused += 1
            assert re.match(
                f"the run record in a/ckpt-1 .*{name}.* is|the run record in a/ckpt-1 has the f", str(error)
            )
        else:
            assert RunRecord.from_json(record.to_json()) == record
    assert refused >= 8


@pytest.mark.parametrize("text", ["", "{", "3", "[]", "null", b"\xff\xfe", "[" * 100_000, 3, None], ids=repr)
def test_what_is_no_record_at_all_is_refused_in_a_sentence(text):
    with pytest.raises(UsageError, match="the run record in a/ckpt-1 cannot be read: .*; name another checkpoint"):
        RunRecord.from_json(text, "a/ckpt-1")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint, and a function that copies it with another run record."""
    folder = tmp_path_factory.mktemp("run")
    with toy.controller(make_strategy("default"), toy.Regression(), model_dir=folder) as controller:
        controller.train(4)
    reader = tf.train.load_checkpoint(folder / "checkpoints" / "ckpt-4")
    values = {key: reader.get_tensor(key) for key in reader.get_variable_to_shape_map()}

    def write(path, change):
        key = "run_state/.ATTRIBUTES/py_state"
        saved = {**values, key: json.dumps({**json.loads(values[key]), **change}).encode()}
        tf.raw_ops.SaveV2(
            prefix=str(path), tensor_names=list(saved), shape_and_slices=[""] * len(saved),
            tensors=[tf.constant(value) for value in saved.values()],
        )  # fmt: skip
        commits.commit(str(path), 4)
        return str(path)

    return write


@pytest.mark.parametrize("offset", [-5, 2**53, 10**30])
def test_a_position_that_no_run_can_have_is_refused(offset, checkpoint, tmp_path):
    with pytest.raises(UsageError, match=r"the position in the data of .*ckpt-4 is -?\d+ \(step 4, input_offset"):
        peek(checkpoint(tmp_path / "ckpt-4", {"input_offset": offset}))


def test_a_controller_refuses_a_record_of_other_types_and_keeps_a_newer_ones_fields(checkpoint, tmp_path):
    with toy.controller(make_strategy("default"), toy.Regression(), model_dir=tmp_path / "run") as controller:
        path = checkpoint(tmp_path / "ckpt-4", {"rollbacks": [1]})
        with pytest.raises(UsageError, match=r"its field 'rollbacks' is \[1\], expected int"):
            controller.restore_checkpoint(path)
        controller.restore_checkpoint(checkpoint(tmp_path / "ckpt-4", {"color": "blue"}))
        controller.train(6)
        _, record = peek(controller.latest_checkpoint)
        assert record.unknown == {"color": "blue"} and record.reported == {"train": 6}

"""The run record: what is saved is restored, old and newer records are read, and no other type gets through."""

import dataclasses
import json
import typing

import pytest
import tensorflow as tf
import toy
from conftest import make_strategy
from hypothesis import example, given, settings
from hypothesis import strategies as st

from looplib.base.folders import is_name
from looplib.data.order import BatchSizePeriod
from looplib.errors import CheckpointError, UsageError
from looplib.run import commits
from looplib.task.record import EngineChoice, RunningTotals, RunRecord, VariableNames
from looplib.weights.restoring import peek

TEXT = st.text(max_size=6)
VALUES = {
    type(None): st.none(), int: st.integers(0, 2**53 - 1), float: st.integers() | st.floats(allow_nan=False), str: TEXT
}  # fmt: skip
JSON = st.recursive(
    st.one_of(st.booleans(), *VALUES.values()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=4,
)


def values(hint, **own):
    """Values of a type of the record's fields; `own` are those of some fields of a dataclass."""
    arguments = typing.get_args(hint)
    if hint in VALUES and not own:
        return VALUES[hint]
    if dataclasses.is_dataclass(hint):
        return st.builds(hint, **{name: values(kind) for name, kind in typing.get_type_hints(hint).items()} | own)
    if hint is typing.Any:
        return JSON
    if typing.get_origin(hint) is list:
        return st.lists(values(arguments[0]), max_size=3)
    if typing.get_origin(hint) is dict:
        return st.dictionaries(TEXT, values(arguments[1]), max_size=3)
    return st.one_of(*map(values, arguments))


# Dataclasses of which not every value of the right types is one.
VALUES |= {
    EngineChoice: values(EngineChoice, loop=st.sampled_from(["graph", "xla"]), chunk=st.integers(1)),
    RunningTotals: values(RunningTotals, totals=st.lists(st.tuples(*[VALUES[float]] * 2).map(list), max_size=3)),
    BatchSizePeriod: values(BatchSizePeriod, size=st.integers(1, 2**31 - 1)),
    VariableNames: values(VariableNames, slots=st.dictionaries(TEXT, st.tuples(TEXT, TEXT).map(list), max_size=2)),
}
KNOWN = {field.name for field in dataclasses.fields(RunRecord)} - {"unknown"} | {"format"}
RECORDS = values(RunRecord, unknown=st.dictionaries(TEXT.filter(lambda name: name not in KNOWN), JSON, max_size=2))
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


def test_a_record_of_before_formats_is_read_and_lacks_nothing():
    record = RunRecord.from_json(json.dumps(OLD).encode())
    assert record.running == RunningTotals(["loss"], [[1.0, 2.0]]) and record.engines["train"].chunk == 2
    assert record.rollbacks == record.input_offset == 0 and record.unknown == {}
    again = json.loads(record.to_json())
    assert {name: again[name] for name in OLD} == OLD
    assert RunRecord.from_json("{}") == RunRecord()


def test_a_field_that_a_newer_version_added_is_kept_and_refuses_nothing():
    newer = {**OLD, "format": 1, "color": {"deep": ["blue"]}}
    newer["engines"] = {"train": {**OLD["engines"]["train"], "reason": "time"}}
    record = RunRecord.from_json(json.dumps(newer))
    record.rollbacks = 2
    again = json.loads(record.to_json())
    assert again["color"] == {"deep": ["blue"]} and again["rollbacks"] == 2


def test_a_newer_format_is_refused_by_name():
    with pytest.raises(CheckpointError, match="a/ckpt-1.*3.*2"):
        RunRecord.from_json('{"format": 3, "reported": 7}', "a/ckpt-1")


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True)
@given(RECORDS)
def test_a_record_is_written_whole_and_read_again(record):
    text = record.to_json()
    assert RunRecord.from_json(text) == RunRecord.from_json(text.encode()) == record
    saved = json.loads(text)
    assert saved.keys() == {*KNOWN, *record.unknown} and saved["format"] == (2 if record.earlier_batches else 1)


def parts(value, path=()):
    """Each part of a JSON value, with its path."""
    yield path, value
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from parts(inner, (*path, key))


WHOLE = (
    "reported",
    "input_offset",
    "rollbacks",
    "seed",
    "global_batch_size",
    "examples",
    "earlier_batches",
    "contents",
)
KINDS = {str: "x", list: [], dict: {}, type(None): None, int: 1, float: 1.5, bool: True}


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True)
@given(RECORDS, st.data())
def test_a_part_of_another_type_is_refused_in_a_sentence(record, data):
    saved = json.loads(record.to_json())
    typed = [(path, old) for name in KNOWN - {"actions", "format"} for path, old in parts(saved[name], (name,))]
    path, old = data.draw(st.sampled_from(sorted(typed, key=repr)).filter(lambda part: part[1] is not None))
    alike = {int, float, bool} if isinstance(old, (int, float)) else {type(old)}
    if path[0] in WHOLE:
        alike = {type(old)}
    if len(path) == 1:  # which may have no value
        alike |= {type(None)}
    holder = saved
    for key in path[:-1]:
        holder = holder[key]
    for kind in KINDS.keys() - alike:
        holder[path[-1]] = KINDS[kind]
        with pytest.raises(CheckpointError) as refused:
            RunRecord.from_json(json.dumps(saved), "a/ckpt-1")
        assert str(refused.value).startswith(f"the run record in a/ckpt-1 cannot be read: its field {path[0]!r} is ")


@pytest.mark.slow
@settings(max_examples=50, deadline=None, derandomize=True)
@given(RECORDS, st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255), st.binary(max_size=3))))
def test_a_damaged_record_is_refused_in_a_sentence_or_read_as_what_it_says(record, damages):
    content = record.to_json().encode()
    for where, bits, inserted in damages:
        place = int(where * len(content))
        before, byte, after = content[:place], content[place], content[place + 1 :]
        for changed in (before, before + bytes([byte ^ bits]) + after, before + inserted + content[place:]):
            try:
                found = RunRecord.from_json(changed, "a/ckpt-1")
            except UsageError as error:
                assert str(error).startswith("the run record in a/ckpt-1 ")
            else:
                assert len(changed) >= len(content)
                said, again = json.loads(changed), json.loads(found.to_json())
                said.pop("format", None)
                for name in [name for name in said.get("reported", {}) if not is_name(name)]:
                    del said["reported"][name]  # which can be no folder
                assert {name: again[name] for name in said} == said


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.binary().filter(lambda text: b"{" not in text)
    | JSON.filter(lambda value: type(value) is not dict).map(json.dumps)
)
@example("[" * 100_000)
@example(3)
@example(None)
def test_what_is_no_record_at_all_is_refused_in_a_sentence(text):
    with pytest.raises(CheckpointError, match="a/ckpt-1"):
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


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("offset", [-5, 2**53, 10**30])
def test_a_position_that_no_run_can_have_is_refused(offset, checkpoint, tmp_path):
    with pytest.raises(CheckpointError, match=r"ckpt-4.*\(step.*4.*input_offset"):
        peek(checkpoint(tmp_path / "ckpt-4", {"input_offset": offset}))


@pytest.mark.slow
def test_a_controller_refuses_a_record_of_other_types_and_keeps_a_newer_ones_fields(checkpoint, tmp_path):
    with toy.controller(make_strategy("default"), toy.Regression(), model_dir=tmp_path / "run") as controller:
        path = checkpoint(tmp_path / "ckpt-4", {"rollbacks": [1]})
        with pytest.raises(CheckpointError, match=r"'rollbacks'.*\[1\]"):
            controller.restore_checkpoint(path)
        controller.restore_checkpoint(checkpoint(tmp_path / "ckpt-4", {"color": "blue"}))
        controller.train(6)
        _, record = peek(controller.latest_checkpoint)
        assert record.unknown == {"color": "blue"} and record.reported == {"train": 6}


def test_a_metric_that_is_not_finite_is_read_again_beside_a_finite_loss():
    record = RunRecord(train={"loss": 1.0, "snr": float("-inf")}, losses=[float("inf")])
    assert RunRecord.from_json(record.to_json()) == record
    again = RunRecord.from_json(RunRecord(train={"snr": float("nan")}).to_json())
    assert list(again.train) == ["snr"] and again.train["snr"] != again.train["snr"]

"""Whatever kind of number a user returns, records, markers and writers hold Python's own, and read them again."""

import csv
import fractions
import json
import math

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
import toy
from conftest import make_strategy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import looplib
from looplib.errors import MetricError
from looplib.loop.task_loop import as_numbers
from looplib.run import commits, metric_names
from looplib.run.records import read_jsonl
from looplib.task.actions import Action, Actions
from looplib.task.plain import as_number, gaps
from looplib.task.record import RunRecord
from looplib.weights.restoring import peek

_FLOATS = (np.float16, np.float32, np.float64, np.longdouble)
_INTS = (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64)
_TENSORS = ("bool", "int8", "uint8", "int32", "int64", "uint64", "bfloat16", "float16", "float32", "float64")


def _ways(number):
    """Yields ways to say one number, which all of them hold exactly."""
    yield number
    kinds = [np.bool_] if isinstance(number, bool) else _FLOATS if isinstance(number, float) else _INTS + _FLOATS
    for kind in kinds:
        yield kind(number)
        yield np.array(number, kind)
    whole = not isinstance(number, float)
    for kind in _TENSORS:
        if (whole or kind.startswith("float")) and (kind != "bool" or number in (0, 1)):
            yield tf.cast(tf.constant(number), kind)
    if whole:
        yield ml_dtypes.bfloat16(number)
        yield fractions.Fraction(number)
    yield tf.Variable(float(number))
    yield keras.Variable(float(number), dtype="bfloat16" if whole else "float32")


SMALL = st.booleans() | st.integers(0, 127) | st.floats(width=16)


class Remembers(Action):
    def __init__(self, name, value):
        self.name, self.value = name, value

    def state(self):
        return {"value": self.value, "list": [self.value]}

    def load(self, state):
        self.value = state


def same(one, other):
    return type(one) in (int, float) and (one == other or (math.isnan(one) and math.isnan(other)))


@settings(deadline=None, max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(number=SMALL)
def test_a_number_of_any_kind_is_read_from_record_marker_and_state_as_it_was_returned(number, tmp_path):
    values = {f"m{place}": value for place, value in enumerate(_ways(number))}
    metrics = as_numbers("Any", values)
    assert len(metrics) > 8 and all(same(value, number) for value in metrics.values())
    actions = Actions([Remembers(k, v) for k, v in values.items() if not isinstance(v, fractions.Fraction)])
    record = RunRecord(train=metrics, losses=list(metrics.values()), running=dict(metrics), actions=actions.save())
    read = RunRecord.from_json(record.to_json())
    for found in (read.train.values(), read.losses, read.running.values()):
        assert len(list(found)) == len(values) and all(same(value, number) for value in found)
    actions.load(read.actions)
    states = [action.value for action in actions._stateful.values()]
    assert all(state["list"] == [state["value"]] or math.isnan(number) for state in states)
    assert all(same(state["value"] + 0, number) for state in states)
    done = commits.Commit(str(tmp_path / "ckpt-3"), 3, 0.0, {}, {}, {})
    commits.write_marker(done)
    scores = commits.add_scores(done, {name: as_number(name, value) for name, value in values.items()}).scores
    assert (
        commits.read_marker(done.path).scores
        == scores
        == {name: number if math.isfinite(number) else None for name in values}
    )


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("number", [2**63, 2**64 - 1, -(2**63), 10**30, 2**1023, 1e308, 5e-324], ids=repr)
def test_large_and_small_numbers_are_read_as_they_were_returned(number):
    record = RunRecord(train=as_numbers("Any", {"a": number, "b": np.float64(number)}))
    assert list(RunRecord.from_json(record.to_json()).train.values()) == [
        number if abs(number) < 2**64 else float(number),
        float(number),
    ]


NO_NUMBERS = ["a", b"1", None, 1j, [1.0], [1, [2]], {}, np.datetime64(1, "ns"), 10**400, np.zeros(2), tf.constant("x")]


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda value: repr(value)[:20])
def test_what_is_no_number_is_refused_by_the_metrics_name(value):
    with pytest.raises(MetricError, match="'odd'"):
        as_numbers("Any", {"loss": 1.0, "odd": value})


def all_kinds(number):
    ways = {f"{place:02}_{type(way).__name__}": way for place, way in enumerate(_ways(number))}
    return {**ways, "nan": np.float16("nan"), "converged": tf.constant(True)}


class Kinds(looplib.Adapter, toy.Regression):
    """Returns every kind of number, from the step and from its end."""

    def step_fn(self, inputs):
        outputs = super().step_fn(inputs)
        kinds = {f"step_{kind}": looplib.last(tf.cast(1, kind)) for kind in _TENSORS}
        examples = {f"mean_{kind}": tf.cast(tf.ones_like(inputs[0]), kind) for kind in _TENSORS}
        return {**outputs, **kinds, **examples}

    def loop_end(self, metrics):
        return {**super().loop_end(metrics), **all_kinds(1)}

    @property
    def rates(self):
        return {"rows_per_second": np.float32(8)}


class KindsEvaluator(toy.RegressionEvaluator):
    def loop_end(self, metrics):
        return {**metrics, **all_kinds(True)}


def trained(folder, steps):
    trainer = Kinds()
    policy = looplib.CheckpointPolicy(every_steps=2, keep=(looplib.KeepBest("eval/converged", "max", number=9),))
    writers = [*looplib.DEFAULT_WRITERS, looplib.CsvWriter(str(folder))]
    with toy.controller(
        make_strategy("default"), trainer, KindsEvaluator(trainer.model), model_dir=folder, checkpoints=policy,
        writers=writers,
    ) as controller:  # fmt: skip
        restored = controller.global_step
        controller.train_and_evaluate(steps, eval_interval=2)
        return restored, controller


@pytest.mark.slow
def test_a_run_reports_every_kind_of_number_and_continues(tmp_path):
    trained(tmp_path, 2)
    restored, controller = trained(tmp_path, 4)
    assert restored == 2
    records = read_jsonl(str(tmp_path / "metrics.jsonl"))
    assert [record["step"] for record in records if record["split"] == "eval"] == [2, 4]
    ones = {"train": all_kinds(1).keys() - {"nan"}, "eval": all_kinds(True).keys() - {"nan"}}
    for record in records:
        assert all(record[name] == 1 for name in ones[record["split"]])
        assert record["nan"] is None and all(type(value) is not bool for value in record.values())
    steps = [name for name in records[0] if name.startswith(("step_", "mean_"))]
    assert len(steps) == 2 * len(_TENSORS) and all(records[0][name] == 1 for name in steps)
    assert records[0]["rows_per_second"] == pytest.approx(8 * records[0]["steps_per_second"], rel=0.01)
    report = json.loads((tmp_path / "run.json").read_text(), parse_constant=pytest.fail)
    assert report["metrics"]["eval"]["converged"] == 1 and report["metrics"]["train"]["converged"] == 1
    rows = list(csv.DictReader((tmp_path / "csv" / "train.csv").open()))
    assert [row["converged"] for row in rows] == ["1"] * 4
    assert all(s.scores["eval/converged"] == 1 for s in looplib.list_checkpoints(tmp_path))
    step, record = peek(controller.latest_checkpoint)
    assert step == 4 and all(record.train[name] == 1 for name in ones["train"])


def test_booleans_that_older_versions_wrote_are_read_as_numbers(tmp_path):
    record = RunRecord.from_json(
        '{"train": {"loss": 0.5, "converged": false}, "running": {"a": true}, "losses": [true]}'
    )
    assert record.train == {"loss": 0.5, "converged": 0} and type(record.train["converged"]) is int
    assert type(record.running["a"]) is int and type(record.losses[0]) is int
    done = commits.Commit(str(tmp_path / "ckpt-3"), 3, 0.0, {}, {"eval/converged": True}, {})
    commits.write_marker(done)
    assert commits.read_marker(done.path).scores["eval/converged"] == 1
    assert looplib.KeepBest("eval/converged", "max").select([commits.read_marker(done.path)])


def test_nan_and_infinity_are_as_far_from_themselves_as_any_number_and_infinitely_from_others():
    nan, inf = math.nan, math.inf
    for dtype in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.complex64):
        one = np.array([nan, nan, inf, inf, inf, -inf, 1, 2, 0], dtype)
        other = np.array([nan, 1, inf, -inf, nan, -inf, nan, 5, -0.0], dtype)
        assert gaps(one, other).tolist() == gaps(other, one).tolist() == [0, inf, 0, inf, inf, 0, inf, 3, 0]


@pytest.mark.parametrize(("mode", "order"), [("max", [3, 1, 4, 0]), ("min", [0, 1, 4, 3])])
def test_only_finite_values_are_scores(mode, order):
    found = [0.25, 1, np.float32("inf"), np.float64(2.5), 1.0, math.nan, None, -math.inf]
    assert metric_names.best_first(range(len(found)), found.__getitem__, mode) == order
    for nothing in (None, math.nan, math.inf, -math.inf):
        assert metric_names.gain(0.5, nothing, mode) == math.inf
        assert metric_names.gain(nothing, 0.5, mode) == metric_names.gain(nothing, None, mode) == -math.inf
    assert metric_names.gain(2, 0.5, mode) == (1.5 if mode == "max" else -1.5)

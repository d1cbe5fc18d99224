"""State of every kind in checkpoints, and every check, replay and comparison of runs with it: the verdict is right."""

import re
import sys

import every_kind
import numpy as np
import pytest
import tensorflow as tf
from conftest import make_strategy
from ordered import ordered

import looplib
from looplib.__main__ import main
from looplib.commands.compare import compare_tensors
from looplib.errors import EXIT_DIFFERENT, EXIT_DONE
from looplib.task.plain import as_array

OTHER = {  # another value of each variable
    "empty": None, "empty_text": None, "nothing": None, "scalar": 2.5, "flag": False, "flags": [False, False],
    "small": [9, 9], "small_one": 9, "low": [9.0, 9.0], "low_one": 9.0, "half": [9.0], "large": 9, "text": "other",
    "texts": ["longer", "other"], "values": [9.0, 9.0, 9.0], "splits": [0, 1, 2, 3],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("rtol", [0.0, 1e-3])
def test_checkpoints_are_equal_except_in_what_was_changed(rtol, tmp_path):
    def written(name, change=lambda trainer: None):
        tf.keras.utils.set_random_seed(0)
        trainer = every_kind.Everything(every_kind.Config())
        trainer.global_batch_size = 8
        trainer.seen.insert(tf.constant(["a", "b"]), tf.constant([1, 2], tf.int64))
        for variable in trainer.model.variables:
            variable.assign(tf.ones_like(variable))
        change(trainer)
        held = {name: value for name, value in vars(trainer).items() if name in [*OTHER, "seen", "generator", "model"]}
        return tf.train.Checkpoint(**held).write(str(tmp_path / name))

    first = written("first")
    same = compare_tensors(first, written("same"), rtol, rtol)
    assert same.differences == [] and same.tensors > len(OTHER)
    changes = {
        name: lambda t, n=name, v=value: vars(t)[n].assign(v) for name, value in OTHER.items() if value is not None
    }
    changes["seen"] = lambda trainer: trainer.seen.insert(tf.constant("a"), tf.constant(5, tf.int64))
    changes["generator"] = lambda trainer: trainer.generator.reset_from_seed(2)
    for name, change in changes.items():
        found = compare_tensors(first, written("changed", change), rtol, rtol)
        names = {each.where.removeprefix("tensor ").split("/")[0] for each in found.differences}
        assert names == {name}, found.differences
        assert all(each.one != each.other for each in found.differences)


@pytest.mark.parametrize("rtol", [0.0, 1e-3])
def test_nan_and_infinity_in_a_checkpoint_equal_themselves_and_nothing_else(rtol, tmp_path):
    def written(name, values):
        return tf.train.Checkpoint(v=tf.Variable(tf.constant(values))).write(str(tmp_path / name))

    values = [np.nan, np.inf, -np.inf, 1.0]
    first = written("first", values)
    assert compare_tensors(first, written("same", values), rtol, rtol).differences == []
    for at, other in ((0, 0.5), (0, np.inf), (1, 0.5), (1, np.nan), (2, np.inf), (3, np.nan), (3, -np.inf)):
        changed = written("changed", [*values[:at], other, *values[at + 1 :]])
        (found,) = compare_tensors(first, changed, rtol, rtol).differences
        assert found.count == "1 of 4 elements differ" and found.one.startswith(f"[{at}] ")


@pytest.fixture(scope="module")
def runs(nursery, tmp_path_factory):
    """A run, and one with another learning rate."""
    folder = tmp_path_factory.mktemp("kinds")
    for name, arguments in (("run", []), ("other", ["--config.rate=0.02"])):
        life = nursery.life_of(
            "every_kind", f"--model_dir={folder / name}", *arguments, environment=ordered(example_checksums=True)
        )
        assert life.code() == 0, life.output()
    return folder


@pytest.fixture(autouse=True)
def forks(python, monkeypatch, nursery):
    """The commands run in forks."""
    monkeypatch.setattr(sys, "executable", python)
    monkeypatch.setenv("PYTHONPATH", nursery.environment["PYTHONPATH"])


@pytest.mark.slow
def test_a_step_is_replayed_with_its_tables_and_strings(runs, capfd, tmp_path):
    """The table is set back between the passes over the step: each of six batches has counted `b` once."""
    assert main(["replay", str(runs / "run"), "--step=6", f"--save={tmp_path / 'batch.npz'}"]) == EXIT_DONE
    out = capfd.readouterr().out
    assert re.search(r"counted +6\n", out) and "equal, bit by bit, to what the run reported at steps 4, 6" in out
    assert "bfloat16 [8]" in out and "ragged int64 [8, None]" in out and "float32 [0, 2]" in out
    with np.load(tmp_path / "batch.npz", allow_pickle=True) as arrays:
        np.testing.assert_array_equal(arrays["3"], arrays["example_ids"].astype("float32"))


@pytest.mark.slow
def test_a_run_is_repeated_and_parts_from_another_at_its_first_step(runs, capfd, tmp_path):
    assert main(["rerun", str(runs / "run"), f"--to={tmp_path / 'again'}"]) == EXIT_DONE
    assert "EQUAL, bit by bit" in capfd.readouterr().out
    assert main(["diff", str(runs / "run"), str(runs / "other")]) == EXIT_DIFFERENT
    out = capfd.readouterr().out
    assert "the runs part before step 1, first in the variables" in out and "learning_rate (0.00" in out
    (variables,) = [line for line in out.splitlines() if line.startswith("  variables:")]
    assert "more" not in variables and "empty" not in variables and "texts" not in variables


@pytest.mark.slow
def test_it_resumes_exactly(python, capfd, tmp_path):
    command = [python, "-m", "every_kind", "--train_steps=12", "--loop=eager"]
    assert main(["check", "resume", "--kills=1", f"--dir={tmp_path}", "--", *command]) == EXIT_DONE
    out = capfd.readouterr().out
    assert re.search(
        r"^EQUAL, uninterrupted and after 1 kill: \d+ records of metrics.jsonl .*, \d+ tensors ", out, re.M
    )
    assert re.search(r"resumed from the steps [1-9]\d*$", out, re.M), out


@pytest.mark.slow
def test_replicas_keep_their_own_strings_and_small_numbers_over_a_restart(tmp_path):
    strategy, seen = make_strategy("mirrored_x2"), []
    for steps in (2, 3):
        with strategy.scope():
            trainer = every_kind.Everything(every_kind.Config())
        with looplib.Controller(
            looplib.RunConfig(global_batch_size=8, steps_per_loop=1),
            trainer=trainer,
            strategy=strategy,
            writers=[],
            model_dir=tmp_path,
        ) as controller:
            own = lambda name: [
                as_array(part).tolist() for part in strategy.experimental_local_results(vars(trainer)[name])
            ]
            values = {name: own(name) for name in OTHER}
            assert not seen or values == seen[-1]
            controller.train(steps)
            seen.append({name: own(name) for name in OTHER})
    assert seen[0]["texts"][0] != seen[0]["texts"][1] and seen[0]["low_one"][0] != seen[0]["low_one"][1]

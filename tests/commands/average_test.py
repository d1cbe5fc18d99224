"""The mean of checkpoints with statistics of batch normalization from data."""

import json
import pathlib
import signal
import subprocess
import sys

import averaged
import numpy as np
import pytest
import tensorflow as tf
from conftest import make_strategy, more
from paths import PYTHONPATH

import looplib
from looplib.__main__ import main
from looplib.errors import EXIT_DONE
from looplib.replay import normalization
from looplib.replay.player import Player
from looplib.run import commits

STEPS = 3
ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def programs_are_found(monkeypatch):
    """The commands start the program of a run again, which is beside the tests."""
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)


def of(model, name):
    return [np.float64(one) for one in model.get_layer(name).get_weights()]


def in_numpy(model, size=averaged.BATCH):
    """The means and variances that batches of a size have before each normalization, on average over the batches."""
    found = {"norm_1": [], "norm_2": []}
    for number in range(STEPS * averaged.BATCH // size):
        x = averaged.X[number * size : (number + 1) * size].astype(np.float64)
        for dense, norm in (("first", "norm_1"), ("second", "norm_2")):
            kernel, bias = of(model, dense)
            x = x @ kernel + bias
            found[norm].append((x.mean(0), x.var(0)))
            gamma, beta = of(model, norm)[:2]
            x = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-3) * gamma + beta
            x = np.maximum(x, 0) if norm == "norm_1" else x
    return {name: np.mean(batches, axis=0) for name, batches in found.items()}


@pytest.fixture
def saved(tmp_path):
    """A run with three checkpoints of one variable, without a program."""
    place = tmp_path / "run" / "checkpoints"
    place.mkdir(parents=True)
    for step in (1, 2, 6):
        path = commits.path_of(str(place), step)
        commits.begin(path)
        tf.raw_ops.SaveV2(prefix=path, tensor_names=["w"], shape_and_slices=[""], tensors=[tf.fill([9], float(step))])
        commits.commit(path, step)
    return tmp_path / "run"


KILLED = """
import os, sys
from looplib.run import commits
from looplib.__main__ import main
def dies(*arguments, kept=commits.commit):
    if sys.argv[1] == "after":
        kept(*arguments)
    os.kill(os.getpid(), 9)
commits.commit = dies
main(["average", *sys.argv[2:], "--last=3"])
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_average_that_is_killed_leaves_nothing_in_the_way_of_the_next(when, saved, tmp_path):
    output = tmp_path / "mean"
    program = [sys.executable, "-c", KILLED, when, str(saved), str(output)]
    assert subprocess.run(program, capture_output=True, timeout=120).returncode == -signal.SIGKILL
    assert not output.exists() and main(["average", str(saved), str(output), "--last=3"]) == EXIT_DONE
    done = commits.newest(str(output / "checkpoints"))
    np.testing.assert_array_equal(tf.train.load_checkpoint(done.path).get_tensor("w"), np.full(9, 3.0))
    assert not commits.verify(done) and sorted(one.name for one in tmp_path.iterdir()) == ["mean", "run"]


def test_an_average_goes_to_no_file_and_among_no_checkpoints(saved, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    cases = {"file": "is a file", "run": "is not empty", "run/checkpoints/mean": "has the checkpoints of a run"}
    for name, sentence in cases.items():
        assert main(["average", str(saved), str(tmp_path / name), "--last=3"]) == 2
        assert sentence in capsys.readouterr().err
    assert main(["average", str(saved), str(tmp_path / "more"), "--last=4"]) == 2
    assert "has 3 intact checkpoints, and --last is 4" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    assert main(["average", str(saved), str(tmp_path / "link"), "--last=3"]) == EXIT_DONE
    assert (tmp_path / "link").is_symlink() and (tmp_path / "empty" / "checkpoints" / "ckpt-6.index").exists()


def read(folder, family="keras"):
    net = averaged.Net(averaged.Config(family))
    path = str(folder / "checkpoints" / "ckpt-16")
    tf.train.Checkpoint(model=net.model).restore(path).assert_existing_objects_matched()
    return net.model


@pytest.mark.parametrize(
    "name, family", [("default", "keras"), *more([("mirrored_x2", "keras"), ("mirrored_x2", "tf_keras")])]
)
def test_statistics_are_computed_for_other_weights_from_the_first_batches_as_in_numpy(name, family, tmp_path):
    strategy = make_strategy(name)
    for steps in (16, 20):  # the weights of step 16, in the run of step 20
        with strategy.scope():
            net = averaged.Net(averaged.Config(family))
        with looplib.Controller(
            looplib.RunConfig(global_batch_size=averaged.BATCH, steps_per_loop=4),
            trainer=net, strategy=strategy, model_dir=tmp_path, writers=[],
        ) as controller:  # fmt: skip
            controller.train(steps)
            player = Player(controller, None, averaged.BATCH)
            path = str(tmp_path / "checkpoints" / "ckpt-16")
            found = normalization.recompute(player, path, STEPS) if steps == 20 else {}
    model = read(tmp_path, family)
    for name, expected in in_numpy(model, averaged.BATCH // strategy.num_replicas_in_sync).items():
        for kind, value in zip(("moving_mean", "moving_variance"), expected):
            (of_layer,) = (values for key, values in found.items() if kind in key and len(values) == len(value))
            np.testing.assert_allclose(of_layer, value, rtol=1e-4, atol=1e-5, err_msg=name)
    assert len(found) == 4


@pytest.mark.slow
@pytest.mark.parametrize("family", ["keras", "tf_keras"])
def test_the_command_writes_the_mean_with_statistics_of_its_weights(family, nursery, tmp_path, capsys):
    run, mean, plain = tmp_path / "run", tmp_path / "mean", tmp_path / "plain"
    life = nursery.life_of("averaged", f"--model_dir={run}", f"--config.family={family}")
    assert life.code() == 0, life.output()
    assert main(["average", str(run), str(plain), "--last=3"]) == EXIT_DONE
    assert "--statistics_steps=N computes them from data" in capsys.readouterr().out
    assert main(["average", str(run), str(mean), "--last=3", f"--statistics_steps={STEPS}"]) == EXIT_DONE
    assert f"statistics of batch normalization from {STEPS} batches" in capsys.readouterr().out
    averages, model = read(plain, family), read(mean, family)
    for name, expected in in_numpy(averages).items():
        np.testing.assert_allclose(of(model, name)[2:], expected, rtol=1e-4, atol=1e-5)
        assert np.abs(np.subtract(of(averages, name)[2:], expected)).max() > 0.05
        assert np.array_equal(of(averages, name)[:2], of(model, name)[:2])
    for name in ("first", "second", "last"):
        assert all(map(np.array_equal, of(averages, name), of(model, name)))


@pytest.mark.slow
def test_the_command_writes_moving_averages_with_statistics_of_their_own(nursery, tmp_path, capsys):
    run, plain, own = tmp_path / "run", tmp_path / "plain", tmp_path / "own"
    assert nursery.life_of("averaged", f"--model_dir={run}", "--config.average_decay=0.8").code() == 0
    assert main(["average", str(run), str(plain), "--averages"]) == EXIT_DONE
    assert "moving averages of ckpt-16" in (said := capsys.readouterr().out) and "of the last weights" in said
    assert main(["average", str(run), str(own), "--averages", f"--statistics_steps={STEPS}"]) == EXIT_DONE
    net = averaged.Net(averaged.Config(average_decay=0.8))
    path = str(run / "checkpoints" / "ckpt-16")
    tf.train.Checkpoint(model=net.model, averages=net.averages).restore(path).assert_existing_objects_matched()
    last = [one.copy() for one in net.model.get_weights()]
    for variable, average in net.averages.pairs:
        variable.assign(average)
    assert not all(map(np.array_equal, last, net.model.get_weights()))
    assert all(map(np.array_equal, read(plain).get_weights(), net.model.get_weights()))
    for name, expected in in_numpy(net.model).items():
        np.testing.assert_allclose(of(read(own), name)[2:], expected, rtol=1e-4, atol=1e-5)
    exporting = nursery.life_of("averaged", f"--model_dir={own}", "--config.average_decay=0.8", "--mode=export")
    assert exporting.code() == 0 and "may fit them badly" not in exporting.output(), exporting.output()
    loaded = tf.saved_model.load(str(own / "export" / "step-16" / "saved_model"))
    np.testing.assert_allclose(loaded.serve(averaged.X), read(own)(averaged.X, training=False), rtol=1e-5, atol=1e-6)
    assert main(["average", str(run), str(tmp_path / "no"), "--averages", "--last=2"]) == 2


@pytest.mark.slow
def test_steps_around_the_end_of_a_phase_are_replayed(nursery, tmp_path, capfd):
    run = tmp_path / "run"
    assert nursery.life_of("averaged", f"--model_dir={run}").code() == 0
    assert json.loads((run / "run.json").read_text())["flags"]["phases"][0]["until"] == 7
    for step in (7, 8, 12):
        assert main(["replay", str(run), f"--step={step}"]) == EXIT_DONE, capfd.readouterr()
    assert "norm_1/gamma" in capfd.readouterr().out


@pytest.mark.slow
def test_a_model_without_batch_normalization_has_no_statistics(nursery, tmp_path, capfd):
    run = tmp_path / "run"
    assert nursery.life_of("averaged", f"--model_dir={run}", "--config.normalizes=False").code() == 0
    assert main(["average", str(run), str(tmp_path / "mean"), "--last=2"]) == EXIT_DONE
    assert "normalization" not in capfd.readouterr().out
    assert main(["average", str(run), str(tmp_path / "other"), "--last=2", "--statistics_steps=2"]) == 2
    assert "no layer of batch normalization" in capfd.readouterr().err and not (tmp_path / "other").exists()

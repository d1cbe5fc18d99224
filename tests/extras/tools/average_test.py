"""The mean of checkpoints with statistics of batch normalization from data."""

import json

import averaged
import numpy as np
import pytest
import tensorflow as tf

from looplib.__main__ import main
from looplib.errors import EXIT_DONE

STEPS = 3


@pytest.mark.parametrize("family", ["keras", pytest.param("tf_keras", marks=pytest.mark.slow)])
def test_statistics_of_averaged_weights_are_those_of_the_batches_in_numpy(family, nursery, tmp_path, capsys):
    run, mean, plain = tmp_path / "run", tmp_path / "mean", tmp_path / "plain"
    life = nursery.life_of("averaged", f"--model_dir={run}", f"--config.family={family}")
    assert life.code() == 0, life.output()
    assert main(["average", str(run), str(plain), "--last=3"]) == EXIT_DONE
    assert "--statistics_steps=N computes them from data" in capsys.readouterr().out
    assert main(["average", str(run), str(mean), "--last=3", f"--statistics_steps={STEPS}"]) == EXIT_DONE
    assert f"statistics of batch normalization from {STEPS} batches" in capsys.readouterr().out

    models = []
    for folder in (plain, mean):
        net = averaged.Net(averaged.Config(family))
        status = tf.train.Checkpoint(model=net.model, optimizer=net.optimizer).restore(
            str(folder / "checkpoints" / "ckpt-16")
        )
        status.assert_existing_objects_matched()
        models.append(net.model)
    of = lambda model, name: [np.float64(one) for one in model.get_layer(name).get_weights()]  # noqa: E731
    found = {1: [], 2: []}
    for number in range(STEPS):
        x = averaged.X[number * averaged.BATCH : (number + 1) * averaged.BATCH].astype(np.float64)
        for layer, name in ((1, "first"), (2, "second")):
            kernel, bias = of(models[0], name)
            x = x @ kernel + bias
            found[layer].append((x.mean(0), x.var(0)))
            gamma, beta = of(models[0], f"norm_{layer}")[:2]
            x = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-3) * gamma + beta
            x = np.maximum(x, 0) if layer == 1 else x
    for layer, batches in found.items():
        expected = np.mean(batches, axis=0)
        averages, statistics = of(models[0], f"norm_{layer}"), of(models[1], f"norm_{layer}")
        np.testing.assert_allclose(statistics[2:], expected, rtol=1e-4, atol=1e-5)
        assert np.abs(np.subtract(averages[2:], expected)).max() > 0.05
        assert np.array_equal(averages[:2], statistics[:2])
    for name in ("first", "second", "last"):
        assert all(map(np.array_equal, of(models[0], name), of(models[1], name)))


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

"""Multi-task experiments run under looplib's controller as under Model Garden's driver."""

import pytest

pytest.importorskip("official", reason="needs Model Garden: pip install 'looplib[models]'")

import multi_task
import numpy as np
import side_by_side
import tensorflow as tf
from conftest import more

import looplib
from trainers import model_garden


@pytest.mark.slow
@pytest.mark.parametrize("kind", [multi_task.TRAINER_TYPES[0], *more(multi_task.TRAINER_TYPES[1:])])
def test_several_tasks_train_and_evaluate_as_under_the_driver(kind, tmp_path):
    data = multi_task.make_data(str(tmp_path / "data"))
    params = multi_task.experiment(kind, data)
    side_by_side.start_anew()
    theirs = multi_task.run_under_the_driver(params, str(tmp_path / "theirs"))
    side_by_side.start_anew()
    strategy, losses = tf.distribute.OneDeviceStrategy("/cpu:0"), {}
    with strategy.scope():
        trainer, evaluators = model_garden.make(
            params, str(tmp_path / "ours"), make_multi_task=lambda params: multi_task.build(params, str(tmp_path))
        )
    options = params.trainer
    with looplib.Controller(
        looplib.RunConfig(global_batch_size=4, steps_per_loop=options.steps_per_loop),
        trainer=trainer,
        evaluator=evaluators,
        strategy=strategy,
        writers=[],
        model_dir=tmp_path / "ours",
        actions=[lambda event: losses.update(event.metrics) if event.split == "train" else None],
    ) as controller:  # fmt: skip
        ours = controller.train_and_evaluate(options.train_steps, options.validation_interval)["validation"]
    assert controller.global_step == options.train_steps
    compared = 0
    for task, metrics in theirs.items():
        for name, value in metrics.items():
            if np.isfinite(value):
                assert ours[f"{task}/{name}"] == pytest.approx(float(value), rel=1e-3, abs=1e-5)
                compared += 1
    assert compared > 4 and {"sentence_prediction/training_loss", "tagging/training_loss"} <= set(losses)
    # Another start resumes from the checkpoint, which holds what Model Garden's does under the same names.
    keys = {name.split("/")[0] for name, _ in tf.train.list_variables(controller.latest_checkpoint)}
    assert {"model", "optimizer", "global_step"} <= keys

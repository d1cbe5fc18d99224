"""Experiments of Model Garden's projects train, evaluate and resume as under its own driver, which reads their checkpoints."""

import pytest

pytest.importorskip("official", reason="needs Model Garden: pip install 'looplib[models]'")

import project_experiments
import side_by_side

# Quantization-aware, averages of weights, images, volumes, and two texts; `every_experiment.py
# --projects` runs all of them.
_SOME = ("bert/squad_qat", "coco_yolov7_pico", "darknet_classification", "seg_unet3d_test", "dual encoder")
_TEXT = [name for name in project_experiments.PROJECTS if name.startswith(("bert/sentence_prediction", "bigbird"))]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*_SOME, *_TEXT])
def test_a_project_s_experiment_trains_evaluates_and_resumes_as_under_the_driver(name, tmp_path):
    experiment = project_experiments.PROJECTS[name]
    params = side_by_side.configuration(name, str(tmp_path), experiment=experiment)
    found = side_by_side.compare(params, str(tmp_path))
    theirs, ours = found.theirs, found.ours
    assert len(ours.losses) == project_experiments.STEPS
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-3)
    assert len({round(loss, 6) for loss in ours.losses.values()}) > 1  # it trains
    assert side_by_side.differences(ours.weights, theirs.weights) < 1e-2
    assert side_by_side.differences(found.resumed, ours.weights) == 0
    # The driver takes averages of weights by additions and subtractions, which round.
    assert side_by_side.differences(found.driver_evaluates.weights, ours.weights) < 1e-6
    for here, there in ((ours, theirs), (found.driver_evaluates, ours)):
        differences = side_by_side.metric_differences(here.evaluation, there.evaluation)
        assert differences and max(differences.values()) < 1e-2, differences

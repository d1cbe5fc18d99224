"""Experiments of Model Garden's projects train, evaluate and resume as under its own driver, which reads their checkpoints."""

import pytest

pytest.importorskip("official", reason="needs Model Garden: pip install 'looplib[models]'")

import project_experiments
import side_by_side
from conftest import more

# Of each kind: quantization-aware, metrics that are none of Keras's, an encoder of text, averages of weights.
_SOME = ("bert/squad_qat", "seg_unet3d_test", "dual encoder", "yolo_darknet")
_OTHERS = [name for name in project_experiments.PROJECTS if name not in _SOME]


@pytest.mark.slow(most=2)
@pytest.mark.parametrize("name", [*_SOME, *more(_OTHERS)])
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
    assert side_by_side.differences(found.driver_evaluates.weights, ours.weights) == 0
    for here, there in ((ours, theirs), (found.driver_evaluates, ours)):
        differences = side_by_side.metric_differences(here.evaluation, there.evaluation)
        assert differences and max(differences.values()) < 1e-2, differences

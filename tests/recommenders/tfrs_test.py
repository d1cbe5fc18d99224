"""TensorFlow Recommenders' own tasks and layers: as a loop by hand on one replica, and as it or refused on two."""

import functools
import importlib.util
import json
import os
import sys

import pytest
from paths import PROGRAMS, PYTHONPATH
from recommenders import losses_on_servers, output_of

PROGRAM = PROGRAMS / "tfrs_models.py"
TUTORIALS = [f"{name},sum_over_batch_size,1" for name in ("retrieval", "ranking", "multi_task", "dcn")]
OF_EXAMPLES = [f"{name},none,2" for name in ("ranking", "multi_task", "dcn")]
GATHERED = ["gathered,none,1", "gathered,none,2"]
REFUSED = {
    "ranking,sum_over_batch_size,2": "loss that divides by the batch in a step of the model's own on several replicas",
    "retrieval,sum_over_batch_size,2": "compares examples with each other",
    "retrieval,none,2": "compares examples with each other",
}
# The package refuses to be imported beside Keras 3, which pytest's own process has.
pytestmark = pytest.mark.skipif(not importlib.util.find_spec("tensorflow_recommenders"), reason="needs the package")
ENVIRONMENT = {"TF_USE_LEGACY_KERAS": "1", "PYTHONPATH": os.pathsep.join((PYTHONPATH, *sys.path))}


@functools.cache
def found():
    """Runs all cases in one process, as the package needs a Keras of its own."""
    cases = [*TUTORIALS, *OF_EXAMPLES, *GATHERED, *REFUSED]
    return json.loads(output_of([sys.executable, PROGRAM, *cases], **ENVIRONMENT).splitlines()[-1])


@pytest.mark.parametrize("case", [*TUTORIALS, *OF_EXAMPLES, *GATHERED])
def test_a_model_is_trained_as_by_hand(case):
    assert found()[case] < 1e-6


@pytest.mark.parametrize("case", REFUSED)
def test_a_loss_whose_negatives_would_be_those_of_a_replica_is_refused(case):
    assert REFUSED[case] in found()[case]


@pytest.mark.slow
def test_towers_train_on_parameter_servers(tmp_path):
    losses = losses_on_servers(PROGRAM, tmp_path, **ENVIRONMENT)
    assert losses[-1] < losses[0]

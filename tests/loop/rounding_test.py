"""`check replicas` tells rounding that grows from a step that depends on how the examples are divided."""

import divided
import numpy as np
import pytest
from lazily import Results
from ordered import ordered

from looplib.commands.compare import compare, decided_by_rounding, first_moved_by_rounding
from looplib.run.records import read_jsonl

RUNS = {"1": (1, 0), "last_bit_1": (1, 1), "last_bit_2": (1, 2), "2": (2, 0), "4": (4, 0)}
CASES = {
    **{(kind, 200): True for kind in divided.RIGHT},
    **{(kind, 20): False for kind in divided.WRONG},
    **{(kind, 200): False for kind in ("mean", "batch_norm", "clip", "wild_sum")},
}
# A right step whose rounding grows to percents; checks_test has one that is wrong in the loss.
ONCE = [("wild", 200)]
PARAMETERS = [pytest.param(case, marks=() if case in ONCE else pytest.mark.slow, id=str(case)) for case in CASES]


FEW = ("1", "last_bit_1", "2")  # two replicas and one nudge


@pytest.fixture(scope="module")
def folders(nursery, tmp_path_factory):
    """The run directory of each case and name of RUNS."""

    def run(job):
        (kind, steps), name = job
        folder = tmp_path_factory.mktemp(f"{kind}_{steps}_{name}")
        replicas, nudge = RUNS[name]
        flags = [f"--model_dir={folder}", f"--config.kind={kind}", f"--train_steps={steps}", "--steps_per_loop=1"]
        flags += ["--loop=eager"] if steps < 100 else []  # saves the tracing
        environment = ordered(example_checksums=True, perturbation=nudge)
        life = nursery.life_of("divided", *flags, f"--num_virtual_devices={replicas}", environment=environment)
        assert life.code() == 0, life.output()[-2000:]
        return folder

    return Results(run)


@pytest.mark.slow
@pytest.mark.parametrize("case", PARAMETERS)
def test_right_trainers_are_equal_and_wrong_ones_different_early_and_late(case, folders):
    runs = {name: folders[case, name] for name in RUNS}
    first = runs["1"]
    rounding = [compare(first, run, 1e-4, 1e-5) for name, run in runs.items() if "bit" in name]
    for other in [run for name, run in runs.items() if RUNS[name][0] > 1]:
        differences = compare(first, other, 1e-4, 1e-5, rounding).differences
        assert bool(differences) != CASES[case], differences[:5]
    assert case in [("wild", 200), ("wild_sum", 200)] or not decided_by_rounding(rounding)


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(("wild", 200), id="wild")])
def test_weights_that_rounding_moves_are_not_called_equal_and_the_step_from_which_it_hides_faults_is_known(
    case, folders
):
    first, nudged, other = (folders[case, name] for name in FEW)
    rounding = [compare(first, nudged, 1e-4, 1e-5)]
    compared = compare(first, other, 1e-4, 1e-5, rounding)
    assert compared.weights != bool(decided_by_rounding(rounding))
    assert ("final checkpoint" in compared.largest) == compared.weights
    records = [read_jsonl(str(run / "metrics.jsonl")) for run in (first, nudged)]
    trained = [[record for record in run if record["split"] == "train"] for run in records]
    ours, theirs = (np.array([[record["loss"], record["accuracy"]] for record in run]) for run in trained)
    apart = (np.abs(ours - theirs) > 0.01 * np.abs(ours)).any(axis=1)
    steps = [record["step"] for record in trained[0]]
    assert first_moved_by_rounding(rounding) == next((step for step, far in zip(steps, apart) if far), None)

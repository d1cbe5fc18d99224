"""`--estimate`: its arithmetic agrees with other computations, and its measurements with what a run leaves."""

import json
import os
import pathlib
import random
import subprocess

import pytest
from paths import PYTHONPATH

import looplib
from looplib.actions.timed_saves import Timed
from looplib.binary.estimate import Forecast, Measured, RunPlan, kept
from looplib.binary.trial import TrialFlags
from looplib.errors import CheckError, FlagError
from looplib.loop.contracts import Schedule

ROOT = pathlib.Path(__file__).parents[3]
CASES = [
    (start, end, *random.Random(number).choices((3, 5, 7, 20, 100, 1000), k=3), evaluates)
    for number, (start, end) in enumerate([(0, 100), (0, 61), (14, 100), (35, 1000), (0, 2)] * 3)
    for evaluates in (True, False)
]
MEASURED = Measured(
    start=6.0, compiling=2.0, step=0.01, loops=5, evaluation=3.0, first_save=0.7, stop=0.05, save=0.4,
    checkpoint_bytes=1000, other_bytes=500, report_bytes=10.0, evaluation_bytes=20.0, reports=4, evaluations=1,
    memory=10**9, device_memory=None,
)  # fmt: skip


def boundaries(start, end, loop, save_every, evaluate_every):
    return list(Schedule(loop, save_every, {"eval": evaluate_every} if evaluate_every else {}, end).boundaries(start))


@pytest.mark.parametrize("start, end, loop, save_every, evaluate_every, evaluates", CASES)
def test_saves_and_evaluations_are_those_of_the_schedule(start, end, loop, save_every, evaluate_every, evaluates):
    every = evaluate_every if evaluates else None
    due = boundaries(start, end, loop, save_every, every)
    plan = RunPlan(start, end, save_every, every, evaluates)
    assert plan.saves() == [each.step for each in due if each.save or each.evaluators or each.end]
    assert plan.evaluations == [each.step for each in due if each.evaluators or (each.end and evaluates)]


def test_saves_by_time_count_from_the_last_save():
    assert RunPlan(0, 100, 40).saves(15) == [15, 30, 40, 55, 70, 80, 95, 100]
    assert RunPlan(0, 100, 40).saves(40) == [40, 80, 100]


@pytest.mark.parametrize("last, best, every", [(5, 0, None), (2, 1, None), (1, 3, 30), (3, 2, 10)])
def test_kept_checkpoints_are_those_that_pruning_after_each_save_leaves(last, best, every):
    saves, evaluations = list(range(5, 200, 5)), list(range(20, 200, 20))
    rules = [looplib.KeepLast(last)]
    rules += [looplib.KeepBest("eval/loss", "min", best)] if best else []
    rules += [looplib.KeepEvery(every)] if every else []
    left = []
    for step in saves:  # each evaluation is worse than the one before
        left = [*left, step]
        good = [each for each in left if each in evaluations][:best]
        left = [each for each in left if each in left[-last:] or each in good or (every and each % every == 0)]
    assert kept(saves, evaluations, rules) == left
    largest = looplib.KeepBest("eval/accuracy", "max", 2)
    assert kept(saves, evaluations, [looplib.KeepLast(1), largest]) == [20, 40, 195]


@pytest.mark.parametrize("start, end, loop, save_every, evaluate_every, evaluates", CASES)
def test_the_time_is_that_of_a_walk_through_the_schedule(start, end, loop, save_every, evaluate_every, evaluates):
    now, free, step, first = MEASURED.start + MEASURED.compiling, 0.0, start, True
    every = evaluate_every if evaluates else None
    for due in boundaries(start, end, loop, save_every, every):
        now += (due.step - step) * MEASURED.step
        step = due.step
        if due.save or due.evaluators or due.end:
            now += MEASURED.first_save if first else MEASURED.save if due.end else MEASURED.stop
            free = now if first or due.end else now + MEASURED.save - MEASURED.stop  # when the save is complete
            first = False
        if due.evaluators:
            now = max(now + MEASURED.evaluation, free)
        if due.end and evaluates:
            now += MEASURED.evaluation
    found = Forecast(RunPlan(start, end, save_every, every, evaluates), MEASURED, loop, ())
    assert found.seconds == pytest.approx(now)


def test_disk_and_saves_by_a_budget():
    found = Forecast(
        RunPlan(0, 1000, 100, 500, True),
        MEASURED,
        100,
        (looplib.KeepLast(3),),
        Timed(budget=0.05),
    )
    assert found.saves == list(range(100, 1001, 100))  # one a second of training, which is what a loop takes
    assert (found.kept, found.other_bytes) == (3, 500 + 6 * 10 + 1 * 20)
    assert (found.disk, found.most_disk) == (3580, 4580)
    assert json.loads(str(found).splitlines()[-1]) == found.as_dict()
    assert Timed(every=600).seconds(0.1, 1) == 600 and Timed().seconds(0.1, 1) is None


def contents(folder):
    return {path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in folder.rglob("*")}


def start(python, folder, *more):
    settings = ["--train_steps=90", "--steps_per_loop=10", "--eval_interval=20", "--keep_last=2", "--keep_every=50"]
    settings += ["--checkpoint_interval=50", "--keep_best=eval/loss"]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "TMPDIR": f"{folder}/tmp"}
    environment["GIT_DIR"] = os.devnull  # how large a run is does not depend on what is not committed yet
    (folder / "tmp").mkdir(exist_ok=True)
    program = [python, "-m", "trainers.image_classification", "--config.model=mlp", f"--model_dir={folder}/run"]
    return subprocess.run(
        [*program, *settings, *more], capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300
    )


def test_an_estimate_leaves_no_trace_and_foretells_what_a_run_leaves(python, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    (tmp_path / "tmp").mkdir()
    before = contents(tmp_path)
    flags = ["--estimate", "--checkpoint_every=1h", "--alert=http://localhost:9"]
    told = start(python, tmp_path, *flags)
    assert told.returncode == 0, told.stderr
    estimate = json.loads(told.stdout.splitlines()[-1])
    assert "estimate of the 90 steps after step 0" in told.stdout
    assert contents(tmp_path) == before
    assert (estimate["saves"], estimate["evaluations"]) == (6, 5)

    ran = start(python, tmp_path)
    assert ran.returncode == 0, ran.stderr
    folder = tmp_path / "run" / "checkpoints"
    saved = sorted(int(path.stem[5:]) for path in folder.glob("*.commit"))
    assert len(saved) in (estimate["checkpoints_kept"] - 1, estimate["checkpoints_kept"])  # the best may be the last
    sizes = [sum(path.stat().st_size for path in folder.glob(f"ckpt-{step}.*")) for step in saved]
    assert sizes == pytest.approx([estimate["checkpoint_bytes"]] * len(saved), rel=0.01)
    whole = sum(path.stat().st_size for path in (tmp_path / "run").rglob("*") if path.is_file()) - len("mine")
    others = whole - sum(path.stat().st_size for path in folder.rglob("*"))
    assert others == pytest.approx(estimate["other_bytes"], rel=0.25)  # the page and run.json say what was done


@pytest.mark.slow
def test_an_estimate_counts_from_the_newest_checkpoint_and_refuses_a_finished_run(python, tmp_path):
    assert start(python, tmp_path).returncode == 0
    left = contents(tmp_path)
    done = start(python, tmp_path, "--estimate")
    assert done.returncode == 1 and "the run is at step 90 already" in done.stderr.splitlines()[-1]
    longer = start(python, tmp_path, "--estimate", "--train_steps=150")
    assert longer.returncode == 0, longer.stderr
    assert "estimate of the 60 steps after step 90" in longer.stdout and contents(tmp_path) == left
    endless = start(python, tmp_path, "--estimate", "--train_steps=-1")
    assert endless.returncode == 1 and "--train_steps=-1" in endless.stderr.splitlines()[-1]


VALUES = {
    "dry_run": False, "estimate": True, "strategy": "auto", "mode": "train",
    "model_dir": None, "train_steps": 100, "continue_from": None,
}  # fmt: skip


@pytest.mark.parametrize(
    "changed, kind, words",
    [
        ({"mode": "eval"}, FlagError, "--mode=eval does not train"),
        ({"mode": "continuous_eval"}, FlagError, "--mode=continuous_eval does not train"),
        ({"continue_from": "/tmp/orbit"}, FlagError, "--continue_from"),
    ],
)
def test_what_has_no_estimate_is_refused_before_tensorflow_starts(changed, kind, words):
    with pytest.raises(kind, match=words):
        TrialFlags().check(VALUES | changed)


def test_a_trial_of_several_processes_and_two_trials_are_refused():
    with pytest.raises(CheckError, match="--estimate tries the program in one process"):
        TrialFlags().redirect(VALUES | {"strategy": "multi_worker"})
    with pytest.raises(FlagError, match="--dry_run and --estimate"):
        TrialFlags().redirect(VALUES | {"dry_run": True})
    assert TrialFlags().redirect(VALUES | {"estimate": False}) == {}


def test_more_saves_than_can_be_counted_are_refused():
    with pytest.raises(CheckError, match="raise --checkpoint_interval"):
        RunPlan(0, 10**9, 1).saves()
    with pytest.raises(CheckError, match="raise --eval_interval"):
        _ = RunPlan(0, 10**9, 10**9, 1).evaluations

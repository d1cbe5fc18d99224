"""Sweeps: every setting once, whatever is killed, and the results as the runs have them."""

import csv
import dataclasses
import itertools
import json
import math
import os
import pathlib
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time

import optuna
import pytest
import swept
from conftest import more
from paths import PYTHONPATH

from looplib import UsageError
from looplib.__main__ import main
from looplib.commands.compare import compare
from looplib.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, SweepError
from looplib.report.page.content import read_run
from looplib.run.records import read_jsonl
from looplib.run.status import read_status
from looplib.sweep import space
from looplib.sweep.jobs import result
from looplib.sweep.study import Study, SweepPlan, name_of
from looplib.sweep.sweep import write

ENVIRONMENT = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}


def command(python, folder, *options, of=()):
    return [
        python, "-m", "looplib", "sweep", f"--dir={folder}", "--metric=eval/score", "--goal=max", *options, "--", python, "-m", "swept",
        *of,
    ]  # fmt: skip


def sweep(python, folder, *options, of=()):
    return subprocess.run(
        command(python, folder, *options, of=of), env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )


def table(folder):
    with open(folder / "results.csv", newline="") as file:
        return list(csv.DictReader(file))


def score_of(run):
    return [record["score"] for record in read_jsonl(str(run / "metrics.jsonl")) if record["split"] == "eval"][-1]


def processes_of(folder):
    """Returns the numbers of the processes that have the folder in their command line."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder) in path.read_text() and f"{os.getpid()}" != path.parent.name:
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def wait(condition, seconds=60):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


# The notation of ranges and lists.

VALUES = {
    "0.1,0.01": ["0.1", "0.01"],
    "(1,2),(3,),[4,5]": ["(1,2)", "(3,)", "[4,5]"],
    '"a,b",c': ['"a,b"', "c"],
    r"a\,b,c\d": ["a,b", r"c\d"],
    "2..5": [2, 3, 4, 5],
    "16..70:16": [16, 32, 48, 64],
    "0.1..0.45:0.1": [0.1, 0.2, 0.3, 0.4],
    "-1..1": [-1, 0, 1],
}


@pytest.mark.slow(spread=4)
@pytest.mark.parametrize("text", VALUES)
def test_lists_and_ranges_in_steps_have_these_values(text):
    fixed, (parameter,) = space.parse(["train", f"--config.a={text}", "--b=1"])
    assert fixed == ["train", "--b=1"] and parameter.flag == "--config.a" and parameter.grid() == VALUES[text]


def test_what_has_one_value_stays_in_the_command():
    arguments = ["python", "a,b", "--data=../x", "--data=1..", "-v", "--one=(1,2)", "--rate=1e-3"]
    assert space.parse([*arguments, r"--names=a\,b"]) == ([*arguments, "--names=a,b"], [])


@pytest.mark.parametrize(
    "text, whole, log", [("1..9:log", True, True), ("1e-4..0.1:log", False, True), ("0.5..2", False, False)]
)
def test_ranges_without_steps_have_no_grid(text, whole, log):
    (parameter,) = space.parse([f"--a={text}"])[1]
    low, high = (float(number) for number in text.removesuffix(":log").split(".."))
    assert (parameter.values.low, parameter.values.high, parameter.values.log) == (low, high, log)
    assert isinstance(parameter.values.low, int) == whole
    with pytest.raises(SweepError, match="--a"):
        parameter.grid()


BAD_SPACES = {
    "--a=4..1": "no values; expected LOW < HIGH",
    "--a=0..1:log": "no values; expected 0 < LOW < HIGH",
    "--a=1..4:9": "a step above 0 that fits",
    "--a=1..4:x": "is no range; expected LOW..HIGH",
    "--a=1,1": "lists a value twice",
    "--a=1..1e400": "--a has the number 1e400; expected at most",
    f"--a=1..{'9' * 5000}": "--a has the number 99999",
    "--a=1..2:1e-320": "a step above 0 that fits",
}


@pytest.mark.slow(spread=4)
@pytest.mark.parametrize("argument", BAD_SPACES)
def test_a_range_without_values_is_a_sentence(argument):
    with pytest.raises(SweepError, match=re.escape(BAD_SPACES[argument])):
        space.parse(["train", argument])


def test_the_results_name_the_best_trials_and_the_setting_that_mattered(tmp_path):
    command = ["train", "--a=1..6", "--b=x,y"]
    plan = SweepPlan(
        command=command, search="grid", metric="eval/score", goal="max", prune="none", seeds=0, value="best"
    )
    parameters = space.parse(command)[1]
    study = Study(str(tmp_path), plan, parameters)

    def written():
        write(str(tmp_path), plan, parameters, study.trials())
        return json.loads((tmp_path / "results.json").read_text())

    scores = {}
    while trial := study.next():
        scores[name_of(trial)] = trial.params["--a"] + 0.001 * (trial.params["--b"] == "x")
        study.note(trial, 0, scores[name_of(trial)])
        if len(scores) == 3:
            assert written()["note"] == ("3 of 3 trials have a result, and 4 are needed to say which setting mattered")
    found = written()
    assert [(row["name"], row["value"]) for row in found["trials"]] == sorted(scores.items(), key=lambda item: -item[1])
    assert (found["compared"], found["goal"], found["note"]) == ("best eval/score", "max", "")
    assert list(found["importances"]) == ["a", "b"] and found["importances"]["a"] > 3 * found["importances"]["b"]
    assert sum(found["importances"].values()) == pytest.approx(1)


@pytest.mark.slow
def test_a_random_search_draws_each_point_of_a_small_grid_once_also_after_a_restart(tmp_path):
    command = ["train", "--a=1..2", "--b=x,y", "--c=0.1..0.2:0.1"]
    plan = SweepPlan(command=command, search="random", metric="eval/score", goal="max", prune="none", seeds=0)
    drawn = {}
    for name, starts in (("whole", 1), ("resumed", 2)):
        (tmp_path / name).mkdir()
        drawn[name] = []
        for _ in range(starts):
            study = Study(str(tmp_path / name), plan, space.parse(command)[1], 8)
            for _ in range(8 // starts):
                trial = study.next()
                drawn[name].append(tuple(trial.params.values()))
                study.note(trial, 0, 1.0)
    assert sorted(drawn["whole"]) == sorted(itertools.product((1, 2), "xy", (0.1, 0.2))) != drawn["whole"]
    assert drawn["resumed"] == drawn["whole"] and study.limit == 8 and study.next() is None and study.is_over


def test_a_grid_has_each_point_once(tmp_path):
    """Also the last values of ranges in steps, which are no exact floating-point numbers."""
    command = ["train", "--b=x,y", "--c=0.1..0.45:0.1", "--d=-0.3..0.3:0.15"]
    plan = SweepPlan(command=command, search="grid", metric="eval/score", goal="max", prune="none", seeds=0)
    study, found = Study(str(tmp_path), plan, space.parse(command)[1]), []
    while trial := study.next():
        found.append(tuple(trial.params.values()))
        study.note(trial, 0, 1.0)
    expected = itertools.product("xy", (0.1, 0.2, 0.3, 0.4), (-0.3, -0.15, 0.0, 0.15, 0.3))
    assert sorted(found) == sorted(expected) != found and study.is_over


def test_a_sweep_of_an_earlier_version_continues_with_the_points_that_it_has_not_tried(tmp_path):
    """That one had Optuna draw each point when the trial began, and resumed it in the same record."""
    command = ["train", "--a=1,2,3"]
    plan = SweepPlan(command=command, search="grid", metric="eval/score", goal="max", prune="none", seeds=0)
    sampler = optuna.samplers.GridSampler({"--a": ["1", "2", "3"]}, seed=0)
    before = optuna.create_study(
        storage=f"sqlite:///{tmp_path}/sweep.db", study_name="sweep", direction="maximize", sampler=sampler
    )
    before.set_user_attr("plan", json.dumps(dataclasses.asdict(plan)))
    begun = [before.ask() for _ in range(2)]
    tried = [trial.suggest_categorical("--a", ["1", "2", "3"]) for trial in begun]
    begun[0].set_user_attr("value of seed 0", 0.5)
    before.sampler = optuna.samplers.RandomSampler()
    before.tell(begun[0], 0.5)
    study = Study(str(tmp_path), plan, space.parse(command)[1])
    (rest,) = {"1", "2", "3"} - set(tried)
    assert [study.next().params["--a"] for _ in range(2)] == [tried[1], rest]
    assert [one.params["--a"] for one in study.trials()] == [*tried, rest]
    assert [name_of(one) for one in study.trials()] == ["trial-0000", "trial-0001", "trial-0002"]


# Bad input.

BAD = {
    "no command": ([], [], "the command is missing"),
    "search": (["--search=best"], ["train"], "argument --search: invalid choice: 'best' (choose from"),
    "value": (["--value=first"], ["train"], "argument --value: invalid choice: 'first' (choose from"),
    "goal": (["--goal=up"], ["train"], "argument --goal: invalid choice: 'up' (choose from"),
    "no goal": (["--metric=eval/quality"], ["train"], "is better; add --goal=max or --goal=min"),
    "secret": ([], ["train", "--a=1,2", "--api_key=hidden"], "the command has a secret in --api_key, which sweep.db"),
    "secret values": ([], ["train", "--api_key=hidden,hidden2"], "the command has a secret in --api_key"),
    "secret apart": ([], ["train", "--token", "-hidden", "--a=1,2"], "the command has a secret in --token"),
    "secret in a URL": ([], ["train", "--url=http://me:hidden@host", "--a=1,2"], "the command has a secret in --url"),
    "parallel": (["--parallel=0"], ["train"], "argument --parallel: 0 is out of range; expected 1 to"),
    "trials": (["--search=tpe"], ["train"], "--search=tpe has no end of its own; give a number of trials"),
    "many seeds": (["--seeds=1000000"], ["train"], "argument --seeds: 1000000 is out of range; expected 0 to"),
    "prune": (["--prune=median", "--seeds=2"], ["train"], "--prune compares single runs"),
    "metric": (["--metric=accuracy"], ["train"], "--metric is 'accuracy'; expected SPLIT/NAME"),
    "model_dir": ([], ["train", "--model_dir=/tmp/x"], "has --model_dir, which the sweep sets"),
    "local_dir": ([], ["train", "--local_dir=/tmp/x"], "has --local_dir, which the sweep sets"),
    "seed": (["--seeds=2"], ["train", "--seed=1"], "has --seed, which the sweep sets"),
    "twice": ([], ["train", "--a=1,2", "--a=3"], "--a comes twice"),
    "range": ([], ["train", "--a=0.1..0.2"], "--a is a range without steps"),
    "large": ([], ["train", "--a=1..200", "--b=1..200"], "the grid has 40,000 points"),
    "program": ([], ["/no/such/program", "--a=1,2"], "'/no/such/program' cannot be started: No such file"),
}


@pytest.mark.slow(spread=3)
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_a_sentence_and_code_2(case, tmp_path, capsys):
    options, of, sentence = BAD[case]
    try:
        code = main(["sweep", f"--dir={tmp_path}", *options, "--", *of])
    except SystemExit as ended:  # of argparse
        code = ended.code
    assert code == 2
    error = capsys.readouterr().err
    assert sentence in error and "hidden" not in error
    assert "hidden" not in str(of) or not os.listdir(tmp_path)


def test_a_url_in_place_of_a_directory_is_a_sentence(capsys):
    assert main(["sweep", "--dir=s3://bucket/sweep", "--", "train", "--a=1,2"]) == 2
    error = capsys.readouterr().err
    assert "--dir is s3://bucket/sweep; expected a local directory" in error and "--storage" in error


def test_without_optuna_a_sentence_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(["sweep", f"--dir={tmp_path}", "--", "train"]) == 2
    assert "a sweep needs optuna; install it with pip install 'looplib[sweep]'" in capsys.readouterr().err


# Sweeps of a program that costs little: its scores are what its arguments say, and rise by 0.01 a seed.
PROGRAM = """
import os, sys
given = dict(argument.lstrip("-").split("=", 1) for argument in sys.argv[1:])
if "fails" in given:
    sys.exit("looplib: error: it fails")
os.makedirs(given["model_dir"] + "/checkpoints")
open(given["model_dir"] + "/run.json", "w").write('{"status": "done", "starts": [{"status": "done"}]}')
with open(given["model_dir"] + "/metrics.jsonl", "w") as file:
    for step, score in enumerate(given["scores"].split(";")):
        score = float(score) + 0.01 * int(given.get("seed", 0))
        file.write('{"step": %d, "split": "eval", "score": %s}\\n' % (step, "null" if score != score else score))
"""


def sweep_of_scores(folder, *options, of):
    """Runs a sweep of that program in this process; returns its exit code."""
    program = folder.parent / "program.py"
    program.write_text(PROGRAM)
    options = [f"--dir={folder}", "--metric=eval/score", "--goal=max", *options]
    return main(["sweep", *options, "--", sys.executable, "-IS", str(program), *of])


@pytest.mark.slow
def test_the_best_value_ranks_if_asked_for_and_the_pages_have_trials_alone(tmp_path, capsys):
    folder, of = tmp_path / "sweep", ["--scores=0.5;0.6,0.9;0.3"]
    assert sweep_of_scores(folder, "--value=best", of=of) == EXIT_DONE
    rows = table(folder)
    assert [(row["scores"], float(row["best eval/score"])) for row in rows] == [("0.9;0.3", 0.9), ("0.5;0.6", 0.6)]
    assert f"best: {rows[0]['trial']}, best eval/score " in capsys.readouterr().out
    assert sweep_of_scores(folder, "--value=last", of=of) == 2
    assert "holds a sweep whose value is best, not last" in capsys.readouterr().err
    shutil.copytree(folder / "trial-0000", folder / "trial-0000-rerun")
    assert main(["report", str(folder)]) == 0 and capsys.readouterr().out.endswith("report.html: 2 runs\n")
    os.remove(folder / "sweep.db")
    assert main(["report", str(folder)]) == 0 and capsys.readouterr().out.endswith("report.html: 3 runs\n")


def test_a_run_says_what_the_sweep_makes_of_it(tmp_path):
    folder = tmp_path / "sweep"
    assert sweep_of_scores(folder, "--value=best", of=["--scores=0.5;0.25,nan"]) == EXIT_DONE
    good, bad = (folder / row["trial"] for row in table(folder))
    found = read_status(str(good))
    assert (found.state, found.detail) == ("done", "compared by best eval/score 0.5")
    assert (shown := read_run(str(good), "trial")).best_metric == "eval/score" and shown.best_mode == "max"
    assert '"best_metric":"eval/score"' in (good / "report.html").read_text()
    why = "its trial has failed: eval/score is not a finite number"
    found = read_status(str(bad))
    assert (found.state, found.detail) == ("failed", why)
    assert bad.with_suffix(".log").read_text() == f"looplib: {why}; the sweep does not resume it\n"
    assert f"{why[0].upper()}{why[1:]}." in (bad / "report.html").read_text()


@pytest.mark.slow
def test_a_trial_under_several_seeds_has_their_mean_and_deviation(tmp_path):
    folder = tmp_path / "sweep"
    assert sweep_of_scores(folder, "--seeds=2", "--goal=min", "--parallel=2", of=["--scores=0.5,0.25"]) == EXIT_DONE
    rows = table(folder)
    assert [row["scores"] for row in rows] == ["0.25", "0.5"]  # the goal is a low score
    for row in rows:
        scores = [float(row["scores"]), float(row["scores"]) + 0.01]
        assert [score_of(folder / row["trial"] / f"seed-{seed}") for seed in range(2)] == scores
        assert [float(row[f"seed {seed}"]) for seed in range(2)] == scores
        assert float(row["eval/score"]) == pytest.approx(statistics.mean(scores), rel=1e-12)
        assert float(row["deviation"]) == pytest.approx(statistics.stdev(scores), rel=1e-9)


@pytest.mark.slow
def test_a_sweep_without_a_result_fails(tmp_path):
    folder = tmp_path / "sweep"
    assert sweep_of_scores(folder, "--metric=eval/accuracy", of=["--scores=0.5"]) == EXIT_FAILED
    (row,) = table(folder)
    assert row["state"] == "failed" and "the run has no metric eval/accuracy; name one with --metric" in row["error"]
    assert "eval/score" in row["error"]


@pytest.mark.slow
def test_a_sweep_whose_first_trials_have_no_value_starts_no_more(tmp_path, capsys):
    folder = tmp_path / "sweep"
    assert sweep_of_scores(folder, of=["--fails=1,2,3,4,5,6"]) == EXIT_FAILED
    rows = table(folder)
    assert [row["state"] for row in rows] == ["failed"] * 3
    assert "3 trials ended without a value of eval/score" in "".join(capsys.readouterr())
    found = [read_status(str(folder / row["trial"])) for row in rows]  # which had no run directory of their own
    assert {(one.state, one.detail) for one in found} == {("failed", "looplib: error: it fails (code 1)")}
    assert main(["report", str(folder)]) == 0 and capsys.readouterr().out.endswith("report.html: 3 runs\n")


# Sweeps of real runs.

RATES = ("0.01", "0.05", "0.1", "0.4")


@pytest.mark.slow  # tests/faults/sweep_faults_test.py kills one of a program that costs less
def test_a_sweep_killed_at_any_moment_loses_and_repeats_no_trial(python, tmp_path):
    """Kills the sweep, or one of its runs, at random moments."""
    folder, moments = tmp_path / "sweep", random.Random(0)
    of = [f"--config.rate={','.join(RATES)}", "--config.pause=0.2", "--config.noise=0.01"]
    arguments = command(python, folder, "--parallel=2", of=of)
    ended = {}  # the time of the last change of each run that was done before a kill
    for kill in range(3):
        with open(tmp_path / "log", "a") as log:
            process = subprocess.Popen(arguments, env=ENVIRONMENT, stdout=log, stderr=log)
        saves = len(list(folder.glob("trial-*/checkpoints/*.commit"))) + moments.choice((0, 1, 3))
        wait(lambda: len(list(folder.glob("trial-*/checkpoints/*.commit"))) > saves)
        time.sleep(moments.uniform(0, 0.5))
        if kill == 1:
            os.kill(moments.choice(wait(lambda: processes_of(folder / "trial-"))), signal.SIGKILL)  # a run alone
            time.sleep(moments.uniform(0, 1))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        wait(lambda: not processes_of(folder / "trial-"), 10)  # no run outlives the sweep
        for path in folder.glob("trial-*/run.json"):
            if json.loads(path.read_text())["status"] == "done":
                ended.setdefault(path, path.stat().st_mtime_ns)
    last = sweep(python, folder, "--parallel=2", of=of)
    assert last.returncode == EXIT_DONE, last.stderr
    rows = table(folder)
    assert sorted(row["config.rate"] for row in rows) == sorted(RATES) and {row["state"] for row in rows} == {"done"}
    assert len({row["trial"] for row in rows}) == len(RATES) == len(list(folder.glob("trial-*/")))
    runs = {row["config.rate"]: folder / row["trial"] for row in rows}
    starts = [json.loads((run / "run.json").read_text())["starts"] for run in runs.values()]
    assert any(start["restored_from"] for run in starts for start in run)  # kills hit runs that had checkpoints
    whole = tmp_path / "whole"
    interrupted = max(runs, key=lambda rate: len(json.loads((runs[rate] / "run.json").read_text())["starts"]))
    alone = [python, "-m", "swept", f"--config.rate={interrupted}", "--config.noise=0.01", f"--model_dir={whole}"]
    subprocess.run(alone, env=ENVIRONMENT, check=True, capture_output=True)
    assert not compare(whole, runs[interrupted]).differences
    again = sweep(python, folder, "--parallel=2", of=of)
    assert again.returncode == EXIT_DONE and f"trials that have ended: {len(RATES)}; that resume: 0" in again.stdout
    twice = [path for path, time_of in ended.items() if path.stat().st_mtime_ns != time_of]
    assert len(twice) <= 6  # a run may be done, and the sweep killed before it has noted that: both runs, at each kill
    for path in twice:  # then the command finds nothing left to do
        last_start = json.loads(path.read_text())["starts"][-1]
        assert last_start["restored_from"].endswith("ckpt-40")


@pytest.mark.slow
def test_a_table_ranks_the_trials_and_failures_have_their_last_line(python, tmp_path):
    of = ["--config.rate=0.05,0.3", "--config.fails=false,true", "--train_steps=20"]
    result = sweep(python, tmp_path, of=of)
    assert result.returncode == EXIT_DONE, result.stderr
    rows = table(tmp_path)
    assert [(row["state"], row["config.rate"]) for row in rows[:2]] == [("done", "0.3"), ("done", "0.05")]
    for row in rows[:2]:
        assert float(row["eval/score"]) == pytest.approx(swept.score(float(row["config.rate"]), 20), rel=1e-5)
    for row in rows[2:]:
        sentence = f"looplib: error: a rate of {row['config.rate']} is not what this trains with; use another (code 1)"
        assert (row["state"], row["config.fails"], row["error"]) == ("failed", "true", sentence)
    assert (tmp_path / "results.txt").read_text() in result.stdout
    assert f"best: {rows[0]['trial']}" in result.stdout
    other = sweep(python, tmp_path, of=[*of[:2], "--train_steps=30"])
    assert other.returncode == 2 and "holds a sweep whose command is" in other.stderr


def test_a_value_that_is_not_finite_is_never_the_result(tmp_path):
    values = [0.5, None, 0.25, 0.75, None]
    lines = [json.dumps({"step": step, "split": "eval", "score": value}) for step, value in enumerate(values)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))

    def value_of(goal, value):
        plan = SweepPlan([], "grid", "eval/score", goal, "none", 0, value)
        try:
            return result(str(tmp_path), plan)
        except UsageError as error:
            return str(error)

    assert (value_of("max", "best"), value_of("min", "best")) == (0.75, 0.25)
    assert value_of("max", "last") == "eval/score is not a finite number at the end"
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines[:-1]))
    assert (value_of("max", "last"), value_of("min", "last")) == (0.75, 0.75)


@pytest.mark.slow
def test_a_hopeless_trial_is_stopped_by_its_metrics(python, tmp_path):
    """The first two trials run to their end, the later ones only if they are not below the median of those that do."""
    of = [
        "--config.start=0.1,0.2,0.3,0.4,0.55,0.6,0.7,0.8",
        "--config.rate=0.001",
        "--config.pause=0.2",
        "--train_steps=30",
    ]
    result = sweep(python, tmp_path, "--prune=median", of=of)
    assert result.returncode == EXIT_DONE, result.stderr
    rows = sorted(table(tmp_path), key=lambda row: row["trial"])
    for number, row in enumerate(rows):
        start = float(row["config.start"])
        ended = [float(one["config.start"]) for one in rows[:number] if one["state"] == "done"]
        hopeless = number >= 2 and start < statistics.median(ended)
        run = json.loads((tmp_path / row["trial"] / "run.json").read_text())
        found = row["state"], run["status"], run["step"] < 30
        assert found == (("pruned", "pruned", True) if hopeless else ("done", "done", False)), (number, row)
        if hopeless:
            scores = [one for one in read_jsonl(f"{tmp_path}/{row['trial']}/metrics.jsonl") if one["split"] == "eval"]
            at = re.fullmatch(
                r"pruned at step (\d+): eval/score was (\S+), and other trials were better there",
                run["starts"][-1]["outcome"],
            )
            assert at[2] == f"{float(row['eval/score']):.6g}"  # at a report, and not at the last save
            assert float(row["eval/score"]) in [one["score"] for one in scores if one["step"] == int(at[1])]
            *_, saved, last = (tmp_path / f"{row['trial']}.log").read_text().splitlines()
            assert saved.endswith("; its sweep decides whether it resumes")
            assert last == f"looplib: {at[0]}; the sweep does not resume it"
    assert any(row["state"] == "pruned" for row in rows)  # else the order of the grid is another


def test_no_trial_is_stopped_by_a_value_that_a_rollback_has_taken_back(tmp_path):
    command = ["train", "--a=1..9"]
    plan = SweepPlan(command=command, search="grid", metric="eval/score", goal="max", prune="median", seeds=0)
    study = Study(str(tmp_path), plan, space.parse(command)[1])
    for _ in range(2):
        other = study.next()
        assert not study.is_hopeless(other, {100: 0.5, 200: 0.5, 300: 0.5})
        study.note(other, 0, 0.5)
    trial = study.next()
    assert study.is_hopeless(trial, {100: math.nan, 200: math.nan})
    assert not study.is_hopeless(trial, {100: 0.9})
    assert study.is_hopeless(trial, {100: 0.9, 200: 0.1, 300: 0.1})


@pytest.mark.filterwarnings("error:All-NaN")
def test_a_metric_that_is_nan_at_first_stops_no_trial_and_one_that_stays_so_does(tmp_path):
    command = ["train", "--a=1..9"]
    plan = SweepPlan(command=command, search="grid", metric="eval/score", goal="max", prune="median", seeds=0)
    study = Study(str(tmp_path), plan, space.parse(command)[1])
    for _ in range(2):
        other = study.next()
        assert not study.is_hopeless(other, {100: math.nan, 200: 0.5})
        study.note(other, 0, 0.5)
    trial = study.next()
    assert not study.is_hopeless(trial, {100: math.nan})
    assert study.is_hopeless(trial, {100: math.nan, 200: math.nan})
    pruned = study.prune(trial)
    assert (pruned.last_step, plan.result_of(pruned)) == (200, None)


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_the_runs_and_the_same_command_resumes(signum, python, tmp_path):
    of = ["--config.rate=0.1,0.2", "--config.pause=0.2"]
    arguments = command(python, tmp_path, "--parallel=2", of=of)
    with subprocess.Popen(arguments, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        wait(lambda: len(list(tmp_path.glob("trial-*/metrics.jsonl"))) == 2)
        process.send_signal(signum)
        out = process.communicate(timeout=60)[0]
    assert process.returncode == EXIT_PREEMPTED and "run the same command to resume (code 75)" in out
    reports = [json.loads(path.read_text()) for path in tmp_path.glob("trial-*/run.json")]
    assert [report["status"] for report in reports] == ["preempted"] * 2
    result = sweep(python, tmp_path, "--parallel=2", of=of)
    assert result.returncode == EXIT_DONE and "trials that have ended: 0; that resume: 2" in result.stdout
    for row in table(tmp_path):
        assert float(row["eval/score"]) == pytest.approx(swept.score(float(row["config.rate"]), 40), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("search", ["random", *more(["tpe"])])
def test_a_search_stays_in_its_ranges_and_draws_the_values_of_an_uninterrupted_one(search, python, tmp_path):
    of = ["--config.rate=1e-3..0.5:log", "--config.start=0..1", "--train_steps=10"]
    sweep(python, tmp_path / "two", f"--search={search}", "--trials=2", of=of)
    for folder in (tmp_path / "two", tmp_path / "whole"):
        assert sweep(python, folder, f"--search={search}", "--trials=3", of=of).returncode == EXIT_DONE
    settings = [
        sorted((row["trial"], row["config.rate"], row["config.start"]) for row in table(tmp_path / name))
        for name in ("two", "whole")
    ]
    assert settings[0] == settings[1] and len({rate for _, rate, _ in settings[0]}) == 3
    assert all(1e-3 <= float(rate) <= 0.5 and start in ("0", "1") for _, rate, start in settings[0])

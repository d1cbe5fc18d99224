"""Binaries: flags, exit codes, last lines, run.json."""

import concurrent.futures
import datetime
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf
from conftest import repetitions
from paths import PYTHONPATH

from looplib.run import commits
from looplib.run.records import read_jsonl

ROOT = pathlib.Path(__file__).parents[2]
SMALL = [
    "--config.model=mlp",
    "--train_steps=60",
    "--eval_interval=40",
    "--steps_per_loop=20",
    "--checkpoint_interval=30",
]


def start(python, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [python, "-m", "trainers.image_classification", *map(str, arguments)],
        capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300,
    )  # fmt: skip


def weights(model_dir):
    path = tf.train.latest_checkpoint(os.path.join(model_dir, "checkpoints"))
    reader = tf.train.load_checkpoint(path)
    return {key: reader.get_tensor(key) for key, _ in tf.train.list_variables(path) if "_trainable_variables" in key}


@pytest.fixture(scope="module")
def replicas(python, tmp_path_factory):
    """One small run on 1 and 2 virtual devices, with --all on 4 too."""
    folder = tmp_path_factory.mktemp("replicas")

    def run(n):
        return folder / str(n), start(python, f"--model_dir={folder}/{n}", f"--num_virtual_devices={n}", *SMALL)

    counts = repetitions((1, 2), (1, 2, 4))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:  # as many as the smallest machine has cores
        return dict(zip(counts, pool.map(run, counts)))


def test_a_run_says_which_strategy_it_chose_and_ends_with_code_0_and_where_it_is(replicas):
    for folder, result in replicas.values():
        assert result.returncode == 0, result.stderr
        assert result.stdout.splitlines()[-1] == (
            f"done at step 60; the run directory is {folder}, and its page {folder}/report.html"
        )
    for n, text in (
        (1, "DefaultStrategy, 1 replica (auto, no TPU and no GPU"),
        (2, "MirroredStrategy, 2 replicas (auto, 2 CPU"),
    ):
        assert text in replicas[n][1].stderr


def test_the_run_directory_is_complete(replicas):
    folder, _ = replicas[2]
    names = {path.name.partition(".out.")[0] for path in folder.iterdir()}
    assert names - {"code.diff"} == {  # which there is within a git repository
        "checkpoints", "lock", "train", "eval", "events", "metrics.jsonl", "run.json", "config.yaml", "report.html",
    }  # fmt: skip
    records = read_jsonl(str(folder / "metrics.jsonl"))
    assert [(r["step"], r["split"]) for r in records] == [
        (20, "train"), (40, "train"), (40, "eval"), (60, "train"), (60, "eval")
    ]  # fmt: skip
    assert records[-1]["examples"] == 360 and 0 < records[-1]["accuracy"] <= 1
    run = json.loads((folder / "run.json").read_text())
    assert run["status"] == "done" and run["step"] == 60 and run["restarts"] == 0
    assert run["strategy"] == "MirroredStrategy, 2 replicas" and run["loop"] == "graph"
    assert run["config"]["model"] == "mlp" and run["flags"]["num_virtual_devices"] == 2
    assert run["metrics"]["eval"] == {k: v for k, v in records[-1].items() if k not in ("step", "split")}
    assert {"looplib", "tensorflow", "keras", "numpy", "python"} <= set(run["versions"])
    seconds = run["seconds"]
    assert sum(seconds.values()) == pytest.approx(2 * seconds["wall"], rel=0.02)
    began = datetime.datetime.fromisoformat(run["started"]).timestamp()
    assert began == pytest.approx(run["starts"][0]["process"]["since"], abs=1.5)
    assert began + seconds["wall"] == pytest.approx((folder / "run.json").stat().st_mtime, abs=1.5)
    assert run["verdict"] == "" and run["engines"] == {}  # as it takes some seconds


def test_virtual_devices_do_not_change_the_weights(replicas):
    runs = {n: weights(folder) for n, (folder, _) in replicas.items()}
    assert len(runs[1]) == 4
    for n in runs:
        for key, value in runs[1].items():
            np.testing.assert_allclose(runs[n][key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy, name", [("mirrored", "MirroredStrategy"), ("one_device", "OneDeviceStrategy")])
def test_strategies_of_one_device(strategy, name, replicas, python, tmp_path):
    result = start(python, f"--model_dir={tmp_path}", f"--strategy={strategy}", *SMALL)
    assert result.returncode == 0, result.stderr
    assert f"{name}, 1 replica (asked for" in result.stderr
    for key, value in weights(replicas[1][0]).items():
        np.testing.assert_allclose(weights(tmp_path)[key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_with_a_save_and_code_75(signum, python, tmp_path):
    command = [
        repetitions(python, sys.executable) if signum == signal.SIGTERM else python,
        "-m",
        "trainers.image_classification",
        f"--model_dir={tmp_path}",
        *SMALL,
    ]
    command += ["--train_steps=100000000", "--steps_per_loop=100000000", "--eval_interval=100000000"]
    command += ["--checkpoint_interval=1000000"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        while not (tmp_path / "run.json").exists():
            time.sleep(0.1)
        time.sleep(1)
        process.send_signal(signum)
        last = process.communicate(timeout=60)[1].strip().splitlines()[-1]
    assert process.returncode == 75
    (done,) = commits.committed(str(tmp_path / "checkpoints"))
    assert last.startswith(
        f"looplib: ended by {signal.Signals(signum).name} at step {done.step}, saved in {done.path};"
    )
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["status"] == "preempted" and run["step"] == done.step


def test_help_shows_the_flags(python):
    result = start(python, "--help")
    assert result.returncode == 1  # as absl does
    for text in ("--model_dir", "--eval_interval", "--config"):
        assert text in result.stdout


@pytest.mark.slow
def test_the_same_command_resumes_and_evaluates(replicas, python, tmp_path):
    whole, _ = replicas[1]
    for steps in ("--train_steps=30", "--train_steps=60"):
        result = start(python, f"--model_dir={tmp_path}", *SMALL, steps)
        assert result.returncode == 0, result.stderr
    for key, value in weights(whole).items():
        np.testing.assert_array_equal(weights(tmp_path)[key], value)

    def curve(folder):
        keys = lambda r: {k: v for k, v in r.items() if k != "steps_per_second"}
        return sorted(
            (keys(r) for r in read_jsonl(str(folder / "metrics.jsonl"))), key=lambda r: (r["step"], r["split"])
        )

    assert curve(tmp_path) == curve(whole)
    assert json.loads((tmp_path / "run.json").read_text())["restarts"] == 1
    evaluation = start(python, f"--model_dir={tmp_path}", "--mode=eval", "--config.model=mlp")
    continuous = start(
        python, f"--model_dir={tmp_path}", "--mode=continuous_eval", "--train_steps=60", "--config.model=mlp"
    )
    for result in (evaluation, continuous):
        assert result.returncode == 0, result.stderr
    assert curve(tmp_path) == curve(whole)  # the same numbers at the same step


BAD = {
    "unknown flag": (["--model_dir={}", "--fast"], "Unknown command line flag 'fast'"),
    "unknown value": (["--model_dir={}", "--strategy=fast"], "value should be one of <auto|one_device"),
    "unknown engine": (["--model_dir={}", "--loop=fast"], "value should be one of <auto|graph|xla|eager>"),
    "unknown field": (["--model_dir={}", "--config.fast=1"], "looplib: error: --config.fast is not a setting of Config; expected one of dataset"),
    "value of another type": (["--model_dir={}", "--config.learning_rate=fast"], "looplib: error: --config.learning_rate is 'fast'; expected float"),
    "stray argument": (["--model_dir={}", "fast"], "looplib: error: unexpected argument 'fast'"),
    "no directory": ([], "looplib: error: --model_dir is missing"),
    "unwritable directory": (["--model_dir=/proc/x"], "looplib: error: model_dir /proc/x cannot be written to"),
    "zero interval": (["--model_dir={}", "--eval_interval=0"], "looplib: error: --eval_interval is 0; expected at least 1"),
    "negative interval": (["--model_dir={}", "--checkpoint_interval=-5"], "looplib: error: --checkpoint_interval is -5"),
    "uneven batch": (
        ["--model_dir={}", "--num_virtual_devices=4", "--global_batch_size=30"],
        "looplib: error: global_batch_size 30 does not divide over 4 replicas; use 28 or 32",
    ),
    "workers that nothing names": (
        ["--model_dir={}", "--strategy=multi_worker"],
        "looplib: error: the strategy is multi_worker, but the environment does not list the workers",
    ),
    "nothing to evaluate": (["--model_dir={}", "--mode=eval"], "looplib: error: there is no checkpoint in"),
    "no such run": (["--model_dir={}/misspelt", "--mode=predict"], "looplib: error: there is no directory"),
    "unknown model": (["--model_dir={}", "--config.model=vgg"], "looplib: error: --config.model is 'vgg'; expected one of cnn"),
    "unknown data": (["--model_dir={}", "--config.dataset=no_such"], "looplib: error: --config.dataset=no_such is not known"),
    "data that needs a network": (["--model_dir={}", "--config.dataset=mnist", "--config.data_path={}"], "looplib: error: --config.dataset=mnist is not in"),
}  # fmt: skip


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_a_sentence_and_code_1(case, nursery, tmp_path):
    arguments, sentence = BAD[case]
    life = nursery.life_of("trainers.image_classification", *(argument.format(tmp_path) for argument in arguments))
    assert life.code() == 1
    assert sentence in life.output() and "Traceback" not in life.output()
    assert not (tmp_path / "misspelt").exists()


def test_a_crash_names_the_checkpoint_to_resume_from(python, tmp_path):
    code = "import crashing; crashing.main()"
    environment = {**os.environ, "PYTHONPATH": f"{PYTHONPATH}{os.pathsep}{tmp_path}"}
    (tmp_path / "crashing.py").write_text(
        """
import dataclasses, looplib, toy
from looplib import launch

@dataclasses.dataclass
class Config:
    pass

def build(config):
    trainer = toy.Regression()
    class Crash(toy.RegressionEvaluator):
        def loop_end(self, metrics):
            raise RuntimeError("the printer is on fire")
    return trainer, Crash(trainer.model)

def main():
    launch.run(build, Config(), global_batch_size=8, steps_per_loop=1, eval_interval=5)
"""
    )
    result = subprocess.run(
        [python, "-c", code, f"--model_dir={tmp_path}/run"], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 1 and "Traceback" in result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("looplib: error: RuntimeError: the printer is on fire")
    assert last.endswith(f"run the same command to resume from {tmp_path}/run/checkpoints/ckpt-5")
    assert f"\nlooplib: the page of the run is {tmp_path}/run/report.html\n" in result.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"


@pytest.mark.slow
def test_a_binary_without_an_evaluator_trains_without_a_mode_and_is_refused_to_evaluate(python, tmp_path):
    code = """
import looplib, toy
from looplib import launch
launch.run(lambda config: (toy.Regression(), None), global_batch_size=8, train_steps=2, loop="eager")
"""

    def run(*flags):
        environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
        command = [python, "-c", code, f"--model_dir={tmp_path}/run", *flags]
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    tried = run("--dry_run")
    assert tried.returncode == 0 and "dry run: all went well" in tried.stdout, tried.stderr
    trained = run()
    assert trained.returncode == 0 and list((tmp_path / "run" / "checkpoints").glob("ckpt-2.commit")), trained.stderr
    assert run("--checkpoint_interval=1", "--train_steps=4").returncode == 0
    told = (tmp_path / "run" / "run.json").read_bytes()
    assert run("--mode=export", "--checkpoint=3").returncode == 0
    assert json.loads((tmp_path / "run" / "export" / "step-3" / "export.json").read_text())["step"] == 3
    assert (tmp_path / "run" / "run.json").read_bytes() == told  # an export is no start of the training
    refused = run("--mode=eval").stderr.strip().splitlines()[-1]
    assert "--mode=eval needs an evaluator, but this binary has none; use --mode=train" in refused


def test_evaluators_have_intervals_of_their_own_by_a_flag(python, tmp_path):
    code = """
import looplib, toy
from looplib import launch
def build(config):
    trainer = toy.Regression()
    return trainer, {name: toy.RegressionEvaluator(trainer.model) for name in ("often", "seldom")}
launch.run(build, global_batch_size=8, train_steps=12, steps_per_loop=2, loop="eager", eval_interval=6)
"""

    def run(*flags):
        command = [python, "-c", code, f"--model_dir={tmp_path}/run", *flags]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": PYTHONPATH})
        return done.returncode, done.stderr.strip().splitlines()[-1:]

    for intervals, words in (("often:2,rare:4", "often, rare"), ("often:2,seldom:0", "0; expected at least 1")):
        code_at, (line,) = run(f"--eval_interval={intervals}")
        assert code_at == 1 and line.startswith("looplib: error: ") and words in line
    assert run("--eval_interval=often:4,seldom:8")[0] == 0
    records = list(read_jsonl(f"{tmp_path}/run/metrics.jsonl"))
    steps = {name: [one["step"] for one in records if one["split"] == name] for name in ("often", "seldom")}
    assert steps == {"often": [4, 8, 12], "seldom": [8, 12]}
    assert json.loads((tmp_path / "run" / "run.json").read_text())["flags"]["eval_interval"] == {
        "often": 4,
        "seldom": 8,
    }

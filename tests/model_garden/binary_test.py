"""`python -m trainers.model_garden` takes Model Garden's command line, and what is killed resumes exactly."""

import json
import os
import pathlib
import re
import subprocess

import pytest
from lazily import Results

pytest.importorskip("official", reason="needs Model Garden: pip install 'looplib[models]'")

import lives
import side_by_side
import tensorflow as tf
import yaml

from looplib.run.records import read_jsonl

ROOT = pathlib.Path(__file__).parents[2]
BINARY = "trainers.model_garden"


@pytest.fixture(scope="module")
def nursery(nursery):
    """A fork of the one of all tests, with Model Garden imported too, which takes two seconds."""
    modules = [*lives.MODULES, "official.common.registry_imports", "trainers.model_garden_tasks"]
    with lives.Nursery(modules, nursery.python) as nursery:
        yield nursery


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Configuration files of two small experiments."""
    folder = tmp_path_factory.mktemp("files")
    schedule = dict(train_steps=12, steps_per_loop=2, checkpoint_interval=4, validation_interval=8, summary_interval=2)
    found = {}
    for name, stem in (("resnet_imagenet", "resnet"), ("bert/pretraining", "bert")):
        experiment = side_by_side.EXPERIMENTS[name]
        overrides = experiment.overrides(experiment.make_data(str(folder / stem)))
        found[name] = folder / f"{stem}.yaml"
        found[name].write_text(yaml.safe_dump(side_by_side.merged(overrides, {"trainer": schedule})))
    return found


@pytest.fixture(scope="module")
def run(files, nursery, tmp_path_factory):
    """(run directory, output) of a training by a command line as Model Garden's users type it."""
    folder = tmp_path_factory.mktemp("run")
    second = folder / "second.yaml"
    second.write_text(
        "trainer: {train_steps: 5, validation_interval: 5, validation_summary_subdir: held_out}\n"
        "runtime: {gpu_thread_mode: gpu_private}\n"
    )
    life = nursery.life_of(
        BINARY, "--experiment=resnet_imagenet", "--mode=train_and_eval", f"--model_dir={folder}/run",
        f"--config_file={files['resnet_imagenet']}", f"--config_file={second}",
        "--params_override=trainer.train_steps=4,trainer.validation_interval=4,runtime.num_packs=2",
        "--seed=3",
    )  # fmt: skip
    assert life.code(300) == 0, life.output()
    return folder / "run", life.output()


@pytest.mark.slow
def test_files_and_overrides_come_in_their_order_and_are_written(run):
    directory, output = run
    params = yaml.full_load((directory / "params.yaml").read_text())
    assert params["trainer"]["train_steps"] == 4 and params["trainer"]["validation_summary_subdir"] == "held_out"
    assert params["task"]["model"]["backbone"]["resnet"]["model_id"] == 10
    report = json.loads((directory / "run.json").read_text())
    assert report["step"] == 4 and report["flags"]["steps_per_loop"] == 2 and report["flags"]["seed"] == 3
    assert report["config"]["trainer"] == json.loads(json.dumps(params["trainer"]))
    splits = {record["split"] for record in read_jsonl(str(directory / "metrics.jsonl"))}
    assert splits == {"train", "held_out"} and (directory / "eval" / "held_out").is_dir()


@pytest.mark.slow
def test_what_is_not_honoured_is_named(run):
    _, output = run
    for setting in ("runtime.gpu_thread_mode='gpu_private'", "runtime.num_packs=2"):
        assert f"not honoured: {setting}" in output
    assert output.count("not honoured") == 2


@pytest.mark.slow
def test_an_evaluation_job_and_post_evaluation_give_the_same_numbers(run, files, nursery, tmp_path):
    directory, _ = run
    arguments = ["--experiment=resnet_imagenet", f"--config_file={directory}/params.yaml"]
    evaluation = nursery.life_of(BINARY, *arguments, f"--model_dir={directory}", "--mode=eval", "--loop=eager")
    post = nursery.life_of(
        BINARY, *arguments, f"--model_dir={tmp_path}/post", "--mode=train_and_post_eval", "--seed=3", "--deterministic",
        "--loop=eager",
    )  # fmt: skip
    assert evaluation.code(300) == 0, evaluation.output()
    assert post.code(300) == 0, post.output()
    trained = json.loads((directory / "run.json").read_text())["metrics"]["held_out"]
    evaluated = json.loads((directory / "run_eval.json").read_text())["metrics"]["held_out"]
    assert evaluated == pytest.approx(trained, rel=1e-5)  # sums of a graph
    assert (
        json.loads((tmp_path / "post" / "run.json").read_text())["metrics"]["held_out"]["examples"]
        == trained["examples"]
    )
    assert (tmp_path / "post" / "params.yaml").exists()


BAD = {
    "no experiment": ([], "--experiment is missing; name one of Model Garden's"),
    "unknown experiment": (["--experiment=resnet_imagnet"], "--experiment is 'resnet_imagnet'; name one of Model Garden's: bert/pretraining, "),
    "unknown field": (["--experiment=mock", "--params_override=trainer.train_stps=3"], "the configuration of mock cannot be read"),
    "missing file": (["--experiment=mock", "--config_file=/no/such.yaml"], "the configuration of mock cannot be read"),
    "not a file": (["--experiment=mock", "--config_file=/dev/zero"], "the configuration of mock cannot be read (zero is a directory or a device"),
    "no steps": (["--experiment=mock"], "trainer.train_steps is 0; expected a whole number of at least 1"),
    "unknown strategy": (["--experiment=mock", "--params_override=runtime.distribution_strategy=mirroed"], "distribution_strategy is 'mirroed'"),
}  # fmt: skip


def test_bad_input_is_a_sentence_and_code_1(nursery, tmp_path):
    """All at once, as each start imports Model Garden."""
    lives = {
        case: nursery.life_of(BINARY, f"--model_dir={tmp_path}", *arguments) for case, (arguments, _) in BAD.items()
    }
    for case, life in lives.items():
        assert life.code(300) == 1, case
        last = life.output().strip().splitlines()[-1]
        assert last.startswith("looplib: error: ") and BAD[case][1] in life.output(), (case, life.output())
        assert "Traceback" not in life.output(), case


@pytest.mark.slow
def test_a_start_that_is_refused_leaves_the_runs_configuration(run, files, nursery):
    directory, _ = run
    before = (directory / "params.yaml").read_bytes()
    name = "bert/pretraining"
    life = nursery.life_of(BINARY, f"--experiment={name}", f"--config_file={files[name]}", f"--model_dir={directory}")
    assert life.code(300) == 1 and "was made by another optimizer" in life.output()
    assert (directory / "params.yaml").read_bytes() == before


@pytest.fixture(scope="module")
def checks(files, nursery):
    """`check resume` of ResNet, with the random augmentation of its pipeline, and of BERT, with dropout."""

    flags = {"resnet_imagenet": ["--deterministic"], "bert/pretraining": []}

    def check(name):
        command = [nursery.python, "-m", BINARY, f"--experiment={name}", f"--config_file={files[name]}", *flags[name]]
        return subprocess.run(
            [nursery.python, "-m", "looplib", "check", "resume", "--kills=2", "--", *command],
            capture_output=True, text=True, cwd=ROOT, timeout=600, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip

    return Results(check)


@pytest.mark.slow  # model_garden_test has a run that resumes exactly
@pytest.mark.parametrize("name", ["bert/pretraining", "resnet_imagenet"])
def test_a_killed_run_resumes_exactly(name, checks):
    result = checks[name]
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.match(r"EQUAL, uninterrupted and after 2 kills: ", result.stdout.splitlines()[-1])


@pytest.mark.slow
def test_the_drivers_own_restart_does_not(tmp_path):
    overrides = {"task": {"train_data": {"aug_rand_hflip": False, "aug_crop": False}}}
    schedule = lambda until: {
        "trainer": dict(train_steps=until, steps_per_loop=1, checkpoint_interval=3, validation_interval=6)
    }
    params = {
        until: side_by_side.configuration(
            "resnet_imagenet", str(tmp_path), side_by_side.merged(overrides, schedule(until))
        )
        for until in (3, 6)
    }
    whole = side_by_side.under_the_driver(params[6], f"{tmp_path}/whole", mode="train")
    stopped = side_by_side.under_the_driver(params[3], f"{tmp_path}/stopped", mode="train")
    assert stopped.losses == {step: whole.losses[step] for step in (1, 2, 3)}  # so that what follows is no chance
    resumed = side_by_side.under_the_driver(params[6], f"{tmp_path}/stopped", mode="train")
    assert sorted(resumed.losses) == [4, 5, 6]
    assert resumed.losses[4] != pytest.approx(whole.losses[4], rel=1e-3)  # it begins with the first batches again
    assert tf.train.latest_checkpoint(f"{tmp_path}/stopped").endswith("ckpt-6")

"""Evaluations, predictions and exports on machines that do not train: what they write reaches the store."""

import json
import os
import shutil

import pytest
from clouds import wait_for

from looplib import folders
from looplib.extras.buckets.note import LocalCopy
from looplib.extras.buckets.outputs import merge, of_jobs
from looplib.report.records import read_jsonl

SMALL = ("--config.data=pipeline", "--eval_interval=10")


def evaluated(folder):
    return {record["step"] for record in read_jsonl(str(folder / "metrics.jsonl")) if record["split"] == "eval"}


def at_step_30(folder):
    records = read_jsonl(str(folder / "metrics.jsonl"))
    (found,) = (record for record in records if (record["split"], record["step"]) == ("eval", 30))
    return found


def test_records_of_evaluations_before_a_run_began_are_not_its_own(tmp_path):
    copy = LocalCopy("s3://bucket/run", str(tmp_path / "run"))
    for job, score in (("00000000001-a", 0.1), ("00000000002-b", 0.2), ("00000000003-c", 0.3)):
        folder = folders.make_folder(copy.directory, "evaluations", job)
        for step in (5, int(job[10])):
            record = {"step": step, "split": "eval", "score": score}
            with open(os.path.join(folder, "metrics.jsonl"), "a") as file:
                file.write(json.dumps(record) + "\n")
    with open(copy.path("metrics.jsonl"), "w") as file:
        file.write(json.dumps({"step": 5, "split": "eval", "score": 0.5}) + "\n")
    names = of_jobs(f"evaluations/{job}/metrics.jsonl" for job in os.listdir(copy.path("evaluations")))
    assert merge(copy, names, "00000000001-a", "00000000003-c") == ["metrics.jsonl"]
    found = {record["step"]: record["score"] for record in read_jsonl(copy.path("metrics.jsonl"))}
    assert found == {5: 0.5, 2: 0.2, 3: 0.3}
    assert merge(copy, names, "00000000001-a", "00000000002-b") == ["metrics.jsonl"]  # the last is news
    found = {record["step"]: record["score"] for record in read_jsonl(copy.path("metrics.jsonl"))}
    assert found == {5: 0.3, 2: 0.2, 3: 0.3}


@pytest.mark.slow
def test_an_evaluation_job_on_another_machine_adds_its_records_and_events_to_the_run(cloud):
    training = cloud.run("--mode=train", "--train_steps=20", "--checkpoint_interval=10", *SMALL, machine="one")
    job = cloud.run("--mode=continuous_eval", "--train_steps=20", *SMALL, machine="two")
    for life in (training, job):
        assert life.code() == 0, life.output()
    assert 20 in (steps := evaluated(cloud.folder / "two" / "runs" / cloud.local("two").parent.name / "run"))
    names = cloud.names()
    assert json.loads(cloud.read("run_eval.json"))["status"] == "done"
    assert any(name.startswith("eval/events.out.tfevents") for name in names)
    (records,) = (name for name in names if name.startswith("evaluations/"))
    assert {json.loads(line)["step"] for line in cloud.read(records).splitlines()} == steps
    assert not evaluated(cloud.download("found"))  # the training's own file is as the training wrote it
    life = cloud.tool("report", cloud.url(), f"--output={cloud.folder / 'page.html'}", machine="three")
    assert life.code() == 0, life.output()
    assert evaluated(cloud.local("three")) == steps
    cloud.lose("one")
    life = cloud.run("--mode=train", "--train_steps=30", "--checkpoint_interval=10", *SMALL, machine="one")
    assert life.code() == 0, life.output()
    assert evaluated(cloud.download("again")) == steps
    job = cloud.run("--mode=eval", "--eval_steps=1", *SMALL, machine="two")
    assert job.code() == 0, job.output()
    life = cloud.run("--mode=train", "--train_steps=30", *SMALL, machine="one")
    assert life.code() == 0 and at_step_30(cloud.local("one"))["examples"] < 96, life.output()
    job = cloud.run("--mode=eval", *SMALL, machine="two")  # again, of all examples
    assert job.code() == 0, job.output()
    life = cloud.run("--mode=train", "--train_steps=40", "--checkpoint_interval=10", *SMALL, machine="one")
    assert life.code() == 0, life.output()
    assert evaluated(cloud.local("one")) == {*steps, 30}  # also on a machine that has the run
    assert at_step_30(cloud.local("one")) == at_step_30(cloud.local("two"))
    assert at_step_30(cloud.local("one"))["examples"] == 96
    lines = read_jsonl(str(cloud.folder / "again" / "metrics.jsonl"))
    assert len({(line["step"], line["split"]) for line in lines}) == len(lines)


@pytest.mark.slow
def test_predictions_and_exports_are_copied_to_the_store(cloud):
    for mode in ("train", "predict", "export"):
        life = cloud.run(f"--mode={mode}", "--train_steps=4", *SMALL, machine=mode)
        assert life.code() == 0, life.output()
        assert not [name for name in cloud.names() if name.startswith("evaluations/")]
    here = {
        f"{folder}/{path.relative_to(local)}": path.stat().st_size
        for folder, machine in (("predictions", "predict"), ("export", "export"))
        for local in [cloud.local(machine) / folder]
        for path in local.rglob("*")
        if path.is_file() and path.name != "_lock"
    }
    assert len(here) > 4
    assert here.items() <= cloud.names().items()


@pytest.mark.slow
def test_predictions_of_two_checkpoints_are_never_in_one_folder(cloud):
    def ended(mode, machine, steps=4, code=0):
        life = cloud.run(f"--mode={mode}", f"--train_steps={steps}", *SMALL, machine=machine)
        assert life.code() == code, life.output()
        return life.output()

    def predicted():
        return {name: cloud.read(name) for name in cloud.names() if name.startswith("predictions/")}

    ended("train", "one")
    ended("predict", "two")
    first = predicted()
    assert first and not [name for name in first if name.endswith("lock")]
    ended("predict", "three")  # finds all of it
    assert predicted() == first
    ended("train", "one", steps=8)
    assert "PredictionError" in ended("predict", "three", code=1) and "PredictionError" in ended(
        "predict", "four", code=1
    )
    assert predicted() == first
    shutil.rmtree(cloud.local("four") / "predictions")  # as the error says
    ended("predict", "four")
    here = cloud.local("four")
    assert predicted() == {
        str(path.relative_to(here)): path.read_bytes()
        for path in here.glob("predictions/**/*")
        if path.is_file() and not path.name.endswith("lock")
    }
    assert predicted().keys() == first.keys() and predicted() != first
    last = predicted()
    ended("predict", "three")  # which had those of before
    assert predicted() == last
    shutil.rmtree(cloud.local("two") / "predictions")
    ended("eval", "two")
    assert predicted() == last
    for name in last:  # of a job that was killed
        if name.endswith("_index.json"):
            cloud.delete(name)
    ended("predict", "five")
    assert predicted().keys() == last.keys()


@pytest.mark.slow
def test_the_end_of_an_evaluation_waits_for_a_store_that_is_down(cloud):
    life = cloud.run("--mode=train", "--train_steps=4", *SMALL)
    assert life.code() == 0, life.output()
    life = cloud.run("--mode=eval", "--config.slow_evaluation=0.2", *SMALL, machine="two")
    wait_for(lambda: "restored step 4" in life.output(), 60)
    cloud.proxy.stop()
    wait_for(lambda: "eval " in life.output(), 60)
    assert not life.ended(1.0) and not [name for name in cloud.names() if name.startswith("evaluations/")]
    cloud.proxy.start()
    assert life.code() == 0, life.output()
    assert [name for name in cloud.names() if name.startswith("evaluations/")]


@pytest.mark.slow
def test_a_reader_takes_the_weights_of_the_run_that_is_there_now(cloud):
    """And not those of the one before at that address, which it has looked at."""
    for seed, steps in ((1, 6), (2, 6), (3, 4)):
        for name in cloud.names():
            cloud.delete(name)
        life = cloud.copied(f"--seed={seed}", f"--steps={steps}", machine=f"trains-{seed}")
        assert life.code() == 0, life.output()
        assert (life := cloud.tool("inspect", cloud.url(), machine="reads")).code() == 0, life.output()
        here, there = cloud.local("reads") / "checkpoints", cloud.download(f"found-{seed}") / "checkpoints"
        names = [{path.name for path in place.iterdir() if path.is_file()} for place in (here, there)]
        assert names[0] == names[1] and f"ckpt-{steps}.index" in names[0]
        assert all((here / name).read_bytes() == (there / name).read_bytes() for name in names[0])

"""Evaluations, predictions and exports on machines that do not train: what they write reaches the store."""

import json
import os
import re
import shutil
import time

import pytest
from clouds import wait_for

from looplib.base import folders
from looplib.buckets.note import LocalCopy
from looplib.buckets.upload import Outputs, merge, newest, of_jobs
from looplib.commands.status import status
from looplib.errors import EXIT_DONE
from looplib.run.records import read_jsonl

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
    shutil.rmtree(cloud.local("four") / "predictions")  # which says nothing of the store
    assert cloud.url("run/predictions/eval") in ended("predict", "four", code=1)
    assert predicted() == first
    for name in first:  # as the error says
        cloud.delete(name)
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


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["predict", "export"])
def test_two_jobs_that_write_one_folder_never_mix_their_files(cloud, s3, mode):
    life = cloud.run("--mode=train", "--train_steps=4", "--checkpoint_interval=2", *SMALL)
    assert life.code() == 0, life.output()
    flags = (f"--mode={mode}", *SMALL, *(["--checkpoint=4"] if mode == "export" else []))
    folder = {"predict": "predictions/", "export": "export/"}[mode]
    cloud.proxy.faults.delay = 2.0

    def is_put(request):
        return request.method == "PUT" and f"/run/{folder}" in request.path

    cloud.proxy.faults.only = is_put
    first = cloud.run(*flags, *(["--checkpoint=2"] if mode == "predict" else []), machine="one")
    wait_for(lambda: any(map(is_put, cloud.proxy.requests)), 60)
    second = cloud.run(*flags, machine="two", environment={"AWS_ENDPOINT_URL": s3.url})
    assert second.code() == 1 and "LockedError" in second.output() and folder in second.output(), second.output()
    assert first.code() == 0, first.output()
    cloud.proxy.clear()
    here = cloud.local("one")
    there = {name: cloud.read(name) for name in cloud.names() if name.startswith(folder)}
    assert there and there == {
        str(path.relative_to(here)): path.read_bytes()
        for path in (here / folder).rglob("*")
        if path.is_file() and path.name != "_lock"
    }
    again = cloud.run(*flags, machine="two")  # once the first has ended
    assert again.code() == (1 if mode == "predict" else 0), again.output()  # the predictions are of another step


@pytest.mark.slow
@pytest.mark.parametrize("hours", [-1, 1])
def test_status_has_ages_of_the_store_however_far_two_clocks_are_apart(cloud, monkeypatch, capsys, hours):
    life = cloud.run("--train_steps=100000", "--config.slow_step=0.05", "--checkpoint_interval=10", *SMALL)
    wait_for(lambda: len(cloud.steps()) > 1, 60)
    for name, value in cloud.environment("reads").items():
        if name != "PYTHONPATH":
            monkeypatch.setenv(name, value)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600 * hours)
    assert status([cloud.url()]) == EXIT_DONE
    assert " running " in capsys.readouterr().out
    life.kill()
    life.code()
    time.sleep(4.0)
    monkeypatch.setattr("looplib.run.status._SILENT_SECONDS", 3.0)
    monkeypatch.setattr("looplib.run.status._SILENT_REPORTS", 0.0)
    assert status([cloud.url()]) == EXIT_DONE
    assert " silent " in (row := capsys.readouterr().out) and re.search(r" [1-9]?\d(\.\d)? s ago", row), row


def test_jobs_are_numbered_in_their_order_whatever_the_clocks_of_their_machines(tmp_path):
    copy = LocalCopy("s3://bucket/run", str(tmp_path / "run"))
    jobs = ["01764360000-aa", "01764360007-bb"]
    made = Outputs(None, copy, None, jobs)._job
    assert made.startswith("01764360008-") and newest([f"evaluations/{one}/x" for one in (*jobs, made)]) == made
    assert Outputs(None, copy, None, ["", "no number"])._job.startswith("00000000001-")

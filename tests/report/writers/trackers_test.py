"""Trackers: each has the metrics of a run that was killed and resumed, and none can fail or delay a training."""

import csv
import http.server
import json
import os
import resource
import shutil
import signal
import threading
import time

import pytest
import tensorflow as tf
import toy

import looplib
from looplib.binary import outcome
from looplib.binary.flag_groups import TrackersFlag
from looplib.cluster.preemption import Preempted
from looplib.report import reporter
from looplib.report.writers import trackers as tracked_ids
from looplib.run.records import read_jsonl


class _KilledError(Exception):
    pass


def kill(event):
    if event.step == 8:
        raise _KilledError


def preempt(event):
    if event.step == 6:
        signal.raise_signal(signal.SIGTERM)


def tracked_by(names, directory):
    return TrackersFlag().writers({"trackers": names, "model_dir": str(directory)})


def train(directory, trackers, actions=(), **config):
    trainer, evaluator = toy.build(tf.distribute.get_strategy())
    policy = looplib.CheckpointPolicy(every_steps=5)
    with toy.controller(
        None, trainer, evaluator, steps_per_loop=2, model_dir=directory, checkpoints=policy,
        writers=[*looplib.DEFAULT_WRITERS, *trackers], actions=actions, config=config,
    ) as controller:  # fmt: skip
        controller.train_and_evaluate(10, 10)


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """The directory of a run that each tracker that is installed has followed, killed at step 8, resumed at step 5."""
    directory = tmp_path_factory.mktemp("tracked") / "run"
    names = ["csv", *(name for name in ("mlflow", "wandb") if reporter.is_installed(name))]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_MODE", "WANDB_PROJECT"):
            patch.delenv(name, raising=False)
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        with pytest.raises(_KilledError):
            train(directory, tracked_by(names, directory), [kill], rate=0.1)
        shutil.copytree(directory.parent, directory.parent.with_name("tracked_failed"))
        train(directory, tracked_by(names, directory), rate=0.2)
    return directory


def expected(directory):
    """{(split/name, step): value} of metrics.jsonl."""
    return {
        (f"{record['split']}/{name}", record["step"]): value
        for record in read_jsonl(str(directory / "metrics.jsonl"))
        for name, value in record.items()
        if name not in ("step", "split")
    }


@pytest.mark.slow
def test_csv_has_each_step_once(tracked):
    found = {}
    for split in ("train", "eval"):
        with open(tracked / "csv" / f"{split}.csv", newline="") as file:
            for row in csv.DictReader(file):
                step = int(row.pop("step"))
                for name, value in row.items():
                    assert (f"{split}/{name}", step) not in found
                    found[f"{split}/{name}", step] = float(value)
    assert found == expected(tracked)


def test_a_table_gets_the_columns_of_later_metrics(tmp_path):
    writer = looplib.CsvWriter(str(tmp_path))
    writer.write(1, "train", {"a": 1.5})
    writer.write(2, "train", {"b": 2})
    writer.write(1, "train", {"a": 3.0})
    (tmp_path / "csv" / "train.csv").open("a").write("3,7")  # cut short by a crash
    looplib.CsvWriter(str(tmp_path)).write(4, "train", {"a": float("nan")})
    assert (tmp_path / "csv" / "train.csv").read_text() == "step,a,b\n2,,2\n1,3.0,\n4,nan,\n"


def failed_after_training(directory):
    """A run whose training was done when its binary failed, as in an export."""
    trainer, _ = toy.build(tf.distribute.get_strategy())
    writers = [*looplib.DEFAULT_WRITERS, looplib.MlflowWriter(str(directory))]
    session = outcome.Session(controller=toy.controller(None, trainer, model_dir=directory, writers=writers))
    session.controller.train(2)
    assert json.loads((directory / "run.json").read_text())["status"] == "done"
    session.close("failed", "the model cannot be exported")
    return directory


def how_mlflow_says_it_ended(client, directory):
    return client.get_run((directory / "mlflow.id").read_text().strip()).info.status


def test_mlflow_continues_its_run_and_says_how_it_ended(tracked, monkeypatch, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(f"file://{tracked.parent / 'mlruns'}")
    (run,) = client.search_runs([client.get_experiment_by_name("looplib").experiment_id])
    assert run.info.run_name == "run" and run.info.status == "FINISHED"
    earlier = mlflow.MlflowClient(f"file://{tracked.parent.with_name('tracked_failed') / 'mlruns'}")
    assert earlier.get_run(run.info.run_id).info.status == "FAILED"
    directory = tmp_path / "preempted"
    with pytest.raises(Preempted):
        train(directory, [looplib.MlflowWriter(str(directory))], [preempt])
    other = mlflow.MlflowClient(f"file://{tmp_path / 'mlruns'}")
    assert how_mlflow_says_it_ended(other, failed_after_training(tmp_path / "exported")) == "FAILED"
    assert how_mlflow_says_it_ended(other, directory) == "KILLED"
    assert run.data.params["config.rate"] == "0.1" and run.data.tags["changed.config.rate"] == "0.2"
    history = [(n, m.step, m.value) for n in run.data.metrics for m in client.get_metric_history(run.info.run_id, n)]
    exact = {key: value for key, value in expected(tracked).items() if not key[0].endswith("per_second")}
    kept = [(name, step, value) for name, step, value in history if not name.endswith("per_second")]
    assert len(kept) == len(exact) and {(name, step): value for name, step, value in kept} == exact


def test_wandb_continues_its_run(tracked):
    pytest.importorskip("wandb")
    (identity,) = (tracked / "wandb.id").read_text().split()
    starts = sorted((tracked / "wandb").glob("offline-run-*"))
    assert len(starts) == 2 and all(start.name.endswith(identity) for start in starts)
    for start in starts:
        (log,) = start.glob("*.wandb")
        content = log.read_bytes()
        assert b"train/loss" in content and b"global_step" in content and b"config.rate" in content


def test_wandb_gets_once_more_what_its_process_had_not_written_at_a_kill(tmp_path):
    pytest.importorskip("wandb")
    records = [{"step": step, "split": "train", "loss": 1 / step} for step in (2, 4, 6)]
    for status in ("running", "preempted"):
        directory = tmp_path / status
        directory.mkdir()
        (directory / "run.json").write_text(json.dumps({"status": status}))
        (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        writer = looplib.WandbWriter(str(directory))
        writer.write(8, "train", {"loss": 1 / 8})
        writer.close()
        (log,) = directory.glob("wandb/offline-run-*/*.wandb")
        until = time.monotonic() + 30
        while b"0.125" not in (logged := log.read_bytes()):  # W&B's own process writes it
            assert time.monotonic() < until
            time.sleep(0.1)
        assert (b"0.16666666666666666" in logged) == (status == "running")


class Raising(looplib.Writer):
    calls = 0

    def write(self, step, split, metrics):
        self.calls += 1
        raise ConnectionError("no such host")


class Hanging(looplib.Writer):
    def __init__(self):
        self.end = threading.Event()

    def write(self, step, split, metrics):
        self.end.wait(60)


@pytest.mark.slow
def test_a_tracker_that_raises_is_left_out_with_one_warning(tmp_path, caplog):
    raising = Raising()
    train(tmp_path / "run", [looplib.BackgroundWriter(raising)])
    assert raising.calls == 1
    warnings = [r.getMessage() for r in caplog.records if "left out from here on" in r.getMessage()]
    assert len(warnings) == 1 and "Raising" in warnings[0] and "no such host" in warnings[0]


@pytest.mark.slow
@pytest.mark.parametrize("most_waiting, reason", [(2, "2 records are waiting"), (100, "did not end within 0.5 s")])
def test_a_tracker_that_hangs_delays_no_training(most_waiting, reason, caplog):
    hanging = Hanging()
    writer = looplib.BackgroundWriter(hanging, most_waiting=most_waiting, patience=0.5)
    started = time.monotonic()
    with toy.controller(None, toy.Regression(), writers=[writer]) as controller:
        controller.train(20)
    assert time.monotonic() - started < 30  # the writer hangs for 60 s
    warnings = [r.getMessage() for r in caplog.records if "left out from here on" in r.getMessage()]
    assert len(warnings) == 1 and reason in warnings[0]
    hanging.end.set()


def test_unknown_and_missing_trackers_are_refused(monkeypatch):
    with pytest.raises(
        looplib.UsageError, match="--trackers has 'aim'; expected names among csv, mlflow, opentelemetry, wandb"
    ):
        TrackersFlag().check({"trackers": ["aim"]})
    monkeypatch.setattr(reporter, "is_installed", lambda name: name == "csv")
    with pytest.raises(looplib.UsageError, match=r"needs the package wandb: pip install 'looplib\[wandb\]'"):
        tracked_by(["csv", "wandb"], "x")


@pytest.mark.slow
def test_writers_are_named_in_the_list_of_writers(tmp_path):
    with toy.controller(None, toy.Regression(), model_dir=tmp_path, writers=["csv", "jsonl"]) as controller:
        controller.train(2)
    assert [row["step"] for row in csv.DictReader((tmp_path / "csv" / "train.csv").open())] == ["1", "2"]
    assert [record["step"] for record in read_jsonl(str(tmp_path / "metrics.jsonl"))] == [1, 2]
    assert not (tmp_path / "train").exists()
    for writers, sentence in ((["aim"], "there is no plug-in 'aim'"), (["csv"], "needs a run directory")):
        with pytest.raises(looplib.UsageError, match=sentence):
            toy.controller(None, toy.Regression(), model_dir=tmp_path if writers == ["aim"] else None, writers=writers)


def test_mlflow_has_each_name_and_each_value_once(monkeypatch, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    directory = tmp_path / "run"
    directory.mkdir()
    reported = {"error<10": 0.25, "error>10": 0.75, "error_10": 0.5, "nothing": float("nan"), "all": float("inf")}
    for _ in range(2):  # the second one resumes, and makes the report again
        writer = looplib.MlflowWriter(str(directory))
        writer.write(4, "eval", reported)
        writer.close()
    client = mlflow.MlflowClient((tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("looplib").experiment_id])
    history = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    assert [len(values) for values in history.values()] == [1] * len(reported)
    assert history["eval/error_10"][0].value == 0.5
    assert sorted(one.value for name, (one,) in history.items() if "error_10-" in name) == [0.25, 0.75]


def test_mlflow_gets_at_the_next_start_what_it_did_not_get_before_a_kill(monkeypatch, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    directory = tmp_path / "run"
    directory.mkdir()
    records = [{"step": step, "split": "train", "loss": 1 / step, "examples": 96} for step in range(1, 11)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    writer = looplib.MlflowWriter(str(directory))
    writer.write(1, "train", {"loss": 1.0})  # and killed
    writer = looplib.MlflowWriter(str(directory))
    writer.resume(8, {"train": 6})  # later records are made again
    writer.write(6, "train", {"examples": 96})
    writer.write(7, "train", {"loss": 7.0})
    writer.close()
    client = mlflow.MlflowClient((tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("looplib").experiment_id])
    found = [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, "train/loss")]
    assert sorted(found) == [*((step, 1 / step) for step in range(1, 7)), (7, 7.0)]
    assert len(client.get_metric_history(run.info.run_id, "train/examples")) == 6


class _InTrouble(http.server.BaseHTTPRequestHandler):
    """A server of MLflow that cannot say anything of a run that it has, and makes others."""

    def do_GET(self):
        run = {"run": {"info": {"run_id": "other", "experiment_id": "1"}, "data": {}}}
        experiment = {"experiment": {"experiment_id": "1", "name": "looplib"}}
        content = json.dumps(run if self.path.endswith("/runs/create") else experiment).encode()
        self.send_response(500 if "/runs/get" in self.path else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *_):
        pass


def test_a_run_that_mlflow_cannot_read_now_is_not_replaced_by_another(monkeypatch, tmp_path):
    exceptions = pytest.importorskip("mlflow.exceptions")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    (tmp_path / "mlflow.id").write_text("one\n")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _InTrouble) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        writer = looplib.MlflowWriter(str(tmp_path), uri=f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(exceptions.MlflowException, match="500|runs/get"):
            writer.write(1, "train", {"loss": 1.0})
        server.shutdown()
    assert (tmp_path / "mlflow.id").read_text() == "one\n"


def test_an_id_that_cannot_be_read_is_not_taken_for_none(tmp_path):
    (tmp_path / "mlflow.id").write_text("one\n")
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as last:
        resource.setrlimit(resource.RLIMIT_NOFILE, (last.fileno(), most[1]))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                tracked_ids.read_id(str(tmp_path), "mlflow")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, most)
    assert tracked_ids.read_id(str(tmp_path), "mlflow") == "one" and tracked_ids.read_id(str(tmp_path), "wandb") is None


def test_a_table_that_somebody_removes_during_a_run_begins_with_its_columns_again(tmp_path):
    writer = looplib.CsvWriter(str(tmp_path))
    writer.write(1, "train", {"loss": 1.0})
    shutil.rmtree(tmp_path / "csv")
    for step in (2, 3):
        writer.write(step, "train", {"loss": float(step)})
    assert (tmp_path / "csv" / "train.csv").read_text() == "step,loss\n2,2.0\n3,3.0\n"


def test_tables_of_evaluators_with_alike_names_are_apart(tmp_path):
    writer = looplib.CsvWriter(str(tmp_path))
    for split in ("held.out", "held_out"):
        writer.write(1, split, {"loss": len(split)})
        writer.write(2, split, {"loss": len(split)})
    names = {path.name: path.read_text().split() for path in (tmp_path / "csv").iterdir()}
    assert names == dict.fromkeys(("held.out.csv", "held_out.csv"), ["step,loss", "1,8", "2,8"])

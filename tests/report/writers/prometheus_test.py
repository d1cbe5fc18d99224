"""`--metrics_port`: Prometheus reads what a run has reported, from a real server, while it trains."""

import socket
import time
import urllib.error
import urllib.request

import pytest
import toy
from conftest import make_strategy

import looplib
from looplib.base.numbers import Progress
from looplib.binary import flag_groups
from looplib.binary.flag_groups import MetricsPortFlag
from looplib.errors import FlagError, PluginError, WriterError
from looplib.run.records import read_jsonl

prometheus = pytest.importorskip("prometheus_client")
parser = pytest.importorskip("prometheus_client.parser")


def scraped(port):
    """Returns the value of each sample: (name, labels without the run) -> value."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    samples = [sample for family in parser.text_string_to_metric_families(text) for sample in family.samples]
    assert {sample.labels["run"] for sample in samples} == {"run"}
    return {(sample.name, sample.labels.get("split"), sample.labels.get("name")): sample.value for sample in samples}


def test_what_is_served_is_what_was_reported_and_the_port_is_free_after_the_run(tmp_path):
    from looplib.report.writers.telemetry import PrometheusWriter

    run, seen = tmp_path / "run", []
    writer = PrometheusWriter(str(run), 0)  # on all addresses, as by default

    def scrape(event):
        if event.split == "train":
            seen.append((event.step, scraped(writer.port)))

    before = time.time()
    trainer = toy.Regression()
    with toy.controller(
        make_strategy("default"), trainer, toy.RegressionEvaluator(trainer.model), model_dir=run, steps_per_loop=2,
        writers=[*looplib.DEFAULT_WRITERS, writer], actions=[scrape],
    ) as controller:  # fmt: skip
        controller.train_and_evaluate(8, eval_interval=4)
    records = {(record["step"], record["split"]): record for record in read_jsonl(str(run / "metrics.jsonl"))}
    assert [step for step, _ in seen] == [2, 4, 6, 8]
    for step, values in seen:
        assert values["looplib_step", None, None] == step and values["looplib_end_step", None, None] == 8
        assert values["looplib_metric", "train", "loss"] == pytest.approx(records[step, "train"]["loss"], rel=1e-6)
        assert before <= values["looplib_last_report_timestamp_seconds", None, None] <= time.time()
    evaluated = seen[2][1]  # after the evaluation of step 4
    of_evaluation = {name: value for (_, split, name), value in evaluated.items() if split == "eval"}
    assert of_evaluation == {
        name: pytest.approx(value, rel=1e-6)
        for name, value in records[4, "eval"].items()
        if name not in ("step", "split")
    }
    with pytest.raises(urllib.error.URLError):
        scraped(writer.port)


@pytest.mark.slow
def test_a_binary_whose_port_is_taken_ends_with_a_sentence(nursery, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        life = nursery.life(
            tmp_path / "run", f"--metrics_port=127.0.0.1:{port}", "--train_steps=2", "--config.state_mb=0.01"
        )
        assert life.code() == 1
    line = life.output().splitlines()[-1]
    assert f"--metrics_port=127.0.0.1:{port} cannot be had" in line and "a port that no other program has" in line


@pytest.mark.parametrize("host", ["nohost.invalid", "x" * 70, "a..b"])
def test_an_unknown_host_is_refused_before_a_run_starts(host):
    with pytest.raises(FlagError, match=f"the host {host}, which is not known here"):
        MetricsPortFlag().check({"metrics_port": f"{host}:9100", "mode": "train"})


def test_the_address_of_another_machine_is_not_called_a_port_that_is_taken(tmp_path):
    from looplib.report.writers.telemetry import PrometheusWriter

    with pytest.raises(WriterError, match="192.0.2.1:9100 cannot be had: .*; name an address of this machine"):
        PrometheusWriter(str(tmp_path), 9100, "192.0.2.1").progress(Progress(step=1))


@pytest.mark.parametrize("text", ["x", "0", "70000", "host:", ":", "a b:80", "9100:host", "-1"])
def test_what_is_no_port_is_refused(text):
    with pytest.raises(FlagError, match="expected PORT or HOST:PORT"):
        MetricsPortFlag().check({"metrics_port": text, "mode": "train"})


def test_a_job_that_does_not_train_and_a_missing_package_are_refused(monkeypatch):
    with pytest.raises(FlagError, match="--mode=eval does not train"):
        MetricsPortFlag().check({"metrics_port": "9100", "mode": "eval"})
    monkeypatch.setattr(flag_groups.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PluginError, match="prometheus-client"):
        MetricsPortFlag().check({"metrics_port": "[::1]:9100", "mode": "train"})
    assert issubclass(WriterError, looplib.UsageError)

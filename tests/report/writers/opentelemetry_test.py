"""`--trackers=opentelemetry`: a collector of OTLP gets the phases of a run as spans, and its metrics; it ends none."""

import contextlib
import http.server
import json
import socket
import threading
import time

import numpy as np
import pytest
import tensorflow as tf
import toy
from conftest import make_strategy

import looplib
from looplib.errors import PluginError, WriterError
from looplib.report import clock, reporter
from looplib.report.writers import telemetry
from looplib.run.records import read_jsonl

pytest.importorskip("opentelemetry.sdk.trace")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2  # noqa: E402
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2  # noqa: E402

MESSAGES = {
    "/v1/traces": trace_service_pb2.ExportTraceServiceRequest,
    "/v1/metrics": metrics_service_pb2.ExportMetricsServiceRequest,
}


class Collector:
    """A collector of OTLP on loopback.

    Attributes:
      spans: those that came.
      gauges: the newest value of each point, by the name and the attributes split and name.
      resources: the attributes of each message.
      misbehave: called with the handler in place of an answer.
    """

    def __init__(self):
        self.spans, self.gauges, self.resources, self.misbehave = [], {}, [], None
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                message = MESSAGES[self.path].FromString(self.rfile.read(int(self.headers["Content-Length"])))
                if collector.misbehave:
                    return collector.misbehave(self)
                collector.take(message)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def take(self, message):
        for group in getattr(message, "resource_spans", ()):
            self.resources.append(texts(group.resource.attributes))
            self.spans += [span for scope in group.scope_spans for span in scope.spans]
        for group in getattr(message, "resource_metrics", ()):
            self.resources.append(texts(group.resource.attributes))
            for metric in (metric for scope in group.scope_metrics for metric in scope.metrics):
                for point in metric.gauge.data_points:
                    value = getattr(point, point.WhichOneof("value"))
                    of = texts(point.attributes)
                    self.gauges[metric.name, of.get("split"), of.get("name")] = value

    def named(self, name):
        """The (begin, end) of the spans of a name, in seconds since 1970, in order."""
        return sorted((s.start_time_unix_nano / 1e9, s.end_time_unix_nano / 1e9) for s in self.spans if s.name == name)

    def close(self):
        self._server.shutdown()
        self._server.server_close()


def texts(attributes):
    return {each.key: str(getattr(each.value, each.value.WhichOneof("value"))) for each in attributes}


@pytest.fixture
def collector(monkeypatch):
    with contextlib.closing(Collector()) as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.address)
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=blue")
        yield collector


_times = []  # of the steps of evaluations


def note_step():
    _times.append(time.time())
    time.sleep(0.02)


class SlowEvaluator(toy.RegressionEvaluator):
    """Notes when each step begins."""

    def step_fn(self, inputs):
        tf.py_function(note_step, [], [])
        return super().step_fn(inputs)


def train(run, steps=8, actions=()):
    trainer = toy.Regression()
    evaluator = SlowEvaluator(trainer.model)
    _times.clear()
    with toy.controller(
        make_strategy("default"), trainer, evaluator, model_dir=run, steps_per_loop=2, actions=actions,
        writers=[*looplib.DEFAULT_WRITERS, "opentelemetry"],
    ) as controller:  # fmt: skip
        controller.train_and_evaluate(steps, eval_interval=4)
        return [np.asarray(value) for value in trainer.model.get_weights()], controller.clock.seconds()


def test_a_collector_gets_each_phase_with_its_times_and_the_newest_metrics(collector, monkeypatch, tmp_path):
    monkeypatch.setattr(telemetry, "_LOOP_SECONDS", 1e9)  # so that evaluations alone end a loop
    monkeypatch.setattr(telemetry, "_LONGEST_LOOP", 1e9)
    saves, before = [], time.time()

    class Saves(looplib.Action):
        def on_save(self, path, controller):
            saves.append(path)

    _, seconds = train(tmp_path / "run", actions=[Saves()])
    after = time.time()
    (root,) = (span for span in collector.spans if span.name == "training")
    assert texts(root.attributes) == {"looplib.status": "done", "looplib.step": "8"} and not root.parent_span_id
    others = [span for span in collector.spans if span is not root]
    assert {span.name for span in others} == {"compile", "loop", "save", "evaluate"}
    for span in others:
        assert span.trace_id == root.trace_id and span.parent_span_id == root.span_id
        assert before - 0.01 <= root.start_time_unix_nano / 1e9 <= span.start_time_unix_nano / 1e9
        assert span.start_time_unix_nano <= span.end_time_unix_nano <= root.end_time_unix_nano <= (after + 0.01) * 1e9
    evaluations, loops = collector.named("evaluate"), collector.named("loop")
    assert len(evaluations) == len(loops) == 2 and len(_times) == 10
    for (begin, end), steps, (_, trained) in zip(evaluations, (_times[:5], _times[5:]), loops):
        assert trained <= begin <= steps[0] + 0.01 and end >= steps[-1] + 0.01
    evaluated = sum(end - begin for begin, end in evaluations)  # with what is compiled in them
    assert seconds["evaluate"] - 0.05 <= evaluated <= seconds["evaluate"] + seconds["compile"] + 0.05
    assert len(collector.named("save")) >= len(set(saves)) == 2
    last = {record["split"]: record for record in read_jsonl(str(tmp_path / "run" / "metrics.jsonl"))}
    gauges = {key[1:]: value for key, value in collector.gauges.items() if key[0] == "looplib.metric"}
    assert gauges == {
        (split, name): value for split, record in last.items() for name, value in record.items()
        if name not in ("step", "split")
    }  # fmt: skip
    assert collector.gauges["looplib.step", None, None] == collector.gauges["looplib.end_step", None, None] == 8
    for resource in collector.resources:
        assert (resource["service.name"], resource["looplib.run"], resource["team"]) == ("looplib", "run", "blue")
    assert clock.observers == []


def hang(handler):
    time.sleep(60)


def cut(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    handler.wfile.write(b"x")
    handler.close_connection = True


def refuse(handler):
    handler.send_error(400)


def overloaded(handler):
    handler.send_error(503)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("misbehave", [cut, refuse, overloaded, hang, None])
@pytest.mark.slow
def test_a_collector_that_is_down_slow_or_broken_changes_nothing_of_a_training(
    misbehave, collector, monkeypatch, tmp_path, caplog
):
    for name, value in {"OTEL_BSP_SCHEDULE_DELAY": "10", "OTEL_METRIC_EXPORT_INTERVAL": "10"}.items():
        monkeypatch.setenv(name, value)  # so that sending goes on all the time
    monkeypatch.setattr(telemetry, "_PATIENCE", 0.3)
    collector.misbehave = misbehave
    with socket.socket() as nobody:
        if misbehave is None:
            nobody.bind(("127.0.0.1", 0))  # and does not listen
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        weights, _ = train(tmp_path / "run")
    assert len(weights) and [record["step"] for record in read_jsonl(str(tmp_path / "run" / "metrics.jsonl"))][-1] == 8
    lines = [record for record in caplog.records if record.name.startswith("opentelemetry.exporter")]
    assert len(lines) <= 2, [line.getMessage() for line in lines]  # one of spans, one of metrics
    assert lines or misbehave in (hang, cut)


@pytest.mark.slow
def test_a_binary_sends_from_the_start_of_its_process_and_says_how_it_ended(nursery, collector, tmp_path):
    pytest.importorskip("opentelemetry.sdk")
    run, environment = tmp_path / "run", {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.address, "OTEL_SERVICE_NAME": "mine"}
    flags = ("--config.state_mb=0.01", "--train_steps=40", "--steps_per_loop=5", "--checkpoint_interval=20")
    life = nursery.life(run, *flags, "--trackers=opentelemetry", environment=environment)
    assert life.code() == 0, life.output()
    (begin, end), ((root, _),) = collector.named("start")[0], collector.named("training")
    seconds = json.loads((run / "run.json").read_text())["seconds"]
    assert begin == pytest.approx(root, abs=1e-6) and end - begin >= seconds["start"] - 0.1
    assert {"start", "compile", "loop", "save", "evaluate"} <= {span.name for span in collector.spans}
    assert {resource["service.name"] for resource in collector.resources} == {"mine"}
    collector.spans.clear()
    life = nursery.life(run, *flags, "--train_steps=100000", "--trackers=opentelemetry", environment=environment)
    while not (run / "run.json").read_text().count('"running"'):
        assert not life.ended(0.05)
    life.kill(15)
    assert life.code() == 75, life.output()
    (span,) = (span for span in collector.spans if span.name == "training")
    assert texts(span.attributes)["looplib.status"] == "preempted" and collector.named("restore")


def test_a_variable_that_cannot_be_used_is_refused(monkeypatch):
    for name, value in {"OTEL_METRIC_EXPORT_INTERVAL": "0", "OTEL_BSP_MAX_QUEUE_SIZE": "-1"}.items():
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            with pytest.raises(WriterError, match="OpenTelemetry refuses an environment variable: .*OTEL_"):
                reporter.named("opentelemetry")("/nowhere")
    assert clock.observers == []


def test_without_its_packages_the_writer_says_what_to_install(monkeypatch):
    monkeypatch.setattr(reporter, "is_installed", lambda package: package != "opentelemetry.sdk")
    with pytest.raises(PluginError, match=r"pip install 'looplib\[opentelemetry\]'"):
        reporter.named("opentelemetry")("/nowhere")

"""The metrics of a run for OpenTelemetry and for Prometheus."""

import collections
import dataclasses
import errno
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from looplib.base.messages import gist
from looplib.base.numbers import Progress
from looplib.errors import WriterError
from looplib.report import clock
from looplib.report.writers.contract import Setting, Writer
from looplib.report.writers.trackers import how_it_ended, name_of

if TYPE_CHECKING:
    from opentelemetry import metrics, trace
if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    import prometheus_client

_LOOP_SECONDS, _LONGEST_LOOP = 1.0, 10.0  # of training in a span "loop", if nothing else ends it
_MOST_WAITING = 100  # phases before a training
_PATIENCE = 5.0  # seconds that the end of a run waits for the collector
_NAMES = {"train": "loop"}  # of spans, by phase
_ONE_BY_ONE = ("compile", "save", "restore")  # phases whose calls are a span each
_LOGGERS = tuple(f"opentelemetry.exporter.otlp.proto.http.{kind}_exporter" for kind in ("trace", "metric"))


class _FirstLines(logging.Filter):
    """Lets one line of each logger through: exporters say for each batch that the collector does not take it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether a record is the first of its logger."""
        is_first = record.name not in self.seen
        self.seen.add(record.name)
        return is_first


_first_lines = _FirstLines()


@dataclasses.dataclass
class _Stretch:
    """Calls of one phase that follow each other, and become one span; times by `time.perf_counter`."""

    phase: str
    began: float
    ended: float
    calls: int = 1


class OpenTelemetryWriter(Writer):
    """Sends metrics as gauges, and the phases of the run as spans, by OTLP over HTTP, in threads of the SDK.

    Each training is a trace: its root `training` has the spans `start`, `compile`, `restore`, `loop`, `save` and
    `evaluate`. Each is what `Clock` has measured, with its own begin and end. A `loop` has several calls of the device:
    it ends with a save, an evaluation, or a report after a second of training. A `save` is the time that the training
    stood still. Spans have the attribute `looplib.step`, the step that was known when they ended.

    The environment variables of OpenTelemetry have the address (`OTEL_EXPORTER_OTLP_ENDPOINT`, by default
    http://localhost:4318), headers, time limits and attributes. What a collector does not take is dropped.

    Args:
      directory: the run directory.

    Raises:
      UsageError: if one of the variables has a value that cannot be used.
    """

    def __init__(self, directory: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._directory, self._step = directory, 0
        # Wall time less `time.perf_counter`, as the clock has it.
        self._offset = time.time() - time.perf_counter()
        _first_lines.seen.clear()
        for name in _LOGGERS:
            logging.getLogger(name).addFilter(_first_lines)
        own = {"service.name": "looplib", "looplib.run": name_of(directory), "host.name": socket.gethostname(),
               "process.pid": os.getpid()}  # fmt: skip
        resource = Resource.create(own).merge(OTELResourceDetector().detect())  # the environment counts more
        self._spans = TracerProvider(resource=resource, shutdown_on_exit=False)  # the process ends without a wait
        try:
            self._spans.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
            reader = PeriodicExportingMetricReader(OTLPMetricExporter())
        except ValueError as error:
            raise WriterError(
                f"OpenTelemetry refuses an environment variable: {gist(error)}; see those that begin with OTEL_"
            ) from error
        self._tracer = self._spans.get_tracer("looplib")
        self._gauges_of = MeterProvider([reader], resource, shutdown_on_exit=False)
        meter = self._gauges_of.get_meter("looplib")
        self._metric: metrics.Gauge = meter.create_gauge("looplib.metric", description="The newest value of a metric.")
        self._of_progress: dict[str, metrics.Gauge] = {
            "step": meter.create_gauge("looplib.step", description="The global step."),
            "end": meter.create_gauge("looplib.end_step", description="The step to train to."),
            "rate": meter.create_gauge("looplib.steps_per_second", description="Steps per second of training."),
            "left": meter.create_gauge("looplib.seconds_left", "s", "Seconds until the end."),
            "waiting": meter.create_gauge("looplib.input_wait_ratio", description="Share of time waiting for input."),
        }
        self._root: trace.Span | None = None  # of a training
        self._early: collections.deque[_Stretch] = collections.deque(maxlen=_MOST_WAITING)
        self._stretch: _Stretch | None = None  # may not have ended
        self._clock: clock.Clock | None = None  # of this run: the first whose phase ends
        self._is_closed = False
        clock.observers.append(self._observe)

    def settings(self, settings: Mapping[str, Setting]) -> None:
        """Begins a trace, as a training begins; the settings are not sent."""
        now = time.perf_counter()
        early = [*self._early]
        self._early.clear()
        if early and self._clock is not None and self._clock.of_process:  # time counts from the start of the process
            early.insert(0, _Stretch("start", now - self._clock.seconds()["wall"], early[0].began))
        began = early[0].began if early else now
        self._root = self._tracer.start_span("training", start_time=self._nanoseconds(began))
        for stretch in early:
            self._send(stretch)

    def write(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
        """Takes metrics."""
        for name, value in metrics.items():
            if math.isfinite(value):  # the SDK takes no others
                self._metric.set(value, {"split": split, "name": name})

    def progress(self, progress: Progress | None) -> None:
        """Takes where the training stands; ends the trace with the training."""
        if progress is None:
            self._end()
            return
        self._step = progress.step
        values = {"step": progress.step, "end": progress.end, "rate": progress.rate, "left": progress.left,
                  "waiting": progress.waiting}  # fmt: skip
        for name, value in values.items():
            if value is not None:
                self._of_progress[name].set(value)

    def close(self) -> None:
        """Sends what waits, for a few seconds at most, and ends the threads."""
        if self._is_closed:
            return
        self._is_closed = True
        clock.observers.remove(self._observe)
        self._end()
        # Daemons, because a process must be able to end while a collector hangs.
        threads = [
            threading.Thread(target=provider.shutdown, daemon=True) for provider in (self._spans, self._gauges_of)
        ]
        for thread in threads:
            thread.start()
        until = time.monotonic() + _PATIENCE
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        if not any(thread.is_alive() for thread in threads):  # else they may have more to say
            for name in _LOGGERS:
                logging.getLogger(name).removeFilter(_first_lines)

    def _observe(self, of: clock.Clock, phase: str, began: float, ended: float) -> None:
        """Takes a phase of a clock."""
        self._clock = self._clock or of
        if of is not self._clock:
            return
        now = self._stretch
        if phase == "report":
            if now and now.phase == "train" and now.ended - now.began >= _LOOP_SECONDS:
                self._close_stretch()
        elif phase in _ONE_BY_ONE:
            if phase == "save":
                self._close_stretch()
            self._take(_Stretch(phase, began, ended))
        elif now and now.phase == phase and ended - now.began <= _LONGEST_LOOP:
            now.ended, now.calls = ended, now.calls + 1
        else:
            self._close_stretch()
            self._stretch = _Stretch(phase, began, ended)

    def _close_stretch(self) -> None:
        stretch, self._stretch = self._stretch, None
        if stretch:
            self._take(stretch)

    def _take(self, stretch: _Stretch) -> None:
        if self._root is None:
            self._early.append(stretch)
        else:
            self._send(stretch)

    def _send(self, stretch: _Stretch) -> None:
        from opentelemetry import trace

        attributes = {"looplib.step": self._step, "looplib.calls": stretch.calls}
        name, within = _NAMES.get(stretch.phase, stretch.phase), trace.set_span_in_context(self._root)
        span = self._tracer.start_span(name, within, start_time=self._nanoseconds(stretch.began), attributes=attributes)
        span.end(self._nanoseconds(stretch.ended))

    def _end(self) -> None:
        """Ends the trace, if there is one."""
        from opentelemetry import trace

        self._close_stretch()
        if self._root is None:
            return
        status = how_it_ended(self._directory)
        self._root.set_attributes({"looplib.status": status, "looplib.step": self._step})
        if status == "failed":
            self._root.set_status(trace.Status(trace.StatusCode.ERROR))
        self._root.end()
        self._root = None

    def _nanoseconds(self, seconds: float) -> int:
        """Returns a time since 1970 from one by `time.perf_counter`."""
        return int((seconds + self._offset) * 1e9)


ALL_ADDRESSES = "0.0.0.0"  # not "", of which getaddrinfo knows nothing


class PrometheusWriter(Writer):
    """Serves what is reported at `http://HOST:PORT/metrics`, in a thread, from the start of a training to its close.

    Gauges, each with the label `run`, the name of the run directory: `looplib_metric` with the labels `split` and
    `name`; `looplib_step`, `looplib_end_step`, `looplib_steps_per_second`, `looplib_seconds_left`,
    `looplib_input_wait_ratio`, `looplib_evaluating`; and `looplib_last_report_timestamp_seconds`. What is not known
    is NaN.

    Args:
      directory: the run directory.
      port: of the server; 0 for a free one.
      host: the address that it has; default "0.0.0.0", all of this machine's (of IPv4).

    Raises:
      UsageError: when a training starts, if the port cannot be had, or the address is not of this machine.

    Attributes:
      port: the port, once it is served.
    """

    def __init__(self, directory: str, port: int, host: str = ALL_ADDRESSES) -> None:
        import prometheus_client

        self.port, self._host = port, host
        self._run = os.path.basename(os.path.abspath(directory))
        self._registry = prometheus_client.CollectorRegistry()
        self._metric = self._gauge("metric", "The newest value of a metric.", "split", "name")
        self._reported = self._gauge("last_report_timestamp_seconds", "When a metric was reported last.")
        self._of_progress = {
            "step": self._gauge("step", "The global step."),
            "end": self._gauge("end_step", "The step to train to."),
            "rate": self._gauge("steps_per_second", "Steps per second of training, of about the last minute."),
            "left": self._gauge("seconds_left", "Seconds until the end, with evaluations and saves."),
            "waiting": self._gauge("input_wait_ratio", "Share of the training time spent waiting for input."),
            "evaluating": self._gauge("evaluating", "Whether an evaluation is under way."),
        }
        self._server: WSGIServer | None = None
        self._thread: threading.Thread | None = None

    def _gauge(self, name: str, text: str, *labels: str) -> "prometheus_client.Gauge":
        import prometheus_client

        return prometheus_client.Gauge(f"looplib_{name}", text, ("run", *labels), registry=self._registry)

    def write(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
        """Takes metrics."""
        for name, value in metrics.items():
            self._metric.labels(self._run, split, name).set(value)
        self._reported.labels(self._run).set(time.time())

    def progress(self, progress: Progress | None) -> None:
        """Takes where the training stands; serves from the first call on."""
        if progress is None:
            return
        self._serve()
        for name, gauge in self._of_progress.items():
            value = {"step": progress.step, "end": progress.end, "rate": progress.rate, "left": progress.left,
                     "waiting": progress.waiting, "evaluating": progress.evaluating}[name]  # fmt: skip
            gauge.labels(self._run).set(math.nan if value is None else value)

    def close(self) -> None:
        """Ends the server."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None

    def _serve(self) -> None:
        import prometheus_client

        if self._server is not None:
            return
        try:
            self._server, self._thread = prometheus_client.start_http_server(self.port, self._host, self._registry)
        except OSError as error:
            is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
            cure = "a port that no other program has" if is_port else "an address of this machine, or the port alone"
            raise WriterError(
                f"--metrics_port={self._host}:{self.port} cannot be had: {gist(error)}; name {cure}"
            ) from error
        self.port = self._server.server_port

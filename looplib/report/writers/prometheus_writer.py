"""PrometheusWriter: the newest metrics of a training, served to Prometheus by HTTP."""

import errno
import math
import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from looplib.base.messages import gist
from looplib.base.numbers import Progress
from looplib.errors import WriterError
from looplib.report.writers.contract import Writer

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    import prometheus_client

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

"""MlflowWriter: the metrics of a run in MLflow."""

import hashlib
import math
import os
import pathlib
import re
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Mapping
from typing import TYPE_CHECKING

from looplib.base import files
from looplib.report.writers import tracked
from looplib.report.writers.contract import Setting, Writer
from looplib.report.writers.shown import Histogram, Images, Shown
from looplib.run.newest import read_newest

if TYPE_CHECKING:
    import mlflow

TRACKER = "mlflow"
_MOST_LOST = 1 << 22  # bytes of metrics.jsonl that a start compares with what MLflow has
_MOST_AT_ONCE = 1000  # metrics, of MLflow's interface
_ABSENT = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE", "INVALID_STATE")  # the run, or it was deleted
_ENDS = {"failed": "FAILED", "preempted": "KILLED"}


class MlflowWriter(Writer):
    """Metrics as `<split>/<name>`, settings as parameters, media as artifacts.

    The run is named after its directory, which keeps its id. A run that resumes continues it, and what it logs a second
    time is left out; a setting that has changed becomes a tag, because MLflow changes no parameter. A start logs what
    earlier ones have reported and MLflow did not get, as before a kill.

    Args:
      directory: the run directory.
      uri: where MLflow keeps its runs; default the environment variable MLFLOW_TRACKING_URI, or else the folder
        `mlruns` beside the run directory.
      experiment: default the environment variable MLFLOW_EXPERIMENT_NAME, or else "looplib".
    """

    def __init__(self, directory: str, uri: str | None = None, experiment: str | None = None) -> None:
        self._directory = directory
        self._uri = uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "looplib"
        self._client: mlflow.MlflowClient | None = None
        self._run = ""
        self._logged: set[tuple[str, int, str]] = set()

    def settings(self, settings: Mapping[str, Setting]) -> None:
        """Logs parameters."""
        from mlflow.entities import Param, RunTag

        known = self._open().get_run(self._run).data.params
        texts = {_key(name): str(value) for name, value in settings.items()}
        new = [Param(name, value) for name, value in texts.items() if name not in known]
        changed = [RunTag(f"changed.{name}", value) for name, value in texts.items() if known.get(name, value) != value]
        self._client.log_batch(self._run, params=new, tags=changed)

    def write(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
        """Logs metrics."""
        self._open()
        values = {_key(f"{split}/{name}"): float(value) for name, value in metrics.items()}
        self._log({(n, step): v for n, v in values.items() if (n, step, _kept(v)) not in self._logged})

    def resume(self, step: int, reported: dict[str, int]) -> None:
        """Logs what MLflow lacks of the newest records that hold."""
        self._open()
        has, lacks = {(name, at) for name, at, _ in self._logged}, {}
        for record in read_newest(os.path.join(self._directory, "metrics.jsonl"), _MOST_LOST):
            at, split = record.pop("step"), record.pop("split")
            values = {
                _key(f"{split}/{name}"): math.nan if value is None else float(value) for name, value in record.items()
            }
            if at <= reported.get(split, step):
                lacks.update({(name, at): value for name, value in values.items() if (name, at) not in has})
        self._log(lacks)

    def _log(self, values: Mapping[tuple[str, int], float]) -> None:
        """Logs values by their names and steps."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for (name, step), value in values.items()]
        for start in range(0, len(metrics), _MOST_AT_ONCE):
            self._client.log_batch(self._run, metrics=metrics[start : start + _MOST_AT_ONCE])
        self._logged |= {(name, step, _kept(value)) for (name, step), value in values.items()}

    def show(self, step: int, split: str, shown: Mapping[str, Shown]) -> None:
        """Logs artifacts: PNG files, and texts and histograms as JSON."""
        client = self._open()
        for name, each in shown.items():
            place = f"{_key(split)}/{_key(name, of_file=True)}/{step:08}"
            if isinstance(each, Images):
                for number, png in enumerate(each.files):
                    _log_bytes(client, self._run, png, place, f"{number}.png")
            elif isinstance(each, Histogram):
                content = {"edges": list(each.edges), "counts": list(each.counts)}
                client.log_dict(self._run, content, f"{place}.json")
            else:
                client.log_dict(self._run, {"texts": list(each.texts)}, f"{place}.json")

    def close(self) -> None:
        """Marks the run as finished, failed, or killed if it was preempted."""
        if self._client is not None:
            self._client.set_terminated(self._run, _ENDS.get(tracked.how_it_ended(self._directory), "FINISHED"))

    def _open(self) -> "mlflow.MlflowClient":
        """Starts or continues the run, at the first call."""
        if self._client is not None:
            return self._client
        client = open_client(self._directory, self._uri)
        run = tracked.read_id(self._directory, TRACKER)
        if run is None or not self._continue(client, run):
            found = client.get_experiment_by_name(self._experiment)
            experiment = found.experiment_id if found else client.create_experiment(self._experiment)
            run = client.create_run(experiment, run_name=tracked.name_of(self._directory)).info.run_id
            tracked.keep_id(self._directory, TRACKER, run)
        self._client, self._run = client, run
        return client

    def _continue(self, client: "mlflow.MlflowClient", run: str) -> bool:
        """Continues a run; returns False if MLflow does not have it, as in a directory that was copied."""
        from mlflow.exceptions import MlflowException

        try:
            names = client.get_run(run).data.metrics
            client.update_run(run, "RUNNING")
        except MlflowException as error:  # of a server in trouble, say, which may have the run
            if error.error_code not in _ABSENT:
                raise
            return False
        self._logged = {(n, m.step, _kept(m.value)) for n in names for m in client.get_metric_history(run, n)}
        return True


def open_client(directory: str, uri: str | None) -> "mlflow.MlflowClient":
    """Returns a client of MLflow.

    Args:
      directory: the run directory.
      uri: where MLflow keeps its runs; default files beside the run directory.
    """
    uri = uri or pathlib.Path(directory).absolute().with_name("mlruns").as_uri()
    if urllib.parse.urlsplit(uri).scheme in ("", "file"):
        # Files, which MLflow wants to be asked for: a run needs no database, and many may write at a time.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    return mlflow.MlflowClient(_without_password(uri))


def _log_bytes(client: "mlflow.MlflowClient", run: str, content: bytes, folder: str, name: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        path = os.path.join(place, name)
        files.write_whole(path, content, durable=False)
        client.log_artifact(run, path, folder)


def _without_password(uri: str) -> str:
    """Returns an address without its name and password, which MLflow would print, and passes these on otherwise."""
    name, at, host = urllib.parse.urlsplit(uri).netloc.rpartition("@")
    if at and uri.startswith(("http://", "https://")):
        user, _, password = name.partition(":")
        os.environ.setdefault("MLFLOW_TRACKING_USERNAME", urllib.parse.unquote(user))
        os.environ.setdefault("MLFLOW_TRACKING_PASSWORD", urllib.parse.unquote(password))
        uri = uri.replace(f"{name}@{host}", host, 1)
    return uri


def _kept(value: float) -> str:
    """Returns a text by which values are compared: NaN equals nothing, and a database cuts infinity off."""
    return repr(min(max(value, -sys.float_info.max), sys.float_info.max)) if value == value else "nan"


def _key(name: str, of_file: bool = False) -> str:
    """Returns a name that MLflow takes, with a digest of a name that it does not, so that each has another one."""
    clean = re.sub(r"[^A-Za-z0-9_\-. ]" if of_file else r"[^A-Za-z0-9_\-. /]", "_", name)
    return clean if clean == name else f"{clean}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"

"""Trackers: the metrics of a run in MLflow and in Weights & Biases."""

import contextlib
import hashlib
import io
import math
import os
import pathlib
import re
import secrets
import sys
import tempfile
import time
import urllib.parse
import uuid
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from absl import logging

from looplib.base import files, folders
from looplib.base.messages import gist
from looplib.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED
from looplib.report.writers.contract import Histogram, Images, Setting, Shown, Writer
from looplib.run.directory import RunDir

if TYPE_CHECKING:
    import mlflow
if TYPE_CHECKING:
    import wandb


def read_id(directory: str, tracker: str) -> str | None:
    """Returns the id of the tracked run; None if there is none, or the file is damaged.

    Args:
      directory: the run directory.
      tracker: the tracker's name.

    Raises:
      OSError: if the file cannot be read, which does not mean that there is none.
    """
    try:
        text = files.read_text(_path(directory, tracker), most=100).strip()
    except (FileNotFoundError, ValueError):
        return None
    return text if re.fullmatch(r"[A-Za-z0-9_-]+", text) else None


def keep_id(directory: str, tracker: str, value: str) -> None:
    """Keeps the id of the tracked run."""
    files.write_whole(_path(directory, tracker), value + "\n")


def how_it_ended(directory: str) -> str:
    """Returns the `status` that `run.json` has: "done", "failed" or "preempted"; "running" if it was killed."""
    report = RunDir(directory).report()
    return report.status if report else ""


def name_of(directory: str) -> str:
    """Returns the name of a run, which its directory has."""
    return os.path.basename(os.path.normpath(directory))


def _path(directory: str, tracker: str) -> str:
    return os.path.join(directory, f"{tracker}.id")


TRACKER = "mlflow"
_MOST_LOST_OF_MLFLOW = 1 << 22  # bytes of metrics.jsonl that a start compares with what MLflow has
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
        for record in RunDir(self._directory).records().tail(_MOST_LOST_OF_MLFLOW):
            at, split = record.step, record.split
            values = {
                _key(f"{split}/{name}"): math.nan if value is None else value for name, value in record.numbers.items()
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
            self._client.set_terminated(self._run, _ENDS.get(how_it_ended(self._directory), "FINISHED"))

    def _open(self) -> "mlflow.MlflowClient":
        """Starts or continues the run, at the first call."""
        if self._client is not None:
            return self._client
        client = open_client(self._directory, self._uri)
        run = read_id(self._directory, TRACKER)
        if run is None or not self._continue(client, run):
            found = client.get_experiment_by_name(self._experiment)
            experiment = found.experiment_id if found else client.create_experiment(self._experiment)
            run = client.create_run(experiment, run_name=name_of(self._directory)).info.run_id
            keep_id(self._directory, TRACKER, run)
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


_ADDRESS = "MLFLOW_TRACKING_URI"
VARIABLE = "MLFLOW_REGISTERED_MODEL"  # of the environment: the name in the registry; none registers nothing


def register(directory: str, export: str, step: int) -> None:
    """Copies an export into the tracked run of its training, and registers it as a new version of the model.

    Each version has a folder of its own, as two exports of a step may have other weights and files. What fails is a
    warning, because the export itself is complete.

    Args:
      directory: the run directory, which has the id of the tracked run.
      export: the directory of the export.
      step: the global step.
    """
    name = os.environ.get(VARIABLE)
    if not name:
        return
    try:
        run = read_id(directory, TRACKER)
        if run is None:
            logging.warning(
                "%s is not registered in MLflow as %s: the training was not tracked; train with --trackers=mlflow",
                export, name,
            )  # fmt: skip
            return
        client, place = open_client(directory, os.environ.get(_ADDRESS)), f"export/step-{step}-{secrets.token_hex(4)}"
        with _everywhere(client.tracking_uri):
            client.log_artifacts(run, export, place)
            if not client.search_registered_models(f"name = '{name}'"):
                client.create_registered_model(name)
            source = f"{client.get_run(run).info.artifact_uri}/{place}"
            version = client.create_model_version(name, source, run, tags={"step": str(step)})
        logging.info("registered %s in MLflow as version %s of %s", export, version.version, name)
    except Exception as error:  # of a library and a server that are somebody else's
        logging.warning("%s is not registered in MLflow as %s: %s", export, name, gist(error))


@contextlib.contextmanager
def _everywhere(uri: str) -> Iterator[None]:
    """Makes an address the default meanwhile: MLflow's registry of files asks that too, and would make a database."""
    before = os.environ.get(_ADDRESS)
    os.environ[_ADDRESS] = uri
    try:
        yield
    finally:
        del os.environ[_ADDRESS]
        if before is not None:
            os.environ[_ADDRESS] = before


_TRACKER = "wandb"
_MOST_LOST_OF_WANDB = 1 << 15  # bytes of metrics.jsonl, which are more than W&B's process keeps back before it writes
# Seconds that W&B may wait for its server at the start and the end, of the process too, unless a WANDB_... says others.
_BOUNDS: dict[str, float | bool] = {"init_timeout": 20.0, "finish_timeout": 20.0, "finish_timeout_raises": True}
_CODES = {"failed": EXIT_FAILED, "preempted": EXIT_PREEMPTED}


class WandbWriter(Writer):
    """Metrics as `<split>/<name>` over `global_step`, settings as the configuration, media as such.

    The newest metrics of a run that was killed are logged once more when it resumes, because W&B's process, which dies
    with it, had not written them.

    Offline, unless the environment variable WANDB_MODE says otherwise: files in `wandb/` of the run directory, which
    `wandb sync` uploads. The run is named after its directory, which keeps its id, so that a run that resumes continues
    it.

    Args:
      directory: the run directory.
      project: default the environment variable WANDB_PROJECT, or else "looplib".
    """

    def __init__(self, directory: str, project: str | None = None) -> None:
        self._directory = directory
        self._project = project or os.environ.get("WANDB_PROJECT") or "looplib"
        self._run: wandb.Run | None = None
        killed = how_it_ended(directory) == "running"
        self._lost = RunDir(directory).records().tail(_MOST_LOST_OF_WANDB) if killed else []

    def settings(self, settings: Mapping[str, Setting]) -> None:
        """Sets the configuration."""
        self._open().config.update(dict(settings), allow_val_change=True)

    def write(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
        """Logs metrics."""
        self._log(step, split, metrics)

    def show(self, step: int, split: str, shown: Mapping[str, Shown]) -> None:
        """Logs images, histograms, and texts as a table."""
        self._log(step, split, {name: _as_media(each) for name, each in shown.items()})

    def close(self) -> None:
        """Finishes the run, with the exit code of a binary that ended in the same way."""
        if self._run is not None:
            self._run.finish(_CODES.get(how_it_ended(self._directory), EXIT_DONE))

    def _log(self, step: int, split: str, values: Mapping[str, Any]) -> None:
        # Not as W&B's own step, which may not go back, as after a rollback.
        self._open().log({"global_step": step, **{f"{split}/{name}": value for name, value in values.items()}})

    def _open(self) -> "wandb.Run":
        """Starts or continues the run, at the first call."""
        if self._run is None:
            import wandb

            folders.make_folder(self._directory, "wandb")  # where W&B would follow a link
            run = read_id(self._directory, _TRACKER)
            if run is None:
                run = uuid.uuid4().hex[:8]
                keep_id(self._directory, _TRACKER, run)
            self._run = wandb.init(
                project=self._project,
                name=name_of(self._directory),
                id=run,
                resume="allow",
                mode=os.environ.get("WANDB_MODE", "offline"),
                dir=self._directory,
                settings=wandb.Settings(console="off", silent=True, **_bounds(wandb.Settings)),
            )
            self._run.define_metric("*", step_metric="global_step")
            for record in self._lost:
                self._log(record.step, record.split, record.values)
        return self._run


def _bounds(settings: Any) -> dict[str, float | bool]:
    """Returns the bounds that this version of W&B knows and the user does not set."""
    known = getattr(settings, "model_fields", {})
    return {
        name: seconds
        for name, seconds in _BOUNDS.items()
        if name in known and f"WANDB_{name.upper()}" not in os.environ
    }


def _as_media(shown: Shown) -> Any:
    import wandb

    if isinstance(shown, Images):
        from PIL import Image

        return [wandb.Image(Image.open(io.BytesIO(png))) for png in shown.files]
    if isinstance(shown, Histogram):
        return wandb.Histogram(np_histogram=(list(shown.counts), list(shown.edges)))
    return wandb.Table(columns=["text"], data=[[text] for text in shown.texts])

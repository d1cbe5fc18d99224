"""WandbWriter: the metrics of a run in Weights & Biases."""

import io
import os
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from looplib.base import folders
from looplib.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED
from looplib.report.writers import tracked
from looplib.report.writers.contract import Setting, Writer
from looplib.report.writers.shown import Histogram, Images, Shown
from looplib.run.newest import read_newest

if TYPE_CHECKING:
    import wandb

_TRACKER = "wandb"
_MOST_LOST = 1 << 15  # bytes of metrics.jsonl, which are more than W&B's process keeps back before it writes
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
        killed = tracked.how_it_ended(directory) == "running"
        self._lost = read_newest(os.path.join(directory, "metrics.jsonl"), _MOST_LOST) if killed else []

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
            self._run.finish(_CODES.get(tracked.how_it_ended(self._directory), EXIT_DONE))

    def _log(self, step: int, split: str, values: Mapping[str, Any]) -> None:
        # Not as W&B's own step, which may not go back, as after a rollback.
        self._open().log({"global_step": step, **{f"{split}/{name}": value for name, value in values.items()}})

    def _open(self) -> "wandb.Run":
        """Starts or continues the run, at the first call."""
        if self._run is None:
            import wandb

            folders.make_folder(self._directory, "wandb")  # where W&B would follow a link
            run = tracked.read_id(self._directory, _TRACKER)
            if run is None:
                run = uuid.uuid4().hex[:8]
                tracked.keep_id(self._directory, _TRACKER, run)
            self._run = wandb.init(
                project=self._project,
                name=tracked.name_of(self._directory),
                id=run,
                resume="allow",
                mode=os.environ.get("WANDB_MODE", "offline"),
                dir=self._directory,
                settings=wandb.Settings(console="off", silent=True, **_bounds(wandb.Settings)),
            )
            self._run.define_metric("*", step_metric="global_step")
            for record in self._lost:
                metrics = {name: value for name, value in record.items() if name not in ("step", "split")}
                self._log(record["step"], record["split"], metrics)
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

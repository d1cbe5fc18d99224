"""ExportEvery: versions of the model for a server while it trains, past a gate that keeps worse ones away."""

import contextlib
import dataclasses
import datetime
import functools
import math
import os
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from absl import logging

from looplib.actions.plateau import check_known, check_reported, number
from looplib.base import files, orders
from looplib.base.messages import duration, gist, whole_number, with_cure
from looplib.cluster.collectives import Workers
from looplib.compat.row_updates import is_divided
from looplib.config.formats import SAVED_MODEL
from looplib.errors import ActionError, ExportError, FileError, MetricError, StoreError
from looplib.exports.exports import check_exportable, is_own, sample, to_export
from looplib.exports.new_folder import check_free
from looplib.exports.parts import SIGNATURE, Parts
from looplib.exports.samples import ModelInputs
from looplib.exports.versions import REJECTED_FOLDER, VERSION, VersionRecord, versions_in
from looplib.exports.warm_up import MOST_EXAMPLES, write_requests
from looplib.loop.loops import Loops, loops_of
from looplib.loop.task_loop import check_evaluation
from looplib.run.metric_names import Mode, gain, mode_of
from looplib.run.report import REJECTED, RunWarning
from looplib.task.actions import Action, Event
from looplib.task.state import state_of, state_of_model, unheld, values_kept, variables_of
from looplib.task.trainer import Exported
from looplib.weights.loading import take_all


@dataclasses.dataclass(frozen=True)
class ExportGate:
    """What a model has to fulfil before `ExportEvery` publishes it.

    The evaluator runs with the weights that are exported, and then with those of the version that is served, on the
    same data. All metrics have to be finite, and no output may be NaN.

    Attributes:
      metric: evaluator and metric, such as "eval/accuracy". The evaluator has to use the model that is exported.
      worse_by: by how much the metric may be worse than that of the version that is served; default 0.
      mode: "max" or "min", which of two values is better; default None is for the names that `KeepBest` knows.
      tolerance: the largest difference of the SavedModel's outputs from those of the model here, for random inputs.
      steps: of an evaluation; default -1 for all data.

    Raises:
      UsageError: for bad input.
    """

    metric: str
    worse_by: float = 0.0
    mode: Mode | None = None
    tolerance: float = 1e-3
    steps: int = -1

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", mode_of("ExportGate", self.metric, self.mode))
        number("ExportGate.worse_by", self.worse_by)
        number("ExportGate.tolerance", self.tolerance)
        whole_number("ExportGate.steps", self.steps, or_all=True)
        if self.metric.startswith("train/"):
            raise MetricError(f"ExportGate got the metric {self.metric!r}; expected one of an evaluator")

    def reason_against(
        self, metrics: Mapping[str, float], served: Mapping[str, float] | None = None, version: int = 0
    ) -> str:
        """Returns why a model with some metrics is not published, where a version has others; "" for nothing."""
        split, _, name = self.metric.partition("/")
        check_known("ExportGate", self.metric, metrics)
        if bad := [f"{split}/{one} is {value}" for one, value in metrics.items() if not math.isfinite(value)]:
            return bad[0]
        if served is None or gain(metrics[name], served.get(name), self.mode) >= -self.worse_by:
            return ""
        worse = f"{self.metric} is {metrics[name]:.6g}, which is worse by more than {self.worse_by:g}"
        return f"{worse}: version {version} has {served[name]:.6g} on the same data"

    def reason_against_outputs(self, parts: Parts) -> str:
        """Returns why a SavedModel is not published; "" for nothing."""
        if not parts.is_number:
            return "an output of the model is NaN"
        far = parts.differences[SAVED_MODEL]
        return "" if far <= self.tolerance else f"the SavedModel differs by {far:.3g} from the model here"


class ExportEvery(Action):
    """Publishes the model as `<base>/<version>/` again and again, in the layout of TensorFlow Serving.

    A version is a SavedModel with requests to warm it up. It appears as a whole, and is larger than all before, also
    over restarts and rollbacks. An export comes with a report, so that it is at a multiple of `steps_per_loop`. Where
    several workers train, the chief decides for all.

    Args:
      every: steps, or a time such as "10m" (see `RunConfig.max_time`), from one export to the next.
      base: a local folder or the URL of one in an object store; for one run, which a file in it names.
      keep: how many versions to keep, the newest, and how many that were rejected.
      gate: an `ExportGate`; a model that fails it is kept in `<base>/rejected/`, and the training continues. Default
        None publishes all.
      name: distinguishes it from another one, which needs another base; default "".

    Raises:
      UsageError: for bad input.

    Example:
        ```python
        gate = looplib.ExportGate("eval/accuracy", worse_by=0.01)
        looplib.Controller(..., actions=[looplib.ExportEvery("10m", "/models/ctr", gate=gate)])
        ```
    """

    def __init__(
        self, every: int | str | datetime.timedelta, base: str | os.PathLike[str], keep: int = 3,
        gate: ExportGate | None = None, name: str = "",
    ) -> None:  # fmt: skip
        timed = isinstance(every, (str, datetime.timedelta))
        self._seconds = duration("ExportEvery.every", every) if timed else None
        self._steps = None if timed else whole_number("ExportEvery.every", every)
        self._keep, self.name = whole_number("ExportEvery.keep", keep), name
        if not isinstance(gate, ExportGate | None):
            raise ActionError(f"the gate of ExportEvery is {gate!r:.100}; expected a looplib.ExportGate")
        self._gate = gate
        self._last = 0  # the step of the last export
        self._next = 0.0  # not before this time comes the next one, by a clock that nobody sets
        self._samples: ModelInputs | str | None = None  # a text says why there are none
        self._versions = versions_in(base)
        self.writes = True

    def on_start(self, controller: Any) -> None:
        """Checks that the model can be exported and evaluated, and that the base is not another run's.

        Raises:
          UsageError: if not.
        """
        self.writes = self.writes and not orders.current().until  # steps that are repeated write nothing elsewhere
        check_exportable(controller.loops)
        if self._gate:
            self._check_gate(_loops(controller))
        self._next = time.monotonic() + (self._seconds or 0.0)
        if not files.is_remote(self._versions.base):
            check_free(self._versions.base, controller.model_dir, "export", controller.loops)
        if self.writes and controller.is_chief:
            self._versions.claim("ExportEvery", controller, VERSION, self.name)
            if newest := self._versions.note().time:
                self._next -= max(0.0, time.time() - newest)

    def _check_gate(self, loops: Loops) -> None:
        """Refuses a gate of a metric that no evaluator has, or of one that does not evaluate what is exported."""
        check_reported("ExportGate", self._gate.metric, loops.evaluations)
        split = self._gate.metric.partition("/")[0]
        check_evaluation({split: loops.evaluations[split]}, self._gate.steps)
        task, (_, by, exported) = loops.evaluations[split].task, to_export(loops)
        variables = _variables(exported)
        if any(map(is_divided, variables)):
            raise ActionError("ExportGate cannot evaluate a served table of which each worker holds a part")
        others = task.averages is not None and task.averages is not exported.averages
        if others or unheld(loops.strategy, variables, state_of(task)):
            raise ActionError(
                f"{split} evaluates other weights than {type(by).__name__} exports; give ExportGate a metric "
                "of an evaluator of these, or let export return the model and the averages that it evaluates"
            )

    def __call__(self, event: Event) -> None:
        """Exports, if it is time."""
        if event.split != "train" or not self.writes:
            return
        controller, began = event.controller, time.monotonic()
        due = self._steps is None or event.step // self._steps > self._last // self._steps  # alike on all workers
        if due and controller.gather(began >= self._next)[0]:  # the chief's
            if controller.gather(self._export(controller, _loops(controller), event.step))[0]:
                self._last, self._next = event.step, began + (self._seconds or 0.0)
            else:  # such as while a store is down: the training goes on for as long as this took
                self._next = 2 * time.monotonic() - began

    def _export(self, controller: Any, loops: Loops, step: int) -> bool:
        """Exports and publishes, or keeps aside; returns False if a signal or a store that is down has ended this."""
        split, task, exported = to_export(loops)
        if self._samples is None:
            self._samples = sample(loops, split, task, exported, MOST_EXAMPLES)
            if isinstance(self._samples, str):
                logging.warning("versions have no requests that warm up a server: %s", self._samples)
        with exported.averages.in_use() if exported.averages else contextlib.nullcontext():
            judged = self._judged(controller, loops, exported, is_own(task)) if self._gate else ({}, "")
            if judged is None:
                return False
            parts, (metrics, reason), version = Parts(exported, is_own(task), None), judged, 0
            try:  # where several workers train, all read the variables
                with tempfile.TemporaryDirectory(prefix="looplib-export-") as place:
                    path = parts.write_saved_model(place)
                    if controller.is_chief:
                        reason = reason or (self._gate.reason_against_outputs(parts) if self._gate else "")
                        if not isinstance(self._samples, str):
                            write_requests(path, self._samples, SIGNATURE)
                        version = self._versions.add(path, VersionRecord(step, metrics, reason), self._keep)
            except (StoreError, FileError) as error:
                _tell(controller, str(error))
            except (OSError, tf.errors.OpError) as error:
                raise ExportError(f"no version can be written to {self._versions.base}: {with_cure(error)}") from error
        if version and reason:
            _tell(controller, reason, f", and is in {REJECTED_FOLDER}{version}")
        elif version:
            logging.info("step %d is version %d of %s", step, version, self._versions.base)
        return bool(version)

    def _judged(
        self, controller: Any, loops: Loops, exported: Exported, own: bool
    ) -> tuple[Mapping[str, float], str] | None:
        """Returns the metrics of the model, and why it is not to be published; None as `_export` returns False."""
        evaluate = functools.partial(loops.evaluate, self._gate.metric.partition("/")[0], self._gate.steps)
        if (metrics := evaluate()) is None:
            return None
        if reason := self._gate.reason_against(metrics):
            return metrics, reason
        workers, parts_of = Workers(loops.strategy), loops.strategy.experimental_local_results
        copies, version = [parts_of(variable) for variable in _variables(exported)], 0
        with values_kept([part for parts in copies for part in parts]):
            if workers.is_chief:
                version, reason = self._served(exported, own)
            if (version := workers.agree(version)) < 0:
                return _tell(controller, reason)
            if not version or workers.any_of(bool(reason)):
                return metrics, reason
            for parts, value in zip(copies, workers.gather_tensors([[parts[0].read_value() for parts in copies]])[0]):
                for part in parts:
                    part.assign(value)  # the chief's
            served = evaluate()
        return served and (metrics, self._gate.reason_against(metrics, served, version))

    def _served(self, exported: Exported, own: bool) -> tuple[int, str]:
        """Gives the model the weights of the served version; returns it, and why there is nothing to compare with.

        The version is 0 if there is none, and -1 if it cannot be had now.
        """
        try:
            version = max(self._versions.whole(), default=0)
            error = self._taken(version, exported, own) if version else ""
            if error and version not in self._versions.whole():
                return -1, f"version {version} was removed while it was compared with"
        except StoreError as found:
            return -1, str(found)
        return version, error and (
            f"version {version}, which is served, cannot be compared with ({error}); if it is damaged, publish "
            f"an older one by python -m looplib publish {self._versions.base} VERSION"
        )

    def _taken(self, version: int, exported: Exported, own: bool) -> str:
        """Gives the model the weights of a version; returns why it is not that version then, "" if it is."""
        try:
            with self._versions.fetched(str(version)) as path:
                take_all(exported.model, path)
                far = Parts(exported, own, None).compare(path)
        except StoreError:
            raise
        except (ValueError, IndexError, OSError, tf.errors.OpError) as found:
            return gist(found)
        return "" if far <= self._gate.tolerance else f"with its weights, this one differs by {far:.3g}"

    def state(self) -> int:
        """See `Action`."""
        return self._last

    def load(self, state: int) -> None:
        """See `Action`."""
        self._last = whole_number("the step of the last export", state, least=0)


def _loops(controller: Any) -> Loops:
    return loops_of(controller.loops["train"].task)


def _variables(exported: Exported) -> list[tf.Variable]:
    return [variable for _, variable in variables_of(state_of_model(exported.model))]


def _tell(controller: Any, why: str, kept: str = "") -> None:
    """Logs, on the chief, why a model is not served, for alerts and the page too."""
    if controller.is_chief:
        step, text = controller.global_step, f"an export is not served{kept}: {why}"
        controller.report.note(RunWarning(step, REJECTED, ["ExportEvery"], step, text))
        logging.warning("step %d: %s", step, text)

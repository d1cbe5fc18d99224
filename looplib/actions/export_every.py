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
from looplib.base import orders
from looplib.base.messages import duration, gist, whole_number, with_cure
from looplib.cluster.collectives import Workers
from looplib.compat.row_updates import is_divided
from looplib.config.formats import SAVED_MODEL
from looplib.errors import ActionError, ExportError, FileError, MetricError, StoreError
from looplib.exports.exports import check_exportable, is_own, sample, to_export
from looplib.exports.parts import SIGNATURE, Parts
from looplib.exports.samples import ModelInputs
from looplib.exports.versions import REJECTED_FOLDER, VERSION, VersionRecord, versions_in
from looplib.exports.warm_up import MOST_EXAMPLES, write_requests
from looplib.loop.loops import Loops, loops_of
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
      name: distinguishes it from another one; default "".

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
        self._began = 0.0  # when that was, by a clock that nobody sets
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
        self._began = time.monotonic()
        if self.writes and controller.is_chief:
            self._versions.claim("ExportEvery", controller, VERSION)
            if newest := self._versions.note().time:
                self._began -= max(0.0, time.time() - newest)

    def _check_gate(self, loops: Loops) -> None:
        """Refuses a gate of a metric that no evaluator has, or of one that does not evaluate what is exported."""
        check_reported("ExportGate", self._gate.metric, loops.evaluations)
        split = self._gate.metric.partition("/")[0]
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
        controller, now = event.controller, time.monotonic()
        if self._seconds is None:
            due = event.step // self._steps > self._last // self._steps
        else:
            due = controller.gather(now - self._began >= self._seconds)[0]  # the chief's
        if due and self._export(controller, _loops(controller), event.step):
            self._last, self._began = event.step, now

    def _export(self, controller: Any, loops: Loops, step: int) -> bool:
        """Exports and publishes, or keeps aside; returns False if a signal has ended an evaluation."""
        split, task, exported = to_export(loops)
        if self._samples is None:
            self._samples = sample(loops, split, task, exported, MOST_EXAMPLES)
            if isinstance(self._samples, str):
                logging.warning("versions have no requests that warm up a server: %s", self._samples)
        with exported.averages.in_use() if exported.averages else contextlib.nullcontext():
            judged = self._judged(loops, exported, is_own(task)) if self._gate else ({}, "")
            if judged is None:
                return False
            parts, (metrics, reason) = Parts(exported, is_own(task), None), judged
            try:  # where several workers train, all read the variables
                with tempfile.TemporaryDirectory(prefix="looplib-export-") as place:
                    path = parts.write_saved_model(place)
                    if controller.is_chief:
                        reason = reason or (self._gate.reason_against_outputs(parts) if self._gate else "")
                        if not isinstance(self._samples, str):
                            write_requests(path, self._samples, SIGNATURE)
                        self._add(controller, path, VersionRecord(step, metrics, reason))
            except (OSError, tf.errors.OpError) as error:
                raise ExportError(f"no version can be written to {self._versions.base}: {with_cure(error)}") from error
        return True

    def _add(self, controller: Any, path: str, record: VersionRecord) -> None:
        try:
            version, why = self._versions.add(path, record, self._keep), record.reason
        except (StoreError, FileError, FileExistsError) as error:  # such as a store that is down; tried again
            version, why = None, str(error)
        if why:
            kept = f", and is in {REJECTED_FOLDER}{version}" if version else ""
            text = f"an export is not served{kept}: {why}"
            controller.report.note(RunWarning(record.step, REJECTED, ["ExportEvery"], record.step, text))
            logging.warning("step %d: %s", record.step, text)
        else:
            logging.info("step %d is version %d of %s", record.step, version, self._versions.base)

    def _judged(self, loops: Loops, exported: Exported, own: bool) -> tuple[Mapping[str, float], str] | None:
        """Returns the metrics of the model, and why it is not to be published; None if a signal has ended this."""
        evaluate = functools.partial(loops.evaluate, self._gate.metric.partition("/")[0], self._gate.steps)
        if (metrics := evaluate()) is None:
            return None
        if reason := self._gate.reason_against(metrics):
            return metrics, reason
        workers, parts_of = Workers(loops.strategy), loops.strategy.experimental_local_results
        copies, version, error = [parts_of(variable) for variable in _variables(exported)], 0, ""
        with values_kept([part for parts in copies for part in parts]):
            if workers.is_chief:
                try:
                    if version := max(self._versions.whole(), default=0):
                        with self._versions.fetched(str(version)) as path:
                            take_all(exported.model, path)
                            far = Parts(exported, own, None).compare(path)
                        if far > self._gate.tolerance:
                            error = f"with its weights, this one differs by {far:.3g}"
                except (ValueError, IndexError, OSError, tf.errors.OpError) as found:
                    error = gist(found)
            if workers.any_of(bool(error)):
                return metrics, (
                    f"version {version}, which is served, cannot be compared with ({error}); if it is damaged, publish "
                    f"an older one by python -m looplib publish {self._versions.base} VERSION"
                )
            if not (version := workers.agree(version)):
                return metrics, ""
            for parts, value in zip(copies, workers.gather_tensors([[parts[0].read_value() for parts in copies]])[0]):
                for part in parts:
                    part.assign(value)  # the chief's
            served = evaluate()
        return served and (metrics, self._gate.reason_against(metrics, served, version))

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

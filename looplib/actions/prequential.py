"""Prequential: an action that evaluates each example of a training before the step that trains on it."""

import dataclasses
import datetime
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from looplib.base.decoding import decode
from looplib.base.messages import duration, join_names, whole_number
from looplib.cluster import runtime
from looplib.cluster.collectives import Workers
from looplib.compat import keras as _keras
from looplib.compat import tensorflow as _tf
from looplib.compat.tensorflow import converted
from looplib.errors import ActionError, MetricError, StepError
from looplib.loop.contracts import Metrics, StepAddition
from looplib.loop.packing import Packer
from looplib.loop.step import StepFn
from looplib.loop.task_loop import as_numbers
from looplib.task.actions import Action
from looplib.task.reductions import INPUTS, Reduction, total
from looplib.task.trainer import Evaluator, OwnLoop, Trainer

_PREFIX = "prequential/"
_NEVER = 2**62  # steps of a window that ends by time


@dataclasses.dataclass
class _Window:
    """The window that is open, as a checkpoint has it.

    Attributes:
      of: what the sums are of, and in which order.
      sums: over the steps up to the last report, in the window.
      step: of the last report.
      began: when the window began, in seconds since the epoch.
      first: the means of inputs in the first window of the run.
    """

    of: str = ""
    sums: list[float] = dataclasses.field(default_factory=list)
    step: int = 0
    began: float = dataclasses.field(default_factory=time.time)
    first: dict[str, float] = dataclasses.field(default_factory=dict)


class Prequential(Action, StepAddition):
    """Evaluates a training on its own examples, each of them before the step that trains on it.

    In a training that sees each example once, this is an evaluation on unseen data (Dawid, 1984; Gama et al., 2013,
    prequential evaluation). Before each step, every replica calls the `step_fn` of an evaluator on its batch, with the
    weights from before the step. The metrics of a complete window are reported as those of the training, under names
    such as "prequential/auc", by the first report after its end. "prequential/examples" is the number of its examples.
    They are exact on any number of replicas and workers, and after a resume. The training computes the same weights as
    without this action.

    A window of examples ends after as many global batches as hold them, counted from step 0. A step that is undone
    (`non_finite="skip"`) adds nothing. A window by time ends with the first report after it; the time counts while the
    run is down. The chief decides for all workers.

    Metrics whose names begin with "inputs/", such as those of `looplib.input_means`, are reported beside their values in
    the first window of the run, which have "_at_start" in their names.

    Args:
      evaluator: `Evaluator` of the trainer's model, called with the batches of the trainer; its `dataset` is not used.
        Its `step_fn` returns values per example, `looplib.mean`, `looplib.total` or metrics of Keras; `loop_end`
        finishes them. It has to call the model with `training=False`.
      window: number of examples; or a time, as a text such as "1h" or a `datetime.timedelta`.

    Raises:
      UsageError: for bad input; when the step is traced, for an evaluator that updates variables or returns a
        `looplib.last` or `looplib.each`; when a training starts, for a window that is shorter than `steps_per_loop`, or
        a trainer with its own loop.

    Example:
        ```python
        class Clicks(looplib.Evaluator):
            def __init__(self, model):
                super().__init__(model)
                self.auc = keras.metrics.AUC()

            def dataset(self, context):
                raise NotImplementedError  # of the training alone

            def step_fn(self, inputs):
                features, clicks = inputs
                self.auc.update_state(clicks, self.model(features, training=False))
                return {"auc": self.auc, **looplib.input_means(features)}

        looplib.Controller(..., actions=[looplib.Prequential(Clicks(trainer.model), window=100_000)])
        ```
    """

    def __init__(self, evaluator: Evaluator, window: int | str | datetime.timedelta) -> None:
        who = type(evaluator).__name__
        if not isinstance(evaluator, Evaluator) or isinstance(evaluator, OwnLoop):
            raise ActionError(f"Prequential got {who}; expected an instance of a looplib.Evaluator subclass")
        if evaluator.averages is not None or type(evaluator).evaluating is not Evaluator.evaluating:
            raise ActionError(
                f"{who} changes variables for an evaluation (its averages, or its method evaluating), and a step that "
                "predicts cannot; give Prequential an Evaluator that has neither, with a step_fn of its own"
            )
        by_time = isinstance(window, (str, datetime.timedelta))
        self._seconds = duration("window of Prequential", window) if by_time else None
        self._examples = None if by_time else whole_number("window of Prequential", window)
        self._evaluator, self._open = evaluator, _Window()
        self._steps, self._key = _NEVER, ""
        self._packer: Packer | None = None
        self._metrics: dict[str, Any] = {}  # of Keras, by name
        self._trainer: Any = None
        self._strategy: Any = None
        self._controller: Any = None

    @property
    def scratch(self) -> Sequence[tf.Variable]:
        """See `StepAddition`."""
        return [_keras.tf_variable(one) for metric in self._metrics.values() for one in metric.variables]

    def on_start(self, controller: Any) -> None:
        """Refuses a training whose steps cannot have it."""
        self._controller = controller
        if self._trainer is None:
            raise ActionError("Prequential needs steps of looplib's loop, and this trainer has its own; leave it out")
        if self._steps < controller.steps_per_loop:
            raise ActionError(
                f"the window of Prequential is {self._examples} examples, {self._steps} steps, and a report comes every "
                f"{controller.steps_per_loop}; expected a longer window, or a lower steps_per_loop (--steps_per_loop)"
            )
        for metric in self._metrics.values():
            metric.reset_state()

    def add_to_step(self, step_fn: StepFn, task: Trainer) -> StepFn:
        """See `StepAddition`."""
        self._trainer, self._packer = task, Packer(f"{type(self._evaluator).__name__}.step_fn", True, False)
        if self._examples is not None and task.global_batch_size is None:
            raise ActionError("the trainer has no global batch size; give Prequential a window by time, such as '1h'")
        self._steps = -(-self._examples // task.global_batch_size) if self._examples is not None else _NEVER

        @tf.autograph.experimental.do_not_convert
        def predicts_first(inputs: Any) -> Any:
            found = self._predicted(tf.nest.map_structure(lambda leaf: leaf, inputs))
            outputs = step_fn(inputs)
            if not isinstance(outputs, Mapping):
                return outputs
            if own := [name for name in outputs if str(name).startswith(_PREFIX)]:
                raise MetricError(
                    f"{type(task).__name__}.step_fn returned {own[0]!r}, a name of Prequential; rename it"
                )
            return {**outputs, **found}

        return predicts_first

    def _predicted(self, inputs: Any) -> dict[str, Any]:
        """Evaluates a batch of a replica; returns the sums for its window, and what is shown."""
        strategy, who = tf.distribute.get_strategy(), type(self._evaluator).__name__
        if runtime.is_remote(strategy):
            raise ActionError("Prequential needs steps that follow each other, and on parameter servers they do not")
        begun = _tf.traced_ops()
        outputs = dict(converted(self._evaluator.step_fn)(inputs))
        metrics = {name: outputs.pop(name) for name, one in [*outputs.items()] if _keras.is_metric(one)}
        for name, metric in metrics.items():
            if self._metrics.get(name) is not metric:  # an eager step comes here each time
                self._check(f"the metric {name!r} of {who}.step_fn", metric)
            outputs |= {_part(name, one): total(_keras.tf_variable(one).read_value()) for one in metric.variables}
        self._strategy, self._metrics = strategy, metrics
        if names := _tf.changed_since(begun, but=self.scratch):
            raise StepError(
                f"{who}.step_fn changes {join_names(names)}, and Prequential calls it before each step of the training; "
                "call the model with training=False, and return the metrics that are updated"
            )
        for metric in metrics.values():
            metric.reset_state()
        vector, shown = self._packer.pack(outputs, inputs)
        if any(self._packer.replaced()) or any(isinstance(one, Reduction) for one in shown.values()):
            raise MetricError(
                f"{who}.step_fn returned a looplib.last or looplib.each, which no window sums; leave it out"
            )
        self._key = f"{_PREFIX}{zlib.crc32(repr(self._packer.slots).encode()):08x}"
        place = tf.one_hot(self._trainer.global_step // self._steps % 2, 2, dtype=tf.float64)[:, None]
        return {
            self._key: total(tf.math.multiply_no_nan(vector, place)),
            **{_PREFIX + n: one for n, one in shown.items()},
        }

    def _check(self, who: str, metric: Any) -> None:
        """Raises `UsageError` for a metric of Keras whose sums are not those of a window alone."""
        runtime.check_placement(tf.distribute.get_strategy(), who, metric.variables)
        if not all(map(_keras.is_own_class, _keras.inner_metrics(metric))):
            raise MetricError(
                f"{who} is a {type(metric).__name__}, of which it is not known whether it is a sum over examples; return "
                "its sums as looplib.total, and finish them in loop_end"
            )
        if any(one is metric for one in _keras.parts(vars(self._trainer))):
            raise MetricError(f"{who} is one of the trainer's too, which counts it after its step; make another")

    def take(self, metrics: Metrics) -> Metrics:
        """See `StepAddition`."""
        if self._key not in metrics:
            return {}
        parts, opened, step = np.asarray(metrics.pop(self._key)), self._open, int(self._trainer.global_step)
        before, last = opened.step // self._steps, (step - 1) // self._steps
        sums, rest = parts.sum(axis=0), np.zeros(len(parts[0]))
        if last == before + 1:  # the window ends within the steps of this report
            sums, rest = parts[before % 2], parts[last % 2]
        if opened.of == self._key:
            sums = sums + opened.sums
        elif opened.of:
            logging.warning(
                "Prequential begins a new window at this start: its evaluator returned other metrics before"
            )
        self._open = opened = _Window(self._key, sums.tolist(), step, opened.began, opened.first)
        over = self._seconds is not None and time.time() - opened.began >= self._seconds
        over = bool(self._controller.gather(over)[0]) if self._seconds is not None else step // self._steps > before
        if not over:
            return {}
        found = self._finished(sums)
        watched = {name: value for name, value in found.items() if name.startswith(INPUTS)}
        first = {**watched, **opened.first}
        self._open = _Window(self._key, rest.tolist(), step, first=first)
        found |= {f"{name}_at_start": first[name] for name in watched}
        return {_PREFIX + name: value for name, value in found.items()}

    def _finished(self, sums: np.ndarray) -> dict[str, int | float]:
        """Returns the metrics of a window from its sums."""
        values, results = self._packer.unpack(sums, {}), {}
        for name, metric in self._metrics.items():
            for one in metric.variables:
                value, copies = (
                    values.pop(_part(name, one)),
                    self._strategy.experimental_local_results(_keras.tf_variable(one)),
                )
                if Workers(self._strategy).is_chief:  # all other copies are zeros
                    copies[0].assign(tf.cast(value, copies[0].dtype))
            results[name] = tf.nest.map_structure(_keras.value_now, converted(metric.result)())
            metric.reset_state()
        whole = self._packer.unpack(sums, results)
        found = {name: value for name, value in whole.items() if name in values or name not in self._packer.names}
        return as_numbers(type(self._evaluator).__name__, self._evaluator.loop_end(found))

    def state(self) -> dict[str, Any]:
        """See `Action`."""
        return dataclasses.asdict(self._open)

    def load(self, state: Any) -> None:
        """See `Action`."""
        self._open = decode(_Window, state, strict=True)


def _part(name: str, variable: Any) -> str:
    """Returns the name of a sum that a metric of Keras keeps."""
    return f"{name}/{variable.name.removesuffix(':0')}"

"""Prequential: an action that evaluates each example of a training before the step that trains on it."""

import dataclasses
import time
import zlib
from collections.abc import Sequence
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
from looplib.errors import ActionError, MetricError, StepError
from looplib.loop.contracts import Metrics, StepAddition
from looplib.loop.packing import Packer
from looplib.loop.step import StepFn
from looplib.loop.task_loop import as_numbers
from looplib.task.actions import Action
from looplib.task.reductions import INPUTS, total
from looplib.task.state import state_of, variables_of
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

    A window of examples ends after as many global batches as hold them, counted from step 0; the first one of a run
    that gets the action later has the rest of its window. A step that is undone (`non_finite="skip"`) adds nothing. A
    window by time ends with the first report after it; the time counts while the run is down. The chief decides for all
    workers.

    Metrics whose names begin with "inputs/", such as those of `looplib.input_means`, are reported beside their values
    in the first window of the run, whose names end in "_at_start".

    Args:
      evaluator: `Evaluator` of the trainer's model, called with the batches of the trainer; its `dataset` is not used.
        Its `step_fn` returns values per example, `looplib.mean`, `looplib.total` or metrics of Keras; `loop_end`
        finishes them. It has to call the model with `training=False`.
      window: number of examples; or a time, as a text such as "1h".

    Raises:
      UsageError: for bad input; when the step is traced, for an evaluator that updates variables, draws random numbers
        or returns a `looplib.last` or `looplib.each`; when a training starts, for a window shorter than
        `steps_per_loop`, on parameter servers, and for a trainer with its own loop.

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

    def __init__(self, evaluator: Evaluator, window: int | str) -> None:
        plain = isinstance(evaluator, Evaluator) and not isinstance(evaluator, OwnLoop) and evaluator.averages is None
        if not plain or type(evaluator).evaluating is not Evaluator.evaluating:
            raise ActionError(
                f"Prequential got {type(evaluator).__name__}; expected a looplib.Evaluator that steps can call: with a "
                "step_fn of its own, and without averages or an evaluating of its own, which exchange variables"
            )
        by_time = isinstance(window, str)
        self._seconds = duration("window of Prequential", window) if by_time else None
        self._examples = None if by_time else whole_number("window of Prequential", window)
        self._evaluator, self._who, self._open = evaluator, f"{type(evaluator).__name__}.step_fn", _Window()
        self._packer: Any = None
        self._trainer = self._strategy = self._controller = self._packer
        self._steps, self._key = _NEVER, ""
        self._metrics: dict[str, Any] = {}  # of Keras, by name

    @property
    def scratch(self) -> Sequence[tf.Variable]:
        """See `StepAddition`."""
        return [_keras.tf_variable(one) for metric in self._metrics.values() for one in metric.variables]

    def on_start(self, controller: Any) -> None:
        """Refuses a training whose steps cannot have it."""
        self._controller = controller
        if self._trainer is None or (self._strategy is not None and runtime.is_remote(self._strategy)):
            raise ActionError("Prequential works neither on parameter servers nor for a trainer that has its own loop")
        if self._steps < (least := controller.steps_per_loop):
            raise ActionError(
                f"the window of Prequential is {self._examples} examples, {self._steps} steps, and a report comes "
                f"every {least}; expected a longer window, or a lower steps_per_loop (--steps_per_loop)"
            )

    def add_to_step(self, step_fn: StepFn, task: Trainer) -> StepFn:
        """See `StepAddition`."""
        self._trainer, self._packer = task, Packer(self._who, True, False)
        self._steps = -(-self._examples // task.global_batch_size) if self._examples else _NEVER

        @tf.autograph.experimental.do_not_convert
        def predicts_first(inputs: Any) -> Any:
            found = self._predicted(tf.nest.map_structure(lambda leaf: leaf, inputs))
            outputs = step_fn(inputs)
            return {**outputs, self._key: total(found)} if isinstance(outputs, dict) else outputs

        return predicts_first

    def _predicted(self, inputs: Any) -> tf.Tensor:
        """Evaluates a batch of a replica; returns the sums for its window, float64 `[2, n]`: of even ones, of odd."""
        if tf.executing_eagerly() and self._packer.slots is None:  # only a trace tells what it changes
            tf.function(self._predicted, autograph=False).get_concrete_function(inputs)
        self._strategy, graph = tf.distribute.get_strategy(), tf.compat.v1.get_default_graph()
        begun = len(graph.get_operations())
        outputs = dict(_tf.converted(self._evaluator.step_fn)(inputs))
        self._metrics = {name: outputs.pop(name) for name, one in [*outputs.items()] if _keras.is_metric(one)}
        for name, metric in self._metrics.items():
            who = f"the metric {name!r} of {self._who}"
            runtime.check_placement(self._strategy, who, metric.variables)
            if not all(map(_keras.is_own_class, _keras.inner_metrics(metric))):
                raise MetricError(f"{who} may be no sum over examples; expected a metric of Keras, or looplib.total")
            outputs |= {f"{name}/{one.name}": total(_keras.value_now(one)) for one in metric.variables}
            metric.reset_state()
        if names := sorted({*_tf.changed_since(begun, self._unchanged)}):
            raise StepError(
                f"{self._who}, which Prequential calls before each step, changes {join_names(names)}, of the trainer "
                "or in no checkpoint; call the model with training=False, and return metrics of the evaluator's own"
            )
        if drawn := _tf.RANDOM_OPS.intersection(op.type for op in graph.get_operations()[begun:]):
            raise StepError(
                f"{self._who} draws random numbers ({join_names(sorted(drawn))}), which would change those of the "
                "training; call the model with training=False, or use tf.random.stateless_*"
            )
        vector, others = self._packer.pack(outputs, inputs)
        if others or self._packer.keeps_last:
            raise MetricError(f"{self._who} returned media, a looplib.last or a looplib.each, which no window sums")
        self._key = f"{_PREFIX}{zlib.crc32(repr(self._packer.slots).encode()):08x}"
        place = tf.one_hot(self._trainer.global_step // self._steps % 2, 2, dtype=tf.float64)[:, None]
        return tf.math.multiply_no_nan(vector, place)

    def _unchanged(self) -> list[tuple[str, tf.Variable]]:
        """Returns the variables of the trainer, and those of the evaluator without the metrics that windows reset."""
        reset = {id(variable) for variable in self.scratch}
        own = [(name, one) for name, one in variables_of(state_of(self._evaluator)) if id(one) not in reset]
        return [*variables_of(state_of(self._trainer)), *own]

    def take(self, metrics: Metrics) -> Metrics:
        """See `StepAddition`."""
        if self._key not in metrics:
            return {}
        parts, opened, step = np.asarray(metrics.pop(self._key)), self._open, int(self._trainer.global_step)
        last = (step - 1) // self._steps  # the number of a window
        number = opened.step // self._steps if opened.of else last - bool(parts[(last - 1) % 2].any())
        sums, rest = parts.sum(axis=0), np.zeros(len(parts[0]))
        if last == number + 1:  # the window ends within the steps of this report
            sums, rest = parts[number % 2], parts[last % 2]
        if opened.of == self._key:
            sums = sums + opened.sums
        elif opened.of:
            logging.warning("Prequential begins a new window, because its evaluator returns other metrics than before")
        self._open = dataclasses.replace(opened, of=self._key, sums=sums.tolist(), step=step)
        over = step // self._steps > number
        if self._seconds is not None and self._controller is not None:  # else a replay, whose time is not the run's
            over = bool(self._controller.gather(time.time() - opened.began >= self._seconds)[0])  # the chief's
        if not over:
            return {}
        found = as_numbers(self._who, self._evaluator.loop_end(self._metrics_of(sums)))
        first = {**{name: value for name, value in found.items() if name.startswith(INPUTS)}, **opened.first}
        self._open = _Window(self._key, rest.tolist(), step, first=first)
        found |= {f"{name}_at_start": value for name, value in first.items() if name in found}
        return {_PREFIX + name: value for name, value in found.items()}

    def _metrics_of(self, sums: np.ndarray) -> Metrics:
        """Returns the metrics of a window from its sums."""
        values, results, parts_of = self._packer.unpack(sums, {}), {}, self._strategy.experimental_local_results
        for name, metric in self._metrics.items():
            for one in metric.variables:
                value, first = values.pop(f"{name}/{one.name}"), parts_of(_keras.tf_variable(one))[0]
                if Workers(self._strategy).is_chief:  # all other copies are zeros
                    first.assign(tf.cast(value, first.dtype))
            results[name] = tf.nest.map_structure(_keras.value_now, _tf.converted(metric.result)())
            metric.reset_state()
        found, names = self._packer.unpack(sums, results), self._packer.names
        return {name: value for name, value in found.items() if name in values or name not in names}

    def state(self) -> dict[str, Any]:
        """See `Action`."""
        return dataclasses.asdict(self._open)

    def load(self, state: Any) -> None:
        """See `Action`."""
        self._open = decode(_Window, state, strict=True)

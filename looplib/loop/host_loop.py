"""The host loop: Python calls each step, and can take values from it in between."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from looplib.base.messages import gist, join_names
from looplib.cluster.collectives import Workers
from looplib.cluster.preemption import notice
from looplib.compat import keras as _keras
from looplib.compat import tensorflow as _tf
from looplib.errors import MetricError, StepError
from looplib.loop.contracts import InnerLoop, LoopResult, Metrics, Request, StreamIterator
from looplib.loop.reducer import UnknownOutputsError
from looplib.loop.step import Step, raise_refusal
from looplib.report.writers.contract import Histogram, Images, Shown, Texts
from looplib.task.record import EngineChoice
from looplib.task.reductions import Media

Collect = Callable[[list], None] | None  # `Evaluator.collect`; None for a trainer, whose steps collect nothing
_LONGEST = 10_000  # characters of a text


class EagerStep(Step):
    """A step without `tf.function`, for print, pdb and exact stack traces; its first call learns its outputs."""

    def _trace(self) -> None:
        """Traces nothing."""

    def contribution(self, inputs: Any) -> Any:
        """See `Step`."""
        results = None
        try:
            with contextlib.suppress(UnknownOutputsError):  # of the first replica, so that nothing is done twice
                results = self.strategy.run(self.replica_step, args=(inputs,))
            if results is None:
                self.learn_outputs()
                results = self.strategy.run(self.replica_step, args=(inputs,))
        except RuntimeError as error:
            if self.stream.properties.may_be_empty and _tf.is_merge_of_some(error):
                raise StepError(
                    "the step joins the replicas, by all_reduce say, and the last batches of the data have no example "
                    "for some of them, which the eager loop cannot run; use --loop=graph, or data that divides evenly"
                ) from error
            raise_refusal(error)
            raise
        if not self.reducer.created:
            self.reducer.create()
        return results

    def learn_outputs(self) -> None:
        """Traces the step to learn the structure of its outputs."""
        super()._trace()

    def make_sums_of(self, task: Any) -> None:
        """Traces the step where that makes the sums of a task's metrics, which checkpoints hold from the start."""
        metrics = filter(_keras.is_metric, _keras.parts(vars(task)))
        missing = [metric.name for metric in metrics if _keras.makes_sums_late(metric)]
        if not missing:
            return
        try:
            self.learn_outputs()
        except Exception as error:
            logging.warning(
                "no checkpoint holds what %s of %s adds up, because it makes its sums in its first update, and the "
                "step cannot be traced to make them (%s); update and reset it once in __init__",
                join_names(missing), type(task).__name__, gist(error),
            )  # fmt: skip


class HostLoop(InnerLoop):
    """A Python loop over the steps, which checks after each of them whether to continue.

    Args:
      step: the step; an `EagerStep` runs the user's Python code each time.
      collect: takes what a step returns as `looplib.each`.
    """

    def __init__(self, step: Step, collect: Collect = None) -> None:
        self._step, self._reducer, self._stream = step, step.reducer, step.stream
        self._collect = collect
        self._workers = Workers(step.strategy)
        self._kept: tuple[tf.Tensor, dict[str, list[tf.Tensor]]] | None = None  # media of the first replica
        self._call, self._all_finite = step.run, step.reducer.finite
        self.ends_steps = not isinstance(step, EagerStep)
        if self.ends_steps:
            self.step = step
            self._call = tf.function(step.run, autograph=False, reduce_retracing=True)
            self._all_finite = tf.function(step.reducer.finite, autograph=False)

    def trace(self, iterator: StreamIterator) -> None:
        """See `InnerLoop`."""
        if self.step is not None:
            self._call.get_concrete_function(self._stream.element_spec)

    def run(self, iterator: StreamIterator, request: Request) -> LoopResult:
        """See `InnerLoop`."""
        done, waited, self._kept = 0, 0.0, None
        while done != request.steps and not self._stopped() and self._finite():
            started = time.perf_counter()
            batch = self._stream.next_as_optional(iterator)
            if not self._stream.has_value(batch):
                break
            waited += time.perf_counter() - started
            collected = self._call(self._stream.get_value(batch))
            if self._reducer.collects:
                self._hand_over(collected)
            done += 1
        return LoopResult(done, self._finite(), self._stopped(), waited=waited)

    def read(self) -> Metrics:
        """See `InnerLoop`.

        A run that resumes after its last step may report sums of steps that another process has run. An eager loop
        learns their structure by tracing the step; where that fails, nothing is reported.
        """
        if not self._reducer.created:
            try:
                self._step.learn_outputs()
            except Exception as error:
                logging.warning(
                    "the metrics since the last report are left out: the eager loop has run no step since the resume, "
                    "and step_fn cannot be traced to learn their structure (%s)",
                    gist(error),
                )
                return {}
        return self._reducer.packer.unpack(*self._reducer.read())

    def _hand_over(self, collected: tuple[Any, dict[str, Any]]) -> None:
        """Keeps the media of the first replica; gives the task the rest of what replicas with examples collected."""
        shows = self._reducer.packer.media
        had_examples, values = collected
        if shows and (self._kept is None or self._collect is None):  # the first step of an evaluation
            self._kept = tf.nest.map_structure(
                lambda leaf: self._step.strategy.experimental_local_results(leaf)[0],
                (had_examples, {name: values[name] for name in shows}),
            )
        if self._reducer.collects_examples:
            each = had_examples, {name: values[name] for name in values if name not in shows}
            parts = [self._step.strategy.experimental_local_results(leaf) for leaf in tf.nest.flatten(each)]
            replicas = self._workers.gather_tensors(list(zip(*parts)))  # of all workers, in order
            replicas = [tf.nest.pack_sequence_as(each, leaves) for leaves in replicas]
            self._collect([values for had_examples, values in replicas if had_examples])

    def shown(self) -> dict[str, Shown]:
        """See `InnerLoop`."""
        kept, self._kept = self._kept, None
        if kept is None or not kept[0]:
            return {}
        media = self._reducer.packer.media
        return as_shown({name: dataclasses.replace(each, tensors=tuple(kept[1][name])) for name, each in media.items()})

    def _stopped(self) -> bool:
        return self._workers.any_of(bool(notice.requested))

    def _finite(self) -> bool:
        return not self._reducer.created or bool(self._all_finite())


class ShowingLoop(InnerLoop):
    """Lets the host loop run the step that is shown: the last one of a training, the first one of an evaluation.

    The loop of all other steps ignores the media that the traced step returns, so TensorFlow leaves out what only they
    need.

    Args:
      inner: the loop of the other steps.
      first: whether the first step of a request is shown, or else the last.
    """

    def __init__(self, inner: InnerLoop, first: bool) -> None:
        self._inner, self._first = inner, first
        self.step = inner.step
        self._host = HostLoop(inner.step)
        self._ran = False

    @property
    def traces(self) -> int:
        """See `InnerLoop`."""
        return self._inner.traces

    @property
    def record(self) -> EngineChoice | None:
        """See `InnerLoop`."""
        return self._inner.record

    def trace(self, iterator: StreamIterator) -> None:
        """See `InnerLoop`."""
        self._inner.trace(iterator)
        self._host.trace(iterator)

    def run(self, iterator: StreamIterator, request: Request) -> LoopResult:
        """See `InnerLoop`."""
        if not request.show:
            return self._inner.run(iterator, request)
        if self._first:
            ran = self._show(iterator)
            more = ran.done and ran.go and request.steps != 1
            return ran.then(self._inner.run(iterator, request.after(1))) if more else ran
        before = request.steps - 1
        ran = self._inner.run(iterator, request.first(before)) if before else LoopResult(0, True)
        return ran.then(self._show(iterator)) if ran.done == before and ran.go else ran

    def _show(self, iterator: StreamIterator) -> LoopResult:
        started, first, self._ran = time.perf_counter(), not self._ran, True
        ran = self._host.run(iterator, Request(1))
        compiled = time.perf_counter() - started - ran.waited if first else 0.0
        return dataclasses.replace(ran, compiled=compiled)

    def read(self) -> Metrics:
        """See `InnerLoop`."""
        return self._inner.read()

    def shown(self) -> dict[str, Shown]:
        """See `InnerLoop`."""
        return self._host.shown()


def as_shown(media: Mapping[str, Media]) -> dict[str, Shown]:
    """Returns media, with tensors of the host, for the writers; raises `UsageError` if `decode` returns no text."""
    return {name: _shown(name, each) for name, each in media.items()}


def _shown(name: str, media: Media) -> Shown:
    values: Sequence[Any] = [np.asarray(tensor) for tensor in media.tensors]
    if media.kind == "image":
        return Images(values[0])
    if media.kind == "text":
        return Texts(tuple(_text(name, media, value) for value in values[0]))
    if media.kind == "histogram":
        (low, high), counts = values[0].tolist(), values[1].tolist()
        return Histogram(tuple(np.linspace(low, high, len(counts) + 1).tolist()), tuple(counts))
    raise NotImplementedError(f"nothing shows a looplib.{media.kind}")


def _text(name: str, media: Media, value: Any) -> str:
    text = media.decode(value) if media.decode else value.decode(errors="replace")
    if not isinstance(text, str):
        raise MetricError(f"decode of the text {name!r} returned a {type(text).__name__}; expected a str")
    text = text.encode(errors="backslashreplace").decode()  # lone surrogates
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."

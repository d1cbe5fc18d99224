"""Loops of steps that show media: the step that is shown runs by itself, so that no other one computes any."""

import dataclasses
import time

from looplib.loop.base import InnerLoop, Iterator, Metrics, Ran, Request
from looplib.loop.stepwise import StepwiseLoop
from looplib.report.shown import Shown
from looplib.task.record import EngineChoice


class ShowingLoop(InnerLoop):
    """Runs one step of a request by a call of its own: the last one of a training, the first one of an evaluation.

    The loops of all other steps ignore the media that the traced step returns, so TensorFlow leaves out what only they
    need.

    Args:
      inner: the loop of the other steps.
      first: whether the first step of a request is shown, or else the last.
    """

    def __init__(self, inner: InnerLoop, first: bool) -> None:
        self._inner, self._first = inner, first
        self._single = StepwiseLoop(inner.step, None)
        self._ran = False
        self.step = inner.step

    @property
    def traces(self) -> int:
        """How often TensorFlow traced the loop."""
        return self._inner.traces

    @property
    def record(self) -> EngineChoice | None:
        """See `InnerLoop`."""
        return self._inner.record

    def trace(self, iterator: Iterator) -> None:
        """See `InnerLoop`."""
        self._inner.trace(iterator)
        self._single.trace(iterator)

    def run(self, iterator: Iterator, request: Request) -> Ran:
        """See `InnerLoop`."""
        if not request.show:
            return self._inner.run(iterator, request)
        if self._first:
            ran = self._show(iterator)
            more = ran.done and ran.finite and not ran.stopped and request.steps != 1
            return ran.then(self._inner.run(iterator, request.after(1))) if more else ran
        ran, before = Ran(0, True), request.steps - 1
        if before:
            ran = self._inner.run(iterator, request.first(before))
        whole = ran.done == before and ran.finite and not ran.stopped
        return ran.then(self._show(iterator)) if whole else ran

    def _show(self, iterator: Iterator) -> Ran:
        started, first, self._ran = time.perf_counter(), not self._ran, True
        ran = self._single.run(iterator, Request(1))
        compiled = time.perf_counter() - started - ran.waited if first else 0.0
        return dataclasses.replace(ran, compiled=compiled)

    def read(self) -> Metrics:
        """See `InnerLoop`."""
        return self._inner.read()

    def shown(self) -> dict[str, Shown]:
        """See `InnerLoop`."""
        return self._single.shown()

"""`loop="auto"`: a loop that finds out while it trains whether XLA is faster, and continues with the faster engine."""

import time

from absl import logging

from looplib.loop.base import InnerLoop, Iterator, LoopResult, Metrics, Request
from looplib.loop.device_loop import DeviceLoop, single_steps
from looplib.loop.step import Step
from looplib.loop.trial import Trial
from looplib.loop.xla import LONGEST, XlaChunk, why_not_xla
from looplib.report.clock import Clock
from looplib.task.record import EngineChoice


class AutoLoop(InnerLoop):
    """Runs the first steps by the device loop; once it pays, measures chunks in XLA beside it, and takes the faster.

    Chunks should divide `steps_per_loop`. `tracing` is the seconds that it took to trace the step, on one replica, and
    `chosen` the `record` of an earlier start of the run. The clock gets the time to prepare a loop as "compile".
    """

    def __init__(
        self, step: Step, steps_per_loop: int, clock: Clock, tracing: float, chosen: EngineChoice | None = None
    ) -> None:
        self.step, self.record = step, chosen
        self._clock = clock
        self._graph = self._chosen = self._used = single_steps(step)
        self._trial: Trial | None = None
        if chosen is None or chosen.chunk > LONGEST or (chosen.loop == "xla" and why_not_xla(step)):
            self._trial = Trial(self._graph, self._prepared, steps_per_loop, tracing)

    @property
    def traces(self) -> int:
        """The traces of the loop with the most."""
        return max(self._graph.traces, self._chosen.traces)

    def trace(self, iterator: Iterator) -> None:
        """Prepares the loop of an earlier choice, or else the graph loop."""
        self._iterator = iterator
        if not self._trial and self.record.loop == "xla":
            if loop := self._prepared(self.record.chunk):
                self._chosen = self._used = loop
                return
            logging.warning("the previously selected engine (%s) is not available here; using graph", self.record)
        self._graph.trace(iterator)

    def read(self) -> Metrics:
        """See `InnerLoop`."""
        return self._used.read()

    def run(self, iterator: Iterator, request: Request) -> LoopResult:
        """Runs the parts that the trial wants, while they fit into the request; the rest by the loop chosen so far."""
        total, self._iterator = LoopResult(0, True), iterator
        while self._trial and total.done != request.steps:
            rest = request.after(total.done)
            self._used, steps = self._trial.next_part(rest)
            if steps == 0:
                break
            started = time.perf_counter()
            ran = self._used.run(iterator, rest.first(steps))
            total = total.then(ran)
            if not ran.finite or ran.done < steps:
                return total
            if self._trial.note(steps, time.perf_counter() - started):
                self.record, self._chosen, self._trial = self._trial.choice, self._trial.fastest, None
        if total.done == request.steps:
            return total
        self._used = self._chosen
        return total.then(self._used.run(iterator, request.after(total.done)))

    def _prepared(self, size: int) -> DeviceLoop | None:
        """Compiles and traces a loop of chunks in XLA; returns None if it cannot run."""
        with self._clock.phase("compile"):
            try:
                loop = DeviceLoop(self.step, XlaChunk(self.step, size))
                loop.trace(self._iterator)
            except Exception:  # XLA's have many types, and none is the user's concern
                logging.debug("a way to run the loop is left out", exc_info=True)
                return None
        return loop

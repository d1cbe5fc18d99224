"""`loop="auto"`: a loop that finds out while it trains whether XLA is faster, and continues with the faster engine."""

import math
import statistics
import time
from collections.abc import Generator

import tensorflow as tf
from absl import logging

from looplib.loop.base import InnerLoop, Iterator, LoopResult, Metrics, Request
from looplib.loop.device_loop import DeviceLoop, single_steps
from looplib.loop.step import Step
from looplib.loop.xla import LONGEST, XlaChunk, size_of_chunk, why_not_xla
from looplib.report.clock import Clock
from looplib.task.record import EngineChoice

_CHUNK_SECONDS = 0.1  # of an XLA program, which nothing stops under way
_MISFITS = 100  # calls too short for a candidate's chunk, after which the trial continues without its time
# Rounds of a trial, the least seconds of a candidate in each, and how much faster than graph it must be.
_ROUNDS, _SECONDS, _GAIN = 3, 0.1, 1.03
# A candidate is tried once the training has lasted, or is known to last, this many times as long as its preparation
# may take; the preparation may take this many times as long as the trace of the step.
_PAYS_BACK, _COMPILES = 10, 3

# A trial yields (the loop to run next, its steps), and receives (the steps that ran, their seconds).
_Wanted, _Took = tuple[DeviceLoop, int], tuple[int, float]


class AutoLoop(InnerLoop):
    """Runs the first steps by the device loop; once it pays, measures chunks in XLA beside it, and takes the faster.

    Chunks should divide `steps_per_loop`. `tracing` is the seconds that it took to trace the step, on one replica, and
    `chosen` the `record` of an earlier start of the run. The clock gets the time to prepare a loop as "compile".
    """

    def __init__(
        self, step: Step, steps_per_loop: int, clock: Clock, tracing: float, chosen: EngineChoice | None = None
    ) -> None:
        self.step, self.record = step, chosen
        self._steps_per_loop, self._clock, self._tracing = steps_per_loop, clock, tracing
        self._graph = self._chosen = self._used = single_steps(step)
        self._iterator: Iterator = None
        self._lasted, self._horizon, self._misfits = 0.0, 0, 0
        self._trial: Generator[_Wanted, _Took, DeviceLoop] | None = None
        if chosen is None or chosen.chunk > LONGEST or (chosen.loop == "xla" and why_not_xla(step)):
            self._trial = self._try_all()
            self._wanted: _Wanted = next(self._trial)
        elif chosen.loop == "xla":
            self._chosen = self._used = DeviceLoop(step, XlaChunk(step, chosen.chunk))

    @property
    def traces(self) -> int:
        """How often the loop was traced that was traced most often."""
        return max(self._graph.traces, self._chosen.traces)

    def trace(self, iterator: Iterator) -> None:
        """Prepares the loop of an earlier choice, or else the graph loop."""
        if not self._is_ready(self._chosen, iterator):
            logging.warning("the previously selected engine (%s) is not available here; using graph", self.record)
            self._chosen = self._used = self._graph
            self._graph.trace(iterator)

    def read(self) -> Metrics:
        """See `InnerLoop`."""
        return self._used.read()

    def run(self, iterator: Iterator, request: Request) -> LoopResult:
        """See `InnerLoop`."""
        total = LoopResult(0, True)
        while self._trial and total.done != request.steps:
            rest = request.after(total.done)
            self._iterator, self._horizon = iterator, rest.horizon
            self._used, wanted = self._wanted
            part = min(wanted, rest.sure, rest.steps if rest.steps >= 0 else math.inf)
            part -= part % self._used.round_size
            if part == 0:  # what is left is too little for a chunk, or it is not sure that it is there
                self._misfits += 1
                if self._misfits % _MISFITS == 0:
                    self._tell(self._used.round_size, math.inf)
                break
            started = time.perf_counter()
            ran = self._used.run(iterator, rest.first(part))
            total = total.then(ran)
            if not ran.finite or ran.done < part:
                return total
            seconds = time.perf_counter() - started
            self._lasted += seconds
            self._tell(part, seconds)
        if total.done == request.steps:
            return total
        self._used = self._chosen
        return total.then(self._used.run(iterator, request.after(total.done)))

    def _tell(self, steps: int, seconds: float) -> None:
        """Gives the trial the time of the steps that it wanted."""
        try:
            self._wanted = self._trial.send((steps, seconds))
        except StopIteration as end:
            self._trial, self._chosen = None, end.value

    def _try_all(self) -> Generator[_Wanted, _Took, DeviceLoop]:
        """Prepares the candidates, measures all in turns, records the fastest, and returns it."""
        loops = {"graph": self._graph}
        yield self._graph, 1  # in which the device allocates its memory
        yield from self._measure(self._graph)
        seconds = yield from self._measure(self._graph)
        for size in self._sizes(seconds):
            while max(self._lasted, self._horizon * seconds) < _PAYS_BACK * _COMPILES * self._tracing:
                yield from self._measure(self._graph)
            loop = DeviceLoop(self.step, XlaChunk(self.step, size))
            if self._is_ready(loop, self._iterator):
                loops[f"xla x{size}"] = loop
                yield loop, size
        taken: dict[str, list[float]] = {name: [] for name in loops}
        for _ in range(_ROUNDS):
            for name, loop in loops.items():
                taken[name].append((yield from self._measure(loop)))
        medians = {name: statistics.median(values) for name, values in taken.items()}
        best = min(medians, key=medians.get)
        best = "graph" if medians["graph"] < _GAIN * medians[best] else best
        known = {name: round(value, 9) for name, value in medians.items() if math.isfinite(value)}
        self.record = EngineChoice(best.partition(" ")[0], loops[best].round_size, known)
        found = ", ".join(f"{name} {1e3 * value:.3g}" for name, value in medians.items())
        logging.info("selected engine: %s (milliseconds per step: %s)", best, found)
        return loops[best]

    def _sizes(self, seconds: float) -> list[int]:
        """Returns the chunks to try in XLA, where a step of the graph loop takes so many seconds."""
        # XLA runs convolutions on one thread of a CPU, at a fraction of the graph loop's speed.
        on_cpu = not tf.config.list_logical_devices("GPU")
        if why_not_xla(self.step) or (on_cpu and any("Conv" in op for op in self.step.op_counts)):
            return []
        return sorted({1, size_of_chunk(int(_CHUNK_SECONDS / seconds), self.step, self._steps_per_loop)}, reverse=True)

    def _measure(self, loop: DeviceLoop) -> Generator[_Wanted, _Took, float]:
        """Runs a loop for the time of a round; returns the seconds of a step."""
        steps, seconds = 0, 0.0
        while not steps or seconds < _SECONDS:
            wanted = math.ceil((_SECONDS - seconds) * steps / seconds) if steps else loop.round_size
            more = yield loop, max(loop.round_size, wanted)
            steps, seconds = steps + more[0], seconds + more[1]
        return seconds / steps

    def _is_ready(self, loop: DeviceLoop, iterator: Iterator) -> bool:
        """Compiles and traces a loop; returns whether it can run."""
        with self._clock.phase("compile"):
            try:
                loop.trace(iterator)
            except Exception:  # XLA's have many types, and none is the user's concern
                logging.debug("a way to run the loop is left out", exc_info=True)
                return False
        return True

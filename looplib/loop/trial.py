"""Which loop runs a step fastest: candidates that train in turns, and are measured."""

import math
import statistics
from collections.abc import Callable, Generator

import tensorflow as tf
from absl import logging

from looplib.loop.base import Request
from looplib.loop.device_loop import DeviceLoop
from looplib.loop.xla import size_of_chunk, why_not_xla
from looplib.task.record import EngineChoice

_CHUNK_SECONDS = 0.1  # of an XLA program, which nothing stops under way
# Rounds of a trial, the least seconds of a candidate in each, and how much faster than graph it must be.
_ROUNDS, _SECONDS, _GAIN = 3, 0.1, 1.03
# A candidate is tried once the training has lasted, or is known to last, this many times as long as the trace of the
# step took. A tenth of that is enough for the preparation of a candidate.
_PAYS_BACK = 30

# What `_try_all` yields (the loop to run next, its steps), and receives (the steps that ran, their seconds).
_Wanted, _Took = tuple[DeviceLoop, int], tuple[int, float]


class Trial:
    """Says what to run next, until it knows which loop is the fastest.

    Its owner asks for a `next_part` each request, runs that, and tells how long it took by `note`.

    Attributes:
      fastest: the graph loop, or once the trial has ended the loop that was fastest.
      choice: the result, None until the trial has ended.
    """

    def __init__(
        self, graph: DeviceLoop, prepare: Callable[[int], DeviceLoop | None], steps_per_loop: int, tracing: float
    ) -> None:
        """`prepare` makes a loop of so many steps in an XLA program; `tracing` is the seconds of the step's trace."""
        self.fastest = self._graph = graph
        self.choice: EngineChoice | None = None
        self._prepare, self._steps_per_loop, self._tracing = prepare, steps_per_loop, tracing
        self._lasted, self._longest, self._horizon = 0.0, 1, 0  # seconds; steps of the longest request, and of the run
        self._rest = self._try_all()
        self._wanted: _Wanted = next(self._rest)

    def next_part(self, request: Request) -> _Wanted:
        """Returns the loop to measure next, and its steps; 0 if the request, or its data, is too short for them."""
        loop, wanted = self._wanted
        fits = request.sure if request.steps < 0 else min(request.sure, request.steps)
        self._longest, self._horizon = max(self._longest, fits), request.horizon
        return loop, min(wanted, fits) // loop.round_size * loop.round_size

    def note(self, steps: int, seconds: float) -> bool:
        """Notes the seconds of a part; returns whether the trial has ended."""
        self._lasted += seconds
        try:
            self._wanted = self._rest.send((steps, seconds))
        except StopIteration:
            return True
        return False

    def _try_all(self) -> Generator[_Wanted, _Took, None]:
        """Prepares the candidates, measures all in turns, and chooses the fastest."""
        loops = {"graph": self._graph}
        yield self._graph, 1  # in which the device allocates its memory
        yield from self._measure(self._graph)
        seconds = yield from self._measure(self._graph)
        for size in self._sizes(seconds):
            while max(self._lasted, self._horizon * seconds) < _PAYS_BACK * self._tracing:
                yield from self._measure(self._graph)
            if loop := self._prepare(size):
                loops[f"xla x{size}"] = loop
                yield loop, size
        taken: dict[str, list[float]] = {name: [] for name in loops}
        for _ in range(_ROUNDS):
            for name, loop in loops.items():
                taken[name].append((yield from self._measure(loop)))
        medians = {name: round(statistics.median(values), 9) for name, values in taken.items()}
        best = min(medians, key=medians.get)
        best = "graph" if medians["graph"] < _GAIN * medians[best] else best
        self.fastest = loops[best]
        self.choice = EngineChoice(best.partition(" ")[0], self.fastest.round_size, medians)
        found = ", ".join(f"{name} {1e3 * value:.3g}" for name, value in medians.items())
        logging.info("selected engine: %s (milliseconds per step: %s)", best, found)

    def _sizes(self, seconds: float) -> list[int]:
        """Returns the chunks to try in XLA, where a step of the graph loop takes so many seconds."""
        step = self._graph.step
        # XLA runs convolutions on one thread of a CPU, at a fraction of the graph loop's speed.
        on_cpu = not tf.config.list_logical_devices("GPU")
        if why_not_xla(step) or (on_cpu and any("Conv" in op for op in step.op_counts)):
            return []
        longest = min(self._longest, int(_CHUNK_SECONDS / seconds))
        return sorted({1, size_of_chunk(longest, step, self._steps_per_loop)}, reverse=True)

    def _measure(self, loop: DeviceLoop) -> Generator[_Wanted, _Took, float]:
        """Runs a loop for the time of a round; returns the seconds of a step."""
        steps, seconds, wanted = 0, 0.0, loop.round_size
        while seconds < _SECONDS:
            done, took = yield loop, max(loop.round_size, wanted)
            steps, seconds = steps + done, seconds + took
            wanted = math.ceil((_SECONDS - seconds) * steps / seconds)
        return seconds / steps

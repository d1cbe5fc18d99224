"""The choice between engines: a loop that finds the fastest one while it trains."""

import dataclasses
import math
import statistics
import time
from collections.abc import Generator
from collections.abc import Iterator as PythonIterator

import tensorflow as tf
from absl import logging

from looplib.loop import choices
from looplib.loop.base import InnerLoop, Iterator, Metrics, Ran, Request
from looplib.loop.chunks import LONGEST, Unrolled, XlaProgram, size_of_chunk, why_not_xla
from looplib.loop.evaluation import EvaluationLoop, single_steps
from looplib.loop.graph import GraphLoop
from looplib.loop.step import Step
from looplib.report.clock import Clock
from looplib.task.record import EngineChoice

_CHUNK_SECONDS = 0.1  # of an XLA program, which nothing stops under way
_UNROLLED = 4
_MISFITS = 100  # calls in which a candidate's chunk did not fit, after which the trial continues without its time
# Rounds of a trial, the least seconds of a candidate in each, and how much faster than graph it must be.
_ROUNDS, _SECONDS, _GAIN = 3, 0.1, 1.03
# A candidate is tried once the training is known to last, or has lasted, this many times as long as its preparation may
# take; the preparation may take this many times as long as the trace of the step.
_PAYS_BACK, _READY = 10, {"graph": 1, "xla": 3}

# A trial yields the loop to run next and for how many steps, gets the steps that ran and their seconds, and returns the
# loop that was chosen.
_Wanted = tuple[GraphLoop, int]
_Took = tuple[int, float]


@dataclasses.dataclass(frozen=True)
class Plan:
    """One way to run the loop.

    Attributes:
      loop: "graph" or "xla".
      chunk: steps of a round.
    """

    loop: str = "graph"
    chunk: int = 1

    def __str__(self) -> str:
        return self.loop if self == Plan() else f"{self.loop} x{self.chunk}"

    def build(self, step: Step) -> GraphLoop:
        """Returns the loop."""
        if self == Plan():
            return single_steps(step)
        return GraphLoop(step, (XlaProgram if self.loop == "xla" else Unrolled)(step, self.chunk))


class AutoLoop(InnerLoop):
    """Finds the fastest way to run a step while it trains, and continues with that.

    The first steps run by the graph loop. Once the training is known to last long enough to pay for it, each candidate
    is prepared and runs some of the steps that follow, in turns.

    Args:
      step: the step.
      steps_per_loop: steps of a call, which chunks should divide.
      clock: gets the time to prepare a loop as "compile".
      tracing: seconds that it took to trace the step.
      chosen: the `record` of an earlier start of the run, or None.
    """

    def __init__(
        self, step: Step, steps_per_loop: int, clock: Clock, tracing: float, chosen: EngineChoice | None = None
    ) -> None:
        self._record = chosen
        self.step = step
        self._steps_per_loop = steps_per_loop
        self._clock = clock
        self._tracing = tracing
        self._graph = self._chosen = self._used = Plan().build(step)
        self._iterator: Iterator = None
        self._lasted, self._horizon, self._misfits = 0.0, 0, 0
        self._trials: Generator[_Wanted, _Took, GraphLoop] | None = None
        self._wanted: _Wanted | None = None
        if chosen and self._can_be(chosen):
            self._chosen = self._used = Plan(chosen.loop, chosen.chunk).build(step)
        else:
            self._trials = self._try_all()
            self._wanted = next(self._trials)

    def _can_be(self, choice: EngineChoice) -> bool:
        """Returns whether a choice from a file, whose values may be any, is a plan for this step."""
        return 1 <= choice.chunk <= LONGEST and (choice.loop == "graph" or not why_not_xla(self.step))

    @property
    def record(self) -> EngineChoice | None:
        """See `InnerLoop`."""
        return self._record

    @property
    def traces(self) -> int:
        """How often the loop was traced that was traced most often."""
        return max(self._graph.traces, self._chosen.traces)

    def trace(self, iterator: Iterator) -> None:
        """Prepares the loop of an earlier choice, or else the graph loop."""
        if not self._is_ready(self._chosen, iterator):
            logging.warning("the previously selected engine (%s) is not available here; using graph", self._record)
            self._chosen = self._used = self._graph
            self._graph.trace(iterator)

    def read(self) -> Metrics:
        """See `InnerLoop`."""
        return self._used.read()

    def run(self, iterator: Iterator, request: Request) -> Ran:
        """See `InnerLoop`."""
        total = Ran(0, True)
        while self._trials and total.done != request.steps:
            rest = request.after(total.done)
            left = rest.steps if rest.steps >= 0 else math.inf
            self._iterator, self._horizon = iterator, rest.horizon
            self._used, wanted = self._wanted
            part = min(wanted, left, rest.sure) // self._used.round_size * self._used.round_size
            if part == 0:  # what is left is too little for a chunk, or it is not sure that it is there
                self._misfits += 1
                if self._misfits % _MISFITS == 0:
                    self._tell(self._used.round_size, math.inf)  # the calls are too short for this one
                break
            started = time.perf_counter()
            ran = self._used.run(iterator, rest.first(part))
            total = total.then(ran)
            if not ran.finite or ran.done < part:
                return total
            self._tell(part, time.perf_counter() - started)
        if total.done == request.steps:
            return total
        self._used = self._chosen
        return total.then(self._used.run(iterator, request.after(total.done)))

    def _tell(self, steps: int, seconds: float) -> None:
        """Gives the trial the time of the steps that it wanted."""
        self._lasted += seconds if math.isfinite(seconds) else 0.0
        try:
            self._wanted = self._trials.send((steps, seconds))
        except StopIteration as end:
            self._trials = self._wanted = None
            self._chosen = end.value

    def _try_all(self) -> Generator[_Wanted, _Took, GraphLoop]:
        """Prepares the candidates and measures all in turns."""
        loops, taken = {Plan(): self._graph}, {Plan(): []}
        yield self._graph, 1  # in which the device allocates its memory
        yield from self._measure(self._graph)
        seconds = yield from self._measure(self._graph)
        program = choices.key_of(self.step, self._steps_per_loop)
        earlier = choices.find(program, seconds)
        if earlier and self._can_be(earlier):
            loop = yield from self._prepare(Plan(earlier.loop, earlier.chunk), seconds)
            if loop:
                self._record = earlier
                return loop
        for plan in self._candidates(seconds):
            loop = yield from self._prepare(plan, seconds)
            if loop:
                loops[plan], taken[plan] = loop, []
                yield loop, plan.chunk
        for _ in range(_ROUNDS):
            for plan, loop in loops.items():
                taken[plan].append((yield from self._measure(loop)))
        medians = {plan: statistics.median(values) for plan, values in taken.items()}
        loop = loops[self._choose(medians)]
        if all(map(math.isfinite, medians.values())):
            choices.keep(program, self._record)
        return loop

    def _prepare(self, plan: Plan, seconds: float) -> Generator[_Wanted, _Took, GraphLoop | None]:
        """Builds a loop once the training pays for it, by the graph loop's time; returns None if it cannot run."""
        if plan == Plan():
            return self._graph
        cost = _READY[plan.loop] * self._tracing * _PAYS_BACK
        while max(self._lasted, self._horizon * seconds) < cost:
            yield from self._measure(self._graph)
        loop = plan.build(self.step)
        return loop if self._is_ready(loop, self._iterator) else None

    def _choose(self, seconds: dict[Plan, float]) -> Plan:
        """Returns the plan with the fewest seconds per step, and records it."""
        best = min(seconds, key=seconds.get)
        if seconds[Plan()] < _GAIN * seconds[best]:
            best = Plan()
        known = {str(plan): round(value, 9) for plan, value in seconds.items() if math.isfinite(value)}
        self._record = EngineChoice(best.loop, best.chunk, known)
        found = ", ".join(f"{plan} {1e3 * value:.3g}" for plan, value in seconds.items())
        logging.info("selected engine: %s (milliseconds per step: %s)", best, found)
        return best

    def _measure(self, loop: GraphLoop) -> Generator[_Wanted, _Took, float]:
        """Runs a loop for the time of a round; returns the seconds of a step."""
        steps, seconds = 0, 0.0
        while not steps or seconds < _SECONDS:
            wanted = math.ceil((_SECONDS - seconds) * steps / seconds) if steps else loop.round_size
            more = yield loop, max(loop.round_size, wanted)
            steps, seconds = steps + more[0], seconds + more[1]
        return seconds / steps

    def _candidates(self, seconds: float) -> PythonIterator[Plan]:
        """Yields what may be faster than the graph loop, whose step takes so many seconds."""
        if self._steps_per_loop >= _UNROLLED and not isinstance(self._graph, EvaluationLoop):
            yield Plan("graph", _UNROLLED)
        if why_not_xla(self.step) or _convolves_on_a_cpu(self.step):
            return
        chunk = size_of_chunk(int(_CHUNK_SECONDS / seconds), self.step, self._steps_per_loop)
        for size in sorted({1, chunk}, reverse=True):
            yield Plan("xla", size)

    def _is_ready(self, loop: GraphLoop, iterator: Iterator) -> bool:
        """Compiles and traces a loop; returns whether it can run."""
        with self._clock.phase("compile"):
            try:
                loop.prepare()
                loop.trace(iterator)
            except Exception:  # XLA's have many types, and none is the user's concern
                logging.debug("a way to run the loop is left out", exc_info=True)
                return False
        return True


def _convolves_on_a_cpu(step: Step) -> bool:
    """Returns whether XLA would run convolutions on one thread, at a fraction of the graph loop's speed."""
    return not tf.config.list_logical_devices("GPU") and any("Conv" in op for op in step.op_counts)

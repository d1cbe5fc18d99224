"""Engines: the inner loops by name, and how `auto` measures which is fastest."""

import abc
import math
import statistics
import time
from collections.abc import Callable, Generator
from typing import Any

import tensorflow as tf
from absl import logging

from looplib.base.messages import gist
from looplib.cluster import runtime
from looplib.data.order import Batches
from looplib.data.pipelines import runs_on_host
from looplib.data.streams import Stream
from looplib.errors import EngineError
from looplib.loop.contracts import InnerLoop, LoopResult, Metrics, Request, Specification, StreamIterator
from looplib.loop.device_loop import DeviceLoop, single_steps
from looplib.loop.host_loop import EagerStep, HostLoop, ShowingLoop
from looplib.loop.reducer import Reducer
from looplib.loop.step import Step, StepFn
from looplib.loop.xla import LONGEST, XlaChunk, size_of_chunk, why_not_xla
from looplib.report.clock import Clock
from looplib.task.record import EngineChoice
from looplib.task.trainer import Evaluator

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

    def trace(self, iterator: StreamIterator) -> None:
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

    def run(self, iterator: StreamIterator, request: Request) -> LoopResult:
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


Decorator = Callable[[StepFn], StepFn]
_PINNED_CHUNK = 20  # steps of a program with `loop="xla"`


class Backend(abc.ABC):
    """Makes the parts of a `TaskLoop` that depend on where its steps run."""

    remote_stream: Callable[..., Stream] | None = None  # of workers that read by themselves

    def __init__(self, spec: Specification) -> None:
        self._spec = spec

    def check(self, stream: Stream) -> None:
        """Raises `UsageError` for data that this backend cannot take; the constructor does so for settings."""

    def check_earlier(self, before: Batches, now: Batches) -> None:
        """Raises `UsageError` if the data cannot continue behind batches of the sizes of a checkpoint."""

    @abc.abstractmethod
    def reducer(self) -> Reducer:
        """Returns the reducer of what the steps return."""

    @abc.abstractmethod
    def tables(self, arrays: Any) -> Any:
        """Puts a structure of arrays where the steps can gather rows from them; returns tensors or variables."""

    def decorators(self) -> list[Decorator]:
        """Returns what this backend adds to the user's step, innermost first."""
        return []

    @abc.abstractmethod
    def inner_loop(self, step_fn: StepFn, reducer: Reducer, stream: Stream) -> InnerLoop:
        """Traces the step, and returns the loop that runs it."""


class LocalReplicas(Backend):
    """Runs steps on the replicas of this process, in lockstep with other workers."""

    def reducer(self) -> Reducer:
        """See `Backend`."""
        spec = self._spec
        return Reducer(spec.strategy, spec.step_name, not spec.training, spec.watched_loss, spec.skips)

    def tables(self, arrays: Any) -> Any:
        """See `Backend`."""
        strategy = self._spec.strategy
        if runs_on_host(strategy):
            return tf.nest.map_structure(tf.constant, arrays)
        with strategy.scope():
            return tf.nest.map_structure(lambda array: tf.Variable(array, trainable=False), arrays)

    def inner_loop(self, step_fn: StepFn, reducer: Reducer, stream: Stream) -> InnerLoop:
        """See `Backend`."""
        spec = self._spec
        collect = spec.task.collect if isinstance(spec.task, Evaluator) else None
        if spec.config.loop == "eager":
            if spec.skips:
                raise EngineError("the eager loop cannot undo steps; use another policy than skip with --loop=eager")
            step = EagerStep(spec.strategy, step_fn, reducer, stream, spec.counter)
            if spec.training:
                step.make_sums_of(spec.task)
            return HostLoop(step, collect)
        before = spec.clock.of("compile")
        step = Step(spec.strategy, step_fn, reducer, stream, spec.counter, spec.skips)
        tracing = spec.clock.of("compile") - before
        if reducer.collects_examples:
            return HostLoop(step, collect)
        # An evaluation is one call, however many steps a training call does. A shown step is not one of the loop.
        steps_per_loop = spec.config.steps_per_loop if spec.training else min(stream.properties.sure, 1000)
        steps_per_loop = max(1, steps_per_loop - bool(reducer.collects))
        if spec.config.loop == "xla":
            loop = _xla_loop(step, steps_per_loop)
        elif spec.config.loop == "auto" and spec.may_compile:
            loop = AutoLoop(step, steps_per_loop, spec.clock, tracing, spec.chosen)
        else:
            loop = single_steps(step)
        return ShowingLoop(loop, first=not spec.training) if reducer.collects else loop


def backend_of(spec: Specification) -> Backend:
    """Returns what makes the parts of a loop on its strategy."""
    if runtime.is_remote(spec.strategy):
        from looplib.loop.coordinator import ParameterServers  # here, as it imports this, and few runs need it

        return ParameterServers(spec)
    return LocalReplicas(spec)


def _xla_loop(step: Step, steps_per_loop: int) -> DeviceLoop:
    """Returns a loop of chunks, which divide `steps_per_loop`; raises `UsageError` if XLA cannot take the step."""
    if reason := why_not_xla(step):
        raise EngineError(f"loop is xla, and XLA cannot run the step: {reason}; use loop=graph, or auto")
    chunk = XlaChunk(step, size_of_chunk(_PINNED_CHUNK, step, steps_per_loop))
    try:
        chunk.prepare()
    except Exception as error:  # XLA's have many types
        raise EngineError(
            f"loop is xla, and XLA cannot compile the step: {gist(error)}; use loop=graph, or auto, which takes "
            "XLA only where it can"
        ) from error
    return DeviceLoop(step, chunk)

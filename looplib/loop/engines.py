"""The engines: ways to run the inner loop, by name, and the choice between them."""

import dataclasses
import math
import statistics
import time

import tensorflow as tf
from absl import logging

from looplib.cluster.collectives import Workers
from looplib.errors import UsageError, gist
from looplib.loop.inner_loops import GraphLoop, Ran
from looplib.task.record import EngineChoice

ENGINES = ("auto", "graph", "xla", "eager")

# An XLA program's call costs as much as a small step, so that longer chunks hardly help; nothing stops one under way.
_LONGEST_CHUNK, _CHUNK_SECONDS, _CHUNK_BYTES = 50, 0.1, 8 * 2**20
_PINNED_CHUNK = 20
_UNROLLED = 4
_MISFITS = 100  # calls in which a candidate's chunk did not fit, after which the trial goes on without its time
# Rounds of a trial, the least seconds of a candidate in each, and how much faster than graph it must be.
_ROUNDS, _SECONDS, _GAIN = 3, 0.1, 1.03
# A candidate is tried once the training is known to go on, or has gone on, for so many times as long as it may take to
# get the candidate ready: so many times as long as it took to trace the step.
_PAYS_BACK, _READY = 10, {"graph": 1, "xla": 3}


@dataclasses.dataclass(frozen=True)
class Plan:
    """One way to run the loop.

    Attributes:
      loop: "graph" or "xla".
      chunk: steps of a round, see `GraphLoop`.
    """

    loop: str = "graph"
    chunk: int = 1

    def __str__(self):
        return self.loop if self == Plan() else f"{self.loop} x{self.chunk}"

    def build(self, step):
        """Returns the `GraphLoop`."""
        return GraphLoop(step, self.chunk, compiled=self.loop == "xla")


def make(engine, step, *, steps_per_loop, clock, tracing, chosen=None):
    """Makes a loop for a step.

    Args:
      engine: "auto", "graph" or "xla".
      step: `steps.Step`.
      steps_per_loop: steps of a call, which chunks should divide.
      clock: `Clock` that gets the time to get a loop ready as "compile".
      tracing: seconds that it took to trace the step.
      chosen: `AutoLoop.record` of an earlier start of the run, or None.

    Returns:
      `GraphLoop` or `AutoLoop`.

    Raises:
      UsageError: if XLA is asked for and cannot take the step.
    """
    # Workers would have to agree on a choice by time; none of the other engines takes what they share.
    if engine == "graph" or (engine == "auto" and Workers(step.strategy).count > 1):
        return GraphLoop(step)
    if engine == "auto":
        return AutoLoop(step, steps_per_loop, clock, tracing, chosen)
    if step.strategy.num_replicas_in_sync > 1:
        raise UsageError(
            f"loop is xla, and the strategy has {step.strategy.num_replicas_in_sync} replicas; one XLA program runs on "
            "one device, so use one replica, or loop=graph or auto (on TPUs graph is compiled by XLA in any case)"
        )
    if reason := _not_for_xla(step):
        raise UsageError(f"loop is xla, and XLA cannot run the step: {reason}; use loop=graph, or auto")
    loop = Plan("xla", _chunk(_PINNED_CHUNK, step.stream, steps_per_loop)).build(step)
    try:
        loop.lower()
    except Exception as error:  # XLA's have many types
        raise UsageError(
            f"loop is xla, and XLA cannot compile the step: {gist(error)}; use loop=graph, or auto, which takes "
            "XLA only where it can"
        ) from error
    return loop


class AutoLoop:
    """Finds the fastest way to run a step while it trains, and goes on with that.

    The first steps run by the graph loop. Once it is clear that the training goes on for long enough to pay for it,
    each candidate is got ready and runs some of the steps that follow, in turns.

    Args:
      step: see `make`.
      steps_per_loop: see `make`.
      clock: see `make`.
      tracing: see `make`.
      chosen: see `make`.

    Attributes:
      record: the `EngineChoice`, once it is decided; None before.
    """

    def __init__(self, step, steps_per_loop, clock, tracing, chosen=None):
        self.record = chosen
        self._step = step
        self._steps_per_loop = steps_per_loop
        self._clock = clock
        self._tracing = tracing
        self._graph = self._chosen = self._used = GraphLoop(step)
        self._iterator = None
        self._lasted = self._horizon = self._misfits = 0
        self._trials = self._request = None
        fits = chosen and 1 <= chosen.chunk <= _LONGEST_CHUNK  # it comes from a checkpoint, whose values may be any
        if fits and (chosen.loop == "graph" or step.strategy.num_replicas_in_sync == 1):
            self._chosen = self._used = Plan(chosen.loop, chosen.chunk).build(step)
        else:
            self._trials = self._try_all()
            self._request = next(self._trials)

    @property
    def traces(self):
        """How often the loop was traced that was traced most often."""
        return max(self._graph.traces, self._chosen.traces)

    def trace(self, iterator):
        """Gets the loop of an earlier choice, or else the graph loop, ready."""
        if not self._got_ready(self._chosen, iterator):
            logging.warning(
                "the engine that was chosen earlier (%s) cannot run here; graph takes its place", self.record
            )
            self._chosen = self._used = self._graph
            self._graph.trace(iterator)

    def read(self):
        """See `GraphLoop`."""
        return self._used.read()

    def __call__(self, iterator, steps, *, sure=0, read=False, horizon=0):
        """See `GraphLoop`."""
        total = Ran(0, True)
        while self._trials and total.done != steps:
            left = steps - total.done if steps >= 0 else math.inf
            ahead = max(0, sure - total.done)
            self._iterator, self._horizon = iterator, horizon - total.done
            self._used, wanted = self._request
            part = min(wanted, left, ahead) // self._used.chunk * self._used.chunk
            if part == 0:  # what is left is too little for a chunk, or it is not sure that it is there
                self._misfits += 1
                if self._misfits % _MISFITS == 0:
                    self._tell(self._used.chunk, math.inf)  # the calls are too short for this one
                break
            started = time.perf_counter()
            ran = self._used(iterator, part, sure=ahead, read=read and part == left)
            total = total.then(ran)
            if not ran.finite or ran.done < part:
                return total
            self._tell(part, time.perf_counter() - started)
        if total.done == steps:
            return total
        self._used = self._chosen
        left = steps if steps < 0 else steps - total.done
        return total.then(self._used(iterator, left, sure=max(0, sure - total.done), read=read))

    def _tell(self, steps, seconds):
        self._lasted += seconds if math.isfinite(seconds) else 0.0
        try:
            self._request = self._trials.send((steps, seconds))
        except StopIteration as end:
            self._trials = self._request = None
            self._chosen = end.value

    def _try_all(self):
        """Yields what to run next, `(loop, steps)`, is sent `(steps, seconds)`, and returns the loop to go on with."""
        loops, taken = {Plan(): self._graph}, {Plan(): []}
        yield self._graph, 1  # in which the device allocates its memory
        yield from self._measure(self._graph)
        seconds = yield from self._measure(self._graph)
        for plan in self._candidates(seconds):
            cost = _READY[plan.loop] * self._tracing * _PAYS_BACK
            while max(self._lasted, self._horizon * seconds) < cost:
                yield from self._measure(self._graph)
            loop = plan.build(self._step)
            if self._got_ready(loop, self._iterator):
                loops[plan], taken[plan] = loop, []
                yield loop, plan.chunk
        for _ in range(_ROUNDS):
            for plan, loop in loops.items():
                taken[plan].append((yield from self._measure(loop)))
        medians = {plan: statistics.median(values) for plan, values in taken.items()}
        best = min(medians, key=medians.get)
        if medians[Plan()] < _GAIN * medians[best]:
            best = Plan()
        seconds = {str(plan): round(value, 9) for plan, value in medians.items() if math.isfinite(value)}
        self.record = EngineChoice(best.loop, best.chunk, seconds)
        found = ", ".join(f"{plan} {1e3 * value:.3g}" for plan, value in medians.items())
        logging.info("the loop goes on with the engine %s (milliseconds a step: %s)", best, found)
        return loops[best]

    def _measure(self, loop):
        """Runs a loop for the time of a round; returns the seconds of a step."""
        steps = seconds = 0
        while not steps or seconds < _SECONDS:
            wanted = math.ceil((_SECONDS - seconds) * steps / seconds) if steps else loop.chunk
            more = yield loop, max(loop.chunk, wanted)
            steps, seconds = steps + more[0], seconds + more[1]
        return seconds / steps

    def _candidates(self, seconds):
        if self._steps_per_loop >= _UNROLLED:
            yield Plan("graph", _UNROLLED)
        if self._step.strategy.num_replicas_in_sync > 1 or _not_for_xla(self._step) or _convolves_on_a_cpu(self._step):
            return
        chunk = _chunk(int(_CHUNK_SECONDS / seconds), self._step.stream, self._steps_per_loop)
        for size in sorted({1, chunk}, reverse=True):
            yield Plan("xla", size)

    def _got_ready(self, loop, iterator):
        with self._clock.phase("compile"):
            try:
                loop.lower()
                loop.trace(iterator)
            except Exception:  # XLA's have many types, and none is the user's concern
                logging.debug("a way to run the loop is left out", exc_info=True)
                return False
        return True


def _chunk(longest, stream, steps_per_loop):
    """The steps of a chunk: of at most so many, the number that leaves the fewest steps of a call over."""
    size = sum(spec.shape.num_elements() * spec.dtype.size for spec in tf.nest.flatten(stream.full_spec))
    longest = max(1, min(longest, _LONGEST_CHUNK, steps_per_loop, _CHUNK_BYTES // max(1, size)))
    return min(range(longest, longest // 2, -1), key=lambda chunk: steps_per_loop % chunk)


def _not_for_xla(step):
    """Why no chunk of the step can be a program of XLA, or one that computes the same; None if nothing is known."""
    for spec in tf.nest.flatten(step.stream.full_spec):
        if not isinstance(spec, tf.TensorSpec) or not spec.shape.is_fully_defined():
            return f"a batch has {spec}, and only tensors whose shape is known, but for the batch size, can be stacked"
    for node in step.ops:
        if node.op == "TensorListResize" or node.attr["resize_if_index_out_of_bounds"].b:
            return f"{node.name} makes a tf.TensorArray grow, which XLA does not; give it its size"
    return None


def _convolves_on_a_cpu(step):
    """Whether XLA would run convolutions on one thread, at a fraction of the graph loop's speed."""
    return not tf.config.list_logical_devices("GPU") and any("Conv" in node.op for node in step.ops)

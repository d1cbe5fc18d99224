"""The engines that run the inner loop on this process's replicas, by name."""

from looplib.cluster.collectives import Workers
from looplib.errors import UsageError, gist
from looplib.loop.auto import AutoLoop
from looplib.loop.base import InnerLoop
from looplib.loop.chunks import XlaProgram, size_of_chunk, why_not_xla
from looplib.loop.evaluation import single_steps
from looplib.loop.graph import GraphLoop
from looplib.loop.step import Step
from looplib.report.clock import Clock
from looplib.task.record import EngineChoice

_PINNED_CHUNK = 20


def make(
    engine: str, step: Step, *, steps_per_loop: int, clock: Clock, tracing: float, chosen: EngineChoice | None = None
) -> InnerLoop:
    """Makes a loop for a traced step.

    Args:
      engine: "auto", "graph" or "xla".
      step: the step.
      steps_per_loop: steps of a call, which chunks should divide.
      clock: gets the time to prepare a loop as "compile".
      tracing: seconds that it took to trace the step.
      chosen: `AutoLoop.record` of an earlier start of the run, or None.

    Raises:
      UsageError: if XLA is requested and cannot take the step.
    """
    # Workers would have to agree on a choice by time; none of the other engines takes what they share.
    if engine == "graph" or (engine == "auto" and Workers(step.strategy).count > 1):
        return single_steps(step)
    if engine == "auto":
        return AutoLoop(step, steps_per_loop, clock, tracing, chosen)
    return _make_xla(step, steps_per_loop)


def _make_xla(step: Step, steps_per_loop: int) -> GraphLoop:
    if reason := why_not_xla(step):
        raise UsageError(f"loop is xla, and XLA cannot run the step: {reason}; use loop=graph, or auto")
    loop = GraphLoop(step, XlaProgram(step, size_of_chunk(_PINNED_CHUNK, step, steps_per_loop)))
    try:
        loop.prepare()
    except Exception as error:  # XLA's have many types
        raise UsageError(
            f"loop is xla, and XLA cannot compile the step: {gist(error)}; use loop=graph, or auto, which takes "
            "XLA only where it can"
        ) from error
    return loop

"""A run once more up to a step, in the process of its own program: the part of `replay` and `diff` that trains.

`python -m looplib replay DIR` starts the run's command with an order, in a run directory of its own that holds one
checkpoint. The binary builds and restores everything as always, and passes its controller to `answer`, which trains
without reports, saves, evaluations and actions.
"""

import contextlib
import dataclasses
import hashlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from looplib.base import orders
from looplib.base.messages import join_names
from looplib.base.orders import ReplayOrder
from looplib.errors import Preempted, ReplayError
from looplib.guards.watchdog import Watchdog
from looplib.loop.contracts import Request, Schedule
from looplib.loop.phased_loop import PhasedLoop
from looplib.loop.task_loop import TaskLoop
from looplib.task import model_table
from looplib.task.plain import as_array, as_bytes, as_json
from looplib.task.state import state_of, tables_of, variables_of

if TYPE_CHECKING:
    from looplib.controller import Controller

_NEWS_SECONDS = 0.5
CHECKSUM = "sha256 "  # before the checksum of an array, in a trace


@dataclasses.dataclass(frozen=True)
class Trace:
    """What one step did.

    Attributes:
      step: the global step; the first of a trace is the state before any step, without metrics.
      metrics: the metrics of this step alone, by name; lists for arrays.
      variables: the value of each variable after it as text, a checksum for an array, by name.
    """

    step: int
    metrics: dict[str, Any]
    variables: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a process hands back.

    Attributes:
      lines: what to print.
      equal: whether all numbers that the run has reported were found again.
      traces: of each step, if they were asked for.
    """

    lines: list[str]
    equal: bool = True
    traces: list[Trace] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class _PlayerState:
    """The state between two steps: of the variables and tables, the metrics so far, the places in run and data."""

    values: list[Any]
    tables: list[tuple[tf.Tensor, tf.Tensor]]
    totals: Any
    step: int
    data_step: int
    position: bytes | None


class Player:
    """Trains a controller's trainer up to a step.

    Args:
      controller: restored, before its first step.
      evaluate_every: steps between the run's evaluations, or those of each evaluator; None for none.
      batch_size: the run's global batch size, or None if it is not known.

    Attributes:
      loop: the loop of the trainer.
      start: the step of the checkpoint that was restored; 0 for none.
      reported: the metrics of each report on the way, by step.

    Raises:
      UsageError: for a trainer with a loop of its own, or another batch size.
    """

    def __init__(
        self, controller: "Controller", evaluate_every: int | dict[str, int] | None, batch_size: int | None
    ) -> None:
        loop = controller.loops.get("train")
        if not isinstance(loop, TaskLoop):
            raise ReplayError("a replay needs a trainer whose data and steps looplib runs; one of Orbit's runs its own")
        if batch_size not in (None, loop.batches.size):
            raise ReplayError(
                f"the run had batches of {batch_size} examples in this step, and its program now makes some of "
                f"{loop.batches.size}; set the global batch size that it had"
            )
        self.loop = loop
        self.reported: dict[int, dict[str, int | float]] = {}
        names = [name for name in controller.loops if name != "train"] if evaluate_every else []
        is_by_name = isinstance(evaluate_every, dict)
        self._evaluate_every = evaluate_every if is_by_name else dict.fromkeys(names, evaluate_every)
        self._controller = controller
        self._offset = loop.data.stream.start_step - controller.global_step  # of a run that left out data in a rollback
        self.start = self._metrics_since = controller.global_step

    @property
    def step(self) -> int:
        """The global step."""
        return self._controller.global_step

    def progress(self) -> tuple[int, float]:
        """Returns numbers, at least one of which changes with progress; the global step first."""
        return self.step, self.loop.progress()

    def play(self, end: int) -> None:
        """Trains to a step, with the boundaries of the run, at which the engines divide the steps as the run did.

        Raises:
          UsageError: if the data ends before, or a value is not finite.
        """
        schedule = Schedule(
            self._controller.steps_per_loop, self._controller.policy.every_steps, self._evaluate_every, end
        )
        for boundary in schedule.boundaries(self.step):
            step = self.step
            request = Request(boundary.step - step, read=boundary.report, horizon=end - step)
            if not self._run(request):
                after, names = self.loop.reducer.first_bad()
                bad = self._metrics_since + after
                raise ReplayError(
                    f"step {bad} has values that are not finite already ({join_names(names)}); replay --step={bad}"
                )
            if boundary.report:
                self.reported[boundary.step] = self.loop.read_metrics()
                self._metrics_since = boundary.step
        if isinstance(self.loop, PhasedLoop):
            self.loop.enter(end)

    def play_one(self) -> dict[str, int | float]:
        """Does the next step; returns the metrics since the last report."""
        self._run(Request(1, read=True))
        return self.loop.read_metrics()

    def _run(self, request: Request) -> bool:
        """Runs steps; returns whether all values were finite."""
        step = self.step
        ran = self.loop.run(request, "train")
        if ran.stopped:
            raise Preempted(f"the replay was ended by a signal at step {step + ran.done}")
        if ran.finite and ran.done < request.steps:
            raise ReplayError(f"the data ends at step {step + ran.done}; name an earlier step")
        return ran.finite

    def trace(self, end: int) -> list[Trace]:
        """Trains to a step one by one, or to the first value that is not finite; returns what each step did."""
        reducer = self.loop.reducer
        traces, finite = [Trace(self.step, {}, self._checksums())], True
        reducer.read()
        while finite and self.step < end:
            finite = self._run(Request(1))
            metrics = reducer.packer.unpack(*reducer.read())
            plain = {name: as_json(as_array(value)) for name, value in metrics.items()}
            traces.append(Trace(self.step, plain, self._checksums()))
        return traces

    def _checksums(self) -> dict[str, str]:
        """Returns the variables of the model, then of optimizers and the like, as a `Trace` has them."""
        model = [(name, variable) for name, variable, _ in model_table.variables(self.loop.task)]
        own = {id(variable) for _, variable in model}
        others = [pair for pair in variables_of(state_of(self.loop.task)) if id(pair[1]) not in own]
        found: dict[str, str] = {}
        for name, variable in [*model, *others]:
            value = as_array(variable)
            while name in found:  # optimizers of tf_keras give several slots one name
                name += "'"
            scalar = value.size == 1
            found[name] = str(value.item()) if scalar else CHECKSUM + hashlib.sha256(as_bytes(value)).hexdigest()
        for table in self._tables:
            name = f"table {table.name}"
            while name in found:
                name += "'"
            keys, values = (as_array(part).tolist() for part in table.export())
            entries = sorted(zip(map(repr, keys), map(repr, values)))
            found[name] = CHECKSUM + hashlib.sha256(repr(entries).encode()).hexdigest()
        return found

    @property
    def _tables(self) -> list[Any]:
        return tables_of(state_of(self.loop.task))

    def note(self) -> _PlayerState:
        """Returns the state before the next step, for `go_back`."""
        values = [variable.numpy() for variable in self.loop.step.variables]
        position = self.loop.position(self.step + self._offset)
        tables = [table.export() for table in self._tables]
        return _PlayerState(values, tables, self.loop.reducer.state(), self.step, self.step + self._offset, position)

    def go_back(self, moment: _PlayerState, fresh: bool = False) -> None:
        """Restores a state.

        Args:
          moment: the state.
          fresh: whether the metrics start again from zero.
        """
        for variable, value in zip(self.loop.step.variables, moment.values):
            variable.assign(value)
        for table, (keys, values) in zip(self._tables, moment.tables):
            table.remove(table.export()[0])
            table.insert(keys, values)
        self.loop.task.global_step.assign(moment.step)
        self.loop.reducer.load(moment.totals)
        if fresh:
            self.loop.reducer.read()
        self.loop.rewind(moment.data_step, moment.position)

    def batch_at(self, moment: _PlayerState) -> tuple[Any, tf.Tensor | None]:
        """Reads the batch of the step after a state.

        Returns:
          `(batch, ids)`: the batches of all replicas, for `strategy.run`, and the ids of its examples that
          `context.indices` gave, int64 `[n]`, or None where the data was not made from it.

        Raises:
          UsageError: if the data ends there.
        """
        self.loop.rewind(moment.data_step, moment.position)
        stream = self.loop.data.stream
        iterator = stream.iterate(moment.position)
        optional = stream.next_as_optional(iterator)
        if not stream.has_value(optional):
            raise ReplayError(f"the data ends at step {moment.step}; name an earlier step")
        batch, ids = stream.get_value(optional), None
        if (call := stream.context().requests.last) is not None and (given := call.ids) is not None:
            parts = self.loop.step.strategy.num_replicas_in_sync if stream.start_step == moment.data_step else 0
            found = [tf.nest.flatten(element)[0] for element in given.take(parts)]  # without seeds and the like
            ids = tf.concat(found, axis=0) if found else None
        stream.end(iterator)
        return batch, ids


def answer(order: ReplayOrder, controller: "Controller", evaluate_every: int | dict[str, int] | None) -> None:
    """Trains to the step that is ordered, and answers with what was found.

    Args:
      order: the order.
      controller: restored, before its first step.
      evaluate_every: see `Player`.

    Raises:
      UsageError: for a trainer with a loop of its own, or a step that cannot be reached.
    """
    import numpy as np  # here, because every start of a binary imports this file

    from looplib.replay import normalization, step_view

    player = Player(controller, evaluate_every, order.batch_size)
    watchdog = Watchdog(controller.clock, player.progress, lambda: None, controller.guards.stall_limit)
    with _telling(player, order), controller.clock.phase("train"), watchdog.watching():
        if order.weights:
            values = normalization.recompute(player, order.weights, order.step - player.step)
            np.savez(order.arrays, **values)
            found = Answer([])
        else:
            found = Answer([], traces=player.trace(order.step)) if order.trace else step_view.look(player, order)
    orders.answer(found)


@contextlib.contextmanager
def _telling(player: Player, order: ReplayOrder) -> Iterator[None]:
    """Tells what the player is doing, again and again while a `with` block runs."""
    ended = threading.Event()

    def tell() -> None:
        furthest = 0  # as the last step is run several times, each from the state before it
        while not ended.wait(_NEWS_SECONDS):
            stream, furthest = player.loop.data.stream, max(furthest, player.step)
            skips = 0 < stream.passed < stream.skipped
            batches = f", reading its data again: {stream.passed:,} of {stream.skipped:,} batches" * skips
            orders.tell(f"at step {furthest:,} of {order.step:,}{batches}")

    thread = threading.Thread(target=tell, name="looplib-replay-news", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()

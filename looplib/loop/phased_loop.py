"""The loop of a trainer with phases: a traced step and an inner loop for each of them, over one stream of data."""

import dataclasses

from looplib.base.messages import join_names
from looplib.cluster import runtime
from looplib.errors import MetricError, ParameterServerError, SettingError
from looplib.loop.contracts import InnerLoop, LoopResult, Request, Specification
from looplib.loop.engines import backend_of
from looplib.loop.reducer import Reducer
from looplib.loop.step_checks import TracedValues
from looplib.loop.task_loop import TaskLoop
from looplib.task.phases import PhasedTraining


@dataclasses.dataclass(frozen=True)
class _Program:
    """The parts of a `TaskLoop` for the steps of a phase."""

    inner: InnerLoop
    traced: TracedValues | None
    reducer: Reducer


class PhasedLoop(TaskLoop):
    """A `TaskLoop` whose steps are those of the phase that the global step is in.

    All phases share the data, the metrics since the last report and the checkpoint. Building the loop traces the steps
    of the phase that the run is in, and of all later ones, so that an error in any is found before the first step.

    Args:
      spec: the specification of a `GradientTrainer` with phases.

    Raises:
      UsageError: for parameter servers.
    """

    def __init__(self, spec: Specification) -> None:
        if runtime.is_remote(spec.strategy):
            raise ParameterServerError(
                "the trainer has phases, and the steps of parameter servers follow no common count; train each phase "
                "as a run of its own (--warm_start), or use another strategy"
            )
        self._phases: PhasedTraining = spec.task.training_phases
        self._measures = spec.task.micro_batches is None
        self._number = self._phases.number_at(spec.start_step)
        continues = spec.start_step > 0 and self._number == self._phases.number_at(spec.start_step - 1)
        self._chosen_in = self._number if continues else None  # the phase that chose the engine of the checkpoint
        super().__init__(spec)

    def _build(self) -> None:
        self._programs: dict[int, _Program] = {}
        number = self._number
        super()._build()
        self._programs[number] = self._program
        for later in range(number + 1, len(self._phases)):
            self._prepare(later)
        self._take(number)

    def _trace(self, *_: object) -> None:
        """See `TaskLoop`; the step is that of the phase."""
        spec = self._spec if self._number == self._chosen_in else dataclasses.replace(self._spec, chosen=None)
        if self._measures:  # how many parts the batch of each phase needs
            self.task.micro_batches = None
        super()._trace(backend_of(spec), self._phases.step_fn(self.task, self._number))

    @property
    def _program(self) -> _Program:
        return _Program(self._inner, self._traced, self.reducer)

    def _take(self, number: int) -> None:
        program, self._number = self._programs[number], number
        self._inner, self._traced, self.reducer = program.inner, program.traced, program.reducer

    def _prepare(self, number: int) -> None:
        """Traces the steps of another phase than the one that the run begins in, and makes it the one of the loop."""
        before, self._number = self.reducer.packer, number
        self.reducer = backend_of(self._spec).reducer()  # which watches other gradients
        self._trace()
        self._programs[number] = self._program
        now = self.reducer.packer
        if None not in (before.slots, now.slots) and (before.slots, before.keras) != (now.slots, now.keras):
            raise MetricError(
                f"{self._spec.step_name} returns the metrics {join_names(now.names)} in phase {number + 1}, and "
                f"{join_names(before.names)} in another; expected the same metrics in all phases"
            )

    def enter(self, step: int) -> None:
        """Makes the loop that of the step which follows `step`; sets the rate of a phase that begins there."""
        number = self._phases.number_at(step)
        if number != self._number:
            if self._traced:
                self._traced.check(self._spec.step_name)
            before = self.reducer
            if number not in self._programs:
                self._prepare(number)
            self._take(number)
            self.reducer.load(before.state(), before.steps)
            if self._measures and self._inner.step is None:
                self.task.micro_batches = None
            if self.data.iterator is not None and not self._inner.traces:
                with self._spec.clock.phase("compile"):
                    self._inner.trace(self.data.iterator)
        self._phases.start(step)

    def run(self, request: Request, phase: str) -> LoopResult:
        """See `Loop`; no call of an inner loop crosses the end of a phase."""
        total = LoopResult(0, True)
        while True:
            step = int(self._spec.counter)
            self.enter(step)
            rest, left = request.after(total.done), self._phases.left(step)
            crosses = left is not None and not 0 <= rest.steps <= left
            part = dataclasses.replace(rest.first(left), show=False) if crosses else rest
            if left is not None:
                part = dataclasses.replace(part, horizon=min(part.horizon, left))
            ran = super().run(part, phase)
            total = total.then(ran)
            if not crosses or not ran.go or ran.done < left:
                return total

    def foresee_end(self, target: int) -> None:
        """See `TrainingLoop`; raises `UsageError` for a training beyond the last phase."""
        end = self._phases.end
        if end is not None and (target == -1 or target > end):
            to = "the end of the data" if target == -1 else f"step {target}"
            raise SettingError(
                f"the training is to go to {to}, and the last phase ends at step {end}; leave out its until to go on "
                "with it, or add a phase"
            )
        super().foresee_end(target)

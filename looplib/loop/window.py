"""The window of steps since the last report: its metrics, checked, and its speed."""

from looplib.guards.guards import Guards, check_loss, check_skipped
from looplib.loop.base import TrainingLoop
from looplib.report.clock import Clock
from looplib.task.adapter import rates_of
from looplib.task.plain import as_number


class Window:
    """The training steps since the last report. Their time is that of the clock's phases "train" and "input".

    Attributes:
      start: the step of the last report, or the one that the training continued from. The first is part of the state of
        a run, because a checkpoint within a window holds its metrics so far.
    """

    def __init__(self, training: TrainingLoop, clock: Clock, guards: Guards) -> None:
        self.start = 0
        self._training, self._clock, self._guards = training, clock, guards
        self._mark = (0, 0.0)

    def measure_from(self, step: int) -> None:
        """Starts to measure the speed at a step."""
        self._mark = step, self._seconds()

    def metrics(self, step: int, losses: list[float], complete: int) -> dict[str, float]:
        """Ends the window at a step; returns its metrics, with `steps_per_second` and, if it is known, the `epoch`.

        This window's loss is added to the last reported `losses`; `complete` is the steps of a complete window. Raises
        `Diverged` if the loss jumps, or every step was skipped.
        """
        steps, seconds = step - self._mark[0], self._seconds() - self._mark[1]
        with self._clock.phase("report"):
            metrics = self._training.read_metrics()
            check_skipped(step, metrics, step - self.start)
            self.start = step
            loss = metrics.get(self._training.task.loss_name)
            check_loss(losses, step, loss, self._guards, complete)
            if steps and seconds:
                metrics["steps_per_second"] = round(steps / seconds, 2)
                for name, value in rates_of(self._training.task).items():
                    metrics[name] = as_number(f"the rate {name!r} of {self._training.who}", value) * steps / seconds
            if (epochs := self._training.epochs_at(step)) is not None:
                metrics["epoch"] = round(epochs, 3)
        self.measure_from(step)
        return metrics

    def _seconds(self) -> float:
        return self._clock.of("train") + self._clock.of("input")

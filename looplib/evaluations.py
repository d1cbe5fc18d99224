"""The evaluations of a run: at its current step, or of each checkpoint that another job writes."""

import contextlib
from collections.abc import Callable, Iterator

import tensorflow as tf

from looplib import console
from looplib.errors import UsageError, whole_number
from looplib.health.preemption import notice
from looplib.loop import task_loop
from looplib.run import Metrics, Run


class Evaluations:
    """The evaluations of a run.

    Args:
      run: the run, with its evaluators.
      publish: function of `(split, step, metrics)`, which reports metrics.
    """

    def __init__(self, run: Run, publish: Callable[[str, int, Metrics], None]) -> None:
        self._run = run
        self._publish = publish

    def at_this_step(self, steps: int) -> dict[str, Metrics]:
        """Runs every evaluator, see `Controller.evaluate`."""
        run, loops = self._run, self._run.loops
        steps = task_loop.check_evaluation(loops.evaluations, steps)
        run.refuse_without_state()
        with contextlib.nullcontext() if loops.training else run.report.of_a_start(run.restored_from):
            results, step = {}, run.step
            with console.guarded(), notice.listening(), run.watchdog.watching():
                for name in loops.evaluations:
                    metrics = loops.evaluate(name, steps)
                    if metrics is None:
                        run.leave(step)
                    results[name] = metrics
                    self._publish(name, step, metrics)
                    run.show(name, step, loops.evaluations[name].shown())
            run.writers.flush()
            run.note_evaluation(step, results)
            return results

    def of_each_checkpoint(self, steps: int, until_step: int | None, timeout: float | None) -> dict[str, Metrics]:
        """Runs every evaluator on each new checkpoint, see `Controller.evaluate_continuously`."""
        run = self._run
        steps = task_loop.check_evaluation(run.loops.evaluations, steps)
        if until_step is not None:
            until_step = whole_number("until_step", until_step, least=0)
        results = None
        run.directory.need("evaluate_continuously")
        run.refuse_while_training("evaluate_continuously")
        with console.guarded(), notice.listening():
            for _ in self._follow(timeout):
                results = self.at_this_step(steps)
                if until_step is not None and run.step >= until_step:
                    break
        if results is None:
            raise UsageError(
                f"no checkpoint came in {run.directory.checkpoints} within {timeout} s; check that the training writes "
                "there"
            )
        return results

    def _follow(self, timeout: float | None) -> Iterator[None]:
        """Restores each new checkpoint of another job, for which it waits some seconds, or forever."""
        run, known = self._run, None
        while path := run.directory.wait_for_newer(known, timeout):
            try:
                run.restore(path)
            except UsageError:
                if tf.io.gfile.exists(path + ".commit") or run.workers.count > 1:
                    raise
                continue  # the training has meanwhile deleted it, and has newer ones
            yield
            known = run.restored_from

    def lack(self) -> bool:
        """Returns whether an evaluator has not reported at the current step."""
        reported, step = self._run.store.record.reported, self._run.step
        return any(reported.get(name) != step for name in self._run.loops.evaluations)

"""Orbit: its controller, which comes with tf-models-official."""

import contextlib
import io

import orbit
import tensorflow as tf

from benchmarks.workloads import means, timed


def controller_loop(task, to_the_end=False):
    """Builds Orbit's controller: a tf.while loop of known length; to the end of the data it must call each step."""
    runner = _OrbitTask(task, orbit.StandardEvaluatorOptions(use_tf_while_loop=not to_the_end))
    step = task.optimizer.iterations  # one counter is enough
    step = step if isinstance(step, tf.Variable) else step.value
    role = {"trainer" if task.training else "evaluator": runner}
    controller = orbit.Controller(**role, global_step=step, steps_per_loop=task.steps_per_loop)

    def run(amount):
        with contextlib.redirect_stdout(io.StringIO()):  # a terminal would cost more
            if task.training:
                controller.train(int(step) + amount)
                return runner.metrics
            return [controller.evaluate(-1 if to_the_end else task.steps_per_loop) for _ in range(amount)][-1]

    return timed(run, task.loss)


class _OrbitTask(orbit.StandardTrainer, orbit.StandardEvaluator):
    def __init__(self, task, options):
        orbit.StandardTrainer.__init__(self, task.dataset())
        orbit.StandardEvaluator.__init__(self, task.dataset(), options)
        self._task, self._sums = task, tf.Variable(tf.zeros(3))

    def train_loop_begin(self):
        self._sums.assign(tf.zeros(3))

    def train_step(self, iterator):
        self._sums.assign_add(self._task.sums(iterator))

    def train_loop_end(self):
        self.metrics = means(self._sums)
        return self.metrics

    eval_begin, eval_step, eval_end = train_loop_begin, train_step, train_loop_end

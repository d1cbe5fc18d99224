"""Orbit: its controller, which comes with tf-models-official."""

import contextlib
import io

import orbit
import tensorflow as tf

from benchmarks.workloads import means, timed


def controller_loop(task, to_the_end=False, strategy=None):
    """Builds Orbit's controller: a tf.while loop of known length; to the end of the data it must call each step."""
    strategy = strategy or tf.distribute.get_strategy()
    runner = _OrbitTask(task, strategy, orbit.StandardEvaluatorOptions(use_tf_while_loop=not to_the_end))
    step = task.optimizer.iterations  # one counter is enough
    step = step if isinstance(step, tf.Variable) else step.value
    role = {"trainer" if task.training else "evaluator": runner}
    controller = orbit.Controller(**role, strategy=strategy, global_step=step, steps_per_loop=task.steps_per_loop)

    def run(amount):
        with contextlib.redirect_stdout(io.StringIO()):  # a terminal would cost more
            if task.training:
                controller.train(int(step.read_value()) + amount)
                return runner.metrics
            return [controller.evaluate(-1 if to_the_end else task.steps_per_loop) for _ in range(amount)][-1]

    return timed(run, task.loss)


class _OrbitTask(orbit.StandardTrainer, orbit.StandardEvaluator):
    def __init__(self, task, strategy, options):
        replicas = strategy.num_replicas_in_sync
        dataset = strategy.distribute_datasets_from_function(lambda context: task.dataset(replicas))
        orbit.StandardTrainer.__init__(self, dataset)
        orbit.StandardEvaluator.__init__(self, dataset, options)
        self._task, self._strategy = task, strategy
        kind = dict(synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM)
        with strategy.scope():
            self._sums = tf.Variable(tf.zeros(3), **kind)

    def train_loop_begin(self):
        self._sums.assign(tf.zeros(3))

    def train_step(self, iterator):
        self._strategy.run(self._step, args=(next(iterator),))

    def _step(self, inputs):
        self._sums.assign_add(self._task.sums(*inputs))

    def train_loop_end(self):
        self.metrics = means(self._sums.read_value())
        return self.metrics

    eval_begin, eval_step, eval_end = train_loop_begin, train_step, train_loop_end

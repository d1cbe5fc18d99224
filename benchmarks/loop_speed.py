"""How fast looplib's loop is beside its peers': `python -m benchmarks.loop_speed`.

One process holds every contestant and gives them turns, so that a change in the machine's load meets all alike. They
share the model, its initial weights, Adam, the data and one tf.data pipeline, all compute loss and accuracy, and no
result counts unless they are shown to compute the same first. Each peer stands at its best setting: Orbit keeps its
metrics in one variable rather than in Keras metrics, and prints to nowhere; Keras runs with and without XLA, and its
fit brings metrics to the host only once an epoch, where the others do once a loop.

Workloads:
  W1: trains an MLP 784-128-128-10, batch 128, 100 steps a loop.
  W2: trains an MLP 64-64-10, batch 32, 100 steps a loop.
  W6: evaluates an MLP 784-128-10 on 10,007 examples, batch 128, to the last example.
  W7-1, W7-10: W2 with 1 and 10 steps a loop, where the outer loop shows.

A ratio is looplib's speed divided by a peer's: the median over rounds of the ratio within a round, and its quartiles.
"""

import contextlib
import dataclasses
import functools
import io
import json
import os
import time
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported

import keras
import numpy as np
import orbit
import tensorflow as tf
from absl import app, flags, logging

import looplib

_ROUNDS = flags.DEFINE_integer("rounds", 15, "Rounds that count; one more before them warms up.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 2000, "Training steps of a contestant in a round.", lower_bound=100)
_EVALUATIONS = flags.DEFINE_integer("evaluations", 5, "Evaluations of a contestant in a round.", lower_bound=1)
_WORKLOADS = flags.DEFINE_list("workloads", ["W1", "W2", "W6", "W7-1", "W7-10"], "The workloads to run.")
_OUTPUT = flags.DEFINE_string("output", "build/bench.json", "The file to write the ratios to.")

_CHECKED_STEPS = 100
_TOLERANCE = 1e-3  # relative; float32 sums in another order, and XLA's, differ by less
_REORDERED_TOLERANCE = 0.1  # the same, after as many steps on the same examples in another order
_OURS, _OWN_INPUT = "looplib", "looplib, own input"


@dataclasses.dataclass(frozen=True)
class Workload:
    """What every contestant of a table does.

    Attributes:
      layers: widths of the MLP, input and output included.
      batch: examples of a step.
      examples: size of the data set.
      loop: steps of one call into the device, after which metrics are read; 0 for an evaluation.
    """

    layers: tuple[int, ...]
    batch: int
    examples: int
    loop: int


WORKLOADS = {
    "W1": Workload((784, 128, 128, 10), 128, 10_000, 100),
    "W2": Workload((64, 64, 10), 32, 10_000, 100),
    "W6": Workload((784, 128, 10), 128, 10_007, 0),
    "W7-1": Workload((64, 64, 10), 32, 10_000, 1),
    "W7-10": Workload((64, 64, 10), 32, 10_000, 10),
}


@dataclasses.dataclass(frozen=True)
class Contestant:
    """One loop, ready to go on.

    Attributes:
      model: the Keras model that it trains or evaluates.
      run: does so many steps (training) or whole evaluations; returns `(seconds, metrics)`, the metrics those of the
        last loop or evaluation.
    """

    model: keras.Model
    run: Callable[[int], tuple[float, dict]]


class Task:
    """The model, data and step that all contestants of a workload share; each contestant makes a task of its own.

    Args:
      workload: `Workload`.
      arrays: pair of tensors, float32 `[examples, features]` and int64 labels `[examples]`.
    """

    def __init__(self, workload, arrays):
        self.workload = workload
        self.arrays = arrays
        self.steps_per_loop = workload.loop or -(-workload.examples // workload.batch)
        keras.utils.set_random_seed(0)  # the same initial weights, and the same order of the data
        features, *hidden, classes = workload.layers
        layers = [keras.layers.Dense(width, activation="relu") for width in hidden]
        self.model = keras.Sequential([keras.Input((features,)), *layers, keras.layers.Dense(classes)])
        self.optimizer = keras.optimizers.Adam(1e-3)
        self.optimizer.build(self.model.trainable_variables)

    def dataset(self):
        """Returns the pipeline of every contestant but those with their own input."""
        dataset, training = tf.data.Dataset.from_tensor_slices(self.arrays), bool(self.workload.loop)
        if training:
            dataset = dataset.shuffle(1000, seed=1).repeat()
        return dataset.batch(self.workload.batch, drop_remainder=training).prefetch(tf.data.AUTOTUNE)

    def own_input(self, context):
        """Returns looplib's own pipeline: ids in a keyed order, and one gather a batch."""
        features, labels = self.arrays
        ids = context.indices(self.workload.examples)
        batches = ids.map(lambda ids: (tf.gather(features, ids), tf.gather(labels, ids)), tf.data.AUTOTUNE)
        return batches.prefetch(tf.data.AUTOTUNE)

    def step(self, features, labels, mean=tf.reduce_mean):
        """Does one step; returns what each example's loss was and whether its prediction was right."""
        training = bool(self.workload.loop)
        with tf.GradientTape() as tape:
            logits = self.model(features, training=training)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = mean(losses) if training else None
        if training:
            variables = self.model.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return losses, tf.equal(tf.argmax(logits, axis=1), labels)

    def sums(self, iterator):
        """Does one step; returns [sum of losses, number right, number of examples]."""
        losses, right = self.step(*next(iterator))
        examples = tf.cast(tf.size(losses), tf.float32)
        return tf.stack([tf.reduce_sum(losses), tf.reduce_sum(tf.cast(right, tf.float32)), examples])

    def contestant(self, function):
        """Returns a `Contestant` of a function that returns metrics; the whole of it is timed."""

        def run(amount):
            start = time.perf_counter()
            metrics = function(amount)
            return time.perf_counter() - start, metrics

        return Contestant(self.model, run)


def _means(sums):
    loss, right, examples = np.asarray(sums)
    return {"loss": float(loss / examples), "accuracy": float(right / examples)}


# Contestants: functions from a `Task` to a `Contestant`.


def looplib_loop(task, own_input=False, guarded=True):
    """Builds looplib's controller, which finds the end of the data by itself; its guards are on by default."""
    policy = looplib.CheckpointPolicy(guards=looplib.Guards() if guarded else looplib.Guards("off", stall_limit=0))
    role = {"trainer" if task.workload.loop else "evaluator": _LooplibTask(task, own_input)}
    controller = looplib.Controller(
        **role,
        global_batch_size=task.workload.batch,
        steps_per_loop=task.steps_per_loop,
        checkpoints=policy,
        writers=[],
    )
    if task.workload.loop:
        return task.contestant(lambda steps: controller.train(controller.global_step + steps))
    return task.contestant(lambda times: [controller.evaluate()["eval"] for _ in range(times)][-1])


class _LooplibTask(looplib.Trainer, looplib.Evaluator):
    def __init__(self, task, own_input):
        self.model, self.optimizer = task.model, task.optimizer
        self._task, self._own_input = task, own_input

    def dataset(self, context):
        return self._task.own_input(context) if self._own_input else self._task.dataset()

    def step_fn(self, inputs):
        losses, right = self._task.step(*inputs, mean=self.global_mean)
        return {"loss": losses, "accuracy": right}


def by_hand(task, in_graph=True):
    """Builds a tf.range loop that keeps its metrics in loop variables, or else a Python loop that calls each step."""
    dataset = task.dataset()
    endless = iter(dataset) if task.workload.loop else None

    def step(iterator, sums):
        return sums + task.sums(iterator)

    def loop(iterator, steps):
        sums = tf.zeros(3)
        for _ in steps:
            sums = step(iterator, sums)
        return sums

    if in_graph:
        whole_loop = tf.function(lambda iterator: loop(iterator, tf.range(task.steps_per_loop)))
    else:
        step = tf.function(step)

        def whole_loop(iterator):
            return loop(iterator, range(task.steps_per_loop))

    def run(amount):
        for _ in range(amount // (task.workload.loop or 1)):
            metrics = _means(whole_loop(endless or iter(dataset)))
        return metrics

    return task.contestant(run)


def orbit_loop(task, to_the_end=False):
    """Builds Orbit's controller: a tf.while loop of known length; to the end of the data it must call each step."""
    runner = _OrbitTask(task, orbit.StandardEvaluatorOptions(use_tf_while_loop=not to_the_end))
    step = task.optimizer.iterations.value  # one counter is enough
    role = {"trainer" if task.workload.loop else "evaluator": runner}
    controller = orbit.Controller(**role, global_step=step, steps_per_loop=task.steps_per_loop)

    def run(amount):
        with contextlib.redirect_stdout(io.StringIO()):  # a terminal would cost more
            if task.workload.loop:
                controller.train(int(step) + amount)
                return runner.metrics
            return [controller.evaluate(-1 if to_the_end else task.steps_per_loop) for _ in range(amount)][-1]

    return task.contestant(run)


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
        self.metrics = _means(self._sums)
        return self.metrics

    eval_begin, eval_step, eval_end = train_loop_begin, train_step, train_loop_end


def keras_loop(task, jit_compile=False):
    """Builds Keras's fit or evaluate, timed in the steady state: a fit's second epoch, an evaluation's steps."""
    task.model.compile(
        task.optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=jit_compile,
        steps_per_execution=task.steps_per_loop,
    )
    dataset, stopwatch = task.dataset(), _Stopwatch()
    options = {"verbose": 0, "callbacks": [stopwatch]}

    def fit(steps):
        epochs = 2 if int(task.optimizer.iterations) else 1  # the check wants the first steps alone
        history = task.model.fit(dataset, epochs=epochs, steps_per_epoch=steps, shuffle=False, **options)
        return stopwatch.seconds, {name: values[-1] for name, values in history.history.items()}

    def evaluate(times):
        seconds = 0.0
        for _ in range(times):
            metrics = task.model.evaluate(dataset, return_dict=True, **options)
            seconds += stopwatch.seconds
        return seconds, metrics

    return Contestant(task.model, fit if task.workload.loop else evaluate)


class _Stopwatch(keras.callbacks.Callback):
    def _start(self, *_):
        self._started = time.perf_counter()

    def _stop(self, *_):
        self.seconds = time.perf_counter() - self._started

    on_epoch_begin = on_test_begin = _start
    on_epoch_end = on_test_end = _stop


CONTESTANTS = {
    _OURS: looplib_loop,
    _OWN_INPUT: functools.partial(looplib_loop, own_input=True),
    "looplib, unguarded": functools.partial(looplib_loop, guarded=False),
    "bare": by_hand,
    "orbit": orbit_loop,
    "orbit, to the end": functools.partial(orbit_loop, to_the_end=True),
    "keras": keras_loop,
    "keras, XLA": functools.partial(keras_loop, jit_compile=True),
    "step a call": functools.partial(by_hand, in_graph=False),
}


# Measuring.


def make_arrays(workload):
    """Makes normal features and the labels that a random linear map gives them, so that there is something to learn."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(workload.examples, workload.layers[0])).astype("float32")
    labels = np.argmax(features @ rng.normal(size=(workload.layers[0], workload.layers[-1])), axis=1)
    return tf.constant(features), tf.constant(labels, tf.int64)


def check_same(workload, contestants, arrays):
    """Lets every contestant do the first steps and compares the outcome with the bare loop's.

    Args:
      workload: `Workload`.
      contestants: dict from name to `Contestant`, none of which has run.
      arrays: the data, of which the trained models' losses are compared as well as the metrics that were reported.

    Raises:
      RuntimeError: if they differ by more than float arithmetic does.
    """
    outcomes = {}
    for name, contestant in contestants.items():
        _, reported = contestant.run(_CHECKED_STEPS if workload.loop else 1)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(arrays[1], contestant.model(arrays[0]))
        outcomes[name] = {"loss of the model": float(tf.reduce_mean(losses))}
        if workload.loop in (0, _CHECKED_STEPS):  # or else fit's cover all steps and the others' the last loop
            outcomes[name].update({f"reported {what}": reported[what] for what in ("loss", "accuracy")})
    for name, outcome in outcomes.items():
        reordered = name == _OWN_INPUT and workload.loop  # the same work, but not the same numbers
        tolerance = _REORDERED_TOLERANCE if reordered else _TOLERANCE
        for what, expected in outcomes["bare"].items():
            if not abs(outcome[what] - expected) <= tolerance * abs(expected):
                raise RuntimeError(
                    f"{name} does not compute what the bare loop does: {what} {outcome[what]}, expected {expected}; "
                    "their speeds cannot be compared until it does"
                )


def measure(workload, rounds, amount):
    """Runs a workload.

    Args:
      workload: `Workload`.
      rounds: rounds that count.
      amount: steps (training) or evaluations of a contestant in a round.

    Returns:
      dict from contestant to float array `[rounds]`, steps (or evaluations) per second.

    Raises:
      RuntimeError: if the contestants do not compute the same.
    """
    arrays = make_arrays(workload)
    builders = {name: build for name, build in CONTESTANTS.items() if not (workload.loop and "to the end" in name)}
    contestants = {name: build(Task(workload, arrays)) for name, build in builders.items()}
    check_same(workload, contestants, arrays)
    names, speeds = list(contestants), {name: [] for name in contestants}
    for number in range(rounds + 1):
        names.append(names.pop(0))  # so that load which comes and goes with the rounds meets another one
        for name in names:
            contestants[name].run(_CHECKED_STEPS if workload.loop else 1)  # so that all start with warm caches
            seconds, _ = contestants[name].run(amount)
            if number:
                speeds[name].append(amount / seconds)
    return {name: np.array(values) for name, values in speeds.items()}


def compare(speeds, ours, peer):
    """Returns (median, lower quartile, upper quartile) of the ratio of two contestants' speeds within a round."""
    return tuple(float(value) for value in np.quantile(speeds[ours] / speeds[peer], [0.5, 0.25, 0.75]))


def main(argv):
    """Runs the workloads, prints a table of each and writes the ratios."""
    del argv
    if set(_WORKLOADS.value) - set(WORKLOADS) or _STEPS.value % 100:
        raise app.UsageError(f"--workloads: one of {', '.join(WORKLOADS)}; --steps: a multiple of 100")
    logging.set_verbosity(logging.WARNING)  # Orbit logs every loop
    records = []
    for name in _WORKLOADS.value:
        workload = WORKLOADS[name]
        speeds = measure(workload, _ROUNDS.value, _STEPS.value if workload.loop else _EVALUATIONS.value)
        unit, kind = ("steps/s", f"{workload.loop} steps a loop") if workload.loop else ("evals/s", "evaluation")
        print(f"\n{name}: MLP {workload.layers}, batch {workload.batch}, {kind}, {_ROUNDS.value} rounds")
        print(f"{'':<19}{unit:>9}{'looplib / it':>14}{'(quartiles)':>15}{'own input / it':>17}")
        for peer in speeds:
            ratio, low, high = compare(speeds, _OURS, peer)
            speed, own = np.median(speeds[peer]), compare(speeds, _OWN_INPUT, peer)[0]
            print(f"{peer:<19}{speed:>9.1f}{ratio:>14.2f}{f'({low:.2f}-{high:.2f})':>15}{own:>17.2f}", flush=True)
            if peer != _OURS:
                numbers = {"ratio": round(ratio, 3), "low": round(low, 3), "high": round(high, 3)}
                records.append({"workload": name, "against": peer, **numbers, "rounds": _ROUNDS.value})
    os.makedirs(os.path.dirname(os.path.abspath(_OUTPUT.value)), exist_ok=True)
    with open(_OUTPUT.value, "w") as file:
        file.write(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    app.run(main)

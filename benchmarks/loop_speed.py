"""How fast looplib's loop is beside its peers': `python -m benchmarks.loop_speed`.

One process holds every contestant and gives them turns, so that a change in the machine's load meets all alike. They
share the model, its initial weights, Adam, the data and one tf.data pipeline, all report loss and accuracy as often, and
no result counts unless they are shown to compute the same first. Each peer stands at its best setting: Orbit keeps its
metrics in one variable rather than in Keras metrics, and prints to nowhere; Keras runs with and without XLA.

Workloads:
  W1: trains an MLP 784-128-128-10, batch 128, 100 steps a loop.
  W2: trains an MLP 64-64-10, batch 32, 100 steps a loop.
  W6: evaluates an MLP 784-128-10 on 10,007 examples, batch 128, to the last example.
  W7-1, W7-10: W2 with 1 and 10 steps a loop, where the outer loop shows.

A ratio is looplib's speed divided by a peer's: the median over rounds of the ratio within a round, and its quartiles.
"""

import contextlib
import dataclasses
import io
import json
import os
import time
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras  # noqa: E402  (TensorFlow reads the log level as it is imported)
import numpy as np  # noqa: E402
import orbit  # noqa: E402
import tensorflow as tf  # noqa: E402
from absl import app, flags  # noqa: E402

import looplib  # noqa: E402

_ROUNDS = flags.DEFINE_integer("rounds", 15, "Rounds that count; one more before them warms up.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 1000, "Training steps of a contestant in a round.", lower_bound=100)
_EVALUATIONS = flags.DEFINE_integer("evaluations", 5, "Evaluations of a contestant in a round.", lower_bound=1)
_WORKLOADS = flags.DEFINE_list("workloads", ["W1", "W2", "W6", "W7-1", "W7-10"], "The workloads to run.")
_OUTPUT = flags.DEFINE_string("output", "build/bench.json", "The file to write the ratios to.")

_CHECKED_STEPS = 100
_TOLERANCE = 1e-3  # relative; float32 sums in another order, and XLA's, differ by less
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
      run: does so many steps (training) or whole evaluations; returns `(seconds, metrics)`, the metrics those of the last
        loop or evaluation.
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
        keras.utils.set_random_seed(0)  # the same initial weights, and the same order of the data
        first, *hidden, last = workload.layers
        layers = [keras.layers.Dense(width, activation="relu") for width in hidden]
        self.model = keras.Sequential([keras.Input((first,)), *layers, keras.layers.Dense(last)])
        self.optimizer = keras.optimizers.Adam(1e-3)
        self.optimizer.build(self.model.trainable_variables)

    def dataset(self):
        """Returns the pipeline of every contestant but those with their own input."""
        dataset = tf.data.Dataset.from_tensor_slices(self.arrays)
        if not self.workload.loop:
            return dataset.batch(self.workload.batch).prefetch(tf.data.AUTOTUNE)
        dataset = dataset.shuffle(1000, seed=1).repeat()
        return dataset.batch(self.workload.batch, drop_remainder=True).prefetch(tf.data.AUTOTUNE)

    def own_input(self, context):
        """Returns looplib's own pipeline: ids in a keyed order, and one gather a batch."""
        features, labels = self.arrays
        batches = context.indices(self.workload.examples).map(
            lambda ids: (tf.gather(features, ids), tf.gather(labels, ids)), num_parallel_calls=tf.data.AUTOTUNE
        )
        return batches.prefetch(tf.data.AUTOTUNE)

    def train_step(self, features, labels, mean=tf.reduce_mean):
        """Does one step; returns what each example's loss was and whether its prediction was right."""
        with tf.GradientTape() as tape:
            logits = self.model(features, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = mean(losses)
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return losses, tf.equal(tf.argmax(logits, axis=1), labels)

    def eval_step(self, features, labels):
        """Evaluates one batch; returns the same."""
        logits = self.model(features, training=False)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        return losses, tf.equal(tf.argmax(logits, axis=1), labels)

    def sums(self, iterator):
        """Takes one step of either kind; returns [sum of losses, number right, number of examples]."""
        losses, right = (self.train_step if self.workload.loop else self.eval_step)(*next(iterator))
        examples = tf.cast(tf.size(losses), tf.float32)
        return tf.stack([tf.reduce_sum(losses), tf.reduce_sum(tf.cast(right, tf.float32)), examples])

    @property
    def eval_steps(self):
        """The number of batches of an evaluation."""
        return -(-self.workload.examples // self.workload.batch)


def _means(sums):
    loss, right, examples = np.asarray(sums)
    return {"loss": float(loss / examples), "accuracy": float(right / examples)}


def _timed(function):
    """Makes a `Contestant.run` of a function that returns metrics."""

    def run(amount):
        start = time.perf_counter()
        metrics = function(amount)
        return time.perf_counter() - start, metrics

    return run


# Training.


class _LooplibTrainer(looplib.Trainer):
    def __init__(self, task, own_input):
        self.model, self.optimizer = task.model, task.optimizer
        self._dataset = task.own_input if own_input else lambda context: task.dataset()
        self._step = task.train_step

    def dataset(self, context):
        return self._dataset(context)

    def step_fn(self, inputs):
        losses, right = self._step(*inputs, mean=self.global_mean)
        return {"loss": losses, "accuracy": right}


def looplib_training(task, own_input=False):
    """looplib's controller, with `task.dataset` or its own input."""
    controller = looplib.Controller(
        trainer=_LooplibTrainer(task, own_input),
        global_batch_size=task.workload.batch,
        steps_per_loop=task.workload.loop,
        writers=[],
    )
    return Contestant(task.model, _timed(lambda steps: controller.train(controller.global_step + steps)))


class _OrbitTrainer(orbit.StandardTrainer):
    def __init__(self, task):
        super().__init__(task.dataset())
        self._task = task
        self._sums = tf.Variable(tf.zeros(3))
        self.metrics = {}

    def train_loop_begin(self):
        self._sums.assign(tf.zeros(3))

    def train_step(self, iterator):
        self._sums.assign_add(self._task.sums(iterator))

    def train_loop_end(self):
        self.metrics = _means(self._sums)
        return dict(self.metrics)


def orbit_training(task):
    """Orbit's controller with a tf.while loop and no summaries; the optimizer's own counter is its global step."""
    trainer = _OrbitTrainer(task)
    step = task.optimizer.iterations.value
    controller = orbit.Controller(trainer=trainer, global_step=step, steps_per_loop=task.workload.loop)

    def train(steps):
        with contextlib.redirect_stdout(io.StringIO()):
            controller.train(int(step) + steps)
        return trainer.metrics

    return Contestant(task.model, _timed(train))


class _Stopwatch(keras.callbacks.Callback):
    """Times the last epoch of a fit, or the steps of an evaluation, without what starts them."""

    def on_epoch_begin(self, epoch, logs=None):
        self.start = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds = time.perf_counter() - self.start

    def on_test_begin(self, logs=None):
        self.start = time.perf_counter()

    def on_test_end(self, logs=None):
        self.seconds = time.perf_counter() - self.start


def _compile(task, jit_compile, steps_per_execution):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    task.model.compile(
        task.optimizer, loss, metrics=["accuracy"], jit_compile=jit_compile, steps_per_execution=steps_per_execution
    )


def keras_training(task, jit_compile=False):
    """Keras's fit, of which the second epoch is timed: the first pays for the start."""
    _compile(task, jit_compile, task.workload.loop)
    dataset, stopwatch = task.dataset(), _Stopwatch()

    def run(steps):
        epochs = 2 if int(task.optimizer.iterations) else 1  # the check wants the first steps alone
        history = task.model.fit(dataset, epochs=epochs, steps_per_epoch=steps, verbose=0, callbacks=[stopwatch])
        return stopwatch.seconds, {name: values[-1] for name, values in history.history.items()}

    return Contestant(task.model, run)


def bare_training(task):
    """A hand-written tf.range loop, which keeps its metrics in loop variables."""
    iterator, loop = iter(task.dataset()), tf.constant(task.workload.loop)

    @tf.function
    def train_loop(iterator, steps):
        sums = tf.zeros(3)
        for _ in tf.range(steps):
            sums += task.sums(iterator)
        return sums

    def train(steps):
        for _ in range(steps // task.workload.loop):
            metrics = _means(train_loop(iterator, loop))
        return metrics

    return Contestant(task.model, _timed(train))


def single_step_training(task):
    """A tf.function of one step, called once a step."""
    iterator = iter(task.dataset())
    step = tf.function(lambda iterator, sums: sums + task.sums(iterator))

    def train(steps):
        for _ in range(steps // task.workload.loop):
            sums = tf.zeros(3)
            for _ in range(task.workload.loop):
                sums = step(iterator, sums)
            metrics = _means(sums)
        return metrics

    return Contestant(task.model, _timed(train))


# Evaluation.


class _LooplibEvaluator(looplib.Evaluator):
    def __init__(self, task, own_input):
        self.model = task.model
        self._dataset = task.own_input if own_input else lambda context: task.dataset()
        self._step = task.eval_step

    def dataset(self, context):
        return self._dataset(context)

    def step_fn(self, inputs):
        losses, right = self._step(*inputs)
        return {"loss": losses, "accuracy": right}


def _repeated(evaluate):
    """Makes a `Contestant.run` of a function that evaluates once and returns metrics."""
    return _timed(lambda times: [evaluate() for _ in range(times)][-1])


def looplib_evaluation(task, own_input=False):
    """looplib's controller, which finds the end of the data by itself."""
    controller = looplib.Controller(
        evaluator=_LooplibEvaluator(task, own_input), global_batch_size=task.workload.batch, writers=[]
    )
    return Contestant(task.model, _repeated(lambda: controller.evaluate()["eval"]))


class _OrbitEvaluator(orbit.StandardEvaluator):
    def __init__(self, task, to_the_end):
        super().__init__(task.dataset(), orbit.StandardEvaluatorOptions(use_tf_while_loop=not to_the_end))
        self._task = task
        self._sums = tf.Variable(tf.zeros(3))

    def eval_begin(self):
        self._sums.assign(tf.zeros(3))

    def eval_step(self, iterator):
        self._sums.assign_add(self._task.sums(iterator))

    def eval_end(self):
        return _means(self._sums)


def orbit_evaluation(task, to_the_end=False):
    """Orbit's controller: in a tf.while loop, told the number of steps, or a call a step to the end of the data."""
    controller = orbit.Controller(
        evaluator=_OrbitEvaluator(task, to_the_end), global_step=tf.Variable(0, dtype=tf.int64)
    )

    def evaluate():
        with contextlib.redirect_stdout(io.StringIO()):
            return controller.evaluate(steps=-1 if to_the_end else task.eval_steps)

    return Contestant(task.model, _repeated(evaluate))


def keras_evaluation(task, jit_compile=False, whole_call=False):
    """Keras's evaluate: its steps alone, or the whole call with what it takes to start."""
    _compile(task, jit_compile, 100)
    dataset, stopwatch = task.dataset(), _Stopwatch()

    def run(times):
        seconds = 0.0
        for _ in range(times):
            start = time.perf_counter()
            metrics = task.model.evaluate(dataset, verbose=0, return_dict=True, callbacks=[stopwatch])
            seconds += time.perf_counter() - start if whole_call else stopwatch.seconds
        return seconds, metrics

    return Contestant(task.model, run)


def bare_evaluation(task):
    """A hand-written tf.range loop, told the number of steps."""
    dataset, steps = task.dataset(), tf.constant(task.eval_steps)

    @tf.function
    def eval_loop(iterator, steps):
        sums = tf.zeros(3)
        for _ in tf.range(steps):
            sums += task.sums(iterator)
        return sums

    return Contestant(task.model, _repeated(lambda: _means(eval_loop(iter(dataset), steps))))


def single_step_evaluation(task):
    """A tf.function of one step, called once a step, told the number of steps."""
    dataset = task.dataset()
    step = tf.function(lambda iterator, sums: sums + task.sums(iterator))

    def evaluate():
        iterator, sums = iter(dataset), tf.zeros(3)
        for _ in range(task.eval_steps):
            sums = step(iterator, sums)
        return _means(sums)

    return Contestant(task.model, _repeated(evaluate))


TRAINING = {
    _OURS: looplib_training,
    _OWN_INPUT: lambda task: looplib_training(task, own_input=True),
    "bare": bare_training,
    "orbit": orbit_training,
    "keras": keras_training,
    "keras, XLA": lambda task: keras_training(task, jit_compile=True),
    "step a call": single_step_training,
}
EVALUATION = {
    _OURS: looplib_evaluation,
    _OWN_INPUT: lambda task: looplib_evaluation(task, own_input=True),
    "bare": bare_evaluation,
    "orbit": orbit_evaluation,
    "orbit, to the end": lambda task: orbit_evaluation(task, to_the_end=True),
    "keras": keras_evaluation,
    "keras, XLA": lambda task: keras_evaluation(task, jit_compile=True),
    "keras, whole call": lambda task: keras_evaluation(task, whole_call=True),
    "step a call": single_step_evaluation,
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
        _, metrics = contestant.run(_CHECKED_STEPS if workload.loop else 1)
        found = {"reported loss": metrics["loss"], "reported accuracy": metrics["accuracy"]}
        if workload.loop not in (0, _CHECKED_STEPS):
            found = {}  # fit reports a mean over all steps, where the others report one over the last loop
        logits = contestant.model(arrays[0], training=False)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(arrays[1], logits)
        outcomes[name] = {**found, "loss of the model": float(tf.reduce_mean(losses))}
    for name, outcome in outcomes.items():
        # Its own input brings the examples in another order: the same work, but not the same numbers.
        tolerance = 0.05 if name == _OWN_INPUT and workload.loop else _TOLERANCE
        for what, expected in outcomes["bare"].items():
            if what == "reported accuracy" and tolerance > _TOLERANCE:
                continue
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
    builders = TRAINING if workload.loop else EVALUATION
    contestants = {name: build(Task(workload, arrays)) for name, build in builders.items()}
    check_same(workload, contestants, arrays)
    names, speeds = list(contestants), {name: [] for name in contestants}
    for number in range(rounds + 1):
        order = names[number % len(names) :] + names[: number % len(names)]  # nobody always follows the same one
        for name in order:
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
    unknown = set(_WORKLOADS.value) - set(WORKLOADS)
    if unknown or _STEPS.value % 100:
        raise app.UsageError(f"--workloads: one of {', '.join(WORKLOADS)}; --steps: a multiple of 100")
    records = []
    for name in _WORKLOADS.value:
        workload = WORKLOADS[name]
        speeds = measure(workload, _ROUNDS.value, _STEPS.value if workload.loop else _EVALUATIONS.value)
        kind = f"{workload.loop} steps a loop" if workload.loop else f"evaluation of {workload.examples:,}"
        print(f"\n{name}: MLP {'-'.join(map(str, workload.layers))}, batch {workload.batch}, {kind}, {_ROUNDS.value} rounds")
        unit = "steps/s" if workload.loop else "evals/s"
        print(f"{'':<19}{unit:>9}{'looplib / it':>14}{'(quartiles)':>15}{'own input / it':>17}")
        for peer in speeds:
            ratio, low, high = compare(speeds, _OURS, peer)
            own = compare(speeds, _OWN_INPUT, peer)[0]
            speed = np.median(speeds[peer])
            print(f"{peer:<19}{speed:>9.1f}{ratio:>14.2f}{f'({low:.2f}-{high:.2f})':>15}{own:>17.2f}", flush=True)
            if peer != _OURS:
                numbers = {"ratio": round(ratio, 3), "low": round(low, 3), "high": round(high, 3)}
                records.append({"workload": name, "against": peer, **numbers, "rounds": _ROUNDS.value})
    os.makedirs(os.path.dirname(os.path.abspath(_OUTPUT.value)), exist_ok=True)
    with open(_OUTPUT.value, "w") as file:
        json.dump(records, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    app.run(main)

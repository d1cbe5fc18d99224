"""What a run costs to start: `python -m benchmarks.startup --rounds=5`.

Real processes take turns; each trains 100 steps of the README's program (an MLP of 8-16-2, Adam, batches of 64), or
runs the demo:

  by hand: TensorFlow and Keras alone: a `tf.range` loop in one `tf.function`.
  fit: Keras `fit` with one epoch of 100 steps.
  orbit: a trainer under Orbit's controller.
  looplib: a `GradientTrainer`, in a new run directory; and again with 200 steps, which resumes it.
  demo: `python -m trainers.image_classification`, its whole process alone.

The marks are seconds since the process was started: when all was imported, when the first step and when 100 steps were
done, and when the process had ended, in seconds of the processors and of a clock. A ratio is what a program takes from
its imports to 100 steps, in seconds of the processors, divided by what the loop by hand takes: the median over rounds.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

STEPS = 100
MARKS = ("imported", "first step", f"{STEPS} steps", "ended")
_RUN = "import benchmarks.startup as startup; startup.{}()"


def _start():
    """Imports what all programs use; returns the model, the optimizer and the data."""
    import keras
    import numpy as np
    import tensorflow as tf

    x = np.random.default_rng(0).normal(size=(800, 8)).astype(np.float32)
    y = (x.sum(axis=1) > 0).astype(np.int64)

    def make():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(2)])
        return model, keras.optimizers.Adam(0.01)

    def loss(model, x, y):
        return tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))

    def batches():
        return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(800, seed=0).repeat().batch(64)

    return keras, tf, x, y, make, loss, batches


def by_hand():
    """Trains in a loop on the device."""
    keras, tf, x, y, make, loss, batches = _start()
    _mark("imported")
    model, optimizer = make()
    optimizer.build(model.trainable_variables)
    iterator = iter(batches())

    @tf.function
    def loop(iterator, steps):
        total = 0.0
        for _ in tf.range(steps):
            with tf.GradientTape() as tape:
                value = tf.reduce_mean(loss(model, *next(iterator)))
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(value, variables), variables))
            total += value
        return total

    for steps in (1, STEPS - 1):
        loop(iterator, tf.constant(steps)).numpy()
        _mark("first step" if steps == 1 else f"{STEPS} steps")


def fit():
    """Trains by Keras `fit`."""
    keras, tf, x, y, make, loss, batches = _start()
    _mark("imported")
    model, optimizer = make()
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    done = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: batch or _mark("first step"))
    model.fit(batches(), epochs=1, steps_per_epoch=STEPS, verbose=0, callbacks=[done])
    _mark(f"{STEPS} steps")


def orbit():
    """Trains by Orbit's controller."""
    keras, tf, x, y, make, loss, batches = _start()
    import orbit

    _mark("imported")
    model, optimizer = make()
    optimizer.build(model.trainable_variables)

    class Trainer(orbit.StandardTrainer):
        def __init__(self):
            super().__init__(batches())
            self.loss = keras.metrics.Mean("loss")

        def train_step(self, iterator):
            with tf.GradientTape() as tape:
                value = tf.reduce_mean(loss(model, *next(iterator)))
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(value, variables), variables))
            self.loss.update_state(value)

        def train_loop_end(self):
            return {"loss": self.loss.result()}

    controller = orbit.Controller(trainer=Trainer(), global_step=optimizer.iterations.value, steps_per_loop=STEPS)
    for steps in (1, STEPS):
        controller.train(steps)
        _mark("first step" if steps == 1 else f"{STEPS} steps")


def looplib():
    """Trains by looplib."""
    keras, tf, x, y, make, loss, batches = _start()
    from looplib import Controller, GradientTrainer, RunConfig

    class Classifier(GradientTrainer):
        def __init__(self):
            super().__init__(*make())

        def dataset(self, context):
            return context.indices(800).map(lambda i: (tf.gather(x, i), tf.gather(y, i)))

        def loss_fn(self, inputs):
            return loss(self.model, *inputs)

    _mark("imported")
    directory, begin = sys.argv[1], int(sys.argv[2])
    controller = Controller(
        RunConfig(global_batch_size=64, steps_per_loop=STEPS), trainer=Classifier(), model_dir=directory
    )
    for steps in (begin + 1, begin + STEPS):
        controller.train(steps)
        _mark("first step" if steps == begin + 1 else f"{STEPS} steps")


def _mark(name):
    with open(os.environ["STARTUP_MARKS"], "a") as file:
        file.write(json.dumps([name, time.process_time(), time.time()]) + "\n")


def measure(folder, *command):
    """Runs a process.

    Args:
      folder: directory for the file of its marks.
      *command: its command line after `python`.

    Returns:
      dict from mark to (CPU seconds, seconds) since the process was started.

    Raises:
      subprocess.CalledProcessError: if it fails.
    """
    path = os.path.join(folder, "marks.jsonl")
    if os.path.exists(path):
        os.remove(path)
    environment = {**os.environ, "STARTUP_MARKS": path, "TF_CPP_MIN_LOG_LEVEL": "3"}
    started, before = time.time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *command], env=environment, check=True, capture_output=True)
    now, ended = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    marks = {"ended": (now.ru_utime + now.ru_stime - before.ru_utime - before.ru_stime, ended - started)}
    if os.path.exists(path):
        with open(path) as file:
            marks |= {name: (cpu, at - started) for name, cpu, at in map(json.loads, file)}
    return marks


def measure_all(rounds):
    """Runs all programs in turns; returns a dict from program to a list of `measure`'s dicts, one for each round."""
    found = {}
    for number in range(rounds + 1):  # the first fills the disk's cache
        with tempfile.TemporaryDirectory() as folder:
            times = {name: measure(folder, "-c", _RUN.format(name)) for name in ("by_hand", "fit", "orbit")}
            for name, begin in (("looplib", 0), ("looplib, resumed", STEPS)):
                times[name] = measure(folder, "-c", _RUN.format("looplib"), f"{folder}/run", str(begin))
            demo = ("-m", "trainers.image_classification", f"--model_dir={folder}/demo")
            times["demo"] = measure(folder, *demo)
        for name, marks in times.items() if number else ():
            found.setdefault(name, []).append(marks)
    return found


def ratios(found):
    """Returns the CPU seconds of a program from its imports to 100 steps over those by hand, each round, by name."""

    def taken(marks):
        return marks[f"{STEPS} steps"][0] - marks["imported"][0]

    return {
        name: [taken(one) / taken(hand) for one, hand in zip(rounds, found["by_hand"])]
        for name, rounds in found.items()
        if "imported" in rounds[0]
    }


def show(found):
    """Prints the medians of what `measure_all` returned, as a table in Markdown."""
    print(f"\nCPU seconds, and seconds of a clock; medians of {len(found['by_hand'])} rounds\n")
    print("| | " + " | ".join(MARKS) + f" | imports to {STEPS} steps / by hand |\n|" + "---|" * (len(MARKS) + 2))
    compared = ratios(found)
    for name, rounds in found.items():
        cells = []
        for mark in MARKS:
            both = [statistics.median(marks[mark][i] for marks in rounds) for i in (0, 1) if mark in rounds[0]]
            cells.append("{:.2f}, {:.2f}".format(*both) if both else "")
        own = sorted(compared.get(name, []))
        cells.append(f"{statistics.median(own):.2f} ({own[0]:.2f} to {own[-1]:.2f})" if own else "")
        print(f"| {name.replace('_', ' ')} | " + " | ".join(cells) + " |")


def main(argv):
    """Measures and prints a table."""
    del argv
    show(measure_all(_ROUNDS.value))


if __name__ == "__main__":
    from absl import app, flags

    _ROUNDS = flags.DEFINE_integer("rounds", 5, "Turns of each program that count.", lower_bound=1)
    app.run(main)

"""How long a run takes to start: `python -m benchmarks.startup --rounds=5`.

Real processes take turns, each from its start to the end of its first step of the small CNN on the digits:

  bare: a program with nothing but TensorFlow and Keras: the same model, optimizer and data, one `tf.function` step.
  looplib: `python -m trainers.image_classification --mode=train --train_steps=1`, in a new run directory.
  looplib, resumed: the same command again with `--train_steps=2`, which restores the first step.

The marks are seconds since the process was started, in wall time: when TensorFlow (and looplib) was imported, when the
model, the data and the controller were built, when the first step was done, and when the process had ended. A ratio is
a peer's time to the first step divided by the bare program's, the median over rounds of the ratio within a round.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

MARKS = ("imported", "built", "first step", "ended")
_RUN = "import benchmarks.startup as startup; startup.{}()"


def bare():
    """The counterpart's process."""
    import keras
    import numpy as np
    import sklearn.datasets
    import tensorflow as tf

    _mark("imported")
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1), labels.astype(np.int64)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Dropout(0.3),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dropout(0.5),
            layers.Dense(10),
        ]
    )
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)
    batches = iter(tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(1797, seed=0).repeat().batch(64))

    @tf.function
    def step(batch):
        images, labels = batch
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss, tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, axis=1), labels), tf.float32))

    _mark("built")
    loss, accuracy = step(next(batches))
    _mark("first step")
    print(f"loss {float(loss):.4g}  accuracy {float(accuracy):.4g}")


def looplib():
    """The process of looplib's binary, with marks at the ends of what they name."""
    import runpy

    from looplib import launch
    from looplib.loop import task_loop

    class Controller(launch.Controller):
        def __init__(self, *arguments, **settings):
            _mark("imported", _imported[0])
            super().__init__(*arguments, **settings)
            _mark("built")

    setup, run, _imported = launch.runtime.setup, task_loop.TaskLoop.run, []

    def noting_setup(*arguments, **settings):  # the first that a binary does when all is imported
        _imported.append(time.time())
        return setup(*arguments, **settings)

    def noting_run(self, *arguments, **settings):
        done = run(self, *arguments, **settings)
        _mark("first step")
        return done

    launch.Controller, launch.runtime.setup, task_loop.TaskLoop.run = Controller, noting_setup, noting_run
    sys.argv[0] = "image_classification"
    runpy.run_module("trainers.image_classification", run_name="__main__", alter_sys=True)


def _mark(name, now=None):
    with open(os.environ["STARTUP_MARKS"], "a") as file:
        file.write(json.dumps([name, now or time.time()]) + "\n")


def measure(program, folder, *arguments):
    """Runs a process.

    Args:
      program: "bare" or "looplib".
      folder: directory for the file of its marks.
      *arguments: its command line.

    Returns:
      dict from mark to float, seconds since the process was started.

    Raises:
      subprocess.CalledProcessError: if it fails.
    """
    path = os.path.join(folder, "marks.jsonl")
    if os.path.exists(path):
        os.remove(path)
    environment = {**os.environ, "STARTUP_MARKS": path, "TF_CPP_MIN_LOG_LEVEL": "3"}
    started = time.time()
    subprocess.run(
        [sys.executable, "-c", _RUN.format(program), *arguments], env=environment, check=True, capture_output=True
    )
    ended = time.time()
    with open(path) as file:
        marks = dict(json.loads(line) for line in file)
    return {name: marks.get(name, ended) - started for name in MARKS}


def measure_all(rounds):
    """Runs all programs in turns; returns a dict from program to a list of `measure`'s dicts, one for each round."""
    found = {"bare": [], "looplib": [], "looplib, resumed": []}
    for number in range(rounds + 1):  # the first fills the disk's cache
        with tempfile.TemporaryDirectory() as folder:
            flags = [f"--model_dir={folder}/run", "--mode=train", "--steps_per_loop=1"]
            times = {
                "bare": measure("bare", folder),
                "looplib": measure("looplib", folder, *flags, "--train_steps=1"),
                "looplib, resumed": measure("looplib", folder, *flags, "--train_steps=2"),
            }
        for name, values in times.items() if number else ():
            found[name].append(values)
    return found


def show(found):
    """Prints the medians of what `measure_all` returned."""
    print(f"\nstart-up in seconds; medians of {len(found['bare'])} rounds")
    print(f"{'':<18}" + "".join(f"{mark:>12}" for mark in MARKS) + f"{'/ bare':>10}{'(least-most)':>15}")
    for name, rounds in found.items():
        ratios = [values["first step"] / bare["first step"] for values, bare in zip(rounds, found["bare"])]
        medians = [statistics.median(values[mark] for values in rounds) for mark in MARKS]
        spread = f"({min(ratios):.2f}-{max(ratios):.2f})"
        print(f"{name:<18}" + "".join(f"{median:>12.2f}" for median in medians), end="")
        print(f"{statistics.median(ratios):>10.2f}{spread:>15}")


def main(argv):
    """Measures and prints a table."""
    del argv
    show(measure_all(_ROUNDS.value))


if __name__ == "__main__":
    from absl import app, flags

    _ROUNDS = flags.DEFINE_integer("rounds", 5, "Turns of each program that count.", lower_bound=1)
    app.run(main)

"""Memory over many rounds of training and evaluation: `python -m benchmarks.memory`.

A round trains 10 steps of a small multi-layer perceptron, evaluates it, saves a checkpoint and writes what TensorBoard
shows. Each framework does its rounds in a process of its own, whose resident memory is read after each round. What
counts is how it goes on after the first 100 rounds, by which every cache is full.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported

import keras
import numpy as np
import orbit
import psutil
import tensorflow as tf
from absl import app, flags, logging

import looplib
from benchmarks import contestants, records
from benchmarks.workloads import WORKLOADS, Task

_ROUNDS = flags.DEFINE_integer("rounds", 1000, "Rounds of each framework.", lower_bound=150)
_CONTESTANT = flags.DEFINE_string("contestant", None, "Does the rounds of this one, and prints what they took.")
_OUTPUT = flags.DEFINE_string("output", "build/bench.json", "The file to add the ratio to.")
_STEPS, _SETTLED = 10, 100


def looplib_rounds(task, folder, note):
    """Lets looplib's controller do the rounds."""
    controller = looplib.Controller(
        looplib.RunConfig(global_batch_size=task.workload.batch, steps_per_loop=_STEPS, loop=contestants.ENGINE),
        trainer=_LooplibTrainer(task),
        evaluator=_LooplibEvaluator(task),
        model_dir=folder,
        writers=[looplib.TensorBoardWriter(folder), looplib.JsonlWriter(os.path.join(folder, "metrics.jsonl"))],
        actions=[lambda event: event.split == "eval" and note()],
    )
    controller.train_and_evaluate(_STEPS * _ROUNDS.value, _STEPS)


class _LooplibTrainer(looplib.Trainer):
    def __init__(self, task):
        self.model, self.optimizer = task.model, task.optimizer
        self._task = task

    def dataset(self, context):
        return self._task.dataset()

    def step_fn(self, inputs):
        return {"loss": self._task.step(*inputs, mean=self.global_mean)[0]}


class _LooplibEvaluator(looplib.Evaluator):
    def __init__(self, task):
        self.model = task.model
        self._task = task

    def dataset(self, context):
        return evaluation_data(self._task)

    def step_fn(self, inputs):
        return {"loss": losses(self._task, *inputs)}


def orbit_rounds(task, folder, note):
    """Lets Orbit's controller do the rounds."""
    runner = _OrbitTask(task, note)
    step = task.optimizer.iterations.value
    checkpoint = tf.train.Checkpoint(model=task.model, optimizer=task.optimizer, step=step)
    controller = orbit.Controller(
        trainer=runner,
        evaluator=runner,
        global_step=step,
        steps_per_loop=_STEPS,
        checkpoint_manager=tf.train.CheckpointManager(
            checkpoint, folder, max_to_keep=5, step_counter=step, checkpoint_interval=_STEPS
        ),
        summary_dir=os.path.join(folder, "train"),
        eval_summary_dir=os.path.join(folder, "eval"),
    )
    with contextlib.redirect_stdout(io.StringIO()):
        controller.train_and_evaluate(_STEPS * _ROUNDS.value, _STEPS, _STEPS)


class _OrbitTask(orbit.StandardTrainer, orbit.StandardEvaluator):
    def __init__(self, task, note):
        orbit.StandardTrainer.__init__(self, task.dataset())
        orbit.StandardEvaluator.__init__(self, evaluation_data(task), orbit.StandardEvaluatorOptions(True, True))
        self._task, self._note = task, note
        self._sum = tf.Variable(0.0)

    def train_loop_begin(self):
        self._sum.assign(0.0)

    eval_begin = train_loop_begin

    def train_step(self, iterator):
        self._sum.assign_add(tf.reduce_mean(self._task.step(*next(iterator))[0]))

    def eval_step(self, iterator):
        self._sum.assign_add(tf.reduce_mean(losses(self._task, *next(iterator))))

    def train_loop_end(self):
        return {"loss": float(self._sum) / _STEPS}

    def eval_end(self):
        self._note()
        return self.train_loop_end()


def keras_rounds(task, folder, note):
    """Lets Keras's fit do the rounds, an epoch each."""
    callbacks = [
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: note()),
        keras.callbacks.TensorBoard(folder),
        keras.callbacks.ModelCheckpoint(os.path.join(folder, "model.keras")),
    ]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    task.model.compile(task.optimizer, loss, steps_per_execution=_STEPS)
    task.model.fit(
        task.dataset(),
        epochs=_ROUNDS.value,
        steps_per_epoch=_STEPS,
        validation_data=evaluation_data(task),
        validation_steps=_STEPS,
        callbacks=callbacks,
        verbose=0,
    )


CONTESTANTS = {"looplib": looplib_rounds, "orbit": orbit_rounds, "keras": keras_rounds}


def evaluation_data(task):
    """Returns a finite pipeline of as many batches as a round trains on."""
    return tf.data.Dataset.from_tensor_slices(task.arrays).batch(task.workload.batch).take(_STEPS)


def losses(task, inputs, labels):
    """Returns the loss of each example."""
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, task.model(inputs))


def run(name):
    """Does the rounds of a contestant; returns the resident memory after each, in megabytes."""
    workload, process, sizes = WORKLOADS["W2"], psutil.Process(), []
    task = Task(workload, tuple(tf.constant(array) for array in workload.arrays()))
    with tempfile.TemporaryDirectory() as folder:
        CONTESTANTS[name](task, folder, lambda: sizes.append(process.memory_info().rss / 2**20))
    return sizes


def main(argv):
    """Starts a process for each contestant, prints a table and adds looplib's ratio to the file."""
    del argv
    logging.set_verbosity(logging.ERROR)
    if _CONTESTANT.value:
        print(json.dumps(run(_CONTESTANT.value)))
        return
    print(f"\nW9 memory over {_ROUNDS.value} rounds of {_STEPS} steps, an evaluation, a save and a summary")
    print(f"{'':<10}{'MB after 100':>14}{'MB at the end':>15}{'KB a round':>12}", flush=True)
    for name in CONTESTANTS:
        command = [sys.executable, "-m", "benchmarks.memory", f"--contestant={name}", f"--rounds={_ROUNDS.value}"]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        sizes = np.array(json.loads(output.splitlines()[-1]))
        start, last = np.median(sizes[_SETTLED - 10 : _SETTLED + 10]), sizes[-50:]
        growth = 1024 * (np.median(last) - start) / (_ROUNDS.value - _SETTLED - 25)
        print(f"{name:<10}{start:>14.1f}{np.median(last):>15.1f}{growth:>12.2f}", flush=True)
        if name == "looplib":
            found = records.record("W9", f"after {_SETTLED} rounds", start / last)
            found["rounds"] = _ROUNDS.value
    records.show([found])
    records.add(_OUTPUT.value, [found])


if __name__ == "__main__":
    app.run(main)

"""How long a training loop stands still for a checkpoint: `python -m benchmarks.checkpoint_stall`.

Each step changes all of the state. looplib saves it in the background, and (`in_background=False`) while the training
waits; TensorFlow's own way, which Orbit's is too, is `tf.train.CheckpointManager.save` between loops. They take turns,
one save at a time. TensorFlow's has no checksums of whole files and does not wait for the disk (fsync), as both of
looplib's do. Of each save three times are measured, in wall time:

  call: how long the save itself keeps the loop from going on.
  stall: from the end of the last step before the save to the end of the next, less a step's usual time. The copy of
    each variable that the next step makes belongs to it.
  extra: the same over the next 19 steps; the writer shares the cores with them.

The ratio is a peer's stall divided by looplib's.
"""

import os
import statistics
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported

import numpy as np
import tensorflow as tf
from absl import app, flags, logging

import looplib
from benchmarks import records

_ROUNDS = flags.DEFINE_integer("rounds", 9, "Saves of each kind that count; one more before them warms up.")
_MEGABYTES = flags.DEFINE_integer("megabytes", 256, "Size of the state.", lower_bound=8)
_OUTPUT = flags.DEFINE_string("output", "build/bench.json", "The file to add the ratios to.")
_EVERY, _AFTER = 40, 19
_CONTESTANTS = ("looplib", "looplib, waiting", "TensorFlow, waiting")


class Heavy(looplib.Trainer):
    """State of a given size, all of which each step changes, beside some work for both cores."""

    def __init__(self, megabytes):
        self.state = [tf.Variable(tf.zeros([1 << 18, megabytes // 8])) for _ in range(8)]

    def dataset(self, context):
        """Returns ids, of which the step makes no use."""
        return context.indices(1000)

    def step_fn(self, inputs):
        """Adds to every variable, after products of two matrices."""
        matrix = tf.random.stateless_normal([1500, 1500], seed=self.step_seed())
        small = tf.reduce_sum(tf.linalg.matmul(matrix, matrix)) * 1e-30
        for variable in self.state:
            variable.assign_add(tf.fill(variable.shape, small + 1e-3))
        return {"rows": looplib.total(tf.size(inputs))}


def contestant(name, folder):
    """Builds a controller that saves at multiples of `_EVERY` steps.

    TensorFlow saves in an action, and looplib after it.

    Args:
      name: one of `_CONTESTANTS`.
      folder: where to save.

    Returns:
      `(controller, ended, calls)`: dicts that get, for each step, when it ended, and the seconds of saves so far.
    """
    trainer, ended, calls, spent = Heavy(_MEGABYTES.value), {}, {}, [0.0]

    def note(event):
        ended[event.step] = time.perf_counter()
        calls[event.step] = event.controller.clock.of("save") + spent[0]

    actions = [note]
    if name.startswith("TensorFlow"):
        manager = tf.train.CheckpointManager(tf.train.Checkpoint(trainer=trainer.state), folder, max_to_keep=1)

        def save(event):
            if event.step % _EVERY == 0:
                started = time.perf_counter()
                manager.save()
                spent[0] += time.perf_counter() - started

        actions.append(save)
    policy = looplib.CheckpointPolicy(_EVERY, (looplib.KeepLast(1),), in_background=name == "looplib")
    controller = looplib.Controller(
        looplib.RunConfig(global_batch_size=1, steps_per_loop=1),
        trainer=trainer,
        checkpoints=policy,
        writers=[],
        actions=actions,
        model_dir=None if name.startswith("TensorFlow") else folder,
    )  # fmt: skip
    return controller, ended, calls


def measure(folder):
    """Returns a dict from contestant to lists of (calls, stalls, extras), in seconds."""
    made = {name: contestant(name, os.path.join(folder, name)) for name in _CONTESTANTS}
    rows = {name: ([], [], []) for name in made}
    for number in range(_ROUNDS.value + 1):
        save = (number + 1) * _EVERY
        for name, (controller, ended, calls) in made.items():
            controller.train(save + _EVERY // 2)  # the save at its end is not measured
            times = {step: ended[step] - ended[step - 1] for step in ended if step - 1 in ended}
            usual = statistics.median(times[step] for step in range(save - _AFTER + 1, save + 1) if step in times)
            if number:
                rows[name][0].append(calls[save + 1] - calls[save])
                rows[name][1].append(times[save + 1] - usual)
                rows[name][2].append(sum(times[save + 1 + i] for i in range(_AFTER)) - _AFTER * usual)
    return rows


def main(argv):
    """Measures, prints a table and adds the ratios to the file."""
    del argv
    logging.set_verbosity(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(folder)
    print(f"\nW8 checkpoint stall: {_MEGABYTES.value} MB of state, {_ROUNDS.value} saves each; medians")
    print(f"{'':<22}{'call ms':>9}{'stall ms':>10}{'(most)':>9}{'extra ms':>10}")
    for name, (calls, stalls, extras) in rows.items():
        call, stall, extra = (1e3 * statistics.median(values) for values in (calls, stalls, extras))
        print(f"{name:<22}{call:>9.1f}{stall:>10.1f}{max(stalls) * 1e3:>9.1f}{extra:>10.0f}")
    stalls = {name: np.array(stalls) for name, (_, stalls, _) in rows.items()}
    found = [records.record("W8", peer, stalls[peer] / stalls["looplib"]) for peer in _CONTESTANTS[1:]]
    records.show(found)
    records.add(_OUTPUT.value, found)


if __name__ == "__main__":
    app.run(main)

"""How the cost of a step grows with the work, beside a loop written by hand: `python -m benchmarks.growth`.

Along each axis one property of a small training grows: the batch, the model's parameters, its variables, its layers,
the metrics, the steps of a loop, the replicas. Each point is a process of its own, which builds looplib's controller
(`loop="graph"`) and a `tf.range` loop around `strategy.run` of the same model, data and metrics, checks that both come
to the same loss, and gives them turns. Of each loop are kept its steps per second, the memory that the process has
gained by it, and the seconds from its building to its first result: what is built first may gain more memory, so the
second of two copies is built in the other order. Workers are in `benchmarks.scaling`, and the stall
for a checkpoint in `benchmarks.checkpoint_stall --megabytes`.
"""

import ctypes
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags, logging

import looplib
from benchmarks import growth_picture
from benchmarks.workloads import classified, mlp


@dataclasses.dataclass(frozen=True)
class Setting:
    """A training; see `AXES` for what its fields are."""

    batch: int = 32
    width: int = 64
    layers: int = 2
    variables: int = 0
    metrics: int = 2
    steps_per_loop: int = 100
    replicas: int = 1


AXES = {  # field -> (values, the axis's label)
    "batch": ([8, 32, 128, 512, 2048], "examples in a batch"),
    "width": ([64, 256, 1024, 3072], "width (5e3 to 1e7 parameters)"),
    "layers": ([2, 8, 32, 96], "dense layers"),
    "variables": ([10, 100, 1000, 3000], "more variables"),
    "metrics": ([1, 10, 100, 300], "metrics"),
    "steps_per_loop": ([1, 3, 10, 100, 1000], "steps of a loop"),
    "replicas": ([1, 2, 4], "replicas, on two cores"),
}
_AXES = flags.DEFINE_list("axes", list(AXES), "The axes to measure.")
_POINT = flags.DEFINE_string("point", None, "Measures one point in this process: FIELD=VALUE[,FIELD=VALUE...].")
_ROUNDS = flags.DEFINE_integer("rounds", 7, "Turns of each loop that count.", lower_bound=1)
_COPIES = flags.DEFINE_integer(
    "copies", 1, "Copies of each loop, whose figures are averaged: two in one process differ by up to a tenth.",
    lower_bound=1,
)  # fmt: skip
_SECONDS = flags.DEFINE_float("seconds", 0.5, "Length of a turn, rounded to whole loops.")
_OUTPUT = flags.DEFINE_string("output", "build/growth.json", "The file to add the points to; the picture is beside it.")


class _Offsets(keras.layers.Layer):
    """Adds the sum of many vectors, each a variable."""

    def __init__(self, count):
        super().__init__()
        self._count = count

    def build(self, shape):
        """Makes the vectors."""
        self.vectors = [self.add_weight(shape=shape[1:], name=f"vector_{i}") for i in range(self._count)]

    def call(self, inputs):
        """Adds them."""
        return inputs + tf.add_n([tf.convert_to_tensor(vector) for vector in self.vectors])


class Training(looplib.Trainer):
    """The training of a setting; a trainer for looplib, and what the loop by hand calls."""

    def __init__(self, setting):
        self.setting = setting
        keras.utils.set_random_seed(0)
        self.model = mlp(64, *[setting.width] * setting.layers, 10)()
        if setting.variables:
            self.model = keras.Sequential([keras.Input((64,)), _Offsets(setting.variables), self.model])
        self.optimizer = keras.optimizers.Adam(1e-4)
        self.optimizer.build(self.model.trainable_variables)
        self.arrays = classified(10_000, 64)()

    def dataset(self, context):
        """Returns the batches of a replica."""
        data = tf.data.Dataset.from_tensor_slices(self.arrays).shuffle(1000, seed=1).repeat()
        size = self.setting.batch // self.setting.replicas
        return data.batch(size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)

    def step_fn(self, inputs):
        """Does one step; each metric is a multiple of the losses."""
        x, y = inputs
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, self.model(x, training=True))
            loss = tf.reduce_sum(losses) / self.setting.batch
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return {f"loss_{i}": losses * (i + 1) for i in range(self.setting.metrics)}


Run = Callable[[int], float]  # from a number of loops to the first metric of the last


def own_loop(setting: Setting, strategy: tf.distribute.Strategy) -> Run:
    """Builds looplib's loop."""
    with strategy.scope():
        trainer = Training(setting)
    controller = looplib.Controller(
        looplib.RunConfig(global_batch_size=setting.batch, steps_per_loop=setting.steps_per_loop),
        trainer=trainer,
        strategy=strategy,
        writers=[],
    )  # fmt: skip
    return lambda loops: controller.train(controller.global_step + loops * setting.steps_per_loop)["loss_0"]


def by_hand(setting: Setting, strategy: tf.distribute.Strategy) -> Run:
    """Builds a `tf.range` loop that adds its metrics up in a variable of the loop."""
    with strategy.scope():
        training = Training(setting)
    iterator = iter(strategy.distribute_datasets_from_function(training.dataset))

    def sums(batch):
        return tf.stack([tf.reduce_sum(values) for values in training.step_fn(batch).values()])

    @tf.function
    def loop(iterator):
        total = strategy.run(lambda: tf.zeros([setting.metrics]))
        for _ in tf.range(setting.steps_per_loop):
            total = strategy.run(tf.add, args=(total, strategy.run(sums, args=(next(iterator),))))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, total, axis=None)

    def run(loops):
        for _ in range(loops):
            means = loop(iterator).numpy() / (setting.batch * setting.steps_per_loop)
        return float(means[0])

    return run


def _resident() -> float:
    """Megabytes of this process."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20


def measure(setting: Setting) -> growth_picture.Point:
    """Builds both loops, checks that they compute the same, and gives them turns."""
    replicas = setting.replicas
    devices = [tf.config.LogicalDeviceConfiguration()] * replicas
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
    strategy = tf.distribute.get_strategy()
    if replicas > 1:
        strategy = tf.distribute.MirroredStrategy([f"/cpu:{i}" for i in range(replicas)])
    makers = {"looplib": own_loop, "bare": by_hand}
    for make in makers.values():
        make(Setting(replicas=replicas), strategy)(1)  # what TensorFlow does once in a process
    loops, first, megabytes, start = {}, {}, {}, {}
    for copy in range(_COPIES.value):
        for name in sorted(makers, reverse=copy % 2 == 0):
            before, started, key = _resident(), time.perf_counter(), (name, copy)
            loops[key] = makers[name](setting, strategy)
            first[key] = loops[key](1)
            start[key], megabytes[key] = time.perf_counter() - started, _resident() - before
    if not np.ptp(list(first.values())) < 1e-2 * min(map(abs, first.values())):
        raise RuntimeError(f"the loops do not compute the same: {first}")
    counts, speeds = dict.fromkeys(loops, 1), {key: [] for key in loops}
    for _ in range(3):  # each time it is better known how many loops a turn is
        for key, run in loops.items():
            started = time.perf_counter()
            run(counts[key])
            counts[key] = max(1, round(counts[key] * _SECONDS.value / (time.perf_counter() - started)))
    for turn in range(_ROUNDS.value):
        for key in sorted(loops, reverse=bool(turn % 2)):
            started = time.perf_counter()
            loops[key](counts[key])
            speeds[key].append(counts[key] * setting.steps_per_loop / (time.perf_counter() - started))
    speeds, megabytes, start = (
        {name: np.mean([values[name, copy] for copy in range(_COPIES.value)], axis=0) for name in makers}
        for values in (speeds, megabytes, start)
    )
    ratios = np.quantile(speeds["looplib"] / speeds["bare"], [0.25, 0.5, 0.75])
    steps = {name: float(np.median(values)) for name, values in speeds.items()}
    return growth_picture.Point(steps, ratios.round(3).tolist(), megabytes, start)


def main(argv):
    """Measures each point in a process, prints and draws them; with --point measures that one."""
    del argv
    logging.set_verbosity(logging.WARNING)
    if _POINT.value:
        fields = dict(field.split("=") for field in _POINT.value.split(","))
        setting = Setting(**{field: int(value) for field, value in fields.items()})
        print(json.dumps(dataclasses.asdict(measure(setting))))
        return
    found = growth_picture.read(_OUTPUT.value)
    speed, rest = f"{'steps/s':>9}{'bare':>9}{'ratio':>7}{'(quartiles)':>14}", f"{'MB':>7}{'bare':>7}"
    print(f"{'':<22}{speed}{rest}{'s to first':>12}{'bare':>7}")
    for axis in _AXES.value:
        found[axis] = {}
        for value in AXES[axis][0]:
            command = [sys.executable, "-m", "benchmarks.growth", f"--point={axis}={value}"]
            command += [f"--rounds={_ROUNDS.value}", f"--seconds={_SECONDS.value}", f"--copies={_COPIES.value}"]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found[axis][value] = point = growth_picture.Point(**json.loads(done.stdout.splitlines()[-1]))
            print(f"{f'{axis} {value}':<22}{point.row()}", flush=True)
            growth_picture.write(_OUTPUT.value, found)
    growth_picture.draw(found, {axis: label for axis, (_, label) in AXES.items()}, _OUTPUT.value)


if __name__ == "__main__":
    app.run(main)

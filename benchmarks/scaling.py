"""What looplib costs on several workers, beside bare MultiWorkerMirroredStrategy code: `python -m benchmarks.scaling`.

Starts 1, 2 and 4 local workers. Each holds both loops on one strategy and gives them turns: looplib's controller, and a
`tf.range` loop around `strategy.run` written by hand, which reduces its loss once a loop, on the same model, weights,
data and batch a worker. On a machine with fewer cores than workers the steps per second say nothing of real ones; the
ratio of the two loops does, as both wait for the same all-reduce.
"""

import json
import os
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags, logging

import looplib
from benchmarks import records
from benchmarks.workloads import classified, mlp
from looplib.cluster.collectives import Workers
from looplib.cluster.environment import Cluster
from looplib.processes.group import hold_ports

_WORKERS = flags.DEFINE_list("workers", ["1", "2", "4"], "Numbers of workers to start.")
_ROUNDS = flags.DEFINE_integer("rounds", 11, "Turns of each loop that count.")
_LOOP = flags.DEFINE_integer("steps", 100, "Steps of a loop, and of a turn's unit.")
_SECONDS = flags.DEFINE_float("seconds", 1, "Length of a turn, rounded to whole loops.")
_OUTPUT = flags.DEFINE_string("output", "build/bench.json", "The file to add the ratios to.")
_BATCH = 64  # of a worker


class _Mlp(looplib.Trainer):
    def __init__(self):
        keras.utils.set_random_seed(0)
        self.model = mlp(784, 128, 128, 10)()
        self.optimizer = keras.optimizers.Adam()
        self.optimizer.build(self.model.trainable_variables)
        self.arrays = tuple(tf.constant(array) for array in classified(10_000, 784)())

    def batches(self, index, count):
        """An endless pipeline of one worker's share."""
        data = tf.data.Dataset.from_tensor_slices(self.arrays).shard(count, index)
        return data.shuffle(10_000, seed=0).repeat().batch(_BATCH, drop_remainder=True).prefetch(tf.data.AUTOTUNE)

    def dataset(self, context):
        return self.batches(context.pipeline_index, context.num_pipelines)

    def step_fn(self, inputs):
        x, y = inputs
        with tf.GradientTape() as tape:
            logits = self.model(x, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=self.global_batch_size)
        variables = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": losses}


def by_hand(strategy, trainer):
    """Builds the loop that the TensorFlow guide writes; returns a function of a number of loops to the last loss."""
    dataset = strategy.distribute_datasets_from_function(
        lambda context: trainer.batches(context.input_pipeline_id, context.num_input_pipelines)
    )
    iterator = iter(dataset)

    with strategy.scope():
        sync, sums = tf.VariableSynchronization.ON_READ, tf.VariableAggregation.SUM
        total = tf.Variable(0.0, trainable=False, synchronization=sync, aggregation=sums)

    def step(batch):
        total.assign_add(tf.reduce_mean(trainer.step_fn(batch)["loss"]))

    @tf.function
    def loop(iterator, steps):
        strategy.run(lambda: total.assign(0.0))
        for _ in tf.range(steps):
            strategy.run(step, args=(next(iterator),))
        summed = strategy.reduce(tf.distribute.ReduceOp.MEAN, strategy.run(lambda: total.read_value()), axis=None)
        return summed / tf.cast(steps, tf.float32)

    def run(loops):
        for _ in range(loops):
            loss = float(loop(iterator, tf.constant(_LOOP.value)))
        return loss

    return run


def measure():
    """Runs both loops in turns on this worker; returns dict from loop to float array `[rounds]`, steps a second."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        trainers = [_Mlp(), _Mlp()]
    for trainer in trainers:
        trainer.global_batch_size = _BATCH * strategy.num_replicas_in_sync
    controller = looplib.Controller(
        looplib.RunConfig(global_batch_size=_BATCH * strategy.num_replicas_in_sync, steps_per_loop=_LOOP.value),
        trainer=trainers[0],
        strategy=strategy,
        writers=[],
    )  # fmt: skip
    bare = by_hand(strategy, trainers[1])
    loops = {
        "looplib": lambda n: controller.train(controller.global_step + n * _LOOP.value)["loss"],
        "bare": bare,
    }
    first = {name: loop(1) for name, loop in loops.items()}
    if not abs(first["looplib"] - first["bare"]) < 1e-3 * abs(first["bare"]):
        raise RuntimeError(f"the loops do not compute the same: {first}")
    start = time.perf_counter()
    bare(1)
    # Workers have to do the same number of loops.
    counts = Workers(strategy).gather(max(1, round(_SECONDS.value / (time.perf_counter() - start))))
    speeds, order = {name: [] for name in loops}, list(loops)
    for _ in range(_ROUNDS.value):
        order.append(order.pop(0))
        for name in order:
            start = time.perf_counter()
            loops[name](int(counts[0]))
            speeds[name].append(counts[0] * _LOOP.value / (time.perf_counter() - start))
    return speeds


def _start(workers):
    """Runs this program as so many workers; returns what the chief has measured."""
    with hold_ports(workers) as ports:
        addresses = tuple(f"127.0.0.1:{port}" for port in ports)
        processes = []
        for index in range(workers):
            environment = {**os.environ, "TF_CONFIG": Cluster(addresses, task_index=index).tf_config}
            command = [sys.executable, "-m", "benchmarks.scaling", *sys.argv[1:]]
            processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"a worker of {workers} failed")
    return json.loads(outputs[0].splitlines()[-1])


def main(argv):
    """Measures as a worker where TF_CONFIG says that this is one; else starts the workers."""
    del argv
    logging.set_verbosity(logging.WARNING)
    if "TF_CONFIG" in os.environ:
        print(json.dumps(measure()))
        return
    found = []
    for workers in map(int, _WORKERS.value):
        speeds = {name: np.array(values) for name, values in _start(workers).items()}
        medians = ", ".join(f"{name} {np.median(values):.0f}" for name, values in speeds.items())
        print(f"{workers} workers, steps a second: {medians}", flush=True)
        found.append(records.record(f"scaling, {workers} workers", "bare", speeds["looplib"] / speeds["bare"]))
    records.show(found)
    records.add(_OUTPUT.value, found)


if __name__ == "__main__":
    app.run(main)

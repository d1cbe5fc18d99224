"""What looplib finds of corruptions that are planted one at a time: `python -m benchmarks.corruptions`.

Each row is a small training in which one bit is changed where hardware may change it. The table says what was planted
after which step, at which step it was found, and what was named. Add a row to `CORRUPTIONS`.
"""

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags, logging

import looplib
from looplib.actions.replica_agreement import compared_variables
from looplib.errors import CorruptionError

_ONLY = flags.DEFINE_string("only", "", "Plants only what has this in its description.")
_WORKER = flags.DEFINE_string("worker", "", "Runs one worker of a row: the variable to change, a colon, its worker.")
STEPS, PER_LOOP, EVERY, PLANTED = 200, 10, 50, 60  # of each training; EVERY: steps between comparisons of replicas
LAST = STEPS - PER_LOOP
X = np.random.default_rng(0).normal(size=(512, 8)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


@dataclasses.dataclass(frozen=True)
class Finding:
    """How a corruption was found: at which step, and what was named."""

    step: int
    named: str


@dataclasses.dataclass(frozen=True)
class Corruption:
    """A corruption that is planted in a training.

    Attributes:
      what: a description, for the table.
      planted: the step after which it is planted.
      train: plants it in a training; returns how it was found, None if it was not.
    """

    what: str
    planted: int
    train: Callable[[], Finding | None]


def with_flipped_bit(value: np.ndarray, element: int = 0, bit: int = 0) -> np.ndarray:
    """Returns a copy of an array of numbers or booleans in which one bit of one element is another one."""
    changed = np.array(value)
    content = changed.reshape(-1).view(np.uint8)
    content[element * changed.itemsize + bit // 8] ^= 1 << bit % 8
    return changed


def flip_bit(part: tf.Variable, element: int = 0, bit: int = 0) -> None:
    """Changes one bit of one element of one copy of a variable."""
    part.assign(with_flipped_bit(part.numpy(), element, bit))


class Net(looplib.GradientTrainer):
    """A network with everything that has a copy on each replica."""

    def __init__(self, optimizer: str, dtype: str = "float32") -> None:
        keras.utils.set_random_seed(1)
        layers, made = keras.layers, {
            "adam": lambda: keras.optimizers.Adam(0.01), "sgd": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
            "lion": lambda: keras.optimizers.Lion(0.001), "adafactor": lambda: keras.optimizers.Adafactor(0.01),
        }  # fmt: skip
        model = keras.Sequential([
            layers.Input((8,)), layers.Dense(16, name="frozen", trainable=False, dtype=dtype),
            layers.BatchNormalization(dtype=dtype), layers.Dense(16, "relu", name="first", dtype=dtype),
            layers.Dropout(0.1),
            layers.Dense(1, name="last", dtype=dtype), layers.Activation("linear", dtype="float32"),
        ])  # fmt: skip
        super().__init__(model, made[optimizer](), average_decay=0.99)
        self.limit = tf.Variable(2**40, trainable=False, dtype=tf.int64, name="limit")
        self.flag = tf.Variable(True, trainable=False, name="flag")

    def dataset(self, context: looplib.InputContext) -> tf.data.Dataset:
        """Returns rows of the arrays."""
        return context.indices(len(X)).map(lambda i: (tf.gather(X, i), tf.gather(Y, i)))

    def loss_fn(self, inputs: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        """Returns squared errors."""
        return tf.square(self.model(inputs[0], training=True) - inputs[1])[:, 0]


def found_by(
    strategy: tf.distribute.Strategy,
    actions: list,
    optimizer: str = "adam",
    dtype: str = "float32",
    keeps: bool = True,
) -> Finding | None:
    """Trains with some actions, in a run directory if it `keeps` checkpoints; returns how they found something."""
    with strategy.scope():
        trainer = Net(optimizer, dtype)
    config = looplib.RunConfig(global_batch_size=32, steps_per_loop=PER_LOOP, loop="graph")
    with (
        tempfile.TemporaryDirectory() as folder,
        looplib.Controller(
            config,
            trainer=trainer,
            strategy=strategy,
            model_dir=folder if keeps else None,
            writers=[],
            actions=actions,
        ) as controller,
    ):
        try:
            controller.train(STEPS)
        except CorruptionError as error:
            return _finding(str(error))
    return None


def _finding(text: str) -> Finding:
    what = text.partition("; no checkpoint")[0].partition("; the newest checkpoint")[0]
    differs = re.search(r"the replicas differ at step (\d+).*?: (.*)", what)
    return Finding(int(differs[1]), differs[2].replace(", and which of them is right is not known", ""))


def planting(
    name: str, replica: int, bit: int, step: int = PLANTED, worker: int = 0
) -> Callable[[looplib.Event], None]:
    """Returns an action that changes one bit of a replica's copy of the first variable with a name, after a step.

    Where several workers train, all of them need it, because they look for the variables together.
    """

    def plant(event: looplib.Event) -> None:
        if event.step != step or event.split != "train":
            return
        found = compared_variables(event.controller.loops["train"])
        all_named = [*found.updated_alike, *found.not_updated]
        averages = name.startswith("average")
        variable = next(one for own, one in all_named if name in own and own.startswith("average") == averages)
        if worker == json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {}).get("index", 0):
            flip_bit(variable.distribute_strategy.experimental_local_results(variable)[replica], bit=bit)

    return plant


def of_variable(
    name: str, optimizer: str = "adam", replicas: int = 2, replica: int = 1, bit: int = 20, dtype: str = "float32",
    step: int = PLANTED,
) -> Callable[[], Finding | None]:  # fmt: skip
    """Plants a corruption of one replica's copy of a variable."""

    def train() -> Finding | None:
        sums = tf.distribute.ReductionToOneDevice()
        strategy = tf.distribute.MirroredStrategy([f"/cpu:{i}" for i in range(replicas)], cross_device_ops=sums)
        actions = [planting(name, replica, bit, step), looplib.ReplicaAgreement(EVERY)]
        return found_by(strategy, actions, optimizer, dtype)

    return train


def of_worker(name: str, worker: int = 1) -> Callable[[], Finding | None]:
    """Plants a corruption of the copy of one of two workers, which are processes on loopback."""

    def train() -> Finding | None:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            other.bind(("127.0.0.1", 0))
            addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in (one, other)]
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.corruptions", f"--worker={name}:{worker}"],
                env={**os.environ, "TF_CONFIG": json.dumps({
                    "cluster": {"worker": addresses}, "task": {"type": "worker", "index": index},
                })},
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )
            for index in range(2)
        ]  # fmt: skip
        output = [process.communicate(timeout=600)[0] for process in processes]
        found = [json.loads(text.splitlines()[-1]) for text in output if text]
        if len(found) == 2 and found[0] == found[1] and found[0] is not None:  # both have to say so
            return Finding(**found[0])
        return None

    return train


def _run_worker(name: str, worker: int) -> None:
    """Runs a worker of `of_worker`, and prints how it has found something."""
    strategy = looplib.runtime.setup(strategy="multi_worker")
    actions = [planting(name, 0, 20, worker=worker), looplib.ReplicaAgreement(EVERY)]
    finding = found_by(strategy, actions, keeps=False)
    print(json.dumps(finding and dataclasses.asdict(finding)), flush=True)


CORRUPTIONS = [
    Corruption("a weight, on replica 1 of 2", PLANTED, of_variable("first/kernel")),
    Corruption("a weight, on replica 2 of 4", PLANTED, of_variable("first/kernel", replicas=4, replica=2)),
    Corruption("a bias, on replica 0 of 4", PLANTED, of_variable("last/bias", replicas=4, replica=0)),
    Corruption("a frozen weight, on replica 1 of 2", PLANTED, of_variable("frozen/kernel", bit=0)),
    Corruption("a momentum of Adam", PLANTED, of_variable("kernel_momentum")),
    Corruption("a velocity of Adam", PLANTED, of_variable("kernel_velocity")),
    Corruption("a momentum of SGD", PLANTED, of_variable("kernel_momentum", "sgd")),
    Corruption("a momentum of Lion", PLANTED, of_variable("kernel_momentum", "lion")),
    Corruption("a statistic of Adafactor", PLANTED, of_variable("adafactor/sequential", "adafactor")),
    Corruption("the count of updates, an integer", 2 * EVERY, of_variable("iteration", "sgd", bit=0, step=2 * EVERY)),
    Corruption("an average of weights", PLANTED, of_variable("average/")),
    Corruption("the scale of the loss, float16", PLANTED, of_variable("loss_scale", bit=23, dtype="mixed_float16")),
    Corruption("an int64 variable that no step updates", PLANTED, of_variable("limit", bit=40)),
    Corruption("a boolean variable", PLANTED, of_variable("flag", bit=0)),
    Corruption("a weight, just before the end", LAST, of_variable("first/kernel", step=LAST)),
    Corruption("a weight of worker 1 of 2", PLANTED, of_worker("first/kernel")),
    Corruption("a momentum of Adam of worker 0 of 2", PLANTED, of_worker("kernel_momentum", 0)),
]


def main(argv: list[str]) -> None:
    """Plants each corruption, and prints the table."""
    del argv
    logging.set_verbosity(logging.FATAL)
    if _WORKER.value:
        name, _, worker = _WORKER.value.rpartition(":")
        _run_worker(name, int(worker))
        return
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
    chosen = [corruption for corruption in CORRUPTIONS if _ONLY.value in corruption.what]
    missed = 0
    print("| planted | after step | found at step | named |\n|---|---|---|---|", flush=True)
    for corruption in chosen:
        finding = corruption.train()
        missed += finding is None
        found = f"{finding.step} | {finding.named}" if finding else "**not found** |"
        print(f"| {corruption.what} | {corruption.planted} | {found} |", flush=True)
    print(f"\n{len(chosen) - missed} of {len(chosen)} found", flush=True)
    sys.exit(bool(missed))


if __name__ == "__main__":
    app.run(main)

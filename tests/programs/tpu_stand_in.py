"""A stand-in for a TPU, as none is at hand: two CPU devices that are found, connected to and lost as one is.

`python -m tpu_stand_in --strategy=tpu --tpu=NAME ...` trains a small regression on it, and loses the TPU once at step 40.
What the calls do is noted, a line each, in the file that TPU_STAND_IN_LOG names. Another program has it by `install`.
"""

import dataclasses
import os
import sys

import tensorflow as tf
import toy

from looplib import launch
from looplib.cluster import tpu


def note(line):
    with open(os.environ["TPU_STAND_IN_LOG"], "a") as file:
        print(line, file=file)


def noted():
    with open(os.environ["TPU_STAND_IN_LOG"]) as file:
        return file.read().splitlines()


class Resolver:
    def __init__(self, tpu):
        note(f"resolve {tpu}")

    def cluster_spec(self):
        return tf.train.ClusterSpec({})

    def master(self):
        return "grpc://stand-in"


class Strategy(tf.distribute.MirroredStrategy):
    def __init__(self, resolver, experimental_device_assignment=None, **_):
        if experimental_device_assignment is not None:
            note(f"assign {experimental_device_assignment.core_assignment.tolist()}")
        super().__init__(["/cpu:0", "/cpu:1"])

    def experimental_assign_to_logical_device(self, tensor, logical_device_id):
        return tensor


def initialize(resolver):
    """Right after the loss it is not back yet."""
    note("initialize")
    if noted()[-3:-2] == ["lost"]:
        raise tf.errors.UnavailableError(None, None, "failed to connect to all addresses")
    chips = [[[x, y, 0, core] for y in range(2) for x in range(2) for core in range(2)]]
    return tf.tpu.experimental.Topology(mesh_shape=[2, 2, 1, 2], device_coordinates=chips)


def install():
    """Puts the stand-in in the place of a TPU, before anything runs on a device."""
    devices = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
    tf.distribute.cluster_resolver.TPUClusterResolver = Resolver
    tf.distribute.TPUStrategy = Strategy
    tf.config.experimental_connect_to_cluster = lambda resolver: None
    tf.tpu.experimental.initialize_tpu_system = initialize


@dataclasses.dataclass
class Config:
    always: bool = False  # is lost in each start


class Losing(toy.Regression):
    def __init__(self, always):
        super().__init__(num_examples=36)
        self.always = always

    def loop_end(self, metrics):
        step = int(self.global_step)
        if (step == 40 and "lost" not in noted()) or self.always:
            note("lost")
            raise tf.errors.UnavailableError(None, None, "Socket closed")
        return {"loss": metrics["loss"]}


if __name__ == "__main__":
    install()
    sys.orig_argv[1:] = ["-m", "tpu_stand_in", *sys.argv[1:]]  # a fork has those of its server
    tpu._PAUSE_SECONDS = 0.1
    tpu._MOST_RESTARTS = 2
    launch.run(
        lambda config: (Losing(config.always), None), Config(), mode="train", global_batch_size=8, train_steps=60,
        steps_per_loop=10, checkpoint_interval=20,
    )  # fmt: skip

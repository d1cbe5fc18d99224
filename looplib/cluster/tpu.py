"""A TPU: finding it, connecting to it, dividing its cores, and starting again after it was lost.

None of this has run on a TPU. The tests run the parts that need none; docs/tpu.md lists the rest.
"""

import dataclasses
import math
import os
import re
import socket
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import tensorflow as tf
from absl import logging

from looplib.base import orders
from looplib.base.messages import gist
from looplib.cluster import runtime
from looplib.errors import TpuError

_MOST_RESTARTS = 10
_PATIENCE_SECONDS = 1800.0  # for a TPU that was lost to come back
_PAUSE_SECONDS, _KNOCK_SECONDS = 15.0, 30.0
_LOST = (tf.errors.UnavailableError, tf.errors.AbortedError)


def connect(
    tpu: str | None = None, *, cores_per_replica: int = 1, replicas: int | None = None, spmd: bool = False
) -> tf.distribute.TPUStrategy:
    """Connects to a TPU, initialises it, and makes its strategy; once a process, before any tensor is made.

    Args:
      tpu: a name, "projects/<project>/locations/<zone>/nodes/<name>", an address such as "10.0.0.2:8470" (several with
        commas between), "local" for one of this machine; default the one that the environment names, else this
        machine's.
      cores_per_replica: cores of one replica, which are its logical devices.
      replicas: how many; default as many as the cores allow.
      spmd: divides one program over a replica's cores by the shardings of its tensors, instead of ops over cores.

    Returns:
      The strategy.

    Raises:
      UsageError: if the TPU cannot be reached, or its cores cannot be divided so.
    """
    if spmd and cores_per_replica == 1:
        raise TpuError("tpu_spmd divides a replica over its cores, and it has one; give it more (cores_per_replica)")
    resolver, topology = _initialise(tpu)
    cores = tf.config.list_logical_devices("TPU")
    hosts = len({tf.DeviceSpec.from_string(core.name).task for core in cores})
    what = ", ".join(core.name for core in cores)
    logging.info("the TPU %s has %d cores on %d host(s): %s", _name(tpu), len(cores), hosts, what)
    if cores_per_replica == 1 and replicas is None:
        return tf.distribute.TPUStrategy(resolver)
    assignment = device_assignment(topology, cores_per_replica, replicas)
    return tf.distribute.TPUStrategy(
        resolver, experimental_device_assignment=assignment, experimental_spmd_xla_partitioning=spmd
    )


def resolver_of(tpu: str | None = None) -> tf.distribute.cluster_resolver.TPUClusterResolver:
    """Makes the resolver of a TPU, see `connect`."""
    tpu, place = tpu or runtime.tpu_named() or "", {}
    if match := re.fullmatch(r"projects/([^/]+)/locations/([^/]+)/nodes/([^/]+)", tpu):
        place = {"project": match[1], "zone": match[2]}
        tpu = match[3]
    elif re.fullmatch(r"[\w.-]+:\d+(,[\w.-]+:\d+)*", tpu):
        tpu = f"grpc://{tpu}"  # without it, TensorFlow takes an address for a name
    elif not tpu and not os.environ.get("TPU_CONFIG") and tf.config.list_physical_devices("TPU"):
        tpu = "local"
    return tf.distribute.cluster_resolver.TPUClusterResolver(tpu=tpu, **place)


def device_assignment(
    topology: tf.tpu.experimental.Topology, cores_per_replica: int, replicas: int | None = None
) -> tf.tpu.experimental.DeviceAssignment:
    """Gives each replica a compact block of cores.

    Args:
      topology: of the TPU.
      cores_per_replica: cores of a replica.
      replicas: how many; default as many as the cores allow.

    Returns:
      The assignment.

    Raises:
      UsageError: if the cores cannot be divided so.
    """
    mesh = [int(size) for size in topology.mesh_shape]  # [x, y, z, cores of a chip]
    total = math.prod(mesh)
    shape, left = [1] * len(mesh), cores_per_replica
    for axis in (3, 0, 1, 2):  # the cores of one chip are the nearest to each other
        shape[axis] = math.gcd(left, mesh[axis])
        left //= shape[axis]
    wanted = replicas or total // cores_per_replica
    if left != 1 or wanted * cores_per_replica > total:
        sizes = [size for size in range(1, total + 1) if total % size == 0]
        raise TpuError(
            f"{wanted} replica(s) of {cores_per_replica} cores do not fit a TPU of {total} cores "
            f"({' x '.join(map(str, mesh))}); use {', '.join(map(str, sizes))} cores a replica, and no more replicas "
            "than that leaves room for"
        )
    return tf.tpu.experimental.DeviceAssignment.build(
        topology, computation_shape=np.array(shape, np.int32), num_replicas=wanted
    )


def split_over_cores(tensor: tf.Tensor, parts: Sequence[int]) -> tf.Tensor:
    """Divides a tensor over the cores of a replica; in `step_fn`. Without a TPU it changes nothing.

    Args:
      tensor: tensor whose shape is known.
      parts: into how many parts each dimension is cut; their product is the cores of a replica.

    Returns:
      The tensor.

    Raises:
      UsageError: if there is not one number for each dimension, or a dimension is not a multiple of its number.
    """
    sizes = tensor.shape.as_list()
    if len(parts) != len(sizes) or any(size is not None and size % part for size, part in zip(sizes, parts)):
        raise TpuError(
            f"split_over_cores was given the parts {list(parts)} for a tensor of shape {sizes}; expected one number "
            "for each dimension, which divides it"
        )
    strategy = _tpu_strategy()
    return strategy.experimental_split_to_logical_devices(tensor, parts) if strategy else tensor


def replicate_over_cores(tensor: tf.Tensor) -> tf.Tensor:
    """Gives every core of a replica the complete tensor; in `step_fn`. Without a TPU it changes nothing."""
    strategy = _tpu_strategy()
    return strategy.experimental_replicate_to_logical_devices(tensor) if strategy else tensor


def assign_to_core(tensor: tf.Tensor, core: int) -> tf.Tensor:
    """Computes a tensor on one core of a replica (not with spmd); in `step_fn`. Without a TPU it changes nothing."""
    strategy = _tpu_strategy()
    return strategy.experimental_assign_to_logical_device(tensor, core) if strategy else tensor


def is_lost(strategy: tf.distribute.Strategy, error: BaseException) -> bool:
    """Returns whether an error means that the TPU of a strategy is lost, for example after preemption."""
    return isinstance(strategy, tf.distribute.TPUStrategy) and isinstance(error, _LOST)


def start_again(step: int) -> NoReturn:
    """Replaces this process by a new start of its command, which waits for the TPU and resumes from the checkpoint.

    It has to be a new process: in the old one, the variables and compiled programs of a lost TPU cannot be
    distinguished from good ones.

    Args:
      step: of the newest checkpoint, 0 without one.

    Raises:
      UsageError: after too many starts without a new checkpoint between them.
    """
    order = orders.current()
    count = order.tpu_starts + 1 if order.tpu_step == step else 1
    if count > _MOST_RESTARTS:
        raise TpuError(
            f"the TPU was lost {count} times without a new checkpoint between; check the TPU, save more often "
            "(--checkpoint_interval), and run the same command again"
        )
    orders.renew(dataclasses.replace(order, tpu_starts=count, tpu_step=step))
    logging.warning("the TPU was lost: restarting (%d) to resume from step %d", count, step)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _initialise(
    tpu: str | None,
) -> tuple[tf.distribute.cluster_resolver.TPUClusterResolver, tf.tpu.experimental.Topology]:
    deadline = time.monotonic() + (_PATIENCE_SECONDS if orders.current().tpu_starts else 0.0)
    while True:
        try:
            resolver = resolver_of(tpu)
            _knock(resolver)
            tf.config.experimental_connect_to_cluster(resolver)
            return resolver, tf.tpu.experimental.initialize_tpu_system(resolver)
        except (ValueError, RuntimeError, OSError, tf.errors.OpError) as error:
            if time.monotonic() > deadline:
                raise TpuError(
                    f"the TPU {_name(tpu)} cannot be reached ({gist(error)}); check its name and state, or use "
                    "--strategy=one_device"
                ) from error
            logging.warning("the TPU %s is not back yet (%s)", _name(tpu), gist(error))
            time.sleep(_PAUSE_SECONDS)


def _knock(resolver: tf.distribute.cluster_resolver.TPUClusterResolver) -> None:
    """Raises `OSError` if no process listens; TensorFlow would wait forever."""
    cluster = resolver.cluster_spec()
    for address in cluster.job_tasks("worker")[:1] if "worker" in cluster.jobs else ():
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), timeout=_KNOCK_SECONDS).close()


def _name(tpu: str | None) -> str:
    return tpu or runtime.tpu_named() or "of this machine"


def _tpu_strategy() -> tf.distribute.TPUStrategy | None:
    strategy = tf.distribute.get_strategy()
    return strategy if isinstance(strategy, tf.distribute.TPUStrategy) else None

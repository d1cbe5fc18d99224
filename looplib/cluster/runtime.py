"""The machine: strategies by name, virtual devices, precision, seeds and determinism."""

import os
import random
import signal
import threading
import types
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from looplib.base.messages import whole_number
from looplib.cluster import environment, parameter_servers, peers
from looplib.compat import keras as _keras
from looplib.compat import places
from looplib.compat import tensorflow as _tf
from looplib.compat.row_updates import is_held
from looplib.errors import ClusterError, DeviceError, ParameterServerError, StrategyError, UsageError, VariableError

_connected = False


def is_remote(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether the steps of a strategy run in other processes: the workers of one with parameter servers."""
    return isinstance(strategy, tf.distribute.ParameterServerStrategy)


def connected() -> bool:
    """Returns whether this process has connected to others that run its steps."""
    return _connected


def check_placement(strategy: tf.distribute.Strategy, what: str, variables: Iterable[Any]) -> None:
    """Raises `UsageError` if the variables of `what` were not made in the scope of the strategy that will run them."""
    replicas = strategy.num_replicas_in_sync
    for variable in variables:
        value = variable if isinstance(variable, tf.Variable) else getattr(variable, "value", variable)
        distributed = isinstance(value, tf.distribute.DistributedValues)
        if distributed and getattr(value, "distribute_strategy", strategy) is not strategy:
            raise VariableError(
                f"{what} holds variables made under another strategy than the {type(strategy).__name__} of the "
                "controller; pass the controller the strategy that they were made under"
            )
        if is_remote(strategy) and tf.DeviceSpec.from_string(getattr(value, "device", "") or "").job != "ps":
            raise ParameterServerError(
                f"{what} holds variables that are not on a parameter server; build models, optimizers and metrics "
                "inside `with strategy.scope():` (and give the strategy no variable_partitioner)"
            )
        in_step = replicas > 1 or isinstance(strategy, tf.distribute.MirroredStrategy)
        if in_step and not distributed and not is_held(value):
            raise VariableError(
                f"{what} holds variables made outside the scope of {type(strategy).__name__} with {replicas} replicas; "
                "build models, optimizers and metrics inside `with strategy.scope():`"
            )


STRATEGIES = ("auto", "one_device", "mirrored", "multi_worker", "parameter_server", "tpu")
_TPU_NAMED_BY = ("TPU_NAME", "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS")
PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")
_is_set_up = False


def setup(
    strategy: str = "auto",
    *,
    tpu: str | None = None,
    num_virtual_devices: int = 1,
    seed: int = 0,
    deterministic: bool = False,
    mixed_precision: str = "float32",
    tpu_cores_per_replica: int = 1,
    tpu_replicas: int | None = None,
    tpu_spmd: bool = False,
    join_limit: float = 60.0,
) -> tf.distribute.Strategy:
    """Sets the process up and makes its strategy; call it once, before anything runs on a device.

    Args:
      strategy: "auto" takes a TPU if one is found, else all GPUs, else the CPU, and logs what it chose;
        "one_device" the first GPU or the CPU; "mirrored" all GPUs, or all virtual CPU devices; "multi_worker" this
        process's devices together with those of the other workers, which `cluster.environment.resolve` finds ("auto"
        does the same where TF_CONFIG names several workers); "parameter_server" the cluster of TF_CONFIG. There a
        worker or parameter server serves in here until the coordinator is gone, and ends by `errors.CoordinatorGone`,
        a `SystemExit`.
      tpu: name or address of a TPU; see `tpu.connect`.
      num_virtual_devices: makes this many replicas on one CPU; without GPUs only, and changes nothing on a TPU.
      seed: seeds Python, numpy, TensorFlow and the Keras families that are loaded.
      deterministic: makes every op deterministic, at a cost in speed.
      mixed_precision: the Keras policy, "float32", "mixed_bfloat16" or "mixed_float16".
      tpu_cores_per_replica: cores of a TPU that one replica has for itself, its logical devices; this and the next two
        change nothing without a TPU.
      tpu_replicas: replicas on a TPU; default as many as its cores allow.
      tpu_spmd: divides one program over them by the shardings of its tensors.
      join_limit: seconds to wait for the other workers.

    Raises:
      UsageError: for a value that this machine does not support.
    """
    global _connected
    seed = whole_number("seed", seed, least=0, most=2**32 - 1)
    num_virtual_devices = whole_number("num_virtual_devices", num_virtual_devices)
    tpu_cores_per_replica = whole_number("tpu_cores_per_replica", tpu_cores_per_replica)
    if tpu_replicas is not None:
        tpu_replicas = whole_number("tpu_replicas", tpu_replicas)
    on_tpu = strategy == "tpu" or bool(tpu) or (strategy == "auto" and _tpu_is_here())
    _check(strategy, tpu, num_virtual_devices, deterministic, mixed_precision, on_tpu)
    _warn_of_an_early_start()
    _seed_everything(seed)
    if deterministic:
        tf.config.experimental.enable_op_determinism()
    for root in ("keras", "tf_keras"):
        _keras.when_imported(root, lambda module: _set_up_keras(module, seed, mixed_precision))
    gpus = _prepare_devices(1 if on_tpu else num_virtual_devices)
    if on_tpu:
        from looplib.cluster.tpu import connect  # here, as it imports this

        chosen = connect(tpu, cores_per_replica=tpu_cores_per_replica, replicas=tpu_replicas, spmd=tpu_spmd)
        why = "a TPU " + ("asked for" if tpu or strategy == "tpu" else "found")
    elif strategy == "parameter_server":
        chosen, why = parameter_servers.connect(), "asked for"
        _connected = True
    elif strategy == "multi_worker" or (strategy == "auto" and _has_other_workers()):
        chosen, why = _multi_worker(join_limit, num_virtual_devices)
    else:
        chosen, why = _choose(strategy, gpus)
    logging.info("strategy: %s (%s)", describe(chosen), why)
    return chosen


def _check(
    strategy: str, tpu: str | None, num_virtual_devices: int, deterministic: bool, mixed_precision: str, on_tpu: bool
) -> None:
    """Raises `UsageError` for arguments of `setup` that do not go together."""
    if strategy not in STRATEGIES:
        raise StrategyError(f"strategy is {strategy!r}; expected one of {', '.join(STRATEGIES)}")
    if mixed_precision not in PRECISIONS:
        raise StrategyError(f"mixed_precision is {mixed_precision!r}; expected one of {', '.join(PRECISIONS)}")
    if strategy == "one_device" and num_virtual_devices > 1:
        raise StrategyError(
            f"num_virtual_devices is {num_virtual_devices}, and the strategy one_device trains on one; use mirrored or "
            "auto"
        )
    if strategy == "parameter_server" and deterministic:
        raise ParameterServerError(
            "deterministic is asked for, and with the strategy parameter_server workers update the weights in no fixed "
            "order; leave out --deterministic, or use another strategy"
        )
    if strategy == "parameter_server" and num_virtual_devices != 1:
        raise ParameterServerError(
            f"num_virtual_devices is {num_virtual_devices}, and with the strategy parameter_server each worker is a "
            "process; start more workers instead"
        )
    if tpu and strategy not in ("auto", "tpu"):
        raise StrategyError(
            f"a TPU is named ({tpu!r}), but the strategy is {strategy!r}; use tpu or auto, or name no TPU"
        )
    if mixed_precision == "mixed_float16" and on_tpu:
        raise StrategyError("mixed_precision is mixed_float16, which a TPU has no units for; use mixed_bfloat16")


def describe(strategy: tf.distribute.Strategy) -> str:
    """Names a strategy for logs and `run.json`, such as "MirroredStrategy, 2 replicas"."""
    if is_remote(strategy):
        workers, servers = parameter_servers.counts()
        return f"ParameterServerStrategy, workers: {workers}, parameter servers: {servers}"
    replicas = strategy.num_replicas_in_sync
    return f"{_tf.name_of(strategy)}, {replicas} replica{'s' if replicas > 1 else ''}"


def tpu_named() -> str | None:
    """Returns the name or address of the TPU that the environment names, or None."""
    return next((os.environ[name] for name in _TPU_NAMED_BY if os.environ.get(name)), None)


def _tpu_is_here() -> bool:
    """Returns whether the environment names a TPU, or this machine has one."""
    return bool(tpu_named() or os.environ.get("TPU_CONFIG") or tf.config.list_physical_devices("TPU"))


def _prepare_devices(num_virtual_devices: int) -> list[tf.config.PhysicalDevice]:
    gpus = tf.config.list_physical_devices("GPU")
    if num_virtual_devices > 1:
        if gpus:
            raise DeviceError(
                f"num_virtual_devices={num_virtual_devices} makes CPU replicas, and this machine has {len(gpus)} GPUs; "
                "leave it out, or hide the GPUs with CUDA_VISIBLE_DEVICES=-1"
            )
        cpu = tf.config.list_physical_devices("CPU")[0]
        try:
            tf.config.set_logical_device_configuration(
                cpu, [tf.config.LogicalDeviceConfiguration()] * num_virtual_devices
            )
        except RuntimeError as error:
            raise _too_late(f"num_virtual_devices={num_virtual_devices}") from error
    try:
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
    except RuntimeError as error:
        raise _too_late("GPU memory growth") from error
    return gpus


def _too_late(setting: str) -> UsageError:
    """Returns the error for a setting, the subject of its sentence, that comes after the start of the devices."""
    return DeviceError(
        f"{setting} must be set before TensorFlow initializes its devices, but they were initialized by "
        f"{places.place_of_start()}; make tensors, variables, models and optimizers in `build` (or call "
        "looplib.runtime.setup before any tensor is made)"
    )


def _choose(strategy: str, gpus: list[tf.config.PhysicalDevice]) -> tuple[tf.distribute.Strategy, str]:
    devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    names = [device.name for device in devices]
    kind = f"{len(devices)} {devices[0].device_type}{'s' if len(devices) > 1 else ''} found"
    if strategy == "one_device":
        return tf.distribute.OneDeviceStrategy(names[0]), f"asked for, on {names[0]}"
    if strategy == "mirrored":
        return _mirrored(devices), f"asked for, {kind}"
    if len(names) > 1:
        return _mirrored(devices), f"auto, {kind}"
    return tf.distribute.get_strategy(), f"auto, {'one GPU' if gpus else 'no TPU and no GPU, one CPU'} found"


def _mirrored(devices: list[tf.config.LogicalDevice]) -> tf.distribute.Strategy:
    # In one process's memory a sum needs no collective op, which takes longer to meet and which XLA lacks for CPUs.
    on_cpus = all(device.device_type == "CPU" for device in devices)
    sums = tf.distribute.ReductionToOneDevice() if on_cpus else None
    return tf.distribute.MirroredStrategy([device.name for device in devices], cross_device_ops=sums)


def _has_other_workers() -> bool:
    if "TF_CONFIG" not in os.environ:  # Slurm's variables are also there in a shell of one process
        return False
    found = environment.resolve(os.environ)
    return found is not None and len(found.workers) > 1 and not found.parameter_servers


def _multi_worker(join_limit: float, num_virtual_devices: int) -> tuple[tf.distribute.Strategy, str]:
    found = environment.resolve(os.environ)
    if found is None:
        raise ClusterError(
            f"the strategy is multi_worker, but the environment does not list the workers; {environment.EXPECTED}"
        )
    if found.parameter_servers:
        raise ClusterError(
            f"the strategy is multi_worker, but {found.source} lists parameter servers; use --strategy=parameter_server"
        )
    if num_virtual_devices > 1:
        raise StrategyError(
            f"num_virtual_devices is {num_virtual_devices}, and a worker has one CPU; start more workers"
        )
    if _tf.started():  # TensorFlow has no collective ops then
        raise _too_late("the strategy multi_worker")
    os.environ["TF_CONFIG"] = found.tf_config  # where TensorFlow looks
    peers.join(found, join_limit)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    if threading.current_thread() is threading.main_thread():  # TensorFlow's server has replaced Python's handler
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM) or signal.SIG_DFL)
    return strategy, f"worker {found.index} of {len(found.workers)}, by {found.source}"


def _set_up_keras(module: types.ModuleType, seed: int, mixed_precision: str) -> None:
    module.utils.set_random_seed(seed)  # each Keras family has its own generators
    if module.__name__ == "tf_keras":  # so that dropout keeps its state in a variable, which a checkpoint holds
        module.backend.experimental.enable_tf_random_generator()
    if mixed_precision != "float32":
        module.mixed_precision.set_global_policy(mixed_precision)


def _warn_of_an_early_start() -> None:
    """Warns of objects made before this set-up, which have neither the run's seed nor its precision."""
    global _is_set_up
    if _tf.started() and not _is_set_up:
        logging.warning(
            "TensorFlow's devices were initialized before looplib.runtime.setup, by %s; random values and Keras "
            "objects created there do not use the run's seed and precision; create them in `build`",
            places.place_of_start(),
        )
    _is_set_up = True


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    tf.random.set_seed(seed)

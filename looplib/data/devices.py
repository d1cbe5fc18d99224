"""The devices that the replicas of this process compute on, and what hands batches out to them."""

import tensorflow as tf

from looplib.compat import tensorflow as _tf


def local_devices(strategy: tf.distribute.Strategy) -> tuple[str, ...] | None:
    """Returns the device of each replica of this process; None for TPUs and where they are not those of one process."""
    with strategy.scope():
        if not tf.distribute.has_strategy():  # the default strategy, which places ops itself: on a GPU if there is one
            found = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
            return (found[0].name,)
    kinds = (tf.distribute.OneDeviceStrategy, tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)
    if not isinstance(strategy, kinds):
        return None
    names = _tf.worker_devices(strategy)
    devices = [tf.DeviceSpec.from_string(name) for name in names]
    one_process = len({(device.job, device.task) for device in devices}) == 1
    plain = all(device.device_type in ("CPU", "GPU") for device in devices)
    return names if plain and one_process else None


def runs_on_host(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether each process's replicas are its CPUs."""
    devices = local_devices(strategy)
    return devices is not None and all(tf.DeviceSpec.from_string(device).device_type == "CPU" for device in devices)

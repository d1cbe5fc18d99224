"""One process, four virtual CPU devices, and every strategy on them."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import pytest
import tensorflow as tf

_REPLICAS = {"default": 1, "one_device": 1, "mirrored_x2": 2, "mirrored_x4": 4}
_made = {}


def pytest_configure(config):
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)


def make_strategy(name):
    """Returns the strategy of that name, the same object each time."""
    if name not in _made:
        if name == "default":
            _made[name] = tf.distribute.get_strategy()
        elif name == "one_device":
            _made[name] = tf.distribute.OneDeviceStrategy("/cpu:0")
        else:
            # Two strategies with collective ops cannot share a process: TensorFlow gives both groups the same key.
            reduction = tf.distribute.ReductionToOneDevice() if name == "mirrored_x2" else None
            devices = [f"/cpu:{i}" for i in range(_REPLICAS[name])]
            _made[name] = tf.distribute.MirroredStrategy(devices, cross_device_ops=reduction)
    return _made[name]


@pytest.fixture(params=list(_REPLICAS))
def strategy(request):
    return make_strategy(request.param)


@pytest.fixture(params=["keras", "tf_keras"])
def keras(request):
    """Keras 3 or tf_keras."""
    return pytest.importorskip(request.param)


@pytest.fixture(scope="session")
def nursery():
    """A process that forks lives of the binary `faulty`; one for all tests, as its imports take seconds."""
    from faults import lives

    with lives.Nursery() as nursery:
        yield nursery

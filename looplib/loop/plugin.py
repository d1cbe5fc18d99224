"""The strategy parameter_server, which an entry point registers: how it is made, what it refuses, its backend."""

import tensorflow as tf

from looplib.cluster.remote import RemoteStrategy
from looplib.errors import ParameterServerError
from looplib.loop import processes
from looplib.loop.coordinator import ParameterServers


class _ParameterServerStrategy(RemoteStrategy):
    """See `RemoteStrategy`."""

    backend = ParameterServers

    def check_setup(self, *, num_virtual_devices: int, deterministic: bool) -> None:
        """See `RemoteStrategy`."""
        if deterministic:
            raise ParameterServerError(
                "deterministic is asked for, and with the strategy parameter_server workers update the weights in no "
                "fixed order; leave out --deterministic, or use another strategy"
            )
        if num_virtual_devices != 1:
            raise ParameterServerError(
                f"num_virtual_devices is {num_virtual_devices}, and with the strategy parameter_server each worker is "
                "a process; start more workers instead"
            )

    def connect(self) -> tf.distribute.Strategy:
        """See `RemoteStrategy`."""
        return processes.connect()

    def describe(self) -> str:
        """See `RemoteStrategy`."""
        workers, parameter_servers = processes.counts()
        return f"ParameterServerStrategy, workers: {workers}, parameter servers: {parameter_servers}"

    def check_variable(self, what: str, device: str) -> None:
        """See `RemoteStrategy`."""
        if tf.DeviceSpec.from_string(device).job != "ps":
            raise ParameterServerError(
                f"{what} holds variables that are not on a parameter server; build models, optimizers and metrics "
                "inside `with strategy.scope():` (and give the strategy no variable_partitioner)"
            )


STRATEGY = _ParameterServerStrategy()

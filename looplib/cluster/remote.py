"""Strategies whose steps run in other processes, by plug-ins of the group `looplib.backends`.

An entry point has the name that `--strategy` takes. The name for a strategy object comes from its class: that of
`tf.distribute.ParameterServerStrategy` is parameter_server.
"""

import abc
import re
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from looplib.base import plugins
from looplib.compat import tensorflow as _tf
from looplib.errors import VariableError

_GROUP = "looplib.backends"
_connected = False


class RemoteStrategy(abc.ABC):
    """What a plug-in says of a strategy whose steps run in other processes."""

    @abc.abstractmethod
    def check_setup(self, *, num_virtual_devices: int, deterministic: bool) -> None:
        """Raises `UsageError` for arguments of `runtime.setup` that do not go with the strategy."""

    @abc.abstractmethod
    def connect(self) -> tf.distribute.Strategy:
        """Makes the strategy; a process that only serves does so in here, and does not return."""

    @abc.abstractmethod
    def describe(self) -> str:
        """Names the strategy and its processes, for logs and `run.json`."""

    @abc.abstractmethod
    def check_variable(self, what: str, device: str) -> None:
        """Raises `UsageError` for a variable on a device where steps cannot use it; `what` names its owner."""

    @property
    @abc.abstractmethod
    def backend(self) -> type[Any]:
        """The `loop.backend.Backend` that runs the steps."""


def names() -> list[str]:
    """Returns what the plug-ins add to the values of `--strategy`."""
    return plugins.names(_GROUP)


def named(name: str) -> RemoteStrategy:
    """Returns what the plug-in of a value of `--strategy` registers."""
    return plugins.load(_GROUP, name)


def plugin_of(strategy: tf.distribute.Strategy) -> RemoteStrategy | None:
    """Returns what the plug-in of a strategy registers; None for one that runs its steps in this process."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", _tf.name_of(strategy).removesuffix("Strategy")).lower()
    return named(name) if name in names() else None


def connect(name: str) -> tf.distribute.Strategy:
    """Makes the strategy of a value of `--strategy`; see `RemoteStrategy.connect`."""
    global _connected
    strategy = named(name).connect()
    _connected = True
    return strategy


def connected() -> bool:
    """Returns whether this process has connected to others that run its steps."""
    return _connected


def check_placement(strategy: tf.distribute.Strategy, what: str, variables: Iterable[Any]) -> None:
    """Raises `UsageError` if the variables of `what` were not made in the scope of the strategy that will run them."""
    replicas, plugin = strategy.num_replicas_in_sync, plugin_of(strategy)
    for variable in variables:
        value = variable if isinstance(variable, tf.Variable) else getattr(variable, "value", variable)
        distributed = isinstance(value, tf.distribute.DistributedValues)
        if distributed and getattr(value, "distribute_strategy", strategy) is not strategy:
            raise VariableError(
                f"{what} holds variables made under another strategy than the {type(strategy).__name__} of the "
                "controller; pass the controller the strategy that they were made under"
            )
        if plugin is not None:
            plugin.check_variable(what, getattr(value, "device", "") or "")
        if not distributed and (replicas > 1 or isinstance(strategy, tf.distribute.MirroredStrategy)):
            raise VariableError(
                f"{what} holds variables made outside the scope of {type(strategy).__name__} with {replicas} replicas; "
                "build models, optimizers and metrics inside `with strategy.scope():`"
            )

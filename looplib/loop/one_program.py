"""The steps of several replicas on the CPUs of a process as one XLA program, the sums between them inside of it."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from looplib.data import distribution
from looplib.data.host_stream import HostStream
from looplib.errors import UsageError
from looplib.loop.step import Step


class OneProgram:
    """A function across replicas, compiled for one device.

    A program cannot use a variable of another device. It has copies of those, which are brought up to date before it
    runs and written back after.

    Args:
      function: takes batches and returns nothing; across replicas.
      specs: the structure of `tf.TensorSpec`s of the batches.
      strategy: `tf.distribute.Strategy` of the replicas.

    Attributes:
      program: the `tf.function` of batches that XLA compiles; it uses the copies as they are.

    Raises:
      UsageError: if the function uses something of another device that is no variable.
    """

    def __init__(self, function: Callable[[Any], None], specs: Any, strategy: tf.distribute.Strategy) -> None:
        self._device = tf.config.list_logical_devices("CPU")[0].name
        traced = tf.function(function).get_concrete_function(specs)
        parts = [part for variable in traced.variables for part in strategy.experimental_local_results(variable)]
        variables = {id(part.handle): part for part in parts}
        self._copies: list[tuple[tf.Variable, tf.Variable]] = []
        captured = [self._here(value, variables.get(id(value))) for value in traced.captured_inputs]

        def program(batches: Any) -> None:
            arguments = [*tf.nest.flatten(batches), *captured]
            tf.raw_ops.StatefulPartitionedCall(args=arguments, Tout=[], f=traced)

        self.program = tf.function(program, jit_compile=True, autograph=False)

    def _here(self, captured: tf.Tensor, variable: tf.Variable | None) -> tf.Tensor:
        """Returns what the program uses in place of what the function has captured."""
        if captured.dtype != tf.resource or captured.device.endswith(self._device):
            return captured
        if variable is None:
            raise UsageError(f"the step uses a resource of {captured.device} that is no tf.Variable")
        with tf.device(self._device):
            copy = tf.Variable(variable.read_value(), trainable=False)
        self._copies.append((variable, copy))
        return copy.handle

    @tf.autograph.experimental.do_not_convert
    def run(self, batches: Any) -> None:
        """Runs the program; in a `tf.function`."""
        for variable, copy in self._copies:
            copy.assign(variable.read_value())
        self.program(batches)
        for variable, copy in self._copies:
            variable.assign(copy.read_value())


def why_not(step: Step) -> str | None:
    """Returns why the replicas of a step cannot be one program; None if no reason is known."""
    replicas = step.strategy.num_replicas_in_sync
    on_cpus = distribution.runs_on_host(step.strategy) and len(distribution.local_devices(step.strategy)) == replicas
    if not on_cpus or not isinstance(step.stream, HostStream):
        return (
            f"the strategy has {replicas} replicas, and XLA compiles several only on the CPUs of one process, with "
            'distribute="auto" (elsewhere, GradientTrainer(jit_compile=True) lets it compile the gradients of each '
            "replica; on TPUs graph is compiled by XLA in any case)"
        )
    if any(op.startswith("Collective") for op in step.op_counts):
        return (
            "the strategy sums over replicas by collective ops, which XLA does not have on CPUs; make it with "
            "cross_device_ops=tf.distribute.ReductionToOneDevice()"
        )
    return None

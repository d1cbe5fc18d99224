"""Which variables of a training have equal values on all replicas, as far as that is known."""

import dataclasses

import tensorflow as tf

from looplib.actions.checksums import can_sum
from looplib.base.messages import join_names
from looplib.compat import tensorflow as _tf
from looplib.loop.base import Loop
from looplib.task.averages import WeightAverages
from looplib.task.gradients import DynamicLossScale
from looplib.task.state import held_by, no_weights, state_of, variables_of

# Ops that sum in an order of their own each time on a GPU, unless ops are deterministic: of sparse gradients, say.
_UNORDERED = frozenset({
    "ResourceScatterAdd", "ResourceScatterNdAdd", "ResourceScatterNdSub", "ResourceScatterSub", "ScatterNd",
    "TensorScatterAdd", "TensorScatterSub", "UnsortedSegmentSum",
})  # fmt: skip
Named = list[tuple[str, tf.Variable]]


@dataclasses.dataclass(frozen=True)
class ComparedVariables:
    """The variables of a trainer's state that have a copy on each replica.

    Attributes:
      updated_alike: those that all replicas update by the same values: weights, also frozen ones, everything that an
        optimizer holds, averages of these, and the scale of the loss.
      not_updated: those that no step updates.
      others: the names of those that are not compared, because a replica may update them from its own data.
    """

    updated_alike: Named
    not_updated: Named
    others: list[str]

    @property
    def strategy(self) -> tf.distribute.Strategy | None:
        """The strategy that made the variables; None without any."""
        found = [*self.updated_alike, *self.not_updated]
        return getattr(found[0][1], "distribute_strategy", None) if found else None


def compared_variables(loop: Loop) -> ComparedVariables:
    """Finds the variables of a training to compare.

    Variables with a sum or a value for each replica, such as those of metrics (`ON_READ`), are others. So is what the
    traced step updates, and is neither trainable nor an optimizer's: moving statistics, states of recurrent layers,
    seeds. What the step updates is not known in the eager loop, in a trainer's own loop, and with phases.
    """
    task, state = loop.task, state_of(loop.task)
    copied = [(name, variable) for name, variable in variables_of(state) if _is_copied(variable)]
    free = {id(variable) for variable in no_weights(task, state)}
    alike = {id(variable) for _, variable in copied if id(variable) not in free}
    for part in held_by(state):
        if isinstance(part, WeightAverages):
            alike |= {id(average) for variable, average in part.pairs if id(variable) in alike}
        elif isinstance(part, DynamicLossScale):
            alike |= {id(variable) for variable in part.variables}
    known = loop.traced is not None and task.training_phases is None
    updated = _tf.updated_by(loop.traced.function) if known else set()
    not_updated = {id(variable) for _, variable in copied if known and updated.isdisjoint(_identities(variable))}
    return ComparedVariables(
        updated_alike=[(name, variable) for name, variable in copied if id(variable) in alike],
        not_updated=[(name, one) for name, one in copied if id(one) in not_updated - alike],
        others=[name for name, variable in copied if id(variable) not in alike | not_updated],
    )


def why_not_comparable(loop: Loop, strategy: tf.distribute.Strategy) -> str:
    """Returns why replicas may come to differ without a fault, as a clause; "" if no reason is known."""
    devices = map(tf.DeviceSpec.from_string, _tf.worker_devices(strategy))
    if all(device.device_type != "GPU" for device in devices) or _is_deterministic():
        return ""
    if loop.traced is None:
        return "what the step does on the GPUs is not known"
    ops = sorted(_UNORDERED & loop.traced.op_counts.keys())
    return f"on GPUs, the step sums in no fixed order ({join_names(ops)})" if ops else ""


def _is_deterministic() -> bool:
    try:
        tf.timestamp()
    except tf.errors.FailedPreconditionError:  # which TensorFlow raises only then
        return True
    return False


def _identities(variable: tf.Variable) -> list[int]:
    parts = variable.distribute_strategy.experimental_local_results(variable)
    return [_tf.identity_of(part) for part in parts]


def _is_copied(variable: tf.Variable) -> bool:
    return (
        isinstance(variable, tf.distribute.DistributedValues)
        and variable.synchronization != tf.VariableSynchronization.ON_READ
        and can_sum(variable.dtype)
    )

"""Which values of a traced step are computed from the state of metrics, and how to compute them from it again."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from looplib.compat import keras as _keras
from looplib.compat import tensorflow as _tf

_READ = "ReadVariableOp"


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """An op that calls a function, and the graph of the function."""

    op: tf.Operation
    graph: Any
    caller: "_Call | None"  # what calls the function that the op is in

    def argument(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """Returns what the op gives for an argument of the function; None for another tensor."""
        places = [number for number, one in enumerate(self.graph.inputs) if one is tensor]
        inputs = self.op.inputs  # those of a condition begin with what it depends on
        return inputs[len(inputs) - len(self.graph.inputs) + places[0]] if places else None


@dataclasses.dataclass(frozen=True, eq=False)
class Recomputed:
    """A value as a function of variables.

    Attributes:
      compute: from the values of the variables to the value.
      variables: the variables.
      of_all_replicas: whether the step itself has read the variables on all replicas.
    """

    compute: Callable[..., tf.Tensor]
    variables: list[Any]
    of_all_replicas: bool

    def now(self) -> tf.Tensor:
        """Returns the value for what the variables hold now; across replicas, for their sums over replicas."""
        return self.compute(*map(_keras.value_now, self.variables))


class Origins:
    """The variables of metrics in the graph of a step; made in it, after the step, in replica context.

    Args:
      metrics: the metrics.
    """

    def __init__(self, metrics: Iterable[Any]) -> None:
        self._parts: dict[str, tuple[Any, int]] = {}  # the variables and the replicas by the names of their handles
        strategy = tf.distribute.get_strategy()
        for variable in {id(one): one for metric in metrics for one in metric.variables}.values():
            for number, part in enumerate(strategy.experimental_local_results(_keras.tf_variable(variable))):
                if (handle := _handle_of(part.read_value())) is not None:
                    self._parts[handle.name] = variable, number

    def depends(self, value: tf.Tensor) -> bool:
        """Returns whether a value is computed from a variable of a metric."""
        return any(tensor.name in self._parts for tensor, caller in _behind(value) if caller is None)

    def may_change(self) -> bool:
        """Returns whether an op of the step may change a variable of a metric."""
        ops = (op for op in tf.compat.v1.get_default_graph().get_operations() if op.type != _READ)
        return any(part.name in self._parts for op in ops for part in op.inputs)

    def recomputed(self, value: tf.Tensor) -> Recomputed | None:
        """Returns a value as a function of the variables of metrics; None if it depends on anything else.

        None too for one that this replica alone has read for before the step's last change of a variable.
        """
        value, caller = _resolved(value)
        nodes, reads, stale, reduces = {}, {}, False, False
        todo = [value]
        while todo:
            op = todo.pop().op
            if op.name in nodes or op.name in reads:
                continue
            if op.type == _READ:
                reads[op.name] = self._part(op.inputs[0], caller)
                if reads[op.name] is None:
                    return None
                stale = stale or _changed_after(op)
                continue
            sums = op.type.startswith(("Collective", "Nccl"))
            if not sums and ((not op.inputs and op.type != "Const") or op.op_def.is_stateful):
                return None
            reduces = reduces or sums
            nodes[op.name] = _plain_node(op)
            todo.extend(op.inputs[:1] if sums else op.inputs)
        of_all = reduces or self._reads_all({(id(variable), number) for variable, number in reads.values()})
        if stale and not of_all:
            return None
        compute = _function(value, list(nodes.values()), list(reads))
        return Recomputed(compute, [variable for variable, _ in reads.values()], of_all)

    def _reads_all(self, parts: set[tuple[int, int]]) -> bool:
        """Returns whether all replicas' parts of some variables are read, which tf_keras does for a result."""
        every = {(id(variable), number) for variable, number in self._parts.values()}
        variables = {variable for variable, _ in parts}
        return len(parts) > len(variables) and parts == {part for part in every if part[0] in variables}

    def _part(self, handle: tf.Tensor | None, caller: _Call | None) -> tuple[Any, int] | None:
        """Returns the variable, and its replica, of a handle in a function; None for one of no metric."""
        while caller is not None and handle is not None:
            handle, caller = caller.argument(handle), caller.caller
        return None if handle is None else self._parts.get(handle.name)


def watching(metrics: Iterable[Any]) -> tuple[tf.GradientTape, list[Any]]:
    """Returns a tape that records what an eager step computes from the variables of metrics, and these."""
    tape = tf.GradientTape(persistent=True, watch_accessed_variables=False)
    every = [_keras.tf_variable(one) for metric in metrics for one in metric.variables]
    return tape, [one for one in every if one.dtype.is_floating]


def depends_by(tape: tf.GradientTape, value: tf.Tensor, variables: list[Any]) -> bool:
    """Returns whether a value is computed from one of the variables, as far as a tape of `watching` has recorded it."""
    try:
        return any(one is not None for one in tape.gradient(value, variables))
    except LookupError:  # an op between them has no gradient
        return True


def _handle_of(read: tf.Tensor) -> tf.Tensor | None:
    return next((tensor for tensor, _ in _behind(read) if tensor.dtype == tf.resource), None)


def _behind(value: tf.Tensor) -> Iterator[tuple[tf.Tensor, _Call | None]]:
    """Yields the tensors that a value is computed from, each with the call of the function that it is in."""
    todo: list[tuple[tf.Tensor, _Call | None]] = [(value, None)]
    seen, calls = set(), {}
    while todo:
        tensor, caller = todo.pop()
        if (key := (caller, tensor.name)) in seen:
            continue
        seen.add(key)
        yield tensor, caller
        op = tensor.op
        if caller is not None and (given := caller.argument(tensor)) is not None:
            todo.append((given, caller.caller))
            continue
        if (at := (caller, op.name)) not in calls:
            calls[at] = [_Call(op, graph, caller) for graph in _tf.graphs_called_by(op)]
        todo += [(call.graph.outputs[tensor.value_index], call) for call in calls[at]]
        arguments = len(calls[at][0].graph.inputs) if calls[at] else 0
        todo += [(part, caller) for part in op.inputs[: len(op.inputs) - arguments]]


def _resolved(value: tf.Tensor) -> tuple[tf.Tensor, _Call | None]:
    """Returns a value that a function returns as the tensor in that function, with its call."""
    caller = None
    while True:
        graphs = _tf.graphs_called_by(value.op)
        if len(graphs) == 1:
            caller = _Call(value.op, graphs[0], caller)
            value = graphs[0].outputs[value.value_index]
        elif value.op.type == "Identity":
            value = value.op.inputs[0]
        else:
            return value, caller


def _changed_after(read: tf.Operation) -> bool:
    """Returns whether an op of the step comes after a reading of a variable and may change this."""
    ops = read.graph.get_operations()
    place = next(number for number, op in enumerate(ops) if op is read)
    handle = read.inputs[0]
    return any(op.type != _READ and any(part is handle for part in op.inputs) for op in ops[place + 1 :])


def _function(value: tf.Tensor, nodes: list[tf.compat.v1.NodeDef], reads: list[str]) -> Callable[..., tf.Tensor]:
    """Returns a function from what some ops of a graph read to a value, which other nodes compute from that."""
    definition = tf.compat.v1.GraphDef(node=nodes, versions=value.graph.graph_def_versions)
    result = definition.node.add(name="value_now", op="Identity", input=[value.name])
    result.attr["T"].type = value.dtype.as_datatype_enum

    @tf.function(autograph=False)
    def compute(*values: tf.Tensor) -> tf.Tensor:
        inputs = {f"{name}:0": value for name, value in zip(reads, values)}
        return tf.graph_util.import_graph_def(definition, inputs, ["value_now:0"], name="")[0]

    return compute


def _plain_node(op: tf.Operation) -> tf.compat.v1.NodeDef:
    """Returns an op without its device and without what it only waits for."""
    node = op.node_def
    node.device = ""
    for name in [name for name in node.attr if name.startswith("_")]:  # of where and how it runs
        del node.attr[name]
    data = [name for name in node.input if not name.startswith("^")]
    del node.input[:]
    node.input.extend(data)
    return node

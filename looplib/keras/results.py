"""Results of a step of a compiled model: the numbers that it returns, under the names that they have in `fit`."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np
import tensorflow as tf

from looplib.compat import keras as _keras
from looplib.compat import tensorflow as _tf
from looplib.compat.tensorflow import converted
from looplib.data import rows
from looplib.errors import MetricError
from looplib.keras import building
from looplib.loop.reducer import UnknownOutputsError
from looplib.run import metric_names
from looplib.task import reductions

_OF_EACH = " of each batch"


class BatchLogs:
    """The logs of the steps of an epoch, as in `fit`: the metrics since the epoch began.

    Attributes:
      steps: how many steps an epoch has; they have to be known before a step is traced.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._found: dict[str, np.ndarray] = {}

    def outputs(self, logs: dict[str, Any], step: tf.Tensor) -> dict[str, reductions.Reduction]:
        """Returns what a step reports besides its metrics, from its logs and the steps before it."""
        place = tf.one_hot(tf.cast(step, tf.int64) % self.steps, self.steps)
        found = {}
        for name, value in logs.items():
            value = tf.cast(value, tf.float32)
            alone = tf.reshape(place, [self.steps, *[1] * value.shape.rank])
            # A value that is not finite is only that of its own step.
            found[f"{name}{_OF_EACH}"] = reductions.total(tf.math.multiply_no_nan(value[None], alone))
        return found

    def taken(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Takes what the steps reported; returns the other metrics of a report."""
        found = {name: value for name, value in metrics.items() if name.endswith(_OF_EACH)}
        self._found = {name.removesuffix(_OF_EACH): np.asarray(value) for name, value in found.items()}
        return {name: value for name, value in metrics.items() if name not in found}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Returns the logs of the batches of the last report."""
        for index in range(self.steps):
            values = {name: value[index] for name, value in self._found.items()}
            yield {name: value if value.ndim else float(value) for name, value in values.items()}


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


_HIDDEN = "metric of a repeated name "  # and a number, of metrics that are not reported


@runtime_checkable
class ReportsArrays(Protocol):
    """A task whose reports have a number for each element of a metric that is an array.

    Attributes:
      report_arrays: these metrics of the last report, whole.
    """

    report_arrays: dict[str, np.ndarray]


class KerasResults:
    """The metrics of the steps of one task.

    Keras's own steps report the model's metric objects. What a `train_step` or `test_step` of the model's own returns
    is reported by its names: the last value of what is computed from the state of metrics, which sum it up over steps
    themselves, and the mean over examples of any other. Of several replicas, the last value is computed again from the
    metrics of all of them. Compiled losses and metrics of tf_keras that the step never updates are left out, as
    in `fit`, which does not build them.

    Args:
      model: the compiled model.
      step: its method, "train_step" or "test_step".
      batch_logs: takes the logs of each batch too; or None.

    Attributes:
      arrays: the metrics of the last report that are arrays, of any shape.
    """

    def __init__(self, model: Any, step: str, batch_logs: BatchLogs | None = None) -> None:
        self._model, self._step, self._batch_logs = model, step, batch_logs
        self._own = _keras.has_own_step(model, step)
        self._on_several = model.distribute_strategy.num_replicas_in_sync > 1
        self._names: dict[str, str] = {}  # in fit, by those in reports
        self._returned: dict[str, str] | None = None  # in reports, by the names that an own step returns; None for all
        self._idle: set[str] = set()  # what an own step returns of compiled metrics that it does not update
        self._summed: dict[str, Any] = {}  # metrics that compute values from the sums over replicas, by name
        self.arrays: dict[str, np.ndarray] = {}

    def of_step(self, inputs: Any, number: tf.Tensor | None = None) -> dict[str, Any]:
        """Runs a step; returns its metrics, for `finished`. In replica context.

        Args:
          inputs: the batch.
          number: the steps before; only the logs of each batch need it.

        Raises:
          UsageError: for a value that is computed from metrics and from others on several replicas.
        """
        if self._own and tf.executing_eagerly():
            return self._of_eager_step(inputs, number)
        logs = self._run(inputs)
        self._idle = self._not_updated(logs)
        return self._outputs(inputs, logs, number, self._is_last(logs))

    def _run(self, inputs: Any) -> Any:
        run = converted(getattr(self._model, self._step))
        try:
            return run(inputs)
        except ValueError as error:
            building.explain(error)
            raise

    def _of_eager_step(self, inputs: Any, number: tf.Tensor | None) -> dict[str, Any]:
        if self._on_several:
            if self._returned is None:
                raise UnknownOutputsError  # the step is traced first
            known = {name for name, place in self._returned.items() if place != self._alone(name)}
            logs = self._run(inputs)
            return self._outputs(inputs, logs, number, known)
        tape, variables = watching(self._metrics())
        with tape:
            for variable in variables:
                tape.watch(variable)
            compiled = _keras.compiled_metrics(self._model)
            before = [[one.numpy() for one in metric.variables] for metric in compiled]
            logs = self._run(inputs)
            flat = _flattened(logs)
        last = {name for name, value in flat.items() if tf.is_tensor(value) and value.dtype.is_floating}
        last = {name for name in last if depends_by(tape, flat[name], variables)}
        for metric, values in zip(compiled, before):
            if all(np.array_equal(one.numpy(), value) for one, value in zip(metric.variables, values)):
                own = watching([metric])[1]
                self._idle |= {metric.name} & {name for name in last if depends_by(tape, flat[name], own)}
        return self._outputs(inputs, logs, number, last)

    @tf.autograph.experimental.do_not_convert
    def _not_updated(self, logs: Any) -> set[str]:
        """Returns the names of compiled metrics that a traced step has returned and not updated."""
        names = set()
        for metric in _keras.compiled_metrics(self._model) if self._own else ():
            value = _flattened(logs).get(metric.name)
            found = Origins([metric])
            if tf.is_symbolic_tensor(value) and found.depends(value) and not found.may_change():
                names.add(metric.name)
        return names

    @tf.autograph.experimental.do_not_convert
    def _is_last(self, logs: Any) -> set[str]:
        """Returns the names of what a traced step has computed from the state of metrics."""
        found, last = Origins(self._metrics()) if self._own else None, set()
        for name, value in _flattened(logs).items() if found else ():
            if tf.is_symbolic_tensor(value) and found.depends(value):
                last.add(name)
                if self._on_several:
                    self._sum(name, found.recomputed(value))
        return last

    def _sum(self, name: str, value: Recomputed | None) -> None:
        if value is None:
            raise MetricError(
                f"{type(self._model).__name__}.{self._step} returned {name!r}, which is computed from the state of "
                "metrics and from something else (other tensors, or what a metric held before the step changed it "
                "last), so that no replica has its value for all of them; return what is computed from the results of "
                "metrics alone after their updates, and the rest by other names, or use one replica"
            )
        if not value.of_all_replicas:
            self._summed.setdefault(name, _Summed(self._model, name)).value = value

    @tf.autograph.experimental.do_not_convert
    def _outputs(self, inputs: Any, logs: Any, number: tf.Tensor | None, last: set[str]) -> dict[str, Any]:
        returns = isinstance(logs, dict)
        logs = {name: value for name, value in _flattened(logs).items() if name not in self._idle}
        metrics = self._by_name()
        self._note_names(metrics)
        metric_names.check(f"the compiled {type(self._model).__name__}", {*self._names.values(), *logs})
        size = tf.cast(rows.count(rows.parts(inputs)[0]), tf.float64)
        outputs, places = dict(metrics), {}
        for name, value in logs.items():
            if self._own or name not in self._names.values():
                places[name] = self._alone(name) if self._own else name
                exact = tf.cast(value, tf.float64)  # a mean of integers would be one
                # Guards watch the mean of a loss in each step, also where the last value is reported.
                outputs[places[name]] = reductions.mean(tf.reduce_mean(exact), size)
            if name in last:
                places[name] = f"last {places[name]}"
                summed = self._summed.get(name)
                outputs[places[name]] = summed.metric if summed else reductions.last(value)
        if self._own and returns:
            self._returned = places
        return outputs if self._batch_logs is None else outputs | self._batch_logs.outputs(logs, number)

    def finished(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Returns the metrics of a report with the names and the values that they have in `fit`.

        An array is a number for each element, such as `f1_0`; `arrays` has the whole.
        """
        metrics = metrics if self._batch_logs is None else self._batch_logs.taken(metrics)
        metrics = {name: value for name, value in metrics.items() if not name.startswith(_HIDDEN)}
        found = {self._names.get(name, name): value for name, value in metrics.items()}
        if self._returned is not None:
            kept = metrics.keys() - self._names.keys() - {self._alone(name) for name in self._returned}
            found = {name: metrics[name] for name in kept - {*self._returned.values()}}
            found |= {name: metrics[place] for name, place in self._returned.items() if place in metrics}
        self.arrays = {name: value for name, value in found.items() if np.ndim(value)}
        for name, value in self.arrays.items():
            del found[name]
            found |= {f"{name}_{number}": one for number, one in enumerate(np.ravel(value))}
        return found

    def _by_name(self) -> dict[str, Any]:
        """Returns the listed metrics; of those with one name, such as those of layers, `fit` reports the last."""
        found: dict[str, Any] = {}
        for metric in self._model.metrics:
            if metric.name in found:  # it is to begin anew after a report too
                found[f"{_HIDDEN}{len(found)}"] = found[metric.name]
            found[metric.name] = metric
        return found

    def _metrics(self) -> list[Any]:
        """Returns the metrics of the model, also those that its `metrics` leaves out."""
        return [*self._model.metrics, *_keras.unlisted_metrics(self._model)]

    def _note_names(self, metrics: dict[str, Any]) -> None:
        for key, metric in metrics.items():
            result = metric.result()
            self._names |= (_paths(key, result) if isinstance(result, dict) else {}) or {key: key}

    def _alone(self, name: str) -> str:
        return f"{name} of {self._step}"


class _Summed:
    """A value that is computed from the sums of metrics over replicas, as a metric, which a report takes the result of.

    Args:
      model: whose family the metric is of.
      name: of the value.

    Attributes:
      value: the value, as the newest trace computes it.
      metric: the metric, without variables of its own.
    """

    def __init__(self, model: Any, name: str) -> None:
        self.value: Recomputed | None = None

        class OfOthers(_keras.module_of(model).metrics.Metric):
            @tf.autograph.experimental.do_not_convert
            def update_state(own, *_: Any, **__: Any) -> None:  # noqa: N805
                """Leaves this to the metrics."""

            def result(own) -> tf.Tensor:  # noqa: N805
                return self.value.now()

            @tf.autograph.experimental.do_not_convert
            def reset_state(own) -> None:  # noqa: N805
                """Leaves this to the metrics."""

        self.metric = OfOthers(name=name)


def _paths(path: str, results: dict[str, Any]) -> dict[str, str]:
    """Returns the names in `fit` of the results of a metric, also of those in dicts, by their names in reports."""
    names: dict[str, str] = {}
    for key, value in results.items():
        names |= _paths(f"{path}_{key}", value) if isinstance(value, dict) else {f"{path}_{key}": key}
    return names


def _flattened(logs: Any) -> dict[str, Any]:
    """Returns what a step returned without the dicts in it, whose names are those in `fit`; {} if it is no dict."""
    flat: dict[str, Any] = {}
    for name, value in logs.items() if isinstance(logs, dict) else ():
        flat |= _flattened(value) if isinstance(value, dict) else {name: _keras.value_now(value)}
    return flat

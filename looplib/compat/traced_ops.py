"""The ops of traced functions, and the words in which TensorFlow names their lines; for messages to users.

As in `looplib/compat`, each function returns None or nothing where another version of TensorFlow has another form, and
`tests/compat/tf_test.py` tries each with the TensorFlow that is installed.
"""

import re
from collections.abc import Iterator

import tensorflow as tf


class Ops:
    """The ops of a traced function and of all functions that it calls; iterates over `tf.Operation`s.

    Args:
      concrete: the traced function.
    """

    def __init__(self, concrete: tf.types.experimental.ConcreteFunction) -> None:
        self._main: str = concrete.function_def.signature.name
        self._graphs: dict[str, dict[str, tf.Operation]] = {}
        todo = [(self._main, concrete.graph)]
        while todo:
            name, graph = todo.pop()
            if name in self._graphs:
                continue
            self._graphs[name] = {op.name: op for op in graph.get_operations()}
            for op in self._graphs[name].values():
                below = ((function, _graph_of(graph, function)) for function in called(op))
                todo += [(function, found) for function, found in below if found is not None]

    def __iter__(self) -> Iterator[tf.Operation]:
        return (op for ops in self._graphs.values() for op in ops.values())

    def named_in(self, message: str) -> tf.Operation | None:
        """Returns the op that the message of a failed op, or of XLA, is about; None if it names none."""
        graph = re.search(r"compile graph ([^\s\[]+)", message)
        functions = [graph[1]] if graph else []
        functions += re.findall(r"\{\{function_node (\S+?)\}\}", message)
        for path in re.findall(r"\{\{node ([^}]+)\}\}", message):
            for function in functions + [self._main]:
                op = self._follow(function, path)
                if op is not None:
                    return op
        return None

    def named(self, path: str) -> tf.Operation | None:
        """Returns the op of a path in XLA's metadata, which begins with the call of the whole, or None."""
        found = self._follow(self._main, path)
        return found if found is not None else next((op for op in self if op.name == path), None)

    def _follow(self, function: str, path: str) -> tf.Operation | None:
        """Follows the calls that a path begins with, as inlining makes them."""
        ops = self._graphs.get(function, {})
        if path in ops:
            return ops[path]
        parts = path.split("/")
        for end in range(len(parts) - 1, 0, -1):
            call = ops.get("/".join(parts[:end]))
            for name in called(call) if call is not None else ():
                found = self._follow(name, "/".join(parts[end:]))
                if found is not None:
                    return found
        return None


def called(op: tf.Operation) -> Iterator[str]:
    """Yields the names of the functions that an op calls."""
    for value in op.node_def.attr.values():
        if value.HasField("func"):
            yield value.func.name
        for function in value.list.func:
            yield function.name


def needed(graph: tf.Graph) -> Iterator[tf.Operation]:
    """Yields the ops of a function's graph that its results or its side effects need.

    Raises:
      AttributeError: if the graph is not a function's, or TensorFlow does not say what its side effects are.
    """
    todo = [*(tensor.op for tensor in graph.outputs), *graph.control_outputs]
    seen = set(todo)
    while todo:
        op = todo.pop()
        yield op
        for before in (*(tensor.op for tensor in op.inputs), *op.control_inputs):
            if before not in seen:
                seen.add(before)
                todo.append(before)


def graphs_called(op: tf.Operation, name: str | None = None) -> list[tf.Graph]:
    """Returns the graphs of the functions that an op calls, as far as TensorFlow hands them out.

    Args:
      op: the op.
      name: the attribute that names the function, such as "body"; None for all.
    """
    names = called(op) if name is None else [op.get_attr(name).name]
    return [found for found in (_graph_of(op.graph, one) for one in names) if found is not None]


def _graph_of(graph: tf.Graph, name: str) -> tf.Graph | None:
    """Returns the graph of a function that a graph calls; None if TensorFlow does not hand it out."""
    try:
        return graph._get_function(name).graph
    except AttributeError:
        return None


def frames_in(message: str) -> list[tuple[str, int]]:
    """Returns the (file, line) of each frame that AutoGraph, `tf.numpy_function` or a failed op put into a message."""
    if not re.search(r"in user code:|Traceback \(most recent call last\)|Detected at node", message):
        return []
    return [(file, int(line)) for file, line in re.findall(r'File "([^"]+)", line (\d+)', message)]

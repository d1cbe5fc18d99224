"""Lines of the user's program: where an op of a traced function, an error, or the start of the devices comes from."""

import itertools
import linecache
import os
import re
import sys
import sysconfig
import traceback
import types
from collections.abc import Callable, Iterable, Iterator

import tensorflow as tf

import looplib
from looplib.compat import keras as _keras
from looplib.compat import tensorflow as _tf


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
                below = ((function, _tf.graph_of(graph, function)) for function in called(op))
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
    return [found for found in (_tf.graph_of(op.graph, one) for one in names) if found is not None]


def frames_in(message: str) -> list[tuple[str, int]]:
    """Returns the (file, line) of each frame that AutoGraph, `tf.numpy_function` or a failed op put into a message."""
    if not re.search(r"in user code:|Traceback \(most recent call last\)|Detected at node", message):
        return []
    return [(file, int(line)) for file, line in re.findall(r'File "([^"]+)", line (\d+)', message)]


_OURS = os.path.dirname(os.path.abspath(looplib.__file__)) + os.sep
_LIBRARIES = (
    os.path.dirname(os.path.abspath(tf.__file__)) + os.sep,
    *(sysconfig.get_paths()[name] + os.sep for name in ("purelib", "platlib", "stdlib")),
)
_CALLS_THE_STEP = os.path.join(_OURS, "loop", "step.py")


def is_installed(path: str) -> bool:
    """Returns whether a file belongs to looplib or to an installed package, and not to the user's program."""
    return path.startswith((_OURS, *_LIBRARIES))


def line_of(op: tf.Operation) -> str:
    """Returns the line of the user's program that made an op, as "file:line: text"; "" if none did."""
    frame = next((frame for frame in _frames(op) if not is_installed(frame.filename)), None)
    if frame is None:
        return ""
    return _as_text(frame.filename, frame.lineno)


def place_of(error: BaseException, functions: Iterable[tf.types.experimental.ConcreteFunction] = ()) -> str:
    """Returns the line of the user's program that an error comes from, as "file:line: text"; "" if none is known.

    Args:
      error: what was raised.
      functions: traced functions, one of whose ops may have failed.
    """
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        # The innermost of those that AutoGraph and `tf.numpy_function` write into a message come last.
        frames = [(file, line, None) for file, line in reversed(frames_in(str(error))) if is_users(file)]
        frames += _frames_of_traceback(error)
        if frames:
            return _as_text(*frames[0])
        if isinstance(error, tf.errors.OpError):
            for function in functions:
                op = Ops(function).named_in(error.message)
                if op is not None and line_of(op):
                    return line_of(op)
        error = error.__cause__ or error.__context__
    return ""


def place_of_function(function: Callable) -> str:
    """Returns the first line of a function of the user's, as "file:line: text"; "" for any other function."""
    code = getattr(function, "__code__", None)
    return _as_text(code.co_filename, code.co_firstlineno) if code and is_users(code.co_filename) else ""


def _frames_of_traceback(error: BaseException) -> list[tuple[str, int, str | None]]:
    """Returns the user's frames that looplib called, the innermost first."""
    if isinstance(error, SyntaxError) and error.filename:
        return [(error.filename, error.lineno or 0, (error.text or "").strip())]
    frames = traceback.extract_tb(error.__traceback__)
    start = next((number for number, frame in enumerate(frames) if frame.filename.startswith(_OURS)), 0)
    return [(frame.filename, frame.lineno or 0, None) for frame in frames[:start:-1] if is_users(frame.filename)]


def place_of_stack(frames: list[traceback.FrameSummary]) -> str:
    """Returns the user's innermost line in a stack, as "file:line: text"; "" if there is none."""
    found = [frame for frame in frames if is_users(frame.filename)]
    return _as_text(found[-1].filename, found[-1].lineno or 0) if found else ""


def place_of_start() -> str:
    """Returns what of the user's program started TensorFlow's devices, for the middle of a sentence."""
    if place := place_of_stack(_tf.stack_at_start()):
        return place
    return "a tensor" + next((f", such as {name}" for name in map(_tensor_of, list(sys.modules.values())) if name), "")


def _tensor_of(module: types.ModuleType) -> str:
    """Names a tensor, variable, data set or Keras object among a user's module's globals; "" without one."""
    file = getattr(module, "__file__", None)
    if not file or not is_users(file):
        return ""
    kinds = (tf.Tensor, tf.Variable, tf.data.Dataset)
    found = (
        name
        for name, value in list(vars(module).items())
        if isinstance(value, kinds) or (not isinstance(value, type) and _keras.family(value))
    )
    return next((f"`{name}` of {os.path.basename(file)}" for name in found), "")


def is_users(filename: str) -> bool:
    """Returns whether a file is of the user's program: not of looplib, an installed package or AutoGraph."""
    made = filename.startswith("<") or os.path.basename(filename).startswith("__autograph_generated_file")
    compiled = filename.endswith((".pyx", ".pxi")) and not os.path.exists(filename)  # Cython of an installed package
    return not made and not compiled and not is_installed(filename)


def _as_text(filename: str, line: int, text: str | None = None) -> str:
    """Writes a line as "file:line: text", with a path relative to the current directory if it is below it."""
    text = linecache.getline(filename, line).strip() if text is None else text
    relative = os.path.relpath(filename)
    return f"{filename if relative.startswith('..') else relative}:{line}: {text}".removesuffix(": ")


def is_ours(op: tf.Operation) -> bool:
    """Returns whether looplib made an op, and not the user's program that it called."""
    frame = next((f for f in _frames(op) if not f.filename.startswith(_LIBRARIES)), None)
    return frame is not None and frame.filename.startswith(_OURS)


def is_of_keras(op: tf.Operation) -> bool:
    """Returns whether Keras made an op, called by the user's program."""
    frames = list(itertools.takewhile(lambda frame: is_installed(frame.filename), _frames(op)))
    return any(re.search(r"[/\\](tf_)?keras[/\\]", frame.filename) for frame in frames)


def _frames(op: tf.Operation) -> list[traceback.FrameSummary]:
    """Returns the frames within the step that made an op, the innermost first, without those that call the step."""
    frames = [frame for frame in op.traceback or () if not frame.filename.startswith("<")]
    start = next((number for number, frame in enumerate(frames) if frame.filename == _CALLS_THE_STEP), 0)
    return frames[:start:-1]

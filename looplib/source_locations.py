"""Where in the user's program the ops of a traced function come from."""

import itertools
import linecache
import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterable

import tensorflow as tf

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_CALLS_THE_STEP = os.path.join(_OURS, "loop", "reducer.py")
_LIBRARIES = (
    os.path.dirname(os.path.abspath(tf.__file__)) + os.sep,
    *(sysconfig.get_paths()[name] + os.sep for name in ("purelib", "platlib", "stdlib")),
)


class Ops:
    """The ops of a traced function and of all functions below it; iterates over `tf.Operation`s.

    Args:
      concrete: a `tf.types.experimental.ConcreteFunction`.
    """

    def __init__(self, concrete):
        self._main = concrete.function_def.signature.name
        self._graphs, self._places = {}, {}
        todo = [(self._main, concrete.graph)]
        while todo:
            name, graph = todo.pop()
            if name in self._graphs:
                continue
            self._graphs[name] = {op.name: op for op in graph.get_operations()}
            for op in self._graphs[name].values():
                self._places[id(op)] = (name, op.name)
                below = ((function, _graph_of(graph, function)) for function in called(op))
                todo += [(function, found) for function, found in below if found is not None]

    def __iter__(self):
        return (op for ops in self._graphs.values() for op in ops.values())

    def place(self, op):
        """The (function name, op name) of an op."""
        return self._places[id(op)]

    def in_function(self, function, name):
        """The op of that name in a function, or None."""
        return self._graphs.get(function, {}).get(name)

    def named_in(self, message, names):
        """The op that XLA's error is about, or None.

        Args:
          message: the text of the error.
          names: dict from the names of lifted functions to their old ones.
        """
        graph = re.search(r"compile graph ([^\s\[]+)", message)
        functions = [graph[1]] if graph else []
        functions += re.findall(r"\{\{function_node (\S+?)\}\}", message)
        for path in re.findall(r"\{\{node ([^}]+)\}\}", message):
            for function in functions + [self._main]:
                op = self._follow(names.get(function, function), path)
                if op is not None:
                    return op
        return None

    def named(self, match, names):
        """The op of a matched `op_name`, which begins with the call of the whole, or None."""
        if not match:
            return None
        found = self._follow(self._main, match[1])
        return found if found is not None else next((op for op in self if op.name == match[1]), None)

    def _follow(self, function, path):
        """Goes through the calls that a path begins with, as inlining makes them."""
        path = path.removeprefix("step/")
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


def line_of(op):
    """The line of the user's program that made an op, as "file:line: text"; "" if none did."""
    frame = next((frame for frame in _frames(op) if not _is_library(frame.filename)), None)
    if frame is None:
        return ""
    return _told(frame.filename, frame.lineno)


def place_of(error: BaseException, functions: Iterable[tf.types.experimental.ConcreteFunction] = ()) -> str:
    """The line of the user's program that an error comes from, as "file:line: text"; "" if none is known.

    Args:
      error: what was raised.
      functions: the traced functions, one of whose ops may have failed.
    """
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        frames = [*_frames_in_message(error), *_frames_of_traceback(error)]
        if frames:
            return _told(*frames[0])
        if isinstance(error, tf.errors.OpError):
            for function in functions:
                op = Ops(function).named_in(error.message, {})
                if op is not None and line_of(op):
                    return line_of(op)
        error = error.__cause__ or error.__context__
    return ""


def place_of_function(function: Callable) -> str:
    """The line that a function of the user's starts at, as "file:line: text"; "" if it is none of the user's."""
    code = getattr(function, "__code__", None)
    return _told(code.co_filename, code.co_firstlineno) if code and is_users(code.co_filename) else ""


def _frames_in_message(error: BaseException) -> list[tuple[str, int, str | None]]:
    """What AutoGraph and `tf.numpy_function` say of where it was raised, the innermost frame of the user's first."""
    text = str(error)
    if not re.search(r"in user code:|Traceback \(most recent call last\)|Detected at node", text):
        return []
    found = re.findall(r'File "([^"]+)", line (\d+)', text)
    return [(file, int(line), None) for file, line in reversed(found) if is_users(file)]


def _frames_of_traceback(error: BaseException) -> list[tuple[str, int, str | None]]:
    """The frames that looplib has called, the innermost of the user's first."""
    if isinstance(error, SyntaxError) and error.filename:
        return [(error.filename, error.lineno or 0, (error.text or "").strip())]
    frames = traceback.extract_tb(error.__traceback__)
    start = next((number for number, frame in enumerate(frames) if frame.filename.startswith(_OURS)), 0)
    return [(frame.filename, frame.lineno or 0, None) for frame in frames[:start:-1] if is_users(frame.filename)]


def place_of_stack(frames: list[traceback.FrameSummary]) -> str:
    """The innermost line of the user's in a stack, as "file:line: text"; "" if there is none."""
    found = [frame for frame in frames if is_users(frame.filename)]
    return _told(found[-1].filename, found[-1].lineno or 0) if found else ""


def is_users(filename: str) -> bool:
    """Whether a file is of the user's program: not of looplib, of an installed package, or made by AutoGraph."""
    made = filename.startswith("<") or os.path.basename(filename).startswith("__autograph_generated_file")
    return not made and not _is_library(filename)


def _told(filename: str, line: int, text: str | None = None) -> str:
    """A line as "file:line: text", relative to the current directory if it is below it."""
    text = linecache.getline(filename, line).strip() if text is None else text
    relative = os.path.relpath(filename)
    return f"{filename if relative.startswith('..') else relative}:{line}: {text}".removesuffix(": ")


def is_ours(op):
    """Whether looplib made an op, and not the user's program within it."""
    frame = next((f for f in _frames(op) if not f.filename.startswith(_LIBRARIES)), None)
    return frame is not None and frame.filename.startswith(_OURS)


def is_of_keras(op):
    """Whether Keras made an op, in a call of the user's."""
    frames = list(itertools.takewhile(lambda frame: _is_library(frame.filename), _frames(op)))
    return any(re.search(r"[/\\](tf_)?keras[/\\]", frame.filename) for frame in frames)


def _frames(op):
    """The frames within the step, the innermost first; what calls the step is no origin of its ops."""
    frames = [frame for frame in op.traceback or () if not frame.filename.startswith("<")]
    start = next((number for number, frame in enumerate(frames) if frame.filename == _CALLS_THE_STEP), 0)
    return frames[:start:-1]


def _is_library(filename):
    return filename.startswith((_OURS, *_LIBRARIES))


def called(op):
    """The names of the functions that an op calls."""
    for value in op.node_def.attr.values():
        if value.HasField("func"):
            yield value.func.name
        for function in value.list.func:
            yield function.name


def _graph_of(graph, name):
    """The graph of a function that a graph calls; None where TensorFlow, which has no public name for it, changed."""
    try:
        return graph._get_function(name).graph
    except AttributeError:
        return None

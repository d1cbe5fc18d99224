"""Lines of the user's program: where an op of a traced function, an error, or the start of the devices comes from."""

import itertools
import linecache
import os
import re
import sys
import sysconfig
import traceback
import types
from collections.abc import Callable, Iterable

import tensorflow as tf

import looplib
from looplib.compat import keras as _keras
from looplib.compat import tensorflow as _tf
from looplib.compat import traced_ops

_OURS = os.path.dirname(os.path.abspath(looplib.__file__)) + os.sep
_LIBRARIES = (
    os.path.dirname(os.path.abspath(tf.__file__)) + os.sep,
    *(sysconfig.get_paths()[name] + os.sep for name in ("purelib", "platlib", "stdlib")),
)
_CALLS_THE_STEP = os.path.join(_OURS, "loop", "reducer.py")


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
        frames = [*_frames_in_message(error), *_frames_of_traceback(error)]
        if frames:
            return _as_text(*frames[0])
        if isinstance(error, tf.errors.OpError):
            for function in functions:
                op = traced_ops.Ops(function).named_in(error.message)
                if op is not None and line_of(op):
                    return line_of(op)
        error = error.__cause__ or error.__context__
    return ""


def place_of_function(function: Callable) -> str:
    """Returns the first line of a function of the user's, as "file:line: text"; "" for any other function."""
    code = getattr(function, "__code__", None)
    return _as_text(code.co_filename, code.co_firstlineno) if code and is_users(code.co_filename) else ""


def _frames_in_message(error: BaseException) -> list[tuple[str, int, str | None]]:
    """Returns the user's frames that AutoGraph and `tf.numpy_function` write into a message, the innermost first."""
    return [(file, line, None) for file, line in reversed(traced_ops.frames_in(str(error))) if is_users(file)]


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

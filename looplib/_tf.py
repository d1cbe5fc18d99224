"""TensorFlow: its import, its start, and every use of what it has no public name for.

TensorFlow is imported without the garbage collector. An import makes hundreds of thousands of objects, and nearly all
of them stay; the collector would go through them again and again, for a fifth of the time that the import takes.

Some settings, such as the number of virtual devices, count only before the first tensor is made. So this notes which
line of the user's program started TensorFlow's devices.
"""

import gc
import logging as python_logging
import os
import sys
import traceback
import types
from typing import Any

_collects = gc.isenabled()
gc.disable()
try:
    import tensorflow as tf
finally:
    if _collects:
        gc.enable()

from absl import logging

from looplib import _keras, source_locations
from looplib.errors import UsageError, gist

_FOLDER = os.path.dirname(tf.__file__) + os.sep
_STRATEGIES = {
    "_DefaultDistributionStrategy": "DefaultStrategy",
    "CollectiveAllReduceStrategy": "MultiWorkerMirroredStrategy",
}
_UNREACHABLE = (tf.errors.UnavailableError, tf.errors.AbortedError)

_noted = ""


def watch() -> None:
    """Notes the line that starts TensorFlow's devices, which `place` returns; does nothing where that has no hook."""
    try:
        from tensorflow.python.eager import context as private  # TensorFlow has no public hook for it

        context = private.context()
        start = context.ensure_initialized
    except (ImportError, AttributeError):
        return

    def noting() -> None:
        global _noted
        context.__dict__.pop("ensure_initialized", None)
        _noted = _noted or source_locations.place_of_stack(traceback.extract_stack())
        start()

    if not started():
        context.ensure_initialized = noting


def started() -> bool:
    """Whether TensorFlow has started its devices."""
    threads = tf.config.threading.get_inter_op_parallelism_threads()
    try:
        tf.config.threading.set_inter_op_parallelism_threads(threads + 1)
    except RuntimeError:
        return True
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    return False


def place() -> str:
    """What of the user's program has started TensorFlow's devices, for the middle of a sentence."""
    if _noted:
        return _noted
    return "a tensor" + next((f", such as {name}" for name in map(_tensor_of, list(sys.modules.values())) if name), "")


def refusal(what: str) -> UsageError:
    """Returns the error for a setting that comes too late.

    Args:
      what: the setting, the subject of the sentence.
    """
    return UsageError(
        f"{what} has to be set before TensorFlow starts its devices, and they were started before by {place()}; make "
        "tensors, variables, models and optimizers in `build` (or call looplib.runtime.setup before any tensor is made)"
    )


def _tensor_of(module: types.ModuleType) -> str:
    """A tensor, variable, data set or Keras object among the globals of a module of the user's, by name; or ""."""
    file = getattr(module, "__file__", None)
    if not file or not source_locations.is_users(file):
        return ""
    kinds = (tf.Tensor, tf.Variable, tf.data.Dataset)
    found = (
        name
        for name, value in list(vars(module).items())
        if isinstance(value, kinds) or (not isinstance(value, type) and _keras.family(value))
    )
    return next((f"`{name}` of {os.path.basename(file)}" for name in found), "")


def lost_server(error: BaseException, of_any_process: bool = False) -> UsageError | None:
    """Returns the `UsageError` for a parameter server that could not be reached; None for any other error.

    Args:
      error: what TensorFlow raised.
      of_any_process: whether a process that cannot be reached is known to be a parameter server.
    """
    # TensorFlow's own ClusterCoordinator recognizes them by the same words.
    if not isinstance(error, _UNREACHABLE) or not (of_any_process or "/job:ps" in str(error)):
        return None
    return UsageError(
        f"a parameter server is gone, and the weights on it ({gist(error)}); start all processes again: the same "
        "command goes on from the newest checkpoint"
    )


def name_of(strategy: tf.distribute.Strategy) -> str:
    """Returns the public name of a strategy's class; TensorFlow 2.20 has other ones for two of them."""
    name = type(strategy).__name__.removesuffix("V2")
    return _STRATEGIES.get(name, name)


def log_warnings_only() -> None:
    """Leaves TensorFlow's own notes out of the log; its warnings and errors stay."""
    tf.get_logger().setLevel("WARNING")
    logging.get_absl_handler().addFilter(lambda record: not is_note(record))  # some modules log by absl


def log_errors_only() -> None:
    """Leaves TensorFlow's own warnings out of the log, too."""
    tf.get_logger().setLevel("ERROR")


def is_note(record: python_logging.LogRecord) -> bool:
    """Whether a log record is a note of TensorFlow's own, below a warning, by the file that logged it."""
    return record.levelno < python_logging.WARNING and record.pathname.startswith(_FOLDER)


watch()


# The keys of a checkpoint, as TensorFlow's guide to checkpoints shows them.
OBJECT_GRAPH_KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"
_VARIABLE, _PYTHON_STATE = "/.ATTRIBUTES/VARIABLE_VALUE", "/.ATTRIBUTES/py_state"


def variable_key(name: str) -> str:
    """Returns the key of a variable that a checkpoint holds under a name."""
    return name + _VARIABLE


def python_state_key(name: str) -> str:
    """Returns the key of a `tf.train.experimental.PythonState` that a checkpoint holds under a name."""
    return name + _PYTHON_STATE


def is_variable_key(key: str) -> bool:
    """Whether a key of a checkpoint is that of a variable."""
    return key.endswith(_VARIABLE)


def is_python_state_key(key: str) -> bool:
    """Whether a key of a checkpoint is that of a `tf.train.experimental.PythonState`."""
    return key.endswith(_PYTHON_STATE)


def name_of_variable(key: str) -> str:
    """Returns the name under which a checkpoint holds the variable of a key."""
    return key.removesuffix(_VARIABLE)


def object_graph(reader: Any) -> Any:
    """Returns the structure of the objects that a checkpoint was written from, a protocol buffer.

    Args:
      reader: from `tf.train.load_checkpoint`.

    Returns:
      A `TrackableObjectGraph` with `nodes`; None where this version of TensorFlow keeps it in another way.

    Raises:
      ValueError, tf.errors.OpError: if the checkpoint cannot be read, or has no such structure.
    """
    try:
        from tensorflow.core.protobuf import trackable_object_graph_pb2 as private  # it has no public name

        parse = private.TrackableObjectGraph.FromString
    except (ImportError, AttributeError):
        return None
    return parse(reader.get_tensor(OBJECT_GRAPH_KEY))

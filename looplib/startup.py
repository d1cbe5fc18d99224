"""TensorFlow's start: whether its devices have started, and which line of the user's program did that.

Some settings, such as the number of virtual devices, count only before the first tensor is made.
"""

import os
import sys
import traceback
import types

import tensorflow as tf

from looplib import keras_family, origins
from looplib.errors import UsageError

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
        _noted = _noted or origins.place_of_stack(traceback.extract_stack())
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
    if not file or not origins.is_users(file):
        return ""
    kinds = (tf.Tensor, tf.Variable, tf.data.Dataset)
    found = (
        name
        for name, value in list(vars(module).items())
        if isinstance(value, kinds) or (not isinstance(value, type) and keras_family.family(value))
    )
    return next((f"`{name}` of {os.path.basename(file)}" for name in found), "")


watch()

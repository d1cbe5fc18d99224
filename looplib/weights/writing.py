"""Writes the weights of a model as safetensors, under the names that rules and warm starts know them by."""

import json
import math
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.base.messages import join_names
from looplib.compat import keras as _keras
from looplib.errors import ExportError
from looplib.task.state import state_of
from looplib.weights.names import LiveVariables
from looplib.weights.safetensors import DTYPES, METADATA
from looplib.weights.targets import Targets

_ALIGNED = 8  # bytes


def named_weights(model: Any) -> dict[str, tf.Variable]:
    """Returns the weights of a model by name, such as `encoder/kernel`; no seeds, optimizers and metrics.

    Layers that Keras has named and numbered are counted from 0 on, as `python -m looplib weights` shows them.

    Args:
      model: a Keras model or `tf.Module`.

    Raises:
      ExportError: if several weights have one name.
    """
    live = LiveVariables(state_of(types.SimpleNamespace(model=model)))
    targets = Targets(live)
    weights = _keras.without_vocabularies(model.weights if _keras.is_model(model) else model.variables)
    named: dict[str, tf.Variable] = {}
    twice = []
    for variable in map(_keras.tf_variable, weights):
        name = targets.counted(live.leaf_of(variable))
        twice += [name] * (name in named)
        named[name] = variable
    if twice:
        raise ExportError(
            f"several weights have the name {join_names(sorted(set(twice)))}; give the layers or variables that hold "
            "them names of their own"
        )
    return named


def write_safetensors(path: str, tensors: Mapping[str, tf.Variable]) -> None:
    """Writes a file of safetensors, one tensor at a time in memory.

    Args:
      path: the new file.
      tensors: the variables by name.

    Raises:
      ExportError: for a type that the format does not have.
      OSError: if it cannot be written.
    """
    types = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": METADATA}
    at = 0
    for name, variable in tensors.items():
        dtype, shape = np.dtype(variable.dtype.as_numpy_dtype), variable.shape.as_list()
        if dtype not in types:
            raise ExportError(f"{name} is {dtype}; expected one of the types of safetensors: {', '.join(DTYPES)}")
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": types[dtype], "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for variable in tensors.values():
            value = np.ascontiguousarray(variable.numpy())
            file.write(value.reshape(-1).view(np.uint8).data)

"""Messages and programs of XLA, whose form TensorFlow does not promise, for `check tpu` and `check gpu`.

As in `looplib/compat/tensorflow.py`, each function returns None, False or nothing where another version has another,
and `tests/tf_test.py` tries each with the TensorFlow that is installed.
"""

import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf


def lacks_a_kernel(error: BaseException) -> bool:
    """Returns whether XLA refused a program for an op that it has no kernel for on the device."""
    return "unsupported operations" in str(error)


def needs_a_constant(error: BaseException) -> bool:
    """Returns whether XLA refused a program for a size that depends on values."""
    return bool(re.search(r"compile-time constant|static(ally)? (input )?shape|dynamic|bounded", str(error)))


def dynamic_sizes(hlo: str) -> Iterator[tuple[str, str]]:
    """Yields the (path of the op, type of the op) of each size in an HLO text that depends on values."""
    for line in hlo.splitlines():
        if re.search(r"= \S*<=\S* set-dimension-size\(", line):
            path, kind = (re.search(rf'{name}="([^"]*)"', line) for name in ("op_name", "op_type"))
            yield path[1] if path else "", kind[1] if kind else ""


def temporary_bytes(function: tf.types.experimental.PolymorphicFunction, spec: Any) -> int | None:
    """Returns the bytes that XLA, compiling for this machine, reserves for values inside of a function.

    Args:
      function: with `jit_compile`.
      spec: a structure of the `tf.TensorSpec`s of its argument.

    Returns:
      The bytes; None if it cannot be compiled, or TensorFlow cannot read XLA's plan of memory.
    """
    try:
        from tensorflow.compiler.xla.service import hlo_pb2

        argument = tf.nest.map_structure(lambda part: tf.zeros(part.shape, part.dtype), spec)
        serialized = function.experimental_get_compiler_ir(argument)(stage="optimized_hlo_proto_serialized")
        allocations = hlo_pb2.HloProto.FromString(serialized).buffer_assignment.buffer_allocations
        return sum(
            part.size
            for part in allocations
            if not part.is_thread_local
            and not part.is_entry_computation_parameter
            and not part.is_constant
            and not part.maybe_live_out
        )
    except Exception:  # XLA's errors have many types
        return None

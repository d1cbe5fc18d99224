"""Programs of XLA, from the public `tf.function.experimental_get_compiler_ir`, and its messages.

Their form may change: each function then returns None, False or nothing, which `tests/compat/tf_test.py` tells.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from google.protobuf.empty_pb2 import Empty
from google.protobuf.unknown_fields import UnknownFieldSet

# Fields of XLA's hlo.proto. Bytes are not temporary if of one thread, an argument, alive at the end, or constant.
_ASSIGNMENT, _ALLOCATION, _SIZE, _NOT_TEMPORARY = 3, 3, 2, (3, 5, 7, 12)


def needs_a_constant(error: BaseException) -> bool:
    """Returns whether XLA refused a program for a size that depends on values."""
    return bool(re.search(r"compile-time constant|static(ally)? (input )?shape|dynamic|bounded", str(error)))


def dynamic_sizes(hlo: str) -> Iterator[tuple[str, str]]:
    """Yields the (path of the op, type of the op) of each size in an HLO text that depends on values."""
    for line in re.findall(r".*= \S*<=\S* set-dimension-size\(.*", hlo):
        path, kind = (re.search(rf'{name}="([^"]*)"', line) for name in ("op_name", "op_type"))
        yield path[1] if path else "", kind[1] if kind else ""


def lower_alone(op: tf.Operation) -> str:
    """Lowers one op of a traced function, with those of its inputs that are constant, and returns its HLO text."""
    values = [tf.get_static_value(tensor) for tensor in op.inputs]
    graph = tf.compat.v1.GraphDef(node=[op.node_def])
    graph.node[0].input[:] = names = [f"input_{number}" for number in range(len(values))]

    def program(*arguments: tf.Tensor) -> list[tf.Tensor]:
        rest = iter(arguments)
        inputs = {f"{name}:0": next(rest) if value is None else value for name, value in zip(names, values)}
        return tf.graph_util.import_graph_def(graph, inputs, [f"{op.name}:{n}" for n in range(len(op.outputs))])

    specs = [tf.TensorSpec([n or 1 for n in x.shape], x.dtype) for x, value in zip(op.inputs, values) if value is None]
    return tf.function(program, jit_compile=True, autograph=False).experimental_get_compiler_ir(*specs)(stage="hlo")


def temporary_bytes(function: tf.types.experimental.PolymorphicFunction, specs: Sequence[tf.TensorSpec]) -> int | None:
    """Returns the bytes that XLA reserves on a CPU for values inside of a function of some tensors."""
    try:
        plan = function.experimental_get_compiler_ir(*specs)(stage="optimized_hlo_proto_serialized")
        fields = _fields(dict(_fields(plan))[_ASSIGNMENT])
        allocations = [dict(_fields(value)) for number, value in fields if number == _ALLOCATION]
        return sum(part.get(_SIZE, 0) for part in allocations if not any(map(part.get, _NOT_TEMPORARY)))
    except Exception:  # XLA's errors have many types
        return None


def _fields(message: bytes) -> list[tuple[int, Any]]:
    """Returns the (number, value) of each field of a protocol buffer."""
    return [(field.field_number, field.data) for field in UnknownFieldSet(Empty.FromString(message))]

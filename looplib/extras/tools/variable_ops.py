"""Ops on variables, and what takes the place of each in a function without variables; see `pure_function`."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from google.protobuf.message import Message

from looplib.errors import UsageError

Place = tuple[str, str]  # function name, op name


class NotAVariableError(UsageError):
    """An op uses a resource that is no variable, such as a lookup table.

    Attributes:
      place: where the op is.
      op: its type.
    """

    def __init__(self, place: Place, op: str) -> None:
        super().__init__(f"{op} uses a resource other than a variable")
        self.place, self.op = place, op


class Body:
    """A function under construction, with the tensor that holds each variable's value so far.

    Args:
      new: its `FunctionDef`.
      types: the types of the variables among its arguments, by the names of the arguments.

    Attributes:
      new: its `FunctionDef`.
      type: the types of its variables, by the names of the arguments.
      variable: from the name of a tensor that stands for a variable to the name of its argument.
      value: from the name of an argument to the tensor that holds the variable's value.
      moved: from the old names of tensors to the new ones, where these differ.
    """

    def __init__(self, new: Message, types: dict[str, int]) -> None:
        self.new = new
        self.type = types
        self.variable = {name: name for name in types}
        self.value = dict(self.variable)
        self.moved: dict[str, str] = {}

    def now(self, source: str) -> str:
        """Returns the new name of a tensor that is no variable."""
        return self.moved.get(source, source)

    def node(self, name: str, op: str, inputs: Sequence[str]) -> tf.compat.v1.NodeDef:
        """Adds an op."""
        node = self.new.node_def.add(name=name, op=op)
        node.input.extend(inputs)
        return node

    def typed(self, name: str, op: str, inputs: Sequence[str], dtype: int) -> tf.compat.v1.NodeDef:
        """Adds an op with a type T."""
        node = self.node(name, op, inputs)
        node.attr["T"].type = dtype
        return node

    def constant(self, name: str, value: Any, dtype: tf.DType, control: Sequence[str] = ()) -> str:
        """Adds a constant, and returns the name of its output."""
        node = self.node(name, "Const", control)
        node.attr["dtype"].type = dtype.as_datatype_enum
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, dtype))
        return f"{name}:output:0"


@dataclasses.dataclass(frozen=True)
class Use:
    """An op that has variables among its inputs.

    Attributes:
      place: where the op is.
      node: the original op.
      data: its inputs.
      control: its control inputs.
      where: the numbers of the inputs that are variables.
      argument: the first of these variables, by the name of the function's argument.
      value: the tensor that holds its value before the op.
      dtype: its type.
      rest: the new names of all inputs but the first.
    """

    place: Place
    node: tf.compat.v1.NodeDef
    data: list[str]
    control: list[str]
    where: list[int]
    argument: str
    value: str
    dtype: int
    rest: list[str]


# One function for each kind of op on a variable.


def _alias(body: Body, use: Use) -> None:
    body.variable[f"{use.node.name}:output:0"] = use.argument
    body.node(use.node.name, "NoOp", use.control)


def _read(body: Body, use: Use) -> None:
    body.typed(use.node.name, "Identity", [use.value, *use.control], use.dtype)
    body.moved[f"{use.node.name}:value:0"] = f"{use.node.name}:output:0"


def _assign(body: Body, use: Use) -> None:
    body.typed(use.node.name, "Identity", [*use.rest, *use.control], use.dtype)
    body.value[use.argument] = f"{use.node.name}:output:0"


def _combine(op: str, body: Body, use: Use) -> None:
    body.typed(use.node.name, op, [use.value, *use.rest, *use.control], use.dtype)
    body.value[use.argument] = f"{use.node.name}:z:0"


def _shape(body: Body, use: Use) -> None:
    copy = body.typed(use.node.name, "Shape", [use.value, *use.control], use.dtype)
    copy.attr["out_type"].CopyFrom(use.node.attr["out_type"])


def _is_initialized(body: Body, use: Use) -> None:
    body.moved[f"{use.node.name}:is_initialized:0"] = body.constant(use.node.name, True, tf.bool, use.control)


def _gather(body: Body, use: Use) -> None:
    axis = body.constant(f"{use.node.name}/axis", 0, tf.int32)
    copy = body.node(use.node.name, "GatherV2", [use.value, *use.rest, axis, *use.control])
    copy.attr["Tparams"].type, copy.attr["Taxis"].type = use.dtype, tf.int32.as_datatype_enum
    for attribute in ("Tindices", "batch_dims"):
        copy.attr[attribute].CopyFrom(use.node.attr[attribute])


def _scatter(op: str, body: Body, use: Use) -> None:
    name = use.node.name
    last = body.constant(f"{name}/axis", -1, tf.int32)
    indices = body.node(f"{name}/indices", "ExpandDims", [use.rest[0], last])
    indices.attr["T"].CopyFrom(use.node.attr["Tindices"])
    indices.attr["Tdim"].type = tf.int32.as_datatype_enum
    copy = body.typed(name, op, [use.value, f"{name}/indices:output:0", use.rest[1], *use.control], use.dtype)
    copy.attr["Tindices"].CopyFrom(use.node.attr["Tindices"])
    body.value[use.argument] = f"{name}:output:0"


def _update(body: Body, use: Use) -> None:
    """Replaces an optimizer's fused update by a subtraction of the gradient from each variable."""
    node, data = use.node, use.data
    parameters = list(inspect.signature(getattr(tf.raw_ops, node.op)).parameters)
    gradient = parameters.index("grad" if "grad" in parameters else "delta")
    others = [body.now(source) for number, source in enumerate(data) if number != gradient and number not in use.where]
    control = [*use.control, *(f"^{source.split(':')[0]}" for source in others if ":" in source)]
    ends = []
    for number in use.where:
        argument = body.variable[data[number]]
        part = f"{node.name}/{number}"
        body.typed(part, "Sub", [body.value[argument], body.now(data[gradient]), *control], body.type[argument])
        body.value[argument] = f"{part}:z:0"
        ends.append(f"^{part}")
    body.node(node.name, "NoOp", ends)


REWRITES: dict[str, Callable[[Body, Use], None]] = {
    "Identity": _alias,
    "ReadVariableOp": _read,
    "RngReadAndSkip": _read,
    "AssignVariableOp": _assign,
    "AssignAddVariableOp": functools.partial(_combine, "AddV2"),
    "AssignSubVariableOp": functools.partial(_combine, "Sub"),
    "VariableShape": _shape,
    "VarIsInitializedOp": _is_initialized,
    "ResourceGather": _gather,
    "ResourceScatterAdd": functools.partial(_scatter, "TensorScatterAdd"),
    "ResourceScatterSub": functools.partial(_scatter, "TensorScatterSub"),
    "ResourceScatterUpdate": functools.partial(_scatter, "TensorScatterUpdate"),
    "ResourceScatterMin": functools.partial(_scatter, "TensorScatterMin"),
    "ResourceScatterMax": functools.partial(_scatter, "TensorScatterMax"),
}


def rewrite(body: Body, use: Use) -> None:
    """Adds to a function what takes the place of an op on a variable.

    Raises:
      NotAVariableError: if it is an op on another resource.
    """
    add = _update if use.node.op.startswith("ResourceApply") else REWRITES.get(use.node.op)
    if add is None:
        raise NotAVariableError(use.place, use.node.op)
    add(body, use)

"""A traced function without variables: what it reads becomes an argument, what it writes becomes a result.

XLA lowers a function for a device that this machine does not have, but only one without variables. So the function's
definition is rewritten, with all the functions that it calls: each variable becomes a tensor, which is passed from op
to op in the order of their control edges. `variable_ops.REWRITES` has a row for each op that may use a variable.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import tensorflow as tf
from google.protobuf.message import Message

from looplib.extras.tools.variable_ops import Body, Place, Use, rewrite

_IFS = ("If", "StatelessIf")
_CASES = ("Case", "StatelessCase")
_WHILES = ("While", "StatelessWhile")
_CALLS = ("PartitionedCall", "StatefulPartitionedCall", *_IFS, *_CASES, *_WHILES)
_serial = itertools.count()


@dataclasses.dataclass(frozen=True)
class Output:
    """One output of an op, for zeros to take its place.

    Attributes:
      name: its name within the op, such as "output:0".
      shape: its shape; sizes that are not known are 1.
      dtype: its type.
    """

    name: str
    shape: tuple[int, ...]
    dtype: tf.DType


@dataclasses.dataclass(frozen=True)
class PureFunction:
    """A function without variables.

    Attributes:
      program: a `tf.function` with `jit_compile` and without captured resources.
      specs: of its arguments, all static if the inputs of the original function are.
      names: from the names of rewritten functions to their original ones.
    """

    program: tf.types.experimental.PolymorphicFunction
    specs: list[tf.TensorSpec]
    names: dict[str, str]


def make(
    concrete: tf.types.experimental.ConcreteFunction, replaced: Mapping[Place, Sequence[Output]] | None = None
) -> PureFunction:
    """Rewrites a traced function as one without variables.

    An optimizer's fused update (`ResourceApply*`) becomes a subtraction of its shape and type: all devices have the
    fused ops, and only whether the program can be compiled matters here, not its values.

    Args:
      concrete: the traced function.
      replaced: ops to leave out, by place, with the outputs that zeros take the place of; see `outputs_of`.

    Returns:
      The `PureFunction`.

    Raises:
      NotAVariableError: for an op on a resource that is no variable.
    """
    library = _Library(concrete.graph.as_graph_def().library.function, replaced or {})
    definition = concrete.function_def
    library.add(definition)
    variables = {id(variable.handle): variable for variable in concrete.variables}
    count = len(concrete.inputs) - len(concrete.captured_inputs)
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in concrete.inputs[:count]]
    types: dict[int, int] = {}
    for number, tensor in enumerate(concrete.captured_inputs, count):
        if id(tensor) in variables:
            variable = variables[id(tensor)]
            specs.append(tf.TensorSpec(variable.shape, variable.dtype))
            types[number] = variable.dtype.as_datatype_enum
        elif tensor.dtype in (tf.resource, tf.variant):  # an op that uses it raises NotAVariableError
            specs.append(tf.TensorSpec([], tf.float32))
            types[number] = tf.float32.as_datatype_enum
        else:
            specs.append(tf.TensorSpec(tensor.shape, tensor.dtype))
    name = library.rewritten(definition.signature.name, types, "call")
    graph = tf.compat.v1.GraphDef()
    graph.library.function.extend(library.functions.values())
    # Wrapping a function registers its library with the runtime.
    tf.compat.v1.wrap_function(lambda: tf.graph_util.import_graph_def(graph, name=""), [])
    outputs = [output.type for output in library.functions[name].signature.output_arg]

    def program(*arguments: tf.Tensor) -> list[tf.Tensor]:
        return tf.raw_ops.StatefulPartitionedCall(args=arguments, Tout=outputs, f=name, name="step")

    compiled = tf.function(program, jit_compile=True, autograph=False, input_signature=specs)
    return PureFunction(compiled, specs, library.names)


class _Library:
    """The definitions of functions, original and rewritten.

    Attributes:
      functions: `FunctionDef`s by name.
      names: from the name of a rewritten function to that of the original one.
    """

    def __init__(self, functions: Iterable[Message], replaced: Mapping[Place, Sequence[Output]]) -> None:
        self.functions = {function.signature.name: function for function in functions}
        self.names: dict[str, str] = {}
        self._replaced = replaced
        self._done: dict[tuple, str] = {}

    def add(self, function: Message) -> None:
        self.functions.setdefault(function.signature.name, function)

    def rewritten(self, name: str, types: dict[int, int], style: str) -> str:
        """Rewrites one function for its callers of one kind.

        Args:
          name: of the original function.
          types: from the number of each argument that is a variable to the variable's type.
          style: "call" appends the variables' last values to the outputs, "body" (of a while loop) puts them where the
            variables are among the outputs, "condition" returns none.

        Returns:
          The name of the rewritten function.
        """
        key = (name, tuple(types.items()), style)
        if key not in self._done:
            self._done[key] = new_name = f"{name}__pure_{next(_serial)}"
            self.names[new_name] = name
            body = _Body(self, self.functions[name], types, style, self._replaced)
            self.functions[new_name] = body.build(new_name)
        return self._done[key]


class _Body(Body):
    """One function while it is rewritten."""

    def __init__(
        self,
        library: _Library,
        old: Message,
        types: dict[int, int],
        style: str,
        replaced: Mapping[Place, Sequence[Output]],
    ) -> None:
        self._library = library
        self._old = old
        self._types = types
        self._style = style
        self._replaced = replaced
        new = type(old)()
        new.CopyFrom(old)
        del new.node_def[:]
        super().__init__(new, {old.signature.input_arg[number].name: dtype for number, dtype in types.items()})

    def build(self, name: str) -> Message:
        self.new.signature.name = name
        self.new.signature.is_stateful = True
        self.new.attr.pop("_input_shapes", None)
        for number, dtype in self._types.items():
            argument = self.new.signature.input_arg[number]
            argument.type = dtype
            argument.ClearField("handle_data")
            if number in self.new.arg_attr:
                self.new.arg_attr[number].attr.pop("_output_shapes", None)
        for node in _in_order(self._old.node_def):
            self._add(node)
        self._add_outputs()
        return self.new

    def _add_outputs(self) -> None:
        for key, source in self._old.ret.items():
            if source not in self.variable:
                self.new.ret[key] = self.now(source)
        if self._style == "condition":
            return
        for output in self.new.signature.output_arg:
            source = self._old.ret[output.name]
            if source in self.variable:  # the body of a while loop returns its variables
                argument = self.variable[source]
                output.type = self.type[argument]
                output.ClearField("handle_data")
                self.new.ret[output.name] = self.value[argument]
        if self._style == "call":
            for number, argument in enumerate(self.type):
                output = self.new.signature.output_arg.add(name=f"variable_{number}", type=self.type[argument])
                self.new.ret[output.name] = self.value[argument]

    def _add(self, node: tf.compat.v1.NodeDef) -> None:
        data = [source for source in node.input if not source.startswith("^")]
        control = [source for source in node.input if source.startswith("^")]
        where = [number for number, source in enumerate(data) if source in self.variable]
        place = (self._old.signature.name, node.name)
        if place in self._replaced:
            self._add_zeros(node, control, self._replaced[place])
        elif node.op in _CALLS:
            self._add_call(node, data, control, where)
        elif where:
            argument = self.variable[data[where[0]]]
            rest = [self.now(source) for source in data[1:]]
            use = Use(place, node, data, control, where, argument, self.value[argument], self.type[argument], rest)
            rewrite(self, use)
        else:
            copy = self.node(node.name, node.op, [self.now(source) for source in data] + control)
            for name, value in node.attr.items():
                copy.attr[name].CopyFrom(value)
            copy.attr.pop("_class", None)

    def _add_call(self, node: tf.compat.v1.NodeDef, data: list[str], control: list[str], where: list[int]) -> None:
        """Adds a call, condition or loop whose functions are rewritten too, and return the variables' values."""
        first = 1 if node.op in _IFS + _CASES else 0  # the number of the first argument
        arguments = {number - first: self.variable[data[number]] for number in where}
        types = {number: self.type[argument] for number, argument in arguments.items()}
        inputs = [self.value[self.variable[source]] if source in self.variable else self.now(source) for source in data]
        copy = self.node(node.name, node.op, [*inputs, *control])
        for name, value in node.attr.items():
            copy.attr[name].CopyFrom(value)
        loop = node.op in _WHILES
        for name in ("f", "then_branch", "else_branch", "cond", "body"):
            if name in copy.attr and copy.attr[name].HasField("func"):
                style = {"cond": "condition", "body": "body"}.get(name, "call") if loop else "call"
                copy.attr[name].func.name = self._library.rewritten(copy.attr[name].func.name, types, style)
        for branch in copy.attr["branches"].list.func if "branches" in copy.attr else ():
            branch.name = self._library.rewritten(branch.name, types, "call")
        taken = copy.attr["T" if loop else "Tin"].list
        for number, dtype in types.items():
            taken.type[number] = dtype
        copy.attr.pop("_output_shapes", None)
        if loop:
            self._return_from_loop(copy, arguments)
            return
        copy.attr.pop("output_shapes", None)
        before = len(node.attr["Tout"].list.type)
        for number, (argument, dtype) in enumerate(zip(arguments.values(), types.values())):
            copy.attr["Tout"].list.type.append(dtype)
            self.value[argument] = f"{node.name}:output:{before + number}"

    def _return_from_loop(self, copy: tf.compat.v1.NodeDef, arguments: dict[int, str]) -> None:
        shapes = copy.attr["output_shapes"].list.shape
        for number, argument in arguments.items():
            if shapes:
                shapes[number].Clear()
                shapes[number].unknown_rank = True
            self.value[argument] = f"{copy.name}:output:{number}"
            self.variable[f"{copy.name}:output:{number}"] = argument

    def _add_zeros(self, node: tf.compat.v1.NodeDef, control: list[str], outputs: Sequence[Output]) -> None:
        self.node(node.name, "NoOp", control)
        for number, output in enumerate(outputs):
            if output.dtype not in (tf.string, tf.variant, tf.resource):  # ops on these are left out too
                zeros = np.zeros(output.shape, output.dtype.as_numpy_dtype)
                self.moved[f"{node.name}:{output.name}"] = self.constant(
                    f"{node.name}/zeros_{number}", zeros, output.dtype
                )


def outputs_of(op: tf.Operation) -> list[Output]:
    """Returns the outputs of an op, for `make` to replace it by zeros."""
    names = []
    for output in op.op_def.output_arg:
        count = op.get_attr(output.number_attr) if output.number_attr else 1
        count = len(op.get_attr(output.type_list_attr)) if output.type_list_attr else count
        names += [f"{output.name}:{number}" for number in range(count)]
    shapes = [tensor.shape.as_list() if tensor.shape.rank is not None else [] for tensor in op.outputs]
    return [
        Output(name, tuple(1 if size is None else size for size in shape), tensor.dtype)
        for name, shape, tensor in zip(names, shapes, op.outputs)
    ]


def _in_order(nodes: Iterable[tf.compat.v1.NodeDef]) -> list[tf.compat.v1.NodeDef]:
    """Sorts nodes so that each comes after those that it depends on, keeping their order otherwise."""
    by_name = {node.name: node for node in nodes}
    waiting: dict[str, int] = {}
    needed_by: dict[str, list[str]] = {}
    ready: list[str] = []
    ordered = []
    for node in by_name.values():
        sources = {source.lstrip("^").split(":")[0] for source in node.input}
        sources = {source for source in sources if source in by_name}
        waiting[node.name] = len(sources)
        for source in sources:
            needed_by.setdefault(source, []).append(node.name)
        if not sources:
            ready.append(node.name)
    for name in ready:  # grows while it is read
        ordered.append(by_name[name])
        for after in needed_by.get(name, ()):
            waiting[after] -= 1
            if not waiting[after]:
                ready.append(after)
    return ordered

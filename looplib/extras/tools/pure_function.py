"""A traced function made free of variables: what it reads becomes an argument, what it writes a result.

XLA lowers a function for a device that this machine does not have, but takes no variables with it. So the function's
definition is rewritten, with all the functions that it calls: each variable becomes a tensor, which is handed on from
op to op in the order of their control edges.
"""

import inspect
import itertools

import numpy as np
import tensorflow as tf

from looplib.errors import UsageError

_CALLS = {"PartitionedCall": "f", "StatefulPartitionedCall": "f"}
_IFS = ("If", "StatelessIf")
_CASES = ("Case", "StatelessCase")
_WHILES = ("While", "StatelessWhile")
_SCATTERS = {f"ResourceScatter{kind}": f"TensorScatter{kind}" for kind in ("Add", "Sub", "Update", "Min", "Max")}
_serial = itertools.count()


class CannotLift(UsageError):
    """An op uses a resource that is no variable, such as a lookup table.

    Attributes:
      node: the op's name in the function.
      op: its type.
      function: the name of the function that it is in.
    """

    def __init__(self, function, node):
        super().__init__(f"{node.op} uses a resource other than a variable")
        self.function, self.node, self.op = function, node.name, node.op


def lift(concrete, replaced=None):
    """Makes a function free of variables.

    An optimizer's fused update (`ResourceApply*`) is lifted as a subtraction of the same shape and type: all devices
    have these ops, and it is not the values that matter.

    Args:
      concrete: a `tf.types.experimental.ConcreteFunction`.
      replaced: dict from (function name, op name) to `outputs_of` an op to be left out: zeros take its place.

    Returns:
      `(program, specs, names)`: a `tf.function` with `jit_compile` and without captured resources; the `tf.TensorSpec`s
      of its arguments, all static if the inputs of `concrete` are; and a dict from the names of lifted functions to
      their old ones.

    Raises:
      CannotLift: for an op on a resource that is no variable.
    """
    lifter = _Lifter(concrete.graph.as_graph_def().library.function, replaced or {})
    definition = concrete.function_def
    lifter.add(definition)
    variables = {id(variable.handle): variable for variable in concrete.variables}
    count = len(concrete.inputs) - len(concrete.captured_inputs)
    specs, types = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in concrete.inputs[:count]], {}
    for number, tensor in enumerate(concrete.captured_inputs, count):
        if id(tensor) in variables:
            variable = variables[id(tensor)]
            specs.append(tf.TensorSpec(variable.shape, variable.dtype))
            types[number] = variable.dtype.as_datatype_enum
        elif tensor.dtype in (tf.resource, tf.variant):  # whatever uses it cannot be lifted
            specs.append(tf.TensorSpec([], tf.float32))
            types[number] = tf.float32.as_datatype_enum
        else:
            specs.append(tf.TensorSpec(tensor.shape, tensor.dtype))
    name = lifter.lift(definition.signature.name, types, "call")
    library = tf.compat.v1.GraphDef()
    library.library.function.extend(lifter.functions.values())
    # Wrapping a function is what makes the runtime know a library.
    tf.compat.v1.wrap_function(lambda: tf.graph_util.import_graph_def(library, name=""), [])
    types = [output.type for output in lifter.functions[name].signature.output_arg]

    def program(*arguments):
        return tf.raw_ops.StatefulPartitionedCall(args=arguments, Tout=types, f=name, name="step")

    return tf.function(program, jit_compile=True, autograph=False, input_signature=specs), specs, lifter.names


class _Lifter:
    """Rewrites functions.

    Attributes:
      functions: dict from name to `FunctionDef`, of old and lifted functions.
      names: dict from the name of a lifted function to that of the old one.
    """

    def __init__(self, library, replaced):
        self.functions = {function.signature.name: function for function in library}
        self.names = {}
        self._replaced = replaced
        self._done = {}

    def add(self, function):
        self.functions.setdefault(function.signature.name, function)

    def lift(self, name, types, style):
        """Lifts one function for its callers of one kind.

        Args:
          name: of the old function.
          types: dict from the number of each argument that is a variable to the variable's type.
          style: "call" appends the variables' last values to the outputs, "body" (of a while loop) puts them where the
            variables are among the outputs, "condition" returns none.

        Returns:
          The name of the lifted function.
        """
        key = (name, tuple(types.items()), style)
        if key not in self._done:
            self._done[key] = new_name = f"{name}__lifted_{next(_serial)}"
            self.names[new_name] = name
            self.functions[new_name] = _Body(self, self.functions[name], types, style, self._replaced).build(new_name)
        return self._done[key]


class _Body:
    """One function while it is rewritten: what each variable's value is so far."""

    def __init__(self, lifter, old, types, style, replaced):
        self._lifter = lifter
        self._old = old
        self._types = types
        self._style = style
        self._replaced = replaced
        names = [argument.name for argument in old.signature.input_arg]
        self._variable = {names[number]: names[number] for number in types}  # of an input string: its argument
        self._type = {names[number]: dtype for number, dtype in types.items()}
        self._value = {names[number]: names[number] for number in types}
        self._moved = {}  # outputs that have another name now

    def build(self, name):
        self._new = type(self._old)()
        self._new.CopyFrom(self._old)
        del self._new.node_def[:]
        self._new.signature.name = name
        self._new.signature.is_stateful = True
        self._new.attr.pop("_input_shapes", None)
        for number, dtype in self._types.items():
            argument = self._new.signature.input_arg[number]
            argument.type = dtype
            argument.ClearField("handle_data")
            if number in self._new.arg_attr:
                self._new.arg_attr[number].attr.pop("_output_shapes", None)
        for node in _in_order(self._old.node_def):
            self._add(node)
        self._add_outputs()
        return self._new

    def _add_outputs(self):
        for key, source in self._old.ret.items():
            if source not in self._variable:
                self._new.ret[key] = self._now(source)
        if self._style == "condition":
            return
        returned = {}
        for output in self._new.signature.output_arg:
            source = self._old.ret[output.name]
            if source in self._variable:  # a while loop's body hands its variables on
                argument = self._variable[source]
                output.type = self._type[argument]
                output.ClearField("handle_data")
                self._new.ret[output.name] = self._value[argument]
                returned[argument] = True
        if self._style == "call":
            for number, argument in enumerate(self._type):
                output = self._new.signature.output_arg.add(name=f"lifted_{number}", type=self._type[argument])
                self._new.ret[output.name] = self._value[argument]

    def _now(self, source):
        return self._moved.get(source, source)

    def _add(self, node):
        data = [source for source in node.input if not source.startswith("^")]
        control = [source for source in node.input if source.startswith("^")]
        key = (self._old.signature.name, node.name)
        if key in self._replaced:
            self._add_zeros(node, control, self._replaced[key])
            return
        where = [number for number, source in enumerate(data) if source in self._variable]
        if not where:
            if node.op in _WHILES + _IFS + _CASES or node.op in _CALLS:
                self._add_call(node, data, control, where)
                return
            copy = self._node(node.name, node.op, [self._now(source) for source in data] + control)
            for name, value in node.attr.items():
                copy.attr[name].CopyFrom(value)
            copy.attr.pop("_class", None)
            return
        argument = self._variable[data[where[0]]]
        value, dtype = self._value[argument], self._type[argument]
        rest = [self._now(source) for source in data[1:]]
        name = node.name
        if node.op in _WHILES + _IFS + _CASES or node.op in _CALLS:
            self._add_call(node, data, control, where)
        elif node.op == "Identity":
            self._variable[f"{name}:output:0"] = argument
            self._node(name, "NoOp", control)
        elif node.op == "ReadVariableOp":
            self._typed(name, "Identity", [value, *control], dtype)
            self._moved[f"{name}:value:0"] = f"{name}:output:0"
        elif node.op == "AssignVariableOp":
            self._typed(name, "Identity", [*rest, *control], dtype)
            self._value[argument] = f"{name}:output:0"
        elif node.op in ("AssignAddVariableOp", "AssignSubVariableOp"):
            self._typed(name, "AddV2" if "Add" in node.op else "Sub", [value, *rest, *control], dtype)
            self._value[argument] = f"{name}:z:0"
        elif node.op == "VariableShape":
            copy = self._typed(name, "Shape", [value, *control], dtype)
            copy.attr["out_type"].CopyFrom(node.attr["out_type"])
        elif node.op == "VarIsInitializedOp":
            self._constant(name, True, tf.bool, control)
            self._moved[f"{name}:is_initialized:0"] = f"{name}:output:0"
        elif node.op == "ResourceGather":
            axis = self._constant(f"{name}/axis", 0, tf.int32)
            copy = self._node(name, "GatherV2", [value, *rest, axis, *control])
            copy.attr["Tparams"].type, copy.attr["Taxis"].type = dtype, tf.int32.as_datatype_enum
            for attribute in ("Tindices", "batch_dims"):
                copy.attr[attribute].CopyFrom(node.attr[attribute])
        elif node.op in _SCATTERS:
            last = self._constant(f"{name}/axis", -1, tf.int32)
            indices = self._node(f"{name}/indices", "ExpandDims", [rest[0], last])
            indices.attr["T"].CopyFrom(node.attr["Tindices"])
            indices.attr["Tdim"].type = tf.int32.as_datatype_enum
            inputs = [value, f"{name}/indices:output:0", rest[1], *control]
            copy = self._node(name, _SCATTERS[node.op], inputs)
            copy.attr["T"].type = dtype
            copy.attr["Tindices"].CopyFrom(node.attr["Tindices"])
            self._value[argument] = f"{name}:output:0"
        elif node.op == "RngReadAndSkip":
            self._typed(name, "Identity", [value, *control], dtype)
            self._moved[f"{name}:value:0"] = f"{name}:output:0"
        elif node.op.startswith("ResourceApply"):
            self._add_update(node, data, control, where)
        else:
            raise CannotLift(self._old.signature.name, node)

    def _add_update(self, node, data, control, where):
        parameters = list(inspect.signature(getattr(tf.raw_ops, node.op)).parameters)
        gradient = parameters.index("grad" if "grad" in parameters else "delta")
        others = [self._now(source) for number, source in enumerate(data) if number != gradient and number not in where]
        control = [*control, *(f"^{source.split(':')[0]}" for source in others if ":" in source)]
        ends = []
        for number in where:
            argument = self._variable[data[number]]
            part = f"{node.name}/{number}"
            inputs = [self._value[argument], self._now(data[gradient]), *control]
            self._typed(part, "Sub", inputs, self._type[argument])
            self._value[argument] = f"{part}:z:0"
            ends.append(f"^{part}")
        self._node(node.name, "NoOp", ends)

    def _add_call(self, node, data, control, where):
        """A call, condition or loop: the function is lifted too, and gives the variables' values after it."""
        first = 1 if node.op in _IFS + _CASES else 0  # what comes before the arguments
        arguments = {number - first: self._variable[data[number]] for number in where}
        types = {number: self._type[argument] for number, argument in arguments.items()}
        inputs = [self._value[self._variable[source]] if source in self._variable else self._now(source)
                  for source in data]  # fmt: skip
        copy = self._node(node.name, node.op, [*inputs, *control])
        for name, value in node.attr.items():
            copy.attr[name].CopyFrom(value)
        loop = node.op in _WHILES
        for name in ("f", "then_branch", "else_branch", "cond", "body"):
            if name in copy.attr and copy.attr[name].HasField("func"):
                style = {"cond": "condition", "body": "body"}.get(name, "call") if loop else "call"
                copy.attr[name].func.name = self._lifter.lift(copy.attr[name].func.name, types, style)
        for branch in copy.attr["branches"].list.func if "branches" in copy.attr else ():
            branch.name = self._lifter.lift(branch.name, types, "call")
        taken = copy.attr["T" if loop else "Tin"].list
        for number, dtype in types.items():
            taken.type[number] = dtype
        copy.attr.pop("_output_shapes", None)
        if loop:
            shapes = copy.attr["output_shapes"].list.shape
            for number, argument in arguments.items():
                if shapes:
                    shapes[number].Clear()
                    shapes[number].unknown_rank = True
                self._value[argument] = f"{node.name}:output:{number}"
                self._variable[f"{node.name}:output:{number}"] = argument
            return
        copy.attr.pop("output_shapes", None)
        before = len(node.attr["Tout"].list.type)
        for number, (argument, dtype) in enumerate(zip(arguments.values(), types.values())):
            copy.attr["Tout"].list.type.append(dtype)
            self._value[argument] = f"{node.name}:output:{before + number}"

    def _add_zeros(self, node, control, outputs):
        self._node(node.name, "NoOp", control)
        for number, (output, shape, dtype) in enumerate(outputs):
            if dtype not in (tf.string, tf.variant, tf.resource):  # what takes these is left out too
                zeros = self._constant(f"{node.name}/zeros_{number}", np.zeros(shape, dtype.as_numpy_dtype), dtype)
                self._moved[f"{node.name}:{output}"] = zeros

    def _node(self, name, op, inputs):
        node = self._new.node_def.add(name=name, op=op)
        node.input.extend(inputs)
        return node

    def _typed(self, name, op, inputs, dtype):
        node = self._node(name, op, inputs)
        node.attr["T"].type = dtype
        return node

    def _constant(self, name, value, dtype, control=()):
        node = self._node(name, "Const", control)
        node.attr["dtype"].type = dtype.as_datatype_enum
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, dtype))
        return f"{name}:output:0"


def outputs_of(op):
    """What takes an op's place among `lift`'s `replaced`: a list of (output, shape, dtype); sizes not known are 1."""
    names = []
    for output in op.op_def.output_arg:
        count = op.get_attr(output.number_attr) if output.number_attr else 1
        count = len(op.get_attr(output.type_list_attr)) if output.type_list_attr else count
        names += [f"{output.name}:{number}" for number in range(count)]
    sizes = [[1 if size is None else size for size in (tensor.shape.as_list() if tensor.shape.rank is not None else [])]
             for tensor in op.outputs]  # fmt: skip
    return [(name, size, tensor.dtype) for name, size, tensor in zip(names, sizes, op.outputs)]


def _in_order(nodes):
    """Sorts nodes so that each comes after those that it depends on, the first ones first."""
    by_name = {node.name: node for node in nodes}
    waiting, needed_by, ready, ordered = {}, {}, [], []
    for node in nodes:
        sources = {source.lstrip("^").split(":")[0] for source in node.input}
        sources = {source for source in sources if source in by_name}
        waiting[node.name] = len(sources)
        for source in sources:
            needed_by.setdefault(source, []).append(node.name)
        if not sources:
            ready.append(node.name)
    for name in ready:  # grows as it goes
        ordered.append(by_name[name])
        for after in needed_by.get(name, ()):
            waiting[after] -= 1
            if not waiting[after]:
                ready.append(after)
    return ordered

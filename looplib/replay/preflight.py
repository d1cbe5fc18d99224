"""A preflight: would the steps of a trainer and its evaluators run on a TPU or GPU that this machine does not have?

`python -m looplib check tpu -- COMMAND` starts a binary with an order. The binary builds its trainer, evaluators and
controller as always, on this machine's CPU, and passes their steps to `answer`, which has XLA lower them for the CPU.
In TensorFlow 2.20 it has kernels of the same 489 ops for a CPU and a GPU, which a TPU has too, with equal types except
for complex128 on a TPU and convolutions of int32 on a GPU.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from google.protobuf.empty_pb2 import Empty
from google.protobuf.unknown_fields import UnknownFieldSet

from looplib.base import orders
from looplib.base.messages import gist
from looplib.compat import keras as _keras
from looplib.compat import places
from looplib.compat import tensorflow as _tf
from looplib.errors import CheckError
from looplib.task.state import state_of, variables_of

if TYPE_CHECKING:
    from looplib.controller import Controller
    from looplib.loop.task_loop import TaskLoop


# Fields of XLA's hlo.proto. Bytes are not temporary if of one thread, an argument, alive at the end, or constant.
_ASSIGNMENT, _ALLOCATION, _SIZE, _NOT_TEMPORARY = 3, 3, 2, (3, 5, 7, 12)
_SLOW = {
    ("TPU", "float64"): "a TPU emulates it, at a tenth of the speed or less; use float32",
    ("TPU", "complex128"): "a TPU has no kernels for it; use complex64",
    ("TPU", "float16"): "a TPU has no units for it; use bfloat16 (--mixed_precision=mixed_bfloat16)",
    ("GPU", "float64"): "most GPUs compute it at a 32nd of the speed of float32; use float32",
    ("GPU", "complex128"): "most GPUs compute it at a 32nd of the speed of complex64; use complex64",
}
_PRODUCTS = ("MatMul", "BatchMatMulV2", "BatchMatMulV3", "Conv2D", "Conv3D", "Einsum")
_ON_VARIABLES = ("Assign", "Read", "Resource", "Rng", "Stack", "Stateful", "TensorArray", "Var")  # begin so
_ON_THE_HOST = (tf.string, tf.resource, tf.variant)


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


@dataclasses.dataclass(frozen=True)
class Finding:
    """One fault, or one piece of advice."""

    split: str  # "train" or the evaluator's name
    kind: str  # "unsupported op", "dynamic shape", "batch size" or "slow dtype"
    text: str  # the fault and what to do, without a full stop
    line: str = ""  # the user's source line as "file:line: text"
    fault: bool = True  # it must be fixed; if not, it is advice


@dataclasses.dataclass(frozen=True)
class FoundStep:
    """What was found in the step of one task.

    Attributes:
      batch: its examples on each core.
      global_batch: its examples on all.
      lowered: whether all of it was lowered.
      memory: bytes by what they hold; None where they are not known.
    """

    batch: int
    global_batch: int
    lowered: bool
    memory: dict[str, int | None]


@dataclasses.dataclass(frozen=True)
class Found:
    """What a preflight finds.

    Attributes:
      findings: faults and advice.
      steps: of each task, by "train" or the evaluator's name.
    """

    findings: list[Finding]
    steps: dict[str, FoundStep]


def settings() -> dict[str, Any]:
    """Returns the flags that a preflight sets, so that all is built on one CPU; {} if none is ordered."""
    if orders.current().preflight is None:
        return {}
    return dict(strategy="auto", tpu=None, num_virtual_devices=1, loop="graph")


def answer(order: orders.PreflightOrder, controller: "Controller") -> None:
    """Checks a controller's steps for the device that is ordered, and answers with what was found."""
    orders.answer(_found(controller, order.platform, order.cores))


def look(controller: "Controller", platform: str = "TPU", cores: int = 8) -> dict[str, Any]:
    """Lowers a controller's steps, and finds what cannot run on a device, or not well.

    Args:
      controller: a controller on one replica, on a CPU.
      platform: "TPU" or "GPU".
      cores: how many the global batch is divided over.

    Returns:
      A dict for JSON: `findings`, a list of `Finding`s as dicts, and `steps`, a dict from split to `batch`,
      `global_batch`, `lowered` (whether all of the step was) and bytes of `memory`, a dict.

    Raises:
      UsageError: if this TensorFlow does not compile for a CPU, as that of the package `tensorflow-tpu` does not.
    """
    return dataclasses.asdict(_found(controller, platform, cores))


def _found(controller: "Controller", platform: str, cores: int) -> Found:
    try:
        tf.function(lambda: tf.ones([]), jit_compile=True).experimental_get_compiler_ir()(stage="hlo")
    except Exception as error:  # XLA's errors have many types
        raise CheckError(f"check in an environment whose TensorFlow compiles for a CPU: {gist(error)}") from error
    found = Found([], {})
    for split, loop in controller.loops.items():
        look = _Look(split, loop, platform, cores)
        found.steps[split] = look.report()
        found.findings.extend(look.findings)
    return found


class _Look:
    """The check of one task's step."""

    def __init__(self, split: str, loop: "TaskLoop", platform: str, cores: int) -> None:
        self._split, self._task, self._stream, self._platform = split, loop.task, loop.step.stream, platform
        self._size, self._cores = self._stream.properties.batch_size, cores
        self._batch = -(-self._size // cores)
        self.findings: dict[Finding, None] = {}  # in order
        # A function with jit_compile that another one calls is traced for XLA: loops then have known lengths.
        compiled = tf.function(loop.step.replica_step, jit_compile=True)
        pack, spec = tf.nest.pack_sequence_as, self._stream.element_spec
        self._function = tf.function(lambda *parts: compiled(pack(spec, parts)), jit_compile=True, autograph=False)

    def report(self) -> FoundStep:
        self._look_at_the_batch()
        self._specs, lowered, traced = self._static_specs(), False, None
        if self._specs is not None:
            traced = self._function.get_concrete_function(*self._specs)
            self._ops = places.Ops(traced)
            lowered = self._lower()
            self._look_at_dtypes()
        return FoundStep(self._batch, self._size, lowered, self._memory(traced))

    def _find(self, kind: str, text: str, op: tf.Operation | None = None, fault: bool = True) -> None:
        self.findings[Finding(self._split, kind, text, places.line_of(op) if op else "", fault)] = None

    def _look_at_the_batch(self) -> None:
        size, batch, cores, tpu = self._size, self._batch, self._cores, self._platform == "TPU"
        text, unit, fill = f"{batch} examples a {'core' if tpu else 'GPU'}", 8 * cores, 128 if tpu else 8
        use = " or ".join(str(n) for n in (size // unit * unit, (size // unit + 1) * unit) if n)
        if size % cores:
            self._find("batch size", f"a global batch of {size} does not divide over {cores} cores; use {use}")
        elif batch % 8 and tpu:
            text += f", which a TPU pads to {-(-batch // 8) * 8}; use a multiple of 8, best of 128"
            self._find("batch size", f"{text}, such as a global batch of {use}")
        elif batch % fill:
            text += f"; a multiple of {fill} fills its matrix unit, if the training allows it"
            self._find("batch size", text, fault=False)

    def _static_specs(self) -> list[tf.TensorSpec] | None:
        """Returns the specs of a core's batch, all static; None if it holds a type that no device takes."""
        who = f"{type(self._task).__name__}.dataset"
        known, example = [], None
        for number, spec in enumerate(tf.nest.flatten(self._stream.element_spec)):
            if not isinstance(spec, tf.TensorSpec):
                text = f"{who} has a {type(spec).__name__.removesuffix('Spec')}, which XLA does not take"
                return self._find("dynamic shape", f"{text}; make it dense, of a fixed size")
            if spec.dtype == tf.string:
                self._find("unsupported op", f"{who} has a string tensor; map it to numbers there, on the host")
            shape = spec.shape.as_list() if spec.shape.rank is not None else [None, None]
            unknown = None in shape[1:]
            if unknown or (shape and shape[0] is None and self._split == "train"):
                text = f"{who} has batches of shape {spec.shape}; a {self._platform} compiles again for each, so fix it"
                cure = "batch(..., drop_remainder=True), padded_batch to one size, or tf.ensure_shape"
                self._find("dynamic shape", f"{text}: {cure}", fault=unknown or self._platform == "TPU")
            if unknown:
                example = example or tf.nest.flatten(next(iter(self._stream.dataset)))
                shape = example[number].shape.as_list()
            if shape and shape[0] in (None, self._size):
                shape[0] = self._batch
            known.append(tf.TensorSpec(shape, spec.dtype))
        return known

    def _lower(self) -> bool:
        """Lowers the step, or each op alone where XLA refuses it, and returns whether all of it was lowered."""
        try:
            self._look_at_sizes(self._function.experimental_get_compiler_ir(*self._specs)(stage="hlo"))
            return True
        except Exception as error:  # XLA's errors have many types
            refused, lacking, op = error, _tf.lacking_in_xla(error), self._ops.named_in(str(error))
        missing = [op for op in self._ops if self._is_missing(op, lacking)]
        for each in missing:
            self._tell_missing(each)
        text = gist(refused).removeprefix("Failed getting HLO text: ").strip("'.")
        if not lacking and needs_a_constant(refused):
            self._find("dynamic shape", f"{text}; XLA needs sizes that do not depend on values", op)
        elif not missing and all(spec.dtype != tf.string for spec in self._specs):
            self._find("unsupported op", text, op)
        return False

    def _is_missing(self, op: tf.Operation, lacking: list[str]) -> bool:
        """Returns whether XLA has no kernel for an op; finds sizes that depend on values, if it has one."""
        types = {tensor.dtype for tensor in (*op.inputs, *op.outputs)}
        if op.type in ("Const", "Placeholder", "Assert") or any(places.called(op)):
            return False  # XLA leaves out assertions and their messages
        if op.type in lacking or tf.string in types:
            return True
        if not types.isdisjoint(_ON_THE_HOST):  # alone, it would end the process
            return tf.resource in types and not op.type.startswith(_ON_VARIABLES)
        try:
            self._look_at_sizes(lower_alone(op), op)
        except Exception as error:  # XLA's errors have many types, and not every op can be lowered alone
            return op.type in _tf.lacking_in_xla(error)
        return False

    def _tell_missing(self, op: tf.Operation) -> None:
        text = f"XLA has no {op.type} for a {self._platform}"
        if any(tensor.dtype == tf.string for tensor in (*op.inputs, *op.outputs)):
            text += ": strings stay on the host; do it in dataset(), and give the step numbers"
        elif self._platform == "GPU":
            text += "; --loop=graph runs it without XLA, --loop=xla does not"
        else:
            text += "; do it in dataset(), on the host, or write it with ops of fixed shapes"
        self._find("unsupported op", text, op)

    def _look_at_sizes(self, hlo: str, alone: tf.Operation | None = None) -> None:
        """Finds the ops whose output has a size that depends on values, in the program of the step or of one op."""
        for path, kind in dynamic_sizes(hlo):
            op = self._ops.named(path) if alone is None else alone
            text = f"the size of what {kind or 'an op'} gives depends on values, so XLA computes with its largest"
            cure = "keep the size and use a mask, as in looplib.mean(value, weight)"
            fault = self._platform == "TPU" and not (op and places.is_of_keras(op))
            self._find("dynamic shape", f"{text}; {cure}", op, fault)

    def _look_at_dtypes(self) -> None:
        for op in self._ops:
            for name in {tensor.dtype.base_dtype.name for tensor in op.outputs if tensor.shape.rank != 0}:
                slow = _SLOW.get((self._platform, name)) if name != "float16" or op.type in _PRODUCTS else None
                if slow and places.line_of(op) and not places.is_ours(op):
                    self._find("slow dtype", f"{name}: {slow}", op)
        if self._platform == "TPU" and {op.outputs[0].dtype for op in self._ops if op.type in _PRODUCTS} == {
            tf.float32
        }:
            text = "all products are of float32; --mixed_precision=mixed_bfloat16 halves what they read and keep"
            self._find("slow dtype", text, fault=False)

    def _memory(self, traced: tf.types.experimental.ConcreteFunction | None) -> dict[str, int | None]:
        """Returns the bytes of each core by what they hold; less is known if the step could not be traced."""
        own = [variable for optimizer in _keras.optimizers(self._task).values() for variable in optimizer.variables]
        of_optimizer = {id(variable.value if _keras.is_variable(variable) else variable) for variable in own}
        held = [v for _, v in variables_of(state_of(self._task))] + list(traced.variables if traced else ())
        sizes = dict.fromkeys(("parameters", "optimizer", "other state"), 0)
        for variable in {id(variable): variable for variable in held}.values():
            kind = "parameters" if variable.trainable else "other state"
            sizes["optimizer" if id(variable) in of_optimizer else kind] += _bytes(variable)
        sizes["resident data"] = sum(map(_bytes, traced.captured_inputs if traced else ()))
        sizes["batch"] = sum(map(_bytes, self._specs or ()))
        kind = "activations and gradients" if self._split == "train" else "activations"
        known = {kind: size for kind, size in sizes.items() if size}
        return {**known, kind: temporary_bytes(self._function, self._specs) if traced else None}


def _bytes(tensor: tf.Tensor | tf.TensorSpec | tf.Variable) -> int:
    return 0 if tensor.dtype in _ON_THE_HOST else math.prod(tensor.shape.as_list()) * tensor.dtype.size

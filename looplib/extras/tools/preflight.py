"""A preflight: would the steps of a trainer and its evaluators run on a TPU or GPU that this machine does not have?

`python -m looplib check tpu -- COMMAND` starts a binary with `LOOPLIB_PREFLIGHT` in its environment. The binary builds
its trainer, evaluators and controller as always, on this machine's CPU, and passes their steps to `answer` instead of
running them. An environment variable and not a flag asks for it, because the command is checked unchanged, and
only the process that has built a step has access to it.

XLA lowers for a TPU where the package `tensorflow-tpu` is installed. TensorFlow's ordinary package knows no TPU and
lowers for a GPU instead: XLA has one kernel of an op for all devices. In TensorFlow 2.20 all 489 of a GPU exist for a
TPU too, with equal types except for complex128, and a TPU has some more.
"""

import collections
import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import tensorflow as tf

from looplib import files
from looplib.compat import keras as _keras
from looplib.errors import gist
from looplib.extras.diagnosis import places, traced_ops
from looplib.extras.tools import pure_function, xla
from looplib.extras.tools.variable_ops import NotAVariableError
from looplib.task.state import state_of, variables_of

if TYPE_CHECKING:
    from looplib.controller import Controller

VARIABLE = "LOOPLIB_PREFLIGHT"
_MOST = 20  # unsupported kinds of ops, after which the check stops
_SLOW = {
    "TPU": {
        "float64": "a TPU emulates it, at a tenth of the speed or less; use float32",
        "complex128": "a TPU has no kernels for it; use complex64",
        "float16": "a TPU has no units for it; use bfloat16 (--mixed_precision=mixed_bfloat16)",
    },
    "GPU": {
        "float64": "most GPUs compute it at a 32nd of the speed of float32; use float32",
        "complex128": "most GPUs compute it at a 32nd of the speed of complex64; use complex64",
    },
}
_ONLY_ON_TPUS = ("ResizeNearestNeighborGrad",)
_PRODUCTS = ("MatMul", "BatchMatMulV2", "BatchMatMulV3", "Conv2D", "Conv3D", "Einsum")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One fault, or one piece of advice.

    Attributes:
      split: "train" or the evaluator's name.
      kind: "unsupported op", "dynamic shape", "batch size" or "slow dtype".
      text: the fault and what to do, without a full stop.
      line: the user's source line as "file:line: text", or "".
      fault: whether it must be fixed; if not, it is advice.
    """

    split: str
    kind: str
    text: str
    line: str = ""
    fault: bool = True


def requested() -> bool:
    """Returns whether this process was started for a preflight."""
    return VARIABLE in os.environ


def settings() -> dict[str, Any]:
    """Returns the flags that a preflight sets, so that all is built on one CPU; {} if none was asked for."""
    return dict(strategy="auto", tpu=None, num_virtual_devices=1, loop="graph") if requested() else {}


def answer(controller: "Controller") -> None:
    """Checks a controller's steps for the device that the environment names, and writes the result to its file."""
    request = json.loads(os.environ[VARIABLE])
    result = look(controller, request["platform"], request["cores"])
    files.write_whole(request["to"], json.dumps(result), durable=False)


def look(controller: "Controller", platform: str = "TPU", cores: int = 8) -> dict[str, Any]:
    """Lowers a controller's steps for a device, and finds what cannot run there, or not well.

    Args:
      controller: a controller on one replica, on a CPU.
      platform: "TPU" or "GPU".
      cores: how many the global batch is divided over.

    Returns:
      A dict for JSON: `findings`, a list of `Finding`s as dicts, and `steps`, a dict from split to `batch`,
      `global_batch`, `lowered` (whether all of the step was) and bytes of `memory`, a dict.
    """
    findings, steps = [], {}
    for split, loop in controller.loops.items():
        look = _Look(split, loop.task, loop.step.stream, loop.step.replica_step, platform, cores)
        steps[split] = look.report()
        findings += look.findings
    return {"findings": [dataclasses.asdict(finding) for finding in findings], "steps": steps}


class _Stream(Protocol):
    """The batches of a step."""

    batch_size: int
    element_spec: Any
    dataset: tf.data.Dataset


class _Look:
    """The check of one task's step."""

    def __init__(
        self, split: str, task: object, stream: _Stream, step: Callable[[Any], Any], platform: str, cores: int
    ) -> None:
        self._split = split
        self._task = task
        self._stream = stream
        self._platform = platform
        self._cores = cores
        self.findings: list[Finding] = []
        self.batch = -(-self._stream.properties.batch_size // cores)
        # A function with jit_compile that another one calls is traced for XLA: loops then have known lengths.
        compiled = tf.function(step, jit_compile=True)
        self._function = tf.function(lambda inputs: compiled(inputs), autograph=False)

    def report(self) -> dict[str, Any]:
        self._look_at_the_batch()
        spec = self._static_spec()
        lowered, traced = False, None
        if spec is not None:
            traced = self._function.get_concrete_function(spec)
            self._ops = traced_ops.Ops(traced)
            lowered = self._lower(traced)
            self._look_at_dtypes()
        return {
            "batch": self.batch,
            "global_batch": self._stream.properties.batch_size,
            "lowered": lowered,
            "memory": self._memory(traced, spec),
        }

    def _find(self, kind: str, text: str, line: str = "", fault: bool = True) -> None:
        finding = Finding(self._split, kind, text, line, fault)
        if finding not in self.findings:
            self.findings.append(finding)

    # The batch.

    def _look_at_the_batch(self) -> None:
        size, cores = self._stream.properties.batch_size, self._cores
        unit = 8 * cores
        near = " or ".join(str(n) for n in (size // unit * unit, (size // unit + 1) * unit) if n)
        if size % cores:
            self._find("batch size", f"a global batch of {size} does not divide over {cores} cores; use {near}")
        elif self.batch % 8 and self._platform == "TPU":
            self._find(
                "batch size",
                f"{self.batch} examples a core, which a TPU pads to {-(-self.batch // 8) * 8}; use a multiple of 8, "
                f"best of 128, such as a global batch of {near}",
            )
        elif self.batch % 128 and self._platform == "TPU":
            self._find(
                "batch size",
                f"{self.batch} examples a core; a multiple of 128 fills a TPU's matrix unit, if the training allows it",
                fault=False,
            )
        elif self.batch % 8:
            self._find("batch size", f"{self.batch} examples a GPU; multiples of 8 fill its matrix units", fault=False)

    def _static_spec(self) -> Any:
        """Returns the specs of a core's batch, all static; None if it holds a type that no device takes."""
        element = self._stream.element_spec
        who = f"{type(self._task).__name__}.dataset"
        known, example = [], None
        for number, spec in enumerate(tf.nest.flatten(element)):
            if not isinstance(spec, tf.TensorSpec):
                kind = type(spec).__name__.removesuffix("Spec")
                self._find(
                    "dynamic shape", f"{who} has a {kind}, which XLA does not take; make it dense, of a fixed size"
                )
                return None
            if spec.dtype == tf.string:
                self._find("unsupported op", f"{who} has a string tensor; map it to numbers there, on the host")
            shape = spec.shape.as_list() if spec.shape.rank is not None else None
            unknown = shape is None or None in shape[1:]
            if unknown or (shape and shape[0] is None and self._split == "train"):
                self._find(
                    "dynamic shape",
                    f"{who} has batches of shape {spec.shape}; a {self._platform} compiles again for each, so fix it: "
                    "batch(..., drop_remainder=True), padded_batch to one size, or tf.ensure_shape",
                    fault=unknown or self._platform == "TPU",
                )
            if unknown:
                example = example or tf.nest.flatten(next(iter(self._stream.dataset)))
                shape = example[number].shape.as_list()
            if shape and shape[0] in (None, self._stream.properties.batch_size):
                shape[0] = self.batch
            known.append(tf.TensorSpec(shape, spec.dtype))
        return tf.nest.pack_sequence_as(element, known)

    # The step.

    def _lower(self, traced: tf.types.experimental.ConcreteFunction) -> bool:
        """Lowers the step, repeatedly without the ops that cannot be lowered, until all of these are found.

        Returns:
          Whether all of it was lowered at once.
        """
        replaced = {self._ops.place(op): pure_function.outputs_of(op) for op in self._of_string()}
        found = bool(replaced)
        target = _target(self._platform)
        specs: list[tf.TensorSpec] = []
        names: Mapping[str, str] = {}
        for _ in range(_MOST):
            try:
                pure = pure_function.make(traced, replaced)
                specs, names = pure.specs, pure.names
                text = pure.program.experimental_get_compiler_ir(*specs)(stage="hlo", platform_name=target)
            except NotAVariableError as error:
                op = self._ops.in_function(*error.place)
                if op is None:
                    self._tell_error(error, None)
                    return False
                ops = [op]
            except Exception as error:  # XLA's errors have many types
                op = self._ops.named_in(str(error), names)
                if not xla.lacks_a_kernel(error) or op is None:
                    if not found and not any(part.dtype == tf.string for part in specs):
                        self._tell_error(error, op)
                    return False
                ops = [other for other in self._ops if other.type == op.type]
            else:
                self._look_at_sizes(text)
                return not found
            for op in ops:
                if target == self._platform or op.type not in _ONLY_ON_TPUS:
                    self._find("unsupported op", self._unsupported(op), places.line_of(op))
                    found = True
                replaced[self._ops.place(op)] = pure_function.outputs_of(op)
        return False

    def _of_string(self) -> Iterator[tf.Operation]:
        """Yields the ops on strings, which only a CPU has; XLA leaves out assertions and their messages."""
        for op in self._ops:
            strings = any(tensor.dtype == tf.string for tensor in (*op.inputs, *op.outputs))
            if strings and op.type not in ("Const", "Placeholder", "Assert") and not list(traced_ops.called(op)):
                self._find("unsupported op", self._unsupported(op), places.line_of(op))
                yield op

    def _unsupported(self, op: tf.Operation) -> str:
        text = f"XLA has no {op.type} for a {self._platform}"
        strings = [t for t in (*op.inputs, *op.outputs) if t.dtype == tf.string]
        if strings:
            return f"{text}: strings stay on the host; do it in dataset(), and give the step numbers"
        if self._platform == "GPU":
            return f"{text}; --loop=graph runs it without XLA, --loop=xla does not"
        return f"{text}; do it in dataset(), on the host, or write it with ops of fixed shapes"

    def _tell_error(self, error: Exception, op: tf.Operation | None) -> None:
        text = gist(error).removeprefix("Failed getting HLO text: ").strip("'")
        line = places.line_of(op) if op is not None else ""
        if xla.needs_a_constant(error):
            self._find("dynamic shape", f"{text}; XLA needs sizes that do not depend on values", line)
        else:
            self._find("unsupported op", text, line)

    def _look_at_sizes(self, hlo: str) -> None:
        """Finds the ops whose output has a size that depends on values."""
        for path, kind in xla.dynamic_sizes(hlo):
            op = self._ops.named(path)
            self._find(
                "dynamic shape",
                f"the size of what {kind or 'an op'} gives depends on values, so XLA computes with its largest; keep "
                "the size and use a mask, as in looplib.mean(value, weight)",
                places.line_of(op) if op is not None else "",
                fault=self._platform == "TPU" and not (op is not None and places.is_of_keras(op)),
            )

    def _look_at_dtypes(self) -> None:
        for op in self._ops:
            for tensor in op.outputs:
                name = tensor.dtype.base_dtype.name
                line = places.line_of(op)
                if name in _SLOW[self._platform] and line and tensor.shape.rank != 0 and not places.is_ours(op):
                    if name != "float16" or op.type in _PRODUCTS:
                        self._find("slow dtype", f"{name}: {_SLOW[self._platform][name]}", line)
        if self._platform == "TPU":
            kinds = {op.outputs[0].dtype.name for op in self._ops if op.type in _PRODUCTS}
            if kinds == {"float32"}:
                text = "all products are of float32; --mixed_precision=mixed_bfloat16 halves what they read and keep"
                self._find("slow dtype", text, fault=False)

    # Memory.

    def _memory(self, traced: tf.types.experimental.ConcreteFunction | None, spec: Any) -> dict[str, int | None]:
        """Returns the bytes of each core: parameters, optimizer, other state, resident data, batch, and temporaries.

        Args:
          traced: the step; None if its batch holds a type that no device takes, and less is known.
          spec: of its batch, or None.
        """
        own = [variable for optimizer in _keras.optimizers(self._task).values() for variable in optimizer.variables]
        of_optimizer = {id(variable.value if _keras.is_variable(variable) else variable) for variable in own}
        used = traced.variables if traced else ()
        held = [*(variable for _, variable in variables_of(state_of(self._task))), *used]
        sizes: collections.Counter[str] = collections.Counter()
        for variable in {id(variable): variable for variable in held}.values():
            kind = (
                "optimizer" if id(variable) in of_optimizer else "parameters" if variable.trainable else "other state"
            )
            sizes[kind] += _bytes(variable)
        handles = {id(variable.handle) for variable in used}
        sizes["resident data"] = sum(
            _bytes(tensor) for tensor in (traced.captured_inputs if traced else ())
            if id(tensor) not in handles and tensor.dtype not in (tf.resource, tf.variant, tf.string)
        )  # fmt: skip
        parts = tf.nest.flatten(spec) if traced else []
        sizes["batch"] = sum(_bytes(part) for part in parts if part.dtype != tf.string)
        temporary = _temporary_bytes(self._function, spec) if traced else None
        kind = "activations and gradients" if self._split == "train" else "activations"
        return {**{kind: size for kind, size in sizes.items() if size}, kind: temporary}


def _target(platform: str) -> str:
    """Returns the platform to lower for: a GPU where this TensorFlow does not know the one that is asked for."""
    try:
        add = tf.function(lambda x: x + x, jit_compile=True, autograph=False)
        add.experimental_get_compiler_ir(tf.TensorSpec([1]))(stage="hlo", platform_name=platform)
        return platform
    except ValueError:
        return "GPU"


def _bytes(tensor: tf.Tensor | tf.TensorSpec | tf.Variable) -> int:
    return math.prod(tensor.shape.as_list()) * tensor.dtype.size


def _temporary_bytes(function: tf.types.experimental.PolymorphicFunction, spec: Any) -> int | None:
    """Returns the bytes that XLA, compiling for a CPU, reserves for values inside of the step; None if it cannot say.

    It is the plan of a real compiler for this program and batch, on another device: a TPU fuses other ops
    together, and pads the last two dimensions to multiples of 8 and 128.
    """
    compiled = tf.function(function.python_function, jit_compile=True)
    return xla.temporary_bytes(compiled, spec)

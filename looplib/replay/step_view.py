"""A close look at one step of a run: its batch, metrics and norms, and the first op whose output is not finite."""

import contextlib
import dataclasses
import inspect
import io
import pdb
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.base import files
from looplib.base.messages import gist
from looplib.base.numbers import format_number
from looplib.base.orders import ReplayOrder
from looplib.cluster.updates import Share
from looplib.compat import keras as _keras
from looplib.compat import places
from looplib.loop import additions
from looplib.replay.player import Answer, Player
from looplib.run.directory import RunDir
from looplib.run.records import RecordLog
from looplib.task import model_table
from looplib.task.gradient_trainer import GradientTrainer
from looplib.task.plain import as_array, is_number
from looplib.task.trainer import Trainer

_SHOWN_IDS = 16
_ROUNDING = 1e-4  # of a number, between engines
_SHOWN_ROWS = 60  # of the table of norms
_NAMED_STEPS = 5


def look(player: Player, order: ReplayOrder) -> Answer:
    """Trains to the step before the one that is asked for, and looks at that one.

    Args:
      player: before its first step.
      order: the step, and how to run it.
    """
    run = RunDir(order.directory)
    records = _trained(run.records())
    first_pass = {**records, **_trained(run.records(voided=True))}
    player.play(order.step - 1)
    view = _View(player)
    lines = [f"batch of step {order.step}", *view.batch_lines()]
    if order.save:
        np.savez(content := io.BytesIO(), **view.arrays())
        files.write_named(order.save, content.getvalue())
        lines.append(f"  saved in {order.save}")
    lines.append(f"step {order.step}")
    if order.eager:
        lines += [*_table(view.run_eagerly(order.debug)), *view.norm_lines()]
    else:
        if order.step in first_pass:
            player.reported[order.step] = player.play_one()
            player.go_back(view.before)
        metrics = view.run()
        view.run_eagerly()
        lines += [*_table(metrics), *view.norm_lines(), *view.op_lines()]
    for reported in (first_pass, records):  # a replay through a rollback does again what that took back
        compared = {step: metrics for step, metrics in player.reported.items() if step in reported}
        different = [step for step, metrics in compared.items() if _differing(metrics, reported[step], order.exact)]
        if not different:
            break
    return Answer([*lines, _verdict(order, player.start, compared, different, reported)], equal=not different)


def _trained(records: RecordLog) -> dict[int, dict[str, float | None]]:
    """Returns the metrics of the training, by step."""
    return {one.step: one.numbers for one in records.all() if one.split == "train"}


def _table(metrics: Mapping[str, int | float]) -> list[str]:
    width = max(map(len, metrics), default=0)
    return [f"  {name:<{width}}  {value:.9g}" for name, value in metrics.items()]


def _differing(metrics: Mapping[str, int | float], record: Mapping[str, float | None], exact: bool) -> list[str]:
    """Returns the metrics that have other numbers than a record, which has None for what is not finite."""

    def differs(value: int | float, other: object) -> bool:
        if not np.isfinite(value) or not isinstance(other, (int, float)):
            return other is not None or bool(np.isfinite(value))
        return value != other if exact else not np.isclose(value, other, rtol=_ROUNDING, atol=0)

    known = {name: value for name, value in metrics.items() if name in record and name != additions.METRIC}
    return [name for name, value in known.items() if differs(value, record[name])]


def _verdict(
    order: ReplayOrder,
    start: int,
    compared: Mapping[int, Mapping[str, int | float]],
    different: Sequence[int],
    records: Mapping[int, Mapping[str, float | None]],
) -> str:
    """Says whether the metrics that the run reported on the way equal the replay's."""
    step, exact = order.step, order.exact
    if not compared:
        begin = f"the checkpoint of step {start}" if start else "step 0, without a checkpoint"
        if step in records:  # an eager pass alone
            return f"the replay began at {begin}; a step that runs op by op is not compared with what the run reported"
        missed = f"step {step}" if step == start + 1 else f"any of the steps {start + 1} to {step}"
        return f"the run did not report {missed}, and the replay began at {begin}, so there is nothing to compare"
    here = "" if step in records else f"the run did not report step {step}; "
    if not different:
        steps = _steps(sorted(compared))
        if exact:
            return f"{here}equal, bit by bit, to what the run reported at {steps}"
        return (
            f"{here}equal, up to rounding ({_ROUNDING:g}), to what the run reported at {steps}; its loop engine is not "
            "the one of a replay, graph, and engines differ in the last bits"
        )
    first = different[0]
    one, other = compared[first], records[first]
    names = _differing(one, other, exact)
    texts = [f"{name} {other[name]} then, {one[name]} now" for name in names[:3]]
    return (
        f"{here}DIFFERENT from what the run reported at step {first}: {', '.join(texts)}; the code, the settings or "
        "the machine may have changed since, or the step uses something that a checkpoint does not hold"
    )


def _steps(steps: Sequence[int]) -> str:
    if len(steps) > _NAMED_STEPS:
        return f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
    return f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}"


@dataclasses.dataclass(frozen=True)
class _BatchTensor:
    """One tensor of a batch, of all replicas together."""

    name: str
    value: Any


class _View:
    """The step that follows where a player stands.

    Attributes:
      before: the state before it.
    """

    def __init__(self, player: Player) -> None:
        self._player, self._step = player, player.loop.step
        self._trainer: Trainer = player.loop.task
        self.before = player.note()
        self._batch, self._ids = player.batch_at(self.before)
        self._leaves = self._joined()
        if self._ids is not None:  # each replica was taken for a pipeline, which one of global batches is not
            self._ids = self._ids[: self._leaves[0].value.shape[0]]
        player.go_back(self.before)
        self._weights = _weights(self._trainer)
        self._after: dict[str, np.ndarray] | None = None
        self._gradients: dict[str, float] = {}
        self._failure = ""

    # The batch.

    def _joined(self) -> list[_BatchTensor]:
        """Returns the tensors of the global batch; the rows in place of the numbers of rows of `context.resident`."""
        replicas = self._step.strategy.experimental_local_results
        batch, arrays = self._batch, self._player.loop.data.stream.arrays
        batch = batch.inputs if isinstance(batch, Share) else batch
        found = [_BatchTensor(name, _concatenated(replicas(value))) for name, value in _named(batch)]
        if arrays is None:
            return found
        return [_BatchTensor(name, tf.gather(array, found[0].value)) for name, array in _named(arrays)]

    def batch_lines(self) -> list[str]:
        """Returns a line for each tensor of the batch, and one for the ids of its examples."""
        width = max(len(leaf.name) for leaf in self._leaves)
        lines = [f"  {leaf.name:<{width}}  {_describe(leaf.value)}" for leaf in self._leaves]
        if self._ids is not None:
            more = len(self._ids) - _SHOWN_IDS
            shown = ", ".join(map(str, self._ids.numpy()[:_SHOWN_IDS]))
            lines.append(f"  ids of context.indices: {shown}" + (f" and {more} more" if more > 0 else ""))
        return lines

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the batch as numpy arrays by name; a ragged or sparse tensor has several."""
        found = {} if self._ids is None else {"example_ids": self._ids.numpy()}
        for leaf in self._leaves:
            parts = tf.nest.flatten(leaf.value, expand_composites=True)
            for number, part in enumerate(parts):
                array = as_array(part)
                # A file of numpy's has no name for bfloat16.
                array = array.astype(np.float32) if array.dtype.kind == "V" else array
                found[leaf.name + (f".{number}" if len(parts) > 1 else "")] = array
        return found

    # The step.

    def run(self) -> dict[str, int | float]:
        """Runs the step as the run did; returns its own metrics."""
        self._player.go_back(self.before, fresh=True)
        metrics = self._player.play_one()
        self._after = _weights(self._trainer)
        return metrics

    def run_eagerly(self, debug: bool = False) -> dict[str, int | float]:
        """Runs the step op by op, to see all gradients that it gives to an optimizer.

        Args:
          debug: whether to stop in the user's function, in Python's debugger.

        Returns:
          The metrics; {} if the step cannot run so.
        """
        self._player.go_back(self.before, fresh=True)
        try:
            parts = _debugged(self._trainer, self._call) if debug else self._call()
        except Exception as error:
            self._failure = f"step_fn fails eagerly: {gist(error)}"
            return {}
        reducer = self._player.loop.reducer
        for part in parts:
            for name, norm in reducer.gradient_norms(part).items():
                self._gradients[name] = float(np.maximum(self._gradients.get(name, 0.0), norm))  # NaN stays
        self._after = self._after or _weights(self._trainer)
        metrics = reducer.packer.unpack(np.sum(parts, axis=0), reducer.results())
        return {**metrics, **additions.ExampleChecksum().take(metrics)}

    def _call(self) -> list[np.ndarray]:
        """Runs the step outside of any `tf.function`; returns what each replica adds to the metrics."""
        strategy = self._step.strategy
        tf.config.run_functions_eagerly(True)
        try:
            inputs = tf.nest.map_structure(lambda leaf: leaf, self._batch)  # a step may remove entries
            result = strategy.run(self._step.replica_step, args=(inputs,))
        finally:
            tf.config.run_functions_eagerly(False)
        return [part.numpy() for part in strategy.experimental_local_results(result)]

    def norm_lines(self) -> list[str]:
        """Returns a table of the norms of gradient, update and weight of each variable, bad ones first."""
        rows = []
        for name, before in self._weights.items():
            gradient = self._gradients.get(name)
            after = before if self._after is None else self._after[name]
            numbers = [gradient, _norm(after - before), _norm(after)]
            bad = any(number is not None and not np.isfinite(number) for number in numbers)
            rows.append((not bad, [name, *("-" if number is None else f"{number:.4g}" for number in numbers)]))
        rows = [row for _, row in sorted(rows, key=lambda row: row[0])]
        width = max((len(row[0]) for row in rows), default=0)
        several = self._step.strategy.num_replicas_in_sync > 1 and not isinstance(self._trainer, GradientTrainer)
        lines = ["norms (gradient: the largest of a replica's own)" if several else "norms"]
        lines += [f"  {name:<{width}}{a:>12}{b:>12}{c:>12}" for name, a, b, c in [("", "gradient", "update", "weight")]]
        lines += [f"  {name:<{width}}{a:>12}{b:>12}{c:>12}" for name, a, b, c in rows[:_SHOWN_ROWS]]
        lines += [f"  and {len(rows) - _SHOWN_ROWS} more variables"] * (len(rows) > _SHOWN_ROWS)
        return lines + [self._failure] * bool(self._failure)

    def op_lines(self) -> list[str]:
        """Runs the step op by op to the first op whose output is not finite; returns lines about it."""
        if self._failure:
            return []
        self._player.go_back(self.before, fresh=True)
        tf.debugging.enable_check_numerics()
        try:
            with _whole_tracebacks():
                self._call()
        except Exception as error:
            found = _first_bad_output(error)
            if found is None:
                return [f"the search for an op whose output is not finite failed: {gist(error)}"]
            op, what = found
            layer, place = _layer_of(error), places.place_of(error)
            lines = [f"first op whose output is not finite: {op}{f' in layer {layer}' * bool(layer)}, {what}"]
            return [*lines, *([f"  {place}"] if place else [])]
        finally:
            tf.debugging.disable_check_numerics()
        return ["no op of the step has an output that is not finite"]


def _debugged(trainer: Trainer, call: Callable[[], list[np.ndarray]]) -> list[np.ndarray]:
    """Calls a function that runs the step, and stops at the first line of the one that the user wrote."""
    written = trainer.loss_fn if isinstance(trainer, GradientTrainer) else trainer.step_fn
    code = inspect.unwrap(written).__code__
    lines = [line for _, _, line in code.co_lines() if line is not None and line > code.co_firstlineno]
    debugger = pdb.Pdb(nosigint=True)
    debugger.set_break(code.co_filename, min(lines, default=code.co_firstlineno))
    debugger.rcLines = ["continue"]  # to the breakpoint
    return debugger.runcall(call)


def _weights(trainer: Trainer) -> dict[str, np.ndarray]:
    """Returns the values of the variables of a trainer's model that are numbers, float64, by name."""
    found = {name: as_array(variable) for name, variable, _ in model_table.variables(trainer)}
    return {name: value.astype(np.float64) for name, value in found.items() if is_number(value)}


def _norm(value: np.ndarray) -> float:
    return float(np.sqrt(np.square(value).sum()))


def _named(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (name, value) of the leaves of a structure, such as ("image", ...) or ("0", ...)."""
    if isinstance(tree, Mapping):
        children = sorted(tree.items())
    elif isinstance(tree, (tuple, list)):
        children = enumerate(tree)
    else:
        yield name or "batch", tree
        return
    for key, value in children:
        yield from _named(value, f"{name}.{key}" if name else str(key))


def _concatenated(parts: Sequence[Any]) -> Any:
    """Joins what the replicas get of one tensor."""
    first = parts[0]
    if len(parts) == 1 or first.shape.rank == 0:
        return first
    return tf.sparse.concat(0, parts) if isinstance(first, tf.SparseTensor) else tf.concat(parts, axis=0)


def _describe(value: Any) -> str:
    """Returns type, shape and range of a tensor, and how many of its elements are not finite."""
    kind = {tf.RaggedTensor: "ragged ", tf.SparseTensor: "sparse "}.get(type(value), "")
    text = f"{kind}{value.dtype.name} {value.shape.as_list()}"
    flat = value.flat_values if isinstance(value, tf.RaggedTensor) else value
    flat = flat.values if isinstance(flat, tf.SparseTensor) else flat
    array = as_array(flat)
    if not array.size or value.dtype == tf.string:
        return text
    if not (value.dtype.is_floating or value.dtype.is_integer):
        return text
    good = array if value.dtype.is_integer else array[np.isfinite(array.astype(np.float64))].astype(np.float64)
    if good.size:
        text += f"  {format_number(good.min().item())} to {format_number(good.max().item())}"
        text += f", mean {format_number(float(good.mean()))}" * value.dtype.is_floating
    return text + f"  NOT FINITE: {array.size - good.size:,} of {array.size:,}" * (good.size < array.size)


@contextlib.contextmanager
def _whole_tracebacks() -> Iterator[None]:
    """Keeps Keras 3's and TensorFlow's own frames in the tracebacks of errors, inside a `with` block."""
    holders = [tf.debugging, *([sys.modules["keras"].config] if "keras" in sys.modules else [])]
    holders = [holder for holder in holders if holder.is_traceback_filtering_enabled()]
    for holder in holders:
        holder.disable_traceback_filtering()
    try:
        yield
    finally:
        for holder in holders:
            holder.enable_traceback_filtering()


def _first_bad_output(error: BaseException) -> tuple[str, str] | None:
    """Returns (type of the op, what its output is) of what `tf.debugging.enable_check_numerics` found; None if nothing.

    The second is text such as "float32 [3, 2], 4 NaN"; "" where the message does not say it.
    """
    text = str(error)
    found = re.search(r"Detected Infinity or NaN in output \d+ of \S+ op \"([^\"]+)\"", text)
    if not found:
        return None
    dtype, shape = re.search(r"dtype: <dtype: '(\w+)'>", text), re.search(r"shape: (\([^)\n]*\))", text)
    counts = re.findall(r"# of (\S+) elements: (\d+)", text)
    sizes = [f"[{shape[1].strip('(,)')}]"] if shape else []
    kind = " ".join([*([dtype[1]] if dtype else []), *sizes])
    return found[1], ", ".join(filter(None, [kind, *(f"{count} {name.removeprefix('+')}" for name, count in counts)]))


def _layer_of(error: BaseException) -> str:
    """Returns the name of the innermost layer of either family that raised an error; "" for none."""
    name, trace = "", error.__traceback__
    while trace is not None:
        holder = trace.tb_frame.f_locals.get("self")
        name = holder.name if _keras.is_layer(holder) and not _keras.is_model(holder) else name
        trace = trace.tb_next
    return name

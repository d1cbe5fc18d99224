"""`python -m looplib weights FILE [--to RUN]`: what is in a file of weights, beside what a model wants."""

import argparse
import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from looplib.base.console import printable
from looplib.base.numbers import format_size
from looplib.base.plugins import Command
from looplib.commands.options import place
from looplib.errors import EXIT_DIFFERENT, EXIT_DONE
from looplib.weights import rules

if TYPE_CHECKING:  # which imports numpy, and `--help` does without
    from looplib.weights.sources import StoredTensor


def add(tools: Any) -> None:
    """Adds the parser of `weights`."""
    parser = tools.add_parser(
        "weights",
        help="list the weights in a file, beside those of a model",
        description="Lists names, shapes and types in a file of weights (.keras, .weights.h5, .safetensors, a "
        "checkpoint, a SavedModel, a run) without running anything in it. With --to, it shows which of them the model "
        "of a run takes in a warm start.",
        epilog="exit codes: 0 listed, and with --to everything has its place; 1 some value or variable has none; 2 it "
        "cannot be read, or a rule does not fit",
    )
    parser.add_argument("file", type=place, help="the file, or a .yaml file with its path and rules")
    text = "the run directory, the checkpoint or the file of the model that is to take them"
    parser.add_argument("--to", type=place, metavar="RUN", help=text)
    parser.set_defaults(tool=Command(_weights, has_verdict=True))


def _weights(options: argparse.Namespace) -> int:
    start = rules.given(options.file)
    there = tensors_of(start.path)
    ruled = rules.apply(start.rules, there, start.path)
    if not options.to:
        _print_table(
            [("name", "shape", "type", "")]
            + [(name, _shape(one), _type(one), _new(name, ruled)) for name, one in there.items()]
        )
        print(f"{len(there)} values, {format_size(sum(one.bytes for one in there.values()))}")
        return EXIT_DONE
    return _compare(there, ruled, tensors_of(options.to), options.to)


def tensors_of(path: str) -> dict[str, "StoredTensor"]:
    """Returns the weights that a path names, by name.

    Raises:
      UsageError: if it cannot be read.
    """
    from looplib.weights.checkpoints import CheckpointWeights
    from looplib.weights.loading import located
    from looplib.weights.opening import open_weights
    from looplib.weights.tables import join_listed
    from looplib.weights.taking import unique_names

    local = located(path)
    with contextlib.closing(open_weights(local) or CheckpointWeights(local)) as source:
        names = sorted(unique_names(source.tensors).items())
        return join_listed({name: source.tensors[key] for name, key in names})


def _compare(
    there: Mapping[str, "StoredTensor"],
    ruled: Mapping[str, rules.RuledName],
    here: Mapping[str, "StoredTensor"],
    to: str,
) -> int:
    """Prints what is there beside what is here; returns the exit code."""
    layers = _layers(here)
    rows, unplaced, lacking = [("name", "shape", "type", f"in {to}")], 0, dict(here)
    shapes = {}
    for one in there.values():
        shapes.setdefault(one.layer, []).append(one.shape)
    whole = {
        name for name, one in there.items() if one.number and _fits_by_number(name, shapes[one.layer], ruled, layers)
    }
    for name, one in there.items():
        form = ruled.get(name, rules.RuledName(name))
        if form.name is None:
            rows.append((name, _shape(one), _type(one), "left out"))
        elif form.name in here:
            lacking.pop(form.name, None)
            axes = form.transpose or tuple(range(len(one.shape)))
            now = tuple(one.shape[axis] for axis in axes) if len(axes) == len(one.shape) else one.shape
            wanted = here[form.name].shape
            now = wanted[:1] + now[1:] if here[form.name].parts else now  # a table takes the rows of its ids
            shapes_fit = now == wanted or form.reshape
            types_fit = one.floating and here[form.name].floating or one.dtype == here[form.name].dtype
            note = "" if shapes_fit else f", of the shape {_shape(here[form.name])}"
            note += "" if types_fit else f", of the type {_type(here[form.name])}"
            rows.append((name, _shape(one), _type(one), f"{form.name}{note}"))
            if note:
                unplaced, lacking[form.name] = unplaced + 1, here[form.name]
        elif name in whole:
            layer = form.name.rpartition("/")[0]
            for own in layers[layer]:
                lacking.pop(f"{layer}/{own}", None)
            rows.append((name, _shape(one), _type(one), f"{layer}, by its number"))
        else:
            unplaced += 1
            rows.append((name, _shape(one), _type(one), "-"))
    _print_table(rows)
    if lacking:
        print()
        print(printable(f"only in {to}:"))
        _print_table([(name, _shape(one), _type(one)) for name, one in lacking.items()])
    return EXIT_DIFFERENT if unplaced or lacking else EXIT_DONE


def _layers(here: Mapping[str, "StoredTensor"]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Returns the variables of each layer by name, with their shapes."""
    layers: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, one in here.items():
        layer, _, own = name.rpartition("/")
        layers.setdefault(layer, {})[own] = one.shape
    return layers


def _fits_by_number(
    name: str,
    shapes: list[tuple[int, ...]],
    ruled: Mapping[str, rules.RuledName],
    layers: Mapping[str, Mapping[str, tuple[int, ...]]],
) -> bool:
    """Returns whether the layer here has as many variables of the same shapes; the model's layer knows their order.

    Args:
      name: of a value.
      shapes: of all values of its layer.
      ruled: what rules make of names.
      layers: the variables here by layer.
    """
    form = ruled.get(name, rules.RuledName(name))
    wanted = layers.get((form.name or "").rpartition("/")[0], {})
    return sorted(shapes) == sorted(wanted.values())


def _new(name: str, ruled: Mapping[str, rules.RuledName]) -> str:
    if name not in ruled:
        return ""
    form = ruled[name]
    return "left out" if form.name is None else f"becomes {form.name}"


def _shape(one: "StoredTensor") -> str:
    return f"({', '.join(map(str, one.shape))})" + f" in {one.parts} parts" * (one.parts > 1)


def _type(one: "StoredTensor") -> str:
    return str(one.dtype) if one.dtype else "text"


def _print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print(printable("  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip()))

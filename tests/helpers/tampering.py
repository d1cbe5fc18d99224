"""Tampers with the files of a run, as somebody else or a bad disk can."""

import copy
import hashlib
import json
import os
import pathlib
import random
from collections.abc import Callable
from typing import Any

import tensorflow as tf

Tree = dict[str, Any]
RUN_STATE = "run_state/.ATTRIBUTES/py_state"
VALUES = [
    None, -1, 10**40, 1e308, float("nan"), "", "../x", "/etc/passwd", [], {}, [[]], True, "\x00", {"bytes": 0},
    "ckpt-6.index", [None], [1e999, -1],
]  # fmt: skip

SURROGATE, NUL = "\ud800", "a\0b"
# Of texts that are only read.
WRONG = [
    *VALUES, SURROGATE, NUL, "x" * 5000, 10**400, -(10**400), {"a": {SURROGATE: [NUL]}}, [[[[[["deep"]]]]]], "\x1b[2J",
    ["-m", "nothing"], [None, None, None],
]  # fmt: skip


def rewrite_marker(path: pathlib.Path, **changes: Any) -> None:
    """Changes fields of a marker and gives it the checksum that belongs to it."""
    sign(path, json.loads(path.read_text()) | changes)


def sign(path: pathlib.Path, fields: Tree) -> None:
    """Writes a marker with these fields and the checksum that belongs to them."""
    fields = {key: value for key, value in fields.items() if key != "sha256"}
    checksum = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**fields, "sha256": checksum}))


def rewrite_tensors(marker: pathlib.Path, change: Callable[[dict[str, tf.Tensor]], None]) -> None:
    """Changes tensors of a checkpoint and gives its marker the sizes and checksums that belong to the new files.

    Args:
      marker: its marker, `ckpt-<step>.commit`.
      change: is given all tensors by their keys, to change the dict.
    """
    path = str(marker.with_suffix(""))
    reader = tf.train.load_checkpoint(path)
    tensors = {key: tf.constant(reader.get_tensor(key)) for key in reader.get_variable_to_shape_map()}
    change(tensors)
    # In the order of TensorFlow's own files, without slices.
    tf.raw_ops.SaveV2(
        prefix=path, tensor_names=sorted(tensors), shape_and_slices=[""] * len(tensors),
        tensors=[tensors[key] for key in sorted(tensors)],
    )  # fmt: skip
    listed = json.loads(marker.read_text())["files"]
    for name in listed:
        content = marker.with_name(name).read_bytes()
        listed[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    rewrite_marker(marker, files=listed)


def rewrite_run_state(marker: pathlib.Path, change: Callable[[Tree], None]) -> None:
    """Changes the controller's own state in a checkpoint, and makes all checksums right again."""

    def rewrite(tensors: dict[str, tf.Tensor]) -> None:
        values = json.loads(tensors[RUN_STATE].numpy())
        change(values)
        tensors[RUN_STATE] = tf.constant(json.dumps(values))

    rewrite_tensors(marker, rewrite)


def aliases(levels: int, width: int = 9) -> str:
    """Returns a YAML text of some hundred bytes whose value is of `width ** levels` parts."""
    lines = [f"x0: &x0 [{','.join('1' * width)}]"]
    lines += [f"x{i}: &x{i} [{','.join([f'*x{i - 1}'] * width)}]" for i in range(1, levels)]
    return "\n".join(lines)


def mutate_fields(fields: Tree, chance: random.Random, values: list[Any] = VALUES) -> None:
    """Puts values of other kinds into a tree of dicts and lists, at one to three places."""
    for _ in range(chance.randrange(1, 4)):
        holder: Any = fields
        key = chance.choice(list(holder))
        while isinstance(holder[key], (dict, list)) and holder[key] and chance.random() < 0.7:
            holder = holder[key]
            key = chance.choice(list(holder)) if isinstance(holder, dict) else chance.randrange(len(holder))
        if isinstance(holder, dict) and chance.random() < 0.3:
            holder[str(chance.choice(values))] = copy.deepcopy(chance.choice(values))
        else:
            holder[key] = copy.deepcopy(chance.choice(values))


def mutated(content: bytes, chance: random.Random) -> bytes:
    """Bytes changed in one of several ways."""
    changed = bytearray(content)
    way = chance.randrange(6)
    place = chance.randrange(len(changed) + 1)
    if way == 0:
        del changed[place:]
    elif way == 1:
        changed[place:place] = bytes(chance.randrange(256) for _ in range(chance.randrange(1, 20)))
    elif way == 2:
        for _ in range(chance.randrange(1, 8)):
            if changed:
                changed[chance.randrange(len(changed))] = chance.randrange(256)
    elif way == 3:
        changed[place:] = changed[: len(changed) - place]
    elif way == 4:
        pairs = ((b"0", b"-1"), (b"1", b"1e999"), (b'"', b""), (b"{", b"["), (b"ckpt", b"../x"), (b"6", b"null"))
        for old, new in pairs:
            if chance.random() < 0.3:
                changed = bytearray(bytes(changed).replace(old, new, chance.randrange(1, 4)))
    else:
        changed = changed * chance.randrange(2, 5)
    return bytes(changed)


# What may stand where a file of a run should be.


def make_fifo(path: pathlib.Path) -> None:
    """A FIFO, on which a reader waits for ever."""
    os.mkfifo(path)


def make_directory(path: pathlib.Path) -> None:
    """A directory that is not empty."""
    path.mkdir()
    (path / "something").write_text("else")


def make_endless(path: pathlib.Path) -> None:
    """A link to a device that never ends."""
    path.symlink_to("/dev/zero")


def make_deep(path: pathlib.Path) -> None:
    """JSON that is nested deeper than a parser can follow."""
    path.write_text("[" * 100_000)


def make_bytes(path: pathlib.Path) -> None:
    """Bytes that are no text."""
    path.write_bytes(bytes(range(256)))


def make_other_types(path: pathlib.Path) -> None:
    """JSON of other types than a run writes."""
    path.write_text('{"step": [1], "split": {}}\n7\nnull\n"text"\n{"status": 3, "starts": [1], "seconds": 5}\n')


MAKE = [make_fifo, make_directory, make_endless, make_deep, make_bytes, make_other_types]

"""Faults of a run directory before a start, by somebody else or a bad disk."""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

from fault import NEWEST, Fault, nothing
from sandbox import Sandbox
from tampering import (
    MAKE,
    NUL,
    SURROGATE,
    WRONG,
    aliases,
    make_bytes,
    make_fifo,
    mutate_fields,
    mutated,
    rewrite_marker,
    rewrite_run_state,
    sign,
)

ADVICE = ("--start_anew",)
GONE = r"no checkpoint in .* is intact, although the run had checkpoints .*; recover one, or start .* --start_anew"
SIDE_FILES = (
    "lock",
    "run.json",
    "metrics.jsonl",
    "metrics.voided.jsonl",
    "train/events.out.tfevents.0000000001.x.1.v2",
)
LINKS = (
    "lock", "run.json", "run.json.new", "metrics.jsonl", "metrics.jsonl.new", "metrics.voided.jsonl",
    "checkpoints/checkpoint", "checkpoints/checkpoint.new", "checkpoints/ckpt-60.commit.new",
    "train/events.out.tfevents.0000000001.host.1.v2", "train/events.out.rewritten.1.v2",
)  # fmt: skip
FOLDERS = ("checkpoints", "checkpoints/set_aside", "train", "eval")
DATA = f"ckpt-{NEWEST}.data-00000-of-00001"
CHECKPOINT_FILES = (DATA, f"ckpt-{NEWEST}.index", f"ckpt-{NEWEST}.commit")
NOBODY = 65534


def _replaced(name: str, make: Callable[[pathlib.Path], None]) -> Fault:
    return Fault(
        f"{name} by {make.__name__}", "directory", prepare=lambda place: place.replace(name, make), stopped=True,
        loses_records=name == "metrics.jsonl",
    )  # fmt: skip


def _checkpoint_file(name: str, make: Callable[[pathlib.Path], None]) -> Fault:
    return dataclasses.replace(_replaced(f"checkpoints/{name}", make), name=f"{name} by {make.__name__}")


def _event_file(make: Callable[[pathlib.Path], None]) -> Fault:
    def prepare(place: Sandbox) -> None:
        own = sorted((place.run / "train").iterdir())[0]
        place.replace(f"train/{own.name}", make)

    return Fault(f"own event file by {make.__name__}", "directory", prepare=prepare, stopped=True, loses_records=True)


def _link(name: str) -> Fault:
    def prepare(place: Sandbox) -> None:
        target = "train/events.out.tfevents.1.host.1.v2" if "events" in name else "metrics.jsonl"
        place.replace(name, lambda path: path.symlink_to(place.victim / target))

    return Fault(
        f"{name} is a link outside", "directory", prepare=prepare, stopped=True, loses_records=name == "metrics.jsonl"
    )


def _folder_link(name: str) -> Fault:
    def prepare(place: Sandbox) -> None:
        target = place.victim / name.replace("/set_aside", "")
        place.exchange(name, lambda path: path.symlink_to(target))

    line = "is a symbolic link, and looplib writes and deletes nothing outside of .*; put a directory there"
    return Fault(f"{name}/ is a link outside", "directory", (1,), line, prepare, stopped=True)


def _marker(name: str, change: Callable[[Sandbox], dict[str, Any]]) -> Fault:
    def prepare(place: Sandbox) -> None:
        rewrite_marker(place.marker(), **change(place))

    return Fault(f"marker: {name}", "directory", prepare=prepare, stopped=True)


def _naming(name: str) -> Callable[[Sandbox], dict[str, Any]]:
    def change(place: Sandbox) -> dict[str, Any]:
        listed = json.loads(place.marker().read_text())["files"]
        return {"files": {**listed, name.format(victim=place.victim): {"bytes": 1, "sha256": "0"}}}

    return change


def _mutated_marker(place: Sandbox) -> None:
    fields = json.loads(place.marker().read_text())
    mutate_fields(fields, place.chance)
    sign(place.marker(), fields)


def _newer_format(place: Sandbox) -> None:
    place.exchange(f"checkpoints/{place.marker().name}", nothing)
    shutil.copy(place.scratch / f"checkpoints_{place.marker().name}", place.marker())
    rewrite_marker(place.marker(), format=2)


def _names_in_the_run_state(place: Sandbox) -> None:
    foreign = {"../../victim/train": -1, "../victim": 0}
    rewrite_run_state(place.marker(), lambda values: values["reported"].update(foreign))


def _mutated_side_file(place: Sandbox) -> None:
    names = ["run.json", "lock", "checkpoints/checkpoint", place.marker().relative_to(place.run)]
    path = place.run / place.chance.choice(names)
    path.write_bytes(mutated(path.read_bytes(), place.chance))


def _mutated_report(place: Sandbox) -> None:
    path = place.run / "run.json"
    fields = json.loads(path.read_text())
    mutate_fields(fields, place.chance, WRONG)
    path.write_text(json.dumps(fields))


def _long_line(place: Sandbox) -> None:
    with open(place.run / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 40, "split": "train", "x": [' + b"[]," * 10_000_000 + b"1]}\n")


def _odd_media(place: Sandbox) -> None:
    record = {"step": 40, "split": "train", "name": SURROGATE, "kind": "image", "files": [NUL, SURROGATE, "../x", 7]}
    (place.run / "media.jsonl").write_text(json.dumps(record) + "\n")


def _settings(make: Callable[[pathlib.Path], Any]) -> Callable[[Sandbox], None]:
    def prepare(place: Sandbox) -> None:
        make(place.scratch / "settings.yaml")
        place.flags.append(f"--config_file={place.scratch}/settings.yaml")

    return prepare


def _foreign_files(place: Sandbox) -> None:
    folder = place.run / "checkpoints"
    for name in ("events.out.tfevents.99.other.1.v2", "ckpt-99.index", "ckpt-98.data-00000-of-00001", "ckpt-40.index.bak",
                 "ckpt-99.commit.new", "model.h5"):  # fmt: skip
        make_bytes(folder / name)
    shutil.copy(sorted((place.run / "train").iterdir())[0], folder / "events.out.tfevents.100.other.1.v2")


def _all_gone(place: Sandbox) -> None:
    for path in (place.run / "checkpoints").glob("ckpt-*"):
        path.unlink()


def _all_damaged(place: Sandbox) -> None:
    for step in (20, 40):
        _damage(place, place.marker(step).with_name(place.chance.choice(CHECKPOINT_FILES).replace("40", str(step))))


def _damage(place: Sandbox, path: pathlib.Path) -> None:
    """Cuts a file short, flips a bit of it, or removes it."""
    content, way = bytearray(path.read_bytes()), place.chance.randrange(3)
    at = place.chance.randrange(len(content))
    if way == 0:
        path.write_bytes(content[:at])
    elif way == 1:
        content[at] ^= 1 << place.chance.randrange(8)
        path.write_bytes(content)
    else:
        path.unlink()


def _damaged(name: str) -> Fault:
    return Fault(
        f"{name} cut short, changed or removed", "directory", stopped=True,
        prepare=lambda place: _damage(place, place.run / "checkpoints" / name),
    )  # fmt: skip


def _nan_scores(place: Sandbox) -> None:
    place.flags.append("--keep_best=max:eval/accuracy")
    for step, score in ((20, float("nan")), (40, None)):
        rewrite_marker(place.marker(step), scores={"eval/accuracy": score})


def _input_output_error(place: Sandbox) -> None:
    """Lets each read of a file fail with EIO, as reading the first page of a process's memory does."""
    path = place.run / "checkpoints" / DATA
    subprocess.run(["mount", "--bind", f"/proc/{os.getpid()}/mem", path], check=True)
    place.undo.callback(subprocess.run, ["umount", path], check=True)


def _unreadable(place: Sandbox) -> None:
    """Starts it as another user, to whom all belongs but a file of the newest checkpoint."""
    path = place.run / "checkpoints" / DATA
    for owned in (place.run, *place.run.rglob("*")):
        os.chown(owned, NOBODY, NOBODY)
    os.chown(path, 0, 0)
    path.chmod(0o600)
    place.order["user"] = NOBODY


CANNOT_READ = r"cannot be read \(.*\), which does not prove that it is damaged; fix its permissions or the file system"
UNREAD = r"--config_file=.* cannot be read: "
FAULTS = [
    *(_replaced(name, make) for name in SIDE_FILES for make in MAKE),
    *(_event_file(make) for make in MAKE),
    *(_checkpoint_file(name, make) for name in CHECKPOINT_FILES for make in MAKE),
    *(_link(name) for name in LINKS),
    *(_folder_link(name) for name in FOLDERS),
    _marker("absolute path", _naming("{victim}/notes")),
    _marker("path outside", _naming("../../victim/notes")),
    _marker("other step", lambda _: {"step": 99}),
    _marker("other types", lambda _: {"files": [], "time": "now"}),
    *(_damaged(name) for name in (*CHECKPOINT_FILES, "checkpoint")),
    Fault("marker: random values, signed", "directory", (0, 1), "install that version", _mutated_marker, stopped=True),
    Fault("marker: a newer format", "directory", (1,), "install that version", _newer_format, stopped=True),
    Fault("run state: names that lead outside", "directory", prepare=_names_in_the_run_state, stopped=True),
    Fault("side file: random bytes", "directory", prepare=_mutated_side_file, stopped=True),
    Fault("run.json: values of other types", "directory", prepare=_mutated_report, stopped=True),
    Fault("a record of 30 MB", "directory", prepare=_long_line, stopped=True),
    Fault("media.jsonl: names that are none", "directory", prepare=_odd_media, stopped=True),
    Fault("settings: nested aliases", "directory", (1,), UNREAD, _settings(lambda path: path.write_text(aliases(9)))),
    Fault("settings: a FIFO", "directory", (1,), UNREAD, _settings(make_fifo)),
    Fault("foreign files in checkpoints/", "directory", prepare=_foreign_files, stopped=True),
    Fault("scores that are not finite", "directory", prepare=_nan_scores, stopped=True),
    Fault("all checkpoints gone", "directory", (1,), GONE, _all_gone, stopped=True, refused=GONE, advice=ADVICE),
    Fault("all checkpoints damaged", "directory", (1,), GONE, _all_damaged, stopped=True, refused=GONE, advice=ADVICE),
    Fault("checkpoints/ removed", "directory", (1,), GONE, lambda place: shutil.rmtree(place.run / "checkpoints"),
          stopped=True, refused=GONE, advice=ADVICE),
    Fault("EIO in the newest checkpoint", "directory", (1,), CANNOT_READ, _input_output_error, stopped=True),
    Fault("a file of another user", "directory", (1,), CANNOT_READ, _unreadable, stopped=True),
]  # fmt: skip

"""Faults of predictions and exports of a run that was trained: kills, second jobs, disks, files of somebody else."""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
from collections.abc import Callable

import lives
from fault import Fault
from sandbox import Sandbox
from tampering import MAKE, mutated


@dataclasses.dataclass(frozen=True)
class Job:
    """Something that is done with a run.

    Attributes:
      name: what it is; the part that its faults concern.
      flags: how it is started.
      folder: where its output is, in the run directory.
      differences: function of its folder after the faults, and of an undisturbed one: what differs, sentences.
    """

    name: str
    flags: tuple[str, ...]
    folder: str
    differences: Callable[[pathlib.Path, pathlib.Path], list[str]]


def _contents(folder: pathlib.Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() and not path.is_symlink() else None
            for path in sorted(folder.rglob("*"))}  # fmt: skip


def _other_pieces(one: pathlib.Path, other: pathlib.Path) -> list[str]:
    """Returns the differences of two folders of predictions, bit by bit, apart from the lock and what was moved aside."""
    ours, theirs = ({name: content for name, content in _contents(folder).items() if name != "_lock" and ".aside" not in name}
                    for folder in (one, other))  # fmt: skip
    return [f"{name} differs" for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]


def _other_exports(one: pathlib.Path, other: pathlib.Path) -> list[str]:
    """Returns the differences of two exports: their files by name, and what the record says of them."""
    ours, theirs = (sorted(_contents(folder)) for folder in (one, other))
    if ours != theirs:
        return [f"the files {ours} in place of {theirs}"]
    records = [json.loads((folder / "export.json").read_text()) for folder in (one, other)]
    return [f"{name} of export.json" for name in ("step", "weights", "checkpoint", "differences", "left_out")
            if records[0][name] != records[1][name]]  # fmt: skip


SMALL = "--predictions_piece=7"
SLOW = "--config.slow_evaluation=0.002"
JOBS = {
    **{
        kind: Job(kind, ("--mode=predict", f"--predictions_format={kind}", SMALL, SLOW), "predictions/eval", _other_pieces)
        for kind in ("jsonl", "tfrecord", "parquet")
    },
    "export": Job("export", ("--mode=export",), "export/step-60", _other_exports),
}  # fmt: skip
PIECES = tuple(kind for kind in JOBS if kind != "export")


def _moment(place: Sandbox, life: lives.Life, *more: str) -> bool:
    return place.await_moment(life, (place.chance.choice((*more, "build", "restore", "predict", "report")),))


def _signal(signum: signal.Signals) -> Callable[[Sandbox, lives.Life], None]:
    def strike(place: Sandbox, life: lives.Life) -> None:
        # Before looplib handles signals, they end a process as they do any other.
        if _moment(place, life, *["start"] * (signum == signal.SIGKILL)):
            life.kill(signum)

    return strike


def _another(place: Sandbox, life: lives.Life) -> None:
    if _moment(place, life):
        place.others.append(life.another())


def _removed(folder: str) -> Callable[[Sandbox, lives.Life], None]:
    def strike(place: Sandbox, life: lives.Life) -> None:
        if _moment(place, life):
            with contextlib.suppress(OSError):
                shutil.rmtree(place.run / folder)

    return strike


def _small_disk(folder: str, size: str) -> Callable[[Sandbox], None]:
    """A file system for the output that has not room for all, and later has."""

    def prepare(place: Sandbox) -> None:
        path = place.run / folder
        path.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], check=True)
        place.at_the_end.callback(subprocess.run, ["umount", "--lazy", path], check=True)
        place.undo.callback(subprocess.run, ["mount", "-o", "remount,size=50m", path], check=True)

    return prepare


def _piece(change: Callable[[Sandbox, pathlib.Path], None]) -> Callable[[Sandbox], None]:
    def prepare(place: Sandbox) -> None:
        change(place, place.chance.choice(sorted((place.run / "predictions" / "eval").glob("piece-*"))))

    return prepare


def _damage(place: Sandbox, path: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    if place.chance.random() < 0.5:
        path.write_bytes(content[: place.chance.randrange(len(content))])
    else:
        content[place.chance.randrange(len(content))] ^= 1 << place.chance.randrange(8)
        path.write_bytes(content)


def _mutated_index(place: Sandbox) -> None:
    path = place.run / "predictions" / "eval" / "_index.json"
    path.write_bytes(mutated(path.read_bytes(), place.chance))


def _link(name: str) -> Callable[[Sandbox], None]:
    def prepare(place: Sandbox) -> None:
        place.exchange(name, lambda path: (path.parent.mkdir(exist_ok=True), path.symlink_to(place.victim)))

    return prepare


def _more_names(folder: str) -> Callable[[Sandbox], None]:
    """Files of somebody else beside the output, which stay."""

    def prepare(place: Sandbox) -> None:
        for name in ("eval.new", "eval.old", "step-60.new", "step-60.old", "step-60.0123456789abcdef.old"):
            (place.run / folder / name).mkdir(parents=True)
            (place.run / folder / name / "export.json").write_text("mine")

        def check() -> None:
            assert len(list((place.run / folder).glob("*/export.json"))) >= 5, "somebody else's files are gone"

        place.at_the_end.callback(check)

    return prepare


LINKED = "is a symbolic link, (and looplib writes and deletes nothing outside of|which an export would replace)"
FULL = r"(No space left|File too large|cannot be written)"
BUSY = r"(is in use by|another job)"
ENDED = r"ended by SIG\w+ .*run the same command (to resume from it|again)"


def _faults(part: str, folder: str, size: str) -> list[Fault]:
    """Those of any job."""
    return [
        *[Fault(f"{part}: SIGKILL", part, (0, -signal.SIGKILL), strike=_signal(signal.SIGKILL))] * 3,
        Fault(f"{part}: SIGTERM", part, (0, 75), ENDED, strike=_signal(signal.SIGTERM)),
        Fault(f"{part}: another one beside", part, (0, 1), BUSY, strike=_another),
        Fault(f"{part}: a link in its place", part, (1,), LINKED, _link(folder), stopped=False),
        Fault(f"{part}: its folder is a link", part, (1,), LINKED, _link(folder.split("/")[0]), stopped=False),
        Fault(f"{part}: files of somebody else beside", part, prepare=_more_names(folder.split("/")[0]), stopped=False),
        *[Fault(f"{part}: a disk that gets full", part, (1,), FULL,
                _small_disk(folder.split("/")[0], size), stopped=False)] * (not os.getuid()),
    ]  # fmt: skip


FAULTS = [
    *_faults("export", JOBS["export"].folder, "16k"),
    *(fault for kind in PIECES for fault in _faults(kind, JOBS[kind].folder, "16k")),
    *(
        fault
        for kind in PIECES
        for fault in (
            Fault(f"{kind}: a piece cut short or changed", kind, prepare=_piece(_damage), stopped=True),
            Fault(f"{kind}: a piece removed", kind, prepare=_piece(lambda place, path: path.unlink()), stopped=True),
            *(Fault(f"{kind}: a piece by {make.__name__}", kind, stopped=True,
                    prepare=_piece(lambda place, path, make=make: (path.unlink(), make(path)))) for make in MAKE),
            Fault(f"{kind}: a mutated index", kind, (0, 1), "remove .*predictions/eval", _mutated_index, stopped=True,
                  refused="remove .*predictions/eval",
                  mend=lambda place: shutil.rmtree(place.run / "predictions" / "eval")),
        )
    ),
]  # fmt: skip

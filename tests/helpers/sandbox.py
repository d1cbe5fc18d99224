"""A run directory with surroundings that a run must not touch."""

import contextlib
import dataclasses
import hashlib
import os
import pathlib
import random
import shutil
import stat
import time
from collections.abc import Callable
from typing import Any

import lives
from faults.console_test import fill


@dataclasses.dataclass(frozen=True)
class Entry:
    """Returns the note of a snapshot about a file, a directory or a link."""

    mode: int
    owner: tuple[int, int]
    size: int
    content: str  # the checksum of a file, the target of a link


@dataclasses.dataclass
class Sandbox:
    """A folder that holds a run directory, `run`, and beside it a victim, a working directory and one for `TMPDIR`.

    Attributes:
      folder: all of it.
      chance: the source of what is random.
      flags: added to the command line of the struck start.
      order: how the struck start is started, see `lives`.
      model_dir: how the struck start names the run directory.
      has_console: whether all that it prints arrives in its log.
      undo: what takes the faults away, before the next start.
      at_the_end: what is to be done after the last start.
      others: processes that were started beside the struck one; each has to end with 0, or 1 and a sentence.
    """

    folder: pathlib.Path
    chance: random.Random
    flags: list[str] = dataclasses.field(default_factory=list)
    order: dict[str, Any] = dataclasses.field(default_factory=dict)
    model_dir: str = ""
    has_console: bool = True
    undo: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    at_the_end: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    others: list[lives.Life] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        for name in ("victim/train/events.out.tfevents.1.host.1.v2", "victim/eval/x", "victim/checkpoints/ckpt-20.index",
                     "victim/metrics.jsonl", "victim/notes", "victim/run.json", "metrics.jsonl", "checkpoint"):  # fmt: skip
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"this is {name}")
        (self.folder / "victim" / "notes").chmod(0o600)
        for name in ("work", "tmp"):
            (self.folder / name).mkdir()
        (self.folder / "tmp").chmod(0o1777)
        self.scratch = self.folder / "scratch"  # what faults need
        self.scratch.mkdir()
        self.run = self.folder / "run"
        self.model_dir = str(self.run)
        self.order |= {
            "directory": str(self.folder / "work"),
            "environment": {"TMPDIR": str(self.folder / "tmp")},
        }

    @property
    def victim(self) -> pathlib.Path:
        """A directory outside, with files like those of a run."""
        return self.folder / "victim"

    def marker(self, step: int = 40) -> pathlib.Path:
        """The marker of a checkpoint."""
        return self.run / "checkpoints" / f"ckpt-{step}.commit"

    def outside(self) -> dict[str, Entry]:
        """A snapshot of all that is outside of the run directory, by path."""
        found = {}
        for path in [self.folder, *sorted(self.folder.rglob("*"))]:
            if path.is_relative_to(self.scratch) or path.is_relative_to(self.run):
                continue
            status, content = path.lstat(), ""
            if stat.S_ISLNK(status.st_mode):
                content = os.readlink(path)
            elif stat.S_ISREG(status.st_mode):
                content = hashlib.sha256(path.read_bytes()).hexdigest()
            size = 0 if stat.S_ISDIR(status.st_mode) else status.st_size
            found[str(path.relative_to(self.folder))] = Entry(
                status.st_mode, (status.st_uid, status.st_gid), size, content
            )
        return found

    def replace(self, name: str, make: Callable[[pathlib.Path], None]) -> None:
        """Puts something else in the place of a file or folder of the run, which is lost."""
        path = self.run / name
        path.parent.mkdir(exist_ok=True, parents=True)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        make(path)

    def exchange(self, name: str, make: Callable[[pathlib.Path], None]) -> None:
        """Puts something else in the place of a file or folder of the run, until `undo`."""
        path, kept = self.run / name, self.scratch / name.replace("/", "_")
        there = os.path.lexists(path)
        if there:
            path.rename(kept)
        make(path)

        def put_back() -> None:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
            if there:
                kept.rename(path)

        self.undo.callback(put_back)

    def console(self) -> pathlib.Path:
        """Makes a pipe the console of the struck start; returns it."""
        fifo = self.scratch / "console"
        os.mkfifo(fifo)
        self.order["console"], self.has_console = str(fifo), False
        reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        self.reader = contextlib.ExitStack()
        self.reader.callback(os.close, reader)
        self.undo.enter_context(self.reader)
        self.reader_number = reader
        return fifo

    def fill_console(self) -> None:
        """Makes a pipe that is full the console of the struck start."""
        fill(self.console())

    def await_moment(self, life: lives.Life, phases: tuple[str, ...]) -> bool:
        """Waits for a random moment of some phases; returns whether the life has not ended."""
        least, end = self.chance.randrange(2, 40), time.monotonic() + 60
        what, number = "", 0
        while not life.ended() and time.monotonic() < end:
            number, what = life.note()
            if what in phases and (number >= least or what not in ("step", "evaluate")):
                break
            time.sleep(0.0005)
        return not life.ended(self.chance.random() * 0.02)

"""Faults of a run while it goes: its console, its name, signals, errors, its directory, other processes, disks."""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import lives
from fault import Fault, nothing
from sandbox import Sandbox

# The console.


def _head(place: Sandbox, life: lives.Life) -> None:
    """Reads a line and leaves, as `| head -1`."""
    while not life.ended() and not select.select([place.reader_number], [], [], 0.05)[0]:
        pass
    place.reader.close()


def _reader_dies(place: Sandbox, life: lives.Life) -> None:
    place.await_moment(life, ("step", "save", "evaluate", "report"))
    place.reader.close()


def _full(streams: tuple[int, ...]) -> Callable[[Sandbox], None]:
    def prepare(place: Sandbox) -> None:
        place.order |= {"console": "/dev/full", "streams": streams}
        place.has_console = 2 not in streams

    return prepare


def _closed(place: Sandbox) -> None:
    place.order["closed"], place.has_console = True, False


CONSOLES = [
    Fault("console: 2>/dev/full", "console", prepare=_full((2,))),
    Fault("console: >/dev/full", "console", prepare=_full((1,))),
    Fault("console: both on /dev/full", "console", prepare=_full((1, 2))),
    Fault("console: closed", "console", prepare=_closed),
    Fault("console: the reader dies", "console", prepare=lambda place: nothing(place.console()), strike=_reader_dies),
    Fault("console: | head -1", "console", prepare=lambda place: nothing(place.console()), strike=_head),
    Fault("console: nobody reads", "console", prepare=lambda place: place.fill_console()),
    Fault("console: ASCII, with a metric λ", "console", prepare=lambda place: place.order.update(encoding="ascii")),
]  # fmt: skip


# What surrounds the process.


def _ordered(**order: Any) -> Callable[[Sandbox], None]:
    return lambda place: place.order.update(order)


def _without_home(place: Sandbox) -> None:
    place.order["environment"] |= dict.fromkeys(("HOME", "LOOPLIB_CACHE", "XDG_CACHE_HOME"))


def _dated(place: Sandbox) -> None:
    date = place.chance.choice([1.0, 4102444800.0])  # of 1970 or 2100
    for path in place.run.rglob("*"):
        os.utime(path, (date, date), follow_symlinks=False)


SURROUNDINGS = [
    *(Fault(f"umask {umask:03o}", "surroundings", prepare=_ordered(umask=umask)) for umask in (0o000, 0o077)),
    Fault("48 open files at most", "surroundings", prepare=_ordered(limits={"NOFILE": 48})),
    Fault("no standard input", "surroundings", prepare=_ordered(no_input=True)),
    Fault("no home directory", "surroundings", prepare=_without_home),
    Fault("all files are of 1970 or 2100", "surroundings", prepare=_dated, stopped=True),
]


# How the run directory is named.


def _named(name: str) -> Callable[[Sandbox], None]:
    def prepare(place: Sandbox) -> None:
        place.model_dir = name.format(run=place.run)

    return prepare


def _by_link(place: Sandbox) -> None:
    (place.scratch / "link").symlink_to(place.run)
    place.model_dir = str(place.scratch / "link")


def _at_home(place: Sandbox) -> None:
    place.order["environment"]["HOME"] = str(place.scratch)
    place.model_dir = "~/../run/"


PATTERN = "in its name, which TensorFlow interprets as a file pattern; use a directory name without it"
NAMES = [
    Fault("file://", "name", prepare=_named("file://{run}")),
    Fault("relative model_dir", "name", prepare=_named("../run")),
    Fault("model_dir is a link", "name", prepare=_by_link),
    Fault("~/../run/", "name", prepare=_at_home),
    *(Fault(f"{letter} in model_dir", "name", (1,), PATTERN, _named(f"{{run}}{letter}a")) for letter in "[]\\"),
]


# What happens at a random moment.

PHASES = ("build", "step", "save", "evaluate", "report")


def _signal(signum: signal.Signals) -> Callable[[Sandbox, lives.Life], None]:
    def strike(place: Sandbox, life: lives.Life) -> None:
        phases = (*PHASES, "start") if signum == signal.SIGKILL else PHASES
        chosen = place.chance.choice(phases)
        if place.await_moment(life, (chosen,)):
            life.kill(signum)

    return strike


def _suspended(place: Sandbox, life: lives.Life) -> None:
    if place.await_moment(life, (place.chance.choice(PHASES),)):
        life.kill(signal.SIGSTOP)
        time.sleep(place.chance.uniform(0.2, 1.5))
        life.kill(signal.SIGCONT)


def _to_the_directory(change: Callable[[Sandbox], None]) -> Callable[[Sandbox, lives.Life], None]:
    """Changes the directory while steps run."""

    def strike(place: Sandbox, life: lives.Life) -> None:
        if place.await_moment(life, ("step",)):
            with contextlib.suppress(FileNotFoundError):
                change(place)

    return strike


def _move(place: Sandbox) -> None:
    elsewhere = place.scratch / "elsewhere"
    place.run.rename(elsewhere)

    def put_back() -> None:
        if place.run.is_dir():
            place.run.rmdir()  # fails if anything was written there
        elsewhere.rename(place.run)

    place.undo.callback(put_back)


def _remove(place: Sandbox) -> None:
    shutil.rmtree(place.run, ignore_errors=True)  # a file may come while this goes on
    if place.run.is_dir():
        shutil.rmtree(place.run)


def _make_again(place: Sandbox) -> None:
    _remove(place)
    place.run.mkdir()


def _replace_lock(place: Sandbox) -> None:
    (place.run / "lock").unlink()
    (place.run / "lock").write_text("")


def _second_training(place: Sandbox, life: lives.Life) -> None:
    if place.await_moment(life, ("step",)):
        place.others.append(life.another())


def _evaluation(*flags: str) -> Callable[[Sandbox, lives.Life], None]:
    def strike(place: Sandbox, life: lives.Life) -> None:
        if place.await_moment(life, ("step", "save", "evaluate")):
            place.others.append(life.another(*flags))

    return strike


def _flag(flag: str) -> Callable[[Sandbox], None]:
    def prepare(place: Sandbox) -> None:
        place.flags.append(flag.format(step=place.chance.randrange(2, 60)))

    return prepare


def _small_files(place: Sandbox) -> None:
    place.order["limits"] = {"FSIZE": place.chance.choice([100_000, 1_000_000])}


def _small_disk(place: Sandbox) -> None:
    """A file system for the run directory that has room for one checkpoint or two, and later for all."""
    place.run.mkdir()
    size = place.chance.choice(["1m", "2m", "3m"])
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place.run], check=True)
    place.at_the_end.callback(subprocess.run, ["umount", "--lazy", place.run], check=True)
    place.undo.callback(subprocess.run, ["mount", "-o", "remount,size=50m", place.run], check=True)


FULL = r"(could not be saved|No space left|File too large|cannot be written to).*"
OTHERS = "(was moved or removed|was removed or replaced).*; (restore it|stop the other)|, so .*; (restore|stop)"
MOMENTS = [
    *(
        Fault(signum.name, "moment", (0, 75), r"ended by SIG\w+ .*run the same command (to resume from it|again)",
              strike=_signal(signum))
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU, signal.SIGUSR1, signal.SIGUSR2)
    ),
    *[Fault("SIGKILL", "moment", (0, -signal.SIGKILL), strike=_signal(signal.SIGKILL))] * 3,
    Fault("SIGSTOP, SIGCONT", "moment", strike=_suspended),
    Fault("lock removed", "moment", (0, 1), OTHERS, strike=_to_the_directory(lambda p: (p.run / "lock").unlink())),
    Fault("lock replaced", "moment", (0, 1), OTHERS, strike=_to_the_directory(_replace_lock)),
    Fault("directory renamed", "moment", (0, 1), OTHERS, strike=_to_the_directory(_move)),
    Fault("directory removed", "moment", (0, 1), OTHERS, strike=_to_the_directory(_remove)),
    Fault("directory made again", "moment", (0, 1), OTHERS, strike=_to_the_directory(_make_again)),
    Fault("error in a step", "moment", (0, 1), "this example is broken; fix .*(resume from|no checkpoint was saved)",
          _flag("--config.fail_at={step}")),
    Fault("NaN in a batch", "moment", (0, 1), "not finite.*check the data", _flag("--config.nan_at={step}")),
    Fault("a second training", "moment", strike=_second_training),
    Fault("an evaluation beside", "moment", strike=_evaluation("--mode=eval")),
    Fault("continuous_eval beside", "moment", strike=_evaluation("--mode=continuous_eval", "--eval_timeout=3")),
    Fault("files may not grow (RLIMIT_FSIZE)", "moment", (0, 1), FULL, _small_files),
]  # fmt: skip
DISK = Fault("a disk that gets full", "moment", (1,), FULL, _small_disk, stopped=False)
FAULTS = [*CONSOLES, *SURROUNDINGS, *NAMES, *MOMENTS]

"""What one process of looplib orders of another one beside its command line, and what that answers: files of JSON.

The file of the order is named by one environment variable, `LOOPLIB_ORDER`. Files beside it have the answer. Importing
this file is cheap.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import stat
import tempfile
from typing import Any, TypeVar

from looplib.base import files, folders
from looplib.base.decoding import decode, parse_json
from looplib.base.messages import gist
from looplib.errors import FlagError, ReplayError

VARIABLE = "LOOPLIB_ORDER"
_MOST_BYTES, _MOST_ANSWER = 1 << 16, 1 << 30
_ANSWER, _NEWS = "answer", "news"
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class ReplayOrder:
    """A step of a run to train up to, from the checkpoint in the process's own run directory.

    Attributes:
      directory: the run directory, which is only read.
      step: the step to look at; the last step of a trace.
      trace: whether to answer with a `Trace` of each step, in place of a look at one.
      eager: whether to run the step only eagerly, once.
      debug: whether to stop in it, in Python's debugger.
      save: the file for the batch, `.npz`; "" for none.
      exact: whether the run had the engine of the replay, so that all bits have to be those that it reported.
      batch_size: the run's global batch size in these steps; None if it is not known.
      weights: a checkpoint for whose weights to compute the statistics of batch normalization, in place of a look at a
        step; "" for none.
      arrays: the file for these, `.npz`.
    """

    directory: str
    step: int
    trace: bool = False
    eager: bool = False
    debug: bool = False
    save: str = ""
    exact: bool = True
    batch_size: int | None = None
    weights: str = ""
    arrays: str = ""


@dataclasses.dataclass(frozen=True)
class PreflightOrder:
    """A check whether the steps of a program would run on other devices.

    Attributes:
      platform: "TPU" or "GPU".
      cores: TPU cores, or GPUs, that the global batch is divided over.
    """

    platform: str
    cores: int


@dataclasses.dataclass(frozen=True)
class Order:
    """What a process does beside what its command line says; by default nothing.

    Attributes:
      example_checksums: whether the metrics of a training have a checksum of its examples.
      perturbation: a number that decides how the last bits of initial weights are changed; 0 for unchanged.
      until: the step at which a training ends, saved; 0 for its own end. What writes to places outside of the run
        directory leaves that out.
      note: what `run.json` has about the start.
      tells_batch: whether the process tells the size of its global batch, and of its first report.
      tpu_starts: how often it has started again since the checkpoint of `tpu_step`, because a TPU was lost.
      tpu_step: the step of the checkpoint of the last of these starts.
      replay: a replay in place of what the command does.
      preflight: a preflight in its place.
    """

    example_checksums: bool = False
    perturbation: int = 0
    until: int = 0
    note: str = ""
    tells_batch: bool = False
    tpu_starts: int = 0
    tpu_step: int = 0
    replay: ReplayOrder | None = None
    preflight: PreflightOrder | None = None

    def give(self, path: str) -> dict[str, str]:
        """Writes the order into a new file that only this user reads; returns the environment variable that names it.

        Args:
          path: the file. What processes answer stands in files whose names begin with this one.
        """
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
            json.dump(dataclasses.asdict(self), file)
        return {VARIABLE: path}


def current() -> Order:
    """Returns the order of this process; one of nothing if nobody has ordered anything.

    Raises:
      UsageError: if the environment names no file of an order that this user alone can read and write.
    """
    if not (path := os.environ.get(VARIABLE)):
        return Order()
    try:
        with files.open_regular(path) as file:
            found = os.fstat(file.fileno())
            if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
                raise ValueError("others may read or write it")
            content = parse_json(file.read(_MOST_BYTES))
        if isinstance(content, dict):  # which may leave out what it does not order
            content = {**dataclasses.asdict(Order()), **content}
            if unknown := content.keys() - {field.name for field in dataclasses.fields(Order)}:
                raise ValueError(f"{min(unknown)!r:.50} is no part of an order")
        return decode(Order, content, strict=True)
    except (OSError, ValueError) as error:
        raise FlagError(
            f"{VARIABLE} is {path!r:.200} in the environment ({gist(error)}); expected a file of JSON that looplib has "
            "written for this process, of mode 0600; unset the variable"
        ) from error


def answer(content: Any) -> None:
    """Answers the order of this process.

    Args:
      content: a dataclass.
    """
    _write(_ANSWER, json.dumps(dataclasses.asdict(content)))


def tell(text: str) -> None:
    """Tells who has ordered this process what it is doing."""
    _write(_NEWS, text)


def tell_batch(size: int | None = None) -> None:
    """Tells the size of the global batch; without a number, that the first report is there."""
    _write("reported" if size is None else "batch", f"{size or ''}")


def _write(kind: str, content: str) -> None:
    files.write_whole(f"{os.environ[VARIABLE]}.{kind}", content, durable=False)


def is_answered(path: str) -> bool:
    """Returns whether there is an answer to an order."""
    return os.path.exists(f"{path}.{_ANSWER}")


def answer_to(path: str, kind: type[_T]) -> _T:
    """Returns the answer to an order.

    Args:
      path: the file of the order.
      kind: the class of the answer, a dataclass.

    Raises:
      UsageError: if it is none.
    """
    try:
        return decode(kind, parse_json(files.read_text(f"{path}.{_ANSWER}", _MOST_ANSWER)), strict=True)
    except (OSError, ValueError) as error:
        raise ReplayError(
            f"the program has answered something else than expected ({gist(error)}); try again"
        ) from error


def news(path: str) -> str:
    """Returns what a process has told last about an order."""
    with contextlib.suppress(OSError, ValueError):
        return files.read_text(f"{path}.{_NEWS}")
    return "starting"


def batch(path: str) -> int | None:
    """Returns the size of the global batch that a process has told; None if it has told none."""
    with contextlib.suppress(OSError, ValueError):
        size = int(files.read_text(f"{path}.batch", most=20))
        return size if size > 0 else None
    return None


def has_reported(path: str) -> bool:
    """Returns whether a process has told that its first report is there."""
    return os.path.exists(f"{path}.reported")


def renew(order: Order) -> None:
    """Gives this process another order, for the program that it is about to become."""
    before, own = os.environ.get(VARIABLE, ""), f"looplib-order-{os.getpid()}-"
    os.environ.update(order.give(os.path.join(tempfile.gettempdir(), f"{own}{secrets.token_hex(4)}.json")))
    if os.path.basename(before).startswith(own):
        with contextlib.suppress(OSError):
            folders.remove(*os.path.split(before))

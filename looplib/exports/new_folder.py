"""A folder that appears as a whole: filled beside its place, and moved there when it is complete."""

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator

from looplib.base import files, folders
from looplib.errors import RunDirectoryError
from looplib.run.directory import CONTENTS

_REPLACED = "replaced"  # what is moved out of the way, in a temporary directory
_MARK = "looplib"  # a file in a temporary directory, whose name somebody else's may have too


@contextlib.contextmanager
def new_folder(path: str) -> Iterator[str]:
    """Makes a temporary directory beside a local path, to be renamed when complete; removes it at the end.

    Those that killed processes have left beside the path are removed too.
    """
    place, name = os.path.split(path)
    os.makedirs(place, exist_ok=True)
    for other in os.listdir(place):
        left = os.path.join(place, other)
        if not files.is_new_name(other, name) or (held := _hold(left)) is None:
            continue
        found = os.listdir(left)  # of one that is held, and so not removed meanwhile by its own process
        if _MARK in found or all(files.is_new_name(part, _MARK) for part in found):
            if os.path.lexists(os.path.join(left, _REPLACED)) and not os.path.lexists(path):
                folders.move(left, _REPLACED, place, name)  # that process has not put anything there
            folders.remove(place, other)
        os.close(held)
    held = None
    while held is None:  # else another process has taken it for one of a killed process
        new = files.new_name(path)
        os.mkdir(new)
        held = _hold(new)
    try:
        files.write_whole(os.path.join(new, _MARK), "")
        yield folders.make_folder(new, "content")
    finally:
        folders.remove(place, os.path.basename(new))
        os.close(held)


def check_free(directory: str, model_dir: str | None, own: str, splits: Iterable[str]) -> None:
    """Refuses a directory in a folder of the run directory that the run writes.

    Args:
      directory: a local path, where something is to be written.
      model_dir: the run directory; None for none.
      own: the folder in it whose folders may be written.
      splits: the names of the evaluators, which have folders of their names.

    Raises:
      UsageError: if it lies in such a folder.
    """
    if not model_dir:
        return
    parts = os.path.relpath(os.path.realpath(directory), os.path.realpath(model_dir)).split(os.sep)
    written = {name.partition("/")[0] for name in CONTENTS if "/" in name} | {*splits}
    if parts[0] in {*written, os.curdir} and not (parts[0] == own and len(parts) > 1):
        raise RunDirectoryError(
            f"{directory} is in {os.path.join(model_dir, parts[0])}, which the run itself writes; name another "
            f"directory, such as {os.path.join(model_dir, own, 'mine')}"
        )


def put_in_place(new: str, path: str, aside: str) -> None:
    """Gives a folder its name; what has the name is moved aside before, and back if the new one cannot be moved.

    Args:
      new: the folder.
      path: where it is to be.
      aside: what `new_folder` has yielded for this path; the next `new_folder` moves back what a kill leaves there.
    """
    (place, name), left = os.path.split(path), os.path.dirname(aside)
    if os.path.lexists(path):
        folders.move(place, name, left, _REPLACED)
    try:
        folders.move(*os.path.split(new), place, name)
    except BaseException:
        if not os.path.lexists(path):
            folders.move(left, _REPLACED, place, name)
        raise


def make_all_durable(place: str) -> None:
    """Asks the operating system to write a folder, and all that is in it, to the disk."""
    for folder, _, names in os.walk(place):
        for name in (*names, ""):
            files.make_durable(os.path.join(folder, name))


@contextlib.contextmanager
def alone(folder: str) -> Iterator[None]:
    """Lets one process at a time change the names in a local directory; the others wait."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _hold(path: str) -> int | None:
    """Returns an open directory that no other process holds; None if one does, or it is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = files.is_at(descriptor, path)
    except OSError as error:
        free = not isinstance(error, BlockingIOError)  # else a file system without locks
    if free:
        return descriptor
    os.close(descriptor)
    return None

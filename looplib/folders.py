"""Folders of a run directory: made, emptied and filled by plain names, never through a symbolic link.

What removes, moves or makes something in looplib does it here, so that nothing outside of a run's own directory can be
meant, whatever the files in it say.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterator

from looplib import files
from looplib.errors import UsageError, is_utf8

_MARK = "looplib"  # a file in a temporary directory, whose name somebody else's may have too
_UNFINISHED = 3600.0  # seconds after which nobody writes a small file any more
_SEPARATORS = frozenset("/\\\0")


def inside(folder: str, name: str) -> str:
    """Returns the path of a name in a folder: the one function for a name that a file says.

    Args:
      folder: the folder.
      name: anything.

    Raises:
      ValueError: if it is not the plain name of something in the folder, but leads elsewhere, or no name at all.
    """
    if not is_name(name):
        raise ValueError(f"{name!r:.100} is not the plain name of a file")
    return os.path.join(folder, name)


def is_name(name: object) -> bool:
    """Returns whether a value is the plain name of something in a folder, on any file system."""
    if not isinstance(name, str) or name in ("", ".", "..") or not _SEPARATORS.isdisjoint(name):
        return False
    return is_utf8(name) and len(name.encode()) <= files.LONGEST_NAME


def make_folder(root: str, *names: str) -> str:
    """Makes a folder below a directory, and returns its path.

    Args:
      root: the directory, made if missing; it may be a link.
      names: of the folders from there on, plain names.

    Raises:
      ValueError: if a name is not a plain one.
      UsageError: if one of the folders is a symbolic link, which would lead elsewhere, or not a directory.
      OSError, tf.errors.OpError: if it cannot be made.
    """
    path = root
    if not files.is_remote(root):
        os.makedirs(os.path.realpath(root), exist_ok=True)  # it may be a link to one that is not there yet
    for name in names:
        path = inside(path, name)
        if not files.is_remote(root):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)
            check_folder(path)
    if files.is_remote(root):
        files.gfile().makedirs(path)
    return path


def check_folder(path: str) -> None:
    """Checks what is at a path, if there is something: a directory, and not a link to one.

    Raises:
      UsageError: if it is something else.
    """
    if not files.is_remote(path) and os.path.islink(path):
        raise UsageError(
            f"{path} is a symbolic link, and looplib writes and deletes nothing outside of a run directory; put a "
            "directory there, or make model_dir itself the link"
        )
    if files.exists(path) and not files.is_directory(path):
        raise UsageError(f"{path} must be a directory in a run directory; move the file away")


def remove(folder: str, name: str) -> None:
    """Removes what has a name in a folder, if there is anything: a file, a link, a directory with all that is in it.

    No link is followed.

    Args:
      folder: the folder.
      name: a plain name; see `inside`.

    Raises:
      ValueError: if it is not one.
      OSError, tf.errors.OpError: if it cannot be removed.
    """
    path = inside(folder, name)
    if files.is_remote(folder):
        if files.gfile().isdir(path):
            files.gfile().rmtree(path)
        elif files.gfile().exists(path):
            files.gfile().remove(path)
        return
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            try:
                shutil.rmtree(path)
            except RecursionError:
                raise OSError(f"{path} has folders that are nested too deep to be removed; remove it by hand") from None
        else:
            os.unlink(path)


def move(folder: str, name: str, to: str, new_name: str | None = None) -> None:
    """Moves what has a name in a folder into another one; a file that has the name there is replaced.

    Args:
      folder: the folder.
      name: a plain name; see `inside`.
      to: the other folder.
      new_name: the plain name there; None for `name`.

    Raises:
      ValueError: if it is not one.
      OSError, tf.errors.OpError: if it cannot be moved.
    """
    path, place = inside(folder, name), inside(to, name if new_name is None else new_name)
    if files.is_remote(folder):
        files.gfile().rename(path, place, overwrite=True)
    else:
        os.rename(path, place)


def move_aside(folder: str, name: str, prefix: str = "") -> str:
    """Moves what has a name in a folder out of the way, to `<prefix><name>.aside` there; returns its new path.

    Args:
      folder: the folder.
      name: a plain name; see `inside`.
      prefix: put before the name, so that readers of the folder pass over it.

    Raises:
      ValueError: if it is not a plain name.
      OSError, tf.errors.OpError: if it cannot be moved.
    """
    place = files.free_name(inside(folder, f"{prefix}{name}.aside"))
    move(folder, name, folder, os.path.basename(place))
    return place


@contextlib.contextmanager
def new_folder(path: str) -> Iterator[str]:
    """Makes a directory beside a path, for what is to get that name when it is complete; removes it at the end.

    Those that killed processes have left beside the path are removed too.

    Args:
      path: on a local file system.
    """
    place, name = os.path.split(path)
    os.makedirs(place, exist_ok=True)
    for other in os.listdir(place):
        left = os.path.join(place, other)
        if not files.is_new_name(other, name) or (held := _hold(left)) is None:
            continue
        found = os.listdir(left)  # of one that is held, and so not removed meanwhile by its own process
        if _MARK in found or all(files.is_new_name(part, _MARK) for part in found):
            remove(place, other)
        os.close(held)
    held = None
    while held is None:  # else another process has taken it for one of a killed process
        new = files.new_name(path)
        os.mkdir(new)
        held = _hold(new)
    try:
        files.write_whole(os.path.join(new, _MARK), "")
        yield make_folder(new, "content")
    finally:
        remove(place, os.path.basename(new))
        os.close(held)


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


def remove_unfinished(folder: str, seconds: float = _UNFINISHED) -> None:
    """Removes the files that killed processes have begun to write in a local directory.

    Args:
      folder: the directory.
      seconds: how old they have to be; by default so old that no process writes them any more.
    """
    for name in filter(files.is_new_name, os.listdir(folder) if os.path.isdir(folder) else []):
        with contextlib.suppress(OSError):  # written, or removed meanwhile
            found = os.lstat(os.path.join(folder, name))
            if stat.S_ISREG(found.st_mode) and time.time() - found.st_mtime >= seconds:
                remove(folder, name)

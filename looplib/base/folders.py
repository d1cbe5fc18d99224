"""Folders of a run directory: made, emptied and filled by plain names, never through a symbolic link.

What removes, moves or makes something in looplib does it here, so that nothing outside of a run's own directory can be
meant, whatever the files in it say.
"""

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable

from looplib.base import files
from looplib.base.messages import is_utf8
from looplib.errors import RunDirectoryError

_UNFINISHED = 3600.0  # seconds after which nobody writes a small file any more
_SEPARATORS = frozenset("/\\\0")
_notes: dict[str, Callable[[str], None]] = {}  # by directory, see `note_deletions`


def inside(folder: str, name: str) -> str:
    """Returns the path of a name in a folder; `ValueError` if it is not a plain name, and so leads elsewhere."""
    if not is_name(name):
        raise ValueError(f"{name!r:.100} is not the plain name of a file")
    return os.path.join(folder, name)


def is_name(name: object) -> bool:
    """Returns whether a value is the plain name of something in a folder, on any file system."""
    if not isinstance(name, str) or name in ("", ".", "..") or not _SEPARATORS.isdisjoint(name):
        return False
    return is_utf8(name) and len(name.encode()) <= files.LONGEST_NAME


def make_folder(root: str, *names: str) -> str:
    """Makes a folder below a directory, by plain names, and returns its path. The directory may be a link.

    Raises:
      ValueError: if a name is not a plain one.
      UsageError: if one of the folders is a symbolic link, which would lead elsewhere, or not a directory.
      OSError: if it cannot be made.
    """
    path = root
    os.makedirs(os.path.realpath(root), exist_ok=True)  # it may be a link to one that is not there yet
    for name in names:
        path = inside(path, name)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
        check_folder(path)
    return path


def check_folder(path: str) -> None:
    """Raises `UsageError` if what is at a path is not a directory, or a link to one."""
    if os.path.islink(path):
        raise RunDirectoryError(
            f"{path} is a symbolic link, and looplib writes and deletes nothing outside of a run directory; put a "
            "directory there, or make model_dir itself the link"
        )
    if os.path.exists(path) and not os.path.isdir(path):
        raise RunDirectoryError(f"{path} must be a directory in a run directory; move the file away")


def remove(folder: str, name: str) -> None:
    """Removes what has a plain name in a folder, if there is anything: a file, a link, a directory with its content.

    No link is followed. Raises like `inside`, and what the file system does.
    """
    path = inside(folder, name)
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            try:
                shutil.rmtree(path)
            except RecursionError:
                raise OSError(f"{path} has folders that are nested too deep to be removed; remove it by hand") from None
        else:
            os.unlink(path)


def note_deletions(directory: str, note: Callable[[str], None]) -> None:
    """Has `note` called with the name, in a directory, of whatever `delete` is about to remove there."""
    _notes[os.path.realpath(directory)] = note


def delete(path: str) -> None:
    """Tells that a run is about to remove a file, or all whose paths begin so, by a decision of its own.

    A copy of the directory loses these too, and nothing else: a file may be gone for any other reason.
    """
    for directory, note in list(_notes.items()):
        real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        if real.startswith(directory + os.sep):
            note(real[len(directory) + 1 :])


def move(folder: str, name: str, to: str, new_name: str | None = None) -> None:
    """Moves what has a plain name in a folder into another one, there also by another name; a file there is replaced.

    Raises like `inside`, and what the file system does.
    """
    os.rename(inside(folder, name), inside(to, name if new_name is None else new_name))


def link(folder: str, name: str, to: str) -> None:
    """Gives a file a second name in another folder, which stays when the first is removed; raises as `move` does."""
    os.link(inside(folder, name), inside(to, name), follow_symlinks=False)


def move_aside(folder: str, name: str, prefix: str = "") -> str:
    """Moves what has a plain name in a folder out of the way, to `<prefix><name>.aside` there; returns its new path.

    Readers of the folder pass over a name with the prefix. Raises as `move` does.
    """
    place = files.free_name(inside(folder, f"{prefix}{name}.aside"))
    move(folder, name, folder, os.path.basename(place))
    return place


def remove_unfinished(folder: str, seconds: float = _UNFINISHED) -> None:
    """Removes the files that killed processes have begun to write in a local directory.

    By default those so old that no process writes them any more.
    """
    names = list(filter(files.is_new_name, os.listdir(folder) if os.path.isdir(folder) else []))
    for name in names:
        with contextlib.suppress(OSError):  # written, or removed meanwhile
            found = os.lstat(os.path.join(folder, name))
            if stat.S_ISREG(found.st_mode) and (not seconds or _now(folder) - found.st_mtime >= seconds):
                remove(folder, name)


def _now(folder: str) -> float:
    """Returns the time by the clock that dates the files of a folder, which may be that of a server."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"now")
        file.flush()
        return os.fstat(file.fileno()).st_mtime

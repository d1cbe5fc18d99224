"""LaunchFolder: the temporary folder of a launch and of its processes, which is removed with them."""

import contextlib
import fcntl
import os
import stat
import tempfile
from types import TracebackType

from looplib.base import files, folders

_PREFIX, _LOCK, _TEMPORARY = "looplib-launch-", "lock", "tmp"


class LaunchFolder:
    """A temporary folder, made and removed by a `with` block, which also removes those of launches that were killed.

    A launch holds a lock on a file in its folder, and so does each of its processes that inherits `lock`: a folder is
    left over once all of them have ended.

    Attributes:
      path: the folder.
      temporary: a folder in it, for the temporary files of the processes. What they leave when they are killed, such as
        the files of AutoGraph, is removed with it.
      lock: the descriptor of the lock.
    """

    def __enter__(self) -> "LaunchFolder":
        _remove_left_over(tempfile.gettempdir())
        self.path = tempfile.mkdtemp(prefix=_PREFIX)
        self._fill()
        return self

    def restore(self) -> None:
        """Makes again what somebody has removed, such as a cleaner of temporary files; `OSError` if that fails."""
        if not files.is_at(self.lock, os.path.join(self.path, _LOCK)) or not os.path.isdir(self.temporary):
            before = self.lock
            folders.remove(*os.path.split(self.path))
            self._fill()
            os.close(before)

    def _fill(self) -> None:
        self.temporary = folders.make_folder(self.path, _TEMPORARY)
        path = os.path.join(self.path, _LOCK)
        self.lock = os.open(f"{path}.new", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        folders.move(self.path, f"{_LOCK}.new", self.path, _LOCK)  # nobody finds the file before it is locked

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with contextlib.suppress(OSError):
            folders.remove(*os.path.split(self.path))
        os.close(self.lock)


def _remove_left_over(top: str) -> None:
    """Removes the folders of this user's launches that have ended without removing them."""
    names: list[str] = []
    with contextlib.suppress(OSError):  # it may be writable only
        names = [name for name in os.listdir(top) if name.startswith(_PREFIX)]
    for name in names:
        with contextlib.suppress(OSError):  # locked, without a lock, or removed meanwhile
            found = os.lstat(os.path.join(top, name))
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            lock = os.open(os.path.join(top, name, _LOCK), os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                folders.remove(top, name)
            finally:
                os.close(lock)

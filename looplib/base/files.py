"""Files of a run directory: written atomically and durably, read with bounds, never through a symbolic link.

A run directory may come from somebody else, so its contents are not trusted: a name may be a link to a file outside of
it, a FIFO that never ends, or larger than memory. All paths are local: a run in an object store works in a local copy.
"""

import contextlib
import errno
import fcntl
import hashlib
import itertools
import math
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from typing import BinaryIO

from looplib.base.messages import gist, with_cure
from looplib.errors import FileError

_MOST_BYTES = 1 << 24  # of a file that is read into memory as a whole
_BLOCK = 1 << 22
_TICK = 0.1  # seconds between two looks at a lock
_PATTERN = frozenset("[]\\*?\n")
_REMOTE = re.compile("(?!file:)[A-Za-z][A-Za-z0-9.+-]*://")
_LIKE_REMOTE = re.compile("[A-Za-z][A-Za-z0-9.+-]*:[:/]")  # also "s3:/bucket" and "simplecache::s3://bucket"
LONGEST_NAME = 255  # bytes, of most file systems
_LONGEST_PATH = 3500  # bytes; Linux allows 4,095, and the names in a run directory need some of them
# The errors that prove a damaged file; any other error may be temporary.
_LACKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_DAMAGE = (ValueError, KeyError, TypeError, FileNotFoundError, IsADirectoryError, NotADirectoryError)


class NotRegularError(ValueError):
    """A name that should be a file is a symbolic link, a directory or a device."""


class CannotReadError(FileError):
    """A file cannot be read, which does not prove that it is damaged."""


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is a URL, such as "gs://bucket/run"."""
    return _REMOTE.match(os.fspath(path)) is not None


def resolve(path: str | os.PathLike[str], what: str) -> str:
    """Returns the absolute form of a path that a user gives, so that a later `chdir` does not change its meaning.

    The path may begin with "~" or "file:///" and need not exist; `what` names it in the `UsageError` of a path that
    cannot be, or of a directory that this user may not read.
    """
    try:
        return _resolved(os.fspath(path))
    except (OSError, ValueError, TypeError) as error:
        raise FileError(f"{what} is {path!r:.200}, which cannot be used: {with_cure(error)}") from error


def _resolved(path: str) -> str:
    """Returns `resolve` of a path; the errors have the reason alone."""
    if not isinstance(path, str) or not path or "\0" in path:
        raise ValueError("expected the name of a file or directory, as text without a null character")
    try:
        os.fsencode(path.encode().decode())
    except UnicodeEncodeError:  # TensorFlow writes no other names
        raise ValueError("it is not UTF-8, or the locale is not; use another name, or set PYTHONUTF8=1") from None
    path = path.removeprefix("file://") if path.startswith("file:///") else path
    if _LIKE_REMOTE.match(path):
        raise ValueError("it looks like a URL; write a local path with ./ or file:/// before it, and a URL with ://")
    if path.startswith("~"):
        path = os.path.expanduser(path) if os.environ.get("HOME") != "" else path
    if path.startswith("~"):
        raise ValueError("there is no such home directory; set HOME, or put ./ before the name if it begins with ~")
    try:
        path = os.path.abspath(path)
    except FileNotFoundError:
        raise ValueError("the current directory was removed; change to another one, or use an absolute path") from None
    if len(os.fsencode(path)) > _LONGEST_PATH or max(map(len, os.fsencode(path).split(b"/"))) > LONGEST_NAME:
        raise ValueError(f"it has more than {_LONGEST_PATH:,} bytes, or a name in it more than {LONGEST_NAME}")
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(os.stat(path).st_mode) and not os.access(path, os.R_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "this user may not read the directory; fix its permissions")
    return path


def refuse_patterns(what: str, path: str) -> None:
    """Raises `UsageError` for a path that TensorFlow refuses, or takes for a pattern."""
    if found := sorted(_PATTERN & set(path)):
        raise FileError(
            f"{what} {path!r} has {' and '.join(map(ascii, found))} in its name, which TensorFlow interprets as a file "
            "pattern; use a directory name without it"
        )


def proves_damage(error: Exception) -> bool:
    """Returns whether a read error proves that a file is damaged, and not only that it cannot be read now."""
    import tensorflow as tf

    return isinstance(error, (*_DAMAGE, tf.errors.NotFoundError, tf.errors.DataLossError))


def fails_here(error: BaseException | None, *places: str) -> bool:
    """Returns whether an error tells of this machine alone, and so nothing of data, or of what a store has.

    It has no space, memory or open files left, or cannot use a file or folder in one of `places`.
    """
    while error is not None:
        of_tensorflow = type(error).__module__.startswith("tensorflow.")
        if isinstance(error, MemoryError) or (of_tensorflow and any(os.strerror(one) in str(error) for one in _LACKS)):
            return True
        if isinstance(error, OSError):
            name = os.path.abspath(error.filename) if isinstance(error.filename, str) else ""
            if error.errno in _LACKS or any(f"{name}/".startswith(f"{os.path.abspath(one)}/") for one in places):
                return True
        error = error.__cause__ or error.__context__
    return False


def open_regular(path: str) -> BinaryIO:
    """Opens a file to read bytes, without following a link and without waiting.

    Raises:
      NotRegularError: if it is not a regular file.
      OSError: if it cannot be opened.
    """
    name = os.path.basename(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise NotRegularError(f"{name} is a symbolic link or a socket, and not a file") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegularError(f"{name} is a directory or a device, and not a file")
    return os.fdopen(descriptor, "rb")


def read_text(path: str, most: int = _MOST_BYTES) -> str:
    """Returns the text of a small file in UTF-8, with a limit in bytes.

    Raises:
      ValueError: if it is not a regular file, too large, or not UTF-8.
      OSError: if it cannot be read.
    """
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{os.path.basename(path)} has more than {most:,} bytes")
    return content.decode()


def write_whole(path: str, content: str | bytes, durable: bool = True) -> None:
    """Writes a small file so that a reader, or the next start after a crash, sees all of it or the old one.

    A symbolic link of that name is replaced, not followed. Several processes may write it, and one of them is the last.
    It is on the disk when this returns; if not `durable`, call `make_durable`.
    """
    content = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    new = new_name(path)
    with _naming(path, new):
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                if durable:
                    os.fsync(descriptor)
            os.rename(new, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(new)
            raise
    if durable:
        make_durable(os.path.dirname(path) or ".")


def write_named(path: str, content: str | bytes) -> bool:
    """Writes an output that a user names: through a link, and into a device, a FIFO or a file that is open here.

    Returns whether it is now a file with this content alone, and so not, for example, standard output.
    """
    if os.path.exists(path) and (not os.path.isfile(path) or is_open_here(path)):
        with _naming(path), open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_CLOEXEC), "wb") as file:
            file.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
        return False
    write_whole(os.path.realpath(path), content)
    return True


@contextlib.contextmanager
def _naming(path: str, new: str | None = None) -> Iterator[None]:
    """Makes an `OSError` in the `with` block name the file, not its temporary name `new`."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename not in (None, new):
            raise
        raise OSError(error.errno, error.strerror, path) from None


def new_name(path: str) -> str:
    """Returns an unused temporary name beside a path; a long name is cut."""
    place, name = os.path.split(path)
    return os.path.join(place, f"{name[:50]}.{secrets.token_hex(8)}.new")


def is_new_name(name: str, of: str | None = None) -> bool:
    """Returns whether a name without a directory is looplib's temporary name for the file `of`."""
    match = re.fullmatch(r"(.*)\.[0-9a-f]{16}\.new", name, re.DOTALL)
    return match is not None and (of is None or of[:50] == match[1])


@contextlib.contextmanager
def appending(path: str, wait: float = math.inf) -> Iterator[BinaryIO]:
    """Opens a file to append bytes, made if missing, while other processes that append, or use `rewriting`, wait.

    Raises:
      UsageError: if it is not a regular file.
      TimeoutError: if another process has it for longer than `wait` seconds.
      OSError: if it cannot be written.
    """
    with _alone(path, wait) as file:
        yield file


@contextlib.contextmanager
def rewriting(path: str) -> Iterator[None]:
    """Keeps other processes from appending to a file while it is read and replaced."""
    if not os.path.lexists(path):
        yield
        return
    with _alone(path):
        yield


@contextlib.contextmanager
def _alone(path: str, wait: float = math.inf) -> Iterator[BinaryIO]:
    end, at_once = time.monotonic() + wait, fcntl.LOCK_NB if wait < math.inf else 0
    while True:
        with _naming(path), open_to_append(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | at_once)
            except BlockingIOError:
                if time.monotonic() > end:
                    raise TimeoutError(f"another process has locked {path} for {wait:g} s") from None
                time.sleep(_TICK)
                continue
            except OSError:  # a file system without locks
                pass
            if is_at(file.fileno(), path):  # if not, it was replaced while this process waited
                yield file
                return


def open_to_append(path: str) -> BinaryIO:
    """Opens a local file to append bytes, made if missing; `UsageError` for a link or what is no regular file."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise FileError(f"{path} is a symbolic link, a directory or a socket; move it away") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileError(f"{path} is a device or a FIFO, and not a file; move it away")
    return os.fdopen(descriptor, "ab")


def is_at(descriptor: int, path: str) -> bool:
    """Returns whether an open file is still the one at that path."""
    try:
        there = os.lstat(path)
    except FileNotFoundError:
        return False
    own = os.fstat(descriptor)
    return (own.st_dev, own.st_ino) == (there.st_dev, there.st_ino)


def is_open_here(path: str) -> bool:
    """Returns whether this process has a file open."""
    with contextlib.suppress(OSError):
        own = os.stat(path)
        for number in os.listdir("/dev/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.path.samestat(os.fstat(int(number)), own):
                    return True
    return False


def make_durable(path: str) -> None:
    """Asks the operating system to write a local file or directory to the disk, so that it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with _naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_writable(directory: str) -> None:
    """Makes a directory, and raises `UsageError` with the reason if the first save could not write to it."""
    try:
        os.makedirs(os.path.realpath(directory), exist_ok=True)  # it may be a link to one that is not there yet
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        sentence = f"model_dir {directory} cannot be written to: {with_cure(error, 'use another directory')}"
        raise FileError(sentence) from error


def check_temporary() -> None:
    """Raises `UsageError` if there is no space for temporary files, without which TensorFlow converts no step."""
    try:
        with tempfile.TemporaryFile() as file:
            file.write(bytes(1 << 20))
            file.flush()
    except OSError as error:
        raise FileError(
            f"temporary files cannot be written ({gist(error)}); free space there, or set TMPDIR"
        ) from error


def safe_name(name: str) -> str:
    """Returns up to 80 characters with which a file can be named, from the name of a metric or an evaluator."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", name)[:80]


def free_name(path: str) -> str:
    """Returns a path that does not exist: `path`, or `path` with a number after it."""
    numbered = (f"{path}.{number}" if number else path for number in itertools.count())
    return next(name for name in numbered if not os.path.lexists(name))


def measure(path: str) -> tuple[int, str]:
    """Returns the bytes of a file, and their SHA-256; raises as `open_regular` does."""
    with open_regular(path) as file:
        digest = _sha256(file)
        return file.tell(), digest


def difference(path: str, size: int, sha256: str | None) -> str:
    """Returns a proven difference between a file and what was written, as the end of a sentence; "" for none.

    A `sha256` of None compares the size alone.

    Raises:
      CannotReadError: if it cannot be read now, which does not prove damage.
    """
    name = os.path.basename(path)
    try:
        with open_regular(path) as file:
            # Read first, because an error of that proves nothing; no more than that, if the file is larger.
            equal = sha256 is None or _sha256(file, size) == sha256
            found = os.fstat(file.fileno()).st_size
            if found != size:
                return f"{name} has {found} bytes instead of {size}"
    except (ValueError, OSError) as error:
        if proves_damage(error):
            return f"{name} cannot be read: {gist(error)}"
        raise cannot_read(path, error) from error
    return "" if equal else f"the content of {name} differs from the saved content"


def cannot_read(path: str, error: Exception) -> CannotReadError:
    """Returns the error of a file that cannot be read now."""
    return CannotReadError(
        f"{path} cannot be read ({gist(error)}), which does not prove that it is damaged; fix its permissions or "
        "the file system and run the same command again"
    )


def _sha256(file: BinaryIO, most: float = math.inf) -> str:
    digest, left = hashlib.sha256(), most
    while left > 0 and (block := file.read(_BLOCK)):
        digest.update(block)
        left -= len(block)
    return digest.hexdigest()

"""Object stores: s3://, gs://, az://, memory:// and whatever else fsspec has a driver for."""

import contextlib
import copy
import dataclasses
import email.utils
import functools
import glob
import hashlib
import logging as loggers
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from absl import logging

from looplib.base import files, folders
from looplib.base.messages import gist, with_cure
from looplib.errors import FileError, PluginError, StoreError
from looplib.masks import MASK, masked_text

_ABSENT = (FileNotFoundError, NotADirectoryError)  # what a walk through folders finds in place of one
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
_FINAL = (PermissionError, IsADirectoryError, NotADirectoryError, ValueError, NotImplementedError)
# Errors that say that the credentials are missing or not accepted any more: the names of the drivers' classes, and the
# codes that stores answer with. An answer without a text, as to HEAD, has the number in place of the code.
_KINDS = frozenset((
    "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound",
    "TokenRetrievalError", "UnauthorizedSSOTokenError", "SSOTokenLoadError", "DefaultCredentialsError", "RefreshError",
    "ClientAuthenticationError", "CredentialUnavailableError",
))  # fmt: skip
_CODES = frozenset((
    "ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired", "InvalidToken",
    "InvalidAccessKeyId", "InvalidClientTokenId", "SignatureDoesNotMatch", "RequestTimeTooSkewed",
    "AuthenticationFailed", "400", "401",
))  # fmt: skip
_LEAST = 2.0  # seconds from one driver to the next; each reads the drivers' files, and costs a tenth of a second


class Driver:
    """The driver of fsspec for a URL.

    Args:
      url: such as "s3://bucket/run".
      seconds: that an answer may take, which includes the time to send a file; of S3.

    Attributes:
      root: the path of the URL, as the driver has it.
      answered: whether the store has accepted the credentials.

    Raises:
      PluginError: if the driver is not installed.
      StoreError: if the URL cannot be used.
    """

    def __init__(self, url: str, seconds: int) -> None:
        scheme, _, place = url.partition("://")
        if not place.strip("/"):
            raise StoreError(f"{url} names no bucket; expected a URL such as {scheme}://bucket/run")
        if f"{MASK}@" in (shown := masked_text(url)):  # a driver would show it in its errors
            raise StoreError(f"{shown} has a user or a password; give it where the driver looks for credentials")
        self._url, self._seconds, self._lock, self.answered = url, seconds, threading.Lock(), False
        self.files, self.root = _found(url, seconds)
        self._made = time.monotonic()

    def renew(self) -> None:
        """Makes the driver again, which then reads the files that have credentials: a driver reads some only once."""
        with self._lock:
            if time.monotonic() - self._made < _LEAST:
                return
            self._made = time.monotonic()
            try:
                self.files, _ = _found(self._url, self._seconds)
            except Exception as error:  # such as of a file that is being written; the next attempt reads it again
                line = "%s: the credentials cannot be read: %s"
                logging.log_every_n_seconds(logging.WARNING, line, 60, self._url, gist(error))


def _found(url: str, seconds: int) -> tuple[Any, str]:
    scheme = url.partition("://")[0]
    try:
        import fsspec

        gcsfs = loggers.getLogger("gcsfs")
        if gcsfs.level == loggers.NOTSET:  # it logs a stack trace for each error that it raises
            gcsfs.setLevel(loggers.CRITICAL)
        # Listings are asked for each time: others write there too. Of two layers that retry, s3fs and botocore, one
        # stays on, so that a call ends within seconds.
        config = {"retries": {"total_max_attempts": 1}, "read_timeout": seconds}
        options = {"config_kwargs": config} if scheme in ("s3", "s3a") else {}
        files, root = fsspec.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True, **options)
        # A walk through folders leaves out those that cannot be listed, which would be taken for empty ones.
        walk = "_walk" if files.async_impl else "walk"
        if found := getattr(files, walk, None):
            setattr(files, walk, functools.partial(found, on_error=_raise_unless_absent))
        return files, root
    except ImportError as error:
        extra = _EXTRAS.get(scheme)
        cure = f": pip install 'looplib[{extra}]'" if extra else "; install what is missing"
        raise PluginError(f"{url} needs a driver that is not installed ({gist(error)}){cure}") from error
    except Exception as error:  # each driver has errors of its own
        raise StoreError(f"{url} cannot be used: {gist(error)}") from error


def _raise_unless_absent(error: Exception) -> None:
    if not isinstance(error, _ABSENT):
        raise error


def is_final(error: Exception) -> bool:
    """Returns whether it makes no sense to try again, unless `refuses_credentials`."""
    return isinstance(error, _FINAL) or str(error).startswith("Forbidden: ")  # as gcsfs says it


def refuses_credentials(error: Exception) -> bool:
    """Returns whether other credentials would help: there are none, or they have expired, or were replaced."""
    names = {kind.__name__ for kind in type(error).__mro__}
    answer = getattr(error.__cause__, "response", None)  # of botocore, below an error of s3fs
    code = answer.get("Error", {}).get("Code") if isinstance(answer, dict) else getattr(error, "code", None)
    status = getattr(error, "status_code", getattr(error, "status", None))  # of Azure and of HTTP
    return not _KINDS.isdisjoint(names) or str(code) in _CODES or status == 401


def protocol_of(driver: Any) -> str:
    """Returns "s3" or "gs" for their drivers; else ""."""
    protocols = driver.protocol if isinstance(driver.protocol, (tuple, list)) else (driver.protocol,)
    return next((name for name in ("s3", "gs") if name in protocols), "")


_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 15.0  # seconds between two attempts
_PAUSES = (0.3, 0.7, 1.5)  # seconds before it is believed that there is no bucket
_MOST_OBJECTS = 500_000  # of a listing
_MOST_BYTES = 1 << 20  # of a small object
ADVICE = "; check the address, the credentials and the network, and run the same command again"
PATIENCE = 120.0  # seconds that a start waits for a store that is down
_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True)
class StoredFile:
    """An object, as a listing describes it.

    Attributes:
      bytes: its size.
      version: a text that differs after the object was written again: an ETag, a generation or a time.
    """

    bytes: int
    version: str


class Store:
    """The objects below one URL.

    Every call is tried again with growing pauses while the store is down, and counted in `requests`.

    Args:
      url: such as "s3://bucket/run".
      gone: returns whether to give up early, as at the end of the process.
      seconds: that an answer may take, see `Driver`.

    Raises:
      PluginError: if the driver is not installed.
      StoreError: if the URL cannot be used.
    """

    def __init__(self, url: str, gone: Callable[[], bool] = lambda: False, seconds: int = 15) -> None:
        scheme, separator, place = url.partition("://")
        self.url, self.requests, self._gone = scheme.lower() + separator + place.rstrip("/"), 0, gone
        self._has_written = False
        self._driver = Driver(self.url, seconds)
        self._root = self._driver.root

    @property
    def _files(self) -> Any:
        """The driver of fsspec, which is another one once credentials were renewed."""
        return self._driver.files

    def below(self, name: str) -> "Store":
        """Returns the objects below a folder, asked by the same driver."""
        found = copy.copy(self)
        found.url, found._root, found.requests = f"{self.url}/{name}", f"{self._root}/{name}", 0
        return found

    def ask(
        self,
        what: Callable[[], _Result],
        doing: str,
        patience: float = PATIENCE,
        before: Callable[[], object] = lambda: None,
        local: str | None = None,
    ) -> _Result:
        """Calls a function of the driver until it succeeds, or for `patience` seconds; `before` before each attempt.

        Raises:
          FileNotFoundError, FileExistsError: as the store answers.
          StoreError: if the store refuses, or does not answer in time.
          FileError: if this machine lacks something for it, or cannot use `local`, a file or folder that it needs.
        """
        end, pause = time.monotonic() + patience, _FIRST_PAUSE
        while True:
            before()
            self.requests += 1
            try:
                found = what()
                self._driver.answered = True
                return found
            except Exception as error:  # each driver has errors of its own
                if files.fails_here(error, *filter(None, [local])):
                    raise FileError(
                        f"this machine cannot {doing} of {self.url}: {local + ': ' if local else ''}"
                        f"{with_cure(error, 'free memory')}; then run the same command again"
                    ) from error
                if isinstance(error, (FileNotFoundError, FileExistsError)):
                    self._driver.answered = True
                    raise
                said, refused = gist(error), refuses_credentials(error)
                said = f"the credentials are missing, have expired or are not valid ({said})" if refused else said
                # A run whose credentials expire waits for new ones; a start tells that it has none.
                final = not self._driver.answered if refused else is_final(error)
                if refused and not final:
                    self._driver.renew()
                if final and self._driver.answered:
                    self._tell(said, refused)  # a run tries again what raises this
                if final or self._gone() or time.monotonic() + pause > end:
                    raise StoreError(f"{self.url} cannot be reached to {doing}: {said}{ADVICE}") from error
                self._tell(said, refused)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _tell(self, said: str, refused: bool) -> None:
        """Logs that a request is tried again; once a minute."""
        if refused:
            line = "%s: %s; renew them where the driver finds them: they are read again, and requests tried again"
            logging.log_every_n_seconds(logging.WARNING, line, 60, self.url, said)
        else:
            logging.log_every_n_seconds(logging.WARNING, "%s: %s; tried again", 60, self.url, said)

    def listed(self, below: str = "", patience: float = PATIENCE) -> dict[str, StoredFile]:
        """Returns the objects below a prefix, by name, without those that no local file can be; a request per 1,000.

        Raises:
          StoreError: if there are too many, or no bucket.
        """
        root = f"{self._root}/{below}".rstrip("/")
        # A folder without objects is empty, and no error.
        found = self._in_a_bucket(
            lambda: self.ask(lambda: self._files.find(root, detail=True), "list it", patience), lambda: True
        )
        if len(found) > _MOST_OBJECTS:
            raise StoreError(f"{self.url} has more than {_MOST_OBJECTS:,} objects; name a folder below it")
        start = len(self._root.strip("/")) + 1
        names = {path.strip("/")[start:]: entry for path, entry in found.items() if entry.get("type") == "file"}
        return {
            name: StoredFile(int(entry["size"]), _version(entry))
            for name, entry in names.items()
            if all(map(folders.is_name, name.split("/")))
        }

    def read_with_age(self, name: str, patience: float = PATIENCE) -> tuple[bytes, float | None]:
        """Returns the content of a small object, and how many seconds ago it was written, by the clock of the store.

        It needs no local file, which a full disk could not hold. The age is None where the driver does not tell what
        time it is in the store.
        """

        def read() -> tuple[bytes, float | None]:
            if protocol_of(self._files) == "s3":
                return _read_from_s3(self._files, self._at(name))
            return self._files.cat_file(self._at(name))[:_MOST_BYTES], None

        return self.ask(read, f"read {name}", patience)

    @property
    def conditional(self) -> bool:
        """Whether `read_range` notices by itself that an object was replaced."""
        return protocol_of(self._files) in ("s3", "gs")

    def look_up(self, name: str, patience: float = PATIENCE) -> StoredFile:
        """Returns what the store says of one object; `FileNotFoundError` if there is none."""
        found = self.ask(lambda: self._files.info(self._at(name)), f"look up {name}", patience)
        if found.get("type") != "file":
            raise IsADirectoryError(name)
        return StoredFile(int(found["size"]), _version(found))

    def changed(self, name: str) -> float:
        """Returns when an object was written, in seconds since the epoch; `StoreError` if the driver does not tell."""
        return self.ask(lambda: self._files.modified(self._at(name)).timestamp(), f"look up the time of {name}")

    def matching(self, pattern: str, patience: float = PATIENCE) -> dict[str, StoredFile]:
        """Returns the objects of a folder whose names match a pattern, by name; a request per 1,000 of the folder."""
        if any("**" in part and part != "**" for part in pattern.split("/")):
            raise StoreError(
                f"{pattern!r} has ** beside other characters; expected ** as a folder of its own, or one *"
            )
        full = f"{glob.escape(self._root)}/{pattern}"
        found = self.ask(lambda: self._files.glob(full, detail=True), f"list {pattern}", patience)
        start = len(self._root.strip("/")) + 1
        return {
            path.strip("/")[start:]: StoredFile(int(entry["size"]), _version(entry))
            for path, entry in sorted(found.items())
            if entry.get("type") == "file"
        }

    def read_range(self, name: str, start: int, stop: int, version: str, patience: float = PATIENCE) -> bytes:
        """Returns a range of bytes of an object.

        Raises:
          FileNotFoundError: if it is gone, or, of stores that are `conditional`, has another version.
          StoreError: if the store refuses, or does not answer in time.
        """
        return self.ask(lambda: self._range(self._at(name), start, stop, version), f"read {name}", patience)

    def _range(self, path: str, start: int, stop: int, version: str) -> bytes:
        protocol = protocol_of(self._files)
        try:
            if protocol == "s3":
                condition = {"Range": f"bytes={start}-{stop - 1}", "IfMatch": f'"{version}"'}
                found, _ = _read_from_s3(self._files, path, None, **condition)
            else:
                condition = {"generation": version} if protocol == "gs" else {}
                found = self._files.cat_file(path, start=start, end=stop, **condition)
        except OSError as error:
            code = getattr(error.__cause__, "response", {}).get("Error", {}).get("Code")
            if code in ("PreconditionFailed", "412"):
                raise FileNotFoundError(f"{path} was replaced") from error
            raise
        if len(found) == stop - start:
            return found
        if not self.conditional:
            raise FileNotFoundError(f"{path} was replaced by a shorter one")
        raise OSError(f"{len(found)} bytes came in place of {stop - start}")

    def fetch(self, name: str, path: str, patience: float = PATIENCE) -> None:
        """Copies an object into a local file."""
        folder = os.path.dirname(path)
        self.ask(lambda: self._files.get_file(self._at(name), path), f"read {name}", patience, local=folder)

    def write(self, name: str, content: bytes, patience: float = PATIENCE) -> None:
        """Writes a small object, in place of one of that name."""
        self._write(lambda: self._files.pipe_file(self._at(name), content), name, patience)

    def put(
        self, path: str, name: str, patience: float = PATIENCE, before: Callable[[], object] = lambda: None
    ) -> None:
        """Copies a local file into an object, in place of one of that name; `FileNotFoundError` if it is gone.

        What `before` raises, which is called before each attempt, is raised.
        """
        try:
            self._write(lambda: self._files.put_file(path, self._at(name)), name, patience, before, path)
        except (StoreError, FileError):
            os.stat(path)
            raise

    def create(self, name: str, content: bytes, patience: float = PATIENCE) -> None:
        """Writes a small object that must not exist, by the store's own conditional write; else `FileExistsError`."""
        self._write(lambda: self._files.pipe_file(self._at(name), content, mode="create"), name, patience)

    def _write(
        self,
        what: Callable[[], object],
        name: str,
        patience: float,
        before: Callable[[], object] = lambda: None,
        path: str | None = None,
    ) -> None:
        def is_here() -> bool:
            return path is None or os.path.exists(path)

        def attempt() -> None:
            try:
                what()
            except FileNotFoundError as error:
                if not self._has_written or not is_here():
                    raise
                raise ConnectionError(str(error)) from error  # the bucket was there, and nobody removes it for a moment

        self._in_a_bucket(lambda: self.ask(attempt, f"write {name}", patience, before, path), is_here)
        self._has_written = True

    def _in_a_bucket(self, ask: Callable[[], _Result], is_here: Callable[[], bool]) -> _Result:
        """Returns what `ask` does; a store that does not know the bucket is asked some more times."""
        for pause in (*_PAUSES, None):
            try:
                return ask()
            except FileNotFoundError as error:
                if pause is None or not is_here():
                    raise StoreError(
                        f"{self.url} cannot be used: {gist(error)}; make the bucket, or correct the address"
                    ) from error
            time.sleep(pause)
        raise AssertionError

    def delete(
        self, names: Iterable[str], patience: float = PATIENCE, before: Callable[[], object] = lambda: None
    ) -> None:
        """Deletes objects; one that is not there is no error. For `before` see `put`."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self.ask(lambda name=name: self._files.rm_file(self._at(name)), f"delete {name}", patience, before)

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"


def _read_from_s3(
    driver: Any, path: str, most: int | None = _MOST_BYTES, **condition: str
) -> tuple[bytes, float | None]:
    """Returns the content of an object, and its age; `cat_file` of s3fs takes no condition, and tells no time."""
    import fsspec.asyn

    bucket, key, _ = driver.split_path(path)

    async def read() -> tuple[bytes, float | None]:
        answer = await driver._call_s3("get_object", Bucket=bucket, Key=key, **condition)
        times = [answer["ResponseMetadata"]["HTTPHeaders"].get(name) for name in ("date", "last-modified")]
        async with answer["Body"] as body:
            return await body.read(most), _seconds_between(*times)

    return fsspec.asyn.sync(driver.loop, read)


def _seconds_between(now: str | None, then: str | None) -> float | None:
    """Returns the seconds between two times as HTTP writes them; None if one of them is missing, or no time."""
    with contextlib.suppress(TypeError, ValueError):
        seconds = email.utils.parsedate_to_datetime(now) - email.utils.parsedate_to_datetime(then)
        return max(0.0, seconds.total_seconds())
    return None


def _version(entry: dict[str, Any]) -> str:
    for key in ("ETag", "generation", "etag", "LastModified", "last_modified", "mtime", "created"):
        if entry.get(key):
            return str(entry[key]).strip('"')
    return ""


def cache_directory() -> str:
    """Returns the directory for what can be found again at some cost: `LOOPLIB_CACHE`, or one of the user's.

    Raises:
      FileError: if there is none, such as without a home directory.
    """
    user = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return files.resolve(os.environ.get("LOOPLIB_CACHE") or os.path.join(user, "looplib"), "the cache directory")


def cache(kind: str, url: str) -> str:
    """Returns a local directory for what is at a URL, below `cache_directory`."""
    key = hashlib.sha256(url.encode()).hexdigest()[:16]
    return os.path.join(cache_directory(), kind, key, files.safe_name(url.rpartition("/")[2]))

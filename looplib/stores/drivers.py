"""The driver of a store, which fsspec finds for a URL, and what its errors mean."""

import functools
import logging as loggers
import threading
import time
from typing import Any

from absl import logging

from looplib.base.messages import gist
from looplib.errors import PluginError, StoreError
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


def protocol(driver: Any) -> str:
    """Returns "s3" or "gs" for their drivers; else ""."""
    protocols = driver.protocol if isinstance(driver.protocol, (tuple, list)) else (driver.protocol,)
    return next((name for name in ("s3", "gs") if name in protocols), "")

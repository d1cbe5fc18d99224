"""Where a sweep keeps its trials: Optuna's storage, in a SQLite file in `--dir` or in the database of `--storage`."""

import contextlib
import dataclasses
import os
import re
import sqlite3
import time
import warnings

import optuna
import sqlalchemy
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from looplib.base import files, folders
from looplib.base.console import printable
from looplib.base.messages import gist
from looplib.errors import PluginError, SweepError
from looplib.masks import masked

FILE = "sweep.db"
GRACE = 120  # seconds without a sign of life of a process, after which others take over its trials
BEAT = 10  # seconds between two signs of life
STORAGE_ERRORS = (SQLAlchemyError, optuna.exceptions.OptunaError)
_EXAMPLE = "postgresql+psycopg://USER@HOST/DATABASE"
# Bounds of a file that is read, which may come from somebody else.
_MOST_BYTES, _MOST_TRIALS, _MOST_SECONDS = 1 << 28, 100_000, 60.0
_BESIDE = ("-journal", "-wal", "-shm")  # endings of the files that SQLite keeps beside a database
_OF_SUPER_JOURNAL = bytes.fromhex("d9d505f920a163d7")  # at the end of a journal that names another file, to be removed


@dataclasses.dataclass(frozen=True)
class Database:
    """A database that several processes share.

    Attributes:
      url: SQLAlchemy's form of its URL.
      study: the name of the sweep there.
    """

    url: sqlalchemy.URL
    study: str

    @property
    def shown(self) -> str:
        """What a user calls the study, without a password."""
        return f"the study {self.study!r} in {self.url.set(query={}).render_as_string(hide_password=True)}"


def parse(text: str | None, study: str | None) -> Database | None:
    """Returns the database of `--storage` and `--study`; None if the sweep has a file of its own.

    Raises:
      SweepError: if `text` is not the URL of a database, or `study` is not a name.
    """
    if text is None:
        if study is not None:
            raise SweepError(f"--study is the name of a sweep in --storage; give that too (--storage={_EXAMPLE})")
        return None
    study = "sweep" if study is None else study
    if not re.fullmatch(r"[\w.: /-]{1,100}", study):
        raise SweepError(f"--study is {study[:100]!r}; expected up to 100 letters, digits, spaces and -_.:/")
    try:
        url = sqlalchemy.make_url(text)
        url.get_dialect()
    except (ArgumentError, ValueError, ImportError):  # whose messages may have the password
        raise SweepError(
            f"--storage is no URL of a database that SQLAlchemy knows; expected one such as {_EXAMPLE}"
        ) from None
    masked([text, {"password": url.password, **url.query}])  # so that no message has one from now on
    return Database(url, study)


def check(database: Database) -> None:
    """Checks that a database answers.

    Raises:
      PluginError: if the driver is not installed.
      SweepError: if it does not answer.
    """
    url = database.url
    try:
        sqlalchemy.create_engine(url).connect().close()
    except ImportError as error:
        needed = "'looplib[postgresql]'" if url.drivername == "postgresql+psycopg" else error.name or "it"
        raise PluginError(
            f"--storage={url.drivername}:// needs a driver that cannot be imported ({gist(error)}); install it with "
            f"pip install {needed}"
        ) from error
    except (SQLAlchemyError, TypeError, ValueError, OSError) as error:
        raise SweepError(
            f"{database.shown} cannot be used ({printable(gist(cause_of(error)))}); check the URL of --storage, the "
            "password and the network"
        ) from error


def open_shared(database: Database) -> optuna.storages.RDBStorage:
    """Returns Optuna's storage in a database, in which trials have heartbeats."""
    text = database.url.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}")  # Optuna formats it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # heartbeats are an experimental part of Optuna
        options = {"pool_pre_ping": True}
        return optuna.storages.RDBStorage(text, options, heartbeat_interval=BEAT, grace_period=GRACE)


def open_file(path: str) -> optuna.storages.RDBStorage:
    """Returns Optuna's storage in a SQLite file, which is made if it is not there.

    Raises:
      ValueError, sqlite3.Error: if the file is not the database of a sweep, or cannot be read at a bounded cost.
      OSError: if it cannot be read.
    """
    if os.path.lexists(path):
        _check_file(path)
    else:
        for ending in _BESIDE:  # of a database that was removed
            folders.remove(os.path.dirname(path), f"{FILE}{ending}")
    # A URL could not name each path.
    return optuna.storages.RDBStorage("sqlite://", {"creator": lambda: sqlite3.connect(path, check_same_thread=False)})


def _check_file(path: str) -> None:
    for ending in ("", *_BESIDE):
        if ending and not os.path.lexists(f"{path}{ending}"):
            continue
        with files.open_regular(f"{path}{ending}") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - len(_OF_SUPER_JOURNAL)))
            if size > _MOST_BYTES:
                raise ValueError(f"{FILE}{ending} has {size:,} bytes; expected at most {_MOST_BYTES:,}")
            if ending == "-journal" and file.read() == _OF_SUPER_JOURNAL:
                raise ValueError(f"{FILE}{ending} names a file to be removed")
    end = time.monotonic() + _MOST_SECONDS
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.set_progress_handler(lambda: time.monotonic() > end, 100_000)
        found = dict(database.execute("SELECT name, type FROM sqlite_master").fetchall())
        if others := [name for name, kind in found.items() if kind not in ("table", "index")]:
            raise ValueError(f"it has {others[0]!r:.50}, which is no table")
        if found and "studies" not in found and "version_info" not in found:  # the tables that are made first
            raise ValueError("it has tables of another program")
        if (problem := database.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise ValueError(problem)
        if "trials" in found:
            (trials,) = database.execute("SELECT count(*) FROM trials").fetchone()
            if trials > _MOST_TRIALS:
                raise ValueError(f"it has {trials:,} trials; expected at most {_MOST_TRIALS:,}")


def cause_of(error: BaseException) -> BaseException:
    """Returns the error that led to one of Optuna's, which do not say what is wrong."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error

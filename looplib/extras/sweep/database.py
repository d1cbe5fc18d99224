"""The database of a sweep on several machines: opened by a URL, and checked before any trial starts."""

import dataclasses
import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import optuna
import sqlalchemy
from sqlalchemy import BigInteger, Column, Integer, String
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from looplib.console import printable
from looplib.errors import PluginError, SweepError
from looplib.extras.sweep.study import cause_of
from looplib.masks import masked
from looplib.messages import gist

_EXAMPLE = "postgresql+psycopg://USER@HOST/DATABASE"
_LONGEST_NAME = 100  # characters
_ATTEMPTS = 5  # to make the tables, which several machines may do at the same time
_PAUSE = 0.5  # seconds between two attempts to connect
# Seconds, and milliseconds in `tcp_user_timeout`, after which a server that vanished is noticed.
_OF_LIBPQ = {
    "connect_timeout": 5,
    "tcp_user_timeout": 5_000,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
}
_OPTIONS = {"psycopg": _OF_LIBPQ, "psycopg2": _OF_LIBPQ, "pymysql": {"connect_timeout": 5}}
# Which machine has a trial: see `looplib.extras.sweep.leases`.
LEASES = sqlalchemy.Table(
    "looplib_leases",
    sqlalchemy.MetaData(),
    Column("study_id", Integer, primary_key=True, autoincrement=False),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("owner", String(16), nullable=False),
    Column("beat", BigInteger, nullable=False),
)


@dataclasses.dataclass(frozen=True)
class Database:
    """The database of a sweep on several machines.

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
    """Returns the database of `--storage` and `--study`; None if a sweep has one of its own.

    Raises:
      SweepError: if it is no URL of a database, or the name is none.
    """
    if text is None:
        if study is not None:
            raise SweepError(f"--study is the name of a sweep in --storage; give that too (--storage={_EXAMPLE})")
        return None
    study = "sweep" if study is None else study
    if not study.strip() or len(study) > _LONGEST_NAME or printable(study) != study:
        raise SweepError(f"--study is {study[:_LONGEST_NAME]!r}; expected a name of up to {_LONGEST_NAME} characters")
    try:
        url = sqlalchemy.make_url(text)
        dialect = url.get_dialect()
    except (ArgumentError, ValueError, ImportError):  # whose messages may have the password
        raise SweepError(
            f"--storage is no URL of a database that SQLAlchemy knows; expected one such as {_EXAMPLE}"
        ) from None
    if dialect.is_async:
        raise SweepError(f"--storage names the driver {dialect.driver}, which is asynchronous; use {_EXAMPLE}")
    masked([text, {"password": url.password, **url.query}])  # so that no message has one from now on
    return Database(url, study)


def connect(database: Database) -> optuna.storages.RDBStorage:
    """Returns Optuna's storage in a database, with the tables that a sweep needs.

    Raises:
      PluginError: if the driver is not installed.
      SweepError: if the database cannot be used.
    """
    url, wrong = database.url, f"{database.shown} cannot be used"
    try:
        known = _OPTIONS.get(url.get_driver_name(), {})
        arguments = {name: value for name, value in known.items() if name not in url.query}
        options: dict[str, Any] = {"pool_pre_ping": True, "connect_args": arguments}
        engine = sqlalchemy.create_engine(url, **options)
        engine.connect().close()
        engine.dispose()
    except ImportError as error:
        needed = "'looplib[postgresql]'" if url.drivername == "postgresql+psycopg" else error.name or "it"
        raise PluginError(
            f"--storage={url.drivername}:// needs a driver that cannot be imported ({gist(error)}); install it with "
            f"pip install {needed}"
        ) from error
    except (SQLAlchemyError, TypeError, ValueError, OSError) as error:
        raise SweepError(
            f"{wrong} ({_cause(error)}); check the URL of --storage, the password and the network"
        ) from error
    text = url.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}")  # Optuna formats it
    for attempt in itertools.count(1):
        try:
            storage = optuna.storages.RDBStorage(text, options)
            LEASES.create(storage.engine, checkfirst=True)
            return storage
        except (SQLAlchemyError, optuna.exceptions.OptunaError) as error:
            if attempt == _ATTEMPTS:
                raise SweepError(
                    f"{wrong} ({_cause(error)}); let the user make and write tables there, or use another database"
                ) from error
            time.sleep(random.uniform(0.2, 1.0))  # another machine makes the tables now
        except RuntimeError as error:
            raise SweepError(f"{wrong}: another version of Optuna has made its tables ({_cause(error)})") from error


def _cause(error: BaseException) -> str:
    return printable(gist(cause_of(error)))


def wait_for(engine: sqlalchemy.Engine, until: Callable[[], float]) -> None:
    """Has connections tried again while a database does not answer, as when it is restarted.

    Args:
      engine: makes the connections.
      until: returns the time of `time.monotonic` up to which one is tried.
    """

    @sqlalchemy.event.listens_for(engine, "do_connect")
    def connect_patiently(dialect: Any, _: Any, arguments: list[Any], named: dict[str, Any]) -> Any:
        while True:
            try:
                return dialect.connect(*arguments, **named)
            except dialect.loaded_dbapi.Error:
                if time.monotonic() > until():
                    raise
            time.sleep(_PAUSE)

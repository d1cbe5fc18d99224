"""A PostgreSQL server for tests, with a database, a user and a password of its own."""

import contextlib
import os
import pathlib
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time

USER, PASSWORD = "sweeper", "p%wd:of{tests}"
QUOTED = "p%25wd%3Aof%7Btests%7D"  # as a URL has it
_SETTINGS = ("fsync=off", "full_page_writes=off", "synchronous_commit=off", "max_connections=50", "shared_buffers=16MB")
_SECONDS = 30.0


def missing() -> str:
    """Why there can be no server here; "" if there can."""
    if not shutil.which("initdb") or not shutil.which("postgres"):
        return "there is no PostgreSQL server: initdb and postgres must be in PATH (Debian: postgresql)"
    return ""


class Postgres:
    """A server on loopback, as an unprivileged user, in a `with` block.

    Attributes:
      port: its port.
      folder: for its files.
    """

    def __enter__(self) -> "Postgres":
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="postgres-"))
        self._user = pwd.getpwnam("nobody") if os.getuid() == 0 else None  # it refuses root
        password = self.folder / "password"
        password.write_text(PASSWORD)
        if self._user:
            for path in (self.folder, password):
                os.chown(path, self._user.pw_uid, self._user.pw_gid)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._run("initdb", "-D", self.folder / "data", "-U", USER, f"--pwfile={password}", "--auth=scram-sha-256",
                  "--encoding=UTF8", "--locale=C", "--no-sync").check_returncode()  # fmt: skip
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self.folder)

    def _run(self, *command: object) -> subprocess.CompletedProcess:
        return subprocess.run(list(map(str, command)), capture_output=True, text=True, **self._as_user())

    def _as_user(self) -> dict[str, object]:
        if self._user is None:
            return {"cwd": self.folder}
        return {"cwd": self.folder, "user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}

    def start(self) -> None:
        """Starts it, and waits until it answers."""
        settings = [word for setting in _SETTINGS for word in ("-c", setting)]
        command = [
            "postgres",
            "-D",
            self.folder / "data",
            "-p",
            self.port,
            "-k",
            self.folder,
            "-h",
            "127.0.0.1",
            *settings,
        ]
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, **self._as_user())
        end = time.monotonic() + _SECONDS
        while self._run("pg_ctl", "status", "-D", self.folder / "data").returncode or not self._answers():
            assert time.monotonic() < end and self._process.poll() is None, (self.folder / "log").read_text()
            time.sleep(0.05)

    def _answers(self) -> bool:
        with contextlib.suppress(Exception), contextlib.closing(self.connect()):
            return True
        return False

    def stop(self) -> None:
        """Stops it as a restart does: open transactions are rolled back."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(_SECONDS)

    def connect(self):
        """A connection to it, without looplib and SQLAlchemy."""
        import psycopg

        return psycopg.connect(
            host="127.0.0.1", port=self.port, user=USER, password=PASSWORD, dbname="postgres", autocommit=True
        )

    def query(self, text: str, *values: object) -> list[tuple]:
        """The rows that a query finds."""
        with contextlib.closing(self.connect()) as connection:
            return connection.execute(text, values).fetchall()

    def make_database(self, name: str) -> str:
        """Makes a database without any tables; returns its name."""
        with contextlib.closing(self.connect()) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')
        return name

    def url(self, password: str = QUOTED, port: int | None = None, database: str = "postgres") -> str:
        """Its URL for SQLAlchemy."""
        return f"postgresql+psycopg://{USER}:{password}@127.0.0.1:{port or self.port}/{database}"

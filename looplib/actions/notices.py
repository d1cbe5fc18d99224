"""NoticeListener: notices of clouds and of Slurm that this machine will end, asked of their metadata servers."""

import abc
import contextlib
import dataclasses
import datetime
import http.client
import json
import os
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from looplib.base.console import printable
from looplib.base.decoding import SHOWN, decode, parse_json
from looplib.base.messages import gist
from looplib.base.numbers import iso_time
from looplib.cluster.preemption import notice as preemption
from looplib.errors import FlagError, Preempted
from looplib.report.run_report import StartReport
from looplib.run.report import StartEntry, TerminationNotice
from looplib.task.actions import Action

_CONNECT_SECONDS, _SECONDS = 5.0, 10.0  # of a connection, and of an answer from its first to its last byte
_MOST_BYTES = 1 << 16  # of an answer


@dataclasses.dataclass(frozen=True)
class MetadataAnswer:
    """The status and the text of an answer."""

    status: int
    text: str


class MetadataServer:
    """Asks a metadata server, without the proxies of the environment. A redirection is not followed.

    Args:
      variable: the environment variable that names another address than the default.
      default: the address.

    Raises:
      UsageError: if the variable has no address.
    """

    def __init__(self, variable: str, default: str) -> None:
        address = os.environ.get(variable) or default
        try:
            parts = urllib.parse.urlsplit(address if "://" in address else f"http://{address}")
            self._host, self._port = parts.hostname, parts.port
        except ValueError:  # of a port that is no number
            self._host = None
        if not self._host or parts.scheme != "http" or parts.path.strip("/") or parts.query or parts.username:
            raise FlagError(f"{variable} is {address!a:.100}; expected an address such as {default}, or unset it")

    def __str__(self) -> str:
        return f"{self._host}:{self._port}" if self._port else f"{self._host}"

    def ask(self, path: str, headers: Mapping[str, str], method: str = "GET") -> MetadataAnswer:
        """Returns an answer, which may take 10 seconds in all, however slowly its bytes come.

        Args:
          path: with its query.
          headers: of the request.
          method: of the request.

        Raises:
          OSError, HTTPException, ValueError: if there is none, or not a whole one, or it is too long.
        """
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_CONNECT_SECONDS)
        with contextlib.closing(connection):
            connection.connect()
            connection.sock.settimeout(_SECONDS)
            timer = threading.Timer(_SECONDS, _cut, [connection.sock])
            timer.daemon = True
            timer.start()
            try:
                connection.request(method, path, headers=headers)
                response = connection.getresponse()
                body = response.read(_MOST_BYTES)
                if response.length:
                    raise ValueError(f"an answer was cut, or has more than {_MOST_BYTES:,} bytes")
                return MetadataAnswer(response.status, body.decode())
            finally:
                timer.cancel()


def _cut(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is closed
        connected.shutdown(socket.SHUT_RDWR)


@dataclasses.dataclass(frozen=True)
class Announcement:
    """An announced end, or its withdrawal, as a source tells it.

    Attributes:
      kind: in its own words.
      deadline: when it comes at the earliest, in ISO 8601; None where that is not known.
      ends: whether a run has to end for it.
    """

    kind: str
    deadline: str | None
    ends: bool


class NoticeSource(abc.ABC):
    """A metadata server that announces the end of the machine; the machine asks it again and again.

    Attributes:
      name: of the cloud.
      seconds: between two looks.
      server: the server.
    """

    name: str
    seconds: float
    server: MetadataServer

    @abc.abstractmethod
    def look(self) -> Iterator[Announcement]:
        """Yields what is announced now.

        Raises:
          OSError, HTTPException, ValueError: if the server does not answer, or says something else.
        """


class GcpNotices(NoticeSource):
    """Compute Engine: a Spot VM is preempted, or the host gets maintenance. GCE_METADATA_HOST has another address."""

    name = "gcp"
    seconds = 1.0  # of the 30 s after a notice

    def __init__(self) -> None:
        self.server = MetadataServer("GCE_METADATA_HOST", "169.254.169.254")

    def look(self) -> Iterator[Announcement]:
        """See `NoticeSource`."""
        if self._value("preempted", "TRUE", "FALSE") == "TRUE":
            yield Announcement("preempted", iso_time(time.time() + 30), True)
        goes, moves = "TERMINATE_ON_HOST_MAINTENANCE", "MIGRATE_ON_HOST_MAINTENANCE"
        event = self._value("maintenance-event", "NONE", goes, moves)
        if event == goes:
            yield Announcement(event, iso_time(time.time() + 60), True)
        elif event == moves:
            yield Announcement(event, None, False)

    def _value(self, name: str, *expected: str) -> str:
        answer = self.server.ask(f"/computeMetadata/v1/instance/{name}", {"Metadata-Flavor": "Google"})
        if answer.status != 200 or answer.text.strip() not in expected:
            raise _unexpected(name, answer)
        return answer.text.strip()


@dataclasses.dataclass(frozen=True)
class _InstanceAction:
    action: str = ""
    time: str = ""


class AwsNotices(NoticeSource):
    """EC2: a Spot instance is interrupted, by IMDSv2. AWS_EC2_METADATA_SERVICE_ENDPOINT has another address."""

    name = "aws"
    seconds = 5.0  # of the two minutes after a notice, as Amazon recommends

    def __init__(self) -> None:
        self.server = MetadataServer("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254")
        self._token = ""

    def look(self) -> Iterator[Announcement]:
        """See `NoticeSource`."""
        if (answer := self._item("spot/instance-action")).status == 200:
            said = decode(_InstanceAction, parse_json(answer.text), SHOWN, strict=False)
            if said.action not in ("terminate", "stop", "hibernate"):
                raise _unexpected("instance-action", answer)
            yield Announcement(said.action, _utc(said.time), True)
        if self._item("events/recommendations/rebalance").status == 200:
            yield Announcement("rebalance recommendation", None, False)

    def _item(self, name: str) -> MetadataAnswer:
        """Returns the answer for a name; its status is 404 for an unknown name."""
        for is_new in (not self._token, True):
            if is_new:
                ttl = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
                given = self.server.ask("/latest/api/token", ttl, "PUT")
                if given.status != 200 or not _is_header(given.text):
                    raise _unexpected("token", given)
                self._token = given.text
            answer = self.server.ask(f"/latest/meta-data/{name}", {"X-aws-ec2-metadata-token": self._token})
            if answer.status != 401:  # the token is too old
                break
        if answer.status not in (200, 404):
            raise _unexpected(name, answer)
        return answer


def _unexpected(name: str, answer: MetadataAnswer) -> ValueError:
    return ValueError(f"{name} has the unexpected answer {answer.status} {answer.text!a:.100}")


def _is_header(text: str) -> bool:
    """Returns whether a text can be sent as a header."""
    return 0 < len(text) <= 1000 and text.isascii() and text.isprintable()


def _utc(text: str) -> str | None:
    """Returns a time in ISO 8601; None for what is none."""
    try:
        found = datetime.datetime.fromisoformat(text[:100].replace("Z", "+00:00"))
        return iso_time((found if found.tzinfo else found.replace(tzinfo=datetime.timezone.utc)).timestamp())
    except (ValueError, TypeError, OverflowError, OSError, IndexError):
        return None


SLURM = "slurm"
_POLLED = {kind.name: kind for kind in (GcpNotices, AwsNotices)}
SOURCES = (*_POLLED, SLURM)
_OF_SLURM = ("SIGUSR1", "SIGUSR2", "SIGTERM")  # which --signal may name; SIGTERM comes at the end of the time too
_ROOM = 1 << 13  # bytes of what a worker tells the others


class NoticeListener(Action):
    """Ends a training as a signal does, when a source says that the machine or the job goes soon.

    A thread asks each metadata server, so that no step waits for it. Signals of Slurm are those of `health.preemption`.

    Args:
      names: of `SOURCES`.

    Raises:
      UsageError: if an environment variable has no address.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._sources: list[NoticeSource] = [_POLLED[name]() for name in dict.fromkeys(names) if name in _POLLED]
        self._has_slurm = SLURM in names
        self._host = socket.gethostname()
        self._found: dict[tuple[str, str], TerminationNotice] = {}  # by source and kind, of this training
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._report: StartReport | None = None

    def on_start(self, controller: Any) -> None:
        """Listens from here on."""
        self._found, self._ended, self._report = {}, threading.Event(), controller.report
        if self._has_slurm and "SLURM_JOB_ID" not in os.environ:
            logging.warning("--notices=slurm: this process is not part of a job of Slurm (no SLURM_JOB_ID)")
        preemption.describe = self._describe
        for source in self._sources:
            name = f"looplib-notices-{source.name}"
            # A daemon, because a process must be able to end while an answer hangs.
            threading.Thread(target=self._watch, args=(source, self._ended), name=name, daemon=True).start()

    def on_end(self, controller: Any) -> None:
        """Listens no longer."""
        with self._lock:
            self._ended.set()
        preemption.describe = str

    def on_exception(self, error: BaseException, controller: Any) -> None:
        """Listens no longer; the chief writes the notices of the other workers into `run.json` too."""
        self.on_end(controller)
        if not isinstance(error, Preempted) or error.alone:
            return
        own = [dataclasses.asdict(told) for told in self._found.values()]
        text = json.dumps({"notices": own}).encode()
        rows = controller.gather(np.frombuffer(text.ljust(_ROOM)[:_ROOM], np.uint8))  # all workers come here
        others = [told for row in rows[1:] for told in _read(row.tobytes())] if controller.is_chief else []
        for told in others:
            logging.warning("a worker on %s got %s", told.host, told)
            self._report.note(told)
        if others:
            controller.report.write("preempted")

    def _watch(self, source: NoticeSource, ended: threading.Event) -> None:
        """Looks again and again, in a thread."""
        warned, logged = False, set[str]()
        while not ended.is_set():
            try:
                for announced in source.look():
                    if announced.ends:
                        self._end(source.name, announced, ended)
                    elif announced.kind not in logged:
                        logged.add(announced.kind)
                        logging.warning("%s announces: %s; the run continues", source.name, announced.kind)
            except Exception as error:  # of any server, or of this machine; a thread that ends hears of nothing
                if not warned and not ended.is_set():
                    text = "--notices=%s: %s gives no answer that is understood, and is asked again: %s"
                    logging.warning(text, source.name, source.server, printable(gist(error)))
                warned = True
            ended.wait(source.seconds)

    def _end(self, source: str, announced: Announcement, ended: threading.Event) -> None:
        with self._lock:
            if not ended.is_set():
                told = self._told(source, announced.kind, announced.deadline)
                preemption.request(str(told))  # each time, as one from before the training is forgotten as it begins

    def _told(self, source: str, kind: str, deadline: str | None) -> TerminationNotice:
        """Returns the notice of a kind, which is noted when it comes first."""
        told = TerminationNotice(source, kind, self._host, iso_time(time.time()), deadline)
        if (first := self._found.setdefault((source, kind), told)) is told:
            self._report.note(told)
        return first

    def _describe(self, name: str) -> str:
        """Returns what messages say of a signal; called in any thread, at any time."""
        if self._has_slurm and name in _OF_SLURM:
            return str(self._told(SLURM, name, _end_of_the_job()))
        first = next(iter(list(self._found.values())), None)
        return f"{name}, after {first}" if first else name


def _end_of_the_job() -> str | None:
    """Returns when the time of a job of Slurm is over, in ISO 8601; None if Slurm has not said it."""
    text = os.environ.get("SLURM_JOB_END_TIME", "")
    return iso_time(int(text)) if text.isdecimal() and len(text) <= 11 else None


def _read(text: bytes) -> list[TerminationNotice]:
    """Returns the notices that a worker has told; none if they were cut."""
    try:
        return decode(StartEntry, parse_json(text), SHOWN, strict=False).notices
    except ValueError:
        return []

"""Connections between the workers of a run: lines of JSON over TCP, and their meeting at the chief's address.

They meet before TensorFlow opens its servers there. An empty line is a beat.
"""

import hashlib
import json
import os
import re
import selectors
import socket
import time
from collections.abc import Sequence
from typing import Any

from looplib.base import console
from looplib.cluster.environment import Cluster
from looplib.errors import UsageError, WorkerError

_LONGEST = 65536  # bytes of a line; only a stranger sends more
_PATIENCE = 5.0  # seconds for an answer from the chief's address


class Connection:
    """One connection; no method blocks.

    Attributes:
      index: of the worker at the other end, or None while it has not said.
      who: the process at the other end, in words; "" while it has not said.
      unread: messages that `receive` has returned and is to return again.
      over: whether the other end has closed it, or is a stranger.
      left: whether the other end has said goodbye.
      heard: when something last came, by `time.monotonic`.
    """

    def __init__(self, connection: socket.socket, index: int | None = None) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._inbox, self._outbox = b"", b""
        self.unread: list[dict[str, Any]] = []
        self.index = index
        self.who = ""
        self.over = self.left = False
        self.heard = time.monotonic()

    def fileno(self) -> int:
        """Returns the descriptor, for selectors."""
        return self._socket.fileno()

    @property
    def silence(self) -> float:
        """Seconds since something came."""
        return time.monotonic() - self.heard

    def send(self, message: dict[str, Any] | None = None) -> None:
        """Sends a message, or a beat; bytes that the network does not take now are sent with the next one."""
        if message is not None:
            self._outbox += json.dumps(message).encode() + b"\n"
        elif not self._outbox:
            self._outbox = b"\n"
        try:
            self._outbox = self._outbox[self._socket.send(self._outbox) :]
        except OSError:  # full, or closed: `receive` notices that
            pass

    def receive(self) -> list[dict[str, Any]]:
        """Returns the messages that have come since the last call, and sets `over` at the end of the connection."""
        try:
            while data := self._socket.recv(_LONGEST):
                self.heard = time.monotonic()
                self._inbox += data
            self.over = True
        except (ConnectionResetError, BrokenPipeError):
            self.over = True
        except OSError:  # nothing more yet, or an interface is down and may come up again: `silence` decides
            pass
        *lines, self._inbox = self._inbox.split(b"\n")
        try:
            messages = [json.loads(line) for line in lines if line.strip()]
        except ValueError:
            messages = [None]
        if len(self._inbox) > _LONGEST or not all(isinstance(message, dict) for message in messages):
            self.over = True
            return []
        messages, self.unread = self.unread + messages, []
        return messages

    def finish(self) -> None:
        """Ends sending; the bytes that were sent still arrive."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self) -> None:
        """Closes this end."""
        self.over = True
        self._socket.close()


def connect(address: str, timeout: float) -> Connection:
    """Connects to "host:port" within some seconds, or raises OSError."""
    connection = socket.create_connection(_split(address), timeout)
    if connection.getsockname() == connection.getpeername():
        # If no process listens on a port of the range for outgoing connections, TCP can connect a socket with itself.
        connection.close()
        raise ConnectionRefusedError(0, "Connection refused")
    return Connection(connection)


def listen(address: str) -> socket.socket:
    """Listens on the port of "host:port", on all interfaces unless the host is this machine's loopback."""
    host, port = _split(address)
    if re.fullmatch(r"localhost|127\.[\d.]+", host):
        return socket.create_server((host, port), backlog=1024)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
        except OSError:  # IPv6 is switched off on this machine; if not, the next line raises the error
            pass
    return socket.create_server(("", port), backlog=1024)


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def drain(open_links: Sequence[Connection], seconds: float) -> None:
    """Closes links once the other ends have read everything, within some seconds.

    A link that is closed earlier loses its last messages.
    """
    for link in open_links:
        link.finish()
    end = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        for link in open_links:
            selector.register(link, selectors.EVENT_READ)
        while selector.get_map() and time.monotonic() < end:
            for key, _ in selector.select(0.1):
                key.fileobj.receive()
                if key.fileobj.over:
                    selector.unregister(key.fileobj)
    for link in open_links:
        link.close()


def meet(cluster: Cluster, join_limit: float, silence_limit: float) -> dict[int, Connection]:
    """Waits until all workers have come; the chief's port is free again afterwards.

    Args:
      cluster: a `Cluster` of workers that train in step, this process among them.
      join_limit: seconds for all workers to come.
      silence_limit: seconds of silence after which a worker that waits counts as lost.

    Returns:
      The links by index: to all other workers at the chief, to the chief at the others.

    Raises:
      UsageError: says which worker has not come in time, or why this process does not belong here.
    """
    meeting = _Rendezvous(cluster, join_limit, silence_limit)
    return meeting.await_workers() if cluster.is_chief else meeting.find_chief()


class _Rendezvous:
    def __init__(self, cluster: Cluster, join_limit: float, silence_limit: float) -> None:
        self._cluster = cluster
        self._limit = join_limit
        self._deadline = time.monotonic() + join_limit
        self._silence_limit = silence_limit
        self._beat = min(1.0, silence_limit / 5)
        self._chief = cluster.workers[0]
        run = json.dumps([cluster.workers, cluster.job_id])
        self._run = hashlib.sha256(run.encode()).hexdigest()

    # The chief.

    def await_workers(self) -> dict[int, Connection]:
        """Waits, at the chief, until all others have come."""
        links_here: list[Connection] = []
        present: dict[int, Connection] = {}
        beat, remind = time.monotonic(), time.monotonic() + 10
        with self._listen() as listener, selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            try:
                while missing := [i for i in range(1, len(self._cluster.workers)) if i not in present]:
                    if time.monotonic() >= self._deadline:
                        raise self._lacking(missing, present)
                    if time.monotonic() >= remind:
                        console.say(f"looplib: waiting for {self._names(missing)}")
                        remind = float("inf")
                    for key, _ in selector.select(min(self._beat, 0.2)):
                        if key.fileobj is listener:
                            links_here.append(Connection(listener.accept()[0]))
                            selector.register(links_here[-1], selectors.EVENT_READ)
                        else:
                            self._hear(key.fileobj, present)
                    if time.monotonic() >= beat:
                        beat = time.monotonic() + self._beat
                        for link in present.values():
                            link.send()
                    for link in [link for link in links_here if link.over or link.silence > self._silence_limit]:
                        links_here.remove(link)
                        selector.unregister(link)
                        link.close()
                        if present.get(link.index) is link:
                            del present[link.index]  # it may come again
            finally:
                for link in links_here:
                    if link not in present.values():
                        link.close()
        for link in present.values():
            link.send({"go": True})
        return present

    def _hear(self, link: Connection, present: dict[int, Connection]) -> None:
        for message in link.receive():
            index = message.get("index")
            other = present.get(index) if isinstance(index, int) else None
            if message.get("run") != self._run:
                refusal = (
                    f"worker {index} has another list of workers, or belongs to another job, than the chief at "
                    f"{self._chief}; give all workers of a run the same list, and each run separate addresses"
                )
            elif index == 0 or other:
                who = other.who if other else _who()
                refusal = (
                    f"two processes claim to be worker {index}: {who} was first, and this is {message.get('who')}; "
                    "give each a unique index"
                )
            else:
                link.index, link.who = index, message.get("who", "")
                present[index] = link
                link.send({"wait": True})
                continue
            link.send({"refused": refusal})
            link.finish()

    def _lacking(self, missing: list[int], present: dict[int, Connection]) -> UsageError:
        error = WorkerError(
            f"{self._names(missing)} did not join within {self._limit:g} s; start the same command on all workers, and "
            "check their logs"
        )
        for link in present.values():
            link.send({"refused": str(error)})
        drain(list(present.values()), 1.0)
        return error

    def _names(self, indices: list[int]) -> str:
        named = [f"worker {i} ({self._cluster.workers[i]})" for i in indices[:8]]
        return ", ".join(named) + (f" and {len(indices) - 8} more" if len(indices) > 8 else "")

    def _listen(self) -> socket.socket:
        while True:
            try:
                return listen(self._chief)
            except OSError as error:  # an earlier run may still be ending there, or a second chief listens
                self._knock()
                if time.monotonic() >= self._deadline:
                    raise WorkerError(
                        f"the chief cannot listen on its address {self._chief} ({error.strerror}); end what uses the "
                        "port, or give the chief another one"
                    ) from error
                time.sleep(0.2)

    # The others.

    def find_chief(self) -> dict[int, Connection]:
        """Waits, at a worker, until the chief has let this process in and all have come."""
        while True:
            link, said = self._knock()
            if link:
                return {0: link}
            if time.monotonic() >= self._deadline:
                raise WorkerError(
                    f"worker 0 ({self._chief}), the chief, did not answer worker {self._cluster.index} within "
                    f"{self._limit:g} s ({said}); start the same command on all workers, and check its log"
                )
            time.sleep(0.2)

    def _knock(self) -> tuple[Connection | None, str]:
        """Asks the chief to be let in, and waits for the others; returns the link, or None and the reason."""
        try:
            link = connect(self._chief, _PATIENCE)
        except OSError as error:
            return None, error.strerror or str(error)
        link.index = 0
        link.send({"index": self._cluster.index, "run": self._run, "who": _who()})
        limit = min(_PATIENCE, self._silence_limit)  # until the chief has answered; then the chief's deadline counts
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(link, selectors.EVENT_READ)
                while not link.over and link.silence < limit:
                    selector.select(self._beat)
                    messages = link.receive()
                    for i, message in enumerate(messages):
                        if "go" in message:
                            link.unread = messages[i + 1 :]
                            found, link = link, None
                            return found, ""
                        if "refused" in message:
                            raise WorkerError(message["refused"])
                        limit = self._silence_limit
                    link.send()
        finally:
            if link:
                link.close()
        return None, "another process listens there; an earlier run may still be ending"


def _who() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"

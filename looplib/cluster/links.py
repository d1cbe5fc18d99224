"""Connections between the processes of a run: lines of JSON, and an empty line as a beat, over TCP."""

import json
import re
import selectors
import socket
import time
from collections.abc import Sequence
from typing import Any

_LONGEST = 65536  # bytes of a line; only a stranger sends more


class Link:
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


def connect(address: str, timeout: float) -> Link:
    """Connects to "host:port" within some seconds.

    Raises:
      OSError: if nobody answers there.
    """
    connection = socket.create_connection(_split(address), timeout)
    if connection.getsockname() == connection.getpeername():
        # If no process listens on a port of the range for outgoing connections, TCP can connect a socket with itself.
        connection.close()
        raise ConnectionRefusedError(0, "Connection refused")
    return Link(connection)


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


def drain(open_links: Sequence[Link], seconds: float) -> None:
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

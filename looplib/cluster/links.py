"""Connections between the processes of a run: lines of JSON, and an empty line as a beat, over TCP."""

import json
import re
import selectors
import socket
import time

_LONGEST = 65536  # bytes of a line; more is no peer


class Link:
    """One connection; nothing in it blocks.

    Attributes:
      index: of the worker at the other end, or None while it has not said.
      unread: messages that `receive` has returned and is to return again.
      over: the other end has closed it, or is no peer.
      left: the other end has said goodbye.
      heard: when something last came, by `time.monotonic`.
    """

    def __init__(self, connection, index=None):
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._inbox, self._outbox = b"", b""
        self.unread = []
        self.index = index
        self.over = self.left = False
        self.heard = time.monotonic()

    def fileno(self):
        """For selectors."""
        return self._socket.fileno()

    @property
    def silence(self):
        """Seconds since something came."""
        return time.monotonic() - self.heard

    def send(self, message=None):
        """Sends a message (a dict), or a beat; what the network does not take now goes with the next one."""
        if message is not None:
            self._outbox += json.dumps(message).encode() + b"\n"
        elif not self._outbox:
            self._outbox = b"\n"
        try:
            self._outbox = self._outbox[self._socket.send(self._outbox) :]
        except OSError:  # full, or closed, which `receive` finds out
            pass

    def receive(self):
        """Returns the messages that have come since, and sets `over` at the end of the connection."""
        try:
            while data := self._socket.recv(_LONGEST):
                self.heard = time.monotonic()
                self._inbox += data
            self.over = True
        except (ConnectionResetError, BrokenPipeError):
            self.over = True
        except OSError:  # nothing more yet, or an interface is down, and may come up again: silence decides
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

    def finish(self):
        """Nothing more will be sent; what was, still gets out."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self):
        """Closes this end."""
        self.over = True
        self._socket.close()


def connect(address, timeout):
    """Connects to "host:port"; returns a `Link`, or raises OSError."""
    connection = socket.create_connection(_split(address), timeout)
    if connection.getsockname() == connection.getpeername():
        # Where nobody listens on a port of the range for outgoing connections, TCP can connect a socket with itself.
        connection.close()
        raise ConnectionRefusedError(0, "Connection refused")
    return Link(connection)


def listen(address):
    """Listens on the port of "host:port", on all interfaces unless the host is this machine's loopback."""
    host, port = _split(address)
    if re.fullmatch(r"localhost|127\.[\d.]+", host):
        return socket.create_server((host, port), backlog=1024)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
        except OSError:  # IPv6 is switched off on this machine, or else the next line says what is wrong
            pass
    return socket.create_server(("", port), backlog=1024)


def _split(address):
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def drain(open_links, seconds):
    """Closes links once the others have read everything: one that is closed too early loses its last words."""
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

"""MetadataServer: the HTTP server at which a machine in a cloud asks about itself."""

import contextlib
import dataclasses
import http.client
import os
import socket
import threading
import urllib.parse
from collections.abc import Mapping

from looplib.errors import FlagError

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

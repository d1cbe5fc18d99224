"""A proxy between a client and an HTTP server of a store, which misbehaves as stores and networks do.

with Proxy("127.0.0.1", 5000) as proxy:
    proxy.faults.delay = 0.02
    proxy.stop()
    proxy.start()
    assert len(proxy.requests) < 10
"""

import contextlib
import dataclasses
import http.client
import http.server
import random
import re
import socket
import struct
import threading
import time
import urllib.parse
from collections.abc import Callable

_ENTRY = re.compile(r"<Contents>.*?</Contents>", re.S)
_BODY = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{}</Code><Message>by the proxy</Message></Error>'
_CODES = {404: "NoSuchKey", 503: "SlowDown", 403: "AccessDenied", 500: "InternalError"}


@dataclasses.dataclass
class Request:
    """A request that came."""

    time: float
    method: str
    path: str
    status: int = 0  # 0 if it was cut
    bytes: int = 0  # of its body
    returned: int = 0  # bytes of the answer's body
    key: str = ""  # that it is signed with

    @property
    def kind(self):
        """The kind of request that a store bills it as."""
        return "list" if "list-type=" in self.path else self.method.lower()


@dataclasses.dataclass
class Faults:
    """Faults of the proxy.

    Attributes:
      delay: seconds before each answer to a request that `only` chooses.
      share: of requests that fail with `status`.
      status: of those.
      code: what S3 calls it; "" for the usual one of the status.
      cut: share of requests whose connection is cut: half of them before the server sees them, half after.
      old: how old listings are, in seconds.
      only: returns for a `Request` whether it may be late or fail.
    """

    delay: float = 0.0
    share: float = 0.0
    status: int = 503
    code: str = ""
    cut: float = 0.0
    old: float = 0.0
    only: Callable[[Request], bool] = lambda request: True


class Proxy:
    """The proxy; use it in a `with` block.

    Args:
      host: of the server.
      port: of the server.
      seed: of what is random.

    Attributes:
      url: for clients.
      faults: `Faults`.
      requests: list of every `Request` that came.
    """

    def __init__(self, host, port, seed=0):
        self._server_address, self._chance = (host, port), random.Random(seed)
        self.faults, self.requests = Faults(), []
        self._listener, self._open, self._lock = None, set(), threading.Lock()
        self._history = {}  # name -> [(time, its entry in a listing afterwards, "" for none)]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.stop()

    def start(self):
        """Listens."""
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self):
                super().setup()
                proxy._open.add(self.connection)

            def finish(self):
                with contextlib.suppress(OSError):
                    super().finish()
                proxy._open.discard(self.connection)

            def log_message(self, *_):
                pass

            def handle(self):
                with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
                    super().handle()

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = lambda self: proxy._answer(self)

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads, allow_reuse_address, request_queue_size = True, True, 100

            def handle_error(self, *_):
                pass

        self._listener = Server(("127.0.0.1", self._port), Handler)
        threading.Thread(target=self._listener.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self):
        """Refuses connections, and cuts those that are open."""
        if self._listener:
            self._listener.shutdown()
            self._listener.server_close()
            self._listener = None
        for connection in list(self._open):
            _cut(connection)

    def clear(self):
        """Goes back to the first state."""
        self.faults = Faults()
        self.requests.clear()
        if not self._listener:
            self.start()

    def count(self, since=0):
        """Returns how many requests came, by kind, after the first so many."""
        kinds = [request.kind for request in self.requests[since:]]
        return {kind: kinds.count(kind) for kind in sorted(set(kinds))}

    def _answer(self, handler):
        body = _read_body(handler)
        if len(body) < int(handler.headers.get("Content-Length") or 0):
            return _cut(handler.connection)  # the client was killed: no store takes a part
        request = Request(time.monotonic(), handler.command, handler.path, bytes=len(body), key=_key(handler))
        faults = self.faults
        with self._lock:
            self.requests.append(request)
            fails, is_cut, before = (self._chance.random() for _ in range(3))
        time.sleep(faults.delay if faults.only(request) else 0.0)
        if faults.only(request):
            if fails < faults.share:
                request.status = faults.status
                handler.close_connection = False
                text = _BODY.format(faults.code or _CODES.get(faults.status, "Error")).encode()
                return _send(handler, faults.status, [("Content-Type", "application/xml")], text)
            if is_cut < faults.cut:
                if before < 0.5:
                    self._forward(handler, body)
                handler.close_connection = True
                return _cut(handler.connection)
        status, headers, answer = self._forward(handler, body)
        request.status, request.returned = status, len(answer)
        if handler.command in ("PUT", "POST", "DELETE") and status < 300:
            self._note(handler.path)
        if faults.old and request.kind == "list":
            answer = self._aged(handler.path, answer.decode(), faults.old).encode()
        _send(handler, status, headers, answer)

    def _forward(self, handler, body):
        connection = http.client.HTTPConnection(*self._server_address, timeout=120)
        try:
            headers = {
                name: value
                for name, value in handler.headers.items()
                if name.lower() not in ("expect", "connection", "transfer-encoding", "content-length")
            }
            connection.request(handler.command, handler.path, body=body or None, headers=headers | (
                {"Content-Length": str(len(body))} if handler.command in ("PUT", "POST", "PATCH") else {}))  # fmt: skip
            answer = connection.getresponse()
            content = answer.read()
            return answer.status, answer.getheaders(), content
        finally:
            connection.close()

    # Listings as they were.

    def _note(self, path):
        bucket, _, key = urllib.parse.urlsplit(path).path.lstrip("/").partition("/")
        if not key or "uploads" in urllib.parse.urlsplit(path).query or "partNumber" in path:
            return
        key = urllib.parse.unquote(key)
        connection = http.client.HTTPConnection(*self._server_address, timeout=120)
        connection.request("GET", f"/{bucket}?list-type=2&prefix={urllib.parse.quote(key)}")
        text = connection.getresponse().read().decode()
        connection.close()
        entry = next((entry for entry in _ENTRY.findall(text) if f"<Key>{key}</Key>" in entry), "")
        with self._lock:
            self._history.setdefault((bucket, key), []).append((time.monotonic(), entry))

    def _aged(self, path, text, seconds):
        bucket = urllib.parse.urlsplit(path).path.strip("/")
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(path).query)
        prefix, now = query.get("prefix", [""])[0], time.monotonic()
        entries = {re.search(r"<Key>(.*?)</Key>", entry)[1]: entry for entry in _ENTRY.findall(text)}
        with self._lock:
            for (place, key), events in self._history.items():
                if place != bucket or not key.startswith(prefix) or events[-1][0] < now - seconds:
                    continue
                then = [entry for moment, entry in events if moment < now - seconds]
                entries.pop(key, None)
                if then and then[-1]:
                    entries[key] = then[-1]
        head, tail = _ENTRY.sub("", text).rsplit("</ListBucketResult>", 1)
        head = re.sub(r"<KeyCount>\d+", f"<KeyCount>{len(entries)}", head)
        return head + "".join(entries[key] for key in sorted(entries)) + "</ListBucketResult>" + tail


def _key(handler):
    match = re.search(r"Credential=(\w+)/", handler.headers.get("Authorization", ""))
    return match[1] if match else ""


def _read_body(handler):
    if "chunked" in handler.headers.get("Transfer-Encoding", ""):
        parts = []
        while size := int(handler.rfile.readline().split(b";")[0], 16):
            parts.append(handler.rfile.read(size))
            handler.rfile.readline()
        handler.rfile.readline()
        return b"".join(parts)
    return handler.rfile.read(int(handler.headers.get("Content-Length") or 0))


def _send(handler, status, headers, content):
    handler.send_response_only(status)
    is_head = handler.command == "HEAD"
    for name, value in headers:
        if name.lower() not in ("connection", "transfer-encoding", "content-length"):
            handler.send_header(name, value)
    length = dict((name.lower(), value) for name, value in headers).get("content-length") if is_head else None
    handler.send_header("Content-Length", length or str(len(content)))
    handler.end_headers()
    if not is_head:
        handler.wfile.write(content)


def _cut(connection):
    """Resets a connection, so that both ends learn of it at once."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)

"""`python -m looplib board DIR`: a page of all runs below a folder, on this machine, which refreshes itself."""

import argparse
import datetime
import hashlib
import http.client
import http.server
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from looplib.base.console import printable
from looplib.base.messages import gist, with_cure
from looplib.base.numbers import utc
from looplib.base.plugins import Command
from looplib.commands.options import path
from looplib.commands.report import MOST_RUNS, page_of, runs_in
from looplib.errors import EXIT_DONE, CommandError, RunDirectoryError
from looplib.run.directory import RunDir

_ADDRESS = "127.0.0.1"
_HIGHEST_PORT = 65_535
_LONGEST = 3600.0  # seconds


def add(tools: Any) -> None:
    """Adds the parser of `board`."""
    text = "serve a page of all runs below a folder that refreshes itself"
    parser = tools.add_parser(
        "board",
        help=text,
        description=f"{text[0].upper()}{text[1:]}, for browsers on this machine. It only reads.",
    )
    parser.add_argument("directory", type=path, metavar="DIR", help="a run directory, or a folder that holds some")
    parser.add_argument("--port", type=int, default=6080, help="0 takes a free one (default %(default)s)")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two pages (default %(default)s)")
    parser.set_defaults(tool=Command(_board, needs_tensorflow=lambda options: False))


def _board(options: argparse.Namespace) -> int:
    return board(options.directory, options.port, options.every)


def board(directory: str, port: int, every: float) -> int:
    """Serves the page until Ctrl-C or a signal.

    Args:
      directory: a run directory, or a folder that holds some; runs that begin later are shown too.
      port: of this machine's own address; 0 for a free one.
      every: seconds between two looks.

    Returns:
      The exit code.

    Raises:
      UsageError: for a folder that does not exist, or a port that cannot be had.
    """
    if not 1 <= every <= _LONGEST:
        raise CommandError(f"--every is {every:g}; expected seconds from 1 to {_LONGEST:,.0f} (an hour)")
    if not 0 <= port <= _HIGHEST_PORT:
        raise CommandError(f"--port is {port}; expected a number from 0 to {_HIGHEST_PORT:,}")
    if not os.path.isdir(directory):
        raise RunDirectoryError(f"{directory} is not a directory on this machine; name a folder that holds runs")
    try:
        server = BoardServer(directory, port, every)
    except OSError as error:
        raise CommandError(
            f"port {port} cannot be had: {with_cure(error)}; name another one with --port, or 0 for a free one"
        ) from error
    print(printable(f"http://{_ADDRESS}:{server.server_port}/ shows the runs in {directory}; Ctrl-C ends"), flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
    return EXIT_DONE


class BoardServer(http.server.ThreadingHTTPServer):
    """Serves the page of the runs in a folder to this machine; makes it again when it is asked for, and not too often.

    Args:
      directory: the folder.
      port: 0 for a free one.
      every: seconds for which a page is taken again.
    """

    daemon_threads = True

    def __init__(self, directory: str, port: int, every: float) -> None:
        self._directory, self._every = directory, every
        self._lock = threading.Lock()
        self._due, self._page = 0.0, b""  # when a page is made again
        super().__init__((_ADDRESS, port), _Handler)
        names = (_ADDRESS, "localhost")
        self.hosts = {f"{name}:{self.server_port}" for name in names}
        self.hosts |= {*names} if self.server_port == http.client.HTTP_PORT else set()  # which browsers leave out

    def page(self) -> bytes:
        """Returns the page of the runs.

        Raises:
          UsageError: if there is no run.
        """
        with self._lock:
            if (began := time.monotonic()) >= self._due:
                shown = runs_in([self._directory])[:MOST_RUNS]
                self._page = page_of(shown, [self._directory], _newest(shown)).encode()
                ended = time.monotonic()
                self._due = ended + max(self._every, ended - began)  # many runs take half of a core at most
            return self._page

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints an error in one line; none of a browser that is gone."""
        if (error := sys.exc_info()[1]) and not isinstance(error, OSError):
            print(printable(f"a request could not be answered: {gist(error)}"), flush=True)

    @property
    def shell(self) -> tuple[str, str]:
        """The page that holds the other one, and its Content-Security-Policy."""
        from looplib.report.page.html import shell_of  # here, as it imports numpy, which `--help` does without

        title = os.path.basename(os.path.abspath(self._directory))
        return shell_of(("board.html", "board.css", "board.js"), title, seconds=f"{self._every:g}")


def _newest(folders: Sequence[str]) -> datetime.datetime:
    """Returns when a run has written something last, so that the page changes only if a run did."""
    return utc(max((RunDir(folder).last_written() for folder in folders), default=0.0))


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers GET / and GET /page of browsers on this machine."""

    server: BoardServer
    timeout = 30

    def do_GET(self) -> None:
        """Answers a request, unless its host is another name, which a foreign page may have resolve to this machine."""
        if self.headers.get("Host") not in self.server.hosts:
            return self._answer(403, b"this board is for browsers on its own machine")
        if self.path == "/":
            text, policy = self.server.shell
            return self._answer(200, text.encode(), "text/html", {"Content-Security-Policy": policy})
        if self.path != "/page":
            return self._answer(404, b"there are / and /page")
        try:
            page = self.server.page()
        except Exception as error:  # such as of a disk, which may be well at the next request
            return self._answer(503, gist(error).encode(errors="replace"))
        tag = f'"{hashlib.sha256(page).hexdigest()[:32]}"'
        if self.headers.get("If-None-Match") == tag:
            return self._answer(304, b"", headers={"ETag": tag})
        return self._answer(200, page, "text/html", {"ETag": tag})

    def _answer(self, code: int, body: bytes, kind: str = "text/plain", headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        fixed = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
        fixed |= {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store", "X-Frame-Options": "DENY"}
        for name, value in {**fixed, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Prints nothing."""

"""Metadata servers of GCP and AWS on loopback, which say what a test lets them say, and may misbehave."""

import contextlib
import http.server
import threading
import time

TOKEN = "AQAEAKq-token=="


class Metadata:
    """A server that answers as the manuals of both clouds say, and refuses what they refuse.

    Attributes:
      gcp: the values of Compute Engine, by name.
      aws: the items of EC2, by name; others are not found.
      misbehave: called with the handler in place of an answer.
      asked: the paths that were asked.
    """

    def __init__(self):
        self.gcp = {"preempted": "FALSE", "maintenance-event": "NONE"}
        self.aws = {}
        self.misbehave, self.asked, self.tokens = None, [], set()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                outer.asked.append(self.path)
                (outer.misbehave or outer.answer)(self)

            do_PUT = do_GET

            def log_message(self, *_):
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_):  # the other side may cut an answer that never ends
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_port}"
        self.environment = {
            "GCE_METADATA_HOST": self.address,
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{self.address}/",
        }
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    def answer(self, handler):
        """Answers one request."""
        path, of_gcp, of_aws = handler.path, "/computeMetadata/v1/instance/", "/latest/meta-data/"
        if path.startswith(of_gcp):
            if handler.headers["Metadata-Flavor"] != "Google":
                return reply(handler, 403, "")
            return reply(handler, 200, self.gcp[path.removeprefix(of_gcp)])
        if path == "/latest/api/token":
            if handler.command != "PUT" or not handler.headers["X-aws-ec2-metadata-token-ttl-seconds"]:
                return reply(handler, 400, "")
            self.tokens.add(token := f"{TOKEN}{len(self.asked)}")
            return reply(handler, 200, token)
        if path.startswith(of_aws):
            if handler.headers["X-aws-ec2-metadata-token"] not in self.tokens:
                return reply(handler, 401, "")
            found = self.aws.get(path.removeprefix(of_aws))
            return reply(handler, 404, "<html>not found</html>") if found is None else reply(handler, 200, found)
        return reply(handler, 404, "")


def reply(handler, status, text, **headers):
    """Sends a whole answer."""
    body = text.encode() if isinstance(text, str) else text
    handler.send_response(status)
    for name, value in {"Content-Length": len(body), **headers}.items():
        handler.send_header(name.replace("_", "-"), str(value))
    handler.end_headers()
    handler.wfile.write(body)


def cut(handler):
    """Ends the connection in the middle of a body."""
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    handler.wfile.write(b"TR")


def hang_up(handler):
    """Ends the connection without a word."""
    handler.close_connection = True


def redirect(handler):
    """Sends elsewhere, where a notice waits."""
    reply(handler, 302, "TRUE", Location=handler.path + "?elsewhere")


def rubbish(handler):
    """Says what no cloud says."""
    reply(handler, 200, b"\xff\xfe{[" * 10)


def endless(handler):
    """Says more than there is room for."""
    reply(handler, 200, b"TRUE" * 100_000)


def deep(handler):
    """Sends JSON that is nested too deep."""
    reply(handler, 200, "[" * 50_000)


def drip(handler):
    """Sends a byte each 50 ms, without end."""
    handler.send_response(200)
    handler.send_header("Content-Length", "100000")
    handler.end_headers()
    with contextlib.suppress(OSError):
        while True:
            handler.wfile.write(b"T")
            handler.wfile.flush()
            time.sleep(0.05)

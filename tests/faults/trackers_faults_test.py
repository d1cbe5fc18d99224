"""Trackers whose server dies, hangs, fails or is slow, and files of theirs that somebody else has put there.

The run ends as it would without them, at once but for a bounded wait, with every record and one warning.
"""

import contextlib
import http.server
import json
import os
import pathlib
import socket
import struct
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping

import pytest
import tensorflow as tf
import toy

import looplib
from looplib.report.writers import trackers
from looplib.run.records import read_jsonl

SECRET = "s3cret"
HANG = 60.0


class Server:
    """An HTTP server that takes records, in one of several bad ways from some request on.

    Args:
      way: how it fails.
      after: how many requests it answers before that.
    """

    def __init__(self, way: str, after: int = 0) -> None:
        self.way, self.left, self.records, self.end = way, after, [], threading.Event()
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                server.left -= 1
                if server.left < 0:
                    server.fail(self)
                else:
                    server.records.append(json.loads(body))
                    self.answer(200)

            def answer(self, code: int) -> None:
                self.send_response(code)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://user:{SECRET}@127.0.0.1:{self._server.server_port}/log"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def fail(self, request: http.server.BaseHTTPRequestHandler) -> None:
        """Answers in its way."""
        if self.way == "hangs":
            self.end.wait(HANG)
        elif self.way == "is slow":
            self.end.wait(0.3)
            request.answer(200)
        elif self.way == "fails":
            request.answer(500)
        elif self.way == "resets":
            request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            request.connection.close()
        else:  # dies
            self._server.socket.close()
            request.connection.close()

    def close(self) -> None:
        """Ends it."""
        self.end.set()
        with contextlib.suppress(OSError):
            self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class HttpWriter(looplib.Writer):
    """A tracker with a server, as users write them: an address with a password, which its errors name."""

    def __init__(self, address: str) -> None:
        self.address, self.patience = address, HANG

    def write(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
        """Sends a record."""
        plain = self.address.replace(f"user:{SECRET}@", "")
        body = json.dumps({"step": step, "split": split, **metrics}).encode()
        try:
            urllib.request.urlopen(urllib.request.Request(plain, body), timeout=self.patience).close()
        except OSError as error:
            raise ConnectionError(f"{self.address} does not answer: {error}") from error


def train(directory: pathlib.Path, *trackers: looplib.Writer) -> None:
    """Trains 20 steps with 10 saves."""
    trainer, evaluator = toy.build(tf.distribute.get_strategy())
    with toy.controller(
        None, trainer, evaluator, steps_per_loop=2, model_dir=directory, writers=[*looplib.DEFAULT_WRITERS, *trackers],
        checkpoints=looplib.CheckpointPolicy(every_steps=2),
    ) as controller:  # fmt: skip
        controller.train_and_evaluate(20, 10)


def records(directory: pathlib.Path) -> list[dict]:
    """The records of a run, without times."""
    return [
        {name: value for name, value in record.items() if "per_second" not in name}
        for record in read_jsonl(str(directory / "metrics.jsonl"))
    ]


def left_out(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings that a tracker is left out."""
    return [record.getMessage() for record in caplog.records if "left out from here on" in record.getMessage()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict], float]:
    """The records of a run without a tracker, and its seconds."""
    directory = tmp_path_factory.mktemp("whole")
    train(directory / "first")  # whose graphs are traced
    started = time.monotonic()
    train(directory / "run")
    return records(directory / "run"), time.monotonic() - started


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 5])
@pytest.mark.parametrize("way", ["dies", "hangs", "fails", "resets", "is slow"])
def test_a_server_in_trouble_costs_a_run_a_bounded_wait_and_one_warning(
    way: str, after: int, whole: tuple[list[dict], float], tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(way, after)
    try:
        started = time.monotonic()
        train(tmp_path / "run", looplib.BackgroundWriter(HttpWriter(server.address), patience=1.0))
        took = time.monotonic() - started
    finally:
        server.close()
    assert took < whole[1] * 2 + 10  # its HTTP client would wait for a minute, and 10 saves for 2 s each
    assert records(tmp_path / "run") == whole[0]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "done"
    warnings = left_out(caplog)
    assert len(warnings) == 1 and len(server.records) >= after
    texts = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in text for text in texts) and SECRET not in caplog.text
    if way in ("dies", "fails", "resets"):
        assert "http://127.0.0.1" in warnings[0] and "does not answer" in warnings[0]


@pytest.mark.slow
def test_a_server_that_comes_back_within_the_trackers_own_patience_gets_all(
    whole: tuple[list[dict], float], tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server("fails", 3)

    class Retrying(HttpWriter):
        """Tries again, as MLflow's client does."""

        def write(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
            """Sends a record, until it is taken."""
            for _ in range(100):
                with contextlib.suppress(ConnectionError):
                    return super().write(step, split, metrics)
                server.left = 1000  # it is back
                time.sleep(0.01)

    try:
        train(tmp_path / "run", looplib.BackgroundWriter(Retrying(server.address)))
    finally:
        server.close()
    sent = [{name: value for name, value in one.items() if "per_second" not in name} for one in server.records]
    assert sent == records(tmp_path / "run") == whole[0] and not left_out(caplog)


def test_saves_wait_for_a_tracker_that_hangs_a_small_share_of_the_time() -> None:
    class Hanging(looplib.Writer):
        """Waits for the end of the test."""

        end = threading.Event()

        def write(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
            """Waits."""
            self.end.wait(HANG)

    writer = looplib.BackgroundWriter(Hanging(), patience=0.1)
    writer.write(1, "train", {})
    waited = 0.0
    for _ in range(20):
        time.sleep(0.05)
        started = time.monotonic()
        writer.sync()
        waited += time.monotonic() - started
    Hanging.end.set()
    assert waited < 5  # of 40 s, if each waited 2 s


FILES = {
    "train.csv: a link": ("csv/train.csv", lambda path, victim: path.symlink_to(victim / "file")),
    "train.csv: a FIFO": ("csv/train.csv", lambda path, victim: os.mkfifo(path)),
    "train.csv: a directory": ("csv/train.csv", lambda path, victim: path.mkdir()),
    "train.csv: 60 GB": ("csv/train.csv", lambda path, victim: (path.touch(), os.truncate(path, 60 << 30))),
    "train.csv: a step of 5,000 digits": ("csv/train.csv", lambda path, victim: path.write_text("step,a\n" + "9" * 5000 + ",1\n")),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", FILES)
def test_tables_that_somebody_else_has_put_there_cost_the_table_at_most(
    case: str, whole: tuple[list[dict], float], tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    name, make = FILES[case]
    victim, place = tmp_path / "victim", tmp_path / "run" / name
    victim.mkdir()
    (victim / "file").write_text("precious")
    place.parent.mkdir(parents=True)
    make(place, victim)
    started = time.monotonic()
    train(tmp_path / "run", looplib.BackgroundWriter(looplib.CsvWriter(str(tmp_path / "run"))))
    assert time.monotonic() - started < whole[1] * 2 + 20
    assert records(tmp_path / "run") == whole[0] and len(left_out(caplog)) <= 1
    assert [path.name for path in victim.iterdir()] == ["file"] and (victim / "file").read_text() == "precious"


@pytest.fixture
def no_password(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An environment without the variables of MLflow's password."""
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield


def test_the_password_in_an_address_is_given_to_mlflow_where_it_prints_none(no_password: None) -> None:
    assert trackers._without_password("https://me:a%40b@host:5000/x@y") == "https://host:5000/x@y"
    assert (os.environ["MLFLOW_TRACKING_USERNAME"], os.environ["MLFLOW_TRACKING_PASSWORD"]) == ("me", "a@b")
    for uri in ("http://host:5000", "file:///a/b@c", "databricks", "sqlite:///a:b@c"):
        assert trackers._without_password(uri) == uri

"""`board`: the page of all runs below a folder, which refreshes itself in a real Chromium, and answers nobody else."""

import contextlib
import dataclasses
import http.client
import json
import math
import os
import pathlib
import re
import shutil
import socket
import struct
import tempfile
import threading
import time

import pytest

from looplib.__main__ import main as cli
from looplib.commands.board import BoardServer
from looplib.report.page.content import read_run
from looplib.report.page.html import page
from looplib.run.report import RunReport


@pytest.fixture
def served(tmp_path):
    """A function that serves a folder; returns its server."""
    servers = []

    def serve(folder=tmp_path, every=1):
        server = BoardServer(str(folder), 0, every)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return server

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def write(folder, losses, status="running"):
    folder.mkdir(exist_ok=True)
    records = [{"step": step, "split": "train", "loss": loss} for step, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    start = {"started": "2026-01-01T00:00:00+00:00", "status": status}
    (folder / "run.json").write_text(json.dumps({"status": status, "step": len(losses), "starts": [start]}))


def get(server, path="/page", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    connection.request("GET", path, headers={"Host": f"127.0.0.1:{server.server_port}", **headers})
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), dict(answer.getheaders())


@pytest.mark.slow
def test_a_browser_shows_new_runs_and_new_records_without_being_asked_and_says_when_the_board_ends(
    browser, served, tmp_path
):
    server = served()
    troubles = []
    tab = browser.new_page()
    tab.on("pageerror", lambda error: troubles.append(str(error)))
    tab.on("console", lambda message: troubles.append(message.text) if "503" not in message.text else None)
    tab.goto(f"http://127.0.0.1:{server.server_port}/")
    tab.get_by_text("holds no run").wait_for(timeout=10_000)
    write(tmp_path / "one", [3.0, 2.0, 1.5])
    frame = tab.frame_locator("#page")
    frame.get_by_text("1.5").first.wait_for(timeout=10_000)
    write(tmp_path / "two", [0.125])
    frame.get_by_text("two").first.wait_for(timeout=10_000)
    frame.get_by_text("0.125").first.wait_for(timeout=10_000)
    assert not troubles
    server.shutdown()
    server.server_close()
    tab.get_by_text("The board has ended").wait_for(timeout=10_000)
    tab.close()


@pytest.mark.slow
def test_a_page_of_unchanged_runs_is_not_sent_again_and_a_changed_one_is(served, tmp_path):
    write(tmp_path / "run", [1.0], "done")
    server = served()
    code, text, headers = get(server)
    assert code == 200 and '"loss"' in text and "default-src 'none'" in text
    time.sleep(1.1)
    assert get(server, **{"If-None-Match": headers["ETag"]})[:2] == (304, "")
    write(tmp_path / "run", [1.0, 0.5], "done")
    time.sleep(1.1)
    code, _, changed = get(server, **{"If-None-Match": headers["ETag"]})
    assert code == 200 and changed["ETag"] != headers["ETag"]


def test_only_pages_of_this_machine_are_answered(served, tmp_path):
    write(tmp_path / "run", [1.0])
    server = served()
    for host in ("example.org", f"example.org:{server.server_port}", "", "127.0.0.1:1"):
        assert get(server, Host=host)[0] == 403
    for path in ("/../run.json", "/run/run.json", "/page?x"):
        assert get(server, path)[0] == 404
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    connection.request("POST", "/", b"x", {"Host": f"localhost:{server.server_port}"})
    assert connection.getresponse().status == 501


@contextlib.contextmanager
def as_another_user():
    """Another user of the machine, if this one may read everything."""
    own = os.geteuid()
    os.seteuid(own or 65534)
    try:
        yield
    finally:
        os.seteuid(own)


def of_a_page(text):
    """The runs of a page by name."""
    data = re.search(r"<script[^>]*application/json[^>]*>(.*?)</script>", text, re.DOTALL)[1]
    return {run["name"]: run for run in json.loads(data)["runs"]}


BAD_RUNS = {
    "of sums that are infinite": {"seconds": {"train": 1e308, "input": 1e308, "evaluate": 30.0}},
    "of two starts": {
        "starts": [
            {"started": f"2026-01-0{day}T00:00:00+00:00", "step": 9, "seconds": {"train": 1e308, "input": 1.5e308}}
            for day in (1, 2)
        ]
    },
    "of points": {"starts": [{"points": [{"step": n, "seconds": {"train": (-1) ** n * 1.7e308}} for n in range(900)]}]},
    "of a step that is none": {"status": "done", "step": None, "final_step": 3},
}


@pytest.mark.parametrize("bad", BAD_RUNS)
@pytest.mark.parametrize("written", [-(2.0**40), 3e11])
def test_no_number_and_no_time_of_a_run_takes_the_page_from_the_others(bad, written, served, tmp_path):
    write(tmp_path / "good", [0.5], "done")
    write(tmp_path / "bad", [1.7e308, -1.7e308, 1.7e308], "done")
    with open(tmp_path / "bad" / "metrics.jsonl", "a") as file:
        rows = [{"step": n, "split": "train", "loss": 10**308, "skipped_steps": 1.7e308} for n in range(4, 20)]
        file.writelines(json.dumps(row) + "\n" for row in rows)
    report = json.loads((tmp_path / "bad" / "run.json").read_text()) | BAD_RUNS[bad]
    (tmp_path / "bad" / "run.json").write_text(json.dumps(report))
    place = pathlib.Path(tempfile.mkdtemp(dir="/dev/shm")) if written > 0 else tmp_path  # a file system that has it
    if place != tmp_path:
        shutil.copytree(tmp_path, place, dirs_exist_ok=True)
    try:
        os.utime(place / "bad" / "run.json", (written, written))
        code, text, _ = get(served(place))
    finally:
        if place != tmp_path:
            shutil.rmtree(place)
    runs = of_a_page(text)
    assert code == 200 and runs.keys() == {"good", "bad"}
    assert runs["good"]["curves"][0]["values"] == [0.5] and len(runs["bad"]["curves"][0]["values"]) == 19
    assert runs["bad"]["notes"] == [] and runs["bad"]["wall"] == (30.0 if "sums" in bad else 0.0)


def test_a_folder_that_may_not_be_read_is_a_sentence_beside_the_other_runs(served, capsys):
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write(folder / "good", [0.5], "done")
        (folder / "locked").mkdir(0o000 if os.geteuid() else 0o700)
        folder.chmod(0o755)
        with as_another_user():
            code, text, _ = get(served(folder))
            assert cli(["report", str(folder / "locked")]) == 2
        assert "Permission denied" in capsys.readouterr().err
        runs = of_a_page(text)
        assert code == 200 and runs["good"]["curves"][0]["values"] == [0.5]
        assert "cannot be shown" in runs["locked"]["notes"][0] and "Permission denied" in runs["locked"]["notes"][0]


def test_a_run_that_cannot_be_drawn_is_a_sentence_beside_the_other_runs(tmp_path):
    write(tmp_path / "good", [0.5], "done")
    runs = [read_run(str(tmp_path / "good"), name) for name in ("one", "two")]
    shown = of_a_page(page([runs[0], dataclasses.replace(runs[1], wall=math.nan)], "both"))
    assert shown["one"]["curves"] and not shown["one"]["notes"]
    assert "cannot be shown" in shown["two"]["notes"][0] and shown["two"]["curves"] == []


def test_texts_that_reverse_what_follows_them_are_shown_as_escapes(tmp_path):
    write(tmp_path / "run", [0.5], "done")
    name = "a\u202eb\\\\u2066\u2069\\"
    content = dataclasses.replace(read_run(str(tmp_path / "run"), "run"), report=RunReport(error=name))
    text = page([content], name)
    assert of_a_page(text)["run"]["error"] == "a\\u202eb\\\\u2066\\u2069\\"
    assert "\u202e" not in text and "<title>a\\u202eb" in text


def test_browsers_that_go_away_print_nothing_and_an_error_has_no_secret(served, tmp_path, capfd, monkeypatch):
    server = served()
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", server.server_port)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
            client.sendall(b"GET /page HTTP/1.1\r\nX: y\r\n")
    time.sleep(0.2)
    assert capfd.readouterr() == ("", "")

    def fail(server):
        raise RuntimeError("at pg://me:hunter2@host")

    monkeypatch.setattr(BoardServer, "shell", property(fail))
    with pytest.raises(http.client.RemoteDisconnected):
        get(server, "/")
    assert capfd.readouterr() == ("a request could not be answered: at pg://<masked>@host\n", "")


@pytest.mark.skipif(os.geteuid() != 0, reason="port 80 needs root")
def test_a_board_at_the_port_of_http_answers_browsers_which_leave_it_out(tmp_path):
    write(tmp_path / "run", [1.0])
    try:
        server = BoardServer(str(tmp_path), 80, 1)
    except OSError:
        pytest.skip("port 80 is taken")
    with contextlib.closing(server.socket):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for host, code in {"127.0.0.1": 200, "localhost": 200, "localhost:80": 200, "example.org": 403}.items():
            assert get(server, Host=host)[0] == code
        server.shutdown()


def test_bad_arguments_are_sentences(served, tmp_path, capsys):
    server = served()
    cases = {
        (str(tmp_path / "none"),): "is not a directory",
        (str(tmp_path), "--port=70000"): "--port is 70000",
        (str(tmp_path), "--every=0"): "--every is 0",
        (str(tmp_path), f"--port={server.server_port}"): f"port {server.server_port} cannot be had",
    }
    for arguments, sentence in cases.items():
        assert cli(["board", *arguments]) == 2
        assert sentence in capsys.readouterr().err

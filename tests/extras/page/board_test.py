"""`board`: the page of all runs below a folder, which refreshes itself in a real Chromium, and answers nobody else."""

import http.client
import json
import threading
import time

import pytest

from looplib.__main__ import main as cli
from looplib.extras.page.board import BoardServer


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

"""Alerts by `--alert` and `watch`: what happens to a run is told once, and costs it nothing."""

import base64
import contextlib
import http.server
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse

import pytest
from lives import ROOT

from looplib.errors import FlagError, PluginError, UsageError
from looplib.report import alerts
from looplib.report.alerts import Alert, Condition, RunObserver, Sender, check_url
from looplib.report.writers.files import JsonlWriter
from looplib.run import status
from looplib.run.lock import LockHolder

SMALL = ("--config.state_mb=0.01", "--loop=eager", "--config.noisy=False", "--checkpoint_interval=5")
ENDLESS = (*SMALL, "--train_steps=100000", "--config.slow_step=0.02", "--steps_per_loop=5", "--mode=train")


class Inbox:
    """A webhook, whose server may be told to fail."""

    def __init__(self):
        self.alerts, self.status, self.tries, self.authorizations = [], 200, 0, []
        inbox = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                inbox.tries += 1
                inbox.authorizations.append(self.headers["Authorization"])
                if inbox.status == 200:
                    inbox.alerts.append(body)
                self.send_response(inbox.status)
                self.send_header("Location", "/elsewhere")
                self.end_headers()

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook/s3cr3t"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def kinds(self):
        return [alert["kind"] for alert in self.alerts]

    def wait_for(self, kind, seconds=30.0):
        """Waits for an alert of a kind, and returns the first one."""
        until = time.monotonic() + seconds
        while kind not in self.kinds():
            assert time.monotonic() < until, f"no {kind} among {self.alerts}"
            time.sleep(0.02)
        return next(alert for alert in self.alerts if alert["kind"] == kind)

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def inbox():
    with contextlib.closing(Inbox()) as inbox:
        yield inbox


def reached(folder, step):
    """Waits until a run has reported a step."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with contextlib.suppress(OSError, ValueError, IndexError):
            lines = (folder / "metrics.jsonl").read_text().splitlines()
            if json.loads(lines[-1])["step"] >= step:
                return
        time.sleep(0.02)
    raise TimeoutError(f"{folder} has not reached step {step}")


def test_a_killed_run_is_told_although_it_is_dead_and_then_the_end_of_its_next_start(nursery, inbox, tmp_path):
    run = tmp_path / "run"
    life = nursery.life(run, *ENDLESS, f"--alert={inbox.url}")
    reached(run, 10)
    life.kill(signal.SIGKILL)
    assert life.code() == -signal.SIGKILL
    killed = inbox.wait_for("killed")
    assert killed["run"] == str(run) and killed["step"] >= 10 and killed["text"].startswith(f"{run}: killed at step ")
    life = nursery.life(run, *ENDLESS, f"--alert={inbox.url}")
    reached(run, killed["step"] + 5)
    life.kill(signal.SIGTERM)
    assert life.code() == 75
    inbox.wait_for("preempted")
    assert inbox.kinds() == ["killed", "preempted"]
    text = (run / "alerts.log").read_text() + (run / "run.json").read_text()
    assert "s3cr3t" not in text and "killed at step" in text


@pytest.mark.slow
def test_a_guard_that_rolls_back_and_one_that_halts_are_told_with_their_reasons(nursery, inbox, tmp_path):
    flags = [*SMALL, "--steps_per_loop=5", "--mode=train", "--config.nan_at=12", f"--alert={inbox.url}"]
    life = nursery.life(
        tmp_path / "back", *flags, "--train_steps=30", "--non_finite=rollback", "--config.slow_step=0.2"
    )
    assert life.code() == 0, life.output()
    done = inbox.wait_for("done")
    assert inbox.kinds() == ["rollback", "done"] and done["step"] == 30
    assert re.match(r"back to step 10: .*", inbox.alerts[0]["sentence"]) and inbox.alerts[0]["step"] == 12
    life = nursery.life(tmp_path / "halt", *flags, "--train_steps=30")
    assert life.code() == 1
    failed = inbox.wait_for("failed")
    assert "at step 12" in failed["sentence"] and failed["run"] == str(tmp_path / "halt")
    assert inbox.kinds() == ["rollback", "done", "failed"]


@pytest.mark.slow
def test_a_stall_and_its_end_are_told_by_a_process_that_watches(nursery, inbox, tmp_path, monkeypatch):
    run = tmp_path / "run"
    life = nursery.life(run, *ENDLESS)
    reached(run, 5)
    command = [
        nursery.python,
        "-m",
        "looplib",
        "status",
        tmp_path,
        "--watch",
        f"--alert={inbox.url}",
        "--interval=0.2",
        "--until_end",
    ]
    watch = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    try:
        time.sleep(2)
        life.kill(signal.SIGSTOP)
        silent = inbox.wait_for("silent", 90)  # after a minute without news
        assert "is alive, and reports nothing" in silent["sentence"]
        life.kill(signal.SIGCONT)
        inbox.wait_for("recovered")
        life.kill()
        inbox.wait_for("killed")
        assert watch.wait(10) == 0
        assert [line.split()[3] for line in watch.stdout] == ["silent", "recovered", "killed"]
    finally:
        watch.kill()
        life.end()


def write(folder, status, records=(), started="2026-01-01T00:00:00+00:00", **more):
    folder.mkdir(exist_ok=True)
    start = {"started": started, "status": status, "process": {"pid": 1, "host": "x"}, **more}
    report = {"status": status, "step": 7, "starts": [start], **more}
    (folder / "run.json").write_text(json.dumps(report))
    with open(folder / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def kinds(alerts):
    return [(alert.kind, alert.step) for alert in alerts]


def test_what_had_ended_before_the_first_look_is_no_news_and_a_new_start_is(tmp_path):
    run = tmp_path / "run"
    write(run, "failed", [{"step": 3, "split": "train", "loss": None}], error="old")
    observer = RunObserver(str(run), [Condition.parse("train/loss>0")])
    assert observer.look() == [] and observer.has_ended
    write(run, "failed", [{"step": 5, "split": "train", "loss": 1.0}], "2026-01-02T00:00:00+00:00", error="new")
    assert [alert.sentence for alert in observer.look()] == ["train/loss is 1 (train/loss>0)", "new"]
    assert observer.look() == []


def test_a_kill_is_told_with_whether_the_run_can_be_resumed(tmp_path):
    for name, saved, advice in (
        ("new", {}, "begin again: nothing was saved yet"),
        ("saved", {"saved_step": 3}, "resume"),
    ):
        with subprocess.Popen(["true"]) as gone:
            gone.wait()
        write(tmp_path / name, "running", process={"pid": gone.pid}, **saved)
        observer = RunObserver(str(tmp_path / name), process=gone.pid)
        (alert,) = [*observer.look(), *observer.look()]
        assert alert.sentence == f"its process is gone without a word; run the same command to {advice}"


def test_clocks_that_are_set_make_no_run_silent_and_hide_no_silence(tmp_path, monkeypatch):
    run, clock = tmp_path / "run", {"time": time.time(), "monotonic": time.monotonic()}
    for name in clock:
        monkeypatch.setattr(f"looplib.report.alerts.time.{name}", lambda name=name: clock[name])
    monkeypatch.setattr(status.lock, "holder", lambda folder: LockHolder("other", 1, None))

    def look(seconds, set_by, wrote):
        clock["monotonic"] += seconds
        clock["time"] += seconds + set_by
        if wrote:
            write(run, "running")
            os.utime(run / "run.json", (clock["time"],) * 2)
            os.utime(run / "metrics.jsonl", (clock["time"],) * 2)
        return [alert.kind for alert in observer.look()]

    observer = RunObserver(str(run))
    assert look(1, 0, True) == []
    assert look(10, 3600, False) == [] and look(10, 0, True) == []
    assert look(10, -7200, True) == [] and look(50, 0, False) == []
    assert look(20, -3600, False) == ["silent"] and look(1, 0, True) == ["recovered"]


def test_a_condition_on_a_metric_that_never_came_is_told_at_the_end(tmp_path):
    run, conditions = tmp_path / "run", [Condition.parse("train/los>2"), Condition.parse("train/loss>2")]
    write(run, "running", [{"step": 1, "split": "train", "loss": None}], process={"pid": os.getpid()})
    observer = RunObserver(str(run), conditions, process=os.getpid())
    observer.look()
    write(run, "done", process={"pid": os.getpid()})
    assert [alert.sentence for alert in observer.look() if alert.kind == "done"] == [
        "the training has reached its end; no metric of --alert_when was reported for train/los>2"
    ]


def test_the_end_of_the_own_process_is_news_at_the_first_look(tmp_path):
    write(tmp_path / "run", "failed", error="soon")
    assert RunObserver(str(tmp_path / "run"), process=os.getpid()).look() == []  # of an earlier start
    assert kinds(RunObserver(str(tmp_path / "run"), process=1).look()) == [("failed", 7)]
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    observer = RunObserver(str(tmp_path / "run"), process=gone.pid)
    assert kinds(observer.look()) == [("killed", 7)] and observer.has_ended and observer.look() == []


def test_a_metric_is_told_once_when_it_gets_bad_and_again_after_it_was_good(tmp_path):
    run = tmp_path / "run"
    write(run, "done")
    observer = RunObserver(str(run), [Condition.parse("eval/loss>2.5"), Condition.parse("train/accuracy<=0.5")])
    observer.look()
    values = [2.4, 2.6, 2.7, 2.0, 3.0]
    write(run, "done", [{"step": step, "split": "eval", "loss": value} for step, value in enumerate(values)])
    assert kinds(observer.look()) == [("worse", 1), ("worse", 4)]
    records = [{"step": step, "split": "train", "loss": None, "accuracy": None} for step in (10, 11)]
    write(run, "done", [*records, {"step": 12, "split": "train", "accuracy": 0.5}])
    assert kinds(observer.look()) == [("not_finite", 10), ("not_finite", 10), ("worse", 12)]
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 13, "split": "eval", "loss": 9')  # a line that is being written
    assert observer.look() == []
    with open(run / "metrics.jsonl", "a") as file:
        file.write("}\n")
    assert observer.look() == []  # it is still bad
    (run / "metrics.jsonl").rename(run / "old")  # a start that takes out records replaces the file
    write(run, "done", [{"step": 12, "split": "train", "accuracy": 0.1}, {"step": 14, "split": "eval", "loss": 1}])
    assert observer.look() == []
    write(run, "done", [{"step": 15, "split": "eval", "loss": 4}])
    assert kinds(observer.look()) == [("worse", 15)]


class Watched:
    """A run whose report and records are written as a training writes them, and its observer."""

    def __init__(self, folder, condition="eval/loss>2.5"):
        self.folder, self.starts = folder, []
        self.begin()
        self.observer = RunObserver(str(folder), [Condition.parse(condition)])
        assert self.observer.look() == []

    def begin(self, restored=None):
        """Begins a start, which continues from a step or from none."""
        self.folder.mkdir(exist_ok=True)
        number = f"{len(self.starts):02}" if self.starts else f"{time.time_ns()}"
        path = restored and f"{self.folder}/checkpoints/ckpt-{restored}"
        process = {"pid": os.getpid(), "host": socket.gethostname()}
        self.starts.append({"started": number, "status": "running", "process": process, "restored_from": path})
        self.note()
        self.writer = JsonlWriter(str(self.folder / "metrics.jsonl"))
        self.writer.resume(restored or 0, {"train": restored or 0, "eval": restored or 0})

    def go_back(self, to):
        self.starts[-1].setdefault("rollbacks", []).append({"step": to + 7, "to": to, "reason": "a spike"})
        self.note()
        self.writer.resume(to, {"train": to, "eval": to})

    def note(self):
        report = {"status": "running", "step": 0, "starts": self.starts}
        (self.folder / "run.json").write_text(json.dumps(report))

    def told(self, **losses):
        """Writes evaluations, such as `s100=3.0`; returns what is told of metrics."""
        for step, loss in losses.items():
            self.writer.write(int(step[1:]), "eval", {"loss": loss})
        return [(alert.kind, alert.step) for alert in self.observer.look() if alert.kind in ("worse", "not_finite")]


@pytest.mark.parametrize("looked", [True, False])
@pytest.mark.parametrize("how", ["new", "resumed", "rolled back"])
def test_steps_that_a_run_trains_again_are_told_again_and_those_that_it_has_kept_are_not(how, looked, tmp_path):
    run = Watched(tmp_path / "run")
    assert run.told(s100=9.0, s200=1.0, s300=9.0, s900=math.nan, s1000=1.0) == [
        ("worse", 100), ("worse", 300), ("not_finite", 900)
    ]  # fmt: skip
    if how == "new":
        shutil.rmtree(run.folder)
        run.starts = []
        run.begin()
    elif how == "resumed":
        run.begin(restored=200)
    else:
        run.go_back(200)
    assert not looked or run.told() == []
    kept = {"s100": 9.0, "s200": 1.0}  # as before, which a run that was kept has in its file already
    again = run.told(**(kept if how == "new" else {}), s300=9.0, s400=1.0, s500=math.nan)
    assert again == [("worse", 100)] * (how == "new") + [("worse", 300), ("not_finite", 500)]
    assert run.told(s900=math.nan, s1100=9.0) == [("worse", 1100)]
    assert run.told() == []


def test_a_run_that_is_the_same_again_to_the_byte_is_told_again(tmp_path):
    run = Watched(tmp_path / "run")
    assert run.told(s100=9.0) == [("worse", 100)]
    shutil.rmtree(run.folder)
    run.starts = []
    run.begin()
    assert run.told(s100=9.0) == [("worse", 100)]


def test_an_evaluation_of_an_earlier_step_that_comes_later_is_news(tmp_path):
    run = Watched(tmp_path / "run")
    assert run.told(s1000=1.0) == []
    assert run.told(s500=9.0) == [("worse", 500)]


def test_the_process_of_a_resumed_start_tells_nothing_of_what_the_start_has_kept(tmp_path):
    run = Watched(tmp_path / "run")
    run.told(s100=9.0, s200=1.0)
    run.begin(restored=200)
    run.observer = RunObserver(str(run.folder), [Condition.parse("eval/loss>2.5")], process=os.getpid())
    assert run.told(s300=9.0) == [("worse", 300)]


def test_a_report_that_cannot_be_read_for_a_moment_is_no_other_run(tmp_path):
    run = Watched(tmp_path / "run")
    run.go_back(0)
    assert kinds(run.observer.look())[:1] == [("rollback", 7)]
    (run.folder / "run.json").write_text("{")
    assert run.observer.look() == []
    run.note()
    assert [kind for kind, _ in kinds(run.observer.look()) if kind == "rollback"] == []


@pytest.mark.parametrize("content", ["", "{", "[]", '{"starts": [3]}', '{"starts": [{"rollbacks": 5, "process": []}]}'])
def test_any_files_are_looked_at(content, tmp_path):
    (tmp_path / "run.json").write_text(content)
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\n{}\n[1]\n")
    observer = RunObserver(str(tmp_path), [Condition.parse("train/loss>0")])
    assert observer.look() == [] == observer.look()


def wait_until(condition, seconds=15.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_an_address_that_is_down_gets_all_alerts_in_order_once_it_is_up(inbox, monkeypatch):
    monkeypatch.setattr(alerts, "_FIRST_WAIT", 0.05)
    said = []
    inbox.status = 503
    sender = Sender(inbox.url, said.append)
    for step in range(3):
        sender.add(Alert("worse", "run", step, "it is"))
    wait_until(lambda: inbox.tries >= 2)
    assert not sender.is_done and "HTTP 503" in said[0] and "http://127.0.0.1" in said[0] and "s3cr3t" not in said[0]
    inbox.status = 200
    wait_until(lambda: sender.is_done)
    assert [alert["step"] for alert in inbox.alerts] == [0, 1, 2]


def test_an_address_that_hangs_keeps_no_other_one_waiting_and_a_redirection_is_an_error(inbox):
    said = []
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and never answers
        hanging = Sender(f"http://127.0.0.1:{silent.getsockname()[1]}/", said.append)
        good = Sender(inbox.url, said.append)
        for sender in (hanging, good):
            sender.add(Alert("done", "run", 1, "x"))
        wait_until(lambda: good.is_done, 5)
        assert inbox.kinds() == ["done"] and not hanging.is_done
    inbox.status = 302
    good.add(Alert("done", "run", 2, "x"))
    wait_until(lambda: any("HTTP 302" in sentence for sentence in said))


@pytest.mark.parametrize("url", ["", "x", "http://", "https:///path", "http://h:port/", "//host", "http://h/s3cr3t x",
                                 "http://h/s3cr3t\t", "http://h/\ns3cr3t", "http://h/s3cr3tü", "http://h/\x7fs3cr3t"])  # fmt: skip
def test_what_is_no_address_is_refused_without_showing_it(url):
    with pytest.raises(FlagError, match="--alert has a value that is no URL") as refusal:
        check_url(url)
    assert "s3cr3t" not in str(refusal.value)


@pytest.mark.parametrize("user", ["me:s3cr3t%40%2Fx", "me:s3cr3t@x", "t0ps3cr3t"])
def test_a_user_and_a_password_are_sent_and_shown_nowhere(user, inbox, monkeypatch):
    monkeypatch.setattr(alerts, "_FIRST_WAIT", 0.05)
    said, name = [], urllib.parse.unquote(user)
    inbox.status = 500
    sender = Sender(inbox.url.replace("//", f"//{user}@"), said.append)
    sender.add(Alert("failed", "run", 1, f"no access to {inbox.url} by {name}"))
    wait_until(lambda: inbox.tries >= 2)
    inbox.status = 200
    wait_until(lambda: sender.is_done)
    expected = f"Basic {base64.b64encode(f'{name}:'.encode() if ':' not in name else name.encode()).decode()}"
    assert set(inbox.authorizations) == {expected}
    assert said and "s3cr3t" not in f"{said} {inbox.alerts}" and "no access to http" in inbox.alerts[0]["sentence"]


def test_a_service_needs_apprise(monkeypatch):
    monkeypatch.setattr(alerts.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PluginError, match=r"ntfy.*pip install 'looplib\[alerts\]'"):
        check_url("ntfy://topic")


def test_apprise_takes_an_alert(inbox):
    pytest.importorskip("apprise")
    sender = Sender(inbox.url.replace("http://", "json://"), print)
    sender.add(Alert("done", "run", 5, "the training has reached its end"))
    wait_until(lambda: sender.is_done)
    assert inbox.alerts[0]["title"] == "run: done at step 5"
    with pytest.raises(UsageError, match="nosuchservice that apprise does not know"):
        check_url("nosuchservice://s3cr3t/x")


@pytest.mark.slow
def test_apprise_does_not_print_an_address():
    pytest.importorskip("apprise")
    program = (
        "from absl import logging; logging.use_absl_handler(); "
        "from looplib.report.alerts import check_url; check_url('nosuchservice://s3cr3t/x')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    error = done.stderr.replace(program, "")
    assert "Unparseable URL" in error and "s3cr3t" not in error


@pytest.mark.parametrize(
    "text, value, holds",
    [
        ("eval/loss>2.5", 2.5, False),
        ("eval/loss>=2.5", 2.5, True),
        (" a/b/c < 1e-3 ", 0.0, True),
        ("e/l<1", math.nan, False),
    ],
)
def test_a_condition_is_read_as_it_is_written(text, value, holds):
    condition = Condition.parse(text)
    assert condition.holds(value) is holds and Condition.parse(str(condition)) == condition


@pytest.mark.parametrize("text", ["", "loss>1", "eval/loss", "eval/loss>x", "eval/loss=1", "eval/loss>nan", "a/b>1>2"])
def test_another_form_of_a_condition_is_refused(text):
    with pytest.raises(FlagError, match="--alert_when is .*expected a metric and its bound"):
        Condition.parse(text)

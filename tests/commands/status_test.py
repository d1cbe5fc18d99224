"""`python -m looplib status`: how each run below a folder is doing, from its files alone."""

import contextlib
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time

import pytest

from looplib.__main__ import main as cli
from looplib.report.page.content import read_run
from looplib.report.page.verdict import findings
from looplib.run import lock, status

SLOW = ["--mode=train", "--config.slow_step=0.02", "--train_steps=100000"]
LIVES = {
    "moving": SLOW,  # starts, runs, stalls, and is killed
    "preempted": SLOW,
    "failed": ["--mode=train", "--config.fail_at=15", "--train_steps=60", "--loop=eager"],
    "sweep/trial-0000/seed-0": ["--train_steps=20", "--loop=eager"],
}


def until(condition, seconds=90.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def age(folder, seconds):
    """Lets the files of a run have been written earlier."""
    for name in ("run.json", "metrics.jsonl"):
        os.utime(folder / name, (time.time() - seconds,) * 2)


def table(*arguments):
    """The rows of the table: dict from name to (state, line)."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert cli(["status", *map(str, arguments)]) == 0
    lines = out.getvalue().splitlines()
    start = lines[0].index("state")
    return {line[:start].strip(): (line[start:].split()[0], line) for line in lines[1:]}


@pytest.fixture(scope="module")
def runs(nursery, tmp_path_factory):
    """A folder with runs that have ended in each way."""
    folder = tmp_path_factory.mktemp("runs")
    lives = {name: nursery.life(folder / name, *flags) for name, flags in LIVES.items()}
    moving, rows = folder / "moving", {}

    def reports(name):
        metrics = folder / name / "metrics.jsonl"
        return lives[name].ended() or (metrics.exists() and metrics.read_text().count("\n") >= 2)

    try:
        until(lambda: lock.holder(str(moving)))
        rows["starting"] = table(folder)["moving"]
        until(lambda: reports("moving"))
        rows["running"] = table(folder)["moving"]
        lives["moving"].kill(signal.SIGSTOP)
        age(moving, 600)
        rows["silent"] = table(folder)["moving"]
        lives["moving"].kill()
        until(lambda: reports("preempted"))
        later = nursery.life(moving, *SLOW)  # which ends before it trains
        until(lambda: (holder := lock.holder(str(moving))) and holder.pid == later.pid and holder.holds)
        rows["starting again"] = table(folder)["moving"]
        later.end()
        early = nursery.life(folder / "early", *SLOW)
        until(lambda: lock.holder(str(folder / "early")))
        early.kill()
        early.code()
        lives["preempted"].kill(signal.SIGTERM)
        for life in lives.values():
            life.code()
        for name, seconds in (("elsewhere", 5), ("elsewhere_silent", 7200)):
            shutil.copytree(moving, folder / name)
            holder = json.loads((moving / "lock").read_text())
            (folder / name / "lock").write_text(json.dumps({**holder, "host": "node7"}))
            age(folder / name, seconds)
        yield folder, rows, table(folder)
    finally:
        for life in lives.values():
            life.end()


@pytest.mark.slow
def test_a_run_is_starting_then_running_then_silent_then_killed(runs):
    _, moments, rows = runs
    assert [moments[state][0] for state in ("starting", "running", "silent")] == ["starting", "running", "silent"]
    assert re.search(r" \d+ s ago", moments["starting"][1])
    assert re.search(r"process \d+ is alive, and reports nothing", moments["silent"][1])
    assert (
        moments["starting again"][0] == "starting" and "after a start that was killed" in moments["starting again"][1]
    )
    assert rows["moving"][0] == "killed" and "a later start ended before it trained; loss" in rows["moving"][1]
    ahead = re.search(r" ([\d,]+)/100,000 +([\d.]+) +([\d.]+) (min|h|s) ", moments["running"][1])
    step, rate, left = (float(group.replace(",", "")) for group in ahead.groups()[:3])
    unit = {"s": 1, "min": 60, "h": 3600}[ahead[4]]
    assert left * unit == pytest.approx((100_000 - step) / rate, rel=0.1)


def test_the_time_left_has_evaluations_saves_and_actions_in_it(tmp_path):
    (tmp_path / "lock").write_text(json.dumps({"pid": 1, "host": "node7"}))
    before = {"start": 5.0, "compile": 60.0, "train": 1.0, "other": 9.0, "wall": 75.0}
    seconds = {"start": 5.0, "compile": 100.0, "train": 11.0, "evaluate": 30.0, "other": 29.0, "wall": 175.0}
    start = {"seconds": seconds, "step": 160, "points": [{"step": 100, "seconds": before}]}
    report = {"status": "running", "step": 160, "end": 1000, "starts": [start]}
    (tmp_path / "run.json").write_text(json.dumps(report))
    assert status.read_status(str(tmp_path)).left == 840  # a second a step


def test_a_value_that_is_not_finite_is_told_as_such(tmp_path):
    (tmp_path / "run.json").write_text('{"status": "done"}')
    record = {"step": 3, "split": "train", "loss": None, "score": 2.5}  # NaN or infinity
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    ((_, line),) = table(tmp_path).values()
    assert line.endswith("ago  loss not finite, score 2.5")


def test_each_run_is_shown_with_how_it_ended(runs):
    _, _, rows = runs
    assert rows["early"][0] == "failed" and "it ended before it trained" in rows["early"][1]
    assert {name: state for name, (state, _) in rows.items()} == {
        "moving": "killed", "preempted": "preempted", "failed": "failed", "sweep/trial-0000/seed-0": "done",
        "elsewhere": "running", "elsewhere_silent": "silent", "early": "failed",
    }  # fmt: skip
    assert list(rows) == sorted(rows)
    assert "this example is broken" in rows["failed"][1]
    assert "on node7" in rows["elsewhere"][1] and re.search(r" \d+ s ago", rows["elsewhere"][1])
    assert "2.0 h ago" in rows["elsewhere_silent"][1] and "ran on node7" in rows["elsewhere_silent"][1]


def test_step_rate_and_metrics_are_those_of_the_last_records(runs):
    folder, _, rows = runs
    records = [json.loads(line) for line in (folder / "moving" / "metrics.jsonl").read_text().splitlines()]
    assert f"{records[-1]['step']}/100,000" in rows["moving"][1]
    assert f"loss {records[-1]['loss']:.4g}, accuracy {records[-1]['accuracy']:.4g}" in rows["moving"][1]
    done = [json.loads(line) for line in (folder / "sweep/trial-0000/seed-0/metrics.jsonl").read_text().splitlines()]
    shown = rows["sweep/trial-0000/seed-0"][1]
    assert "20/20" in shown and f"eval/accuracy {done[-1]['accuracy']:.4g}" in shown
    assert f"{done[-2]['steps_per_second']:.4g} " in shown


def test_the_page_of_a_run_has_the_word_and_the_step_of_its_status(runs):
    folder, _, rows = runs
    for name in LIVES:
        page = read_run(str(folder / name), name)
        assert page.status == rows[name][0] and f" {page.step}/" in rows[name][1]
        assert page.starts[-1].status == page.status
        assert ("A later start ended before it trained" in " ".join(page.notes)) == (name == "moving")
    moving = read_run(str(folder / "moving"), "moving")
    assert re.fullmatch(r"The run was killed at step \d+ or later\.", findings(moving)[0].text)
    assert len(moving.starts) == 1  # those that trained


def test_nothing_is_locked_or_written(runs):
    def contents():
        return {path: path.stat().st_mtime_ns for path in runs[0].rglob("*")}

    before = contents()
    table(runs[0])
    assert contents() == before


def test_hostile_directories_cost_little_and_send_nothing_to_the_terminal(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "run.json").write_text('{"status": "done"}')
    top = tmp_path / "top"
    names = ("fifo", "text", "numbers", "names\x1b[2J", "deep", "links")
    for name in names:
        (top / name).mkdir(parents=True)
    (top / "link").symlink_to(outside)
    (top / "links" / "run.json").symlink_to(outside / "run.json")
    (top / "links" / "metrics.jsonl").write_text("")
    os.mkfifo(top / "fifo" / "metrics.jsonl")
    os.mkfifo(top / "fifo" / "lock")
    (top / "fifo" / "run.json").write_text(
        '{"status": "running", "step": "x", "starts": [7], "metrics": [], "flags": 3}'
    )
    (top / "text" / "run.json").write_text("[" * 100_000)
    (top / "text" / "lock").write_text('{"pid": -1, "host": 3}')
    huge = "9" * 4000
    record = f'{{"step": {huge}, "split": "train", "loss": 1e400, "a": {huge}, "steps_per_second": -1e-300}}\n'
    (top / "numbers" / "metrics.jsonl").write_text("\x00\n" * 10**6 + record)
    report = {
        "status": "failed",
        "step": 10**20,
        "end": -1,
        "error": "\x1b]0;x\x07\nbad\u202e",
        "metrics": {"e\x1b[A": {"loss": None}},
    }
    (top / "names\x1b[2J" / "run.json").write_text(json.dumps(report))
    started = time.monotonic()
    rows = table(top)
    assert time.monotonic() - started < 2
    assert {name: state for name, (state, _) in rows.items()} == {
        "fifo": "killed", "text": "unknown", "numbers": "unknown", "links": "unknown", r"names\x1b[2J": "failed",
    }  # fmt: skip
    assert all(line.isprintable() for _, line in rows.values())
    assert r"\x1b]0;x\x07\nbad\u202e" in rows[r"names\x1b[2J"][1]


def test_status_and_a_page_need_no_tensorflow(runs, tmp_path):
    code = "import sys; from looplib.__main__ import main; main(['status', sys.argv[1]]); main(['report', *sys.argv[1:]]); "
    command = [
        sys.executable,
        "-c",
        f"{code} print('tensorflow' in sys.modules)",
        runs[0],
        f"--output={tmp_path}/page.html",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    shown = len(runs[2]) - 2  # without the one that is three folders below, and the one without a report
    lines = done.stdout.splitlines()
    assert lines[-2:] == [f"{tmp_path}/page.html: {shown} runs", "False"] and not done.stderr
    assert len(lines) == 3 + len(runs[2])


def test_wrong_arguments_of_tools_are_refused_before_tensorflow_is_imported(runs, tmp_path):
    none, moving = f"{tmp_path}/none", f"{runs[0]}/moving"
    refused = {
        f"replay {none} --step=1": f"{none}/run.json cannot be read",
        f"replay {moving} --step=0": "--step is 0; expected a whole number of at least 1",
        f"replay {moving} --step=99999": "--step is 99999, but the run is known up to step",
        f"replay {moving} --step=1 --pdb": "add --eager",
        f"replay {moving} --step=1 --save={moving}/batch.npz": "is in the run directory",
        f"diff {moving} {none}": f"{none}/run.json cannot be read",
        f"rerun {none}": f"{none}/run.json cannot be read",
        f"export {none}": f"{none}/run.json cannot be read",
        f"inspect {none}": f"{none} is not a directory",
        f"average {none} {none}2": f"{none} is not a directory",
    }
    code = "import sys; from looplib.__main__ import main; codes = {main(line.split()) for line in sys.argv[1:]}; "
    command = [sys.executable, "-c", f"{code} print(codes, 'tensorflow' in sys.modules)", *refused]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "{2} False\n"
    for line, sentence in zip(done.stderr.splitlines(), refused.values(), strict=True):
        assert line.startswith("looplib: error: ") and sentence in line


def test_a_folder_without_runs_and_one_that_is_not_there(tmp_path, capsys):
    assert cli(["status", str(tmp_path)]) == 1
    assert "there is no run in" in capsys.readouterr().out
    assert cli(["status", str(tmp_path / "nothing")]) == 2
    assert "is not a directory" in capsys.readouterr().err


def test_watch_redraws_a_terminal_until_ctrl_c(runs, python):
    ours, theirs = pty.openpty()
    command = [python, "-m", "looplib", "status", str(runs[0]), "--watch", "--interval=0.2"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    text, ended = b"", False
    with contextlib.suppress(OSError):  # the end of a terminal whose program has ended
        while select.select([ours], [], [], 60)[0]:
            text += os.read(ours, 65536)
            if not ended and text.count(b"\x1b[H\x1b[J") >= 3:
                process.send_signal(signal.SIGINT)  # once: a second one may come as the process ends
                ended = True
    assert process.wait(30) == 0, text
    assert text.count(b"trial-0000") >= 2 and b"Traceback" not in text


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize(("tool", "code"), [("status", 0), ("inspect", 0), ("diff", 2), ("report", 0)])
def test_a_reader_that_has_ended_is_no_traceback_and_no_verdict(tool, code, runs, python, tmp_path):
    run = f"{runs[0]}/sweep/trial-0000/seed-0"
    more = {"diff": [run], "report": [f"--output={tmp_path}/page.html"]}.get(tool, [])
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer) as stdout:
        done = subprocess.run([python, "-m", "looplib", tool, run, *more], stdout=stdout, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (code, b"")


def test_closed_streams_are_no_traceback(runs):
    command = f"{sys.executable} -m looplib status {runs[0]}"
    done = subprocess.run(["sh", "-c", f"{command} >&-; echo $?; {command} <&- >&- 2>&-; echo $?"], capture_output=True)
    assert (done.stdout, done.stderr) == (b"0\n0\n", b"")

"""A console that is broken: full, closed, without a reader, or with one that does not read. Runs end as with a good one."""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import more
from kill_test import records, saved_step

from looplib.run import commits

COMMON = ["--train_steps=20", "--mode=train", "--config.letter=λ", "--loop=eager"]
STALLS = "--config.slow_step=1000"
CONSOLES = ("good", "ascii", "full", "closed", "reader dies", "reader stops")
# Ending -> (flags, signals that it gets in a step, exit code).
ENDINGS: dict[str, tuple[list[str], list[int], int]] = {
    "done": ([], [], 0),
    "SIGTERM": (["--config.slow_step=0.1"], [signal.SIGTERM], 75),
    "SIGINT": (["--config.slow_step=0.1"], [signal.SIGINT], 75),
    "second signal": ([STALLS], [signal.SIGINT, signal.SIGTERM], 143),
    "watchdog": ([STALLS, "--stall_limit=2"], [], 76),
    "error": (["--config.fail_at=15"], [], 1),
}
# Each console and each ending at least once; the rest of their product are repetitions.
ONCE = [
    ("good", "done"), ("ascii", "error"), ("full", "watchdog"), ("closed", "SIGTERM"), ("reader stops", "done"),
    ("reader dies", "SIGINT"),  # as Ctrl-C ends `| tee` too
    ("reader stops", "second signal"),
]  # fmt: skip
PRODUCT = [(kind, ending) for ending in ("done", "SIGTERM", "watchdog", "error") for kind in CONSOLES]
CASES = [*ONCE, *more((case,) for case in [*PRODUCT, ("full", "second signal")] if case not in ONCE)]


@contextlib.contextmanager
def console(kind: str, place: pathlib.Path) -> Iterator[tuple[dict[str, Any], Callable[[], None]]]:
    """Yields what a life is ordered with, and a function to call once it takes steps."""
    if not kind.startswith("reader"):
        orders = {"full": {"console": "/dev/full"}, "closed": {"closed": True}, "ascii": {"encoding": "ascii"}}
        yield orders.get(kind, {}), lambda: None
        return
    os.mkfifo(place)
    with contextlib.ExitStack() as stack:
        reader = os.open(place, os.O_RDONLY | os.O_NONBLOCK)
        stack.callback(os.close, reader)
        if kind == "reader stops":
            fill(place)
            yield {"console": str(place)}, lambda: None
        else:
            yield {"console": str(place)}, stack.close


def fill(fifo: pathlib.Path) -> None:
    """Writes to a pipe until nothing more fits."""
    writer = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.close(writer)


def run(nursery, kind: str, ending: str, folder: pathlib.Path) -> tuple[int, float, pathlib.Path, str]:
    """Returns the exit code, the seconds from the first step (or the signal) to the end, the directory, and the log."""
    flags, signums, _ = ENDINGS[ending]
    folder.mkdir()
    with console(kind, folder / "fifo") as (order, begun):
        life = nursery.life(folder / "run", *COMMON, *flags, **order)
        wait_for(life, lambda number, what: what == "step")
        begun()
        started = time.monotonic()
        if signums:
            if ending != "second signal":
                wait_for(life, lambda number, what: number >= 12)
            for signum in signums:
                life.kill(signum)
                time.sleep(0.3 if len(signums) > 1 else 0)
        code = life.code(40)
        return code, time.monotonic() - started, folder / "run", life.output()


def wait_for(life, condition: Callable[[int, str], bool]) -> None:
    end = time.monotonic() + 60
    while not condition(*life.note()) and not life.ended(0.005) and time.monotonic() < end:
        pass


@pytest.fixture(scope="module")
def ends(nursery, cases, tmp_path_factory):
    """Each ending on each console, some at a time, as most only wait: dict from both to a future."""
    folder = tmp_path_factory.mktemp("consoles")
    wanted = dict.fromkeys([("good", "done"), *cases("case")])  # the first one is what others are compared with
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return {case: pool.submit(run, nursery, *case, folder / "-".join(case)) for case in wanted}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_run_ends_as_on_a_good_console(case, ends):
    kind, ending = case
    code, seconds, folder, output = ends[kind, ending].result()
    assert code == ENDINGS[ending][2], output
    assert seconds < 40  # 15 s would be the grace of a step; a stopped reader is waited for twice, 5 s each
    report = json.loads((folder / "run.json").read_text())
    if ending == "done":
        assert report["status"] == "done" and saved_step(folder) == 20
        assert records(folder) == records(ends["good", "done"].result()[2]) != []
    if ending.startswith("SIG"):
        newest = commits.newest(str(folder / "checkpoints"))
        assert report["status"] == "preempted" and newest.step == report["step"] >= 5 and not commits.verify(newest)
    if ending == "error":
        assert report["status"] == "failed" and saved_step(folder) == 12 and "broken" in report["error"]
    if ending in ("done", "SIGTERM", "SIGINT", "error"):
        lost = {"full": "No space left", "reader dies": "Broken pipe", "reader stops": "no reader for 5 s"}
        assert lost[kind] in report["console"] if kind in lost else "console" not in report
    if kind == "ascii":
        assert output.isascii() and ("\\u03bb" in output) == (ending != "watchdog")
    if kind == "good":
        last = output.strip().splitlines()[-1]
        assert last.startswith("looplib: " if code else "done at step 20"), last
        assert ending != "watchdog" or re.search(r"Thread MainThread .*\n(  File .*\n)*  File .* in train\n", output)


READER_COMES_BACK = """
import logging, os, sys
sys.path.insert(0, sys.argv[1])
from looplib.base import console
console.STALL_SECONDS = 0.2
handler = logging.StreamHandler()
logging.getLogger().addHandler(handler)
with console.guarded():
    for number in range(2000):
        print(f"line {number} of those that were printed")
    os.write(1, b"what others write meanwhile")
    open(sys.argv[2], "w").close()
    sys.stdin.readline()
    print("printed once the reader was back", flush=True)
    logging.warning("logged")
print("after", handler.stream is sys.stderr is sys.__stderr__, flush=True)
print(console.first_fault())
"""


def test_a_reader_that_comes_back_gets_what_follows_and_a_line_about_what_it_missed(tmp_path):
    root = pathlib.Path(__file__).parents[2]
    command = [sys.executable, "-c", READER_COMES_BACK, str(root), str(tmp_path / "printed")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        end = time.monotonic() + 20
        while not (tmp_path / "printed").exists():
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.01)
        os.set_blocking(process.stdout.fileno(), False)
        first = process.stdout.read()
        os.set_blocking(process.stdout.fileno(), True)
        output, errors = process.communicate("\n", timeout=20)
    lines = (first + output).splitlines()
    assert lines[0] == "line 0 of those that were printed" and len(first) >= 60_000
    assert lines[-4:] == [
        "(looplib: text is missing here: there was no reader)", "printed once the reader was back", "after True",
        "<stdout> cannot be written (no reader for 0.2 s); some of what was printed is lost",
    ]  # fmt: skip
    assert "what others" not in output and errors == "logged\n" and process.returncode == 0

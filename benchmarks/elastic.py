"""How long a training stands still when a worker dies: `python -m benchmarks.elastic`, about a minute for each death.

`launch` runs workers on this machine. One is killed once they train, and the time is taken until the others report
steps that come after their checkpoint. Each round is a launch of its own.
"""

import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from absl import app, flags

from looplib.run.directory import RunDir
from looplib.run.records import read_jsonl
from looplib.run.report import StartEntry

_ROUNDS = flags.DEFINE_integer("rounds", 3, "Deaths.", lower_bound=1)
_WORKERS = flags.DEFINE_integer("workers", 3, "Workers at the beginning.", lower_bound=2)
_LIMIT, _PAUSE = 300.0, 0.05  # seconds
_STEPS = 100  # of a loop, and between two checkpoints


def main(_: list[str]) -> None:
    """Prints the seconds of each round and their median."""
    seconds = []
    for number in range(_ROUNDS.value):
        with tempfile.TemporaryDirectory() as folder:
            seconds.append(_measure(pathlib.Path(folder)))
        print(f"death {number + 1}: {seconds[-1]:.1f} s until new steps are reported", flush=True)
    print(f"median of {len(seconds)}: {statistics.median(seconds):.1f} s")


def _measure(folder: pathlib.Path) -> float:
    workers = _WORKERS.value
    batch = 16 * workers * (workers - 1)
    command = [
        sys.executable, "-m", "looplib", "launch", f"--workers={workers}", f"--min_workers={workers - 1}",
        "--grow_after=9999", "--",
        sys.executable, "-m", "trainers.image_classification", "--config.model=mlp", "--mode=train",
        "--strategy=multi_worker", f"--model_dir={folder}", f"--global_batch_size={batch}", "--train_steps=1000000",
        f"--steps_per_loop={_STEPS}", f"--checkpoint_interval={_STEPS}",
    ]  # fmt: skip
    launch = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait(launch, lambda: _last_step(folder) >= 5 * _STEPS)
        children = pathlib.Path(f"/proc/{launch.pid}/task/{launch.pid}/children").read_text().split()
        began = time.monotonic()
        os.kill(int(children[-1]), signal.SIGKILL)
        _wait(launch, lambda: len(_starts(folder)) == 2)
        metrics = folder / "metrics.jsonl"
        changed, restored = metrics.stat().st_mtime_ns, _starts(folder)[1].restored_step
        _wait(launch, lambda: metrics.stat().st_mtime_ns > changed and _last_step(folder) > restored)
        return time.monotonic() - began
    finally:
        launch.terminate()
        try:
            launch.wait(60)
        except subprocess.TimeoutExpired:
            launch.kill()


def _wait(launch: subprocess.Popen, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + _LIMIT
    while not condition():
        if launch.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"the launch ended with code {launch.poll()}" if launch.poll() else "nothing happens")
        time.sleep(_PAUSE)


def _last_step(folder: pathlib.Path) -> int:
    records = read_jsonl(str(folder / "metrics.jsonl"))
    return int(records[-1]["step"]) if records else 0


def _starts(folder: pathlib.Path) -> list[StartEntry]:
    report = RunDir(folder).report()
    return report.starts if report else []


if __name__ == "__main__":
    app.run(main)

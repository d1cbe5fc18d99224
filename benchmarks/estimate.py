"""How well `--estimate` foretells a run: `python -m benchmarks.estimate`, about six minutes on two cores.

Each ready trainer is estimated, run with the same flags, and estimated again, as other programs on the machine come and
go. A run takes about a minute at least: the start of a process alone varies by five seconds. The truth is the wall time
of the run in `run.json`, which counts from the start of its process, and the size of its directory. The error is that
of the mean of both estimates.
"""

import json
import os
import subprocess
import sys
import tempfile

_RUNS = {
    "image_classification": (
        "--train_steps=3000",
        "--eval_interval=1000",
        "--checkpoint_interval=500",
        "--keep_last=3",
    ),
    "language_model": (
        "--train_steps=400",
        "--steps_per_loop=50",
        "--eval_interval=200",
        "--eval_steps=20",
        "--checkpoint_interval=100",
    ),
    "gan": (
        "--train_steps=4000",
        "--steps_per_loop=50",
        "--eval_interval=1000",
        "--checkpoint_interval=500",
    ),
}


def run(name, *arguments):
    """Runs a ready trainer; returns what it prints.

    Raises:
      RuntimeError: if it fails.
    """
    command = [sys.executable, "-m", f"trainers.{name}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name} failed: {done.stderr[-2000:]}")
    return done.stdout


def measure(name, arguments, folder):
    """Estimates and runs a trainer; prints a row.

    Args:
      name: of its module.
      arguments: its command line.
      folder: for its run directory.
    """
    directory = os.path.join(folder, name)
    before = estimate(name, *arguments)
    run(name, *arguments, f"--model_dir={directory}")
    after = estimate(name, *arguments)
    with open(os.path.join(directory, "run.json")) as file:
        report = json.load(file)
    spent = report["seconds"]
    speed = report["step"] / sum(spent.get(phase, 0.0) for phase in ("train", "input", "report"))
    size = sum(os.path.getsize(os.path.join(place, file)) for place, _, files in os.walk(directory) for file in files)
    for what, number, truth in (
        ("time s", lambda each: each["seconds"], spent["wall"]),
        ("steps/s", lambda each: each["steps_per_second"], speed),
        ("disk MB", lambda each: each["disk_bytes"] / 1e6, size / 1e6),
    ):
        one, two = number(before), number(after)
        error = (one + two) / 2 / truth - 1
        print(f"{name:<22}{what:<15}{one:>9.1f}{two:>9.1f}{truth:>9.1f}{error:>+9.1%}", flush=True)


def estimate(name, *arguments):
    """Returns the numbers of an estimate, see `forecast.Forecast.as_dict`."""
    return json.loads(run(name, *arguments, "--estimate").splitlines()[-1])


def main():
    """Prints a table of estimates, truths and errors."""
    print(f"{'':<22}{'':<15}{'before':>9}{'after':>9}{'truth':>9}{'error':>9}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, arguments in _RUNS.items():
            measure(name, arguments, folder)


if __name__ == "__main__":
    main()

"""How well `--estimate` foretells a run: `python -m benchmarks.estimate`, about four minutes on two cores.

Each ready trainer is estimated, and then run with the same flags. The truth is the wall time of the run in `run.json`,
which counts from the start of its process, and what is in its directory.
"""

import json
import os
import subprocess
import sys
import tempfile

_RUNS = {
    "image_classification": (
        "--train_steps=6000",
        "--eval_interval=1000",
        "--checkpoint_interval=500",
        "--keep_last=3",
    ),
    "language_model": (
        "--train_steps=600",
        "--steps_per_loop=50",
        "--eval_interval=300",
        "--eval_steps=20",
        "--checkpoint_interval=100",
    ),
    "gan": (
        "--train_steps=600",
        "--steps_per_loop=50",
        "--eval_interval=300",
        "--checkpoint_interval=100",
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
    found = json.loads(run(name, *arguments, f"--model_dir={directory}", "--estimate").splitlines()[-1])
    run(name, *arguments, f"--model_dir={directory}")
    with open(os.path.join(directory, "run.json")) as file:
        spent = json.load(file)["seconds"]
    training = found["seconds"] - found["start_seconds"] - found["compile_seconds"]
    of_start = sum(spent.get(phase, 0.0) for phase in ("start", "compile", "restore"))
    sizes = {
        place: sum(os.path.getsize(os.path.join(place, file)) for file in files)
        for place, _, files in os.walk(directory)
    }
    rows = (
        ("time s", found["seconds"], spent["wall"]),
        ("after start s", training, spent["wall"] - of_start),
        ("disk MB", found["disk_bytes"] / 1e6, sum(sizes.values()) / 1e6),
    )
    for what, estimate, truth in rows:
        print(f"{name:<22}{what:<15}{estimate:>9.1f}{truth:>9.1f}{estimate / truth - 1:>+9.1%}", flush=True)


def main():
    """Prints a table of estimates, truths and errors."""
    print(f"{'':<22}{'':<15}{'estimate':>9}{'truth':>9}{'error':>9}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, arguments in _RUNS.items():
            measure(name, arguments, folder)


if __name__ == "__main__":
    main()

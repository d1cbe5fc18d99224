"""What the project promises, tried with its own command."""

import json
import pathlib
import subprocess
import sys

FLAGS = ["--train_steps=200", "--eval_interval=100", "--checkpoint_interval=20", "--steps_per_loop=20"]
TRAIN = ["my_project.train", *FLAGS]


def run(*command: str) -> str:
    """Runs a Python module in the project's folder and returns what it prints."""
    root = pathlib.Path(__file__).parents[1]
    result = subprocess.run([sys.executable, "-m", *command], cwd=root, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_loss_falls(tmp_path: pathlib.Path) -> None:
    run(*TRAIN, f"--model_dir={tmp_path}")
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if record["split"] == "train"]
    assert losses[-1] < 0.7 * losses[0]


def test_a_run_that_is_killed_resumes_exactly(tmp_path: pathlib.Path) -> None:
    command = ["--", sys.executable, "-m", *TRAIN]
    run("looplib", "check", "resume", "--kills=1", f"--dir={tmp_path / 'check'}", *command)

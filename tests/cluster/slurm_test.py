"""The sbatch file of docs/cluster, under a stand-in for Slurm's commands: restarts, and a requeue of a real training."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest
import slurm_stand_in

from looplib.commands.compare import compare
from looplib.run import commits

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "cluster" / "train.sbatch"

# A worker that does nothing: it notes its start, and the third of them ends with the next of some codes.
TASK = f"""
import pathlib, sys
sys.path.insert(0, {str(ROOT / "tests" / "programs")!r})
import without_tensorflow
from looplib.cluster.environment import resolve
cluster = resolve()
folder = pathlib.Path(sys.argv[1])
path = folder / f"worker{{cluster.index}}"
lives = len(path.read_text().splitlines()) if path.exists() else 0
with path.open("a") as file:
    print(cluster.job_id, *cluster.workers, file=file)
codes = sys.argv[2].split(",")
sys.exit(int(codes[lives]) if cluster.index == 2 else 0)
"""


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    "codes,code,jobs",
    [("0", 0, [""]), ("1,0", 0, ["", ""]), ("1,1,1,1", 1, [""] * 4), ("2", 2, [""]), ("1,75,0", 0, ["", "", "1"])],
)
def test_all_workers_start_again_after_a_failure_and_a_preempted_job_is_requeued(codes, code, jobs, tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    environ = slurm_stand_in.install(tmp_path / "slurm")
    result = subprocess.run(
        ["sbatch", SCRIPT, sys.executable, tmp_path / "task.py", tmp_path, codes],
        env={**os.environ, **environ, "RESTART_PAUSE": "0"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert result.returncode == code, result.stderr
    asked = tmp_path / "slurm" / "asked"
    assert (asked.read_text() if asked.exists() else "") == "requeue 4711\n" * jobs.count("1")
    for i in range(4):
        assert (tmp_path / f"worker{i}").read_text().splitlines() == [
            f"4711.0.{restarts} node9:2222 node10:2222 node11:2222 node12:2222" for restarts in jobs
        ]


def test_a_job_that_is_cancelled_waits_for_the_save_and_is_not_requeued(tmp_path):
    task = "trap 'sleep 0.3; echo saved; exit 75' TERM; echo ready; while :; do sleep 0.05; done"
    environ = slurm_stand_in.install(tmp_path / "slurm")
    with subprocess.Popen(
        ["sbatch", "--nodes=1", SCRIPT, "sh", "-c", task],
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        text=True,
    ) as job:
        assert job.stdout.readline() == "ready\n"
        while not slurm_stand_in.tasks(tmp_path / "slurm"):
            time.sleep(0.01)
        (tmp_path / "slurm" / "cancel").touch()
        assert (job.wait(30), job.stdout.read()) == (75, "saved\n")
    assert not (tmp_path / "slurm" / "asked").exists()


def test_the_sbatch_files_options_are_slurms():
    lines = SCRIPT.read_text().splitlines()
    options = [line.removeprefix("#SBATCH --").partition("=")[0] for line in lines if line.startswith("#SBATCH")]
    assert options == ["job-name", "nodes", "ntasks-per-node", "time", "signal", "requeue", "open-mode"]
    last_option = max(i for i, line in enumerate(lines) if line.startswith("#SBATCH"))
    first_command = min(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert last_option < first_command  # Slurm reads no further
    assert "\n".join(lines[first_command:]) in (ROOT / "docs" / "slurm.md").read_text()


STEPS = 60
ARGUMENTS = [
    "--mode=train", "--config.slow_step=0.01", f"--train_steps={STEPS}", "--config.state_mb=0.01", "--verbosity=0",
    "--strategy=multi_worker",
]  # fmt: skip


def two_free_ports():
    """A port, of which the next one is free too."""
    while True:
        with socket.socket() as one, socket.socket() as next_one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            try:
                next_one.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def saved_step(folder):
    done = commits.newest(os.path.join(folder, "checkpoints"))
    return done.step if done else 0


def wait_for_step(folder, step, job):
    end = time.monotonic() + 120
    while saved_step(folder) < step:
        assert time.monotonic() < end and job.poll() is None
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["TERM", "USR1"])
def test_a_job_that_is_told_of_its_end_saves_and_goes_on_once_it_is_requeued(name, nursery, tmp_path):
    """The first job ends by the signal of --signal, the second loses a worker by SIGKILL and starts again by itself."""
    whole = nursery.workers(2, tmp_path / "whole", *ARGUMENTS)
    assert [worker.code(300) for worker in whole] == [0, 0]
    environ = slurm_stand_in.install(tmp_path / "slurm")
    run = tmp_path / "run"
    with (tmp_path / "log").open("w") as log:
        job = subprocess.Popen(
            ["sbatch", "--nodes=1", "--ntasks-per-node=2", f"--signal={name}@120", SCRIPT, nursery.python, "-m",
             "faulty", f"--model_dir={run}", *ARGUMENTS],
            env={**nursery.environment, **environ, "RESTART_PAUSE": "0", "LOOPLIB_PORT": str(two_free_ports())},
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        wait_for_step(run, 10, job)
        (tmp_path / "slurm" / "time").touch()
        first = slurm_stand_in.tasks(tmp_path / "slurm")
        while (second := slurm_stand_in.tasks(tmp_path / "slurm")) == first:
            assert job.poll() is None
            time.sleep(0.05)
        saved = saved_step(run)
        assert 10 <= saved < STEPS
        wait_for_step(run, saved + 10, job)
        os.kill(second[1], signal.SIGKILL)
        assert job.wait(120) == 0
    finally:
        job.kill()
    text = (tmp_path / "log").read_text()
    assert (tmp_path / "slurm" / "asked").read_text() == "requeue 4711\n" and "the workers ended with code 137" in text
    assert f"resumes after step {saved} from its position" in text, text
    result = compare(tmp_path / "whole", run)
    assert result.differences == [] and result.examples

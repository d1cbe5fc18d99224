"""Stands for Slurm's sbatch, srun and scontrol, under whose names it is started: there is no Slurm here.

They do with a job script what their manuals say, on this machine. `sbatch` runs the job to its end, in the foreground:
it sends the signal of --signal to the tasks when the file `time` appears in its folder, and SIGTERM to them and to the
shell at the file `cancel`, and starts the job again, with SLURM_RESTART_COUNT, once `scontrol requeue` was called. The variable SLURM_STAND_IN names the folder; it notes there what
`scontrol` is asked (`asked`), and the process ids of the tasks (`tasks`).
"""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

FOLDER = pathlib.Path(os.environ.get("SLURM_STAND_IN", "/nonexistent"))
JOB = "4711"
HOSTS = {1: "localhost", 4: "node[9-12]"}  # by number of nodes; the hosts node9 and so on do not exist


def install(folder):
    """Puts the three commands into a folder; returns the variables with which they are found."""
    folder.mkdir()
    for name in ("sbatch", "srun", "scontrol"):
        path = folder / name
        path.write_text(f"#!{sys.executable}\n{pathlib.Path(__file__).read_text()}")
        path.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_STAND_IN": str(folder)}


def split(arguments):
    """Returns the options before the program or script as a dict, and the rest."""
    count = next(i for i, word in enumerate(arguments) if not word.startswith("--"))
    named = (word.removeprefix("--").partition("=") for word in arguments[:count])
    return {name: value for name, _, value in named}, arguments[count:]


def sbatch(arguments):
    given, (script, *rest) = split(arguments)
    lines = pathlib.Path(script).read_text().splitlines()
    options = {**split([*re.findall(r"^#SBATCH (--.*)", "\n".join(lines), re.MULTILINE), "x"])[0], **given}
    assert "requeue" in options, "Slurm would not start the job again"
    number, _, _ = options["signal"].partition("@")
    environ = {**os.environ, "SLURM_JOB_ID": JOB, "SLURM_NNODES": options["nodes"],
               "SLURM_NTASKS_PER_NODE": options["ntasks-per-node"]}  # fmt: skip
    for restart in range(10):
        if restart:
            environ["SLURM_RESTART_COUNT"] = str(restart)
        (FOLDER / "requeue").unlink(missing_ok=True)
        job = subprocess.Popen(["bash", script, *rest], env=environ, start_new_session=True)
        while job.poll() is None and not (FOLDER / "requeue").exists():
            time.sleep(0.02)
            if (FOLDER / "time").exists():
                (FOLDER / "time").unlink()
                for pid in tasks():  # without "B:" in the option only the tasks get it
                    os.kill(pid, getattr(signal, f"SIG{number}"))
            if (FOLDER / "cancel").exists():
                (FOLDER / "cancel").unlink()
                for pid in (job.pid, *tasks()):
                    os.kill(pid, signal.SIGTERM)
        if not (FOLDER / "requeue").exists():
            return job.returncode
        os.killpg(job.pid, signal.SIGTERM)
        job.wait(10)
    raise RuntimeError("the job was requeued ten times")


def srun(arguments):
    options, command = split(arguments)
    assert options == {"kill-on-bad-exit": "0"}  # the workers end each other, and have to save first
    nodes, each = int(os.environ["SLURM_NNODES"]), int(os.environ["SLURM_NTASKS_PER_NODE"])
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": HOSTS[nodes], "SLURM_DISTRIBUTION": "block",
            "SLURM_STEP_TASKS_PER_NODE": f"{each}(x{nodes})", "SLURM_STEP_NUM_TASKS": str(nodes * each)}  # fmt: skip
    hosts = ["localhost"] if nodes == 1 else [f"node{number}" for number in range(9, 9 + nodes)]
    started = [
        subprocess.Popen(
            command, env={**os.environ, **step, "SLURM_PROCID": str(i), "SLURMD_NODENAME": hosts[i // each]}
        )
        for i in range(nodes * each)
    ]
    (FOLDER / "tasks.new").write_text(" ".join(str(task.pid) for task in started))
    (FOLDER / "tasks.new").replace(FOLDER / "tasks")
    codes = [task.wait() for task in started]
    return max(code if code >= 0 else 128 - code for code in codes)  # the highest, and 128 and the signal


def scontrol(arguments):
    with (FOLDER / "asked").open("a") as file:
        print(*arguments, file=file)
    assert arguments == ["requeue", JOB]
    (FOLDER / "requeue").touch()
    time.sleep(10)  # until the job is ended
    return 0


def tasks(folder=FOLDER):
    """Returns the process ids of the newest tasks, by rank."""
    path = folder / "tasks"
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


if __name__ == "__main__":
    sys.exit({"sbatch": sbatch, "srun": srun, "scontrol": scontrol}[os.path.basename(sys.argv[0])](sys.argv[1:]))

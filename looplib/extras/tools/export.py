"""`python -m looplib export DIR`: the model of a run, exported by the command that trained it."""

import os
import pathlib
import subprocess
import sys

from looplib.errors import EXIT_DONE, EXIT_UNKNOWN, UsageError
from looplib.report import run_json


def export(directory: str, output: str | None, *, tflite: bool = False, averages: bool = True) -> int:
    """Runs the command of a run's first start once more, in one process, with --mode=export.

    Args:
      directory: the run directory.
      output: the new directory; None for `export/step-<step>` in the run directory.
      tflite: whether to write a TFLite file too.
      averages: whether averaged weights are exported, if there are any.

    Returns:
      The exit code.

    Raises:
      UsageError: if `run.json` does not say how the run was started.
    """
    path = run_json.path_of(directory, trains=True)
    starts = run_json.read(path).get("starts")
    try:
        program, *arguments = map(str, starts[0]["command"])
    except (TypeError, LookupError, ValueError) as error:
        raise UsageError(
            f"{path} does not say how the run was started; name the run directory of a training"
        ) from error
    if not os.path.isfile(program):
        raise UsageError(
            f"the run was started from {program}, which is not there from {os.getcwd()}; change to the directory that "
            "it was started in, or run its command with --mode=export"
        )
    root, how = _program(program)
    flags = [f"--model_dir={directory}", "--mode=export", "--strategy=auto", "--nodry_run", "--max_time="]
    flags += [f"--export_tflite={tflite}", f"--export_averages={averages}"]
    flags += [f"--export={os.path.abspath(output)}"] if output else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    done = subprocess.run([sys.executable, *how, *arguments, *flags], env=environment, check=False)
    return EXIT_DONE if done.returncode == 0 else EXIT_UNKNOWN


def _program(path: str) -> tuple[str, list[str]]:
    """Returns the folder that a program imports from, and how Python starts it: `-m` for a file of a package."""
    file = pathlib.Path(path).resolve()
    names, folder = [file.stem], file.parent
    while (folder / "__init__.py").exists():
        names, folder = [folder.name, *names], folder.parent
    return str(folder), ["-m", ".".join(names)] if len(names) > 1 else [str(file)]

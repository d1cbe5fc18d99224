"""`python -m looplib export DIR`: the model of a run, exported by the command that trained it."""

import os
import subprocess

from looplib.base.messages import gist
from looplib.commands import recorded_run
from looplib.config.formats import check_export
from looplib.errors import EXIT_DONE, EXIT_UNKNOWN, ExportError
from looplib.run import choice


def export(
    directory: str,
    output: str | None,
    *,
    formats: str = "",
    license: str = "unknown",
    averages: bool = True,
    checkpoint: str = choice.FINAL,
) -> int:
    """Runs the command of a run's first start once more, in one process, with --mode=export.

    Args:
      directory: the run directory.
      output: the new directory; None for `export/step-<step>` in the run directory.
      formats: what to write too, with commas between.
      license: of the model, for its card.
      averages: whether averaged weights are exported, if there are any.
      checkpoint: "final", "latest", "best" or a step, see `choice.choose`.

    Returns:
      The exit code.

    Raises:
      UsageError: if `run.json` does not say how the run was started, or a format or its package is not known.
    """
    directory = os.path.abspath(directory)
    command, folder = recorded_run.command_of(recorded_run.report_of(directory), directory)
    flags = [
        f"--model_dir={directory}",
        "--mode=export",
        "--strategy=auto",
        "--nodry_run",
        "--noestimate",
        "--max_time=",
    ]
    check_export(formats.split(",") if formats else (), license)  # now, and not after the start of the program
    flags += [f"--checkpoint={checkpoint}", f"--export_formats={formats}", f"--export_averages={averages}"]
    flags += [f"--export_license={license}"]
    flags += [f"--export={os.path.abspath(output)}"] if output else []
    try:
        done = subprocess.run([*command, *flags], cwd=folder, check=False)
    except (OSError, ValueError) as error:
        raise ExportError(
            f"{command[0]} cannot be started in {folder} ({gist(error)}); restore them, or repeat the run by hand"
        ) from error
    return EXIT_DONE if done.returncode == 0 else EXIT_UNKNOWN

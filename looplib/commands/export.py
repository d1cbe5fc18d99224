"""`python -m looplib export DIR`: the model of a run, exported by the command that trained it."""

import os
import signal

from looplib.config.formats import check_export
from looplib.errors import EXIT_DONE, EXIT_UNKNOWN
from looplib.processes.child import Child
from looplib.run import choice, started


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
    command = started.command_of(started.report_of(directory), directory)
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
    with Child(command.adding(*flags), ends_by=signal.SIGTERM) as child:
        return EXIT_DONE if child.wait() == 0 else EXIT_UNKNOWN

"""`python -m looplib rerun DIR`: a run once more, compared with the first bit by bit."""

import difflib
import importlib.metadata
import os
import platform
import re
import signal
import sys
from typing import Any

import tensorflow as tf

import looplib
from looplib.base import files
from looplib.base.messages import shown
from looplib.base.orders import Order
from looplib.commands.check import say
from looplib.commands.compare import compare
from looplib.errors import EXIT_DIFFERENT, EXIT_DONE, EXIT_UNKNOWN, ReplayError
from looplib.processes.child import Child, TemporaryFolder
from looplib.run import code_version, started
from looplib.run.directory import DIFF, RunDir
from looplib.run.report import Program, RunReport, changed_settings

# Settings that a resumed run may have changed: they decide when it ends and what it keeps, but not what it computes.
_HARMLESS = (
    "train_steps", "max_time", "keep_last", "keep_best", "keep_every", "checkpoint_interval", "stall_limit",
    "join_limit",
)  # fmt: skip
_MOST_LINES = 100  # of a diff
_SHOWN = 6


def rerun(directory: str, to: str | None = None) -> int:
    """Repeats a run in a new directory, says what differs now, and compares the two bit by bit.

    Args:
      directory: the run directory, unchanged.
      to: the new one; default the name of the first with "-rerun" after it.

    Returns:
      The exit code: `EXIT_DONE` if they are equal, `EXIT_DIFFERENT` if not, `EXIT_UNKNOWN` if the command failed.

    Raises:
      UsageError: for a run that cannot be repeated, or a directory that is not empty.
    """
    directory = os.path.abspath(directory)
    to = os.path.abspath(to or f"{directory}-rerun")
    report = started.report_of(directory)
    _refuse_what_cannot_be_repeated(report, directory)
    command = started.command_of(report, directory).adding(f"--model_dir={to}")
    if "train_steps" in _changed(report):
        command = command.adding(f"--train_steps={report.flags.get('train_steps')}")
    differences = differences_now(report, directory)
    if os.path.lexists(to) and (not os.path.isdir(to) or os.listdir(to)):
        raise ReplayError(f"{to} is not empty; name another directory with --to, or remove it")
    say(str(command))
    say("versions and code are those of the run" if not differences else "differs from the run:")
    for line in differences:
        say(f"  {line}")
    order = Order(example_checksums=started.has_checksums(directory))
    with TemporaryFolder() as folder:
        given = order.give(os.path.join(folder.path, "order.json"))
        with Child(command, given, ends_by=signal.SIGTERM, held=(folder.lock,)) as child:
            code = child.wait()
    if code:
        print(f"looplib: error: the command ended with code {code}; its own last line says why", file=sys.stderr)
        return EXIT_UNKNOWN
    return _verdict(report, directory, to)


def _changed(report: RunReport) -> dict[str, Any]:
    """Returns the settings that a resumed run has changed, with the values before and after."""
    return {name: values for start in report.starts for name, values in start.changed.items()}


def _refuse_what_cannot_be_repeated(report: RunReport, directory: str) -> None:
    if report.status != "done":
        raise ReplayError(
            f"the run in {directory} has not ended well (it is {report.status:.50} at step {report.step}); run "
            "its own command again until it is done, and repeat it then"
        )
    for name, (before, after) in _changed(report).items():
        if name not in _HARMLESS:
            raise ReplayError(
                f"the run in {directory} was resumed with {name}={shown(after)}, and had {shown(before)} before, so no "
                "single command repeats it; start a new run with one of them"
            )
    started.refuse_several_processes(report, directory, "start them as you did then, with another --model_dir")


def differences_now(report: RunReport, directory: str) -> list[str]:
    """Returns lines about versions and code that differ from the run's."""
    lines = []
    for name, version in report.versions.items():
        if (now := _version(name)) != version:
            lines.append(f"{name} {version} is now {now}")
    programs = [start.program or Program() for start in report.starts]
    if len({(one.commit, one.changes) for one in programs}) > 1:
        lines.append("the code changed between starts of the run; compared is that of the last one")
    then = report.program or Program()
    if not re.fullmatch("[0-9a-f]{7,64}", then.commit):  # git would take other text for an option
        return [*lines, "the version of the code was not recorded (its file was in no git repository)"]
    commit = code_version.git(then.repository, "rev-parse", "HEAD").strip()
    if commit != then.commit:
        lines.append(f"git commit {then.commit[:12]} is now {commit[:12] or 'not known'}")
    try:
        before = files.read_text(os.path.join(directory, DIFF)) if then.changes else ""
    except (OSError, ValueError, tf.errors.OpError):
        return [*lines, f"the changes since the commit are not known ({DIFF} cannot be read)"]
    if not code_version.git(then.repository, "cat-file", "-t", then.commit):
        return [*lines, "the code cannot be compared, because git does not have that commit"]
    now = code_version.diff(then.repository, then.commit)
    changes = list(
        difflib.unified_diff(before.splitlines(), now.splitlines(), "changes then", "changes now", n=2, lineterm="")
    )
    if changes:
        lines.append(f"the code, as changes since commit {then.commit[:12]}:")
        lines += [f"  {line}" for line in changes[:_MOST_LINES]]
        lines += [f"  ({len(changes) - _MOST_LINES} more lines)"] * (len(changes) > _MOST_LINES)
    return lines


def _version(name: str) -> str:
    known = {"python": platform.python_version(), "looplib": looplib.__version__, "tensorflow": tf.__version__}
    try:
        return known.get(name) or importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _verdict(report: RunReport, directory: str, to: str) -> int:
    """Compares both runs, prints the result, and returns the exit code."""
    again = RunDir(to).report() or RunReport()
    for name, (before, now) in sorted(changed_settings(report, again).items()):
        say(f"setting {name} was {shown(before)} and is now {shown(now)}, though the command does not say so")
    found = compare(directory, to)
    what = f"{found.records} records of metrics.jsonl and {found.tensors} tensors of the final checkpoint"
    if not found.differences:
        say(f"EQUAL, bit by bit: {what} in {directory} and {to}")
        return EXIT_DONE
    say(f"DIFFERENT: {len(found.differences)} values of {what}; the first:")
    for difference in found.differences[:_SHOWN]:
        say(f"  {difference.text('then', 'now')}")
    return EXIT_DIFFERENT

"""The program of this process: its command, and the git commit of its code."""

import hashlib
import os
import sys

from looplib.errors import CommandError
from looplib.masks import masked_text
from looplib.processes.child import CommandLine, output_of
from looplib.run.report import Program

_MOST_BYTES = 1 << 20  # of a diff
_MOST_SECONDS = 10.0  # for git


def this_program() -> tuple[Program, str]:
    """Returns the program of this process, and how its code differs from the git commit."""
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    arguments = ["-m", spec.name.removesuffix(".__main__")] if spec else [os.path.abspath(file)] if file else []
    folder = os.path.dirname(os.path.abspath(file)) if file else ""
    found = git(folder, "rev-parse", "--show-toplevel", "HEAD").splitlines() if folder else []
    repository, commit = found if len(found) == 2 else ("", "")
    text = diff(repository, "HEAD") if repository else ""
    changes = hashlib.sha256(text.encode()).hexdigest() if text else ""
    try:
        here = os.getcwd()
    except FileNotFoundError:
        here = ""
    return Program(arguments, here, repository, commit, changes), text


def diff(repository: str, commit: str) -> str:
    """Returns the diff between the files of a git repository and a commit: at most 1 MB, with secrets masked.

    Args:
      repository: its folder.
      commit: the commit.
    """
    return masked_text(git(repository, "diff", "--no-color", "--no-ext-diff", "--no-textconv", commit, "--"))


def git(folder: str, *arguments: str) -> str:
    """Returns the output of a git command, at most 1 MB; "" if git is missing, fails or takes too long.

    Args:
      folder: the folder to run it in.
      *arguments: the arguments of git.
    """
    command = CommandLine(["git", "-C", folder, *arguments])
    try:
        done = output_of(command, {"GIT_OPTIONAL_LOCKS": "0"}, _MOST_SECONDS, _MOST_BYTES)  # it only reads
    except CommandError:
        return ""
    return done.output.decode(errors="replace") if done.code == 0 else ""

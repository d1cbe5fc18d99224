"""The program of this process: its command, and the git commit of its code."""

import hashlib
import os
import subprocess
import sys
import threading

from looplib.masks import masked_text
from looplib.run.program import Program

_MOST_BYTES = 1 << 20  # of a diff
_MOST_SECONDS = 10.0  # for git


def this_program() -> Program:
    """Returns the program of this process."""
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
    return Program(arguments, here, repository, commit, changes, text)


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
    try:
        process = subprocess.Popen(
            ["git", "-C", folder, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},  # only reads
        )
    except (OSError, ValueError):  # of a name with NUL
        return ""
    timer = threading.Timer(_MOST_SECONDS, process.kill)
    timer.start()
    try:
        content = process.stdout.read(_MOST_BYTES)
        whole = len(content) < _MOST_BYTES
        if not whole:
            process.kill()
        process.stdout.close()
        code = process.wait()
    finally:
        timer.cancel()
    return "" if whole and code else content.decode(errors="replace")

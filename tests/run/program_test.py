"""What a run records of its program's code never holds it up."""

import json
import os
import subprocess
import sys
import time

import pytest

from looplib.run import code_version as program


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "a.txt").write_text("one\n")
    for arguments in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"],
    ):
        subprocess.run(["git", "-C", tmp_path, *arguments], check=True)
    return tmp_path


def test_a_diff_has_the_changes_since_the_commit(repository):
    assert program.diff(str(repository), "HEAD") == ""
    (repository / "a.txt").write_text("two\n")
    lines = program.diff(str(repository), "HEAD").splitlines()
    assert lines[-2:] == ["-one", "+two"]


def test_a_large_diff_is_cut(repository):
    (repository / "a.txt").write_text("a line of text\n" * 1_000_000)
    assert len(program.diff(str(repository), "HEAD")) == 1 << 20


def test_without_git_or_a_repository_there_is_nothing(repository, tmp_path_factory, monkeypatch):
    outside = tmp_path_factory.mktemp("outside")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(outside.parent))
    assert program.git(str(outside), "rev-parse", "HEAD") == ""
    assert program.git("/no/such/folder", "rev-parse", "HEAD") == ""
    monkeypatch.setenv("PATH", str(outside))
    assert program.git(str(repository), "rev-parse", "HEAD") == ""


def test_a_git_that_takes_long_is_not_waited_for(repository, tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("bin")
    (folder / "git").write_text("#!/bin/sh\nexec sleep 60\n")
    (folder / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(program, "_MOST_SECONDS", 0.3)
    began = time.monotonic()
    assert program.git(str(repository), "rev-parse", "HEAD") == ""
    assert time.monotonic() - began < 30


MAIN = "import json; from looplib.run.code_version import this_program; print(json.dumps(vars(this_program()[0])))"


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("module", [True, False], ids=["module", "file"])
def test_a_program_is_named_as_python_starts_it(module, python, repository):
    (repository / "train.py").write_text(MAIN)
    arguments = ["-m", "train"] if module else [str(repository / "train.py")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    result = subprocess.run(
        [python, *arguments, "--flag"], cwd=repository, env=environment, capture_output=True, text=True
    )
    found = json.loads(result.stdout.splitlines()[-1])
    commit = subprocess.run(
        ["git", "-C", repository, "rev-parse", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    assert found == {
        "arguments": arguments, "directory": str(repository), "repository": str(repository), "commit": commit, "changes": "",
    }  # fmt: skip

"""CI runs each case of the tests: some in each run, the slow ones by turns."""

import collections
import os
import pathlib
import subprocess

import conftest
import pytest

RUN = pathlib.Path(__file__).parents[2] / ".ci" / "run"


@pytest.fixture
def repository(tmp_path):
    """A repository with `.ci/run`, in which `make` and what else it starts only tell their arguments; its next commit."""
    (tmp_path / "bin").mkdir()
    for name in ("make", "chromium"):
        (tmp_path / "bin" / name).write_text('#!/bin/sh\necho "$0" "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    folder = tmp_path / "repository"
    (folder / ".ci").mkdir(parents=True)
    (folder / ".ci" / "run").symlink_to(RUN)
    git(folder, "init", "-q")
    return folder


def git(folder, *arguments):
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", folder, *who, *arguments], check=True)


def ci(folder):
    """Returns the orders that `.ci/run` gives to make."""
    path = f"{folder.parent}/bin:{os.environ['PATH']}"
    done = subprocess.run([folder / ".ci" / "run"], env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [line.partition("/make ")[2] for line in done.stdout.splitlines() if "/make " in line], done.stderr


def test_commits_in_a_row_have_each_turn(repository):
    orders = []
    for _ in range(conftest.TURNS):
        git(repository, "commit", "-q", "--allow-empty", "-m", "more")
        orders.append(ci(repository)[0])
    assert {each[-1] for each in orders} == {f"test-turn TURN={turn}" for turn in range(conftest.TURNS)}
    assert all(each[:-1] == ["lint", "test", "smoke KERAS=3.10", "smoke TF=2.22 KERAS=3.15"] for each in orders)


def test_without_the_history_it_is_the_first_turn_and_ci_says_so(repository):
    for _ in range(3):
        git(repository, "commit", "-q", "--allow-empty", "-m", "more")
    clone = repository.parent / "clone"
    git(repository, "clone", "-q", "--depth=1", f"file://{repository}", clone)
    (clone / ".ci").mkdir()
    (clone / ".ci" / "run").symlink_to(RUN)
    orders, errors = ci(clone)
    assert orders[-1] == "test-turn TURN=0" and "without the history" in errors


def test_each_case_is_run_each_time_or_in_some_turns(request):
    """Those that are marked as alone are run each time."""
    collected = set(request.config.stash[conftest.COLLECTED])
    each_time = conftest.chosen_cases(collected)
    turns = [conftest.chosen_cases(collected, turn=turn) for turn in range(conftest.TURNS)]
    assert each_time | set().union(*turns) == collected and not each_time & set().union(*turns)
    assert set(collections.Counter(case for turn in turns for case in turn).values()) <= {1, 5}

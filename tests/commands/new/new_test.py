"""`python -m looplib new`: each project trains and passes its own tests; refusals."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from conftest import more

from looplib.__main__ import main as cli
from looplib.commands import project
from looplib.errors import CommandError, FileError

ROOT = pathlib.Path(__file__).parents[3]
TEMPLATES = ROOT / "looplib" / "commands" / "templates"
STARTS = ("loss", "keras", "step")
# The project's tests start its command with what stands for Python here.
OWN_TESTS = "import pytest, sys; sys.executable = sys.argv[1]; sys.argv[1:] = []; sys.exit(pytest.main())"


def run(*command, **options):
    result = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=600, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def contents(folder):
    caches = {"__pycache__", ".pytest_cache", ".ruff_cache"}
    paths = (path for path in folder.rglob("*") if path.is_file() and caches.isdisjoint(path.parts))
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


@pytest.mark.slow
@pytest.mark.parametrize("start", ["step", *more(["loss", "keras"])])
def test_a_project_passes_its_own_tests_as_it_is(start, python, tmp_path):
    folder = tmp_path / "spirals"
    assert cli(["new", str(folder), f"--from={start}"]) == 0
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTEST_ADDOPTS": "-q"}
    assert "2 passed" in run(python, "-c", OWN_TESTS, python, cwd=folder, env=environment)


@pytest.mark.parametrize("name", ["spirals", "a", "n" * 40])
def test_ruff_accepts_what_is_written_under_any_name(name, tmp_path):
    for start in STARTS:
        project.make(str(tmp_path / start / name), start)
    run(sys.executable, "-m", "ruff", "check", "--no-cache", tmp_path)
    run(sys.executable, "-m", "ruff", "format", "--no-cache", "--check", tmp_path)


def test_the_projects_differ_in_the_trainer_alone_and_have_no_other_name(tmp_path):
    made = {}
    for start in STARTS:
        project.make(str(tmp_path / start / "spirals"), start)
        made[start] = contents(tmp_path / start / "spirals")
    trainers = {texts.pop("spirals/trainer.py") for texts in made.values()}
    assert len(trainers) == 3 and made["loss"] == made["keras"] == made["step"]
    assert not [name for name, text in made["loss"].items() if "my_project" in text]
    used = {*project._FILES, *(f"trainers/from_{start}.py" for start in STARTS)}
    assert set(contents(TEMPLATES)) == used
    for split, examples in {"train": 900, "test": 300}.items():
        rows = np.loadtxt(tmp_path / "loss" / "spirals" / "data" / f"{split}.csv", delimiter=",", skiprows=1)
        assert rows.shape == (examples, 3) and set(rows[:, 2]) == {0, 1, 2} and np.isfinite(rows).all()


@pytest.mark.parametrize(
    "name, suggested",
    [("my-net", "my_net"), ("2net", "project_2net"), ("class", "project_class"), ("né", "n"), ("...", "my_project")],
)
def test_a_name_that_no_package_can_have_is_refused_with_another_one(name, suggested, tmp_path):
    with pytest.raises(CommandError, match=rf"letters.*{tmp_path}/{suggested}$"):
        project.make(str(tmp_path / name), "loss")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["json", "keras", "tests", "Makefile"])
def test_a_name_that_hides_another_module_is_refused(name, tmp_path):
    with pytest.raises(CommandError, match=f"'{name}' is the name of"):
        project.make(str(tmp_path / name), "loss")
    assert not list(tmp_path.iterdir())


def test_what_is_there_stays(tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "here").mkdir()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name, word in {"full": "not empty", "file": "file", "link": "link", "here": "current"}.items():
        with pytest.raises(CommandError, match=word):
            project.make(str(tmp_path / name), "loss")
    with pytest.raises(FileError, match="gs://bucket/net"):
        project.make("gs://bucket/net", "loss")
    project.make(str(tmp_path / "empty"), "loss")
    assert (tmp_path / "empty" / "empty" / "train.py").is_file()
    assert (tmp_path / "full" / "mine").read_text() == (tmp_path / "file").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["empty", "file", "full", "here", "link"]


def test_a_place_that_cannot_be_written_is_a_sentence_and_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="file/net"):
        project.make(str(tmp_path / "file" / "net"), "loss")

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(project.files, "write_whole", full)
    with pytest.raises(FileError, match="No space left"):
        project.make(str(tmp_path / "net"), "loss")
    assert os.listdir(tmp_path) == ["file"]

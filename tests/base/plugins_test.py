"""Plug-ins that are missing, broken or registered twice: one sentence that names the package, and nothing else breaks."""

import os
import subprocess
import sys

import pytest
import toy

import looplib
from looplib.base import plugins
from looplib.errors import PluginError

CODE = """
def writer(directory): raise AssertionError
def add(tools): tools.add_parser("fine", help="a fine tool").set_defaults(tool=None)
def fails(tools): raise ValueError("its own fault")
"""
OWN_FOLDER = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder)]  # which has other folders
"""


def install(folder, package, **groups):
    """Makes a package with a module and entry points, {group: lines}."""
    module = package.replace("-", "_")
    (folder / f"{module}.py").write_text(CODE)
    (folder / f"{module}_needy.py").write_text("import package_that_is_missing")
    info = folder / f"{module}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "".join(f"[looplib.{group}]\n" + "".join(f"{line}\n" for line in lines) for group, lines in groups.items())
    )


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs packages for this process; see `install`."""

    def add(package, **groups):
        install(tmp_path, package, **groups)
        plugins._all.cache_clear()

    monkeypatch.syspath_prepend(str(tmp_path))
    yield add
    monkeypatch.undo()
    plugins._all.cache_clear()


def tool(folder, *arguments):
    """Runs a tool in a process where the packages of a folder are installed too."""
    return subprocess.run(
        [sys.executable, "-m", "looplib", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize(
    "value, why",
    [
        ("stranger:nothing", "AttributeError: module 'stranger' has no attribute 'nothing'"),
        ("stranger_needy:x", "ModuleNotFoundError: No module named 'package_that_is_missing'"),
        ("stranger_gone:x", "ModuleNotFoundError: No module named 'stranger_gone'"),
    ],
)
def test_a_broken_plug_in_of_another_package_is_refused_in_a_sentence_that_names_the_package(
    value, why, installed, tmp_path
):
    installed("stranger", writers=[f"odd = {value}"])
    with pytest.raises(PluginError) as caught:
        toy.controller(None, toy.Regression(), model_dir=tmp_path / "run", writers=["odd"])
    said = f"the plug-in 'odd' in looplib.writers is registered by the package stranger, but {value} cannot be used"
    assert str(caught.value) == f"{said} ({why}); install stranger again, with the packages that it needs"
    assert caught.value.__cause__ is not None


def test_two_plug_ins_of_one_name_are_refused_once_that_name_is_loaded(installed, tmp_path):
    installed("stranger", writers=["odd = stranger:writer"])
    installed("other", writers=["odd = other:writer"])
    toy.controller(None, toy.Regression(), model_dir=tmp_path / "a", writers=["jsonl", "media"]).close()
    sentence = "the plug-in 'odd' in looplib.writers is registered by other and stranger; uninstall all but one of them"
    with pytest.raises(PluginError, match=f"^{sentence}$"):
        toy.controller(None, toy.Regression(), model_dir=tmp_path / "b", writers=["odd"])


def test_a_broken_command_of_another_package_is_left_out_of_the_list_with_one_line(tmp_path):
    lines = ["broken = stranger_needy:add", "fine = stranger:add", "failing = stranger:fails", "status = stranger:add"]
    install(tmp_path, "stranger", commands=lines)
    usage = tool(tmp_path, "--help")
    assert usage.returncode == 0 and "a fine tool" in usage.stdout and "inspect" in usage.stdout, usage.stderr
    said = usage.stderr.splitlines()
    assert [line.split("'")[1] for line in said] == ["broken", "failing"]
    assert all(line.startswith("looplib: warning: the plug-in") and "stranger" in line for line in said)
    assert "(ValueError: its own fault)" in said[1]
    mistyped = tool(tmp_path, "inspct")
    assert mistyped.returncode == 2 and mistyped.stderr.splitlines()[:2] == said
    assert "invalid choice: 'inspct'" in mistyped.stderr.splitlines()[-1]
    named = tool(tmp_path, "broken")
    assert named.returncode == 2 and named.stdout == ""
    assert named.stderr == said[0].replace("warning", "error") + " (PluginError)\n"
    other = tool(tmp_path, "inspect", "--help")
    assert other.returncode == 0 and other.stderr == ""


# Writers.


@pytest.mark.parametrize("model_dir", [True, False])
def test_a_writer_that_does_not_exist_is_named_before_anything_else(model_dir, tmp_path):
    with pytest.raises(PluginError, match="there is no plug-in 'nope' in looplib.writers"):
        toy.controller(None, toy.Regression(), model_dir=tmp_path if model_dir else None, writers=["nope"])


@pytest.mark.parametrize("writers", ["csv", looplib.CsvWriter("x")], ids=["name", "writer"])
def test_one_writer_in_place_of_a_list_is_refused(writers, tmp_path):
    with pytest.raises(looplib.errors.SettingError, match="(?i)^writers is .*csv.*; expected a list of writers"):
        toy.controller(None, toy.Regression(), model_dir=tmp_path, writers=writers)

"""A TensorFlow, Keras or tf_keras that does not fit is refused in one sentence; a version that is not known is warned of.

Stand-ins of the packages have other versions, in processes of their own; what fits is the installed one.
"""

import os
import pathlib
import platform
import subprocess
import sys

import keras
import paths
import pytest
import tensorflow as tf
from absl import logging as absl_logging

from looplib.compat import versions
from looplib.errors import VersionError


def environment() -> dict[str, str]:
    """The variables of this process without the one by which Model Garden asks for tf_keras."""
    return {name: value for name, value in os.environ.items() if name != "TF_USE_LEGACY_KERAS"}


def last_line(program: str, folder: pathlib.Path | None = None, **variables: str) -> str:
    """Runs a program with the stand-ins in a folder, and returns its last line of output or of its error."""
    path = os.pathsep.join([*([str(folder)] if folder else []), paths.PYTHONPATH])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment() | {"PYTHONPATH": path} | variables,
        capture_output=True,
        text=True,
    )
    return (done.stdout + done.stderr).splitlines()[-1]


def stand_in(folder: pathlib.Path, package: str, text: str) -> None:
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text(text)


USE = "import looplib; looplib.Controller"
NAMED = "from looplib import Controller"  # where Python replaces an AttributeError


@pytest.mark.parametrize("program", [USE, NAMED])
def test_a_tensorflow_that_is_too_old_is_refused(tmp_path, program):
    stand_in(tmp_path, "tensorflow", '__version__ = "2.19.1"')
    line = last_line(program, tmp_path)
    assert line.startswith("looplib.errors.VersionError: TensorFlow 2.19.1 is too old") and "pip install" in line


def test_a_missing_tensorflow_says_what_to_install(tmp_path):
    stand_in(tmp_path, "tensorflow", "raise ModuleNotFoundError('gone', name='tensorflow')")
    line = last_line(NAMED, tmp_path)
    assert "VersionError: TensorFlow is not installed" in line and "pip install 'tensorflow>=2.20'" in line


@pytest.mark.parametrize(
    "machine", [("Darwin", "x86_64", ""), ("Linux", "ppc64le", "glibc"), ("Linux", "x86_64", "musl")], ids=str
)
def test_a_machine_without_wheels_is_named(monkeypatch, machine):
    system, processor, libc = machine
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: processor)
    monkeypatch.setattr(platform, "libc_ver", lambda: (libc, ""))
    text = str(versions.not_installed())
    assert f"no wheels for {system} {processor}" in text and "macOS on arm64" in text and "pip" not in text


# TensorFlow, Keras, and whether they fit by TensorFlow's own requirement.
PAIRS = [
    ("2.20.0", "2.15.0", False), ("2.20.0", "3.9.2", False), ("2.20.0", "3.10.0", True), ("2.20.0", "3.15.1", True),
    ("2.21.0", "3.11.3", False), ("2.21.0", "3.12.0", True), ("2.22.0-rc0", "3.11.3", False),
    ("2.22.0-rc0", "3.12.0", True), ("2.23.0", "3.11.3", False), ("2.23.0", "3.12.0", True),
]  # fmt: skip


@pytest.mark.parametrize(("tensorflow", "version", "fits"), PAIRS)
def test_a_keras_that_does_not_fit_is_refused(tensorflow, version, fits):
    if fits:
        versions.check_keras(version, tensorflow)
    else:
        with pytest.raises(VersionError, match=rf"Keras {version} is too old for TensorFlow {tensorflow}.*pip install"):
            versions.check_keras(version, tensorflow)


@pytest.mark.parametrize(
    ("tensorflow", "version", "fits"),
    [
        ("2.20.0", "2.20.1", True), ("2.20.0", "2.19.0", False), ("2.20.0", "2.21.0", False), ("2.21.0", "2.21.0", True),
        ("2.22.0", "2.20.1", False), ("2.22.0", "2.21.0", True), ("2.22.0", "2.22.0", True),
    ],
)  # fmt: skip
def test_a_tf_keras_of_another_tensorflow_is_refused(tensorflow, version, fits):
    if fits:
        versions.check_tf_keras(version, tensorflow)
    else:
        with pytest.raises(VersionError, match=f"tf_keras {version} does not fit TensorFlow {tensorflow}.*pip install"):
            versions.check_tf_keras(version, tensorflow)


@pytest.mark.parametrize("order", [f"import keras; {USE}", f"{USE}; import keras"], ids=["before", "after"])
def test_an_old_keras_is_refused_when_it_is_imported(tmp_path, order):
    stand_in(tmp_path, "keras", '__version__ = "3.9.2"')
    assert "VersionError: Keras 3.9.2 is too old for TensorFlow 2." in last_line(order, tmp_path)


def test_a_missing_tf_keras_is_named_where_the_environment_asks_for_it(tmp_path):
    hidden = "import sys; sys.modules['tf_keras'] = None"
    line = last_line(f"{hidden}; {NAMED}", TF_USE_LEGACY_KERAS="1")
    assert "VersionError: TF_USE_LEGACY_KERAS" in line and "pip install 'tf_keras~=2.2" in line


@pytest.mark.parametrize("version", ["2.23.0", "2.23.0-dev20261026", "2.22.0-dev20260101"])
def test_a_version_that_is_not_known_gives_one_warning(version):
    change = f"import keras, tensorflow; tensorflow.__version__ = {version!r}; keras.__version__ = '3.15.0'"
    program = f"{change}; {NAMED}; import looplib; looplib.Trainer, looplib.launch; print('works')"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=paths.ROOT, env=environment()
    )
    assert done.stdout == "works\n" and done.stderr.count(f"TensorFlow {version} is not known") == 1


def test_the_installed_versions_fit(monkeypatch):
    def refuse(text, *values):
        pytest.fail(text % values)

    monkeypatch.setattr(absl_logging, "warning", refuse)
    versions.check_tensorflow(tf.__version__)
    if "dev" not in keras.__version__:
        versions.check_keras(keras.__version__, tf.__version__)

"""The versions of TensorFlow, Keras and tf_keras that looplib runs with, and its sentences about other ones.

A version that is too old is refused. One that is newer than the known ones gives a warning, and works as far as the
guards of this room allow.
"""

import os
import platform
import re
import sys
from importlib.util import find_spec

from absl import logging

from looplib.errors import VersionError

# The known versions of TensorFlow, each with the oldest Keras 3 that it requires.
_OLDEST_KERAS = {(2, 20): (3, 10), (2, 21): (3, 12), (2, 22): (3, 12)}
_NEWEST, _NEWEST_KERAS, _NEWEST_TF_KERAS = max(_OLDEST_KERAS), (3, 15), (2, 21)
_SYSTEMS = {("Linux", "x86_64"), ("Linux", "aarch64"), ("Darwin", "arm64"), ("Windows", "AMD64")}  # with wheels
_PYTHONS = "Python 3.10 to 3.13, and 3.14 from TensorFlow 2.22 on"


def _text(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))


KNOWN = ", ".join(map(_text, _OLDEST_KERAS))  # versions of TensorFlow
KNOWN_KERAS = f"{_text(min(_OLDEST_KERAS.values()))} to {_text(_NEWEST_KERAS)}"


def not_installed() -> VersionError:
    """Returns the error for a missing TensorFlow, which says whether it has wheels for this machine."""
    system, machine, libc = platform.system(), platform.machine(), platform.libc_ver()[0]
    here = f"{system} {machine} with Python {sys.version_info.major}.{sys.version_info.minor}"
    if (system, machine) not in _SYSTEMS or (system == "Linux" and libc != "glibc"):
        return VersionError(
            f"TensorFlow is not installed, and has no wheels for {here}; it has some "
            "for Linux with glibc on x86_64 and aarch64, and for macOS on arm64: use one of these, or build TensorFlow"
        )
    return VersionError(
        f"TensorFlow is not installed in {sys.executable}; pip install 'tensorflow>={_text(min(_OLDEST_KERAS))}', "
        f"which has wheels for {_PYTHONS} (this is {here})"
    )


def check_tensorflow(version: str) -> None:
    """Raises `UsageError` for a TensorFlow that is too old; warns of one that is not known."""
    found = _numbers(version)
    oldest = min(_OLDEST_KERAS)
    if found < oldest:
        raise VersionError(
            f"TensorFlow {version} is too old: looplib runs with {KNOWN}; pip install 'tensorflow>={_text(oldest)}'"
        )
    if found > _NEWEST or "dev" in version:
        _warn("TensorFlow", version, KNOWN)


def check_keras(version: str, tensorflow: str) -> None:
    """Raises `UsageError` for a Keras that is too old for a version of TensorFlow; warns of one that is not known."""
    found = _numbers(version)
    oldest = _OLDEST_KERAS[min(_numbers(tensorflow), _NEWEST)]
    if found < oldest:
        least = _text(oldest)
        raise VersionError(
            f"Keras {version} is too old for TensorFlow {tensorflow}, which needs Keras {least} or newer; pip install "
            f"'keras>={least}'"
        )
    if found > _NEWEST_KERAS or "dev" in version:
        _warn("Keras", version, KNOWN_KERAS)


def check_tf_keras(version: str, tensorflow: str) -> None:
    """Raises `UsageError` for a tf_keras of another TensorFlow; warns where none is known for it."""
    found, expected = _numbers(version), _numbers(tensorflow)
    if found == expected:
        return
    if expected <= _NEWEST_TF_KERAS or found < _NEWEST_TF_KERAS or found > expected:
        cure = _text(min(expected, _NEWEST_TF_KERAS))
        raise VersionError(
            f"tf_keras {version} does not fit TensorFlow {tensorflow}: each version is for the TensorFlow of the same "
            f"number; pip install 'tf_keras~={cure}.0' 'tensorflow~={cure}.0'"
        )
    logging.warning("tf_keras %s is for an older TensorFlow than %s, for which looplib knows none", version, tensorflow)


def check_legacy(tensorflow: str) -> None:
    """Raises `UsageError` where the environment makes `tf.keras` that of tf_keras, and this is not installed."""
    if os.environ.get("TF_USE_LEGACY_KERAS", "") in ("1", "true", "True") and find_spec("tf_keras") is None:
        fitting = _text(min(_numbers(tensorflow), _NEWEST_TF_KERAS))
        raise VersionError(
            "TF_USE_LEGACY_KERAS makes tf.keras that of the package tf_keras, which is not installed; unset the "
            f"variable to use Keras 3, or pip install 'tf_keras~={fitting}.0' 'tensorflow~={fitting}.0'"
        )


def _numbers(version: str) -> tuple[int, int]:
    """Returns the first two numbers of a version; a text without them counts as the newest."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (sys.maxsize, 0)


def _warn(package: str, version: str, known: str) -> None:
    logging.warning(
        "%s %s is not known to this looplib, which was tested with %s; it runs as far as nothing that it needs has "
        "changed", package, version, known,
    )  # fmt: skip

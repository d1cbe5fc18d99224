"""Makes the files of a project."""

import importlib.resources
import importlib.util
import keyword
import os
import re

import numpy as np

from looplib.base import files, folders
from looplib.base.messages import with_cure
from looplib.errors import CommandError, FileError
from looplib.exports.new_folder import new_folder

_PACKAGE = "my_project"  # its name in the templates
_FILES = (
    ".gitignore",
    "Makefile",
    "README.md",
    "pyproject.toml",
    "my_project/data.py",
    "my_project/evaluator.py",
    "my_project/model.py",
    "my_project/settings.py",
    "my_project/train.py",
    "tests/test_train.py",
)
_FOLDERS = ("data", "tests", "runs")  # of a project, beside its package


def make(directory: str, start: str) -> None:
    """Makes a project in a new or an empty directory, which appears as a whole; its name is that of the package.

    Raises:
      UsageError: if the name cannot be that of a package, or the directory cannot be made.
    """
    path = files.resolve(directory, "DIR")
    parent, name = os.path.split(path)
    _check_place(directory, path)
    _check_name(parent, name)
    texts = _texts(name, start)
    try:
        with new_folder(path) as place:
            for file, text in texts.items():
                *inner, last = file.split("/")
                files.write_whole(os.path.join(folders.make_folder(place, *inner), last), text)
            folders.move(*os.path.split(place), parent, name)
    except OSError as error:
        reason = OSError(error.errno, error.strerror)  # without a temporary name, which nobody knows
        raise FileError(f"{directory} cannot be made: {with_cure(reason, 'name another directory')}") from error


def _check_place(directory: str, path: str) -> None:
    if files.is_remote(path):
        raise CommandError(f"{directory} is not on this machine; name a local directory")
    if os.path.islink(path):
        raise CommandError(f"{directory} is a symbolic link, which the project would replace; name a new directory")
    if os.path.isdir(path) and os.path.samefile(path, os.curdir):
        raise CommandError(f"{directory} is the current directory; run the command in the folder above it")
    if os.path.lexists(path) and (not os.path.isdir(path) or os.listdir(path)):
        what = "is not empty" if os.path.isdir(path) else "is a file"
        raise CommandError(f"{directory} exists and {what}; name a new directory")


def _check_name(parent: str, name: str) -> None:
    if not (name.isascii() and name.isidentifier()) or keyword.iskeyword(name):
        suggested = re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_").lower() or _PACKAGE
        if not suggested.isidentifier() or keyword.iskeyword(suggested):
            suggested = f"project_{suggested}"
        raise CommandError(
            f"{name!r} cannot be the name of a Python package; use letters, digits and underscores, such as "
            f"{os.path.join(parent, suggested)}"
        )
    found = importlib.util.find_spec(name)
    own = {*_FOLDERS, *_FILES}
    if name in own or (found and found.origin):  # a folder that is no package has no origin
        what = "a file or folder in each project" if name in own else f"the module {found.origin}"
        raise CommandError(f"{name!r} is the name of {what}; use another name for the package")


def _texts(name: str, start: str) -> dict[str, str]:
    """Returns the text of each file by its path in the project."""
    templates = importlib.resources.files(__package__) / "templates"
    sources = {**{file: file for file in _FILES}, f"{_PACKAGE}/trainer.py": f"trainers/from_{start}.py"}
    texts = {file: (templates / source).read_text("utf-8") for file, source in sources.items()}
    texts = {file.replace(_PACKAGE, name): text.replace(_PACKAGE, name) for file, text in texts.items()}
    random = np.random.default_rng(0)
    data = {f"data/{split}.csv": _spirals(examples, random) for split, examples in (("train", 900), ("test", 300))}
    return {**texts, f"{name}/__init__.py": "", **data}


def _spirals(examples: int, random: np.random.Generator) -> str:
    """Returns points on three spirals as CSV: x, y and the number of the spiral."""
    spiral, radius = np.arange(examples) % 3, random.uniform(0.1, 1, examples)
    angle = 5 * radius + 2 * np.pi / 3 * spiral + random.normal(0, 0.4, examples)
    points = zip(radius * np.cos(angle), radius * np.sin(angle), spiral)
    return "".join(["x,y,class\n", *(f"{x:.4f},{y:.4f},{number}\n" for x, y, number in points)])

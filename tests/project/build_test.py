"""BUILD, which no other test reads, names every Python file, test and file of package data of the project."""

import configparser
import pathlib
import re
from typing import Any

import pytest

# Not resolved: under Bazel this is a tree of links.
ROOT = pathlib.Path(__file__).absolute().parents[2]


def files() -> list[str]:
    ignored = (ROOT / ".bazelignore").read_text().split()
    tops = [path for path in ROOT.iterdir() if not path.name.startswith(".") and path.name not in ignored]
    paths = [path for top in tops for path in [top, *top.rglob("*")] if path.is_file()]
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


def matches(path: str, pattern: str) -> bool:
    """Matches as Bazel does: `**` is any number of folders, `*` a part of a name."""
    parts = {"**/": "(.*/)?", "**": ".*", "*": "[^/]*"}
    pieces = re.split(r"(\*\*/|\*\*|\*)", pattern)
    return re.fullmatch("".join(parts.get(piece) or re.escape(piece) for piece in pieces), path) is not None


@pytest.fixture(scope="module")
def targets() -> dict[str, dict[str, Any]]:
    """Returns the attributes of each target with its `rule`, by name; BUILD is evaluated as Python."""
    known, found = files(), {}

    def glob(include: list[str], exclude: tuple[str, ...] | list[str] = ()) -> list[str]:
        for pattern in include:
            assert any(matches(path, pattern) for path in known), f"{pattern} matches no file"
        return [
            path
            for path in known
            if any(matches(path, pattern) for pattern in include)
            and not any(matches(path, pattern) for pattern in exclude)
        ]

    def rule(kind: str) -> Any:
        def make(name: str, **attributes: Any) -> None:
            assert name not in found
            found[name] = {"rule": kind, **attributes}

        return make

    rules = {kind: rule(kind) for kind in ("py_binary", "py_library", "py_test")}
    exec((ROOT / "BUILD").read_text(), {"load": lambda file, *names: None, "glob": glob, **rules})
    return found


def test_every_python_file_belongs_to_a_library(targets):
    libraries = [target for target in targets.values() if target["rule"] == "py_library"]
    listed = {path for target in libraries for path in [*target["srcs"], *target["data"]]}
    assert listed >= {path for path in files() if path.endswith(".py")}


def test_every_test_file_and_program_has_a_target(targets):
    def made(rule: str) -> set[str]:
        return {name for name, target in targets.items() if target["rule"] == rule}

    assert made("py_test") == {path[: -len(".py")] for path in files() if path.endswith("_test.py")}
    programs = {
        path[: -len(".py")]
        for path in files()
        if path.startswith(("benchmarks/", "examples/", "trainers/"))
        and path.endswith(".py")
        and 'if __name__ == "__main__":' in (ROOT / path).read_text()
    }
    assert programs <= made("py_binary")


def test_the_data_of_the_packages_belong_to_their_libraries(targets):
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    listed = {*targets["looplib"]["data"], *targets["programs"]["data"]}
    for package, patterns in settings["options.package_data"].items():
        folder = package.replace(".", "/")
        for pattern in patterns.split(", "):
            found = {path for path in files() if matches(path, f"{folder}/{pattern}") and not path.endswith(".py")}
            assert found <= listed and (found or pattern.endswith(".py"))

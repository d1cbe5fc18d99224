"""The BUILD files say what the code says: one target a Python file, its imports, and who may import it.

Every folder of `looplib` that is a Python package has a BUILD file, and so have `benchmarks`, `examples`,
`tests` and `trainers`.
`python tests/build_test.py --write` makes them; `data`, `size` and the like, which no import shows, stay as they are.

The deps of a target are
- the project's modules that its file imports anywhere, also inside functions;
- the `__init__` of their packages, which Python runs first. A module of a package does not name its own, which imports
  most of them: that would be a cycle, and whoever imports the module from outside has the `__init__` already. A test or
  a binary is outside of every package, because Python runs it under the name `__main__`;
- outside of `looplib`, `//looplib:public` in place of its `__init__`: with the modules that it loads when they are used;
- for a test, also the `conftest.py` and `__init__.py` of its folder and of those above, which pytest loads.

The visibility of a target is the order of the rooms, `LEVELS` in rooms_test.py.
"""

import ast
import functools
import importlib.util
import json
import pathlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import rooms

# Not resolved: under Bazel this is a tree of links, with only the files that BUILD names.
ROOT = pathlib.Path(__file__).absolute().parents[1]
FOLDERS = ["benchmarks", "examples", "looplib", "tests", "trainers"]
FILES = sorted(path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
KNOWN = set(FILES)
PACKAGES = sorted(
    {path.parent for path in FILES if path.name == "__init__.py"} | {pathlib.Path(folder) for folder in FOLDERS}
)
LOOPLIB = pathlib.Path("looplib")
INIT = LOOPLIB / "__init__.py"
RUNNER = pathlib.Path("tests/run_pytest.py")
RULES = ["py_binary", "py_library", "py_test"]
CHECKED = ["name", "testonly", "srcs", "args", "main", "visibility", "deps"]
EVERYBODY = ["//visibility:public"]
USERS = "//:users"  # the folders beside looplib
HEADER = """\
# Made by `python tests/build_test.py --write`, which keeps data, size and the like; tests/build_test.py checks it.

"""
# What this test reads under Bazel.
SOURCES = """\
filegroup(
    name = "sources",
    srcs = ["BUILD"] + glob(["**/*.py"]),
    visibility = ["//:__pkg__"],
)
"""


@functools.cache
def parse(path: pathlib.Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(), str(path))


def assigned(path: pathlib.Path, name: str) -> Any:
    """The literal that a file assigns to a name."""
    return next(
        ast.literal_eval(node.value)
        for node in parse(path).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    )


LEVELS: list[set[str]] = assigned(pathlib.Path("tests/rooms_test.py"), "LEVELS")


# Names.


def package_of(path: pathlib.Path) -> pathlib.Path:
    return next(folder for folder in path.parents if folder in PACKAGES)


def name_of(path: pathlib.Path) -> str:
    """looplib/task/trainer.py -> trainer; looplib/task/__init__.py -> task; tests/faults/lives.py -> faults/lives."""
    package = package_of(path)
    return package.name if path.name == "__init__.py" else str(path.relative_to(package).with_suffix(""))


def label(package: pathlib.Path, name: str, seen_from: pathlib.Path) -> str:
    if package == seen_from:
        return f":{name}"
    return f"//{package}" if name == package.name else f"//{package}:{name}"


def in_order(labels: Iterable[str]) -> list[str]:
    """Sorts labels, those of the own package first, as Bazel's formatter does."""
    return sorted(set(labels), key=lambda text: (text.startswith("//"), text))


# What the code says.


def rule_of(path: pathlib.Path) -> str:
    if path.parts[0] == "tests" and path.name.endswith("_test.py"):
        return "py_test"
    tests = [ast.unparse(node.test) for node in parse(path).body if isinstance(node, ast.If)]
    return "py_binary" if "__name__ == '__main__'" in tests else "py_library"


def find(module: str, importer: pathlib.Path) -> pathlib.Path | None:
    """Returns the project's file of a module."""
    # A folder without __init__.py is no package: it is on Python's path instead, for the files in and below it.
    folders = [folder for folder in importer.parents if folder / "__init__.py" not in KNOWN]
    for folder in folders:
        stem = folder.joinpath(*module.split("."))
        for path in [stem.with_suffix(".py"), stem / "__init__.py"]:
            if path in KNOWN:
                return path
    return None


def imports(path: pathlib.Path) -> Iterator[pathlib.Path | None]:
    """Yields the project's files that a file imports by name."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield find(alias.name, path)
        elif isinstance(node, ast.ImportFrom):
            package = ".".join(path.parent.parts)
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                yield find(f"{module}.{alias.name}", path) or find(module, path)


def deps_of(path: pathlib.Path) -> list[str]:
    rule = rule_of(path)
    files = set(imports(path)) - {None}
    for file in list(files):
        for folder in file.parents:
            if rule != "py_library" or folder not in path.parents:
                files.add(folder / "__init__.py")
    if rule == "py_test":
        files.update(folder / name for folder in path.parents for name in ["conftest.py", "__init__.py"])
    package, outside = package_of(path), LOOPLIB not in path.parents
    return in_order(
        label(LOOPLIB, "public", package)
        if outside and file == INIT
        else label(package_of(file), name_of(file), package)
        for file in files & KNOWN - {path}
    )


def public_deps() -> list[str]:
    """The modules that `import looplib` loads when they are used."""
    homes = {*assigned(INIT, "_HOMES").values(), *assigned(INIT, "_MODULES").values()}
    homes |= {place.rsplit(".", 1)[0] for place in rooms.plug_ins("looplib.parts").values()}
    files = {find(f"looplib.{home}", INIT) for home in homes} | {INIT}
    files |= {package_of(file) / "__init__.py" for file in files}
    return in_order(label(package_of(file), name_of(file), LOOPLIB) for file in files)


def visibility_of(folder: pathlib.Path, room: str) -> list[str]:
    """Who may depend on a room of a folder: the rooms above it, by LEVELS, and the folders beside looplib."""
    if LOOPLIB not in (folder, *folder.parents):
        return [USERS]
    if room in LEVELS[0]:
        return ["//looplib:__subpackages__", USERS]
    if room == "__init__":
        return EVERYBODY
    own = next((number for number, rooms in enumerate(LEVELS) if room in rooms), len(LEVELS))
    folders = {package.parts[1] for package in PACKAGES if package.parts[0] == "looplib" and len(package.parts) > 1}
    above = [f"//looplib/{name}:__pkg__" for rooms in LEVELS[own + 1 :] for name in sorted(rooms & folders)]
    top = [] if folder == LOOPLIB else ["//looplib:__pkg__"]  # controller, launch and __main__
    return [*top, *above, "//looplib/extras:__subpackages__", USERS]


def default_visibility(package: pathlib.Path) -> list[str]:
    room = package.parts[1] if len(package.parts) > 1 else next(iter(LEVELS[0]))
    return visibility_of(package, room)


def attributes_of(path: pathlib.Path) -> dict[str, Any]:
    """The attributes of a file's target, in the order in which BUILD has them."""
    rule, package = rule_of(path), package_of(path)
    attributes: dict[str, Any] = {"name": name_of(path)}
    if path.parts[0] == "tests" and rule != "py_test":
        attributes["testonly"] = True
    own = str(path.relative_to(package))
    if rule == "py_test":
        attributes.update(srcs=sorted([own, RUNNER.name]), args=[str(path)], main=RUNNER.name)
    else:
        attributes["srcs"] = [own]
    if rule == "py_binary":
        attributes["main"] = own
    if package == LOOPLIB and visibility_of(package, path.stem) != default_visibility(package):
        attributes["visibility"] = visibility_of(package, path.stem)
    return {**attributes, "deps": deps_of(path)}


def expected_targets(package: pathlib.Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """The rule and the attributes of each Python target of a package, by name."""
    files = [path for path in FILES if package_of(path) == package]
    targets = {name_of(path): (rule_of(path), attributes_of(path)) for path in files}
    if package == LOOPLIB:
        targets["public"] = ("py_library", {"name": "public", "visibility": EVERYBODY, "deps": public_deps()})
    return targets


# BUILD files as text.


def written(key: str, value: Any) -> str:
    if isinstance(value, list) and len(value) > 1:
        return f"    {key} = [\n" + "".join(f"        {json.dumps(item)},\n" for item in value) + "    ],\n"
    return f"    {key} = {value if isinstance(value, bool) else json.dumps(value)},\n"


def target_text(rule: str, attributes: dict[str, Any], more: str = "") -> str:
    return f"{rule}(\n" + "".join(written(*item) for item in attributes.items() if item[1]) + more + ")\n"


def build_text(package: pathlib.Path) -> str:
    """The BUILD file of a package, with the attributes of the present one that no import shows."""
    targets = expected_targets(package)
    loaded = ", ".join(json.dumps(rule) for rule in sorted({rule for rule, _ in targets.values()}))
    parts = [
        f'load("@rules_python//python:defs.bzl", {loaded})\n',
        f"package(\n{written('default_visibility', default_visibility(package))})\n",
        SOURCES,
    ]
    kept = {call_name(call): call.keywords for call in calls(package) if call.func.id in RULES}
    for name, (rule, attributes) in targets.items():
        more = [keyword for keyword in kept.get(name, []) if keyword.arg not in CHECKED]
        text = "".join(written(keyword.arg, ast.literal_eval(keyword.value)) for keyword in more)
        parts.append(target_text(rule, attributes, text))
    return HEADER + "\n".join(parts)


def calls(package: pathlib.Path) -> list[ast.Call]:
    """The calls in a package's BUILD file; none where there is no file yet."""
    path = package / "BUILD"
    nodes = parse(path).body if (ROOT / path).exists() else []
    return [node.value for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]


def call_name(call: ast.Call) -> str:
    return next(ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg == "name")


# Tests.


@pytest.mark.parametrize("package", PACKAGES, ids=str)
def test_build_says_what_the_files_say(package: pathlib.Path) -> None:
    advice = "run `python tests/build_test.py --write`"
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for call in calls(package):
        if call.func.id in RULES:
            name = call_name(call)
            assert name not in found, f"{package}/BUILD has two targets {name!r}; {advice}"
            found[name] = (call.func.id, {keyword.arg: keyword.value for keyword in call.keywords})
    expected = expected_targets(package)
    assert found.keys() == expected.keys(), f"{package}/BUILD has not one target for each file; {advice}"
    for name, (rule, attributes) in expected.items():
        found_rule, values = found[name]
        here = {key: ast.literal_eval(values[key]) for key in attributes if key in values}
        assert (found_rule, here) == (rule, {key: value for key, value in attributes.items() if value}), (
            f"//{package}:{name} differs from its file; {advice}. It should be\n{target_text(rule, attributes)}"
        )


@pytest.mark.parametrize("package", PACKAGES, ids=str)
def test_visibility_is_the_order_of_the_rooms(package: pathlib.Path) -> None:
    (call,) = [call for call in calls(package) if call.func.id == "package"]
    found = ast.literal_eval(call.keywords[0].value)
    assert found == default_visibility(package), f"{package}/BUILD: run `python tests/build_test.py --write`"


@pytest.mark.parametrize("package", PACKAGES, ids=str)
def test_rules_are_loaded_and_no_others(package: pathlib.Path) -> None:
    loaded = [ast.literal_eval(arg) for call in calls(package) if call.func.id == "load" for arg in call.args]
    used = {call.func.id for call in calls(package)} & set(RULES)
    assert loaded == ["@rules_python//python:defs.bzl", *sorted(used)]


def test_every_room_is_a_bazel_package_and_nothing_else_is() -> None:
    builds = {path.parent.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("BUILD")}
    assert builds == set(PACKAGES)


def test_the_top_build_file_names_every_package() -> None:
    (sources,) = [call for call in calls(pathlib.Path(".")) if call.func.id == "filegroup"]
    named = next(ast.literal_eval(keyword.value) for keyword in sources.keywords if keyword.arg == "srcs")
    assert sorted(named) == sorted(["BUILD", *(f"//{package}:sources" for package in PACKAGES)])
    (users,) = [call for call in calls(pathlib.Path(".")) if call.func.id == "package_group"]
    folders = next(ast.literal_eval(keyword.value) for keyword in users.keywords if keyword.arg == "packages")
    assert folders == [f"//{folder}" for folder in FOLDERS if folder != "looplib"]


def test_a_room_is_visible_to_those_above_it_only() -> None:
    """What the rule comes to, written out for some rooms."""
    loop = visibility_of(LOOPLIB / "loop", "loop")
    assert loop == ["//looplib:__pkg__", "//looplib/extras:__subpackages__", USERS]
    task = visibility_of(LOOPLIB / "task", "task")
    assert "//looplib/loop:__pkg__" in task and "//looplib/cluster:__pkg__" not in task
    assert "//looplib/health:__pkg__" not in task and "//looplib/checkpoint:__pkg__" in task


if __name__ == "__main__":
    assert sys.argv[1:] == ["--write"], "usage: python tests/build_test.py --write"
    for folder in PACKAGES:
        (ROOT / folder / "BUILD").write_text(build_text(folder))

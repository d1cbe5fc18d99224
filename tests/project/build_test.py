"""The BUILD files say what the code says: one target a room, its files, and the rooms that it imports.

`python tests/project/build_test.py --write` makes them. A room is a folder of `looplib`, or one of `benchmarks`, `examples`, `tests`
and `trainers`. Of the files beside the rooms of `looplib`, those of the ground level are one target, and each other file is
one. A binary and a test have a target of their own. `data`, `size` and the like, which no import shows, stay as they are.
"""

import ast
import functools
import importlib.util
import json
import pathlib
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

# Not resolved: under Bazel this is a tree of links, with only the files that BUILD names.
ROOT = pathlib.Path(__file__).absolute().parents[2]
LOOPLIB = pathlib.Path("looplib")
BESIDE = ["benchmarks", "examples", "tests", "trainers"]
FILES = sorted(path.relative_to(ROOT) for folder in [*BESIDE, "looplib"] for path in (ROOT / folder).rglob("*.py"))
KNOWN = set(FILES)
PACKAGES = sorted({path.parent for path in FILES if path.name == "__init__.py"} | set(map(pathlib.Path, BESIDE)))
USERS = "//:users"  # the folders beside looplib
GROUND = "ground"
CHECKED = ["name", "testonly", "srcs", "args", "main", "visibility", "deps"]
HEADER = "# Made by `python tests/project/build_test.py --write`, which keeps data, size and the like.\n\n"
SOURCES = """\
filegroup(
    name = "sources",
    srcs = ["BUILD"] + glob(["**/*.py"]),
    visibility = ["//:__pkg__"],
)
"""
LOADS = {
    "py_test": 'load("//tests:pytest.bzl", "py_test")\n',
    "rules": 'load("@rules_python//python:defs.bzl", {})\n',
}


def parse(path: pathlib.Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(), str(path))


def levels() -> list[set[str]]:
    (value,) = [
        node.value
        for node in parse(pathlib.Path("tests/project/rooms_test.py")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LEVELS"
    ]
    return ast.literal_eval(value)


LEVELS: list[set[str]] = levels()


# What the code says.


def is_function(node: ast.AST) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.ClassDef))


def package_of(path: pathlib.Path) -> pathlib.Path:
    return next(folder for folder in path.parents if folder in PACKAGES)


def is_test(path: pathlib.Path) -> bool:
    return path.parts[0] == "tests" and path.name.endswith("_test.py")


def target_of(path: pathlib.Path) -> str:
    """The label of the library that holds a file; of a test, its own."""
    package = package_of(path)
    name = package.name
    if is_test(path):
        name = str(path.relative_to(package).with_suffix(""))
    elif package == LOOPLIB:
        name = GROUND if path.stem in LEVELS[0] or path.name == "__init__.py" else path.stem
    return f"//{package}:{name}"


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


def statements(node: ast.AST, lazy: bool) -> Iterable[ast.AST]:
    """Yields the statements in a node, at any depth; expressions, which import nothing, are not gone through."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr) and not (lazy and is_function(child)):
            yield child
            yield from statements(child, lazy)


class Found(NamedTuple):
    """The project's files that a file imports, and whether it is a binary."""

    imports: list[pathlib.Path]
    is_binary: bool


@functools.cache  # of what is found, not of the trees, which later collections would go through
def found_in(path: pathlib.Path) -> Found:
    """Returns what BUILD says of a file.

    Imports in functions of looplib are left out: they load a plug-in on demand, which has its own target.
    """
    tree = parse(path)
    binary = any(isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'" for node in tree.body)
    files: list[pathlib.Path | None] = []
    for node in statements(tree, lazy=LOOPLIB in path.parents):
        if isinstance(node, ast.Import):
            files += [find(alias.name, path) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = ".".join(path.parent.parts)
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            files += [find(f"{module}.{alias.name}", path) or find(module, path) for alias in node.names]
    return Found([file for file in files if file], binary)


def short(labels: Iterable[str], package: pathlib.Path) -> list[str]:
    """Writes labels as seen from a package, its own first, as Bazel's formatter does."""
    texts = set()
    for label in labels:
        folder, name = label.split(":")
        texts.add(f":{name}" if folder == f"//{package}" else folder if folder.endswith(f"/{name}") else label)
    return in_order(texts)


def deps_of(files: Iterable[pathlib.Path], own: str, package: pathlib.Path) -> list[str]:
    if package == LOOPLIB and own == f"//{LOOPLIB}:{GROUND}":
        return []
    found = {
        target_of(other) for path in files for other in found_in(path).imports if other in KNOWN and not is_test(other)
    }
    if LOOPLIB not in (package, *package.parents) and any(label.startswith("//looplib") for label in found):
        found = {label for label in found if not label.startswith("//looplib")} | {"//looplib:public"}
    if LOOPLIB in (package, *package.parents):
        found.add(f"//{LOOPLIB}:{GROUND}")  # the package itself
    return short(found - {own}, package)


def in_order(labels: Iterable[str], *more: str) -> list[str]:
    return sorted({*labels, *more}, key=lambda text: (text.startswith("//"), text))


def expected_targets(package: pathlib.Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """The rule and the attributes of each Python target of a package, by name."""
    targets: dict[str, tuple[str, dict[str, Any]]] = {}
    files = [path for path in FILES if package_of(path) == package]
    libraries: dict[str, list[pathlib.Path]] = {}
    for path in files:
        if not is_test(path):
            libraries.setdefault(target_of(path), []).append(path)
    for label, members in sorted(libraries.items()):
        name = label.split(":")[1]
        attributes: dict[str, Any] = {"name": name, "testonly": package.name == "tests"}
        attributes["srcs"] = [str(path.relative_to(package)) for path in members]
        if package == LOOPLIB:
            attributes["visibility"] = visibility_of(package, members[0].stem)
        targets[name] = ("py_library", {**attributes, "deps": deps_of(members, label, package)})
    for path in files:
        own, stem = str(path.relative_to(package)), str(path.relative_to(package).with_suffix(""))
        if is_test(path):
            targets[stem] = ("py_test", {"name": stem, "deps": in_order(deps_of([path], "", package), ":tests")})
        elif found_in(path).is_binary and package.name != "tests":  # the tests start their programs by path
            name = f"{stem}_binary"
            attributes = {"name": name, "srcs": [own], "main": own, "deps": [f":{target_of(path).split(':')[1]}"]}
            targets[name] = ("py_binary", attributes)
    if package == LOOPLIB:
        public = {target_of(path) for path in FILES if LOOPLIB in path.parents}
        everybody = ["//visibility:public"]
        deps = short(public, package)
        targets["public"] = ("py_library", {"name": "public", "visibility": everybody, "deps": deps})
    return targets


def visibility_of(folder: pathlib.Path, room: str) -> list[str]:
    """Who may depend on a room of a folder: the rooms above it, by LEVELS, and the folders beside looplib."""
    if LOOPLIB not in (folder, *folder.parents):
        return [USERS]
    if room in LEVELS[0] or room == "__init__":  # of the ground level, or of the package
        return ["//looplib:__subpackages__", USERS]
    own = next((number for number, rooms in enumerate(LEVELS) if room in rooms), len(LEVELS))
    folders = {package.parts[1] for package in PACKAGES if package.parts[0] == "looplib" and len(package.parts) > 1}
    above = [f"//looplib/{name}:__pkg__" for rooms in LEVELS[own + 1 :] for name in sorted(rooms & folders)]
    top = [] if folder == LOOPLIB else ["//looplib:__pkg__"]
    return [*top, *above, "//looplib/extras:__subpackages__", USERS]


def default_visibility(package: pathlib.Path) -> list[str]:
    return visibility_of(package, package.parts[1] if len(package.parts) > 1 else next(iter(LEVELS[0])))


# BUILD files as text.


def written(key: str, value: Any) -> str:
    if isinstance(value, list) and len(value) > 1:
        return f"    {key} = [\n" + "".join(f"        {json.dumps(item)},\n" for item in value) + "    ],\n"
    return f"    {key} = {value if isinstance(value, bool) else json.dumps(value)},\n"


def build_text(package: pathlib.Path) -> str:
    """The BUILD file of a package, with the attributes of the present one that no import shows."""
    targets = expected_targets(package)
    used = {rule for rule, _ in targets.values()}
    loads = LOADS["rules"].format(", ".join(json.dumps(rule) for rule in sorted(used - {"py_test"})))
    if "py_test" in used:
        loads += LOADS["py_test"]
    parts = [loads, f"package(\n{written('default_visibility', default_visibility(package))})\n", SOURCES]
    kept = {name_of(call): call.keywords for call in calls(package)}
    for name, (rule, attributes) in targets.items():
        more = [keyword for keyword in kept.get(name, []) if keyword.arg not in CHECKED]
        values = {key: value for key, value in attributes.items() if value}
        values |= {keyword.arg: ast.literal_eval(keyword.value) for keyword in more}
        one_line = f"{rule}({', '.join(f'{key} = {json.dumps(value)}' for key, value in values.items())})\n"
        lines = f"{rule}(\n{''.join(written(*item) for item in values.items())})\n"
        parts.append(one_line if rule == "py_test" and len(one_line) <= 120 else lines)
    return HEADER + "\n".join(parts)


def calls(package: pathlib.Path) -> list[ast.Call]:
    """The calls in a package's BUILD file that make Python targets; none where there is no file yet."""
    path = package / "BUILD"
    nodes = parse(path).body if (ROOT / path).exists() else []
    found = [node.value for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    return [call for call in found if call.func.id in ("py_binary", "py_library", "py_test")]


def name_of(call: ast.Call) -> str:
    return next(ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg == "name")


# Tests.


def test_build_says_what_the_files_say() -> None:
    wrong = [str(package) for package in PACKAGES if (ROOT / package / "BUILD").read_text() != build_text(package)]
    assert not wrong, "run `python tests/project/build_test.py --write`"


def test_every_room_is_a_bazel_package_and_nothing_else_is() -> None:
    builds = {
        path.parent.relative_to(ROOT) for folder in [*BESIDE, "looplib"] for path in (ROOT / folder).rglob("BUILD")
    }
    assert builds == set(PACKAGES)


def test_the_top_build_file_names_every_package() -> None:
    nodes = [node.value for node in parse(pathlib.Path("BUILD")).body if isinstance(node, ast.Expr)]
    (sources,) = [call for call in nodes if isinstance(call, ast.Call) and call.func.id == "filegroup"]
    named = next(ast.literal_eval(keyword.value) for keyword in sources.keywords if keyword.arg == "srcs")
    assert sorted(named) == sorted(["BUILD", *(f"//{package}:sources" for package in PACKAGES)])


def test_a_room_is_visible_to_those_above_it_only() -> None:
    """What the rule comes to, written out for some rooms."""
    loop = visibility_of(LOOPLIB / "loop", "loop")
    assert loop == ["//looplib:__pkg__", "//looplib/checkpoint:__pkg__", "//looplib/extras:__subpackages__", USERS]
    task = visibility_of(LOOPLIB / "task", "task")
    assert "//looplib/loop:__pkg__" in task and "//looplib/cluster:__pkg__" not in task


if __name__ == "__main__":
    assert sys.argv[1:] == ["--write"], "usage: python tests/project/build_test.py --write"
    for folder in PACKAGES:
        (ROOT / folder / "BUILD").write_text(build_text(folder))
    top = (ROOT / "BUILD").read_text()
    before, rest = top.split('        "BUILD",\n')
    labels = "".join(f'        "//{package}:sources",\n' for package in PACKAGES)
    (ROOT / "BUILD").write_text(f'{before}        "BUILD",\n{labels}{rest[rest.index("    ],") :]}')

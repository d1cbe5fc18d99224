"""The rooms of looplib: imports go downward only, by folder, and every room says what it is for."""

import ast
import collections
import functools
import graphlib
import pathlib
import re
import sys

import pytest

import looplib

ROOT = pathlib.Path(__file__).absolute().parents[2]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PAGES = (ARCHITECTURE, ROOT / "docs" / "architecture_paths.md", ROOT / "docs" / "extending.md")
FILES = sorted((ROOT / "looplib").rglob("*.py"))
FOLDERS = sorted(path for path in (ROOT / "looplib").iterdir() if path.is_dir() and path.name != "__pycache__")
# A room may import from the levels below its own alone.
LEVELS = [
    {"masks"},
    {"errors"},
    {"base"},
    {"compat", "config", "processes", "stores"},
    {"run"},
    {"cluster"},
    {"guards"},
    {"buckets", "data", "report"},
    {"task"},
    {"loop", "weights"},
    {"checkpoint"},
    {"exports", "keras", "orbit"},
    {"actions"},
    {"controller"},
    {"replay"},
    {"commands"},
    {"sweep"},
    {"binary"},
    {"launch"},
    {"__main__"},
]


def room_of(module: str) -> str:
    """looplib.loop.step -> loop; looplib.errors -> errors; looplib -> __init__."""
    return (module.split(".") + ["__init__"])[1]


def module_of(path: pathlib.Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def parse(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports(path: pathlib.Path, late: bool = True) -> set[str]:
    """Returns the modules of looplib that a file imports; without `late`, not inside of functions."""
    found: set[str] = set()
    tree = parse(path)
    for node in ast.walk(tree) if late else tree.body:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if exists(name) else node.module for name in names]
        else:
            continue
        found.update(name for name in names if name.split(".")[0] == "looplib")
    return found


@functools.cache
def exists(module: str) -> bool:
    path = ROOT.joinpath(*module.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def level(room: str) -> int:
    return next(number for number, rooms in enumerate(LEVELS) if room in rooms)


def test_imports_go_downward_by_room() -> None:
    def allowed(importer: str, room: str) -> bool:
        return room in (importer, "__init__") or importer == "__init__" or level(room) < level(importer)

    wrong = [
        f"{module_of(path)} imports {module}"
        for path in FILES
        for module in imports(path)
        if not allowed(room_of(module_of(path)), room_of(module))
    ]
    assert not wrong, f"{wrong}, which stand above or beside; LEVELS has the order"


def test_there_are_no_circles() -> None:
    """Imports inside of functions are left out: they are made once all modules of a room are there."""
    graph = {module_of(path): imports(path, late=False) - {module_of(path), "looplib"} for path in FILES}
    graph.pop("looplib")
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


def test_every_folder_and_file_has_a_level() -> None:
    named = set().union(*LEVELS) | {"__init__"}
    assert {room_of(module_of(path)) for path in FILES} == named


def test_no_two_classes_have_one_name() -> None:
    places = collections.defaultdict(list)
    for path in FILES:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module_of(path))
    assert not {name: modules for name, modules in places.items() if len(modules) > 1}


def used_from_outside() -> dict[str, set[str]]:
    """The names of each module that files of other rooms, or the public names of looplib, use."""
    names = collections.defaultdict(set)
    for name, home in looplib._HOMES.items():
        names[f"looplib.{home}"].add(name)
    for path in FILES:
        room, tree, modules = room_of(module_of(path)), parse(path), {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "looplib":
                for alias in node.names:
                    if exists(f"{node.module}.{alias.name}"):
                        modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                    elif room_of(node.module) != room:
                        names[node.module].add(alias.name)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                module = modules.get(node.value.id)
                if module and room_of(module) != room:
                    names[module].add(node.attr)
    return names


def test_a_room_says_what_it_is_for_and_which_names_others_use() -> None:
    used = used_from_outside()
    for init in (path for path in FILES if path.name == "__init__.py" and path.parent != ROOT / "looplib"):
        text = ast.get_docstring(ast.parse(init.read_text())) or ""
        assert len(text.splitlines()[0].split()) >= 5, f"{init} has to say what the room is for"
        listed = {}
        for file, names in re.findall(r"^ {2,4}(\w+): ((?:.|\n {6,})*?)(?=\n {2,4}\w+:|\Z)", text, re.MULTILINE):
            listed[file] = set(re.findall(r"\w+", names)) - {"none"}
        files = {path.stem for path in init.parent.glob("*.py")} - {"__init__"}
        expected = {file: used[f"{module_of(init)}.{file}"] for file in files}
        assert listed == expected, f"{init.relative_to(ROOT)} should list {expected}"


def test_every_room_has_tests_of_its_own_to_run_while_one_works_on_it() -> None:
    for room in {folder.name for folder in FOLDERS} | {"house"}:
        assert list((ROOT / "tests").glob(f"{room}*/**/*_test.py")), room


def picture() -> str:
    """Returns the rooms as a Mermaid graph: its arrows are imports, without those that other arrows imply."""
    below = collections.defaultdict(set)
    for path in FILES:
        room = room_of(module_of(path))
        below[room] |= {room_of(module) for module in imports(path)} - {room, "__init__"}
    below.pop("__init__")

    @functools.cache
    def reached(room: str) -> frozenset[str]:
        return frozenset(below[room]).union(*map(reached, below[room]))

    arrows = []
    for room in sorted(below):
        implied = set().union(*map(reached, below[room]))
        arrows += [f"    {room.strip('_')} --> {other}" for other in sorted(below[room] - implied)]
    return "\n".join(["```mermaid", "graph TD", *arrows, "```"])


def test_the_picture_in_the_architecture_shows_the_imports() -> None:
    assert picture() in ARCHITECTURE.read_text(), "run `python tests/project/rooms_test.py --write`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_architecture_names_files_that_exist(page: pathlib.Path) -> None:
    names = set(re.findall(r"`([\w/]+(?:\.py|/))`", page.read_text()))
    assert len(names) > 20
    missing = [name for name in names if not (ROOT / name).exists() and not (ROOT / "looplib" / name).exists()]
    assert not missing, f"{page.name} names {missing}, which are not there"


if __name__ == "__main__":
    assert sys.argv[1:] == ["--write"], "usage: python tests/project/rooms_test.py --write"
    text = ARCHITECTURE.read_text()
    ARCHITECTURE.write_text(re.sub(r"```mermaid.*?```", lambda _: picture(), text, flags=re.DOTALL))

"""BUILD says what the files say: one target a Python file, and its deps are what the file imports.

The deps of a target are
- the project's modules that its file imports anywhere, also inside functions;
- the `__init__` of their packages, which Python runs first. Not for a module of the same package: `__init__` imports
  most of them, so it would be a cycle, and whoever imports the module from outside has the `__init__` already. A test
  or a binary is outside of every package, as Python runs it under the name `__main__`;
- for a test, also the `conftest.py` and `__init__.py` of its folder and of those above, which pytest loads unasked.

What no import tells (`data`, `size`, `tags`) is not checked.
"""

import ast
import collections
import importlib.util
import json
import pathlib

import pytest

# Not resolved: under Bazel this is a tree of links, with only the files that BUILD names.
ROOT = pathlib.Path(__file__).absolute().parents[1]
FOLDERS = ["benchmarks", "looplib", "tests", "trainers"]
FILES = sorted(path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
RUNNER = "tests/run_pytest.py"
RULES = ["py_binary", "py_library", "py_test"]


def _name(path):
    """looplib/trainer.py -> looplib/trainer; looplib/__init__.py -> looplib."""
    return str(path.parent if path.name == "__init__.py" else path.with_suffix(""))


def _parse(path):
    return ast.parse((ROOT / path).read_text(), str(path))


def _rule(path):
    if path.parts[0] == "tests" and path.name.endswith("_test.py"):
        return "py_test"
    tests = [ast.unparse(node.test) for node in _parse(path).body if isinstance(node, ast.If)]
    return "py_binary" if "__name__ == '__main__'" in tests else "py_library"


def _find(module, importer):
    """Returns the project's file of a module, or None."""
    # A folder without __init__.py is no package: it is on Python's path instead, for the files in and below it.
    folders = [folder for folder in importer.parents if folder / "__init__.py" not in FILES]
    for folder in folders:
        stem = folder.joinpath(*module.split("."))
        for path in [stem.with_suffix(".py"), stem / "__init__.py"]:
            if path in FILES:
                return path
    return None


def _imports(path):
    """Yields the project's files that a file imports by name."""
    for node in ast.walk(_parse(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield _find(alias.name, path)
        elif isinstance(node, ast.ImportFrom):
            package = ".".join(path.parent.parts)
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                yield _find(f"{module}.{alias.name}", path) or _find(module, path)


def _deps(path):
    rule = _rule(path)
    files = set(_imports(path)) - {None}
    for file in list(files):
        for folder in file.parents:
            if rule != "py_library" or folder not in path.parents:
                files.add(folder / "__init__.py")
    if rule == "py_test":
        files.update(folder / name for folder in path.parents for name in ["conftest.py", "__init__.py"])
    return sorted(":" + _name(file) for file in files & set(FILES) - {path})


def _expected(path):
    """Returns the attributes of a file's target, in the order in which BUILD has them."""
    rule, attributes = _rule(path), {"name": _name(path)}
    if path.parts[0] == "tests" and rule != "py_test":
        attributes["testonly"] = True
    if rule == "py_test":
        attributes.update(srcs=sorted([str(path), RUNNER]), args=[str(path)], main=RUNNER)
    else:
        attributes["srcs"] = [str(path)]
    if rule == "py_binary":
        attributes["main"] = str(path)
    return {**attributes, "deps": _deps(path)}


def _format(key, value):
    if isinstance(value, list) and len(value) > 1:
        return f"    {key} = [\n" + "".join(f"        {json.dumps(item)},\n" for item in value) + "    ],\n"
    return f"    {key} = {value if isinstance(value, bool) else json.dumps(value)},\n"


def _format_target(path):
    attributes = {key: value for key, value in _expected(path).items() if value}
    return f"{_rule(path)}(\n" + "".join(_format(*item) for item in attributes.items()) + ")\n"


def _targets():
    """Returns a dict from the name of a Python target to a list of (rule, attributes), one for each that has it."""
    targets = collections.defaultdict(list)
    for call in ast.walk(_parse("BUILD")):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in RULES:
            # `data` may be a glob, which is no literal.
            attributes = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg != "data"}
            targets[attributes["name"]].append((call.func.id, attributes))
    return targets


def test_every_target_has_a_file():
    unknown = sorted(set(_targets()) - set(map(_name, FILES)))
    assert not unknown, f"BUILD has targets without a file of that name: {unknown}. Delete or rename them."


@pytest.mark.parametrize("path", FILES, ids=str)
def test_target_is_what_the_file_says(path):
    found = _targets()[_name(path)]
    assert len(found) == 1, f"{path} has {len(found)} targets in BUILD; it needs this one:\n{_format_target(path)}"
    (rule, attributes), expected = found[0], _expected(path)

    deps, expected_deps = attributes.pop("deps", []), expected.pop("deps")
    lacks, excess = sorted(set(expected_deps) - set(deps)), sorted(set(deps) - set(expected_deps))
    assert not lacks and not excess, (
        f"In BUILD, //:{_name(path)} lacks the deps {lacks} and has {excess} too many. {path} needs:\n"
        + _format("deps", expected_deps)
    )
    wrong = [key for key, value in expected.items() if attributes.get(key) != value]
    if rule != _rule(path):
        wrong.insert(0, "rule")
    assert not wrong, f"In BUILD, {wrong} of //:{_name(path)} are not as {path} needs them:\n{_format_target(path)}"

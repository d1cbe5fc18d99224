"""The stub of `looplib`, by which editors and type checkers know the public names, which are loaded when they are used.

`python tests/project/public_names_test.py --write` writes it.
"""

import pathlib
import sys

import looplib

STUB = pathlib.Path(looplib.__file__).with_name("__init__.pyi")


def stub() -> str:
    """Returns what the stub has to say: where each public name is defined."""
    homes = {name: (f"looplib.{home}", name) for name, home in looplib._HOMES.items()}
    for name, home in looplib._MODULES.items():
        package, _, module = f"looplib.{home}".rpartition(".")
        homes[name] = package, module
    lines = sorted(f"from {home} import {name} as {name}" for home, name in homes.values())
    others = [f"{alias} = {name}" for alias, (_, name) in homes.items() if alias != name]
    return "\n".join([*lines, "", *others, "__version__: str", "__all__: list[str]", ""])


def test_editors_and_type_checkers_know_each_public_name() -> None:
    assert STUB.read_text() == stub(), "run `python tests/project/public_names_test.py --write`"
    assert STUB.with_name("py.typed").exists()


if __name__ == "__main__":
    assert sys.argv[1:] == ["--write"], "usage: python tests/project/public_names_test.py --write"
    STUB.write_text(stub())

"""README.md's table of flags, which `python tests/project/flags_test.py --write` makes of their declarations."""

import pathlib
import re
import sys

from looplib import launch
from looplib.extras.configuration import config

README = pathlib.Path(__file__).absolute().parents[2] / "README.md"
HEAD = "| flag | default | |\n|---|---|---|\n"


def table():
    rows = []
    for flag in (*launch.FLAGS, *config.FLAGS):
        default = "none" if flag.default is None else str(flag.default).lower()
        text = flag.help + (f" One of {', '.join(flag.choices)}." if flag.choices else "")
        rows.append(f"| `--{flag.name}` | {default} | {text} |\n")
    return HEAD + "".join(rows)


def test_the_readmes_table_has_every_flag_with_its_default():
    assert table() in README.read_text(), "run `python tests/project/flags_test.py --write`"


if __name__ == "__main__":
    assert sys.argv[1:] == ["--write"], "usage: python tests/project/flags_test.py --write"
    README.write_text(re.sub(re.escape(HEAD) + r"(?:\|.*\n)*", lambda _: table(), README.read_text()))

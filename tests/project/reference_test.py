"""The pages of docs/reference, which `python tests/project/reference_test.py --write` makes of the code."""

import argparse
import ast
import dataclasses
import inspect
import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

import looplib
from looplib import errors
from looplib.base import orders
from looplib.binary import command_line, config
from looplib.config.settings import Flag, flags_of
from looplib.run import directory
from looplib.run.report import FIELDS

ROOT = pathlib.Path(__file__).absolute().parents[2]
PAGES = ROOT / "docs" / "reference"
SETTINGS = (looplib.RunConfig, looplib.CheckpointPolicy, looplib.Start, looplib.Guards)
RUN = [sys.executable, "tests/project/reference_test.py", "--write"]


def flags() -> str:
    """Returns the page of the flags."""
    known = {flag.name for kind in SETTINGS for flag in flags_of(kind)}
    groups = {
        "The job and its devices": [flag for flag in command_line.all_flags() if flag.name not in known],
        "Settings of the program": list(config.FLAGS),
    }
    parts = [
        "# Flags\n\nEvery binary, a program that calls `looplib.launch.run`, takes these flags and those on the page of "
        "[settings](settings.md). `--helpfull` lists them all, with the defaults of the program. The "
        "program's own settings are `--config.<field>=<value>` ([more](../settings.md)).\n"
    ]
    for title, group in groups.items():
        rows = [f"| `--{flag.name}` | {default_of(flag.default)} | {text_of(flag)} |" for flag in group]
        parts.append("\n".join([f"## {title}\n", "| flag | default | |", "|---|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def default_of(value: object) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else f"{value}"


def text_of(flag: Flag) -> str:
    return flag.help + (f" One of {', '.join(flag.choices)}." if flag.choices else "")


def settings() -> str:
    """Returns the page of the settings in code."""
    parts = [
        "# Settings and their flags\n\n`looplib.Controller(RunConfig(...), checkpoints=CheckpointPolicy(...), start=Start(...), "
        "guards=Guards(...))` takes these dataclasses. They check their values when they are made. A binary has a flag for each "
        "field that names one here.\n"
    ]
    for kind in SETTINGS:
        texts = described(kind)
        named = {field.name: flag for field, flag in zip(with_flag(kind), flags_of(kind), strict=True)}
        parts.append(f"## {kind.__name__}\n\n{inspect.getdoc(kind).partition(chr(10))[0]}\n")
        rows = []
        for field in dataclasses.fields(kind):
            flag = f", `--{named[field.name].name}`" if field.name in named else ""
            if field.name in named and (given := named[field.name].default) not in (field.default, None):
                flag += f" with default {default_of(given)}"
            default = f"default `{field.default!r}`" if field.default is not dataclasses.MISSING else "required"
            if field.default_factory is not dataclasses.MISSING:
                default = f"default `{field.default_factory()!r}`"
            rows.append(f"- `{field.name}` ({type_of(field)}, {default}{flag}): {texts[field.name]}")
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def with_flag(kind: type) -> list[dataclasses.Field]:
    return [field for field in dataclasses.fields(kind) if "setting" in field.metadata]


def type_of(field: dataclasses.Field) -> str:
    text = field.type if isinstance(field.type, str) else inspect.formatannotation(field.type)
    return f"`{text}`"


def described(kind: type) -> dict[str, str]:
    """Returns the description of each field: the text below it, or its entry under `Attributes:`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    found = {}
    for node, following in zip(tree.body, tree.body[1:]):
        if isinstance(node, ast.AnnAssign) and isinstance(following, ast.Expr):
            found[node.target.id] = " ".join(inspect.cleandoc(following.value.value).split())
    listed = re.search(r"^Attributes:\n((?:  .*\n?|\n)*)", inspect.getdoc(kind), re.MULTILINE)
    for name, text in re.findall(r"^  (\w+): ((?:.*\n?)(?:    .*\n?)*)", listed[1] if listed else "", re.MULTILINE):
        text = " ".join(text.split())
        found.setdefault(name, text[0].upper() + text[1:])
    return found


# The commands that compare runs or start them again, and those that start workers, have pages of their own.
CHECKING = ("check", "diff", "replay", "rerun")
STARTING = ("launch", "ray")


def commands() -> str:
    """Returns the page of the commands of `python -m looplib`, without those that have another page."""
    intro = (
        "# Commands\n\n`python -m looplib COMMAND`. Those that take a run directory work while a run trains, and after it ended "
        "or was killed. Those that compare runs, or start them again, are on [a page of their own](commands_checks.md), and those "
        "that start workers on [another](commands_workers.md). Further packages can [add commands](../extending.md).\n"
    )
    return _page(intro, [(name, text) for name, text in helps() if name.split()[0] not in (*CHECKING, *STARTING)])


def commands_checks() -> str:
    """Returns the page of the commands that check."""
    intro = "# Commands that check\n\nThese compare runs, or start them again. See [all others](commands.md).\n"
    return _page(intro, [(name, text) for name, text in helps() if name.split()[0] in CHECKING])


def commands_workers() -> str:
    """Returns the page of the commands that start workers."""
    intro = "# Commands that start workers\n\nThese start several processes of a run. See [all others](commands.md).\n"
    return _page(intro, [(name, text) for name, text in helps() if name.split()[0] in STARTING])


def _page(intro: str, found: list[tuple[str, str]]) -> str:
    parts = [intro]
    for name, text in found:
        text = re.sub(r"\n  -h, --help .*", "", text).replace("\noptions:\n\n", "\n")  # each command has it
        parts.append(f"## {name}\n\n```text\n{text.rstrip()}\n```\n")
    return "\n".join(parts)


def helps() -> Iterator[tuple[str, str]]:
    """Yields the name and the --help of each command, with those below it."""
    from looplib import __main__

    os.environ["COLUMNS"] = "120"
    parser = argparse.ArgumentParser(prog="python -m looplib")
    tools = parser.add_subparsers()
    for name in sorted(__main__._OWN):
        __main__._OWN[name](tools)
    assert __main__
    for name, tool in tools.choices.items():
        yield name, tool.format_help()
        for action in tool._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from ((f"{name} {below}", parser.format_help()) for below, parser in action.choices.items())


def exit_codes() -> str:
    """Returns the page of the exit codes."""
    rows = [f"| {code} | {text} |" for code, text in sorted(errors.EXIT_CODES.items())]
    tools = [f"| {code} | {text} |" for code, text in sorted(errors.TOOL_EXIT_CODES.items())]
    head = "| code | meaning |\n|---|---|\n"
    return (
        f"# Exit codes\n\n## Of a binary\n\n{head}" + "\n".join(rows) + "\n\nThe last line of a binary that failed says what "
        "to do, and ends with the [class of the error](../errors.md) in parentheses.\n\n## Of `python -m looplib`\n\n" + head
        + "\n".join(tools) + "\n"
    )  # fmt: skip


def run_directory() -> str:
    """Returns the page of the files of a run directory."""
    rows = [f"| `{name}` | {text} |" for name, text in directory.CONTENTS.items()]
    fields = [f"| `{'`, `'.join(names.split(', '))}` | {text} |" for names, text in FIELDS.items()]
    return (
        "# Run directory\n\nWhat `--model_dir` holds. Paths in it are relative, so that it can be moved or copied "
        "([copies](../checkpoint_files.md#copy-or-move-a-run-directory)).\n\n| path | contents |\n|---|---|\n" + "\n".join(rows)
        + "\n\n## run.json\n\n| field | contents |\n|---|---|\n" + "\n".join(fields) + "\n"
    )  # fmt: skip


VARIABLES = {
    "LOOPLIB_NUM_WORKERS": "The number of workers of a job on Kubernetes ([Kubernetes](../kubernetes.md)).",
    "LOOPLIB_NUM_JOBS": "The number of replicated jobs of a JobSet, if there are several.",
    "LOOPLIB_SERVICE": "The headless service of an Indexed Job, through which its workers find each other.",
    "LOOPLIB_PORT": "The port of workers with Slurm and Kubernetes (default 2222).",
    "LOOPLIB_JOB_ID": "What tells this attempt of a job from others, so that no worker of another one is let in.",
    "LOOPLIB_CACHE": "The folder of local copies and indices (default `looplib` in `XDG_CACHE_HOME`, or `~/.cache/looplib`).",
    "LOOPLIB_RECORDS_GB": "How many gigabytes of blocks of remote records stay in that folder (default 8, 0 for none).",
    "LOOPLIB_ORDER": "The file of an order; tools set it for the programs that they start.",
}


def environment() -> str:
    """Returns the page of the environment variables."""
    rows = [f"| `{name}` | {text} |" for name, text in VARIABLES.items()]
    parts = described(orders.Order)
    return (
        "# Environment variables\n\nlooplib reads these, besides those of TensorFlow, of clouds and of managers of clusters.\n\n"
        "| variable | meaning |\n|---|---|\n" + "\n".join(rows) + "\n\n## Orders\n\nA tool that starts a program of looplib "
        "orders what no flag says by a file, which only the same user may read or write (mode 0600). It is JSON with any of these:\n\n"
        + "\n".join(f"- `{name}`: {text}" for name, text in parts.items())
        + "\n\nTo have checksums of examples in a run of your own:\n\n```sh\n(umask 077; echo '{\"example_checksums\": true}' > "
        "/tmp/order.json)\nLOOPLIB_ORDER=/tmp/order.json python train.py --model_dir=/tmp/run\n```\n"
    )  # fmt: skip


MADE = {
    "flags": flags,
    "settings": settings,
    "commands": commands,
    "commands_checks": commands_checks,
    "commands_workers": commands_workers,
    "environment": environment,
    "exit_codes": exit_codes,
    "run_directory": run_directory,
}


def test_the_reference_says_what_the_code_says() -> None:
    wrong = [name for name, make in MADE.items() if (PAGES / f"{name}.md").read_text() != make()]
    assert not wrong, "run `python tests/project/reference_test.py --write`"


def test_the_page_of_the_environment_has_the_variables_that_the_code_reads() -> None:
    texts = [path.read_text() for path in (ROOT / "looplib").rglob("*.py")]
    assert {name for text in texts for name in re.findall(r"LOOPLIB_[A-Z_]+", text)} == VARIABLES.keys()


def test_each_setting_has_a_description() -> None:
    for kind in SETTINGS:
        assert set(described(kind)) >= {field.name for field in dataclasses.fields(kind)}


@pytest.mark.slow
def test_what_a_run_leaves_is_in_the_reference(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-m", "trainers.image_classification", "--config.model=mlp", f"--model_dir={tmp_path}"]
    flags = ["--train_steps=20", "--eval_interval=10", "--trackers=csv", "--profile=12:2", "--keep_best=eval/loss"]
    subprocess.run([*command, *flags], cwd=ROOT, check=True, capture_output=True)
    found = {path.name + "/" * path.is_dir() for path in tmp_path.iterdir()}
    named = {name.strip() for names in directory.CONTENTS for name in names.split(",")}
    unknown = {name for name in found if not any(pathlib.PurePath(name).match(pattern) for pattern in named)}
    assert not unknown and len(found) > 8
    fields = {name for names in FIELDS for name in names.split(", ")}
    assert json.loads((tmp_path / "run.json").read_text()).keys() <= fields


if __name__ == "__main__":
    assert sys.argv[1:] == ["--write"], "usage: python tests/project/reference_test.py --write"
    for name, make in MADE.items():
        (PAGES / f"{name}.md").write_text(make())

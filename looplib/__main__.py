"""The tools: `python -m looplib check resume -- COMMAND ...`.

Each tool is a function that adds its parser to some subparsers, and sets its `tool`, a `plugins.Command`. Other
packages add theirs to the group `looplib.commands` of entry points.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from looplib.base import plugins
from looplib.base.messages import cure_of, with_cure
from looplib.commands import commands
from looplib.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_UNKNOWN, UsageError
from looplib.masks import mask_tracebacks, masked, masked_text
from looplib.processes.child import ended_by_signals

_GROUP = "looplib.commands"
_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_MOST_SHOWN = 4_000  # characters of an error


class _Parser(argparse.ArgumentParser):
    def parse_known_args(self, *arguments: Any) -> Any:
        """Refuses what a tool does not know with the help of the tool, which argparse leaves to the one that has it."""
        options, unknown = super().parse_known_args(*arguments)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options, unknown

    def error(self, message: str) -> NoReturn:
        """Prints a wrong argument in the same form as the binaries."""
        self.exit(EXIT_UNKNOWN, f"looplib: error: {masked_text(message)} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a tool.

    Args:
      argv: the arguments; default the process's. What follows `--` is the command to check.

    Returns:
      The exit code.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    masked(argv)  # so that no text has its secrets from now on
    split = argv.index("--") if "--" in argv else len(argv)
    parser = _Parser(prog="python -m looplib", description="Tools for looplib's binaries and run directories.")
    tools = parser.add_subparsers(required=True, metavar="TOOL")
    for name in ("stdin", "stdout", "stderr"):  # in this order, so that a stream that is closed gets its own number
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.open(os.devnull, os.O_RDWR), "r" if name == "stdin" else "w"))
    try:
        _add_tools(tools, argv[:1])
        options = parser.parse_args(argv[:split] or ["--help"])
        options.command = argv[split + 1 :]
        tool: plugins.Command = options.tool
        with contextlib.ExitStack() as stack:
            if not tool.own_signals:
                tool.check(options)
                if tool.needs_tensorflow(options):
                    _import_tensorflow()
                stack.enter_context(ended_by_signals())
            code = tool.run(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of standard output has ended, such as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return EXIT_UNKNOWN if tool.has_verdict else EXIT_DONE  # 0 would say that runs are equal
    except Exception as error:
        is_missing = isinstance(error, ModuleNotFoundError) and not (error.name or "looplib").startswith("looplib")
        if not isinstance(error, UsageError) and not cure_of(error) and not is_missing:
            raise
        from looplib.base.console import printable, say

        text = error.line if isinstance(error, UsageError) else with_cure(error, "install the package that has it")
        say(f"looplib: error: {printable(text[:_MOST_SHOWN])}")
        return EXIT_UNKNOWN
    except KeyboardInterrupt:
        print("looplib: error: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _add_tools(tools: Any, wanted: list[str]) -> None:
    """Adds the parser of the tool that is wanted, or of all to be listed; of these, broken ones are left out."""
    names = sorted({*_OWN, *plugins.names(_GROUP)})
    chosen, broken = wanted if wanted and wanted[0] in names else names, []
    for name in chosen:
        try:
            plugins.load(_GROUP, name, _OWN)(tools)
        except Exception as error:  # of any package
            is_known = isinstance(error, UsageError) or name in _OWN
            broken.append(error if is_known else plugins.failure(_GROUP, name, error))
    if broken and len(broken) == len(chosen):
        raise broken[0]
    for error in broken:
        print(f"looplib: warning: {error}", file=sys.stderr)


# Each of these is imported when it is asked for, or listed.


def _add_board(tools: Any) -> None:
    from looplib.commands.board import add

    add(tools)


def _add_new(tools: Any) -> None:
    from looplib.commands.new import add

    add(tools)


def _add_report(tools: Any) -> None:
    from looplib.commands.report import add

    add(tools)


def _add_sweep(tools: Any) -> None:
    from looplib.sweep.command import add

    add(tools)


def _add_weights(tools: Any) -> None:
    from looplib.commands.weights import add

    add(tools)


_OWN: dict[str, Callable[[Any], None]] = {
    "average": commands.average,
    "board": _add_board,
    "check": commands.check,
    "data_worker": commands.data_worker,
    "diff": commands.diff,
    "export": commands.export,
    "inspect": commands.inspect,
    "launch": commands.launch,
    "new": _add_new,
    "publish": commands.publish,
    "ray": commands.ray,
    "replay": commands.replay,
    "report": _add_report,
    "rerun": commands.rerun,
    "status": commands.status,
    "sweep": _add_sweep,
    "weights": _add_weights,
}


def _import_tensorflow() -> None:
    """Imports TensorFlow, before any other file does, without the messages of its runtime unless the user sets a level.

    TensorFlow reads their level once, so the programs that a tool starts get the environment of the user.
    """
    given = os.environ.get(_LEVEL)
    os.environ.setdefault(_LEVEL, "3")
    try:
        from looplib.compat import tensorflow as _tf  # noqa: F401
    finally:
        if given is None:
            del os.environ[_LEVEL]


if __name__ == "__main__":
    mask_tracebacks()
    sys.exit(main())

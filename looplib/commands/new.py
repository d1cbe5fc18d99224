"""`python -m looplib new DIR`: its options, and what runs it. Importing this file is cheap."""

import argparse
from typing import Any

from looplib.base.plugins import Command
from looplib.errors import EXIT_DONE


def add(tools: Any) -> None:
    """Adds the parser of `new`."""
    text = "make a small project that trains and has tests: a trainer, an evaluator, settings, data, a Makefile"
    parser = tools.add_parser("new", help=text, description=f"{text[0].upper()}{text[1:]}.")
    parser.add_argument("directory", metavar="DIR", help="the new directory; its name is that of the Python package")
    parser.add_argument(
        "--from",
        dest="start",
        choices=("loss", "keras", "step"),
        default="loss",
        help="what the trainer is: a loss, a compiled Keras model, or a step of your own (default %(default)s)",
    )
    parser.set_defaults(tool=Command(_new, needs_tensorflow=lambda options: False))


def _new(options: argparse.Namespace) -> int:
    from looplib.commands.project import make

    make(options.directory, options.start)
    print(f"made {options.directory}, which its README.md describes; next: cd {options.directory} && make test train")
    return EXIT_DONE

"""The command `ray`. Importing this file is cheap."""

import argparse
from typing import Any

from looplib.base.plugins import Command
from looplib.commands.options import arguments


def add(tools: Any) -> None:
    """Adds the parser of `ray`."""
    parser = tools.add_parser(
        "ray",
        help="start several workers of a run on a Ray cluster",
        usage="python -m looplib ray --workers=N [options] -- COMMAND ...",
        description="Starts COMMAND as several workers on a Ray cluster, each with TF_CONFIG, and restarts them "
        "together from the newest checkpoint when a worker, its actor or its node fails.",
        epilog="exit codes: 0 done; 75 saved and ended by a signal; run it again; 1 failed; 2 used wrongly",
    )
    parser.add_argument("--workers", type=int, required=True, help="number of workers")
    parser.add_argument("--address", help="of the cluster (default: the one that Ray finds, or a new one here)")
    parser.add_argument("--cpus", type=float, default=1.0, help="CPUs of each worker (default 1)")
    parser.add_argument("--gpus", type=float, default=0.0, help="GPUs of each worker (default 0)")
    parser.add_argument(
        "--resource", dest="resources", action="append", type=_resource, default=[], metavar="NAME=NUMBER",
        help="another resource of each worker by Ray's name, such as TPU=4; may be given several times",
    )  # fmt: skip
    text = "SPREAD (default, on different nodes), PACK (on few), STRICT_SPREAD or STRICT_PACK"
    parser.add_argument("--placement", default="SPREAD", help=text)
    parser.add_argument("--wait", type=float, default=600.0, help="seconds to wait for a place for all (default 600)")
    text = "maximum number of restarts in an hour after failures (default 3)"
    parser.add_argument("--restarts", type=int, default=3, help=text)
    text = "seconds before a restart, doubled for each after a start of less than a minute (default 1)"
    parser.add_argument("--backoff", type=float, default=1.0, help=text)
    text = "seconds until the other workers are killed after a failure (default 30)"
    parser.add_argument("--grace", type=float, default=30.0, help=text)
    parser.set_defaults(tool=Command(_run, own_signals=True, has_verdict=True))


def _resource(text: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    try:
        return name, float(number)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} found; expected NAME=NUMBER, such as TPU=4") from None


def _run(options: argparse.Namespace) -> int:
    from looplib.processes.launching import WorkerPlace, run

    given = arguments(options)
    names = ("cpus", "gpus", "placement", "wait")
    place = WorkerPlace(**{name: given.pop(name) for name in names}, resources=dict(given.pop("resources")))
    return run(options.command, place=place, **given)

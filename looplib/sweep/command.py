"""`python -m looplib sweep`: its options, and what runs it. Importing this file is cheap."""

import argparse
from collections.abc import Callable
from typing import Any

from looplib.base.plugins import Command
from looplib.commands.options import place
from looplib.errors import PluginError

_MOST = 100_000  # trials, and seeds of each


def add(tools: Any) -> None:
    """Adds the parser of `sweep`."""
    parser = tools.add_parser(
        "sweep",
        help="run a command with many settings, and rank the results",
        usage="python -m looplib sweep --dir=SWEEP [options] -- COMMAND --config.lr=0.1,0.01 ...",
        description="Runs COMMAND, without --model_dir, with many settings, each in a run directory of its own, and "
        "ranks the results. The same command resumes a sweep that was ended or killed. docs/sweeps.md describes "
        "the lists and ranges of values.",
        epilog="exit codes: 0 done; 1 no run has a result; 2 used wrongly, or a damaged sweep.db, a full disk or no "
        "database; 75 saved and ended by SIGTERM, SIGINT, SIGHUP, SIGUSR1 or SIGUSR2; run it again",
    )
    add, ends = parser.add_argument, " (default %(default)s)"
    add("--dir", type=place, required=True, help="directory of the sweep")
    add("--parallel", type=_number(1), default=1, help=f"runs at a time{ends}")
    add("--search", choices=("grid", "random", "tpe"), default="grid", help=f"how to choose settings{ends}")
    add("--trials", type=_number(1), help="number of configurations (default: all points of the grid)")
    add("--seeds", type=_number(0), default=0, help="trains each configuration with so many seeds: --seed=0, 1, ...")
    add("--metric", default="eval/accuracy", help=f"SPLIT/NAME to rank by{ends}")
    add("--value", choices=("last", "best"), default="last", help=f"which value of a run's metric ranks it{ends}")
    add("--goal", choices=("max", "min"), help="what is better (default: by a well-known name, so min for loss)")
    rules = ("none", "median", "halving", "hyperband")
    add("--prune", choices=rules, default="none", help=f"rule that stops hopeless runs{ends}")
    add("--storage", metavar="URL", help="database of a sweep that several processes run (default: a file in --dir)")
    add("--study", metavar="NAME", help="name of the sweep in --storage (default sweep)")
    parser.set_defaults(tool=Command(_sweep, has_verdict=True))


def _number(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not least <= (value := int(text)) <= _MOST:
            raise argparse.ArgumentTypeError(f"{value} is out of range; expected {least} to {_MOST:,}")
        return value

    return number


def _sweep(options: argparse.Namespace) -> int:
    try:
        import optuna  # noqa: F401
        import sqlalchemy  # noqa: F401
    except ImportError as error:
        raise PluginError(
            f"a sweep needs {error.name or 'other packages'}; install it with pip install 'looplib[sweep]'"
        ) from error
    from looplib.sweep.study import SweepPlan, parse
    from looplib.sweep.sweep import sweep

    plan = SweepPlan(
        options.command, options.search, options.metric, options.goal, options.prune, options.seeds, options.value
    )
    return sweep(options.dir, plan, options.parallel, options.trials, parse(options.storage, options.study))

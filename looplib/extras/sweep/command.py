"""`python -m looplib sweep`: its options, and what runs it. Importing this file is cheap."""

import argparse
from typing import Any

from looplib.errors import PluginError
from looplib.extras.tools.options import place
from looplib.plugins import Command


def add(tools: Any) -> None:
    """Adds the parser of `sweep`."""
    parser = tools.add_parser(
        "sweep",
        help="run a command with many settings, and rank the results",
        usage="python -m looplib sweep --dir=SWEEP [options] -- COMMAND --config.lr=0.1,0.01 ...",
        description="Runs COMMAND, without --model_dir, with many settings, each in a run directory of its own, and "
        "ranks the results. The same command resumes a sweep that was ended or killed. docs/sweeps.md describes "
        "the lists and ranges of values.",
        epilog="exit codes: 0 done; 1 no run has a result; 2 used wrongly, or a damaged sweep.db, a full disk, no "
        "store or no database; 75 saved and ended by SIGTERM, SIGINT, SIGHUP, SIGUSR1 or SIGUSR2; run it again",
    )
    parser.add_argument(
        "--dir", type=place, required=True, help="directory of the sweep, or its URL in an object store"
    )
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time (default %(default)s)")
    parser.add_argument("--search", default="grid", help="grid, random or tpe (default %(default)s)")
    parser.add_argument("--trials", type=int, help="number of configurations (default: all points of the grid)")
    parser.add_argument(
        "--seeds", type=int, default=0, help="trains each configuration with this number of seeds: --seed=0, 1, ..."
    )
    parser.add_argument("--metric", default="eval/accuracy", help="SPLIT/NAME to rank by (default %(default)s)")
    parser.add_argument(
        "--value", default="last", help="last or best: which value of a run's metric ranks it (default %(default)s)"
    )
    parser.add_argument("--goal", help="max or min (default: by a well-known name, so min for loss)")
    parser.add_argument(
        "--prune", default="none", help="rule that stops hopeless runs: none, median, halving or hyperband"
    )
    parser.add_argument(
        "--storage",
        metavar="URL",
        help="database of a sweep on several machines, by its URL (default: a file in --dir, for one machine)",
    )
    parser.add_argument("--study", metavar="NAME", help="name of the sweep in --storage (default sweep)")
    parser.set_defaults(tool=Command(_sweep, has_verdict=True))


def _sweep(options: argparse.Namespace) -> int:
    try:
        import matplotlib  # noqa: F401
        import optuna  # noqa: F401
        import sqlalchemy  # noqa: F401
    except ImportError as error:
        raise PluginError(
            f"a sweep needs {error.name or 'other packages'}; install it with pip install 'looplib[sweep]'"
        ) from error
    from looplib.extras.sweep.database import parse
    from looplib.extras.sweep.study import SweepPlan
    from looplib.extras.sweep.sweep import sweep

    plan = SweepPlan(
        options.command, options.search, options.metric, options.goal, options.prune, options.seeds, options.value
    )
    return sweep(options.dir, plan, options.parallel, options.trials, parse(options.storage, options.study))

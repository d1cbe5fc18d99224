"""The tools: `python -m looplib check resume -- COMMAND ...`."""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from looplib import files
from looplib.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_UNKNOWN, UsageError, cure_of, with_cure

_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_MOST_SHOWN = 4_000  # characters of an error
_CHECK = """\
COMMAND is your usual command without --model_dir, for example
  python -m looplib check {name} -- python -m trainers.image_classification --train_steps=200 --checkpoint_interval=50

exit codes: {codes}; 2 the command failed, or could not be checked
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Prints a wrong argument in the same form as the binaries."""
        self.exit(EXIT_UNKNOWN, f"looplib: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a tool.

    Args:
      argv: the arguments; default those of the process. Those after `--` are the command to check.

    Returns:
      The exit code.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    split = argv.index("--") if "--" in argv else len(argv)
    parser = _Parser(prog="python -m looplib", description="Tools for looplib's binaries and run directories.")
    tools = parser.add_subparsers(required=True, metavar="TOOL")
    _add_status(tools)
    _add_inspect(tools)
    _add_report(tools)
    _add_average(tools)
    _add_export(tools)
    _add_launch(tools)
    _add_rerun(tools)
    _add_replay(tools)
    _add_diff(tools)
    _add_sweep(tools)
    _add_check(tools)  # each tool's parser sets `run`, a function of the options that returns the exit code
    options = parser.parse_args(argv[:split])
    options.command = argv[split + 1 :]
    for name in ("stdin", "stdout", "stderr"):  # in this order, so that a stream that is closed gets its own number
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.open(os.devnull, os.O_RDWR), "r" if name == "stdin" else "w"))
    is_light = options.run in (_status, _launch)  # which start in a moment, and handle signals themselves
    try:
        if not is_light:
            _refuse_early(options)
            if not _reports_on_local_runs(options):
                _import_tensorflow()
        from looplib.extras.tools.children import ended_by_signals

        with contextlib.nullcontext() if is_light else ended_by_signals():
            code = options.run(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of standard output has ended, such as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        has_verdict = options.run not in (_status, _inspect, _report, _average)
        return EXIT_UNKNOWN if has_verdict else EXIT_DONE  # 0 would say that runs are equal
    except Exception as error:
        if not isinstance(error, UsageError) and not cure_of(error):
            raise
        from looplib.console import printable, say

        text = str(error) if isinstance(error, UsageError) else with_cure(error)
        say(f"looplib: error: {printable(text[:_MOST_SHOWN])}")
        return EXIT_UNKNOWN
    except KeyboardInterrupt:
        print("looplib: error: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _refuse_early(options: argparse.Namespace) -> None:
    """Refuses what can be seen to be wrong without TensorFlow, whose import takes seconds."""
    from looplib.checkpoint import commits
    from looplib.extras.tools import recorded_run

    if options.run is _replay:
        recorded_run.check_replay(**_arguments(options))
    elif options.run is _diff:
        for directory in (options.first, options.second):
            recorded_run.Recorded(directory)
    elif options.run in (_rerun, _export) and not files.is_remote(options.directory):
        recorded_run.report_of(os.path.abspath(options.directory))
    elif options.run in (_inspect, _average) and not files.is_remote(options.directory):
        commits.place_of(options.directory)


def _reports_on_local_runs(options: argparse.Namespace) -> bool:
    places = [*options.directories, options.output or ""] if options.run is _report else []
    return bool(places) and not any(map(files.is_remote, places))


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


def _add_status(tools: Any) -> None:
    parser = tools.add_parser(
        "status",
        help="show every run below some folders: step, rate, time left, last metrics, and whether it is alive",
        description="Shows every run below some folders, such as those of a sweep. It only reads, and may be used "
        "while the runs train. States: starting; running; silent (running without news); killed (its process is gone "
        "without a word); done; preempted (saved and ended by a signal, to be run again); failed.",
        epilog="exit codes: 0 there are runs; 1 there is none; 2 used wrongly",
    )
    parser.add_argument(
        "directories", nargs="+", type=_path, metavar="DIR", help="run directories, or folders that hold some"
    )
    parser.add_argument("--watch", action="store_true", help="repeat until Ctrl-C; a terminal is redrawn")
    parser.add_argument("--interval", type=float, default=2.0, help="seconds between tables (default %(default)s)")
    parser.set_defaults(run=_status)


def _add_inspect(tools: Any) -> None:
    parser = tools.add_parser("inspect", help="list the checkpoints of a run directory")
    parser.add_argument("directory", type=_path, help="the run directory, or the one that holds the checkpoints")
    parser.add_argument("--verify", action="store_true", help="read all files and compare checksums")
    parser.set_defaults(run=_inspect)


def _add_report(tools: Any) -> None:
    parser = tools.add_parser(
        "report",
        help="write a page about a run, or one that compares several",
        description="Writes an HTML file about a run, or one that compares several, from what is in the run "
        "directories. The file is complete in itself and needs no network.",
    )
    parser.add_argument(
        "directories",
        nargs="+",
        type=_path,
        metavar="DIR",
        help="a run directory, or one that holds some, such as a sweep's",
    )
    parser.add_argument(
        "--output", type=_path, help="the file (default: report.html in DIR; of several, in the current directory)"
    )
    parser.set_defaults(run=_report)


def _add_average(tools: Any) -> None:
    text = "write the mean of successive checkpoints of a run as a run directory of its own"
    parser = tools.add_parser("average", help=text, description=f"{text[0].upper()}{text[1:]}.")
    parser.add_argument("directory", type=_path, help="the run directory, or the one that holds the checkpoints")
    parser.add_argument(
        "output", type=_path, help="the new directory, for --mode=eval --model_dir=... and --warm_start=..."
    )
    parser.add_argument("--last", type=int, default=5, help="number of checkpoints (default %(default)s)")
    _add_checkpoint(parser, "the last of them", "latest")
    parser.set_defaults(run=_average)


def _add_export(tools: Any) -> None:
    text = "export the model of a run for programs without looplib, by its own command with --mode=export"
    parser = tools.add_parser("export", help=text, description=f"{text[0].upper()}{text[1:]}.")
    parser.add_argument("directory", type=_path, help="the run directory")
    parser.add_argument(
        "output", nargs="?", type=_path, help="the new directory (default: export/step-<step> in the run directory)"
    )
    parser.add_argument("--tflite", action="store_true", help="write a TFLite file too")
    text = "export the last weights, not averages of them"
    parser.add_argument("--last_weights", dest="averages", action="store_false", help=text)
    _add_checkpoint(parser, "the one to export", "final")
    parser.set_defaults(run=_export)


def _add_checkpoint(parser: argparse.ArgumentParser, what: str, default: str) -> None:
    text = f"{what}: final, what the run ended with; latest; best; or a step (default {default})"
    parser.add_argument("--checkpoint", default=default, help=text)


def _add_launch(tools: Any) -> None:
    parser = tools.add_parser(
        "launch",
        help="start several workers of a run on this machine",
        usage="python -m looplib launch --workers=N [options] -- COMMAND ...",
        description="Starts COMMAND as several processes on this machine, each with TF_CONFIG, and ends and restarts "
        "them together. It is a convenience for trying a run of many workers on one machine, not a cluster manager: "
        "workers on many machines are started by Slurm or Kubernetes (docs/cluster.md). The processes share the "
        "machine's cores and GPUs; to use several GPUs of one machine, run one process with --strategy=mirrored.",
        epilog="exit codes: 0 done; 75 saved and ended by SIGTERM, SIGINT, SIGHUP, SIGUSR1 or SIGUSR2; run it again; "
        "1 failed",
    )
    parser.add_argument("--workers", type=int, required=True, help="number of workers")
    parser.add_argument(
        "--parameter_servers",
        type=int,
        default=0,
        help="number of parameter servers; if above 0, a chief is started too (default 0)",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        help="maximum number of restarts from the newest checkpoint after a failure; restarts all processes, or with "
        "parameter servers only the failed one (default 0)",
    )
    parser.add_argument(
        "--backoff", type=float, default=1.0, help="seconds before the first restart, doubled at each (default 1)"
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=30.0,
        help="seconds until the other processes are killed after a failure (default 30)",
    )
    parser.set_defaults(run=_launch)


def _add_rerun(tools: Any) -> None:
    parser = tools.add_parser(
        "rerun",
        help="repeat a run, say what differs now, and compare the two bit by bit",
        description="Repeats the command, configuration and seed of a run in a new directory, says what differs now "
        "(versions and code), and compares the two runs.",
        epilog="exit codes: 0 equal, bit by bit; 1 different; 2 the command failed, or the run cannot be repeated",
    )
    parser.add_argument("directory", type=_path, help="the run directory")
    parser.add_argument("--to", type=_path, help="the new run directory (default: DIR-rerun)")
    parser.set_defaults(run=_rerun)


def _add_replay(tools: Any) -> None:
    parser = tools.add_parser(
        "replay",
        help="go back to any step of a run, and look at its batch, loss, gradients and ops",
        description="Restores the newest checkpoint before a step into a temporary directory, trains to the step, and "
        "shows its batch, metrics, norms and the first op whose output is not finite. Compares with what the run "
        "reported. Changes nothing in the run directory.",
        epilog="exit codes: 0 equal to what the run reported; 1 different; 2 the step cannot be replayed",
    )
    parser.add_argument("directory", type=_path, help="the run directory")
    parser.add_argument("--step", type=int, required=True, help="the step, counted from 1")
    parser.add_argument("--eager", action="store_true", help="run the step only op by op, once, and show its prints")
    text = "stop in step_fn, in Python's debugger; with --eager"
    parser.add_argument("--pdb", dest="debug", action="store_true", help=text)
    parser.add_argument("--save", type=_path, help="file for the batch, FILE.npz")
    parser.set_defaults(run=_replay)


def _add_diff(tools: Any) -> None:
    parser = tools.add_parser(
        "diff",
        help="find the first step at which two runs part, and in what",
        description="Compares settings, versions, curves and checkpoints of two runs, and replays both between the "
        "last equal and the first different point, to find the step at which they part, and whether the examples, the "
        "metrics or the weights differ first. Changes nothing in the run directories.",
        epilog="exit codes: 0 equal as far as both go; 1 different; 2 not known",
    )
    parser.add_argument("first", type=_path, metavar="A", help="a run directory")
    parser.add_argument("second", type=_path, metavar="B", help="the other run directory")
    parser.set_defaults(run=_diff)


def _add_sweep(tools: Any) -> None:
    parser = tools.add_parser(
        "sweep",
        help="run a command with many settings, and rank the results",
        usage="python -m looplib sweep --dir=SWEEP [options] -- COMMAND --config.lr=0.1,0.01 ...",
        description="Runs COMMAND, without --model_dir, with many settings, each in a run directory of its own, and "
        "ranks the results. The same command resumes a sweep that was ended or killed. docs/experiments.md describes "
        "the lists and ranges of values.",
        epilog="exit codes: 0 done; 1 no run has a result; 2 used wrongly, or a damaged sweep.db, or a full disk; 75 "
        "saved and ended by SIGTERM, SIGINT, SIGHUP, SIGUSR1 or SIGUSR2; run it again",
    )
    parser.add_argument("--dir", type=_path, required=True, help="directory of the sweep")
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time (default %(default)s)")
    parser.add_argument("--search", default="grid", help="grid, random or tpe (default %(default)s)")
    parser.add_argument("--trials", type=int, help="number of configurations (default: all points of the grid)")
    parser.add_argument("--seeds", type=int, default=0, help="runs each configuration with --seed=0, 1, ... up to this")
    parser.add_argument("--metric", default="eval/accuracy", help="SPLIT/NAME to rank by (default %(default)s)")
    parser.add_argument(
        "--value", default="last", help="last or best: which value of a run's metric ranks it (default %(default)s)"
    )
    parser.add_argument("--goal", help="max or min (default: by the name of the metric, so min for a loss)")
    parser.add_argument(
        "--prune", default="none", help="rule that stops hopeless runs: none, median, halving or hyperband"
    )
    parser.set_defaults(run=_sweep)


def _add_check(tools: Any) -> None:
    kinds = tools.add_parser(
        "check", help="check exact resume, equal results on replicas, and readiness for a TPU or GPU"
    ).add_subparsers(required=True, metavar="WHAT")
    resume = _add_kind(
        kinds, "resume", "kill a run at random moments and compare it with an uninterrupted run", _resume
    )
    resume.add_argument("--kills", type=int, default=3, help="number of kills (default %(default)s)")
    resume.add_argument("--seed", type=int, default=0, help="seed for the moments of the kills (default %(default)s)")
    resume.add_argument(
        "--baseline", type=int, default=1, help="number of uninterrupted runs, compared first (default %(default)s)"
    )
    counts = _add_kind(kinds, "replicas", "compare runs on different numbers of replicas", _replicas)
    counts.add_argument("--counts", type=_counts, default=(1, 2, 4), help="numbers of replicas (default 1,2,4)")
    counts.add_argument("--workers", type=_counts, default=(), help="numbers of workers, compared too (default none)")
    counts.add_argument("--rtol", type=float, default=1e-4, help="relative tolerance (default %(default)s)")
    counts.add_argument("--atol", type=float, default=1e-5, help="absolute tolerance (default %(default)s)")
    for name, platform in (("tpu", "TPU"), ("gpu", "GPU")):
        text = f"lower a trainer's steps for a {platform}, without one, and report what cannot run"
        fits = _add_kind(kinds, name, text, _fits, "0 ready; 1 not ready")
        text = "number of TPU cores or GPUs (default %(default)s)"
        fits.add_argument("--cores", type=int, default=8, help=text)
        fits.set_defaults(platform=platform)


def _add_kind(
    kinds: Any, name: str, text: str, run: Callable[[argparse.Namespace], int], codes: str = "0 equal; 1 different"
) -> argparse.ArgumentParser:
    parser = kinds.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        usage=f"python -m looplib check {name} [options] -- COMMAND ...",
        epilog=_CHECK.format(name=name, codes=codes),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    text = "directory for the run directories (default: a temporary one, kept if the runs differ)"
    parser.add_argument("--dir", dest="directory", type=_path, metavar="DIR", help=text)
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for one run (default %(default)s)")
    parser.set_defaults(run=run)
    return parser


def _path(text: str) -> str:
    try:
        path = files.resolve(text, "the path")
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return path if text.startswith(("~", "file://")) else text  # names in tables are those that the user gives


def _counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} found; expected numbers such as 1,2") from None


def _arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Returns what the parser of a tool has added, by name."""
    return {name: value for name, value in vars(options).items() if name not in ("run", "command")}


def _status(options: argparse.Namespace) -> int:
    from looplib.extras.tools.status import status

    return status(**_arguments(options))


def _inspect(options: argparse.Namespace) -> int:
    from looplib.extras.tools.inspect import inspect

    return inspect(options.directory, options.verify)


def _report(options: argparse.Namespace) -> int:
    from looplib.extras.page.command import report

    return report(options.directories, options.output)


def _average(options: argparse.Namespace) -> int:
    from looplib.extras.tools.average import average

    return average(**_arguments(options))


def _export(options: argparse.Namespace) -> int:
    from looplib.extras.tools.export import export

    return export(**_arguments(options))


def _launch(options: argparse.Namespace) -> int:
    from looplib.extras.tools.local_launch import launch

    return launch(options.command, **_arguments(options))


def _rerun(options: argparse.Namespace) -> int:
    from looplib.extras.tools.rerun import rerun

    return rerun(options.directory, options.to)


def _replay(options: argparse.Namespace) -> int:
    from looplib.extras.tools.replay import replay

    return replay(**_arguments(options))


def _diff(options: argparse.Namespace) -> int:
    from looplib.extras.tools.diff import diff

    return diff(options.first, options.second)


def _sweep(options: argparse.Namespace) -> int:
    try:
        import matplotlib  # noqa: F401
        import optuna  # noqa: F401
    except ImportError as error:
        raise UsageError(f"a sweep needs {error.name}; install it with pip install 'looplib[sweep]'") from error
    from looplib.extras.sweep.study import Plan
    from looplib.extras.sweep.sweep import sweep

    plan = Plan(
        options.command, options.search, options.metric, options.goal, options.prune, options.seeds, options.value
    )
    return sweep(options.dir, plan, options.parallel, options.trials)


def _resume(options: argparse.Namespace) -> int:
    from looplib.extras.tools import check

    return check.resume(options.command, **_arguments(options))


def _fits(options: argparse.Namespace) -> int:
    from looplib.extras.tools import check

    return check.fits(options.command, **_arguments(options))


def _replicas(options: argparse.Namespace) -> int:
    from looplib.extras.tools import check

    return check.replicas(options.command, **_arguments(options))


if __name__ == "__main__":
    sys.exit(main())

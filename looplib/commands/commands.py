"""The commands of `python -m looplib`: their options, and what runs them. Importing this file is cheap."""

import argparse
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

from looplib.base import files
from looplib.base.plugins import Command
from looplib.buckets.local import local_path
from looplib.commands.options import arguments, path, place, run
from looplib.errors import EXIT_DONE, CommandError

_CHECK = """\
COMMAND is your usual command without --model_dir, for example
  python -m looplib check {name} -- python -m trainers.image_classification --train_steps=200 --checkpoint_interval=50

exit codes: {codes}; 2 the command failed, or could not be checked
"""


def status(tools: Any) -> None:
    """Adds the parser of `status`."""
    parser = tools.add_parser(
        "status",
        help="show every run below some folders: step, rate, time left, last metrics, and whether it is alive",
        description="Shows every run below some folders, such as those of a sweep. It only reads, and may be used "
        "while the runs train. States: starting; running; silent (running without news); killed (its process is gone "
        "without a word); done; preempted (saved and ended by a signal, to be run again); failed; unknown. "
        "With --alert, --alert_when or --until_end, --watch prints what happens: failures, kills, stalls, ends.",
        epilog="exit codes: 0 there are runs; 1 there is none; 2 used wrongly",
    )
    parser.add_argument(
        "directories", nargs="+", type=place, metavar="DIR", help="run directories, or folders that hold some"
    )
    parser.add_argument("--watch", action="store_true", help="repeat until Ctrl-C; a terminal is redrawn")
    parser.add_argument("--interval", type=float, default=2.0, help="seconds between looks (default %(default)s)")
    parser.add_argument(
        "--alert", dest="urls", action="append", default=[], metavar="URL",
        help="where to send alerts, may be given several times; - for those on standard input, one a line",
    )  # fmt: skip
    parser.add_argument(
        "--alert_when", dest="conditions", action="append", default=[], metavar="CONDITION",
        help="alert for a metric, such as eval/loss>2.5; may be given several times",
    )  # fmt: skip
    parser.add_argument("--until_end", action="store_true", help="end once all runs have ended")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.set_defaults(tool=Command(_status, own_signals=True))


def inspect(tools: Any) -> None:
    """Adds the parser of `inspect`."""
    parser = tools.add_parser("inspect", help="list the checkpoints of a run directory")
    parser.add_argument("directory", type=place, help="the run directory, or the one that holds the checkpoints")
    parser.add_argument("--verify", action="store_true", help="read all files and compare checksums")
    parser.set_defaults(tool=Command(_inspect, _check_inspect))


def average(tools: Any) -> None:
    """Adds the parser of `average`."""
    text = "write the mean of successive checkpoints of a run as a run directory of its own"
    parser = tools.add_parser("average", help=text, description=f"{text[0].upper()}{text[1:]}.")
    parser.add_argument("directory", type=run, help="the run directory, or the one that holds the checkpoints")
    parser.add_argument(
        "output", type=path, help="the new directory, for --mode=eval --model_dir=... and --warm_start=..."
    )
    parser.add_argument("--last", type=int, help="number of checkpoints (default 5)")
    _add_checkpoint(parser, "the last of them", "latest")
    text = "compute statistics of batch normalization from N training batches, by the run's command"
    parser.add_argument("--statistics_steps", type=int, metavar="N", help=f"{text} (default: average them)")
    text = "write the moving averages of the last one, not the mean"
    parser.add_argument("--averages", action="store_true", help=text)
    parser.set_defaults(tool=Command(_average, _check_checkpoints))


def export(tools: Any) -> None:
    """Adds the parser of `export`."""
    text = "export the model of a run for programs without looplib, by its own command with --mode=export"
    parser = tools.add_parser("export", help=text, description=f"{text[0].upper()}{text[1:]}.")
    parser.add_argument("directory", type=run, help="the run directory")
    parser.add_argument(
        "output", nargs="?", type=path, help="the new directory (default: export/step-<step> in the run directory)"
    )
    text = "what to write too, with commas between: safetensors, weights.h5, onnx, tflite, int8"
    parser.add_argument("--formats", default="", help=text)
    parser.add_argument("--license", default="unknown", help="of the model, for its card (default %(default)s)")
    text = "export the last weights, not averages of them"
    parser.add_argument("--last_weights", dest="averages", action="store_false", help=text)
    _add_checkpoint(parser, "the one to export", "final")
    parser.set_defaults(tool=Command(_export, _check_run, has_verdict=True))


def publish(tools: Any) -> None:
    """Adds the parser of `publish`."""
    text = "go back to a version of looplib.ExportEvery: publish it again, and move those after it aside"
    parser = tools.add_parser("publish", help=text, description=f"{text[0].upper()}{text[1:]}.")
    parser.add_argument("base", type=place, metavar="BASE", help="the folder of the versions, or its URL")
    parser.add_argument("version", type=int, metavar="VERSION", help="the one to publish")
    parser.set_defaults(tool=Command(_publish))


def _add_checkpoint(parser: argparse.ArgumentParser, what: str, default: str) -> None:
    text = f"{what}: final, what the run ended with; latest; best; or a step (default {default})"
    parser.add_argument("--checkpoint", default=default, help=text)


def launch(tools: Any) -> None:
    """Adds the parser of `launch`."""
    parser = tools.add_parser(
        "launch",
        help="start several workers of a run on this machine",
        usage="python -m looplib launch [--workers=N] [--data_workers=N] [options] -- COMMAND ...",
        description="Starts COMMAND as several processes on this machine, each with TF_CONFIG, and ends and restarts "
        "them together, also with fewer workers (docs/cluster.md). It is a convenience for one machine, not a cluster "
        "manager: workers on many machines are started by Slurm or Kubernetes. The processes share "
        "the machine's cores and GPUs; to use several GPUs of one machine, run one process with --strategy=mirrored.",
        epilog="exit codes: 0 done; 75 saved and ended by SIGTERM, SIGINT, SIGHUP, SIGUSR1 or SIGUSR2; run it again; "
        "1 failed",
    )
    parser.add_argument("--workers", type=int, default=1, help="number of workers (default 1)")
    text = "number of processes that make the batches; COMMAND gets their addresses as --data_service (default 0)"
    parser.add_argument("--data_workers", type=int, default=0, help=text)
    text = "restart with as few workers as this if some die, and with all again later (default: all workers)"
    parser.add_argument("--min_workers", type=int, help=text)
    parser.add_argument(
        "--parameter_servers",
        type=int,
        default=0,
        help="number of parameter servers; if above 0, a chief is started too (default 0)",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        help="maximum number of restarts in an hour from the newest checkpoint after a failure; restarts all "
        "processes, or with parameter servers only the failed one (default 0; with --min_workers 10, if a worker died)",
    )
    text = "seconds before a restart, doubled for each after a start of less than a minute (default 1)"
    parser.add_argument("--backoff", type=float, default=1.0, help=text)
    text = "seconds until the other processes are ended after a failure: SIGTERM, and 17 s later SIGKILL (default 10)"
    parser.add_argument("--grace", type=float, default=10.0, help=text)
    text = "seconds before another worker is tried in the place of one that died, doubled for each within an hour"
    parser.add_argument("--grow_after", type=float, default=60.0, help=f"{text} (default 60)")
    parser.set_defaults(tool=Command(_launch, own_signals=True, has_verdict=True))


def data_worker(tools: Any) -> None:
    """Adds the parser of `data_worker`."""
    parser = tools.add_parser(
        "data_worker",
        help="make the batches of trainings on other machines",
        description="Makes the batches of trainings that name this machine in --data_service, until a signal ends it: "
        "a service of tf.data with one worker. Whoever reaches its ports can read the files that it can read.",
    )
    parser.add_argument("--port", type=int, required=True, help="port that --data_service names")
    text = "name or address of this machine, by which trainings reach it (default: its host name)"
    parser.add_argument("--host", default=socket.gethostname(), help=text)
    parser.add_argument("--worker_port", type=int, default=0, help="port of the batches (default: any free one)")
    parser.set_defaults(tool=Command(_data_worker))


def rerun(tools: Any) -> None:
    """Adds the parser of `rerun`."""
    parser = tools.add_parser(
        "rerun",
        help="repeat a run, or an interval between two checkpoints, and compare bit by bit",
        description="Repeats the command, configuration and seed of a run in a new directory, says what differs now "
        "(versions and code), and compares the two runs. With --from, it trains an interval between two checkpoints "
        "again, in a temporary directory, and compares the tensors of the second one and the reports between them, to "
        "find silent corruption. The result is added to audit.jsonl in the run directory; nothing else there changes, "
        "and the run may train meanwhile.",
        epilog="exit codes: 0 equal, bit by bit; 1 different; 2 the command failed, or nothing can be told",
    )
    parser.add_argument("directory", type=run, help="the run directory")
    text = "step of the checkpoint where the interval begins, or 0 (without a number: an interval not repeated yet)"
    parser.add_argument("--from", dest="begin", nargs="?", const=-1, type=_step, metavar="STEP", help=text)
    text = "the new run directory (default: DIR-rerun); with --from, the step of the checkpoint where the interval ends"
    parser.add_argument("--to", metavar="DIR|STEP", help=text)
    parser.set_defaults(tool=Command(_rerun, _check_rerun, has_verdict=True))


def replay(tools: Any) -> None:
    """Adds the parser of `replay`."""
    parser = tools.add_parser(
        "replay",
        help="go back to any step of a run, and look at its batch, loss, gradients and ops",
        description="Restores the newest checkpoint before a step into a temporary directory, trains to the step, and "
        "shows its batch, metrics, norms and the first op whose output is not finite. Compares with what the run "
        "reported. Changes nothing in the run directory.",
        epilog="exit codes: 0 equal to what the run reported; 1 different; 2 the step cannot be replayed",
    )
    parser.add_argument("directory", type=run, help="the run directory")
    parser.add_argument("--step", type=int, required=True, help="the step, counted from 1")
    parser.add_argument("--eager", action="store_true", help="run the step only op by op, once, and show its prints")
    text = "stop in step_fn, in Python's debugger; with --eager"
    parser.add_argument("--pdb", dest="debug", action="store_true", help=text)
    parser.add_argument("--save", type=path, help="file for the batch, FILE.npz")
    parser.set_defaults(tool=Command(_replay, _check_replay, has_verdict=True))


def diff(tools: Any) -> None:
    """Adds the parser of `diff`."""
    parser = tools.add_parser(
        "diff",
        help="find the first step at which two runs part, and in what",
        description="Compares settings, versions, curves and checkpoints of two runs, and replays both between the "
        "last equal and the first different point, to find the step at which they part, and whether the examples, the "
        "metrics or the weights differ first. Changes nothing in the run directories.",
        epilog="exit codes: 0 equal as far as both go; 1 different; 2 not known",
    )
    parser.add_argument("first", type=run, metavar="A", help="a run directory")
    parser.add_argument("second", type=run, metavar="B", help="the other run directory")
    parser.set_defaults(tool=Command(_diff, _check_diff, has_verdict=True))


def check(tools: Any) -> None:
    """Adds the parsers of `check`."""
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
    parser.add_argument("--dir", dest="directory", type=path, metavar="DIR", help=text)
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for one run (default %(default)s)")
    parser.set_defaults(tool=Command(run, has_verdict=True))
    return parser


def _counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} found; expected numbers such as 1,2") from None


def _check_run(options: argparse.Namespace) -> None:
    from looplib.run import started

    started.report_of(os.path.abspath(options.directory))


def _step(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) < 16:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r:.100} found; expected a step, or nothing, as in: rerun DIR --from")


def _check_rerun(options: argparse.Namespace) -> None:
    from looplib.run import started

    options.directory = os.path.abspath(options.directory)
    is_step = options.to is not None and options.to.isascii() and options.to.isdigit()
    if options.begin is None:
        if is_step:
            raise CommandError(
                f"--to={options.to} without --from names a directory; write --from, or --to=./{options.to}"
            )
        options.to = options.to and path(options.to)
        started.report_of(options.directory)
        return
    if options.to is not None and not is_step:
        raise CommandError(f"--to is {options.to!r:.100}; with --from, expected the step where the interval ends")
    started.start_of(started.Recorded(options.directory).report, options.directory)  # refuses what has no command


def _check_inspect(options: argparse.Namespace) -> None:
    from looplib.run import commits

    if options.verify and files.is_remote(options.directory):  # what is in the store, and not what was intact once
        from looplib.buckets.mirror import fetched  # here, as it imports packages that take time

        options.directory = fetched(options.directory, unchecked=True)
    options.directory = commits.checkpoint_folder(local_path(options.directory, "the run directory"))


def _check_checkpoints(options: argparse.Namespace) -> None:
    from looplib.run import commits

    options.directory = local_path(options.directory, "the run directory")
    commits.checkpoint_folder(options.directory)


def _check_replay(options: argparse.Namespace) -> None:
    from looplib.run import started

    started.check_replay(**arguments(options))


def _check_diff(options: argparse.Namespace) -> None:
    from looplib.run import started

    for directory in (options.first, options.second):
        started.Recorded(directory)


def _status(options: argparse.Namespace) -> int:
    from looplib.commands.status import status

    given = arguments(options)
    # All users of a machine can read a command line.
    read = [line.strip() for line in sys.stdin.read().splitlines()] if "-" in given["urls"] else []
    given["urls"] = [url for url in (*given["urls"], *read) if url not in ("", "-")]
    return status(**given)


def _inspect(options: argparse.Namespace) -> int:
    from looplib.commands.inspect import inspect

    return inspect(options.directory, options.verify)


def _average(options: argparse.Namespace) -> int:
    from looplib.commands.average import average

    return average(**arguments(options))


def _export(options: argparse.Namespace) -> int:
    from looplib.commands.export import export

    return export(**arguments(options))


def _publish(options: argparse.Namespace) -> int:
    from looplib.exports.versions import versions_in

    print(f"version {versions_in(options.base).go_back(options.version)} of {options.base} is {options.version} again")
    return EXIT_DONE


def _launch(options: argparse.Namespace) -> int:
    from looplib.processes.local_workers import launch

    return launch(options.command, **arguments(options))


def _data_worker(options: argparse.Namespace) -> int:
    from looplib.data.service import serve

    serve(**arguments(options))


def _rerun(options: argparse.Namespace) -> int:
    if options.begin is not None:
        from looplib.commands.intervals import ANY, rerun_interval

        return rerun_interval(options.directory, options.begin, ANY if options.to is None else int(options.to))
    from looplib.commands.rerun import rerun

    return rerun(options.directory, options.to)


def _replay(options: argparse.Namespace) -> int:
    from looplib.commands.replay import replay

    return replay(**arguments(options))


def _diff(options: argparse.Namespace) -> int:
    from looplib.commands.diff import diff

    return diff(options.first, options.second)


def _resume(options: argparse.Namespace) -> int:
    from looplib.commands import check

    return check.resume(options.command, **arguments(options))


def _fits(options: argparse.Namespace) -> int:
    from looplib.commands import check

    return check.fits(options.command, **arguments(options))


def _replicas(options: argparse.Namespace) -> int:
    from looplib.commands import check

    return check.replicas(options.command, **arguments(options))


def ray(tools: Any) -> None:
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
    parser.set_defaults(tool=Command(_ray, own_signals=True, has_verdict=True))


def _resource(text: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    try:
        return name, float(number)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} found; expected NAME=NUMBER, such as TPU=4") from None


def _ray(options: argparse.Namespace) -> int:
    from looplib.processes.ray import WorkerPlace, run

    given = arguments(options)
    names = ("cpus", "gpus", "placement", "wait")
    place = WorkerPlace(**{name: given.pop(name) for name in names}, resources=dict(given.pop("resources")))
    return run(options.command, place=place, **given)

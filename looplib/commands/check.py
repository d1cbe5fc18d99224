"""Checks of a complete binary: does a killed run end like an uninterrupted one, and a run on several replicas like one?

Each check runs the user's command in separate run directories and compares what these hold at the end.
"""

import contextlib
import dataclasses
import fcntl
import functools
import glob
import os
import random
import re
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import BinaryIO

from looplib.base import files, folders, orders
from looplib.base.console import printable
from looplib.base.messages import with_cure
from looplib.base.numbers import format_size
from looplib.base.orders import Order, PreflightOrder
from looplib.commands.compare import Comparison, compare, decided_by_rounding, final_checkpoint, first_moved_by_rounding
from looplib.errors import EXIT_DIFFERENT, EXIT_DONE, CheckError
from looplib.loop import additions
from looplib.processes.child import Child, CommandLine, last_lines
from looplib.replay import preflight
from looplib.run.commits import latest_checkpoint

_MOST_SHOWN = 10_000  # characters
_LAST_SECONDS = 10.0  # for the processes of a killed run to end
# What kills wait for, in turn. The first start after one then finds a checkpoint, and each part of a life is hit.
_KILLS = ("after a save", "while it started", "while it ran")
_SHOWN = 6
_NUDGES = 2  # runs that measure how rounding grows
# A preflight builds the step on the CPU, whatever devices and workers the environment names.
_NO_DEVICES = {
    "CUDA_VISIBLE_DEVICES": "-1",
    "TPU_NAME": "",
    "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS": "",
    "TPU_CONFIG": "",
    "TF_CONFIG": "{}",
}
_DATA_HINT = (
    "check the data first: different examples were used (--steps_per_loop=1 shows at which step). In `dataset`, "
    "build on context.indices, or seed each shuffle with context.seed; use tf.random.stateless_* for augmentation, "
    "with the example's id in the seed, not tf.random.uniform or numpy"
)
_RESUME_HINT = (
    "the examples are equal, so the step uses something that a checkpoint does not hold: tf.random.normal, tf_keras "
    "dropout, a Python counter, an array in an attribute (docs/checkpoints.md). --baseline=2 "
    "shows whether two uninterrupted runs agree at all"
)
_REPORT_HINT = (
    "all values that both runs have are equal, so the training is right and only the report differs: a loop_end or "
    "step_fn names metrics by chance, or looplib has a bug; please report it"
)
_BASELINE_HINT = (
    "uninterrupted runs differ too, so start there: add --deterministic to the command, and seed everything random "
    "from its --seed"
)
_REPLICAS_HINT = (
    "the examples are equal, and the difference is larger than rounding explains, so the step depends on how they are "
    "divided: the loss must be divided by the global batch (self.global_mean), regularization by "
    "tf.nn.scale_regularization_loss; dropout and batch normalization differ by nature"
)


def say(line: str) -> None:
    """Prints lines at once, so that they stand in order between the lines of the command; of a long text the beginning.

    Args:
      line: one or several, which may have what somebody else has written, such as a command.
    """
    line = line if len(line) <= _MOST_SHOWN else f"{line[:_MOST_SHOWN]}… ({len(line):,} characters)"
    print("\n".join(map(printable, line.expandtabs().split("\n"))), flush=True)


@dataclasses.dataclass
class ProcessRun:
    """One start of the command; the moments of kills in later ones are drawn from it.

    Attributes:
      found: the step of the newest checkpoint at its start.
      now: seconds since the start; once it has ended, the length of the life.
      ready: when the command had built and restored everything, or None.
      saves: from the step of each new checkpoint to when it was seen.
      saved: the step of the newest checkpoint, 0 if there is none.
      killed: whether it ended by a kill.
    """

    found: int
    now: float = 0.0
    ready: float | None = None
    saves: dict[int, float] = dataclasses.field(default_factory=dict)
    saved: int = 0
    killed: bool = False


def run(
    command: Sequence[str],
    folder: str,
    timeout: float,
    moment_of: Callable[[ProcessRun], float | None] = lambda life: None,
    order: Order = Order(example_checksums=True),
    environment: Mapping[str, str] | None = None,
) -> ProcessRun:
    """Starts the command and waits for its end, or kills it.

    Args:
      command: a looplib binary and its flags without `--model_dir`.
      folder: the run directory; what the command prints is appended to a file beside it.
      timeout: seconds that it may take.
      moment_of: called until it returns the moment of the kill, in seconds since the start.
      order: what is ordered of it; the file is `order_file` of the run directory.
      environment: variables to add.

    Raises:
      UsageError: if the command cannot be started, fails, or takes longer.
    """
    life, stamp, moment = ProcessRun(saved_step(folder)), _stamp(folder), None
    path = order_file(folder)
    with files.open_to_append(f"{folder}.log") as log:
        _hold(log, folder)
        folders.remove(*os.path.split(path))  # of a check that was killed
        added = {**(environment or {}), **order.give(path)}
        process = Child(CommandLine([*command, f"--model_dir={folder}"]), added, output=log)
    started = time.monotonic()
    struck = False
    try:
        while process.poll() is None and life.now <= timeout and not struck:
            time.sleep(0.005)
            life.now = time.monotonic() - started
            life.saved = saved_step(folder)
            if life.saved != life.found:
                life.saves.setdefault(life.saved, life.now)
            if life.ready is None and _stamp(folder) != stamp:
                life.ready = life.now
            if moment is None:
                moment = moment_of(life)
            struck = moment is not None and life.now >= moment
    finally:
        process.kill()
        code = process.wait()
        folders.remove(*os.path.split(path))
    newest = latest_checkpoint(os.path.join(folder, "checkpoints"))  # a kill may leave a later one unfinished
    life.saved = int(newest.rsplit("-", 1)[1]) if newest else 0
    life.killed = struck and code == -signal.SIGKILL  # otherwise it ended before the kill
    if code and not life.killed:
        how = f"did not end within {timeout:g} s (--timeout)" if life.now > timeout else f"failed with code {code}"
        print("".join(f"  | {line}\n" for line in last_lines(f"{folder}.log")), end="", file=sys.stderr)
        raise CheckError(f"the command {how}; its last lines are above, all are in {folder}.log")
    return life


def _hold(log: BinaryIO, folder: str) -> None:
    """Holds the log of a run for this process and those that have it as their output.

    Raises:
      UsageError: if another one holds it: one that was killed a moment ago is waited for.
    """
    end = time.monotonic() + _LAST_SECONDS
    with contextlib.suppress(OSError):  # a file system without locks
        while True:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > end:
                    break
                time.sleep(0.05)
        raise CheckError(
            f"another process has {folder}.log as its output, of a check that runs there or was killed; wait until it "
            "has ended, or use another directory"
        )


def order_file(folder: str) -> str:
    """Returns the file of the order of the command that trains in a run directory."""
    return f"{folder}.order.json"


def run_to_the_end(
    command: Sequence[str], folder: str, timeout: float, order: Order = Order(example_checksums=True)
) -> ProcessRun:
    """Runs the command to its end, and says how long it took; see `run`."""
    life = run(command, folder, timeout, order=order)
    final_checkpoint(folder)
    start = "" if life.ready is None else f", of which {life.ready:.1f} s to start"
    say(f"{os.path.basename(folder)}: {life.now:.1f} s{start}; the last save is of step {life.saved}")
    return life


def run_killed(
    command: Sequence[str], folder: str, whole: ProcessRun, kills: int, moments: random.Random, timeout: float
) -> list[int]:
    """Runs the command with kills, and then to its end.

    Args:
      command: see `run`.
      folder: see `run`.
      whole: the life of an uninterrupted run.
      kills: how often to kill it.
      moments: draws the moments of the kills.
      timeout: seconds that each start may take.

    Returns:
      The step that each start after a kill found.

    Raises:
      UsageError: as `run` does, or if the command always ended before a kill came.
    """
    start, steps = whole.ready or whole.now, []
    ended = False
    for _ in range(2 * kills + 4):
        if len(steps) == kills:
            break
        kind = _KILLS[1 if ended else len(steps) % 3]
        # The first of as many moments as there are kills to come in the rest of the run, so that they spread over it.
        to_come = 1 if kind == _KILLS[1] else sum(i % 3 != 1 for i in range(len(steps), kills))
        part = 1 - moments.random() ** (1 / to_come)
        life = run(command, folder, timeout, functools.partial(_moment_of, whole, start, kind, part))
        start = min(start, life.ready or start)  # the first start of all is slow: nothing is in memory yet
        if life.killed:
            steps.append(life.saved)
            when = f"{kind}, {life.now:.2f} s after its start"
            say(f"killed: {when}, kill {len(steps)} of {kills}; it had saved step {life.saved}")
        elif steps:
            ended = True  # the remaining kills hit starts that find nothing left to do
            say(f"killed: ended after {life.now:.2f} s, before the kill")
        else:
            say(f"killed: ended after {life.now:.2f} s, before the kill; restarting from step 0")
            folders.remove(*os.path.split(folder))
    if not steps:
        raise CheckError("the command ended before the first kill; use more steps")
    run_to_the_end(command, folder, timeout)
    return steps


def _moment_of(whole: ProcessRun, start: float, kind: str, part: float, life: ProcessRun) -> float | None:
    """Returns the moment to kill a life at, in seconds since its start; None while that is not known.

    Args:
      whole: the life of an uninterrupted run.
      start: seconds that a start takes.
      kind: of `_KILLS`.
      part: from 0 to 1, how far into the time that this kind of kill may strike.
      life: the life.
    """
    if kind == _KILLS[1]:
        return part * start
    # The rest of this life is about as long as that of the uninterrupted run after this save; the first kill comes
    # before the last save, so that the next start has both a checkpoint and work to do.
    end = max(whole.saves.values(), default=whole.now) if kind == _KILLS[0] else whole.now
    rest = end - whole.saves.get(life.saved, start)
    waits = not life.saves if kind == _KILLS[0] else life.ready is None
    return None if waits else life.now + part * rest


def _stamp(folder: str) -> tuple[int, int] | None:
    """Returns what changes when `run.json` is written, which a binary does first once it has built and restored."""
    try:
        status = os.stat(os.path.join(folder, "run.json"))
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino


def saved_step(folder: str) -> int:
    """Returns the step of the newest committed checkpoint in a run directory; 0 if there is none."""
    names = glob.glob(os.path.join(glob.escape(folder), "checkpoints", "ckpt-*.commit"))
    found = (re.search(r"ckpt-(\d+)\.commit$", name) for name in names)
    return max((int(match[1]) for match in found if match), default=0)


def resume(
    command: Sequence[str],
    directory: str | None = None,
    *,
    kills: int = 3,
    seed: int = 0,
    baseline: int = 1,
    timeout: float = 3600.0,
) -> int:
    """Runs a command uninterrupted, and killed at random moments, and compares the two bit by bit.

    Args:
      command: a looplib binary and its flags without `--model_dir`.
      directory: where to keep the run directories; default a temporary one, which stays if they differ.
      kills: how often the second run is killed.
      seed: seed for the moments of the kills.
      baseline: how many uninterrupted runs to make, and compare with each other first.
      timeout: seconds that one start of the command may take.

    Returns:
      The exit code.

    Raises:
      UsageError: for bad input, or if the command fails.
    """
    _refuse_flags(command, "model_dir")
    command = _pinned(command)
    for name, value in (("kills", kills), ("baseline", baseline)):
        if value < 1:
            raise CheckError(f"--{name} is {value}; expected at least 1")
    with _folder(directory) as folder:
        whole = [os.path.join(folder, f"uninterrupted_{number + 1}") for number in range(baseline)]
        lives = [run_to_the_end(command, one, timeout) for one in whole]
        for other in whole[1:]:
            again = compare(whole[0], other)
            if again.differences:
                say("two uninterrupted runs differ already")
                return _verdict(again, _BASELINE_HINT, "uninterrupted", "uninterrupted again", folder, bool(directory))
            say("two uninterrupted runs are equal")
        killed = os.path.join(folder, "killed")
        steps = run_killed(command, killed, lives[0], kills, random.Random(seed), timeout)
        say(f"killed: restarts resumed from the steps {', '.join(map(str, sorted(set(steps))))}")
        if not any(0 < step < lives[0].saved for step in steps):
            say(
                "no restart resumed from the middle of the run, so the check covers little; use more steps and more "
                "saves"
            )
        name = f"after {len(steps)} kill{'s' if len(steps) > 1 else ''}"
        return _verdict(compare(whole[0], killed), _RESUME_HINT, "uninterrupted", name, folder, bool(directory))


def replicas(
    command: Sequence[str],
    directory: str | None = None,
    *,
    counts: Sequence[int] = (1, 2, 4),
    workers: Sequence[int] = (),
    rtol: float = 1e-4,
    atol: float = 1e-5,
    timeout: float = 3600.0,
) -> int:
    """Runs a command on several numbers of replicas or workers; compares examples exactly, all else up to rounding.

    Runs on the first number of replicas whose initial weights are changed in their last bit measure how far rounding
    alone drives two runs apart. The steps are reported one by one, so that a difference is seen where it begins, before
    rounding has grown.

    Args:
      command: a looplib binary and its flags without `--model_dir` and `--num_virtual_devices`.
      directory: where to keep the run directories; default a temporary one, which stays if they differ.
      counts: the numbers of replicas; all other runs are compared with the first.
      workers: the numbers of workers, of one replica each, that the command also runs on, on this machine.
      rtol: relative tolerance of metrics and floating point tensors.
      atol: absolute tolerance of metrics and floating point tensors.
      timeout: seconds that one run may take.

    Returns:
      The exit code.

    Raises:
      UsageError: for bad input, or if the command fails.
    """
    _check_replicas(command, counts, workers, rtol, atol)
    with _folder(directory) as folder:
        command = [*_pinned(command), "--steps_per_loop=1"]
        launch = [sys.executable, "-m", "looplib", "launch"]
        commands = {f"replicas_{count}": [*command, f"--num_virtual_devices={count}"] for count in counts}
        for count in workers:
            commands[f"workers_{count}"] = [*launch, f"--workers={count}", "--", *command, "--strategy=multi_worker"]
        runs = {name: os.path.join(folder, name) for name in commands}
        for name, place in runs.items():
            run_to_the_end(commands[name], place, timeout)
        first, *others = runs
        rounding = _rounding(commands[first], runs[first], folder, rtol, atol, timeout)
        for name in others:
            comparison = compare(runs[first], runs[name], rtol, atol, rounding)
            for split, (relative, found) in comparison.largest.items():
                most = f"{relative:.2g} ({found.where}: {found.one} and {found.other})" if relative else "none"
                say(f"{_shown(name)} against {_shown(first)}, {split}: largest relative difference {most}")
            keep = bool(directory) or name != others[-1]  # the last comparison deletes the directories
            if code := _verdict(comparison, _REPLICAS_HINT, f"on {_shown(first)}", f"on {_shown(name)}", folder, keep):
                return code
        return EXIT_DONE


def _check_replicas(
    command: Sequence[str], counts: Sequence[int], workers: Sequence[int], rtol: float, atol: float
) -> None:
    _refuse_flags(command, "model_dir", "num_virtual_devices", *["strategy"] * bool(workers))
    for flag, numbers, least in (("counts", counts, 1 if workers else 2), ("workers", workers, 0)):
        if not least <= len(set(numbers)) == len(numbers) or min(numbers, default=1) < 1:
            found, expected = ",".join(map(str, numbers)), "two or more numbers" if least == 2 else "numbers"
            raise CheckError(f"--{flag} is {found}; expected {expected} of at least 1, each once, such as 1,2,4")
    if not (rtol > 0 and atol > 0):
        raise CheckError(f"--rtol is {rtol} and --atol {atol}; expected positive numbers")


def _shown(name: str) -> str:
    """Returns the name of a run's directory in words."""
    kind, _, count = name.partition("_")
    return f"{count} {kind.removesuffix('s') if count == '1' else kind}"


def _rounding(
    command: Sequence[str], reference: str, folder: str, rtol: float, atol: float, timeout: float
) -> list[Comparison]:
    """Measures how rounding grows, and says what it hides: compares a run with others that differ in their last bit."""
    found = []
    for seed in range(1, _NUDGES + 1):
        nudged = os.path.join(folder, f"last_bit_{seed}")
        run_to_the_end(command, nudged, timeout, Order(example_checksums=True, perturbation=seed))
        found.append(compare(reference, nudged, rtol, atol))
    if moved := decided_by_rounding(found):
        say(f"rounding alone moves the final weights by {moved:.0%}, so only the steps are compared, not the weights")
        if step := first_moved_by_rounding(found):
            say(
                f"from step {step} on it changes a training metric by more than 1%, so a fault that begins later "
                "may not be found; use fewer steps or a smaller learning rate"
            )
    return found


def fits(
    command: Sequence[str], platform: str, directory: str | None = None, *, cores: int = 8, timeout: float = 3600.0
) -> int:
    """Starts a command for a preflight, see `preflight`, and prints what it finds.

    Args:
      command: a looplib binary and its flags without `--model_dir`.
      platform: "TPU" or "GPU".
      directory: where to keep the run directory and the result; default nowhere.
      cores: TPU cores, or GPUs, that the global batch is divided over.
      timeout: seconds that it may take.

    Returns:
      The exit code.

    Raises:
      UsageError: for bad input, or if the command fails.
    """
    _refuse_flags(command, "model_dir")
    if cores < 1:
        raise CheckError(f"--cores is {cores}; expected at least 1")
    order = Order(preflight=PreflightOrder(platform, cores))
    with _folder(directory) as folder:
        place = os.path.join(folder, "run")
        run(command, place, timeout, order=order, environment=_NO_DEVICES)
        if not orders.is_answered(order_file(place)):
            raise CheckError(
                f"{command[0]!r} ended without handing over its steps; name a binary that calls launch.run"
            )
        found = orders.answer_to(order_file(place), preflight.Found)
        if not directory:
            folders.remove(*os.path.split(folder))
    for split, step in found.steps.items():
        _say_of_step(split, step, [finding for finding in found.findings if finding.split == split], platform)
    faults = sum(finding.fault for finding in found.findings)
    if faults:
        say(f"NOT READY for a {platform}: {faults} fault{'s' if faults > 1 else ''}")
        return EXIT_DIFFERENT
    say(f"READY for a {platform}, as far as can be checked without one")
    return EXIT_DONE


def _say_of_step(split: str, step: preflight.FoundStep, findings: Sequence[preflight.Finding], platform: str) -> None:
    """Prints what was found in one task's step."""
    whole = "all of it lowers" if step.lowered else "not all of it lowers"
    device = "TPU core" if platform == "TPU" else platform
    say(f"{split}: {step.batch} of {step.global_batch} examples on each {device}; {whole}")
    for finding in findings:
        say(f"  {'fault' if finding.fault else 'advice'}, {finding.kind}: {finding.text}")
        if finding.line:
            say(f"    {finding.line}")
    known = {kind: "not known" if size is None else format_size(size) for kind, size in step.memory.items()}
    sizes = (f"{kind} {size}" for kind, size in known.items())
    say(f"  memory of each {device}: {', '.join(sizes)}")


def _pinned(command: Sequence[str]) -> list[str]:
    """Returns the command with one engine: auto decides by time, so two runs of it may differ in their last bits."""
    named = any(re.match(r"--?loop(=|$)", argument) for argument in command)
    return [*command] if named else [*command, "--loop=graph"]


def _verdict(comparison: Comparison, hint: str, one: str, other: str, folder: str, keep: bool) -> int:
    """Prints what was compared and what differs, and deletes the folder of equal runs unless it is to be kept.

    Returns:
      The exit code.
    """
    c = comparison
    examples = "with" if c.examples else "without (no tensor of its data could be hashed)"
    tensors = f"{c.tensors} tensors" if c.weights else f"names and shapes of {c.tensors} tensors"
    what = (
        f"{c.records} records of metrics.jsonl ({examples} the examples trained on), {tensors} of the final checkpoint "
        f"({c.bytes:,} bytes), and run.json"
    )
    if not c.differences:
        say(f"EQUAL, {one} and {other}: {what}")
        if not keep:
            folders.remove(*os.path.split(folder))
        return EXIT_DONE
    say(f"DIFFERENT, {one} and {other}: {len(c.differences)} values of {what}; the first:")
    for found in c.differences[:_SHOWN]:
        say(f"  {found.text(one, other)}")
    both = [d.where for d in c.differences if "nothing" not in (d.one, d.other) and not d.where.endswith(": records")]
    if not both:
        hint = _REPORT_HINT
    elif hint is not _BASELINE_HINT and any(where.endswith(additions.METRIC) for where in both):
        hint = _DATA_HINT
    say(f"possible cause: {hint}; all files are in {folder}")
    return EXIT_DIFFERENT


@contextlib.contextmanager
def _folder(directory: str | None) -> Iterator[str]:
    """Makes the directory of the run directories; a temporary one is removed where a signal ends the check."""
    if directory:
        try:
            folders.make_folder(directory)
            if os.listdir(directory):
                raise CheckError(f"--dir {directory} is not empty; use an empty directory")
        except OSError as error:
            raise CheckError(
                f"--dir {directory} cannot be made: {with_cure(error, 'use another directory')}"
            ) from error
        yield os.path.abspath(directory)
        return
    folder = tempfile.mkdtemp(prefix="looplib-check-")
    try:
        yield folder
    except (KeyboardInterrupt, SystemExit):
        with contextlib.suppress(OSError):
            folders.remove(*os.path.split(folder))
        raise


def _refuse_flags(command: Sequence[str], *names: str) -> None:
    if not command:
        raise CheckError("there is no command to check; write it after --, as in -- python -m trainers.my_trainer")
    for argument in command:
        name = argument.lstrip("-").split("=")[0] if argument.startswith("-") else ""
        if name in names:
            raise CheckError(f"the command {shlex.join(command)} has --{name}, which the check sets itself; remove it")

"""Checks of a whole binary: does a killed run end as an uninterrupted one, and a run on more replicas as on one?

Each check runs the user's command in run directories of its own and compares what these hold at the end.
"""

import dataclasses
import glob
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable

from looplib.checkpoint.manager import latest_checkpoint
from looplib.errors import UsageError
from looplib.extras.tools import preflight
from looplib.extras.tools.compare import compare, final_checkpoint
from looplib.loop import example_checksum
from looplib.task import perturbation

EXIT_EQUAL, EXIT_DIFFERENT, EXIT_FAILED = 0, 1, 2

# What kills wait for, in turn: so that the first start after one finds a checkpoint, and each part of a life is struck.
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
    "the data comes first, as other examples were trained on (--steps_per_loop=1 tells at which step). In `dataset`, "
    "build on context.indices, or seed each shuffle with context.seed; draw augmentation from tf.random.stateless_* "
    "with the example's id in the seed, not from tf.random.uniform or numpy"
)
_RESUME_HINT = (
    "the examples are the same, so the step uses something that a checkpoint does not hold: tf.random.normal, tf_keras "
    "dropout, a Python counter, an array in an attribute (docs/guide.md: What is state, Randomness). --baseline=2 "
    "tells whether two uninterrupted runs agree at all"
)
_REPORT_HINT = (
    "what both have is the same, so the training is right and its report is not: a loop_end or step_fn that names "
    "metrics by chance, or else a fault of looplib's own, to report"
)
_BASELINE_HINT = (
    "no kill is needed to make a difference, so begin there: add --deterministic to the command, and seed whatever is "
    "random from its --seed"
)
_REPLICAS_HINT = (
    "the examples are the same, and the difference is larger than rounding makes it, so the step depends on how they "
    "are divided: the loss must be divided by the global batch (self.global_mean), regularization by "
    "tf.nn.scale_regularization_loss; dropout and batch normalization differ by nature"
)


def resume(command, directory=None, *, kills=3, seed=0, baseline=1, timeout=3600.0):
    """Runs a command uninterrupted, and killed at random moments, and compares the two bit by bit.

    Args:
      command: list of str, a looplib binary and its flags without `--model_dir`.
      directory: where to keep the run directories; default a temporary one, which stays if they differ.
      kills: how often the second run is killed.
      seed: decides the moments.
      baseline: how many uninterrupted runs to make, and compare with each other first.
      timeout: seconds that one start of the command may take.

    Returns:
      int, an exit code.

    Raises:
      UsageError: for bad input, or if the command fails.
    """
    _refuse_flags(command, "model_dir")
    command = _pinned(command)
    for name, value in (("kills", kills), ("baseline", baseline)):
        if value < 1:
            raise UsageError(f"--{name} is {value}; expected at least 1")
    folder = _prepare(directory)
    runs = [os.path.join(folder, f"uninterrupted_{i + 1}") for i in range(baseline)]
    lives = [_run_to_the_end(command, run, timeout) for run in runs]
    for run in runs[1:]:
        again = compare(runs[0], run)
        if again.differences:
            _say("two uninterrupted runs differ already")
            return _verdict(again, _BASELINE_HINT, "uninterrupted", "uninterrupted again", folder, directory)
        _say("two uninterrupted runs are equal")
    killed = os.path.join(folder, "killed")
    steps = _run_killed(command, killed, lives[0], kills, random.Random(seed), timeout)
    _say(f"killed: the starts after a kill went on from the steps {', '.join(map(str, sorted(set(steps))))}")
    if not any(0 < step < lives[0].saved for step in steps):
        _say("no start went on from the midst of the run, so little was checked; give it more steps, and saves between")
    name = f"after {len(steps)} kill{'s' if len(steps) > 1 else ''}"
    return _verdict(compare(runs[0], killed), _RESUME_HINT, "uninterrupted", name, folder, directory)


def replicas(command, directory=None, *, counts=(1, 2, 4), rtol=1e-4, atol=1e-5, timeout=3600.0):
    """Runs a command on several numbers of replicas, and compares examples exactly, all else up to rounding.

    How far rounding alone drives two runs apart is measured: by runs on the first number of replicas whose initial
    weights are changed in their last bit. The steps are reported one by one, so that a difference is seen where it
    begins, before rounding has grown.

    Args:
      command: list of str, a looplib binary and its flags without `--model_dir` and `--num_virtual_devices`.
      directory: where to keep the run directories; default a temporary one, which stays if they differ.
      counts: the numbers of replicas; the others are compared with the first.
      rtol: relative tolerance of metrics and floating point tensors.
      atol: absolute tolerance of the same.
      timeout: seconds that one run may take.

    Returns:
      int, an exit code.

    Raises:
      UsageError: for bad input, or if the command fails.
    """
    _refuse_flags(command, "model_dir", "num_virtual_devices")
    command = _pinned(command)
    if len(set(counts)) < 2 or len(set(counts)) < len(counts) or min(counts) < 1:
        raise UsageError(f"--counts is {','.join(map(str, counts))}; expected two or more numbers, such as 1,2,4")
    if not (rtol > 0 and atol > 0):
        raise UsageError(f"--rtol is {rtol} and --atol {atol}; expected positive numbers")
    folder = _prepare(directory)
    runs = {n: os.path.join(folder, f"replicas_{n}") for n in counts}
    command = [*command, "--steps_per_loop=1"]
    for n, run in runs.items():
        _run_to_the_end([*command, f"--num_virtual_devices={n}"], run, timeout)
    first, *others = counts
    gaps = []
    for seed in range(1, _NUDGES + 1):
        nudged = os.path.join(folder, f"last_bit_{seed}")
        environment = {example_checksum.VARIABLE: "1", perturbation.VARIABLE: str(seed)}
        _run_to_the_end([*command, f"--num_virtual_devices={first}"], nudged, timeout, environment)
        gaps.append(compare(runs[first], nudged, rtol, atol).gaps)
    rounding = merged(gaps)
    for n in others:
        comparison = compare(runs[first], runs[n], rtol, atol, rounding)
        for split, (relative, where, one, other) in comparison.largest.items():
            found = f"{relative:.2g} ({where}: {one} and {other})" if relative else "none"
            _say(f"{n} replicas against {first}, {split}: largest relative difference {found}")
        names = [f"on {count} replica{'s' if count > 1 else ''}" for count in (first, n)]
        # The directories are for the last comparison to delete.
        code = _verdict(comparison, _REPLICAS_HINT, *names, folder, directory or n != others[-1])
        if code:
            return code
    return EXIT_EQUAL


def merged(gaps: Iterable[dict[str, float]]) -> dict[str, float]:
    """Returns the largest of several runs' `Comparison.gaps`, by where they are."""
    largest: dict[str, float] = {}
    for found in gaps:
        largest |= {where: max(gap, largest.get(where, 0.0)) for where, gap in found.items()}
    return largest


def fits(command, platform, directory=None, *, cores=8, timeout=3600.0):
    """Starts a command for a preflight, see `preflight`, and prints what it finds.

    Args:
      command: list of str, a looplib binary and its flags without `--model_dir`.
      platform: "TPU" or "GPU".
      directory: where to keep the run directory and the result; default nowhere.
      cores: TPU cores, or GPUs, that the global batch is divided over.
      timeout: seconds that it may take.

    Returns:
      int, an exit code.

    Raises:
      UsageError: for bad input, or if the command fails.
    """
    _refuse_flags(command, "model_dir")
    if cores < 1:
        raise UsageError(f"--cores is {cores}; expected at least 1")
    folder = _prepare(directory)
    to = os.path.join(folder, "found.json")
    request = json.dumps({"platform": platform, "cores": cores, "to": to})
    _run(command, os.path.join(folder, "run"), timeout, environment={preflight.VARIABLE: request, **_NO_DEVICES})
    if not os.path.exists(to):
        raise UsageError(f"{command[0]!r} ended without handing over its steps; name a binary that calls launch.run")
    with open(to) as file:
        result = json.load(file)
    if not directory:
        shutil.rmtree(folder)
    for split, step in result["steps"].items():
        _say_of_step(split, step, [finding for finding in result["findings"] if finding["split"] == split], platform)
    faults = sum(finding["fault"] for finding in result["findings"])
    if faults:
        _say(f"NOT READY for a {platform}: {faults} fault{'s' if faults > 1 else ''}")
        return EXIT_DIFFERENT
    _say(f"READY for a {platform}, as far as can be told without one")
    return EXIT_EQUAL


# Running and telling.


def _say_of_step(split, step, findings, platform):
    whole = "all of it lowers" if step["lowered"] else "not all of it lowers"
    device = "TPU core" if platform == "TPU" else platform
    _say(f"{split}: {step['batch']} of {step['global_batch']} examples on each {device}; {whole}")
    for finding in findings:
        _say(f"  {'fault' if finding['fault'] else 'advice'}, {finding['kind']}: {finding['text']}")
        if finding["line"]:
            _say(f"    {finding['line']}")
    sizes = (f"{kind} {_size(size)}" for kind, size in step["memory"].items())
    _say(f"  memory of each {device}: {', '.join(sizes)}")


def _size(size):
    if size is None:
        return "not known"
    unit, name = next(((2**n, name) for n, name in ((30, "GB"), (20, "MB"), (10, "KB")) if size >= 2**n), (1, "bytes"))
    return f"{size / unit:.3g} {name}"


def _pinned(command):
    """The command with one engine: auto decides by time, so that two runs need not have the same last bits."""
    named = any(re.match(r"--?loop(=|$)", argument) for argument in command)
    return command if named else [*command, "--loop=graph"]


def _verdict(comparison, hint, one, other, folder, keep):
    """Prints what was compared and what differs; returns the exit code."""
    c = comparison
    examples = "with" if c.examples else "without (no tensor of its data could be hashed)"
    what = (
        f"{c.records} records of metrics.jsonl ({examples} the examples trained on), {c.tensors} tensors of the final "
        f"checkpoint ({c.bytes:,} bytes), and run.json"
    )
    if not c.differences:
        _say(f"EQUAL, {one} and {other}: {what}")
        if not keep:
            shutil.rmtree(folder)
        return EXIT_EQUAL
    _say(f"DIFFERENT, {one} and {other}: {len(c.differences)} values of {what}; the first:")
    for where, left, right in c.differences[:_SHOWN]:
        _say(f"  {where}: {left} {one}, {right} {other}")
    both = [where for where, *texts in c.differences if "nothing" not in texts and not where.endswith(": records")]
    if not both:
        hint = _REPORT_HINT
    elif hint is not _BASELINE_HINT and any(where.endswith(example_checksum.METRIC) for where in both):
        hint = _DATA_HINT
    _say(f"what to look at: {hint}; all is in {folder}")
    return EXIT_DIFFERENT


@dataclasses.dataclass
class _Life:
    """One start of the command, from which to draw the moments of kills in others.

    Attributes:
      found: the step of the newest checkpoint at its start.
      now: seconds since the start; at last, the length of the life.
      ready: when the command had built and restored all, or None.
      saves: dict from the step of each new checkpoint to when it was seen.
      saved: the step of the newest checkpoint, 0 if there is none.
      killed: whether it ended by a kill.
    """

    found: int
    now: float = 0.0
    ready: float | None = None
    saves: dict = dataclasses.field(default_factory=dict)
    saved: int = 0
    killed: bool = False


def _run(command, folder, timeout, moment_of=lambda life: None, environment=None):
    """Starts the command and waits for its end, or kills it at `moment_of(life)`, asked until it is not None."""
    environment = environment or {example_checksum.VARIABLE: "1"}
    life, stamp, moment = _Life(_saved_step(folder)), _stamp(folder), None
    with open(f"{folder}.log", "ab") as log:
        try:
            process = subprocess.Popen(
                [*command, f"--model_dir={folder}"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a process group of its own, to kill it whole
                env={**os.environ, **environment},
            )
        except OSError as error:
            raise UsageError(
                f"{command[0]!r} cannot be started: {error.strerror}; write the command as you type it"
            ) from error
    started = time.monotonic()
    struck = False
    try:
        while process.poll() is None and life.now <= timeout and not struck:
            time.sleep(0.005)
            life.now = time.monotonic() - started
            life.saved = _saved_step(folder)
            if life.saved != life.found:
                life.saves.setdefault(life.saved, life.now)
            if life.ready is None and _stamp(folder) != stamp:
                life.ready = life.now
            if moment is None:
                moment = moment_of(life)
            struck = moment is not None and life.now >= moment
    finally:
        if process.poll() is None:  # not yet waited for, so that the number is still its own
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    newest = latest_checkpoint(os.path.join(folder, "checkpoints"))  # not the one that a kill left half done
    life.saved = int(newest.rsplit("-", 1)[1]) if newest else 0
    life.killed = struck and code == -signal.SIGKILL  # else it had ended by itself before
    if code and not life.killed:
        how = f"did not end within {timeout:g} s (--timeout)" if life.now > timeout else f"failed with code {code}"
        with open(f"{folder}.log", errors="replace") as log:
            print("".join(f"  | {line}" for line in log.readlines()[-20:]), end="", file=sys.stderr)
        raise UsageError(f"the command {how}; its last lines are above, all are in {folder}.log")
    return life


def _run_to_the_end(command, folder, timeout, environment=None):
    life = _run(command, folder, timeout, environment=environment)
    final_checkpoint(folder)
    start = "" if life.ready is None else f", of which {life.ready:.1f} s to start"
    _say(f"{os.path.basename(folder)}: {life.now:.1f} s{start}; the last save is of step {life.saved}")
    return life


def _run_killed(command, folder, whole, kills, moments, timeout):
    """Runs the command with kills, and then to its end; returns the step that each start after a kill found."""
    start, steps = whole.ready or whole.now, []
    ended = False
    for _ in range(2 * kills + 4):
        if len(steps) == kills:
            break
        kind = _KILLS[1 if ended else len(steps) % 3]
        # The first of as many moments as there are kills to come in the rest of the run, so that they spread over it.
        to_come = 1 if kind == _KILLS[1] else sum(i % 3 != 1 for i in range(len(steps), kills))
        part = 1 - moments.random() ** (1 / to_come)

        def moment_of(life, kind=kind, part=part, start=start):
            if kind == _KILLS[1]:
                return part * start
            # The rest of this life is about as long as that of the uninterrupted run after the same save; the first
            # kill comes before the last save, so that the next start has both a checkpoint and work to do.
            end = max(whole.saves.values(), default=whole.now) if kind == _KILLS[0] else whole.now
            rest = end - whole.saves.get(life.saved, start)
            waits = not life.saves if kind == _KILLS[0] else life.ready is None
            return None if waits else life.now + part * rest

        life = _run(command, folder, timeout, moment_of)
        start = min(start, life.ready or start)  # the first start of all is slow, as nothing is in memory yet
        if life.killed:
            steps.append(life.saved)
            when = f"{kind}, {life.now:.2f} s after its start"
            _say(f"killed: {when}, kill {len(steps)} of {kills}; it had saved step {life.saved}")
        elif steps:
            ended = True  # the remaining kills fall on starts that find nothing left to do
            _say(f"killed: ended, after {life.now:.2f} s, before a kill could come")
        else:
            _say(f"killed: ended, after {life.now:.2f} s, before a kill could come; begun anew")
            shutil.rmtree(folder)
    if not steps:
        raise UsageError("no kill came before the command had ended; give it more steps to run")
    _run_to_the_end(command, folder, timeout)
    return steps


def _stamp(folder):
    """Changes when `run.json` is written, which a binary does first when all is built and restored."""
    try:
        status = os.stat(os.path.join(folder, "run.json"))
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino


def _saved_step(folder):
    names = glob.glob(os.path.join(glob.escape(folder), "checkpoints", "ckpt-*.index"))
    return max(
        (int(match[1]) for match in (re.search(r"ckpt-(\d+)\.index$", name) for name in names) if match), default=0
    )


def _prepare(directory):
    if not directory:
        return tempfile.mkdtemp(prefix="looplib-check-")
    try:
        os.makedirs(directory, exist_ok=True)
        if os.listdir(directory):
            raise UsageError(f"--dir {directory} is not empty; name a directory for these runs alone")
    except OSError as error:
        raise UsageError(f"--dir {directory} cannot be made ({error.strerror}); name one that can") from error
    return os.path.abspath(directory)


def _refuse_flags(command, *names):
    if not command:
        raise UsageError("there is no command to check; write it after --, as in -- python -m trainers.my_trainer")
    for argument in command:
        name = argument.lstrip("-").split("=")[0] if argument.startswith("-") else ""
        if name in names:
            raise UsageError(
                f"the command {shlex.join(command)} has --{name}, which the check sets itself; leave it out"
            )


def _say(line):
    print(line, flush=True)

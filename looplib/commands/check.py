"""Checks of a complete binary: does a killed run end like an uninterrupted one, and a run on several replicas like one?

Each check runs the user's command in separate run directories and compares what these hold at the end.
"""

import json
import os
import random
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from looplib.base import files, folders
from looplib.base.messages import with_cure
from looplib.base.numbers import format_size
from looplib.checkpoint import perturbation
from looplib.commands.compare import Comparison, compare, decided_by_rounding, first_moved_by_rounding
from looplib.commands.runs import run, run_killed, run_to_the_end, say
from looplib.errors import EXIT_DIFFERENT, EXIT_DONE, CheckError
from looplib.loop import additions
from looplib.processes.children import temporary_folder
from looplib.replay import preflight

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
    folder = _prepare(directory)
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
        say("no restart resumed from the middle of the run, so the check covers little; use more steps and more saves")
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
    _refuse_flags(command, "model_dir", "num_virtual_devices", *["strategy"] * bool(workers))
    for flag, numbers, least in (("counts", counts, 1 if workers else 2), ("workers", workers, 0)):
        if not least <= len(set(numbers)) == len(numbers) or min(numbers, default=1) < 1:
            found, expected = ",".join(map(str, numbers)), "two or more numbers" if least == 2 else "numbers"
            raise CheckError(f"--{flag} is {found}; expected {expected} of at least 1, each once, such as 1,2,4")
    if not (rtol > 0 and atol > 0):
        raise CheckError(f"--rtol is {rtol} and --atol {atol}; expected positive numbers")
    folder = _prepare(directory)
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
    if moved := decided_by_rounding(rounding):
        say(f"rounding alone moves the final weights by {moved:.0%}, so only the steps are compared, not the weights")
        if step := first_moved_by_rounding(rounding):
            say(
                f"from step {step} on it changes a training metric by more than 1%, so a fault that begins later may "
                "not be found; use fewer steps or a smaller learning rate"
            )
    for name in others:
        comparison = compare(runs[first], runs[name], rtol, atol, rounding)
        for split, (relative, found) in comparison.largest.items():
            most = f"{relative:.2g} ({found.where}: {found.one} and {found.other})" if relative else "none"
            say(f"{_shown(name)} against {_shown(first)}, {split}: largest relative difference {most}")
        keep = bool(directory) or name != others[-1]  # the last comparison deletes the directories
        if code := _verdict(comparison, _REPLICAS_HINT, f"on {_shown(first)}", f"on {_shown(name)}", folder, keep):
            return code
    return EXIT_DONE


def _shown(name: str) -> str:
    """Returns the name of a run's directory in words."""
    kind, _, count = name.partition("_")
    return f"{count} {kind.removesuffix('s') if count == '1' else kind}"


def _rounding(
    command: Sequence[str], reference: str, folder: str, rtol: float, atol: float, timeout: float
) -> list[Comparison]:
    """Measures how rounding grows: compares a run with others whose weights differ in their last bit."""
    found = []
    for seed in range(1, _NUDGES + 1):
        nudged = os.path.join(folder, f"last_bit_{seed}")
        environment = {additions.VARIABLE: "1", perturbation.VARIABLE: str(seed)}
        run_to_the_end(command, nudged, timeout, environment)
        found.append(compare(reference, nudged, rtol, atol))
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
    folder = _prepare(directory)
    to = os.path.join(folder, "found.json")
    request = json.dumps({"platform": platform, "cores": cores, "to": to})
    run(command, os.path.join(folder, "run"), timeout, environment={preflight.VARIABLE: request, **_NO_DEVICES})
    if not os.path.exists(to):
        raise CheckError(f"{command[0]!r} ended without handing over its steps; name a binary that calls launch.run")
    result = json.loads(files.read_text(to))
    if not directory:
        folders.remove(*os.path.split(folder))
    for split, step in result["steps"].items():
        _say_of_step(split, step, [finding for finding in result["findings"] if finding["split"] == split], platform)
    faults = sum(finding["fault"] for finding in result["findings"])
    if faults:
        say(f"NOT READY for a {platform}: {faults} fault{'s' if faults > 1 else ''}")
        return EXIT_DIFFERENT
    say(f"READY for a {platform}, as far as can be checked without one")
    return EXIT_DONE


def _say_of_step(split: str, step: dict[str, Any], findings: Sequence[dict[str, Any]], platform: str) -> None:
    """Prints what was found in one task's step: parts of the result of `preflight.look`."""
    whole = "all of it lowers" if step["lowered"] else "not all of it lowers"
    device = "TPU core" if platform == "TPU" else platform
    say(f"{split}: {step['batch']} of {step['global_batch']} examples on each {device}; {whole}")
    for finding in findings:
        say(f"  {'fault' if finding['fault'] else 'advice'}, {finding['kind']}: {finding['text']}")
        if finding["line"]:
            say(f"    {finding['line']}")
    known = {kind: "not known" if size is None else format_size(size) for kind, size in step["memory"].items()}
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


def _prepare(directory: str | None) -> str:
    if not directory:
        return temporary_folder("looplib-check-")
    try:
        folders.make_folder(directory)
        if os.listdir(directory):
            raise CheckError(f"--dir {directory} is not empty; use an empty directory")
    except OSError as error:
        raise CheckError(f"--dir {directory} cannot be made: {with_cure(error, 'use another directory')}") from error
    return os.path.abspath(directory)


def _refuse_flags(command: Sequence[str], *names: str) -> None:
    if not command:
        raise CheckError("there is no command to check; write it after --, as in -- python -m trainers.my_trainer")
    for argument in command:
        name = argument.lstrip("-").split("=")[0] if argument.startswith("-") else ""
        if name in names:
            raise CheckError(f"the command {shlex.join(command)} has --{name}, which the check sets itself; remove it")

"""The command line of a binary: its flags, their groups, their checks, and the policy that they describe."""

import abc
import difflib
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from looplib.base import plugins
from looplib.base.messages import duration, is_utf8
from looplib.cluster import runtime
from looplib.config.formats import PREDICTIONS
from looplib.config.run_config import RunConfig
from looplib.config.settings import Flag, flags_of, from_flags
from looplib.errors import FlagError, NoCheckpointError
from looplib.guards.guards import Guards
from looplib.report.writers.contract import Writer
from looplib.run import choice
from looplib.run.policy import CheckpointPolicy, KeepBest, KeepEvery, KeepLast, Start
from looplib.task.actions import Action

MODES = ("train", "eval", "train_and_eval", "train_and_post_eval", "continuous_eval", "predict", "export")
_MOST_DEVICES = 256  # virtual ones, which a process takes seconds to make
TRAINING_MODES = ("train", "train_and_eval", "train_and_post_eval")
_FROM_THE_NEWEST = {**dict.fromkeys(TRAINING_MODES), "continuous_eval": choice.LATEST}

FETCHED = ("warm_start", "continue_from")  # flags that may be URLs, besides --model_dir
PATHS = ("predictions", "export", *FETCHED)
SETUP_FLAGS = (  # the flags that `runtime.setup` takes
    "strategy", "tpu", "num_virtual_devices", "seed", "deterministic", "mixed_precision", "tpu_cores_per_replica",
    "tpu_replicas", "tpu_spmd", "join_limit")  # fmt: skip

PRINT_FLAG = Flag("print_config", bool, False, "Prints the configuration as YAML and ends.")


GROUP = "looplib.flags"  # of entry points


class FlagPlugin(abc.ABC):
    """Flags that looplib, or a plug-in of `looplib.flags`, adds to every binary; `values` has all flags, by name."""

    flags: Sequence[Flag]

    def check(self, values: Mapping[str, Any]) -> None:
        """Raises `UsageError` for values that no run can have; before TensorFlow starts."""

    def actions(self, values: Mapping[str, Any]) -> Sequence[Action]:
        """Returns the actions of a training, by default none."""
        return ()

    def writers(self, values: Mapping[str, Any]) -> Sequence[Writer]:
        """Returns the writers of a training, by default none; not called for a trial."""
        return ()


@functools.cache
def flag_plugins() -> Sequence[FlagPlugin]:
    """Returns the groups of flags, of looplib and of other packages."""
    from looplib.binary import flag_groups  # here, as they are `FlagPlugin`s

    others = (plugins.load(GROUP, name) for name in plugins.names(GROUP))  # of other packages
    return tuple(kind() for kind in (*flag_groups.OWN, *others))


def all_flags() -> list[Flag]:
    """Returns the flags of every binary; docs/reference/flags.md is made of them."""
    return [*FLAGS, *(flag for plugin in flag_plugins() for flag in plugin.flags)]


FLAGS = (  # of the core
    Flag("model_dir", str, None, "The run directory: checkpoints, metrics, run.json, events; or its URL."),
    Flag("local_dir", str, None, "Local directory of a run whose model_dir is a URL; none: one in the cache."),
    Flag("mode", str, "train_and_eval", "Job to run; without an evaluator, train.", MODES),
    Flag("train_steps", int, 1000, "The global step to train to; -1 trains to the end of the data."),
    *flags_of(RunConfig),
    Flag("strategy", str, "auto", "Devices; auto: a TPU, else all GPUs, else the CPU.", runtime.STRATEGIES),
    Flag("tpu", str, None, "Name or address of a TPU."),
    Flag("tpu_cores_per_replica", int, 1, "TPU cores per replica."),
    Flag("tpu_replicas", int, None, "Replicas on a TPU; none: as many as its cores allow."),
    Flag("tpu_spmd", bool, False, "Partitions each replica over its TPU cores (SPMD)."),
    Flag("join_limit", float, 60.0, "Seconds that a worker waits for the other workers to start."),
    Flag("num_virtual_devices", int, 1, "Number of replicas on one CPU.", least=1),
    Flag("eval_interval", dict, 1000, "Steps between evaluations; or NAME:STEPS,... for each evaluator.", least=1),
    Flag("eval_steps", int, -1, "Steps of each evaluation; -1 evaluates all data."),
    Flag("eval_timeout", float, None, "Seconds that continuous_eval waits for a checkpoint; none: no limit."),
    Flag("predictions", str, None, "Directory for --mode=predict; none: predictions in the run directory."),
    Flag("predictions_format", str, "jsonl", "Files of the predictions.", PREDICTIONS),
    Flag("predictions_piece", int, 10_000, "Records of a file of predictions.", least=1),
    Flag("export", str, None, "Directory for --mode=export; none: export/step-<step> in model_dir."),
    Flag("export_averages", bool, True, "Exports averaged weights if the evaluator or trainer has any."),
    *flags_of(CheckpointPolicy),
    Flag("keep_last", int, 5, "Number of newest checkpoints to keep."),
    Flag("keep_best", str, None, "Also keeps the best checkpoint: max:eval/score, or eval/loss."),
    Flag("keep_every", int, None, "Also keeps the checkpoints at multiples of this number of steps."),
    Flag("checkpoint", str, "final", "For eval, predict and export: final, latest, best or a step."),
    *flags_of(Start),
    *flags_of(Guards),
    Flag("deterministic", bool, False, "Deterministic ops, but slower; --loop=auto becomes graph."),
    Flag("mixed_precision", str, "float32", "The Keras precision policy.", runtime.PRECISIONS),
)  # fmt: skip


def policy(values: dict[str, Any]) -> CheckpointPolicy:
    """Returns the policy that the flags describe; `UsageError` for a value that has another form."""
    keep = [KeepLast(values["keep_last"])]
    if values["keep_best"]:
        keep.append(KeepBest.parse(values["keep_best"]))
    if values["keep_every"] is not None:
        keep.append(KeepEvery(values["keep_every"]))
    return from_flags(CheckpointPolicy, values, keep=tuple(keep))


def start(values: dict[str, Any]) -> Start:
    """Returns where the run starts by the flags; `UsageError` for flags that exclude each other."""
    return from_flags(Start, values, checkpoint=_FROM_THE_NEWEST.get(values["mode"], values["checkpoint"]))


def parse(argv: Sequence[str]) -> list[str]:
    """Parses the command line, as `app.run` does; returns what it has besides flags.

    Raises:
      UsageError: for an unknown flag, or a value of another type.
    """
    for argument in argv:
        if not is_utf8(argument):
            raise FlagError(f"the argument {argument!a:.300} is not UTF-8, or the locale is not; set PYTHONUTF8=1")
    try:
        return flags.FLAGS(argv)
    except flags.UnrecognizedFlagError as error:
        paths = [name.removeprefix("config.") for name in flags.FLAGS if name.startswith("config.")]
        names = {**{path.rpartition(".")[2]: path for path in reversed(paths)}, **{path: path for path in paths}}
        close = difflib.get_close_matches(error.flagname, names, n=1, cutoff=0.8)
        hint = f"did you mean the setting --config.{names[close[0]]}? " if close else ""
        longer = sorted(f"--{name}" for name in flags.FLAGS if name.endswith(f"_{error.flagname}"))
        hint = hint or f"did you mean {' or '.join(longer[:5])}? " * bool(longer)
        raise FlagError(f"{error}; {hint}--help lists the flags") from error
    except flags.Error as error:
        raise FlagError(f"{error}; --help lists the flags") from error


def check(values: dict[str, Any], argv: Sequence[str]) -> None:
    """Raises `UsageError` for a value that no run can have, or for more in `argv` than the program and flags."""
    if len(argv) > 1:
        raise FlagError(f"unexpected argument {argv[1]!r}; every setting is a flag, --name=value (see --help)")
    if not values["model_dir"]:
        raise FlagError("--model_dir is missing; name the directory for this run's checkpoints and metrics")
    if values["mode"] in ("eval", "predict", "export") and not os.path.isdir(values["model_dir"]):
        raise NoCheckpointError(
            f"there is no directory {values['model_dir']}, so there is no checkpoint in it; train first, or name the "
            "directory of a training with --model_dir"
        )
    if duration("--max_time", values["max_time"] or None) and values["mode"] not in TRAINING_MODES:
        raise FlagError(f"--max_time limits a training, and --mode={values['mode']} does not train; leave it out")
    if choice.check(values["checkpoint"], "--checkpoint") != choice.FINAL and values["mode"] in _FROM_THE_NEWEST:
        takes = "takes each new one" if values["mode"] == "continuous_eval" else "continues from the newest one"
        raise FlagError(
            f"--checkpoint={values['checkpoint']} is for jobs that evaluate, predict or export a checkpoint, and "
            f"--mode={values['mode']} {takes}; leave it out"
        )
    for plugin in flag_plugins():
        plugin.check(values)
    for flag in all_flags():
        value = values[flag.name]
        for number in value.values() if isinstance(value, dict) else [value]:
            if flag.least is not None and number is not None and number < flag.least:
                raise FlagError(f"--{flag.name} is {number}; expected at least {flag.least}")
    if values["num_virtual_devices"] > _MOST_DEVICES:
        raise FlagError(f"--num_virtual_devices is {values['num_virtual_devices']}; expected at most {_MOST_DEVICES}")
    for name in ("join_limit", "eval_timeout"):
        if values[name] is not None and not values[name] >= 0:
            raise FlagError(f"--{name} is {values[name]}; expected seconds of at least 0")
    for name in ("train_steps", "eval_steps"):
        if values[name] < 1 and values[name] != -1:
            raise FlagError(f"--{name} is {values[name]}; expected at least 1, or -1 for all data")

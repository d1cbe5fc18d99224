"""The command line of a binary: its flags, their checks, and the checkpoint policy that they describe."""

import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from absl import flags

from looplib import plugins, runtime
from looplib.checkpoint import choice
from looplib.checkpoint.policy import CheckpointPolicy, KeepBest, KeepEvery, KeepLast
from looplib.data.devices import DISTRIBUTES
from looplib.errors import UsageError, duration
from looplib.health import guards
from looplib.health.guards import Guards
from looplib.loop.engines import ENGINES
from looplib.task.actions import Action

MODES = ("train", "eval", "train_and_eval", "train_and_post_eval", "continuous_eval", "predict", "export")
PREDICTIONS = ("jsonl", "tfrecord", "parquet")  # kinds of files
_MOST_DEVICES = 256  # virtual ones, which a process takes seconds to make
TRAINING_MODES = ("train", "train_and_eval", "train_and_post_eval")
_FROM_THE_NEWEST = {**dict.fromkeys(TRAINING_MODES), "continuous_eval": choice.LATEST}

PATHS = ("predictions", "export", "warm_start", "continue_from")  # flags, besides --model_dir

# The flags that `runtime.setup` takes.
OF_THE_MACHINE = (
    "strategy", "tpu", "num_virtual_devices", "seed", "deterministic", "mixed_precision", "tpu_cores_per_replica",
    "tpu_replicas", "tpu_spmd", "join_limit",
)  # fmt: skip

# The flags of every binary: (name, define, default, help). README.md's table is checked against it.
FLAGS = (
    ("model_dir", flags.DEFINE_string, None, "The run directory: checkpoints, metrics, run.json, TensorBoard events."),
    ("mode", flags.DEFINE_enum, "train_and_eval", "Job to run; without an evaluator, train.", MODES),
    ("train_steps", flags.DEFINE_integer, 1000, "The global step to train to; -1 trains to the end of the data."),
    ("max_time", flags.DEFINE_string, None, "Saves and ends with code 75 after this time: 90 (seconds), 45m, 1h30m."),
    ("global_batch_size", flags.DEFINE_integer, 64, "Examples of one step over all replicas."),
    ("strategy", flags.DEFINE_enum, "auto", "Devices; auto: a TPU, else all GPUs, else the CPU.", runtime.STRATEGIES),
    ("tpu", flags.DEFINE_string, None, "Name or address of a TPU."),
    ("tpu_cores_per_replica", flags.DEFINE_integer, 1, "TPU cores per replica."),
    ("tpu_replicas", flags.DEFINE_integer, None, "Replicas on a TPU; none: as many as its cores allow."),
    ("tpu_spmd", flags.DEFINE_boolean, False, "Partitions each replica over its TPU cores (SPMD)."),
    ("join_limit", flags.DEFINE_float, 60.0, "Seconds that a worker waits for the other workers to start."),
    ("num_virtual_devices", flags.DEFINE_integer, 1, "Number of replicas on one CPU."),
    ("steps_per_loop", flags.DEFINE_integer, 100, "Steps per call to the device, and per report."),
    ("loop", flags.DEFINE_enum, "graph", "Loop engine; auto selects the fastest; eager is for debugging.", ENGINES),
    ("profile", flags.DEFINE_string, None, "START:STEPS: profiles so many steps after step START; none: no profile."),
    ("distribute", flags.DEFINE_enum, "auto", "What hands out batches; tf: tf.distribute's iterators.", DISTRIBUTES),
    ("overfit_batch", flags.DEFINE_boolean, False, "Trains on the first batch of the data in each step."),
    ("bad_records", flags.DEFINE_string, None, "skip:N leaves out up to N damaged records in a run; none: an error."),
    ("dry_run", flags.DEFINE_boolean, False, "Tries two steps, an evaluation, a save and a restore; keeps nothing."),
    ("eval_interval", flags.DEFINE_integer, 1000, "Steps between evaluations."),
    ("eval_steps", flags.DEFINE_integer, -1, "Steps of each evaluation; -1 evaluates all data."),
    ("eval_timeout", flags.DEFINE_float, None, "Seconds that continuous_eval waits for a checkpoint; none: no limit."),
    ("trackers", flags.DEFINE_list, None, "Further writers of metrics: csv, mlflow, wandb, or other plug-ins."),
    ("predictions", flags.DEFINE_string, None, "Directory for --mode=predict; none: predictions in the run directory."),
    ("predictions_format", flags.DEFINE_enum, "jsonl", "Files of the predictions.", PREDICTIONS),
    ("predictions_piece", flags.DEFINE_integer, 10_000, "Records of a file of predictions."),
    ("export", flags.DEFINE_string, None, "Directory for --mode=export; none: export/step-<step> in model_dir."),
    ("export_averages", flags.DEFINE_boolean, True, "Exports averaged weights if the evaluator or trainer has any."),
    ("export_tflite", flags.DEFINE_boolean, False, "Exports a TFLite file too, if the converter takes the model."),
    ("checkpoint_interval", flags.DEFINE_integer, 1000, "Steps between checkpoints; each evaluation saves one too."),
    ("keep_last", flags.DEFINE_integer, 5, "Number of newest checkpoints to keep."),
    ("keep_best", flags.DEFINE_string, None, "Also keeps the best checkpoint: max:eval/score, or eval/loss."),
    ("keep_every", flags.DEFINE_integer, None, "Also keeps the checkpoints at multiples of this number of steps."),
    ("checkpoint", flags.DEFINE_string, "final", "For eval, predict and export: final, latest, best or a step."),
    ("warm_start", flags.DEFINE_string, None, "Run, RUN@best, RUN@STEP, checkpoint or SavedModel with first weights."),
    ("continue_from", flags.DEFINE_string, None, "Orbit or Model Garden checkpoint from which a new run continues."),
    ("start_anew", flags.DEFINE_boolean, False, "Lets a run start over if all its checkpoints are damaged or missing."),
    ("partial_restore", flags.DEFINE_boolean, False, "Restores only what the checkpoint and the model share."),
    ("non_finite", flags.DEFINE_enum, "halt", "Response to a non-finite loss, gradient or weight.", guards.POLICIES),
    ("spike_score", flags.DEFINE_float, 0.0, "Robust z-score of the loss that triggers on_spike; 0 disables it."),
    ("loss_limit", flags.DEFINE_float, None, "Reported loss above which on_spike is triggered; none disables it."),
    ("loss_limit_from", flags.DEFINE_integer, 0, "First step to which loss_limit applies."),
    ("on_spike", flags.DEFINE_enum, "rollback", "Response to a spike or loss above loss_limit.", ("halt", "rollback")),
    ("rollbacks", flags.DEFINE_integer, 3, "Maximum number of rollbacks in a run."),
    ("stall_limit", flags.DEFINE_float, None, "Seconds without progress that end the run; 0: never; none: adaptive."),
    ("seed", flags.DEFINE_integer, 0, "Seeds initial weights, data order and everything else."),
    ("deterministic", flags.DEFINE_boolean, False, "Deterministic ops, but slower; --loop=auto becomes graph."),
    ("mixed_precision", flags.DEFINE_enum, "float32", "The Keras precision policy.", runtime.PRECISIONS),
)  # fmt: skip


def policy(values: dict[str, Any]) -> CheckpointPolicy:
    """Returns the policy that the flags describe.

    Args:
      values: the value of each flag, by name.

    Raises:
      UsageError: for a value that has another form.
    """
    keep = [KeepLast(values["keep_last"])]
    if values["keep_best"]:
        keep.append(KeepBest.parse(values["keep_best"]))
    if values["keep_every"] is not None:
        keep.append(KeepEvery(values["keep_every"]))
    return CheckpointPolicy(
        every_steps=values["checkpoint_interval"],
        keep=tuple(keep),
        partial=values["partial_restore"],
        warm_start=values["warm_start"] or "",
        continue_from=values["continue_from"] or "",
        start_anew=values["start_anew"],
        restore=_FROM_THE_NEWEST.get(values["mode"], values["checkpoint"]),
        guards=Guards(
            non_finite=values["non_finite"],
            spike_score=values["spike_score"],
            loss_limit=values["loss_limit"],
            loss_limit_from=values["loss_limit_from"],
            on_spike=values["on_spike"],
            rollbacks=values["rollbacks"],
            stall_limit=values["stall_limit"],
        ),
    )


def actions(values: dict[str, Any]) -> list[Action]:
    """Returns the actions that the flags ask for.

    Args:
      values: the value of each flag, by name.

    Raises:
      UsageError: for a value that has another form.
    """
    if not values["profile"]:
        return []
    if not (found := re.fullmatch(r"(\d{1,18}):(\d{1,18})", values["profile"])) or not int(found[2]):
        raise UsageError(
            f"--profile is {values['profile']!r}; expected START:STEPS, such as 200:20 for the 20 steps after step 200"
        )
    return [plugins.load("looplib.parts", "Profile")(int(found[1]), int(found[2]))]


def bad_records(values: dict[str, Any]) -> int:
    """Returns how many damaged records may be left out.

    Args:
      values: the value of each flag, by name.

    Raises:
      UsageError: for a value that has another form.
    """
    if not values["bad_records"]:
        return 0
    if not (found := re.fullmatch(r"skip:(\d{1,9})", values["bad_records"])):
        raise UsageError(f"--bad_records is {values['bad_records']!r}; expected skip:N, such as skip:10")
    return int(found[1])


def check(values: dict[str, Any], argv: Sequence[str]) -> None:
    """Raises `UsageError` for a value that no run can have, or an argument that is not a flag.

    Args:
      values: the value of each flag, by name.
      argv: what the command line has besides flags, the program first.
    """
    if len(argv) > 1:
        raise UsageError(f"unexpected argument {argv[1]!r}; every setting is a flag, --name=value (see --help)")
    if not values["model_dir"]:
        raise UsageError("--model_dir is missing; name the directory for this run's checkpoints and metrics")
    if values["mode"] in ("eval", "predict", "export") and not tf.io.gfile.isdir(values["model_dir"]):
        raise UsageError(
            f"there is no directory {values['model_dir']}, so there is no checkpoint in it; train first, or name the "
            "directory of a training with --model_dir"
        )
    if duration("--max_time", values["max_time"] or None) and values["mode"] not in TRAINING_MODES:
        raise UsageError(f"--max_time limits a training, and --mode={values['mode']} does not train; leave it out")
    if choice.check(values["checkpoint"], "--checkpoint") != choice.FINAL and values["mode"] in _FROM_THE_NEWEST:
        takes = "takes each new one" if values["mode"] == "continuous_eval" else "continues from the newest one"
        raise UsageError(
            f"--checkpoint={values['checkpoint']} is for jobs that evaluate, predict or export a checkpoint, and "
            f"--mode={values['mode']} {takes}; leave it out"
        )
    profiles: list[Any] = actions(values)
    if profiles and values["mode"] not in TRAINING_MODES:
        raise UsageError(f"--profile records training steps, and --mode={values['mode']} does not train; leave it out")
    for profile in profiles:
        profile.check_end(values["train_steps"])
    for name in ("eval_interval", "checkpoint_interval", "steps_per_loop", "num_virtual_devices", "global_batch_size",
                 "predictions_piece"):  # fmt: skip
        if values[name] < 1:
            raise UsageError(f"--{name} is {values[name]}; expected at least 1")
    if values["num_virtual_devices"] > _MOST_DEVICES:
        raise UsageError(f"--num_virtual_devices is {values['num_virtual_devices']}; expected at most {_MOST_DEVICES}")
    for name in ("join_limit", "eval_timeout"):
        if values[name] is not None and not values[name] >= 0:
            raise UsageError(f"--{name} is {values[name]}; expected seconds of at least 0")
    for name in ("train_steps", "eval_steps"):
        if values[name] < 1 and values[name] != -1:
            raise UsageError(f"--{name} is {values[name]}; expected at least 1, or -1 for all data")

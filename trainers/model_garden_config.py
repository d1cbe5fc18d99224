"""The values that Model Garden's configuration has for looplib's flags, and its settings that looplib ignores."""

import math
import os
from typing import Any

import tensorflow as tf
from absl import logging
from official.common import distribute_utils
from official.core import config_definitions

from looplib import UsageError
from looplib.base.messages import whole_number

_STRATEGIES = {
    "off": "one_device", "one_device": "one_device", "mirrored": "auto", "multi_worker_mirrored": "multi_worker",
    "parameter_server": "parameter_server", "tpu": "tpu",
}  # fmt: skip
_PRECISIONS = {"float16": "mixed_float16", "bfloat16": "mixed_bfloat16", "float32": "float32"}

# The field of each flag; a flag on the command line replaces the field.
FIELDS = {
    "train_steps": "trainer.train_steps", "steps_per_loop": "trainer.steps_per_loop",
    "eval_interval": "trainer.validation_interval", "eval_steps": "trainer.validation_steps",
    "eval_timeout": "trainer.continuous_eval_timeout", "checkpoint_interval": "trainer.checkpoint_interval",
    "keep_last": "trainer.max_to_keep", "global_batch_size": "task.train_data.global_batch_size",
    "tpu": "runtime.tpu", "tpu_cores_per_replica": "runtime.num_cores_per_replica",
}  # fmt: skip
_TO_THE_END = ("train_steps", "eval_steps")  # -1 stands for all

# Fields of `trainer` and `runtime` that flags, the task's own objects, or looplib's own ways honour.
_HONOURED = {
    "trainer": {
        "optimizer_config", "steps_per_loop", "checkpoint_interval", "max_to_keep", "continuous_eval_timeout",
        "train_steps", "validation_steps", "validation_interval", "best_checkpoint_export_subdir",
        "best_checkpoint_eval_metric", "best_checkpoint_metric_comp", "loss_upper_bound", "recovery_begin_steps",
        "recovery_max_trials", "validation_summary_subdir", "preemption_on_demand_checkpoint", "train_tf_function",
        "train_tf_while_loop", "eval_tf_function", "eval_tf_while_loop", "trainer_type", "task_sampler",
    },
    "runtime": {
        "distribution_strategy", "tpu", "num_gpus", "worker_hosts", "task_index", "mixed_precision_dtype",
        "loss_scale", "run_eagerly", "num_cores_per_replica", "enable_xla",
    },
}  # fmt: skip
_WHY = {
    "trainer.summary_interval": "every report, each of steps_per_loop steps, is written",
    "trainer.allow_tpu_summary": "summaries are written from the host, between loops",
    "runtime.all_reduce_alg": "tf.distribute chooses the algorithm",
    "runtime.num_packs": "tf.distribute chooses how gradients are packed",
    "runtime.gpu_thread_mode": "set TF_GPU_THREAD_MODE in the environment",
    "runtime.per_gpu_thread_count": "set TF_GPU_THREAD_COUNT in the environment",
    "runtime.dataset_num_private_threads": "tf.data tunes its threads itself",
    "runtime.batchnorm_spatial_persistent": "set TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT=1 in the environment",
    "runtime.tpu_enable_xla_dynamic_padder": "XLA's default holds",
    "runtime.default_shard_dim": "use --tpu_spmd, which divides by the shardings of tensors",
    "runtime.use_tpu_mp_strategy": "use --tpu_spmd, which divides by the shardings of tensors",
}


def replace(params: config_definitions.ExperimentConfig, path: str, value: Any) -> None:
    """Replaces a field, and logs it if that changes the value.

    Args:
      params: the configuration.
      path: its name, such as "trainer.train_steps"; a field that this experiment does not have is left out.
      value: the new value.
    """
    *folders, name = path.split(".")
    section = params
    for folder in folders:
        section = getattr(section, folder, None)
    if section is not None and getattr(section, name) != value:
        logging.info(
            "%s=%r of the configuration is replaced by the command line's %r", path, getattr(section, name), value
        )
        section.override({name: value})


def flag_values(params: config_definitions.ExperimentConfig, mode: str = "train_and_eval") -> dict[str, Any]:
    """Returns the values that a configuration has for looplib's flags, by flag.

    Args:
      params: the configuration.
      mode: as in `--mode`; the interval of evaluations is left out where there are none.

    Raises:
      UsageError: for a setting that no run can have.
    """
    trainer, runtime, task = params.trainer, params.runtime, params.task
    _check(params)
    data = getattr(task, "train_data", None) or task.task_routines[0].task_config.train_data
    values = dict(
        tpu=runtime.tpu or None,
        strategy="auto" if runtime.tpu else _STRATEGIES[runtime.distribution_strategy],
        mixed_precision=_PRECISIONS[runtime.mixed_precision_dtype or "float32"],
        loop="eager" if runtime.run_eagerly or not trainer.train_tf_function else "graph",
        eval_timeout=trainer.continuous_eval_timeout,
        **_recovery(trainer),
    )
    for flag, path in FIELDS.items():
        if flag not in (*values, "global_batch_size") and (flag != "eval_interval" or "eval" in mode):
            section, name = path.split(".")
            values[flag] = whole_number(path, getattr(getattr(params, section), name), or_all=flag in _TO_THE_END)
    if data.global_batch_size:
        values["global_batch_size"] = whole_number("task.train_data.global_batch_size", data.global_batch_size)
    if runtime.enable_xla and runtime.num_gpus > 0:
        values["loop"] = "xla"
    return values


def _check(params: config_definitions.ExperimentConfig) -> None:
    trainer, runtime = params.trainer, params.runtime
    for name, value, known in (
        ("distribution_strategy", runtime.distribution_strategy, _STRATEGIES),
        ("mixed_precision_dtype", runtime.mixed_precision_dtype or "float32", _PRECISIONS),
    ):
        if value not in known:
            raise UsageError(f"runtime.{name} is {value!r}; expected one of {', '.join(known)}")
    gpus = tf.config.list_physical_devices("GPU")
    if runtime.num_gpus > len(gpus):
        raise UsageError(f"runtime.num_gpus is {runtime.num_gpus}, and this machine has {len(gpus)}")
    if runtime.num_gpus:
        tf.config.set_visible_devices(gpus[: runtime.num_gpus], "GPU")
    if runtime.worker_hosts and "TF_CONFIG" not in os.environ:
        distribute_utils.configure_cluster(runtime.worker_hosts, runtime.task_index)
    if trainer.best_checkpoint_metric_comp not in ("higher", "lower"):
        raise UsageError(
            f"trainer.best_checkpoint_metric_comp is {trainer.best_checkpoint_metric_comp!r}; expected higher or lower"
        )


def _recovery(trainer: config_definitions.TrainerConfig) -> dict[str, Any]:
    """Returns the flags of recovery: below 0 trials Model Garden checks nothing, at 0 it fails, above it restores."""
    if trainer.recovery_max_trials < 0:
        return dict(non_finite="off")
    policy = "rollback" if trainer.recovery_max_trials else "halt"
    return dict(
        non_finite=policy,
        on_spike=policy,
        rollbacks=trainer.recovery_max_trials,
        loss_limit=trainer.loss_upper_bound if trainer.loss_upper_bound < math.inf else None,
        loss_limit_from=trainer.recovery_begin_steps,
    )


def not_honoured(params: config_definitions.ExperimentConfig) -> list[str]:
    """Returns a sentence for each setting of `trainer` and `runtime` that differs from its default and is ignored."""
    sentences = []
    for section, honoured in _HONOURED.items():
        config = getattr(params, section)
        default = type(config)().as_dict()
        for name, value in config.as_dict().items():
            if name == "summary_interval" and value <= config.steps_per_loop:
                continue
            if name not in honoured and value != default.get(name):
                why = _WHY.get(f"{section}.{name}", "looplib has nothing like it")
                sentences.append(f"{section}.{name}={value!r} ({why})")
    return sentences

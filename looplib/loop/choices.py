"""What `loop="auto"` has found in earlier runs of a program on this machine, in files of the user's cache directory."""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import time

import tensorflow as tf
from absl import logging

from looplib import files, folders
from looplib.loop.step import Step
from looplib.task.record import EngineChoice

_VERSION = 1  # of the engines: a change of what they are worth raises it
_DAYS = 30  # after which a program is measured again
_ALIKE = 1.5  # ratio of a step's times in two runs, up to which the choice of one holds in the other


def find(key: str, seconds: float) -> EngineChoice | None:
    """Returns the choice of an earlier run, or None.

    Args:
      key: the `key_of` the program.
      seconds: time of one step of the graph loop in this run. A choice does not hold if the step took much more or less
        time when it was made, because the input or the load of the machine was another one.
    """
    path = _path(key)
    try:
        if not 0 <= time.time() - os.path.getmtime(path) <= 86_400 * _DAYS:
            return None
        choice = EngineChoice.from_json(files.read_text(path))
    except (OSError, ValueError):  # there is none, or somebody has damaged it
        return None
    if not 1 / _ALIKE < choice.seconds_per_step.get("graph", 0.0) / seconds < _ALIKE:
        return None
    logging.info("the engine is the one that an earlier run of this program has selected: %s", path)
    return choice


def keep(key: str, choice: EngineChoice) -> None:
    """Keeps a choice for later runs if the cache directory can be written.

    Args:
      key: the `key_of` the program.
      choice: with the time of each candidate.
    """
    path = _path(key)
    with contextlib.suppress(OSError):
        folders.make_folder(os.path.dirname(path))
        files.write_whole(path, json.dumps(dataclasses.asdict(choice)), durable=False)


def key_of(step: Step, steps_per_loop: int) -> str:
    """Returns a key for a program, the version of TensorFlow and the machine.

    Names of ops are left out, because they depend on what the process has traced before.

    Args:
      step: the traced step.
      steps_per_loop: steps of a call.
    """
    program = [
        sorted(step.op_counts.items()),
        sorted((variable.dtype.name, str(variable.shape)) for variable in step.variables),
        [str(spec) for spec in tf.nest.flatten(step.function.structured_input_signature)],
        steps_per_loop,
    ]
    flags = [os.environ.get(name) for name in ("XLA_FLAGS", "TF_XLA_FLAGS")]
    return hashlib.sha256(repr([_VERSION, tf.__version__, flags, program, *_machine()]).encode()).hexdigest()[:32]


def _machine() -> tuple[list[str], list[str | None]]:
    """Returns the names of the processor's cores and of the GPUs."""
    cores = []
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        cores = re.findall("model name.*", file.read())
    gpus = tf.config.list_physical_devices("GPU")
    return cores, [tf.config.experimental.get_device_details(gpu).get("device_name") for gpu in gpus]


def _path(key: str) -> str:
    return os.path.join(files.cache_directory(), "engines", f"{key}.json")

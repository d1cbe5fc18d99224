"""`run.json`: what ran, with what, how it went."""

import dataclasses
import datetime
import json
import os
import sys

import tensorflow as tf
from absl import logging

from looplib import runtime
from looplib.commits import write_whole


class RunReport:
    """The report of a run, replaced whole whenever its status changes.

    Args:
      values: dict of the flags.
      config: the experiment's own settings: a dataclass, or with an `as_dict`.
      strategy: `tf.distribute.Strategy`.
      controller: the `Controller`; its chief writes.
      earlier: what `read` found before this start.
    """

    def __init__(self, values, config, strategy, controller, earlier):
        self._controller = controller
        self._path = _path(values)
        self._content = {
            "command": sys.argv,
            "flags": values,
            "config": config.as_dict() if hasattr(config, "as_dict") else dataclasses.asdict(config),
            "versions": _versions(),
            "strategy": runtime.describe(strategy),
            "num_replicas": strategy.num_replicas_in_sync,
            "loop": values["loop"],
            "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "restored_from": controller.restored_from,
            "restarts": _starts(earlier),
        }

    def write(self, status, metrics=None):
        """Writes it, as the chief; a report that cannot be written does not end a run.

        Args:
          status: "running", "done", "failed", "preempted" or "restarted".
          metrics: dict from split to dict of the last metrics.
        """
        if not self._controller.is_chief:
            return
        self._content.update(
            status=status,
            step=self._controller.global_step,
            metrics=metrics or {},
            rollbacks=self._controller.rollbacks,
            engines=self._controller.engines,
            seconds=self._controller.clock.seconds(),
            verdict=self._controller.clock.summary()[1],
        )
        try:
            write_whole(self._path, json.dumps(self._content, indent=2, default=str) + "\n")
        except (OSError, tf.errors.OpError) as error:
            logging.warning("%s cannot be written (%s)", self._path, error)


def read(values):
    """Returns the content of the report that there is, for these flags; {} where there is none that can be read."""
    try:
        with tf.io.gfile.GFile(_path(values)) as file:
            return dict(json.load(file))
    except (tf.errors.OpError, OSError, ValueError, TypeError):
        return {}


def _path(values):
    name = "run.json" if "train" in values["mode"] else f"run_{values['mode']}.json"
    return os.path.join(values["model_dir"], name)


def _starts(earlier):
    try:
        return earlier["restarts"] + 1
    except (KeyError, TypeError):
        return 0


def _versions():
    import looplib

    versions = {"looplib": looplib.__version__, "python": sys.version.split()[0], "tensorflow": tf.__version__}
    for name in ("keras", "tf_keras", "numpy"):
        if name in sys.modules:
            versions[name] = sys.modules[name].__version__
    return versions

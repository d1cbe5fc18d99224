"""The settings of a run for TensorBoard's HParams, by the plugin's public interface."""

import hashlib
import json
import time
from collections.abc import Mapping

import tensorflow as tf

from looplib.report.event_files import Event
from looplib.report.writer import Setting


def event_of_settings(settings: Mapping[str, Setting]) -> Event:
    """Returns the event that makes the folder it is in a session of the HParams plugin."""
    from tensorboard.plugins.hparams import api  # costs start-up time

    summary = api.hparams_pb(dict(settings), trial_id=_name(settings))
    return Event(wall_time=time.time(), summary=tf.compat.v1.Summary.FromString(summary.SerializeToString()))


def has_settings(event: Event, settings: Mapping[str, Setting] | None = None) -> bool:
    """Returns whether an event is of `event_of_settings`: with these settings, or with any if None are given."""
    contents = [
        value.metadata.plugin_data.content
        for value in event.summary.value
        if value.metadata.plugin_data.plugin_name == "hparams"
    ]
    name = b"" if settings is None else _name(settings).encode()
    return any(name in content for content in contents)


def _name(settings: Mapping[str, Setting]) -> str:
    """Returns the name of all runs with these settings, which the plugin shows as one group."""
    return hashlib.sha256(json.dumps(dict(settings), sort_keys=True).encode()).hexdigest()[:16]

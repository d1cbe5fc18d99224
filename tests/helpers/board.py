"""The content of a folder of event files as TensorBoard shows it: it drops what comes before the restart of a session."""

import pathlib

import tensorflow as tf
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator  # that of its server


def events(folder):
    """The events with summaries that TensorBoard keeps of a folder, in the order in which it reads them.

    Raises:
      AssertionError: if its server's accumulator, with its directory loader, finds other points.
    """
    paths = sorted(pathlib.Path(folder).glob("*tfevents*"))
    regular = [path for path in paths if path.is_file() and not path.is_symlink()]  # others are somebody else's
    kept, starts = [], 0
    for path in regular:
        for event in EventFileLoader(str(path)).Load():
            if event.HasField("session_log"):
                starts += 1
                kept = [other for other in kept if other.step < event.step or starts == 1]
            elif event.HasField("summary"):
                kept.append(event)
    if paths and paths == regular:
        expected = {}
        for event in kept:
            for value in event.summary.value:
                expected.setdefault(value.tag, []).append(event.step)
        sizes = dict.fromkeys(("scalars", "images", "histograms", "text", "hparams"), 0)  # all points of each
        board = EventAccumulator(str(folder), {"tensors": 0}, sizes).Reload()
        found = {tag: [each.step for each in board.Tensors(tag)] for tag in board.Tags()["tensors"]}
        assert {tag: steps for tag, steps in found.items() if steps} == expected
    return kept


def numbers(folder):
    """The numbers that TensorBoard keeps: [(step, {tag: number})]."""
    return [
        (event.step, {value.tag: float(tf.make_ndarray(value.tensor)) for value in event.summary.value})
        for event in events(folder)
        if event.summary.value
    ]

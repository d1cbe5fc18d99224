"""Exports of a run: its model as files that need no looplib, in a directory that appears whole."""

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf
from absl import logging

from looplib.base import files, folders
from looplib.base.messages import with_cure
from looplib.checkpoint.checkpointer import Checkpointer
from looplib.compat import keras as _keras
from looplib.compat.keras import is_batch_normalization
from looplib.config.formats import CARD, FORMATS, KERAS, SAVED_MODEL, check_export
from looplib.errors import ExportError, UsageError
from looplib.exports.card import card
from looplib.exports.new_folder import alone, check_free, make_all_durable, new_folder, put_in_place
from looplib.exports.parts import ExportRecord, Parts, check_memory
from looplib.exports.samples import MOST_EXAMPLES, ModelInputs, take_samples
from looplib.loop.contracts import Loop
from looplib.loop.loops import Loops
from looplib.report.reporter import Reporter
from looplib.report.writers.trackers import register
from looplib.task.checks import check_rows
from looplib.task.trainer import Evaluator, Exported, Trainer

_RECORD = "export.json"
_NAMES = {_RECORD, CARD, SAVED_MODEL, KERAS, *(each.file for each in FORMATS.values())}
_INNER = "export"  # the name of one that is made in its own directory


def export(
    loops: Loops,
    checkpointer: Checkpointer,
    reporter: Reporter,
    directory: str | os.PathLike[str] | None,
    averages: bool,
    formats: Sequence[str],
    license: str,
) -> str:
    """Exports the model at its current step, see `Controller.export`."""
    formats = check_export(formats, license)
    chief, step = checkpointer.directory.workers.is_chief, checkpointer.step
    if directory is not None:
        directory = files.resolve(directory, "the directory of the export")
    else:
        checkpointer.directory.need("export without a directory")
        inside = checkpointer.directory.model_dir
        inside = folders.make_folder(inside, "export") if chief else inside
        directory = os.path.join(inside, f"step-{step}")
    directory = os.path.abspath(directory)
    check_free(directory, checkpointer.directory.model_dir, _INNER, loops.evaluations)
    if chief:
        _check(directory)
        checkpointer.directory.take_folder(directory, as_it_is=False)
    # A mounted directory has to stay where it is, as has one whose parent this user may not write.
    stays = os.path.isdir(directory) and (
        os.path.ismount(directory) or not os.access(os.path.dirname(directory), os.W_OK)
    )
    split, task, exported = to_export(loops)
    samples = sample(loops, split, task, exported) if "int8" in formats else None
    averages = averages and exported.averages is not None
    # Where several workers train, all read the variables, and all but the chief drop what they write.
    named = os.path.join(directory, _INNER) if stays else directory
    if averages and chief:
        _warn_of_statistics(exported)
    with exported.averages.in_use() if averages else contextlib.nullcontext():
        parts = Parts(exported, is_own(task), samples)
        try:
            with new_folder(named) if chief else tempfile.TemporaryDirectory(prefix="looplib-export-") as place:
                parts.write(place, formats, chief)
                if chief:
                    weights = "averages" if averages else "last"
                    start = os.path.basename(checkpointer.restored_from) if checkpointer.restored_from else None
                    record = parts.record(step, weights, start)
                    text = card(exported, record, license.strip(), loops, checkpointer, reporter)
                    files.write_whole(os.path.join(place, CARD), text, durable=False)
                    record = parts.record(step, weights, start)  # with the card
                    text = json.dumps(dataclasses.asdict(record), indent=1) + "\n"
                    files.write_whole(os.path.join(place, _RECORD), text)
                    _appear(place, directory, named)
                    reporter.say(_sentence(record, directory))
                    if checkpointer.directory.model_dir:
                        register(checkpointer.directory.model_dir, directory, step)
        except (OSError, tf.errors.OpError) as error:
            raise ExportError(f"{directory} cannot be written: {with_cure(error, 'name another directory')}") from error
    return directory


def to_export(loops: Loops) -> tuple[str, Trainer | Evaluator, Exported]:
    """Returns what is exported, and whose it is: that of the first evaluator, or else of the trainer."""
    split, task = _exporting(loops.by_name)
    exported = task.export().with_names()
    check_memory(exported.model)
    return split, task, exported


def _exporting(loops: Mapping[str, Loop]) -> tuple[str, Trainer | Evaluator]:
    split = next((split for split in loops if split != "train"), "train")
    check_rows(loops[split].task)
    return split, loops[split].task


def check_exportable(loops: Mapping[str, Loop]) -> None:
    """Raises `UsageError` if it is not known what to export; of what a program defines itself, that is seen later."""
    _, task = _exporting(loops)
    if not is_own(task):
        task.export().with_names()


def is_own(task: Trainer | Evaluator) -> bool:
    """Returns whether the program defines what is exported, which may be slow to make."""
    return not type(task).export.__module__.startswith("looplib.")


def sample(
    loops: Loops, split: str, task: Trainer | Evaluator, exported: Exported, most: int = MOST_EXAMPLES
) -> ModelInputs | str:
    """Returns examples of the data of a task, or why there are none."""
    try:
        found = take_samples(loops, split, task, exported.signature, most)
    except UsageError as error:
        return str(error)
    return found if found.batches else f"the data of {type(task).__name__} has no example"


def _warn_of_statistics(exported: Exported) -> None:
    """Says that averages are exported with the statistics of batch normalization of other weights."""
    layers = _keras.sublayers([exported.model]) if _keras.is_layer(exported.model) else []
    pairs = exported.averages.pairs if any(map(is_batch_normalization, layers)) else []
    if any(not np.array_equal(tf.identity(variable), tf.identity(average)) for variable, average in pairs):
        logging.warning(
            "the averaged weights are exported with the statistics of batch normalization of the last weights, which "
            "may fit them badly; python -m looplib average DIR OUTPUT --averages --statistics_steps=100 writes the "
            "averages with statistics of their own: export them by --mode=export --model_dir=OUTPUT"
        )


def _check(directory: str) -> None:
    """Refuses a directory whose place has something else."""
    files.refuse_patterns("the directory of the export", directory)
    if os.path.islink(directory):
        raise ExportError(f"{directory} is a symbolic link, which an export would replace; name the directory itself")
    parent = os.path.dirname(directory)
    while parent != os.path.dirname(parent):
        if os.path.isfile(os.path.join(parent, _RECORD)):
            raise ExportError(
                f"{directory} is in the export {parent}, which would be none then; name another directory"
            )
        parent = os.path.dirname(parent)
    found = None
    if os.path.isdir(directory):
        found = [name for name in os.listdir(directory) if not files.is_new_name(name, _INNER)]
    known = found is not None and _NAMES.issuperset(found) and (not found or _RECORD in found)
    if os.path.lexists(directory) and not known:
        raise ExportError(f"{directory} holds something else than an export; name another directory, or remove it")


def _appear(place: str, directory: str, named: str) -> None:
    """Gives a finished export its name; an earlier one there is removed.

    Args:
      place: where it is.
      directory: where it is to be.
      named: beside what temporary directories are: the directory, or a path in it if it cannot be replaced. The parts
        then move into it, the record last.
    """
    make_all_durable(place)
    parent = os.path.dirname(named)
    with new_folder(named) as earlier, alone(parent):  # others wait
        _check(directory)
        if named != directory:
            for part in sorted(_NAMES.intersection(os.listdir(directory))):
                folders.move(directory, part, earlier)
            for part in sorted(os.listdir(place), key=_RECORD.__eq__):
                folders.move(place, part, directory)
        else:
            put_in_place(place, directory, earlier)
    files.make_durable(parent)


def _sentence(record: ExportRecord, directory: str) -> str:
    said = {name: f", differs by {far:.1g}" for name, far in record.differences.items()}
    if record.int8:
        said[FORMATS["int8"].file] = f", {record.int8}"
    sizes = ", ".join(f"{name} ({size:,} bytes{said.get(name, '')})" for name, size in record.files.items())
    reasons = "".join(f"; without {name}: {reason}" for name, reason in record.left_out.items())
    which = "averaged weights" if record.weights == "averages" else "weights"
    return f"exported the {which} of step {record.step} to {directory}: {sizes}{reasons}"

"""Exports of a run: its model as files that need no looplib, in a directory that appears whole."""

import contextlib
import dataclasses
import io
import json
import os
import sys
import tempfile
from typing import Any

import tensorflow as tf

from looplib import files, folders
from looplib.checkpoint.checkpointer import Checkpointer
from looplib.compat import keras as _keras
from looplib.errors import ExportError
from looplib.extras.outputs.new_folder import alone, new_folder
from looplib.loop.loops import Loops
from looplib.messages import gist, with_cure
from looplib.report.reporter import Reporter
from looplib.task.exported import Exported

_RECORD = "export.json"
_NAMES = {_RECORD, "saved_model", "model.keras", "model.tflite"}
_INNER = "export"  # the name of one that is made in its own directory
_CLOSE = 1e-3  # relative difference of two models that compute the same


@dataclasses.dataclass(frozen=True)
class ExportRecord:
    """What `export.json` says of an export.

    Attributes:
      step: the global step.
      weights: "averages" or "last".
      checkpoint: the name of the checkpoint that the run has continued from, or None.
      files: bytes of each part, by its name.
      left_out: why a part is not there, by its name.
      differences: the largest difference of a part's outputs from the trainer's, for random inputs, by its name.
    """

    step: int
    weights: str
    checkpoint: str | None
    files: dict[str, int]
    left_out: dict[str, str]
    differences: dict[str, float]


def export(
    loops: Loops,
    checkpointer: Checkpointer,
    reporter: Reporter,
    directory: str | os.PathLike[str] | None,
    averages: bool,
    tflite: bool,
) -> str:
    """Exports the model at its current step, see `Controller.export`."""
    chief, step = checkpointer.directory.workers.is_chief, checkpointer.step
    if directory is not None:
        directory = files.resolve(directory, "the directory of the export")
    else:
        checkpointer.directory.need("export without a directory")
        inside = checkpointer.directory.model_dir
        inside = folders.make_folder(inside, "export") if chief else inside
        directory = os.path.join(inside, f"step-{step}")
    directory = os.path.abspath(directory)
    if chief:
        _check(directory)
    # A mounted directory has to stay where it is, as has one whose parent this user may not write.
    stays = os.path.isdir(directory) and (
        os.path.ismount(directory) or not os.access(os.path.dirname(directory), os.W_OK)
    )
    task = next((loop.task for loop in loops.by_name.values() if loop is not loops.training), None)
    exported = _named((task or loops.training.task).export())
    averages = averages and exported.averages is not None
    # Where several workers train, all read the variables, and all but the chief drop what they write.
    named = os.path.join(directory, _INNER) if stays else directory
    new = new_folder(named) if chief else tempfile.TemporaryDirectory(prefix="looplib-export-")
    try:
        with new as place:
            with exported.averages.in_use() if averages else contextlib.nullcontext():
                parts = _Parts(exported, place)
                parts.write(tflite and chief)
            if chief:
                weights = "averages" if averages else "last"
                start = os.path.basename(checkpointer.restored_from) if checkpointer.restored_from else None
                record = ExportRecord(step, weights, start, parts.sizes(), parts.left_out, parts.differences)
                files.write_whole(os.path.join(place, _RECORD), json.dumps(dataclasses.asdict(record), indent=1) + "\n")
                _appear(place, directory, named)
                reporter.say(_sentence(record, directory))
    except (OSError, tf.errors.OpError) as error:
        raise ExportError(f"{directory} cannot be written: {with_cure(error, 'name another directory')}") from error
    return directory


def _check(directory: str) -> None:
    """Refuses a directory whose place has something else."""
    files.refuse_patterns("the directory of the export", directory)
    if os.path.islink(directory):
        raise ExportError(f"{directory} is a symbolic link, which an export would replace; name the directory itself")
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
    for folder, _, names in os.walk(place):
        for name in (*names, ""):
            files.make_durable(os.path.join(folder, name))
    parent, name = os.path.split(named)
    with new_folder(named) as earlier, alone(parent):  # others wait
        _check(directory)
        if named != directory:
            for part in sorted(_NAMES.intersection(os.listdir(directory))):
                folders.move(directory, part, earlier)
            for part in sorted(os.listdir(place), key=_RECORD.__eq__):
                folders.move(place, part, directory)
        else:
            if os.path.lexists(directory):
                folders.move(parent, name, earlier)
            folders.move(*os.path.split(place), parent, name)
    files.make_durable(parent)


def _sentence(record: ExportRecord, directory: str) -> str:
    sizes = ", ".join(
        f"{name} ({size:,} bytes"
        + (f", differs by {d:.1g})" if (d := record.differences.get(name)) is not None else ")")
        for name, size in record.files.items()
    )
    reasons = "".join(f"; without {name}: {reason}" for name, reason in record.left_out.items())
    which = "averaged weights" if record.weights == "averages" else "weights"
    return f"exported the {which} of step {record.step} to {directory}: {sizes}{reasons}"


class _Parts:
    """The files of an export.

    Attributes:
      left_out: why a part is not there.
      differences: the largest difference of each part from the trainer's function.
    """

    def __init__(self, exported: Exported, folder: str) -> None:
        self._exported, self._folder = exported, folder
        self.left_out: dict[str, str] = {}
        self.differences: dict[str, float] = {}

    def write(self, tflite: bool) -> None:
        """Writes the parts: a SavedModel, a Keras file and, if asked for, a TFLite file."""
        path = os.path.join(self._folder, "saved_model")
        _save(self._exported, path)
        loaded = tf.saved_model.load(path)
        batch = tf.nest.map_structure(_random, self._exported.signature)
        names = [spec.name for spec in tf.nest.flatten(self._exported.signature)]
        expected = tf.nest.flatten(self._exported.function(batch))
        self.differences["saved_model"] = _difference(tf.nest.flatten(loaded.serve(batch)), expected)
        if _keras.is_model(self._exported.model):
            self._write_keras()
        if tflite:
            inputs = dict(zip(names, tf.nest.flatten(batch)))
            self._write_tflite(path, inputs, loaded.signatures["serving_default"](**inputs))

    def _write_keras(self) -> None:
        """Writes `model.keras`, for inference, unless Keras cannot load it again, or loads another model."""
        model, path = self._exported.model, os.path.join(self._folder, "model.keras")
        doing = "write this model"
        try:
            model.save(path)
            doing = "load what it has written, as where a class lacks register_keras_serializable or get_config"
            loaded = sys.modules[_keras.family(model)].models.load_model(path, compile=False)
            found, expected = _outputs_or_weights(loaded), _outputs_or_weights(model)
            difference = _difference(found, expected)
            loaded.save(path)  # without an optimizer and a loss, which may be what another program cannot load
        except Exception as error:  # a layer without a configuration raises errors of many types
            self._leave_out_keras(f"Keras cannot {doing} ({gist(error)})")
            return
        largest = _difference([tf.zeros_like(value) for value in expected], expected)
        if difference <= _CLOSE * (1 + largest):
            self.differences["model.keras"] = difference
            return
        because = "as where a get_config lacks an argument"
        self._leave_out_keras(f"what Keras loads differs by {difference:.1g}, {because}")

    def _leave_out_keras(self, reason: str) -> None:
        folders.remove(self._folder, "model.keras")
        self.left_out["model.keras"] = reason

    def _write_tflite(self, saved: str, inputs: dict[str, tf.Tensor], outputs: dict[str, tf.Tensor]) -> None:
        try:
            content = tf.lite.TFLiteConverter.from_saved_model(saved).convert()
            runner = tf.lite.Interpreter(model_content=content).get_signature_runner("serving_default")
            found = runner(**{name: tensor.numpy() for name, tensor in inputs.items()})
        except Exception as error:  # the converter's errors have many types
            self.left_out["model.tflite"] = f"TensorFlow's converter does not take it ({gist(error)})"
            return
        self.differences["model.tflite"] = _difference([found[name] for name in outputs], list(outputs.values()))
        files.write_whole(os.path.join(self._folder, "model.tflite"), content, durable=False)

    def sizes(self) -> dict[str, int]:
        """Returns the bytes of each part."""
        sizes = {}
        for name in sorted(os.listdir(self._folder)):
            path = os.path.join(self._folder, name)
            inside = [os.path.join(folder, file) for folder, _, names in os.walk(path) for file in names]
            sizes[name] = sum(map(os.path.getsize, inside or [path]))
        return sizes


def _save(exported: Exported, path: str) -> None:
    """Writes a SavedModel with the endpoint `serve`, which is also its signature for serving."""
    if _keras.is_model(exported.model):
        archive = sys.modules[_keras.family(exported.model)].export.ExportArchive()
        archive.track(exported.model)
        archive.add_endpoint("serve", exported.function, [exported.signature])
        with contextlib.redirect_stdout(io.StringIO()):  # prints how to use it
            archive.write_out(path)
        return
    module = tf.Module()
    module.model = exported.model
    module.serve = tf.function(exported.function, input_signature=[exported.signature])
    tf.saved_model.save(module, path, signatures=module.serve.get_concrete_function())


def _named(exported: Exported) -> Exported:
    """Gives each input of the signature a name, which serving programs use."""
    flat = tf.nest.flatten(exported.signature)
    default = ["inputs"] if len(flat) == 1 else [f"inputs_{number}" for number in range(len(flat))]
    named = [tf.TensorSpec(spec.shape, spec.dtype, spec.name or name) for spec, name in zip(flat, default)]
    return dataclasses.replace(exported, signature=tf.nest.pack_sequence_as(exported.signature, named))


def _random(spec: tf.TensorSpec) -> tf.Tensor:
    """Makes a tensor of a spec, with two rows: zeros and ones of whole numbers, and others from 0 to 1."""
    shape = [2 if size is None else size for size in spec.shape.as_list()]
    if spec.dtype == tf.string:
        return tf.fill(shape, "")
    uniform = tf.random.stateless_uniform(shape, seed=[0, 0])
    return tf.cast(uniform if spec.dtype.is_floating else tf.round(uniform), spec.dtype)


def _outputs_or_weights(model: Any) -> list[Any]:
    """Returns the outputs of a Keras model for random inputs; its weights, if it does not know its inputs."""
    specs = _keras.input_specs(model)
    if specs is None:
        return model.get_weights()
    return tf.nest.flatten(model(tf.nest.map_structure(_random, specs), training=False))


def _difference(found: Any, expected: Any) -> float:
    """Returns the largest difference of two lists of tensors; 0 for those that are no numbers."""
    pairs = [(tf.convert_to_tensor(one), tf.convert_to_tensor(other)) for one, other in zip(found, expected)]
    numbers = [(tf.cast(a, tf.float64), tf.cast(b, tf.float64)) for a, b in pairs if b.dtype != tf.string]
    return max((float(tf.reduce_max(tf.abs(a - b))) for a, b in numbers), default=0.0)

"""The files of an export: each is written, loaded by its own runtime, and compared with the trainer's function."""

import contextlib
import dataclasses
import io
import math
import os
import pathlib
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.base import files, folders
from looplib.base.messages import gist
from looplib.base.numbers import format_size
from looplib.compat import keras as _keras
from looplib.compat import tensorflow as _tf
from looplib.compat.row_updates import is_table
from looplib.config.formats import FORMATS, KERAS, SAVED_MODEL
from looplib.errors import ExportError
from looplib.exports import int8
from looplib.exports.int8 import Int8Cost
from looplib.exports.samples import ModelInputs
from looplib.task.plain import gaps
from looplib.task.state import state_kept, state_of_model, variables_of
from looplib.task.trainer import Exported
from looplib.weights.layers import ComputedValue, LayerWalk
from looplib.weights.opening import SafetensorsFile
from looplib.weights.taking import named_weights, write_safetensors

CLOSE = 1e-3  # difference of two models that compute equal outputs, relative to the largest number
SIGNATURE = "serving_default"


@dataclasses.dataclass(frozen=True)
class ExportRecord:
    """The content of `export.json`.

    Attributes:
      step: the global step.
      weights: "averages" or "last".
      checkpoint: the name of the checkpoint that the run has continued from, or None.
      files: bytes of each part, by its name.
      left_out: why a part is not there, by its name.
      differences: the largest difference of a part's outputs from the trainer's, for random inputs, by its name; of
        the numbers in a file of weights.
      int8: what the int8 file costs; None without one.
    """

    step: int
    weights: str
    checkpoint: str | None
    files: dict[str, int]
    left_out: dict[str, str]
    differences: dict[str, float]
    int8: Int8Cost | None


def check_memory(model: Any) -> None:
    """Raises `ExportError` for tables of embeddings that this process cannot hold once more, to check the export."""
    size = sum(table.shape.num_elements() * table.dtype.size for table in _tables(model))
    if size > (free := _free_memory()):
        raise ExportError(
            f"the tables of embeddings have {format_size(size)}, and this process can take {format_size(free)} more, "
            "where an export is loaded to be checked; export on a machine with more memory (--mode=export "
            "--strategy=one_device, which reads the checkpoint of any servers), or read the parts from the checkpoint, "
            "one at a time, by tf.train.load_checkpoint"
        )


def _tables(model: Any) -> list[tf.Variable]:
    return [variable for _, variable in variables_of(state_of_model(model)) if is_table(variable)]


def _free_memory() -> float:
    """Returns at most how many bytes this process may get, by Linux and its control group; infinity for unknown."""
    left = [math.inf]
    with contextlib.suppress(OSError):
        found = re.search(r"MemAvailable: +(\d+) kB", pathlib.Path("/proc/meminfo").read_text())
        left += [int(found[1]) * 1024] if found else []
    with contextlib.suppress(OSError, ValueError):  # no group, or one without a limit
        left.append(int(pathlib.Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(left)


class Parts:
    """The files of an export. Making it computes the function, whose errors are its own and not those of files.

    Args:
      exported: the function, its signature whose specs have names, and the model.
      own_export: whether the program defines the function, and not looplib as the model's outputs in inference.
      samples: examples for int8; a sentence why there are none; None if they are not needed.

    Attributes:
      left_out: why a part is not there, by its name.
      differences: the largest difference of each part from the trainer's function, or of its weights.
      int8: what the int8 file costs; None without one.
    """

    def __init__(self, exported: Exported, own_export: bool, samples: ModelInputs | str | None) -> None:
        self._exported, self._own_export, self._samples, self._folder = exported, own_export, samples, ""
        self.left_out: dict[str, str] = {}
        self.differences: dict[str, float] = {}
        self.int8: Int8Cost | None = None
        specs = tf.nest.flatten(self._exported.signature)
        batch = tf.nest.map_structure(random_batch, self._exported.signature)
        self._inputs = dict(zip([spec.name for spec in specs], tf.nest.flatten(batch)))
        self._batch = batch
        with state_kept(self._exported.model):
            self._expected = tf.nest.flatten(self._exported.function(batch))
        self._serve: Any = None  # of the SavedModel, once it is written

    def write(self, folder: str, formats: Sequence[str], is_chief: bool) -> None:
        """Writes the parts.

        Args:
          folder: where to.
          formats: which ones, besides a SavedModel and a Keras file.
          is_chief: whether this process keeps them. All workers read the variables, and the chief alone converts files.
        """
        self.write_saved_model(folder)
        if _keras.is_model(self._exported.model):
            self._write_keras()
        writers: dict[str, Callable[[str], None]] = {
            "safetensors": self._write_safetensors,
            "weights.h5": self._write_h5,
            "onnx": self._write_onnx,
            "tflite": self._write_tflite,
            "int8": self._write_int8,
        }
        for name in formats:
            if is_chief or name in ("safetensors", "weights.h5", "onnx"):
                writers[name](FORMATS[name].file)

    def write_saved_model(self, folder: str) -> str:
        """Writes the SavedModel alone; returns its path."""
        self._folder, path = folder, os.path.join(folder, SAVED_MODEL)
        _save(self._exported, path)
        loaded = _load(path)
        if _is_distributed(self._exported.model):
            # TensorFlow saves a variable of several replicas with its parts. Readers of sessions, such as TensorFlow
            # Serving and the converter to TFLite, then take other moving statistics than the mean of the replicas.
            folders.remove(self._folder, SAVED_MODEL)
            tf.saved_model.save(loaded, path, signatures=loaded.signatures)
            loaded = _load(path)
        self._serve = loaded.signatures[SIGNATURE]
        self.differences[SAVED_MODEL] = self._far(loaded)
        return path

    @property
    def is_number(self) -> bool:
        """Whether no output of the function is NaN for random inputs."""
        return not any(np.isnan(found).any() for found, _ in _numbers(self._expected, self._expected))

    def compare(self, path: str) -> float:
        """Returns the largest difference of the outputs of a SavedModel from those of the function, as both are now."""
        return self._far(_load(path))

    def _far(self, loaded: Any) -> float:
        return difference(tf.nest.flatten(loaded.serve(self._batch)), self._expected)

    def _keep(self, name: str, found: Any, expected: Any, who: str, because: str = "") -> None:
        """Notes how much a part differs, and leaves out one that is another model."""
        found, expected = list(found), list(expected)
        far, sizes = difference(found, expected), (np.abs(value) for value, _ in _numbers(expected, expected))
        largest = max((float(size.max(where=np.isfinite(size), initial=0)) for size in sizes), default=0.0)
        if len(found) == len(expected) and far <= CLOSE * (1 + largest):
            self.differences[name] = far
        else:
            self._leave_out(name, f"what {who} differs by {far:.1g}{because}")

    def _leave_out(self, name: str, reason: str) -> None:
        if os.path.lexists(os.path.join(self._folder, name)):
            folders.remove(self._folder, name)
        self.left_out[name] = reason

    @contextlib.contextmanager
    def _or_left_out(self, name: str, who: str) -> Iterator[None]:
        """Leaves out a part, of which `who` says what a block cannot do, for what the block raises, of many types."""
        try:
            yield
        except Exception as error:
            said = _of_converter(error, self._exported.model) if name.endswith(".tflite") else gist(error)
            self._leave_out(name, f"{who} ({said})")

    def _write_keras(self) -> None:
        """Writes `model.keras`, for inference, unless Keras cannot load it again, or loads another model."""
        model, path = self._exported.model, os.path.join(self._folder, KERAS)
        with self._or_left_out(KERAS, "Keras cannot write this model"):
            model.save(path)
            lacks = "as where a class lacks register_keras_serializable or get_config"
            with self._or_left_out(KERAS, f"Keras cannot load what it has written, {lacks}"):
                loaded = sys.modules[_keras.family(model)].models.load_model(path, compile=False)
                with state_kept(model), state_kept(loaded):
                    found, expected = _outputs_or_weights(loaded), _outputs_or_weights(model)
                loaded.save(path)  # without an optimizer and a loss, which may be what another program cannot load
                self._keep(KERAS, found, expected, "Keras loads", ", as where a get_config lacks an argument")

    def _write_safetensors(self, name: str) -> None:
        path = os.path.join(self._folder, name)
        try:
            weights = named_weights(self._exported.model)
            write_safetensors(path, weights)
        except ExportError as error:
            self._leave_out(name, str(error))
            return
        with contextlib.closing(SafetensorsFile(path)) as file:
            self.differences[name] = _unequal((file.read(key), value) for key, value in weights.items())

    def _write_h5(self, name: str) -> None:
        """Writes the file of weights of Keras, and compares each of its arrays."""
        model, path = self._exported.model, os.path.join(self._folder, name)
        if not _keras.is_model(model):
            self._leave_out(name, f"it is for Keras models, and this is a {type(model).__name__}")
            return
        with self._or_left_out(name, "Keras cannot write its weights"):
            import h5py  # here, as other formats do not need it

            model.save_weights(path)
            with h5py.File(path) as file:
                places = [("/".join((*place.path, "vars")), place.own) for place in LayerWalk(model).found]
                pairs = [
                    (file[f"{place}/{number}"], variable) for place, own in places for number, variable in own.items()
                ]
                self.differences[name] = _unequal(
                    (stored[()], one) for stored, one in pairs if not isinstance(one, ComputedValue)
                )

    def _write_onnx(self, name: str) -> None:
        """Writes ONNX by Keras's own export; by tf2onnx for tf_keras and for functions of the program's own."""
        import onnxruntime

        model, path, signature = self._exported.model, os.path.join(self._folder, name), self._exported.signature
        with self._or_left_out(name, "tf2onnx does not take it"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of numpy, about names that tf2onnx looks for
                if _keras.family(model) == "keras" and not self._own_export:
                    model.export(path, format="onnx", verbose=False, input_signature=[signature])
                else:
                    _convert(self._exported, path)
            session = onnxruntime.InferenceSession(path)
            inputs = {one.name: self._inputs[one.name].numpy() for one in session.get_inputs()}
            self._keep(name, session.run(None, inputs), self._expected, "onnxruntime computes")

    def _write_tflite(self, name: str) -> None:
        with self._or_left_out(name, "TensorFlow's converter does not take it"):
            content = tf.lite.TFLiteConverter.from_saved_model(os.path.join(self._folder, SAVED_MODEL)).convert()
            found = _runner(content)(**{key: tensor.numpy() for key, tensor in self._inputs.items()})
        if name not in self.left_out:
            files.write_whole(os.path.join(self._folder, name), content, durable=False)
            expected = self._serve(**self._inputs)
            self._keep(name, [found[key] for key in expected], expected.values(), "its interpreter computes")

    def _write_int8(self, name: str) -> None:
        samples = self._samples
        found, reason = (None, samples) if isinstance(samples, str) else (samples, "")
        place, inputs = os.path.join(self._folder, SAVED_MODEL), {k: one.numpy() for k, one in self._inputs.items()}
        with self._or_left_out(name, "TensorFlow's converter does not take it"):
            content, kind, refused = int8.quantize(place, found, int8.has_ranges(self._serve))
            try:
                computed = _runner(content)(**inputs)
            except (RuntimeError, ValueError) as error:  # the interpreter may not take what the converter makes
                content, kind, _ = int8.quantize(place, None)
                computed = _runner(content)(**inputs)
                refused = refused or f"TensorFlow's interpreter does not take the whole model ({gist(error)})"
            outputs = int8.compare(self._serve, _runner(content), found.batches if found else ())
            expected = self._serve(**self._inputs)
        if name not in self.left_out:
            self.differences[name] = difference([computed[key] for key in expected], list(expected.values()))
            files.write_whole(os.path.join(self._folder, name), content, durable=False)
            calibrated = found.of_one_size(int8.MOST_CALIBRATION).examples if found and kind == "integer" else 0
            split, examples = (found.split, found.examples) if found else ("", 0)
            self.int8 = Int8Cost(kind, refused or reason, split, examples, calibrated, outputs)

    def record(self, step: int, weights: str, checkpoint: str | None) -> ExportRecord:
        """Returns what `export.json` says, once the parts are written."""
        sizes = {}
        for name in sorted(os.listdir(self._folder)):
            path = os.path.join(self._folder, name)
            inside = [os.path.join(folder, file) for folder, _, names in os.walk(path) for file in names]
            sizes[name] = sum(map(os.path.getsize, inside or [path]))
        return ExportRecord(step, weights, checkpoint, sizes, self.left_out, self.differences, self.int8)


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


def _load(path: str) -> Any:
    return _tf.outside(lambda: tf.saved_model.load(path))


def _of_converter(error: Exception, model: Any) -> str:
    """Returns what an error of the converter says, which writes pages about the loops of recurrent layers."""
    if "tf.TensorListReserve" in str(error):
        return "a recurrent layer has a loop; build it with unroll=True, which leaves its weights as they are"
    if _tables(model):
        return (
            "TFLite lacks operations of a ShardedEmbedding with several parts; export a model with shards=1, which "
            "takes the rows from this run by a warm start"
        )
    return gist(error)


def _is_distributed(model: Any) -> bool:
    """Returns whether a Keras model or a module has variables of several replicas."""
    return any(isinstance(one, tf.distribute.DistributedValues) for _, one in variables_of({"model": model}))


def _convert(exported: Exported, path: str) -> None:
    """Writes ONNX of a function, whose inputs have the names of the signature."""
    import tf2onnx

    specs = tf.nest.flatten(exported.signature)

    def serve(*inputs: tf.Tensor) -> Any:
        return exported.function(tf.nest.pack_sequence_as(exported.signature, inputs))

    tf2onnx.convert.from_function(tf.function(serve, input_signature=specs), input_signature=specs, output_path=path)


def _runner(content: bytes) -> Any:
    """Returns a function of named inputs, which TFLite's interpreter computes."""
    with int8.quiet():
        return tf.lite.Interpreter(model_content=content).get_signature_runner(SIGNATURE)


def random_batch(spec: tf.TensorSpec) -> tf.Tensor:
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
    return tf.nest.flatten(model(tf.nest.map_structure(random_batch, specs), training=False))


def difference(found: Any, expected: Any) -> float:
    """Returns the largest difference of two lists of tensors; 0 for those that are no numbers, infinity for others."""
    if any(tf.convert_to_tensor(one).shape != tf.convert_to_tensor(other).shape for one, other in zip(found, expected)):
        return math.inf
    return max((float(gaps(one, other).max(initial=0)) for one, other in _numbers(found, expected)), default=0.0)


def _numbers(found: Any, expected: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the pairs of two lists of tensors that are numbers, with float64 or complex elements."""
    for one, other in zip(found, expected):
        a, b = tf.convert_to_tensor(one), tf.convert_to_tensor(other)
        if tf.string not in (a.dtype, b.dtype):
            kind = tf.complex128 if b.dtype.is_complex else tf.float64
            yield tf.cast(a, kind).numpy(), tf.cast(b, kind).numpy()


def _unequal(pairs: Iterable[tuple[Any, Any]]) -> float:
    """Returns the largest difference of stored arrays from variables; 0 if all are equal bit by bit."""
    largest = 0.0
    for stored, variable in pairs:
        value = _keras.tf_variable(variable).numpy()
        found = np.asarray(stored)
        found = found.view(value.dtype) if found.dtype.kind == "V" else found
        if found.tobytes() != value.tobytes():
            largest = max(largest, float(gaps(found, value).max()))
    return largest

"""The formats of an export beside the SavedModel and the Keras file, and what is refused before anything is written."""

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from looplib.errors import ExportError, PluginError

PredictionFormat = Literal["jsonl", "tfrecord", "parquet", "csv"]
PREDICTIONS = get_args(PredictionFormat)  # kinds of files
_LONGEST_LICENSE = 100  # characters


@dataclasses.dataclass(frozen=True)
class Format:
    """A format that an export may have.

    Attributes:
      file: the name of its file.
      packages: the packages that write and check it, besides TensorFlow and Keras.
    """

    file: str
    packages: tuple[str, ...] = ()


SAVED_MODEL, KERAS = "saved_model", "model.keras"  # of each export
CARD = "README.md"
ExportFormat = Literal["safetensors", "weights.h5", "onnx", "tflite", "int8"]
FORMATS: Mapping[ExportFormat, Format] = {
    "safetensors": Format("model.safetensors"),
    "weights.h5": Format("model.weights.h5"),
    "onnx": Format("model.onnx", ("tf2onnx", "onnxruntime")),
    "tflite": Format("model.tflite"),
    "int8": Format("model.int8.tflite"),
}


def check_export(formats: Sequence[str] | None, license: Any) -> tuple[str, ...]:
    """Returns the formats of an export, each once and in the order of `FORMATS`.

    Args:
      formats: names in `FORMATS`; None for none.
      license: the license of the model, one short line.

    Raises:
      ExportError: for a format that is not known, or a license that is no such text.
      PluginError: if a package is missing that a format needs.
    """
    if isinstance(formats, str) or not all(isinstance(name, str) for name in formats or ()):
        raise ExportError(f"the formats of the export are {formats!r:.100}; expected a list such as ['tflite', 'onnx']")
    for name in formats or ():
        if name not in FORMATS:
            raise ExportError(f"the export has the format {name!r:.100}; expected some of {', '.join(FORMATS)}")
        for package in FORMATS[name].packages:
            if importlib.util.find_spec(package) is None:
                raise PluginError(
                    f"an export as {name} needs the package {package}, which is not installed: "
                    f"pip install 'looplib[{name}]'"
                )
    if not isinstance(license, str) or not license.isprintable() or not 0 < len(license.strip()) <= _LONGEST_LICENSE:
        raise ExportError(
            f"the license of the export is {license!r:.200}; expected one line of at most {_LONGEST_LICENSE} "
            'characters, such as "apache-2.0", or "unknown"'
        )
    return tuple(name for name in FORMATS if name in (formats or ()))

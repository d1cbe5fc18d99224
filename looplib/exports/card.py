"""The card of an exported model, README.md: what it is, how good it is, how to load it; model hubs read its head."""

import dataclasses
import hashlib
import json
import math
import platform
import re
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
import yaml

import looplib
from looplib.checkpoint.checkpointer import Checkpointer
from looplib.compat import keras as _keras
from looplib.config.formats import FORMATS, KERAS, SAVED_MODEL
from looplib.exports.int8 import Int8Cost
from looplib.loop.loops import Loops
from looplib.report import run_report
from looplib.report.reporter import Reporter
from looplib.report.writers.contract import Setting
from looplib.run import commits
from looplib.run.directory import RunDir
from looplib.run.report import RunReport

_OF_THE_CLOCK = ("steps_per_second", "epoch")  # metrics of a training that say nothing of its model
_OF_FLOAT = "The metrics above are those of the model in floating-point numbers."
_LONGEST = 200  # characters of a setting
_LIBRARIES = {"keras": "keras", "tf_keras": "tf-keras", None: "tensorflow"}
_TAGS = {"safetensors": "safetensors", "onnx": "onnx", "tflite": "tflite", "int8": "tflite"}


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """The metrics of an evaluator, or of the training, and the step that they are of."""

    split: str
    step: int
    metrics: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class TrainingData:
    """Facts about the training data.

    Attributes:
      examples: how many there are; None where that is not known.
      files: the fingerprint: a checksum by file; {} where there is none.
    """

    examples: int | None
    files: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Card:
    """The content of a model's card.

    Attributes:
      model: the Keras model or `tf.Module`.
      signature: the structure of `tf.TensorSpec`s of the inputs, with names.
      step: the global step.
      weights: "averages" or "last".
      license: of the model; "unknown" if nobody has said.
      evaluated: the metrics.
      evaluated_averages: whether evaluations use averaged weights.
      data: the training data.
      settings: of the run, by name.
      versions: by the name of a package.
      sizes: bytes of each file.
      differences: of each file from the trainer's function.
      int8: what the int8 file costs; None without one.
    """

    model: Any
    signature: Any
    step: int
    weights: str
    license: str
    evaluated: list[Evaluated]
    evaluated_averages: bool
    data: TrainingData
    settings: Mapping[str, Setting]
    versions: Mapping[str, str]
    sizes: Mapping[str, int]
    differences: Mapping[str, float]
    int8: Int8Cost | None

    def text(self) -> str:
        """Returns the file."""
        kind = type(self.model).__name__
        name = getattr(self.model, "name", "") or kind
        parts = [
            f"---\n{yaml.safe_dump(self._head(), sort_keys=False, allow_unicode=True)}---\n",
            f"# {_cell(name)}\n",
            f"A `{kind}` of {_LIBRARIES[_keras.family(self.model)]} with {self._parameters():,} parameters, trained "
            f"with looplib. These are the {'averaged' if self.weights == 'averages' else 'last'} weights of step "
            f"{self.step:,}.\n",
            f"License: {_cell(self.license)}.\n",
            *self._metrics(),
            *self._data(),
            "## Load it\n",
            f"```python\n{self.program()}```\n",
            *self._files(),
        ]
        if self.settings:
            parts += ["## Settings\n", _table(("setting", "value"), [(f"`{k}`", v) for k, v in self.settings.items()])]
        parts += ["## Versions\n", _table(("package", "version"), self.versions.items())]
        return "\n".join(parts)

    def program(self) -> str:
        """Returns five lines that load the SavedModel, in the directory of the card, and call it."""
        inputs = [
            f'"{spec.name}": tf.zeros({[2 if size is None else size for size in spec.shape.as_list()]}, '
            f'"{spec.dtype.name}")'
            if spec.dtype != tf.string
            else f'"{spec.name}": tf.fill({[2 if size is None else size for size in spec.shape.as_list()]}, "")'
            for spec in tf.nest.flatten(self.signature)
        ]
        return (
            "import tensorflow as tf\n\n"
            f'model = tf.saved_model.load("{SAVED_MODEL}")\n'
            f"inputs = {{{', '.join(inputs)}}}\n"
            'outputs = model.signatures["serving_default"](**inputs)\n'
            "print({name: value.numpy() for name, value in outputs.items()})\n"
        )

    def _head(self) -> dict[str, Any]:
        tags = ["looplib", "tensorflow", *(tag for name, tag in _TAGS.items() if FORMATS[name].file in self.sizes)]
        metrics = sorted({name for one in self.evaluated if one.split != "train" for name in one.metrics})
        head = {
            "library_name": _LIBRARIES[_keras.family(self.model)],
            "license": self.license,
            "tags": list(dict.fromkeys(tags)),
            "metrics": [name for name in metrics if name != "examples"],
        }
        return {name: value for name, value in head.items() if value}

    def _parameters(self) -> int:
        if _keras.is_model(self.model):
            return int(self.model.count_params())
        return sum(math.prod(variable.shape) for variable in getattr(self.model, "variables", ()))

    def _metrics(self) -> list[str]:
        rows = [
            (_cell(one.split), f"{one.step:,}", _cell(name), f"{value:.6g}")
            for one in self.evaluated
            for name, value in one.metrics.items()
            if np.isscalar(value) and name not in _OF_THE_CLOCK
        ]
        if not rows:
            return []
        other = self.evaluated_averages and self.weights != "averages"
        note = ["Evaluations were made with averaged weights, which are not those of this export.\n"] if other else []
        return ["## Metrics\n", *note, _table(("evaluation", "step", "metric", "value"), rows)]

    def _data(self) -> list[str]:
        if self.data.examples is None and not self.data.files:
            return []
        said = [] if self.data.examples is None else [f"{self.data.examples:,} examples"]
        if self.data.files:
            digest = hashlib.sha256(json.dumps(dict(self.data.files)).encode()).hexdigest()[:16]
            said.append(f"fingerprint `{digest}`, of {len(self.data.files):,} names")
        return ["## Training data\n", f"{'; '.join(said)}.\n"]

    def _files(self) -> list[str]:
        family = _keras.family(self.model)
        loaders = {
            SAVED_MODEL: "tf.saved_model.load(...)",
            KERAS: f"{family}.models.load_model(...)",
            "model.weights.h5": "model.load_weights(...)",
            "model.safetensors": "safetensors.numpy.load_file(...)",
            "model.onnx": "onnxruntime.InferenceSession(...)",
            "model.tflite": "tf.lite.Interpreter(...)",
            "model.int8.tflite": "tf.lite.Interpreter(...)",
        }
        rows = [
            (f"`{name}`", f"{size:,}", f"{self.differences.get(name, math.nan):.1g}", f"`{loaders[name]}`")
            for name, size in self.sizes.items()
            if name in loaders
        ]
        text = "A difference is the largest one from the trained model, of outputs for random inputs or of weights.\n"
        parts = [_table(("file", "bytes", "difference", "load it by"), rows), text]
        return parts + [f"`model.int8.tflite` is {self.int8}. {_OF_FLOAT}\n"] if self.int8 else parts


def _table(head: tuple[str, ...], rows: Any) -> str:
    lines = [head, ("---",) * len(head), *([_cell(value) for value in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(value: Any) -> str:
    """Returns a value as text that stays in its place in Markdown."""
    text = " ".join(str(value).split())
    text = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
    return text.replace("|", "\\|").replace("<", "&lt;").encode(errors="backslashreplace").decode()


_PLACES = frozenset({"model_dir", "local_dir", "export", "predictions", "config_file", "tpu"})  # of one machine
_ALWAYS = frozenset({"global_batch_size", "train_steps", "seed"})  # also those that are defaults
_PLAIN = re.compile(r"[\w.+, ()\[\]'=-]{1,200}")
_NUMBERS_OF_HOST = re.compile(r"\d+\.\d+\.\d+")
_PERSONAL = re.compile(r"(?i)e?mail|user|\bhost|address")
_OF_THE_JOB = frozenset({"mode", "export_averages", "export_formats", "export_license", "checkpoint"})


def evaluated(loops: Loops, checkpointer: Checkpointer, reporter: Reporter) -> list[Evaluated]:
    """Returns the metrics of the newest evaluations, and of the training, with their steps."""
    step, reported = checkpointer.step, checkpointer.record.reported
    found = {name: Evaluated(name, step, metrics) for name, metrics in _scores(checkpointer, step).items()}
    for name, metrics in reporter.last_evaluation.items():
        if name not in found or reported.get(name) == step:
            found[name] = Evaluated(name, reported.get(name, step), metrics)
    trained = checkpointer.record.train
    return [*found.values(), *([Evaluated("train", reported.get("train", step), trained)] if trained else [])]


def _scores(checkpointer: Checkpointer, step: int) -> dict[str, dict[str, float]]:
    """Returns what evaluations have said of the checkpoint of a step, by evaluator."""
    folder, found = checkpointer.directory.checkpoints, {}
    saved = [one for one in commits.committed(folder) if one.step == step] if folder else []
    for name, value in saved[-1].scores.items() if saved else ():
        split, _, metric = name.partition("/")
        if value is not None:
            found.setdefault(split, {})[metric] = value
    return found


def training_data(loops: Loops, checkpointer: Checkpointer) -> TrainingData:
    """Returns what the run, or the checkpoint that it has restored, knows of the training data."""
    training, record = loops.training, checkpointer.record
    examples = training.examples if training and training.examples is not None else record.examples
    return TrainingData(examples, (training.fingerprint if training else None) or record.files or {})


def settings(checkpointer: Checkpointer, reporter: Reporter) -> dict[str, Setting]:
    """Returns the settings of the training, of `run.json` if there is one; without defaults, paths and secrets."""
    own = reporter.report.facts
    directory = checkpointer.directory.model_dir
    report = (RunDir(directory).report() if directory else None) or RunReport()
    flags: Mapping[str, object] = report.flags or own.flags
    if report.not_default is not None:
        flags = {name: value for name, value in flags.items() if name in report.not_default or name in _ALWAYS}
    found = run_report.settings_of(flags, report.config or own.config)
    return {
        name: value
        for name, value in found.items()
        if name not in _PLACES | _OF_THE_JOB
        and value not in ("None", "")
        and _is_plain(value)  # which a mask is not
        and not _PERSONAL.search(name)
    }


def versions() -> dict[str, str]:
    """Returns the versions that make the export, of looplib, Python, TensorFlow and the Keras families in use."""
    found = {"looplib": looplib.__version__, "python": platform.python_version()}
    modules = [sys.modules[name] for name in ("tensorflow", "keras", "tf_keras", "numpy") if name in sys.modules]
    return found | {module.__name__: module.__version__ for module in modules}


def _is_plain(value: Setting) -> bool:
    """Returns whether a value is a number or names, and not a text that may have a path, an address or a secret."""
    return not isinstance(value, str) or bool(_PLAIN.fullmatch(value) and not _NUMBERS_OF_HOST.search(value))

"""The card of an exported model, README.md: what it is, how good it is, how to load it; model hubs read its head."""

import dataclasses
import hashlib
import json
import math
import platform
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
import yaml

import looplib
from looplib.checkpoint.checkpointer import Checkpointer
from looplib.compat import keras as _keras
from looplib.config.formats import FORMATS, KERAS, SAVED_MODEL
from looplib.exports.parts import ExportRecord
from looplib.loop.loops import Loops
from looplib.report.reporter import Reporter
from looplib.run import commits
from looplib.task.trainer import Exported

_OF_THE_CLOCK = ("steps_per_second", "epoch")  # metrics of a training that say nothing of its model
_OF_FLOAT = "The metrics above are those of the model in floating-point numbers."
_LONGEST = 200  # characters of a cell
_LIBRARIES = {"keras": "keras", "tf_keras": "tf-keras", None: "tensorflow"}
_TAGS = {"safetensors": "safetensors", "onnx": "onnx", "tflite": "tflite", "int8": "tflite"}


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """The metrics of an evaluator, or of the training, and the step that they are of."""

    split: str
    step: int
    metrics: Mapping[str, float]


def card(
    exported: Exported,
    record: ExportRecord,
    license: str,
    loops: Loops,
    checkpointer: Checkpointer,
    reporter: Reporter,
) -> str:
    """Returns the text of the card.

    Args:
      exported: the function, its signature whose specs have names, and the model.
      record: what `export.json` says of the export.
      license: of the model; "unknown" if nobody has said.
      loops: the loops of the run.
      checkpointer: knows what evaluations have said, and what data a restored checkpoint was trained on.
      reporter: has the newest evaluations.
    """
    model, family = exported.model, _keras.family(exported.model)
    kind, which = type(model).__name__, "averaged" if record.weights == "averages" else "last"
    scores = _evaluated(checkpointer, reporter)
    other = exported.averages is not None and record.weights != "averages"
    head = yaml.safe_dump(_head(family, record, license, scores), sort_keys=False, allow_unicode=True)
    return "\n".join([
        f"---\n{head}---\n",
        f"# {_cell(getattr(model, 'name', '') or kind)}\n",
        f"A `{kind}` of {_LIBRARIES[family]} with {_parameters(model):,} parameters, trained with looplib. These are "
        f"the {which} weights of step {record.step:,}.\n",
        f"License: {_cell(license)}.\n",
        *_metrics(scores, other),
        *_data(loops, checkpointer),
        "## Load it\n",
        f"```python\n{_program(exported.signature)}```\n",
        *_files(family, record),
        f"Written with {', '.join(f'{name} {version}' for name, version in _versions().items())}.\n",
    ])  # fmt: skip


def _head(family: str | None, record: ExportRecord, license: str, scores: list[Evaluated]) -> dict[str, Any]:
    tags = ["looplib", "tensorflow", *(tag for name, tag in _TAGS.items() if FORMATS[name].file in record.files)]
    metrics = sorted({name for one in scores if one.split != "train" for name in one.metrics})
    head = {
        "library_name": _LIBRARIES[family],
        "license": license,
        "tags": list(dict.fromkeys(tags)),
        "metrics": [name for name in metrics if name != "examples"],
    }
    return {name: value for name, value in head.items() if value}


def _parameters(model: Any) -> int:
    if _keras.is_model(model):
        return int(model.count_params())
    return sum(math.prod(variable.shape) for variable in getattr(model, "variables", ()))


def _metrics(scores: list[Evaluated], of_other_weights: bool) -> list[str]:
    rows = [
        (_cell(one.split), f"{one.step:,}", _cell(name), f"{value:.6g}")
        for one in scores
        for name, value in one.metrics.items()
        if np.isscalar(value) and name not in _OF_THE_CLOCK
    ]
    note = "Evaluations were made with averaged weights, which are not those of this export.\n"
    table = _table(("evaluation", "step", "metric", "value"), rows)
    return ["## Metrics\n", *[note] * of_other_weights, table] if rows else []


def _data(loops: Loops, checkpointer: Checkpointer) -> list[str]:
    """Says what the run, or the checkpoint that it has restored, knows of the training data."""
    training, record = loops.training, checkpointer.record
    examples = training.examples if training and training.examples is not None else record.examples
    files = (training.fingerprint if training else None) or record.files
    said = [] if examples is None else [f"{examples:,} examples"]
    if files:
        digest = hashlib.sha256(json.dumps(dict(files)).encode()).hexdigest()[:16]
        said.append(f"fingerprint `{digest}`, of {len(files):,} names")
    return ["## Training data\n", f"{'; '.join(said)}.\n"] if said else []


def _program(signature: Any) -> str:
    """Returns five lines that load the SavedModel, in the directory of the card, and call it."""
    inputs = []
    for spec in tf.nest.flatten(signature):
        shape = [2 if size is None else size for size in spec.shape.as_list()]
        made = f'tf.fill({shape}, "")' if spec.dtype == tf.string else f'tf.zeros({shape}, "{spec.dtype.name}")'
        inputs.append(f'"{spec.name}": {made}')
    return (
        "import tensorflow as tf\n\n"
        f'model = tf.saved_model.load("{SAVED_MODEL}")\n'
        f"inputs = {{{', '.join(inputs)}}}\n"
        'outputs = model.signatures["serving_default"](**inputs)\n'
        "print({name: value.numpy() for name, value in outputs.items()})\n"
    )


def _files(family: str | None, record: ExportRecord) -> list[str]:
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
        (f"`{name}`", f"{size:,}", f"{record.differences.get(name, math.nan):.1g}", f"`{loaders[name]}`")
        for name, size in record.files.items()
        if name in loaders
    ]
    text = "A difference is the largest one from the trained model, of outputs for random inputs or of weights.\n"
    parts = [_table(("file", "bytes", "difference", "load it by"), rows), text]
    return parts + [f"`model.int8.tflite` is {record.int8}. {_OF_FLOAT}\n"] if record.int8 else parts


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *([_cell(value) for value in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(value: str) -> str:
    """Returns a text that stays in its place in Markdown."""
    text = " ".join(value.split())
    text = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
    return text.replace("|", "\\|").replace("<", "&lt;").encode(errors="backslashreplace").decode()


def _evaluated(checkpointer: Checkpointer, reporter: Reporter) -> list[Evaluated]:
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


def _versions() -> dict[str, str]:
    """Returns the versions that make the export, of looplib, Python, TensorFlow and the Keras families in use."""
    found = {"looplib": looplib.__version__, "python": platform.python_version()}
    modules = [sys.modules[name] for name in ("tensorflow", "keras", "tf_keras", "numpy") if name in sys.modules]
    return found | {module.__name__: module.__version__ for module in modules}

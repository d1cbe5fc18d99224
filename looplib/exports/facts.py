"""What a run knows of its model, for the model's card."""

import platform
import re
import sys
from collections.abc import Mapping

import looplib
from looplib.checkpoint.checkpointer import Checkpointer
from looplib.exports.card import Evaluated, TrainingData
from looplib.loop.loops import Loops
from looplib.report import run_report
from looplib.report.reporter import Reporter
from looplib.report.writers.contract import Setting
from looplib.run import commits, run_json

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
    own = reporter.report.settings
    directory = checkpointer.directory.model_dir
    report = run_json.read_report(run_json.path_of(directory, trains=True)) if directory else {}
    flags: Mapping[str, object] = report.get("flags") or own.flags
    changed = report.get("not_default")
    if isinstance(changed, dict):
        flags = {name: value for name, value in flags.items() if name in changed or name in _ALWAYS}
    found = run_report.settings_of(flags, report.get("config") or own.config)
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

"""Small models of the kinds that people have, beside Keras `fit`: a matrix, in docs/keras_matrix.md.

    python tests/programs/fit_matrix.py --rows=gan,vae --families=keras --columns=fit,replicas
    python tests/programs/fit_matrix.py --write  # all rows, into the page; with --rows only these

Each cell is "right", with the largest relative difference; "refused", with what the error says first; or "differs",
with the sentence of docs/from_keras_differences.md that says so. Anything else is wrong, and the exit code is 1.
"""

import argparse
import dataclasses
import importlib
import inspect
import pathlib
import re
import sys
import tempfile

if __name__ == "__main__":
    TESTS = pathlib.Path(__file__).absolute().parents[1]
    sys.path[:0] = [str(TESTS.parent), str(TESTS), str(TESTS / "helpers")]

import fit_hub
import fit_models
import fit_packages
import fit_programs
import fit_rows
import fit_steps
import keras
import keras_scripts
import numpy as np
import tensorflow as tf
from conftest import make_strategy

import looplib
from looplib.base.messages import gist
from looplib.compat import keras as compat_keras

DOCS = pathlib.Path(__file__).parents[2] / "docs"
PAGE, SAYS = DOCS / "keras_matrix.md", DOCS / "from_keras_differences.md"
COLUMNS = {
    "fit": "one replica, against `fit`",
    "replicas": "two replicas, against `fit` on one device",
    "resumed": "resumed, against uninterrupted",
    "export": "export, against the model in memory",
}
SCRIPTS = {
    name: fit_rows.Row(name, script.__doc__.splitlines()[0].rstrip("."), script)
    for name, script in keras_scripts.SCRIPTS.items()
}
# Keras 3 averages the loss of one of several outputs over batches, and their size varies in a data set.
PER_OUTPUT = "| losses of single outputs on several replicas (Keras 3) |"
SCRIPTS["multi_output"] = dataclasses.replace(
    SCRIPTS["multi_output"], not_compared={"price_loss": PER_OUTPUT, "kind_loss": PER_OUTPUT}
)
SCRIPTS["autoencoder"] = dataclasses.replace(SCRIPTS["autoencoder"], said={"replicas": fit_models.STATISTICS})
_NAMES = list(fit_models.ROWS)
_LOSSES = _NAMES[: _NAMES.index("normalization")]
PARTS = {  # of the matrix: what it says about itself, and its rows
    "Whole programs": (
        "Small programs as people write them, such as a classifier of digits or a recommender.",
        SCRIPTS,
    ),
    "Losses and metrics": (
        "Models with a special loss or metric, such as a masked or summed loss.",
        {name: fit_models.ROWS[name] for name in _LOSSES},
    ),
    "Layers, optimizers and data": (
        "Models with a special layer, optimizer or kind of data, such as batch normalization, clipping or ragged tensors.",
        {name: row for name, row in fit_models.ROWS.items() if name not in _LOSSES},
    ),
    "Training steps of their own": (
        "Models with a `train_step` or `compute_loss` of their own, such as GANs and autoencoders.",
        fit_steps.ROWS,
    ),
    "KerasHub, KerasRS, adapters and distillation": (
        "Small models of KerasHub and KerasRS with random weights, with adapters (LoRA), int8 kernels, or a `Distiller`.\n"
        "[Train models of KerasHub](keras_hub.md) shows how to use them.",
        fit_hub.ROWS,
    ),
    "Public example programs": (
        "Small models in the manner of public example programs of Keras, TensorFlow, TensorFlow Recommenders,\n"
        "TensorFlow Model Optimization and TensorFlow Hub.",
        {**fit_programs.ROWS, **fit_packages.ROWS},
    ),
}
ROWS = {name: row for _, rows in PARTS.values() for name, row in rows.items()}
assert len(ROWS) == sum(len(rows) for _, rows in PARTS.values())  # no name twice
FIRST, LAST = "<!-- the matrix -->\n", "<!-- its end -->\n"
NOT_OF_FIT = ("epoch", "steps_per_second", "val_examples")
RIGHT, REFUSED, DIFFERS, WRONG = "right", "refused", "differs", "**wrong**"


def cells_of(row, family, columns, folder):
    """Returns the cells of a row, by column.

    Args:
      row: `fit_rows.Row`.
      family: the module of Keras.
      columns: some of `COLUMNS`.
      folder: a `pathlib.Path` for run directories.
    """
    program = _Program(row, family, folder)
    return {column: program.cell(column) for column in columns}


class _NotMadeError(Exception):
    """Keras refuses to make a model under a strategy."""


class _Program:
    """Trainings of a row's model, each made only once.

    Args:
      row: `fit_rows.Row`.
      family: the module of Keras.
      folder: a `pathlib.Path` for run directories.
    """

    def __init__(self, row, family, folder):
        for package in row.needs:  # now: an import may draw random numbers
            importlib.import_module(package)
        self._row, self._keras, self._folder = row, importlib.import_module(family), folder
        self._fitted = self._whole = None

    def cell(self, column):
        """Returns the text of a cell."""
        try:
            differences = getattr(self, f"_{column}")()
        except _NotMadeError as error:
            return f"{REFUSED}: by Keras, when the model is made: {_one_line(error)}"
        except looplib.UsageError as error:
            what = re.split(r"; | \(|: ", _one_line(error).replace(str(self._folder), "DIR"), maxsplit=1)[0]
            return f"{REFUSED}: {what}"  # the rest says what to do
        except Exception as error:  # a crash of any kind is no refusal
            return f"{WRONG}: {type(error).__name__}: {_one_line(gist(error))}"
        allowed = self._row.tolerance if column in ("fit", "replicas") else 1e-5
        largest = max(differences.values())
        if largest <= allowed:
            return f"{RIGHT} ({largest:.0e})" if largest else RIGHT
        worst = ", ".join(f"{name} by {value:.2g}" for name, value in differences.items() if value > allowed)
        sentence = self._row.said.get(column, "")
        about_metrics = sentence.startswith("A metric")
        if sentence and _is_said(sentence) and not (about_metrics and "weights" in worst):
            return f"{DIFFERS} ({worst}): {sentence.strip('| ')}"
        return f"{WRONG}: {worst}"

    def build(self, first=True):
        """Returns the model and the arguments of `fit`, always with the same first weights."""
        if self._keras.__name__ == "tf_keras":
            self._keras.backend.experimental.enable_tf_random_generator()  # as binaries do
        self._keras.utils.set_random_seed(3)
        model, arguments = self._row.build(self._keras)
        if self._row.prepare:
            self._row.prepare(model, first)
        return model, arguments

    def _fit(self):
        return self._beside_fit(*self._uninterrupted())

    def _replicas(self):
        return self._beside_fit(*self.trained("mirrored_x2"))

    def _resumed(self):
        expected_model, expected = self._uninterrupted()
        self.trained("default", "resumed", epochs=1.5)
        model, reports = self.trained("default", "resumed", first=False)
        expected = {name: values[-1:] for name, values in expected.items() if name not in NOT_OF_FIT}
        reports = {name: values[-1:] for name, values in reports.items()}
        return {"weights": _largest(_weights(model), _weights(expected_model)), **_histories(reports, expected)}

    def _uninterrupted(self):
        """Returns the model and the reports of a training in one piece, whose run directory is "whole"."""
        if not self._whole:
            self._whole = self.trained("default", "whole")
        return self._whole

    def _export(self):
        trained, _ = self._uninterrupted()
        self._keras.backend.clear_session()
        model, arguments = self.build(first=False)
        trainer = self._trainer(model, arguments)
        with looplib.Controller(
            looplib.RunConfig(global_batch_size=fit_rows.BATCH),
            trainer=trainer,
            model_dir=self._folder / "whole",
            writers=[],
        ) as controller:
            path = pathlib.Path(controller.export(self._folder / "export"))
        loaded = tf.saved_model.load(path / "saved_model")
        x = arguments["x"]
        if preprocess := compat_keras.preprocessing(model):
            x, _, _ = self._keras.utils.unpack_x_y_sample_weight(preprocess(tf.nest.map_structure(tf.constant, x)))
        x = _first_batch(x, trainer.export().signature)
        expected = tf.nest.flatten(trained(x, training=False))
        differences = {"outputs": _largest(tf.nest.flatten(loaded.serve(x)), expected)}
        if (path / "model.keras").exists():
            again = self._keras.models.load_model(path / "model.keras", compile=False)
            differences["model.keras"] = _largest(tf.nest.flatten(again(x, training=False)), expected)
        return differences

    def _trainer(self, model, arguments):
        trainer = looplib.KerasTrainer(model, **arguments, shuffle=False)
        for name, value in self._row.settings.items():
            setattr(trainer, name, value)
        return trainer

    def _beside_fit(self, model, reports):
        if not self._fitted:
            fitted, arguments = self.build()
            batch = {} if isinstance(arguments["x"], tf.data.Dataset) else {"batch_size": fit_rows.BATCH}
            history = fitted.fit(**arguments, **batch, epochs=fit_rows.EPOCHS, shuffle=False, verbose=0).history
            self._fitted = _weights(fitted), history
        weights, history = self._fitted
        before = model.get_weights() if self._row.after else None
        if self._row.after:
            self._row.after(model)
        history = {name: values for name, values in history.items() if not _is_said(self._row.not_compared.get(name))}
        differences = {"weights": _largest(_weights(model), weights), **_histories(reports, history)}
        if before:
            model.set_weights(before)  # other columns compare with them
        return differences

    def trained(self, strategy, name=None, epochs=fit_rows.EPOCHS, first=True):
        """Returns the model and the reports of a training by looplib.

        Args:
          strategy: name of a strategy.
          name: of the run directory; None for none.
          epochs: where it ends, in epochs.
          first: whether it is the first program of its run.
        """
        self._keras.backend.clear_session()  # names as in a new process
        reports = {}

        def note(event):
            for metric, value in event.metrics.items():
                reports.setdefault(metric if event.split == "train" else f"val_{metric}", []).append(value)

        strategy = make_strategy(strategy)
        with strategy.scope():
            try:
                model, arguments = self.build(first)
            except ValueError as error:
                raise _NotMadeError(gist(error)) from error
            trainer = self._trainer(model, arguments)
        with looplib.Controller(
            looplib.RunConfig(global_batch_size=fit_rows.BATCH),
            trainer=trainer,
            evaluator=trainer.evaluator() if "validation_data" in arguments else None,
            strategy=strategy,
            writers=[],
            actions=[note],
            model_dir=self._folder / name if name else None,
        ) as controller:  # fmt: skip
            train = controller.train_and_evaluate if "validation_data" in arguments else controller.train
            train(epochs=epochs)
        return model, reports


def _is_said(sentence):
    """Returns whether docs/from_keras_differences.md has a sentence; None is none."""
    return sentence is not None and sentence in " ".join(SAYS.read_text().split())


def _first_batch(x, signature):
    """Returns the inputs of the first batch, in the types of a signature."""
    if isinstance(x, tf.data.Dataset):
        element = next(iter(x))
        return element[0] if isinstance(element, tuple) else element
    specs = tf.nest.flatten(signature)
    flat = [tf.constant(part[: fit_rows.BATCH]) for part in tf.nest.flatten(x)]
    return tf.nest.pack_sequence_as(x, [tf.cast(part, spec.dtype) for part, spec in zip(flat, specs, strict=True)])


def _weights(model):
    """Returns the weights of a model as arrays; those of tf_keras's list have its metrics too."""
    others = {id(variable) for metric in model.metrics for variable in metric.variables}
    held = [weight for weight in model.weights if isinstance(weight, (tf.Variable, keras.Variable))]  # no vocabularies
    return [tf.convert_to_tensor(weight).numpy() for weight in held if id(weight) not in others]


def _histories(found, expected):
    return {
        name: _largest([found[name]], [values]) if len(found.get(name, [])) == len(values) else np.inf
        for name, values in expected.items()
    }


def _largest(found, expected):
    """Returns the largest difference of two lists of arrays, each relative to the largest value of its array."""
    assert len(found) == len(expected), f"{len(found)} arrays in place of {len(expected)}"
    largest = 0.0
    for one, other in zip(found, expected):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        assert one.shape == other.shape, f"shape {one.shape} in place of {other.shape}"
        if one.size:
            difference = np.max(np.abs(one - other)) / max(np.max(np.abs(other)), 1e-3)
            largest = max(largest, float(difference) if np.isfinite(difference) else np.inf)
    return largest


def _one_line(error):
    return " ".join(str(error).split()).replace("|", "\\|")


def line_of(row, family, cells):
    """Returns the line of a table."""
    name = f"`{row.name}`" + ("" if family == "keras" else " (tf_keras)")
    return f"| {name} | {row.text} | " + " | ".join(cells.get(column, "") for column in COLUMNS) + " |"


def head():
    """Returns the first lines of the table."""
    titles = ["model", "", *COLUMNS.values()]
    return ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]


def names_in(text):
    """Returns the lines of a table by the names of their models."""
    return {match[1]: match[0] for match in re.finditer(r"^\| (`\w+`(?: \(tf_keras\))?) \| .*$", text, re.MULTILINE)}


def cells_of_page(row, family):
    """Returns the cells that the page has of a row, by column."""
    (name,) = names_in(line_of(row, family, {}))
    return dict(zip(COLUMNS, names_in(PAGE.read_text())[name].removesuffix(" |").split(" | ")[2:]))


def every():
    """Returns the pairs of a row and a family, in the order of the tables."""
    return [(row, family) for row in ROWS.values() for family in row.families]


def write(lines):
    """Puts lines into the page, in place of those of the same models, and their numbers."""
    before, rest = PAGE.read_text().split(FIRST)
    tables, after = rest.split(LAST)
    known = {**names_in(tables), **names_in("\n".join(lines))}
    counts, parts = ["| models | number | right | refused | differs |", "|---" * 5 + "|"], []
    for title, (text, rows) in PARTS.items():
        order = [next(iter(names_in(line_of(row, family, {})))) for row in rows.values() for family in row.families]
        found = [known[name] for name in order if name in known]
        parts.append("\n".join([f"### {title}", "", text, "", *head(), *found, ""]))
        numbers = [len(found), *("".join(found).count(f"| {kind}") for kind in (RIGHT, REFUSED, DIFFERS))]
        anchor = re.sub("[^a-z ]", "", title.lower()).replace(" ", "-")
        counts.append(f"| [{title}](#{anchor}) | " + " | ".join(map(str, numbers)) + " |")
    PAGE.write_text(before + FIRST + "\n".join([*counts, "", *parts]) + LAST + after)


def main():
    parser = argparse.ArgumentParser(
        description=inspect.cleandoc(__doc__), formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--families", default=",".join(fit_rows.BOTH))
    parser.add_argument("--columns", default=",".join(COLUMNS))
    parser.add_argument("--write", action="store_true", help="put the lines into the page")
    flags = parser.parse_args()
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    lines, wrong = [], 0
    rows = flags.rows.split(",")
    for row, family in every():
        if row.name in rows and family in flags.families.split(","):
            with tempfile.TemporaryDirectory() as folder:
                cells = cells_of(row, family, flags.columns.split(","), pathlib.Path(folder))
            wrong += sum(WRONG in cell for cell in cells.values())
            lines.append(line_of(row, family, cells))
            print(lines[-1], flush=True)
            importlib.import_module(family).backend.clear_session()
    if flags.write:
        write(lines)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()

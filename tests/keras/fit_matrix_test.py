"""Models of the kinds that people train with `fit` are right in looplib, or refused: docs/keras_matrix.md."""

import dataclasses
import itertools
import re

import fit_matrix
import pytest

FEW = (
    ("plain_step", "keras", ("fit", "replicas", "export")),
    ("gan", "keras", ("fit", "replicas")),
    ("scalar_loss", "keras", ("fit", "replicas")),
    ("own_metric", "keras", ("fit",)),
    ("normalization", "keras", ("resumed", "export")),
    ("text_vectorization", "tf_keras", ("replicas",)),  # its vocabulary, among its weights, is no variable
    ("contrastive", "keras", ("replicas",)),
)
IN_TURNS = (("replicas",), ("fit", "resumed"), ("fit", "export"))  # each against `fit`
ALL = [  # each row, the families and columns in turns; `python tests/programs/fit_matrix.py` tries all
    pytest.param(
        row.name,
        row.families[number % len(row.families)],
        IN_TURNS[number % len(IN_TURNS)],
        marks=pytest.mark.slow,
    )
    for number, row in enumerate(fit_matrix.ROWS.values())
]


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("name, family, columns", [*FEW, *ALL])
def test_a_model_is_right_or_refused_as_the_page_says(name, family, columns, tmp_path):
    for package in (family, *fit_matrix.ROWS[name].needs):
        pytest.importorskip(package)
    row = fit_matrix.ROWS[name]
    cells, said = fit_matrix.cells_of(row, family, columns, tmp_path), fit_matrix.cells_of_page(row, family)
    kinds = [
        re.match("right|refused|differs|", cell)[0] for column in columns for cell in (cells[column], said[column])
    ]
    assert "" not in kinds and kinds[::2] == kinds[1::2], cells


def test_the_page_has_the_rows_of_the_script_and_nothing_is_wrong():
    expected = [fit_matrix.line_of(row, family, {}).split(" | ")[:2] for row, family in fit_matrix.every()]
    page = fit_matrix.PAGE.read_text()
    assert [line.split(" | ")[:2] for line in fit_matrix.names_in(page).values()] == expected
    assert fit_matrix.WRONG not in page


@pytest.mark.slow
def test_a_wrong_cell_is_found(tmp_path):
    """A training with another order of the data is not that of `fit`."""
    row, programs = fit_matrix.ROWS["scalar_loss"], itertools.count()

    def build(keras):
        model, arguments = row.build(keras)
        order = -1 if next(programs) else 1
        return model, {name: array[::order].copy() for name, array in arguments.items()}

    (cell,) = fit_matrix.cells_of(dataclasses.replace(row, build=build), "keras", ["fit"], tmp_path).values()
    assert cell.startswith(f"{fit_matrix.WRONG}: weights by ")

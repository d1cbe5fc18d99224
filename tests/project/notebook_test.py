"""docs/first_steps.ipynb runs from top to bottom, in a kernel of its own."""

import html
import json
import pathlib
import re

import nbclient
import nbformat
import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def outputs(folder):
    """The outputs of each cell of code."""
    notebook = nbformat.read(ROOT / "docs" / "first_steps.ipynb", as_version=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}}).execute()
    return [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]


def text(outputs):
    return "".join(output.text for output in outputs if output.output_type == "stream")


@pytest.mark.slow
def test_a_cell_shows_a_bar_and_the_metrics(outputs):
    _, _, first, more, *_ = outputs
    assert "100%|" in text(first) and "300/300" in text(first)
    assert text(more).count("  eval   accuracy") == 3
    assert float(json.loads(more[-1].data["text/plain"].replace("'", '"'))["accuracy"]) > 0.85


@pytest.mark.slow
def test_curves_and_the_report_are_inline(outputs, folder):
    curves, report = outputs[4], outputs[5]
    assert any("image/png" in output.get("data", {}) for output in curves)
    shown = re.fullmatch(r'<iframe srcdoc="([^"]*)" .*></iframe>', report[-1].data["text/html"], re.DOTALL)
    data = re.search(r'<script [^>]*id="data">(.*?)</script>', html.unescape(shown[1]), re.DOTALL)
    (run,) = json.loads(data[1])["runs"]
    assert run["step"] == 600  # of the training before it, which was short
    assert (folder / "first_steps" / "report.html").stat().st_size > 10_000


@pytest.mark.slow
def test_an_interrupted_cell_says_where_it_stopped_and_the_next_continues_there(outputs, folder):
    (error,) = [output for output in outputs[6] if output.output_type == "error"]
    assert error.ename == "Preempted", "\n".join(error.traceback)
    assert "at step 700, saved in" in error.evalue
    assert "To exit" not in text(outputs[6])  # advice of IPython that would end the kernel
    assert "from step 700" in text(outputs[7])
    records = [json.loads(line) for line in (folder / "first_steps" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["split"] == "train"] == list(range(20, 901, 20))

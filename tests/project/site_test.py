"""The site of docs/ has every page, every public name, and every kind of error."""

import ast
import inspect
import os
import pathlib
import re
import subprocess
import sys

import pytest
import yaml

import looplib
from looplib import errors

ROOT = pathlib.Path(__file__).parents[2]


def navigation():
    """The files that the navigation of mkdocs.yml names."""

    def files(entry):
        parts = entry.values() if isinstance(entry, dict) else entry
        return [entry] if isinstance(entry, str) else [file for part in parts for file in files(part)]

    return files(yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.BaseLoader)["nav"])


def test_the_navigation_names_each_page_once():
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(navigation()) == sorted(pages)


def test_the_index_leads_to_each_guide():
    """Directly, or by a page that it names: the second page of a subject is linked from the first."""
    docs, found, left = ROOT / "docs", set(), ["index.md"]
    while left:
        page = left.pop()
        links = re.findall(r"\]\(([\w/.]+\.md)", (docs / page).read_text()) if page not in found else []
        left += [pathlib.Path(os.path.normpath(pathlib.Path(page).parent / link)).as_posix() for link in links]
        found.add(page)
    assert set(navigation()) <= found


def test_the_api_pages_name_each_public_name_where_it_is_defined():
    text = "".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    blocks = re.findall(
        r"^::: looplib\.(\S+)\n    options: {heading: looplib\.(\S+), toc_label: \2}$", text, re.MULTILINE
    )
    assert len(blocks) == text.count(":::") - text.count("::: looplib.errors\n")  # the page that lists all of them
    assert {name: path for path, name in blocks if "." not in name} == {
        name: f"{home}.{name}" for name, home in looplib._HOMES.items()
    }


def one_line(text):
    return " ".join(text.split())


def messages(kind):
    """Returns what the code raises as an error of a kind, as regular expressions, in which any text is a value."""

    def pattern(part):
        if isinstance(part, ast.JoinedStr):
            return "".join(map(pattern, part.values))
        return re.escape(part.value) if isinstance(part, ast.Constant) and isinstance(part.value, str) else ".*"

    files = [path.read_text() for path in (ROOT / "looplib").rglob("*.py")]
    trees = [ast.parse(text) for text in files if kind in text]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    made = [call.args[0] for call in calls if kind in ast.unparse(call.func) or ast.unparse(call.func) == "kind"]
    return [found for found in map(pattern, made) if len(found.replace(".*", "")) > 20]


ERROR_PAGES = sorted((ROOT / "docs").glob("errors_*.md"))


def test_each_kind_of_error_has_one_section_that_shows_a_message_of_it():
    raised = [kind for name, kind in vars(errors).items() if isinstance(kind, type) and not name.startswith("_")]
    raised.remove(errors.UsageError)  # the base
    parts = [part.partition("\n") for page in ERROR_PAGES for part in page.read_text().split("\n## ")[1:]]
    assert sorted(heading for heading, _, _ in parts) == sorted(kind.__name__ for kind in raised)
    sections = {heading: text for heading, _, text in parts}
    for kind in raised:
        name, text = kind.__name__, sections[kind.__name__]
        meaning, *rest = text.strip().split("\n\n")
        assert one_line(meaning) == one_line(inspect.getdoc(kind).split("\n\n")[0])
        (shown,) = re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        ends = (
            "looplib: error: (.*)" + rf" \({name}\)"
            if issubclass(kind, errors.UsageError)
            else "looplib: (.*?)(?:; status of the run: done)?"
        )
        message = re.fullmatch(ends, one_line(shown))[1]
        assert any(re.fullmatch(one, message) for one in messages(name)), (name, message)
        assert re.search(r"\]\(\w[\w/]*\.md(#[\w-]*)?\)", rest[-1]), f"{name} has no link to the page about its subject"


@pytest.mark.parametrize("page", ERROR_PAGES, ids=lambda page: page.stem)
def test_a_page_about_errors_begins_with_one_that_is_caught(page):
    text = page.read_text()
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert text.index("```python") < text.index("\n## ") and len(text.encode()) < 12_000
    (caught,) = re.findall(r"except looplib\.errors\.(\w+) as error", program)
    assert f"\n## {caught}\n" in text


ARCHITECTURE = "".join(
    (ROOT / "docs" / f"{page}.md").read_text() for page in ("architecture", "architecture_paths", "extending")
)
# As many files as one opens to follow it, at most.
PATHS = {"a batch": 12, "a step count": 7, "a metric to `metrics.jsonl`": 9, "a save": 8}


@pytest.mark.parametrize("path", PATHS)
def test_the_architecture_numbers_the_files_of_a_path(path):
    section = ARCHITECTURE.split(f"## The path of {path}\n")[1].split("\n## ")[0]
    files = re.findall(r"^\d+\. `([\w/]+\.py)`", section, re.MULTILINE)
    assert len(files) == len(re.findall(r"^\d+\. ", section, re.MULTILINE)) == len(set(files)) <= PATHS[path]
    assert all((ROOT / "looplib" / file).exists() for file in files)


def test_the_architecture_names_functions_that_are_there():
    """Names that the pages say are in a file, such as `_ADVICE` in `data/causes.py`."""
    named = re.findall(r"`([A-Za-z_][\w.]*)`,? (?:of|in) `([\w/]+\.py)`", ARCHITECTURE)
    named += [
        (name, file) for file, name in re.findall(r"^\d+\. `([\w/]+\.py)`: `([\w.]+)`", ARCHITECTURE, re.MULTILINE)
    ]
    assert len(named) > 40

    def text_of(file):
        return next(path for path in (ROOT / "looplib" / file, ROOT / file) if path.exists()).read_text()

    missing = [(name, file) for name, file in named if not re.search(rf"\b{name.split('.')[-1]}\b", text_of(file))]
    assert not missing


@pytest.mark.slow
def test_the_site_is_built_without_warnings(tmp_path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "site" / "api" / "training.html").stat().st_size > 100_000
    assert '<pre class="mermaid">' in (tmp_path / "site" / "architecture.html").read_text()  # drawn, not shown as code

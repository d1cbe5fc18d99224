"""The site of docs/ has every page, and every public name."""

import os
import pathlib
import re
import subprocess
import sys

import entry_points
import pytest
import yaml

import looplib

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
    } | {name: entry_points.plug_ins("looplib.parts")[name] for name in looplib._PARTS}


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
    assert all((ROOT / "looplib" / file).exists() and not file.startswith("extras") for file in files)


def test_the_architecture_names_functions_that_are_there():
    """What the pages say is in a file, such as `_ADVICE` in `extras/diagnosis/bottleneck.py`."""
    named = re.findall(r"`([A-Za-z_][\w.]*)`,? (?:of|in) `([\w/]+\.py)`", ARCHITECTURE)
    named += [
        (name, file) for file, name in re.findall(r"^\d+\. `([\w/]+\.py)`: `([\w.]+)`", ARCHITECTURE, re.MULTILINE)
    ]
    assert len(named) > 40

    def text_of(file):
        return next(path for path in (ROOT / "looplib" / file, ROOT / file) if path.exists()).read_text()

    missing = [(name, file) for name, file in named if not re.search(rf"\b{name.split('.')[-1]}\b", text_of(file))]
    assert not missing


def test_the_site_is_built_without_warnings(tmp_path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "site" / "api" / "training.html").stat().st_size > 100_000
    assert '<pre class="mermaid">' in (tmp_path / "site" / "architecture.html").read_text()  # drawn, not shown as code

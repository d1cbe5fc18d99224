"""The packages that a user installs, and the release of them."""

import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile

import numpy
import pytest
import yaml

import looplib
from looplib.__main__ import _OWN

ROOT = pathlib.Path(__file__).parents[2]


def run(*command, **options):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=600, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copied(folder):
    """Copies what git knows of the project, so that nothing that lies beside it gets in."""
    for name in run("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT).splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """The sdist and the wheel, which is built from the sdist."""
    folder = tmp_path_factory.mktemp("packages")
    run(sys.executable, "-m", "build", "--outdir", folder / "dist", copied(folder / "project"))
    (sdist,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def installed(packages, tmp_path_factory):
    """The Python of an environment with the wheel, the packages that it needs and pytest; they are those of this one."""
    folder = tmp_path_factory.mktemp("installed") / "environment"
    venv.create(folder, with_pip=False, symlinks=True)
    site = sysconfig.get_path("purelib", vars={"base": str(folder)})
    run(sys.executable, "-m", "pip", "--quiet", "install", "--no-deps", "--target", site, packages[1])
    # A path in a .pth file: an editable looplib of that environment is not seen through it.
    pathlib.Path(site, "needed.pth").write_text(f"{pathlib.Path(numpy.__file__).parents[1]}\n")
    python = folder / "bin" / "python"
    assert site in run(python, "-c", "import looplib; print(looplib.__file__)", cwd=folder)
    return python


@pytest.mark.slow
def test_the_packages_have_what_runs_and_nothing_else(packages):
    sdist, wheel = packages
    sources = {name for name in run("git", "ls-files", "looplib", "trainers", cwd=ROOT).splitlines()}
    information = f"looplib-{looplib.__version__}.dist-info/"
    files = {name for name in zipfile.ZipFile(wheel).namelist() if not name.startswith(information)}
    assert files == sources
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames() if not archive.getmember(name).isdir()}
    made = {name for name in packed if name.startswith("looplib.egg-info/")} | {"PKG-INFO"}
    assert packed - made == sources | {"LICENSE", "README.md", "pyproject.toml", "setup.cfg"}
    run(sys.executable, "-m", "twine", "check", "--strict", *packages)


@pytest.mark.slow
def test_the_wheel_makes_a_project_that_passes_its_tests_and_has_each_command(installed, tmp_path):
    looplib_ = (installed, "-m", "looplib")
    for command in _OWN:
        assert f"looplib {command}" in run(*looplib_, command, "--help", cwd=tmp_path)
    run(*looplib_, "new", "spirals", cwd=tmp_path)
    folder = tmp_path / "spirals"
    assert "2 passed" in run(installed, "-m", "pytest", "-q", cwd=folder)
    train = (installed, "-m", "spirals.train", "--model_dir=runs/first", "--train_steps=20")
    run(*train, cwd=folder)
    assert re.search(r"first +done +20/20", run(*looplib_, "status", "runs", cwd=folder))
    run(*looplib_, "report", "runs/first", cwd=folder)
    assert "uPlot" in (folder / "runs" / "first" / "report.html").read_text()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with what a release changes, and `.ci/release`."""
    for name in (".ci/release", ".gitignore", "looplib/__init__.py", "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "a")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "a@b")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 7.8.8 (unreleased)\n\n- New.\n\n## 7.8.7 (2020-01-01)\n")
    run("git", "init", "-q", cwd=tmp_path)
    run("git", "add", ".", cwd=tmp_path)
    run("git", "commit", "-qm", "all", cwd=tmp_path)
    return tmp_path


def release(folder, version):
    return subprocess.run([sys.executable, folder / ".ci" / "release", version], capture_output=True, text=True)


def test_a_release_is_one_commit_with_its_version_and_date_and_a_tag(repository):
    done = release(repository, "7.8.9")
    assert done.returncode == 0 and "git push origin HEAD v7.8.9" in done.stdout, done.stderr
    assert run("git", "describe", "--exact-match", cwd=repository) == "v7.8.9\n"
    assert not run("git", "status", "--porcelain", cwd=repository)
    found = run(sys.executable, "-c", "import looplib; print(looplib.__version__)", cwd=repository, env={})
    assert found == "7.8.9\n"
    headings = re.findall("^## (.*)$", (repository / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert re.fullmatch(r"7\.8\.9 \(\d{4}-\d\d-\d\d\)", headings[0]) and headings[1:] == ["7.8.7 (2020-01-01)"]
    again = release(repository, "7.9.0")
    assert again.returncode == 1 and "CHANGELOG.md begins with '7.8.9 (" in again.stderr


@pytest.mark.parametrize("version, words", [("7.8", "expected one such as"), ("7.8.9", "tag v7.8.9 exists")])
def test_a_release_that_cannot_be_is_refused(version, words, repository):
    run("git", "tag", "v7.8.9", cwd=repository)
    done = release(repository, version)
    assert done.returncode == 1 and words in done.stderr and not done.stdout


def test_a_release_with_changes_that_are_not_committed_is_refused(repository):
    (repository / "new").write_text("")
    done = release(repository, "7.8.9")
    assert done.returncode == 1 and "not committed" in done.stderr and "?? new" in done.stderr
    assert not run("git", "tag", cwd=repository)


def test_the_links_of_the_published_readme_lead_to_the_files_of_the_tag(tmp_path):
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    (step,) = (step for step in jobs["build"]["steps"] if "README.md" in step.get("run", ""))
    text = (ROOT / "README.md").read_text()
    (tmp_path / "README.md").write_text(text)
    known = {"SERVER_URL": "https://host.example", "REPOSITORY": "own/er", "REF_NAME": "v7.8.9"}
    run("bash", "-e", "-c", step["run"], cwd=tmp_path, env={f"GITHUB_{name}": value for name, value in known.items()})
    found, links = (tmp_path / "README.md").read_text(), r"\]\(([^)\s]+)\)"
    assert "![" in found and all(link.startswith("https://") for link in re.findall(links, found))
    assert "(https://host.example/own/er/blob/v7.8.9/docs/gpu.md#what-was-tested)" in found
    assert re.findall(r"!\[[^]]*\]\((\S+)\)", found) == ["https://host.example/own/er/raw/v7.8.9/docs/report/kills.png"]
    assert re.sub(r"https://host\.example/own/er/(raw|blob)/v7\.8\.9/", "", found) == text


def test_a_tag_is_published_only_after_all_tests():
    """The host of the project runs this file; here it is read."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    assert {*jobs["publish"]["needs"]} == {*jobs} - {"publish"}
    assert [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})] == ["publish"]
    assert any("macos" in system for system in jobs["try"]["strategy"]["matrix"]["os"])

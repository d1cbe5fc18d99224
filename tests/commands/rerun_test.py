"""Repeating a run: bit-equal, with what differs now, or refused in a sentence."""

import json
import shutil
import subprocess
import sys

import pytest

from looplib.__main__ import main
from looplib.errors import EXIT_DIFFERENT, EXIT_DONE, EXIT_UNKNOWN

SMALL = ("--config.model=mlp", "--train_steps=20", "--eval_interval=10", "--steps_per_loop=10", "--loop=eager")

PROGRAM = """
import swept
from looplib import launch

RATE = 0.1

def build(config):
    config.rate = RATE
    return swept.build(config)

if __name__ == "__main__":
    launch.run(build, swept.Config(), train_steps=10, eval_interval=10, global_batch_size=4, loop="eager")
"""


TYPED = """
import dataclasses, datetime, enum, pathlib
import swept
from looplib import launch

class Kind(enum.Enum):
    ADAM = "adam"
    SGD = "sgd"

@dataclasses.dataclass(frozen=True)
class Stage:
    rate: float = 0.1
    kind: Kind = Kind.ADAM

@dataclasses.dataclass(frozen=True)
class Config:
    rate: float = 0.0  # that of the first stage
    start: float = 0.0
    pause: float = 0.0
    noise: float = 0.1
    fails: bool = False
    stages: list[Stage] = dataclasses.field(default_factory=lambda: [Stage(), Stage(0.2)])
    rates: dict[Kind, float] = dataclasses.field(default_factory=lambda: {Kind.ADAM: 1e-4})
    folder: pathlib.Path = pathlib.Path("data")
    since: datetime.date = datetime.date(2024, 2, 29)
    words: frozenset[str] = frozenset("abcdefgh")

    def __post_init__(self):
        object.__setattr__(self, "rate", self.rate or self.stages[0].rate)

if __name__ == "__main__":
    launch.run(swept.build, Config(), train_steps=10, eval_interval=10, global_batch_size=4, loop="eager")
"""


@pytest.fixture
def forks(python, monkeypatch, nursery):
    """The command runs in forks."""
    monkeypatch.setattr(sys, "executable", python)
    monkeypatch.setenv("PYTHONPATH", nursery.environment["PYTHONPATH"])


@pytest.fixture(scope="module")
def run(nursery, tmp_path_factory):
    """A run that was resumed with more steps, from a file that is gone."""
    folder = tmp_path_factory.mktemp("rerun") / "run"
    (settings := folder.parent / "a.yaml").write_text("learning_rate: 2e-3")
    for steps in (10, 20):
        arguments = ["--config_file", str(settings), "--experiment=sgd", *SMALL, f"--train_steps={steps}", "--seed=3"]
        life = nursery.life_of("trainers.image_classification", f"--model_dir={folder}", *arguments)
        assert life.code() == 0, life.output()
    settings.unlink()
    return folder


@pytest.mark.slow
def test_a_resumed_run_is_repeated_bit_by_bit(run, forks, tmp_path, capfd):
    assert main(["rerun", str(run), f"--to={tmp_path / 'again'}"]) == EXIT_DONE
    assert "EQUAL, bit by bit" in capfd.readouterr().out
    reports = [json.loads((folder / "run.json").read_text()) for folder in (run, tmp_path / "again")]
    assert reports[0]["metrics"]["eval"] == reports[1]["metrics"]["eval"] and reports[1]["restarts"] == 0
    assert reports[1]["flags"]["seed"] == 3 and reports[0]["config"] == reports[1]["config"]
    assert [reports[1]["config"][name] for name in ("optimizer", "learning_rate")] == ["sgd", 0.002]


@pytest.mark.slow
def test_settings_of_every_kind_are_repeated(forks, python, tmp_path, capfd):
    (program := tmp_path / "typed.py").write_text(TYPED)
    flags = ["--config.stages=[{rate: 5e-1, kind: SGD}]", "--config.words=x,y,z", "--config.folder=12"]
    subprocess.run([python, program, f"--model_dir={tmp_path / 'run'}", *flags], check=True, cwd=tmp_path)
    assert main(["rerun", str(tmp_path / "run")]) == EXIT_DONE
    assert "setting " not in capfd.readouterr().out
    config = json.loads((tmp_path / "run-rerun" / "run.json").read_text())["config"]
    assert config["rate"] == 0.5 and config["words"] == ["x", "y", "z"] and config["folder"] == "12"


def changed(run, tmp_path, **values):
    """Returns a copy of a run directory with other values in its report, and the report."""
    copy = shutil.copytree(run, tmp_path / "copy")
    report = json.loads((run / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps({**report, **values}))
    return copy, report


@pytest.mark.slow
def test_another_version_is_named_and_another_number_found(run, forks, tmp_path, capfd):
    copy, report = changed(run, tmp_path)
    report["versions"]["numpy"] = "1.0"
    report["metrics"]["eval"]["accuracy"] += 0.01
    (copy / "run.json").write_text(json.dumps(report))
    assert main(["rerun", str(copy)]) == EXIT_DIFFERENT
    out = capfd.readouterr().out
    assert "numpy 1.0 is now " in out and "DIFFERENT: 1 values" in out and "run.json metrics eval accuracy: " in out
    assert (tmp_path / "copy-rerun" / "run.json").exists()


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(
        ["git", "-C", folder, *identity, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.slow
def test_a_run_has_the_commit_and_the_changes_and_a_rerun_the_changes_since(python, forks, tmp_path, capfd):
    source, run = tmp_path / "source", tmp_path / "run"
    source.mkdir()
    program = source / "train.py"
    program.write_text(PROGRAM)
    git(source, "init", "-q")
    git(source, "add", ".")
    git(source, "commit", "-qm", "first")
    program.write_text(PROGRAM.replace("RATE = 0.1", "RATE = 0.2"))
    subprocess.run([python, program, f"--model_dir={run}"], check=True, cwd=tmp_path, capture_output=True)
    recorded = json.loads((run / "run.json").read_text())["program"]
    assert recorded["commit"] == git(source, "rev-parse", "HEAD") and recorded["directory"] == str(tmp_path)
    assert (run / "code.diff").read_text().strip() == git(source, "diff", "HEAD")
    assert main(["rerun", str(run), f"--to={tmp_path / 'same'}"]) == EXIT_DONE
    assert "versions and code are those of the run" in capfd.readouterr().out
    git(source, "commit", "-qam", "second")  # the code is the same
    subprocess.run([python, program, f"--model_dir={tmp_path / 'same'}"], check=True, cwd=tmp_path, capture_output=True)
    assert not (tmp_path / "same" / "code.diff").exists()  # nothing differs from the commit now
    program.write_text(PROGRAM.replace("RATE = 0.1", "RATE = 0.3"))
    assert main(["rerun", str(run)]) == EXIT_DIFFERENT
    out = capfd.readouterr().out
    assert f"git commit {recorded['commit'][:12]} is now {git(source, 'rev-parse', 'HEAD')[:12]}" in out
    assert "-+RATE = 0.2" in out and "++RATE = 0.3" in out and "eval score" in out


REFUSED = {
    "not ended": ({"status": "preempted"}, "has not ended well (it is preempted at step 20)"),
    "several processes": ({"strategy": "MultiWorkerMirroredStrategy, 2 replicas"}, "had several processes"),
    "an older looplib": (
        {"starts": [{"changed": {}}]},
        "is of a Controller without launch.run, so that it has no command to repeat",
    ),
    "changed settings": (
        {"starts": [{"changed": {"config.learning_rate": [0.1, 0.2]}}]},
        "was resumed with config.learning_rate=0.2, and had 0.1 before",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_a_run_that_no_command_repeats_is_refused(case, run, tmp_path, capsys):
    values, sentence = REFUSED[case]
    copy, _ = changed(run, tmp_path, **values)
    assert main(["rerun", str(copy)]) == EXIT_UNKNOWN
    assert sentence in capsys.readouterr().err and not (tmp_path / "copy-rerun").exists()


@pytest.mark.slow
def test_a_directory_that_is_no_run_or_not_empty_is_refused(run, tmp_path, capsys):
    assert main(["rerun", str(tmp_path)]) == EXIT_UNKNOWN
    assert "run.json cannot be read; name the run directory" in capsys.readouterr().err
    assert main(["rerun", str(run), f"--to={run.parent}"]) == EXIT_UNKNOWN
    assert "is not empty; name another directory with --to" in capsys.readouterr().err


def test_a_command_that_fails_is_code_2(run, forks, tmp_path, capfd):
    copy, report = changed(run, tmp_path)
    report["starts"][0]["command"].append("--no_such_flag")
    (copy / "run.json").write_text(json.dumps(report))
    assert main(["rerun", str(copy)]) == EXIT_UNKNOWN
    assert "looplib: error: the command ended with code 1" in capfd.readouterr().err

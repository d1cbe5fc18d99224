"""Run directories of others under `replay`, `diff`, `rerun` and `export`: nothing is started that the user cannot know of."""

import json
import os
import re
import shutil
import time

import pytest
from replay import replay_test

from looplib.__main__ import main
from looplib.base import orders
from looplib.errors import EXIT_DONE, EXIT_UNKNOWN
from looplib.replay import player

runs, forks = replay_test.runs, replay_test.forks  # fixtures: runs by name, and commands in forks


@pytest.fixture
def copy(runs, tmp_path):
    """A copy of a run of 40 steps, with a checkpoint each 20, to be forged."""
    return shutil.copytree(runs("plain")[0], tmp_path / "run")


def forge(folder, **program):
    """Changes the program of the start in `run.json`, and of the newest one."""
    report = json.loads((folder / "run.json").read_text())
    for start in [report, *report["starts"]]:
        start["program"].update(program)
    (folder / "run.json").write_text(json.dumps(report))


def tools(folder):
    """The commands that start the program of a run, and where they would write."""
    return [
        ["replay", str(folder), "--step=5"],
        ["diff", str(folder), f"{folder.parent}/other"],
        ["rerun", str(folder), f"--to={folder.parent}/again"],
        ["export", str(folder), f"{folder.parent}/exported"],
    ]


PROGRAMS = {
    "code": dict(arguments=["-c", "open({proof!r}, 'w')"]),
    "code after a module": dict(arguments=["-m", "site", "-c", "open({proof!r}, 'w')"]),
    "a flag of Python": dict(arguments=["-i", "{run}/program.py"]),
    "a relative path": dict(arguments=["program.py"], directory="{run}"),
    "a file in the run directory": dict(arguments=["{run}/program.py"]),
    "a link to a file in the run directory": dict(arguments=["{run}/../link.py"]),
    "a module in the run directory": dict(arguments=["-m", "program"], directory="{run}"),
    "a module by a link": dict(arguments=["-m", "program"], directory="{run}/../linked"),
    "a module with a path": dict(arguments=["-m", "../program"]),
    "a null byte": dict(arguments=["/usr/\0bin"]),
    "no file": dict(arguments=["/nowhere/program.py"]),
    "no directory": dict(directory="/nowhere"),
    "a file as the directory": dict(directory="/etc/passwd"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_came_with_the_run_or_is_no_file_or_module_is_not_started(name, copy, tmp_path, capfd):
    proof = tmp_path / "proof"
    (copy / "program.py").write_text(f"open({str(proof)!r}, 'w')")
    (tmp_path / "link.py").symlink_to(copy / "program.py")
    (tmp_path / "linked").symlink_to(copy)
    values = json.loads(json.dumps(PROGRAMS[name]))
    for key, value in values.items():
        places = dict(run=copy, proof=str(proof))
        values[key] = value.format(**places) if isinstance(value, str) else [one.format(**places) for one in value]
    forge(copy, **values)
    shutil.copytree(copy, tmp_path / "other")
    records = (tmp_path / "other" / "metrics.jsonl").read_text()
    (tmp_path / "other" / "metrics.jsonl").write_text(records.replace('"loss": ', '"loss": 1'))  # so that diff replays
    before = replay_test.content(copy)
    for tool in tools(copy) if name in ("code", "a file in the run directory") else tools(copy)[:1]:
        assert main(tool) == EXIT_UNKNOWN, tool
        said = capfd.readouterr().err.splitlines()[-1]
        assert re.search(
            "as the program; expected the absolute path|a program in the run directory itself|cannot be started in|"
            "ended with code [12]",
            said,
        ), (tool, said)
    assert not proof.exists() and replay_test.content(copy) == before
    assert not (tmp_path / "again").exists() and not (tmp_path / "exported").exists()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_a_run_of_another_user_is_not_started_until_it_is_copied(copy, tmp_path, capfd):
    os.chown(copy / "run.json", 65534, 65534)
    for tool in tools(copy)[:1]:
        assert main(tool) == EXIT_UNKNOWN
        assert "belongs to the user of number 65534, and says what is started; look" in capfd.readouterr().err
    again = shutil.copytree(copy, tmp_path / "again")  # as it advises
    assert main(["replay", str(again), "--step=22"]) == EXIT_DONE
    out = capfd.readouterr().out
    assert re.search(r"\S*python -m replayed .*--model_dir=\S+/run .*\(in .*\)", out), out  # says what it starts


CHECKPOINTS = {
    "a link to equal data": lambda path, spare: path.symlink_to(spare),
    "a FIFO": lambda path, spare: os.mkfifo(path),
    "a directory": lambda path, spare: path.mkdir(),
    "nothing": lambda path, spare: None,
    "other data": lambda path, spare: path.write_bytes(spare.read_bytes()[::-1]),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", CHECKPOINTS)
def test_a_checkpoint_that_is_not_intact_is_left_out(what, copy, runs, tmp_path, capfd):
    path, spare = copy / "checkpoints" / "ckpt-20.data-00000-of-00001", tmp_path / "spare"
    path.rename(spare)
    CHECKPOINTS[what](path, spare)
    (copy / "metrics.voided.jsonl").unlink(missing_ok=True)
    os.mkfifo(copy / "metrics.voided.jsonl")
    assert main(["replay", str(copy), "--step=21"]) == EXIT_DONE
    out = capfd.readouterr().out
    assert "the checkpoint of step 20 is left out: " in out and "from the start of the run to step 21" in out
    if what == "a link to equal data":
        assert main(["diff", str(runs("plain")[0]), str(copy)]) == EXIT_DONE
        out = capfd.readouterr().out
        assert "the checkpoint of step 20 is left out: " in out and "1 checkpoints of the same steps" in out


def test_the_step_that_a_replay_says_never_goes_back(tmp_path, monkeypatch):
    """A look at a step runs it several times, each from the state before it."""
    monkeypatch.setattr(player, "_NEWS_SECONDS", 0.01)

    class Stream:
        passed = skipped = 0

    class Data:
        stream = Stream()

    class Loop:
        data = Data()

    class Steps:
        loop, step = Loop(), 0

    order = orders.ReplayOrder(str(tmp_path), 12)
    monkeypatch.setenv("LOOPLIB_ORDER", str(tmp_path / "order.json"))
    said = []
    with player._telling(Steps, order):
        for step in (10, 11, 12, 11, 12, 11, 12):
            Steps.step = step
            time.sleep(0.05)
            said.append(int(orders.news(str(tmp_path / "order.json")).split()[2]))
    assert said == sorted(said) and said[-1] == 12

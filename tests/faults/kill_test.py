"""SIGKILL at random moments of every phase: the run that is started again ends as one that was never killed."""

import collections
import concurrent.futures
import glob
import json
import os
import pathlib
import random
import re
import signal
import time

import board
import numpy as np
import pytest
import tensorflow as tf
from conftest import more, repetitions

from looplib.commands.compare import compare
from looplib.run import commits
from looplib.run.records import read_jsonl

STEPS = 40
COMMON = [
    f"--train_steps={STEPS}",
    "--config.state_mb=6", "--config.slow_step=0.004", "--config.slow_evaluation=0.005", "--config.slow_save=0.005",
    "--config.slow_restore=0.03", "--config.extra_metrics=150",
]  # fmt: skip
RUNS = {
    "tf_keras, indices": ["--config.keras=tf_keras"],
    "keras, pipeline, two devices": ["--config.data=pipeline", "--num_virtual_devices=2"],
    "tf_keras, pipeline": ["--config.keras=tf_keras", "--config.data=pipeline"],
}
# What a kill waits for, and the most seconds that it then lets pass.
AIMS = {"start": 2.0, "step": 0.02, "save": 0.06, "report": 0.03, "evaluate": 0.03, "restore": 0.03}
# What the kills of each run aim at; all runs together aim at everything. The first two leave checkpoints behind, for a
# restore to have something to do.
KILLS = {
    "tf_keras, indices": ["step", "save", "report", "restore"],
    "keras, pipeline, two devices": ["save", "step", "evaluate", "restore"],
    "tf_keras, pipeline": ["step", "save", "start", "save"],
}
# By default one run has the kills that differ most.
FEW = {"keras, pipeline, two devices": ["save", "restore"]}


@pytest.fixture(scope="module")
def table():
    """Counts what the kills have struck, and prints it at the end."""
    struck = collections.Counter()
    yield struck
    print("\nkills by what they have struck:", dict(sorted(struck.items())), "in all", sum(struck.values()))
    if path := os.environ.get("FAULTS_TABLE"):
        pathlib.Path(path).write_text(json.dumps(struck))


def saved_step(folder):
    done = commits.newest(os.path.join(folder, "checkpoints"))
    return done.step if done else 0


def intact_step(folder):
    """The step of the newest checkpoint that is whole."""
    done = commits.newest_intact(str(folder / "checkpoints"), tidy=False)
    return done.step if done else 0


def unfinished(folder):
    """The files of a save under way, and whether it has come to its marker."""
    names = os.listdir(folder / "checkpoints") if (folder / "checkpoints").is_dir() else []
    marked = {name.split(".")[0] for name in names if name.endswith(".commit")}
    found = [name for name in names if re.match(r"ckpt-\d+[._]", name) and re.split(r"[._]", name)[0] not in marked]
    return found or [name for name in names if name.endswith(".new")]


def reach(life, folder, aim, chance, from_step):
    """Waits until a life is in the phase that is aimed at, after some steps, and some time more."""
    first, seconds = None, chance.random() * AIMS[aim]
    while not life.ended():
        number, what = life.note()
        first = number if first is None else first
        if aim == "start" or (aim == "restore" and what == aim):
            break
        if aim == "save" and unfinished(folder) and number > 1 and what not in ("start", "build"):
            if saved_step(folder) >= from_step:
                break
        elif what == aim and saved_step(folder) >= from_step:
            break
        time.sleep(0.002)  # shorter pauses would cost half a core
    life.ended(seconds)


def strike(life, folder, aim, chance, from_step):
    """Kills a life in the phase that is aimed at, after some steps; returns what it has struck, or "" if it ended."""
    reach(life, folder, aim, chance, from_step)
    note = life.note()[1]
    life.kill()
    if life.code() != -signal.SIGKILL:
        return ""
    left = unfinished(folder)
    during = " while a save was being written" if left and note not in ("start", "build", "restore") else ""
    return {"start": "start", "build": "start", "report": "report or schedule"}.get(note, note) + during


def events(folder):
    """All scalars that TensorBoard shows: list of (split, tag, step, value)."""
    found = []
    for place in sorted({os.path.dirname(path) for path in glob.glob(f"{folder}/**/*tfevents*", recursive=True)}):
        split = os.path.relpath(place, folder)
        for event in board.events(place):
            for value in event.summary.value:
                if value.tag != "steps_per_second" and not value.tag.startswith("_hparams_/"):
                    number = np.asarray(tf.make_ndarray(value.tensor)).item()
                    found.append((split, value.tag, event.step, number))
    return sorted(found)


def records(folder):
    """The lines of metrics.jsonl in their order, without times."""
    return [
        {key: value for key, value in record.items() if key != "steps_per_second"}
        for record in read_jsonl(str(folder / "metrics.jsonl"))
    ]


def kill_again_and_again(nursery, number, name, aims, parent):
    """Runs once undisturbed, beside it once with kills; returns the directories and [(aim, what it struck, saved step)]."""
    arguments = [*COMMON, *RUNS[name]]
    whole, killed = parent / "whole", parent / "killed"
    undisturbed = nursery.life(whole, *arguments)
    chance = random.Random(number)
    first, middle = aims[:2], aims[2:]
    chance.shuffle(middle)
    struck = []
    for i, aim in enumerate(first + middle):
        saved = saved_step(killed)
        from_step = saved + int(chance.random() * (STEPS - 8 - saved) / (len(aims) - i))
        if aim in ("step", "save") and i < 2:
            from_step = max(from_step, 4)
        what = strike(nursery.life(killed, *arguments), killed, aim, chance, from_step)
        kept = saved_step(killed)
        assert kept >= saved and kept == intact_step(killed)
        if what:
            struck.append((aim, what, kept))
    last = nursery.life(killed, *arguments)
    for life in (last, undisturbed):
        assert life.code() == 0, life.output()
    assert f"restored step {kept} from " in last.output()
    return whole, killed, struck


def aims_of(name):
    return repetitions(FEW.get(name), KILLS[name])


@pytest.fixture(scope="module")
def killed_runs(nursery, cases, tmp_path_factory):
    """All runs, two at a time, as many as the smallest machine has cores: dict from name to a future."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return {
            name: pool.submit(
                kill_again_and_again, nursery, number, name, aims_of(name), tmp_path_factory.mktemp("kills")
            )
            for number, name in enumerate(RUNS)
            if name in cases("name")
        }


@pytest.mark.parametrize("name", [*FEW, *more(name for name in RUNS if name not in FEW)])
def test_a_run_killed_again_and_again_ends_as_one_that_was_not(name, killed_runs, table):
    whole, killed, struck = killed_runs[name].result()
    print(name, struck)
    table.update(what for _, what, _ in struck)
    assert len(struck) >= len(aims_of(name)) - 1, struck
    result = compare(whole, killed)
    assert result.differences == [] and result.examples and result.records == STEPS // 5 + STEPS // 20
    assert records(killed) == records(whole)
    scalars = events(killed)
    assert len({scalar[:3] for scalar in scalars}) == len(scalars)
    assert scalars == events(whole)
    run = json.loads((killed / "run.json").read_text())
    assert run["status"] == "done" and 1 <= run["restarts"] <= len(struck) + 1


@pytest.mark.slow  # the run above loses none
def test_no_kill_loses_a_committed_checkpoint_that_is_to_be_kept(nursery, table, tmp_path):
    """A start finds what the life before it had committed, and half a save is never taken for one."""
    folder, chance, steps = tmp_path / "run", random.Random(9), STEPS
    arguments = [*COMMON, "--config.state_mb=24", "--checkpoint_interval=1", "--config.slow_step=0", "--mode=train"]
    arguments += ["--config.noisy=False", "--loop=eager", f"--train_steps={steps}"]
    for _ in range(5):
        before = saved_step(folder)
        what = strike(nursery.life(folder, *arguments), folder, "save", chance, min(before + 4, steps - 10))
        assert what
        table[what] += 1
        kept = saved_step(folder)
        assert intact_step(folder) == kept >= before
    life = nursery.life(folder, *arguments)
    assert life.code() == 0, life.output()
    assert f"restored step {kept} from " in life.output()

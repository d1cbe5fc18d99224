"""Back to any step of a run: its batch, its numbers and its bad op; and the step at which two runs part."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import replayed
import tensorflow as tf
from ordered import ordered

import looplib
from looplib.__main__ import main
from looplib.errors import EXIT_DIFFERENT, EXIT_DONE, EXIT_UNKNOWN
from looplib.processes import child
from looplib.run.status import read_status

BAD = 37
HANGS = 15
RUNS = {
    "plain": [[]],
    "bad": [[f"--config.nan_at={BAD}"]],
    "changed": [[f"--config.change_at={BAD}"]],
    "xla": [["--loop=xla"]],
    "tf_keras": [["--config.kind=tf_keras"]],
    "tf_keras_changed": [["--config.kind=tf_keras", f"--config.change_at={BAD}"]],
    "actions": [["--config.kind=actions", "--profile=13:5"]],
    "slow": [["--train_steps=20", "--config.waits=0.05", f"--config.hangs_again_at={HANGS}", "--stall_limit=3"]],
    "other_rate": [["--train_steps=20"], ["--config.rate=0.06"]],  # from step 21 on
    "other_size": [["--train_steps=20"], ["--global_batch_size=16"]],
}


@pytest.fixture(scope="module")
def runs(nursery, tmp_path_factory):
    """The directory of each of `RUNS`, once it is asked for, and the last line of its output."""
    folder, done = tmp_path_factory.mktemp("replay"), {}

    def run(name):
        if name not in done:
            for arguments in RUNS[name]:
                life = nursery.life_of(
                    "replayed", f"--model_dir={folder / name}", "--train_steps=40", *arguments,
                    environment=ordered(example_checksums=name != "xla"),  # XLA has no op for it
                )  # fmt: skip
                assert life.code() == (name == "bad"), life.output()
            done[name] = folder / name, life.output().splitlines()[-1]
        return done[name]

    return run


@pytest.fixture(autouse=True)
def forks(python, monkeypatch, nursery):
    """The commands run in forks."""
    monkeypatch.setattr(sys, "executable", python)
    monkeypatch.setenv("PYTHONPATH", nursery.environment["PYTHONPATH"])


def content(folder):
    """Every name below a folder with its time and a checksum."""
    files = (path for path in sorted(folder.rglob("*")))
    return {
        str(path): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "")
        for path in files
    }


def ids_of(step):
    """The ids of the examples of a step, by the sequence that a run of its own draws."""
    context = looplib.InputContext(
        global_batch_size=8, num_replicas=1, pipeline_index=0, num_pipelines=1, seed=0, training=True, start_step=0
    )
    return list(context.indices(50).take(step).as_numpy_iterator())[-1]


@pytest.mark.slow
def test_a_halted_run_names_the_command_that_shows_the_bad_op_and_its_batch(runs, tmp_path, capfd):
    folder, last = runs("bad")
    assert f"; python -m looplib replay {folder} --step={BAD} shows that step; " in last
    report = json.loads((folder / "run.json").read_text())  # though the loop has gone on to its end
    assert report["step"] == report["starts"][-1]["step"] == read_status(str(folder)).step == BAD
    before = content(folder)
    assert main(["replay", str(folder), f"--step={BAD}", f"--save={tmp_path / 'batch.npz'}"]) == EXIT_DONE
    assert content(folder) == before
    out = capfd.readouterr().out
    assert re.search(
        r"first op whose output is not finite: Log, float32 \[8\], 8 NaN\n  \S*replayed.py:\d+: .*bad op", out
    )
    assert f"equal, bit by bit, to what the run reported at step {BAD - 7}" in out and re.search(
        r"\n  loss +nan\n", out
    )
    with np.load(tmp_path / "batch.npz") as batch:
        assert batch["example_ids"].tolist() == ids_of(BAD).tolist()
        np.testing.assert_array_equal(batch["0"], replayed.X[ids_of(BAD)])
        assert set(batch["2"]) == {BAD}


@pytest.mark.slow
def test_the_loss_and_the_norms_of_a_step_are_those_of_numpy(runs, capfd):
    folder, _ = runs("plain")
    assert main(["replay", str(folder), "--step=21"]) == EXIT_DONE
    out = capfd.readouterr().out
    reader = tf.train.load_checkpoint(str(folder / "checkpoints" / "ckpt-20"))
    key = "optimizer/_trainable_variables/{}/.ATTRIBUTES/VARIABLE_VALUE"
    hidden, bias, last, offset = (reader.get_tensor(key.format(number)) for number in range(4))
    x, y = replayed.X[ids_of(21)], replayed.Y[ids_of(21)]
    active = np.maximum(x @ hidden + bias, 0)
    error = active @ last + offset - y
    outer = 2 * error / 8
    inner = (outer @ last.T) * (active > 0)
    gradients = {
        "dense/kernel": x.T @ inner,
        "dense/bias": inner.sum(0),
        "last/kernel": active.T @ outer,
        "last/bias": outer,
    }
    assert float(re.search(r"\n  loss +(\S+)\n", out)[1]) == pytest.approx(np.square(error).mean(), rel=1e-5)
    for name, gradient in gradients.items():
        norm = np.linalg.norm(gradient.sum(0) if name == "last/bias" else gradient)
        assert float(re.search(rf"{name} +(\S+)", out)[1]) == pytest.approx(norm, rel=1e-3), name
    assert "no op of the step has an output that is not finite" in out
    last = "the run did not report step 21, and the replay began at the checkpoint of step 20, so there is nothing to"
    assert last in out.splitlines()[-1]


@pytest.mark.slow
def test_the_last_line_says_where_a_replay_began_and_which_reports_it_compared(runs, capfd):
    folder, _ = runs("plain")
    assert main(["replay", str(folder), "--step=3"]) == EXIT_DONE
    last = "did not report any of the steps 1 to 3, and the replay began at step 0, without a checkpoint, so there is"
    assert last in capfd.readouterr().out.splitlines()[-1]
    assert main(["replay", str(folder), "--step=20"]) == EXIT_DONE
    last = capfd.readouterr().out.splitlines()[-1]
    assert last == "equal, bit by bit, to what the run reported at steps 10, 20"
    assert main(["replay", str(folder), "--step=30", "--eager"]) == EXIT_DONE
    last = capfd.readouterr().out.splitlines()[-1]
    assert last.endswith(
        "at the checkpoint of step 20; a step that runs op by op is not compared with what the run reported"
    )


@pytest.mark.slow
def test_a_step_of_tf_keras_is_replayed_with_its_dropout_and_gradients(runs, capfd):
    assert main(["replay", str(runs("tf_keras")[0]), "--step=31"]) == EXIT_DONE
    out = capfd.readouterr().out
    assert "equal, bit by bit, to what the run reported at step 30" in out
    rows = re.findall(r"\n  (?:dense|last)/(?:kernel|bias) +(\S+) +(\S+) ", out)
    assert len(rows) == 4
    for gradient, update in rows:  # of SGD
        assert float(update) == pytest.approx(0.05 * float(gradient), rel=1e-3)


@pytest.mark.slow
def test_runs_of_tf_keras_part_at_the_step_of_one_changed_example(runs, capfd):
    assert main(["diff", str(runs("tf_keras")[0]), str(runs("tf_keras_changed")[0])]) == EXIT_DIFFERENT
    assert f"the runs part at step {BAD}, first in the examples\n" in capfd.readouterr().out


@pytest.mark.slow
def test_a_run_with_averages_a_profile_and_a_reduced_rate_is_replayed(runs, capfd):
    assert main(["replay", str(runs("actions")[0]), "--step=25"]) == EXIT_DONE
    assert main(["replay", str(runs("actions")[0]), "--step=30"]) == EXIT_DONE
    out = capfd.readouterr().out
    assert "averages: average/" in out and "equal, bit by bit, to what the run reported at step 30" in out


@pytest.mark.slow
def test_a_replay_of_a_run_in_xla_has_its_numbers_up_to_rounding(runs, capfd):
    assert main(["replay", str(runs("xla")[0]), "--step=30"]) == EXIT_DONE
    out = capfd.readouterr().out
    assert (
        "equal, up to rounding (0.0001), to what the run reported at step" in out
        and "is not the one of a replay" in out
    )


@pytest.mark.slow
def test_a_loss_that_was_another_one_is_found(runs, tmp_path, capfd):
    """The replay has the bits that the run had reported before its record was changed."""
    copy = shutil.copytree(runs("plain")[0], tmp_path / "copy")
    records = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    record = next(record for record in records if record["step"] == 30)
    reported, record["loss"] = record["loss"], 0.25
    (copy / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert main(["replay", str(copy), "--step=30"]) == EXIT_DIFFERENT
    assert f"DIFFERENT from what the run reported at step 30: loss 0.25 then, {reported} now" in capfd.readouterr().out
    (copy / "metrics.voided.jsonl").write_text(json.dumps({**record, "loss": reported}) + "\n")
    assert main(["replay", str(copy), "--step=30"]) == EXIT_DONE  # a rollback took it back, and the replay goes there
    assert "equal, bit by bit, to what the run reported at " in capfd.readouterr().out


@pytest.mark.slow
def test_a_replay_of_data_that_waits_in_python_says_where_it_is_and_ends(runs, monkeypatch, capfd):
    monkeypatch.setattr(child, "_NEWS_SECONDS", 0.2)
    assert main(["replay", str(runs("slow")[0]), f"--step={HANGS - 3}"]) == EXIT_DONE  # the data of 3 more steps waits
    out = capfd.readouterr().out
    places = [int(place) for place in re.findall(rf"\n  at step (\d+) of {HANGS - 3} \(\d+ s\)", out)]
    assert len(set(places)) > 1 and places == sorted(places)
    assert "equal, bit by bit, to what the run reported at step 10" in out


@pytest.mark.slow
def test_a_replay_without_progress_is_ended_by_the_watchdog(runs, capfd):
    folder, _ = runs("slow")
    assert main(["replay", str(folder), f"--step={HANGS}"]) == EXIT_UNKNOWN
    lines = capfd.readouterr().err.splitlines()
    assert f"the replay of {folder} made no progress before step {HANGS}, and was ended" in lines[-1]
    assert "no progress for 3 s in the phase 'train' after " in lines[-2]


@pytest.mark.slow
def test_a_replay_that_is_ended_leaves_no_folder(runs, tmp_path, python):
    code = f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}; from looplib.__main__ import main; main()"
    command = [python, "-c", code, "replay", str(runs("slow")[0]), f"--step={HANGS}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while not list(tmp_path.glob("looplib-temporary-*/order.json.news")):  # it trains
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(30) == 128 + signal.SIGUSR1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_debugger_stops_in_the_user_s_function(runs, tmp_path, capfd):
    (tmp_path / "commands").write_text("p 'at', int(inputs[2][0])\nc\n")
    stdin = os.dup(0)
    try:
        with open(tmp_path / "commands") as commands:
            os.dup2(commands.fileno(), 0)
        assert main(["replay", str(runs("plain")[0]), "--step=23", "--eager", "--pdb"]) == EXIT_DONE
    finally:
        os.dup2(stdin, 0)
        os.close(stdin)
    out = capfd.readouterr().out
    assert "('at', 23)" in out and "loss_fn()" in out and re.search(r"\n  loss +\S+\n", out)


@pytest.mark.slow
def test_runs_part_at_the_step_of_one_changed_example(runs, capfd):
    assert main(["diff", str(runs("plain")[0]), str(runs("changed")[0])]) == EXIT_DIFFERENT
    out = capfd.readouterr().out
    assert f"setting config.change_at: 0 and {BAD}" in out
    assert "replaying both from their equal checkpoints of step 20 to step 40" in out
    assert f"the runs part at step {BAD}, first in the examples\n" in out


@pytest.mark.slow
def test_runs_part_where_a_resumed_one_has_another_learning_rate(runs, capfd):
    assert main(["diff", str(runs("plain")[0]), str(runs("other_rate")[0])]) == EXIT_DIFFERENT
    out = capfd.readouterr().out
    assert "setting config.rate: 0.05 and 0.06" in out
    assert re.search(
        r"part before step 21, first in the variables\n  variables: \S*learning_rate \(0.05\d* and 0.0\d+\)", out
    )


@pytest.mark.slow
def test_a_step_after_another_batch_size_has_the_examples_that_it_had(runs, tmp_path, capfd):
    folder, _ = runs("other_size")
    context = looplib.InputContext(
        global_batch_size=50, num_replicas=1, pipeline_index=0, num_pipelines=1, seed=0, training=True, start_step=0
    )
    stream = np.concatenate([*context.indices(50).take(10).as_numpy_iterator()])
    for step, ids in ((20, stream[19 * 8 : 20 * 8]), (30, stream[20 * 8 + 9 * 16 : 20 * 8 + 10 * 16])):
        assert main(["replay", str(folder), f"--step={step}", f"--save={tmp_path / f'{step}.npz'}"]) == EXIT_DONE
        assert f"bit by bit, to what the run reported at step{'s 10, 20' * (step == 20)}" in capfd.readouterr().out
        with np.load(tmp_path / f"{step}.npz") as batch:
            assert batch["example_ids"].tolist() == ids.tolist()
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "checkpoints" / "ckpt-20.commit").unlink()
    assert main(["replay", str(copy), "--step=30"]) == 2
    said = "had batches of 8 from step 1 on and 16 from step 21 on, and a replay from step 0 to 30 has one size"
    assert said in capfd.readouterr().err


def test_equal_runs_are_equal_as_far_as_both_go(runs, tmp_path, capsys):
    copy = shutil.copytree(runs("plain")[0], tmp_path / "copy")
    records = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(records[:-1]))
    assert main(["diff", str(runs("plain")[0]), str(copy)]) == EXIT_DONE
    out = capsys.readouterr().out
    assert "settings, versions and code are equal" in out
    assert "EQUAL up to step 40: 3 reports and 2 checkpoints of the same steps" in out


REFUSED = {
    "no step": (["--step=0"], {}, "--step is 0; expected a whole number of at least 1"),
    "several processes": (
        ["--step=5"],
        {"strategy": "MultiWorkerMirroredStrategy, 2 replicas"},
        "had several processes",
    ),
    "no debugger": (["--step=5", "--pdb"], {}, "add --eager"),
    "a file there": (["--step=5", "--save={run}/batch.npz"], {}, "is in the run directory"),
    "no program": (["--step=5"], {"starts": []}, "how the run was started: a start of the run is missing in it"),
    "no binary": (
        ["--step=5"],
        {"starts": [{"program": None}]},
        "is of a Controller without launch.run, so that it has no command to repeat; make the script a binary",
    ),
    "after the end": (["--step=41"], {}, "--step is 41, but the run ended at step 40; expected a step of 1 to 40"),
    "after a kill": (
        ["--step=51"],
        {"status": "running", "end": 60},
        "--step is 51, but the run is known up to step 40 (killed); expected a step of 1 to 50",
    ),
}


@pytest.mark.slow(spread=4)
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_replayed_is_refused(case, runs, tmp_path, capsys):
    arguments, values, sentence = REFUSED[case]
    copy = shutil.copytree(runs("plain")[0], tmp_path / "copy")
    report = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps({**report, **values}))
    assert main(["replay", str(copy), *(argument.format(run=copy) for argument in arguments)]) == EXIT_UNKNOWN
    assert sentence in capsys.readouterr().err

"""Which checkpoint a job takes: what the run ended with, or the one that is named; the weight is its step."""

import json
import shutil
import signal

import counting
import flat_config
import numpy as np
import pytest
import tensorflow as tf

import looplib
from looplib.__main__ import main as cli
from looplib.errors import CheckpointError, NoCheckpointError, ReplayError, SettingError
from looplib.report.page.content import read_run
from looplib.report.page.verdict import findings
from looplib.run import started

# Of a run that was killed after step 25, resumed from step 20, and stopped at step 60, because 20 was the best.
BEST, KEPT, LAST = 20, 50, 60
CHOICES = {None: BEST, "final": BEST, "best": BEST, "latest": LAST, KEPT: KEPT, str(KEPT): KEPT}


@pytest.fixture(scope="module")
def trained(nursery, tmp_path_factory):
    """The run directory, and the last line of the command."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    killed = nursery.life_of("counting", f"--model_dir={folder}", "--config.kill_at=25")
    assert killed.code() == -signal.SIGKILL, killed.output()
    life = nursery.life_of("counting", f"--model_dir={folder}")
    assert life.code() == 0, life.output()
    return folder, life.output().strip().splitlines()[-1]


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the run directory."""
    return shutil.copytree(trained[0], tmp_path / "run")


def job(folder, which=None, **policy):
    """A controller without a trainer, and the weight that it has restored."""
    model = counting.Counting().model
    settings = dict(
        evaluator=counting.Counted(model), model_dir=folder, writers=[], start=looplib.Start(checkpoint=which)
    )
    with flat_config.controller(
        global_batch_size=8, checkpoints=looplib.CheckpointPolicy(**policy), **settings
    ) as built:
        return float(built.evaluate()["eval"]["weight"]), built.global_step


@pytest.mark.slow
def test_a_job_takes_what_the_run_ended_with_or_what_is_named(trained):
    folder, _ = trained
    for which, step in CHOICES.items():
        assert job(folder, which=which) == (step, step), which
    with pytest.raises(NoCheckpointError, match="30.*20.*50.*60"):
        job(folder, which=30)
    with pytest.raises(SettingError, match="checkpoint.*'newest'"):
        job(folder, which="newest")


@pytest.mark.slow
def test_a_warm_start_takes_it_too(trained, tmp_path):
    folder, _ = trained
    starts = {f"{folder}{'' if which is None else f'@{which}'}": step for which, step in CHOICES.items()}
    starts[f"{folder}/checkpoints"] = BEST
    shutil.copytree(folder, tmp_path / "named@best")
    (tmp_path / "named@best" / "run.json").unlink()
    starts[str(tmp_path / "named@best")] = LAST  # the name of a directory, of which it is not known how the run ended
    for path, step in starts.items():
        model = counting.Counting().model
        looplib.warm_start({"model": model}, path)
        assert float(np.array(model.get_weights()[0]).item()) == step, path
    for path, words in (
        (f"{folder}@30", "expected one of the steps"),
        (f"{tmp_path}@best", "there is no checkpoint in .*, although .*@best names one"),
    ):
        with pytest.raises(NoCheckpointError, match=words):
            looplib.warm_start({"model": counting.Counting().model}, path)


@pytest.mark.slow
def test_a_controller_goes_to_any_checkpoint_that_is_named(run):
    model = counting.Counting().model
    settings = dict(evaluator=counting.Counted(model), global_batch_size=8, model_dir=run, writers=[])
    with flat_config.controller(**settings) as controller:
        for which, step in {**CHOICES, f"{run}/checkpoints/ckpt-{KEPT}": KEPT}.items():
            if which is None or which == str(KEPT):
                continue
            path = controller.restore_checkpoint(which)
            assert (path, float(model.get_weights()[0].item())) == (f"{run}/checkpoints/ckpt-{step}", step)
        assert controller.best_checkpoint == f"{run}/checkpoints/ckpt-{BEST}"  # by the rule of the training
        with pytest.raises(SettingError, match="checkpoint"):
            controller.restore_checkpoint(None)  # such as the best one of a run without a score
    shutil.rmtree(run / "checkpoints" / "set_aside", ignore_errors=True)
    (run / "run.json").unlink()
    with pytest.raises(NoCheckpointError):
        job(run, which="best")
    assert job(run) == (LAST, LAST)


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize(
    "entry", [{"final_step": True}, {"final_step": "20"}, {"final_step": 10**30}, {"status": "running"}]
)
def test_a_report_that_does_not_say_how_the_run_ended_means_the_newest(entry, run):
    report = json.loads((run / "run.json").read_text())
    assert (report["status"], report["step"], report["final_step"], report["saved_step"]) == ("done", LAST, BEST, LAST)
    (run / "run.json").write_text(json.dumps({**report, **entry}))
    assert job(run) == (LAST, LAST)


def test_a_damaged_checkpoint_that_is_meant_is_refused(run):
    data = run / "checkpoints" / f"ckpt-{BEST}.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"ckpt-{BEST}"):
        job(run)
    assert job(run, which="latest") == (LAST, LAST)


def test_a_longer_training_continues_from_the_newest_and_is_then_what_jobs_take(run):
    def controller(**start):
        trainer = counting.Counting()
        return looplib.Controller(
            looplib.RunConfig(global_batch_size=8, steps_per_loop=5),
            trainer=trainer,
            evaluator=counting.Counted(trainer.model),
            model_dir=run,
            checkpoints=looplib.CheckpointPolicy(keep=(looplib.KeepLast(2), looplib.KeepBest("eval/score", "max"))),
            start=looplib.Start(**start),
        )

    with (
        controller(checkpoint="best") as going_back,
        pytest.raises(SettingError),
    ):
        going_back.train(70)
    with controller() as longer:
        assert longer.global_step == LAST
        longer.train_and_evaluate(70, 10)
    assert job(run) == (70, 70) and job(run, which="best") == (BEST, BEST)
    assert json.loads((run / "run.json").read_text())["final_step"] is None


@pytest.mark.slow
def test_the_last_line_says_where_the_run_ended_and_what_jobs_take(trained, nursery, tmp_path):
    folder, line = trained
    assert line.startswith(
        f"done at step {LAST}, and back at step {BEST}, the best by eval/score, which eval, predict, export and "
        f"--warm_start take; a longer training continues from step {LAST} (--checkpoint=latest); the run directory is "
        f"{folder}, and its page "
    )
    patient = nursery.life_of("counting", f"--model_dir={tmp_path}", "--train_steps=30")  # ends before it is stopped
    assert patient.code() == 0 and "\ndone at step 30, and back at step 20, the best by eval/score," in patient.output()


@pytest.mark.slow
def test_a_binary_and_the_commands_take_what_is_named(trained, run, nursery, tmp_path, capsys):
    def start(*flags):
        life = nursery.life_of("counting", f"--model_dir={run}", *flags)
        return life.code(), life.output().strip().splitlines()

    code, lines = start("--mode=predict")
    records = [json.loads(line) for line in (run / "predictions" / "eval" / "piece-00000.jsonl").open()]
    assert code == 0 and [record["weight"] for record in records] == [BEST] * 4
    assert lines[-1] == f"done at step {BEST}; the run directory is {run}" and "more steps" not in "".join(lines)
    assert any("the run ended with step 20; its newest checkpoint (latest) is of step 60" in line for line in lines)
    assert start("--mode=export", "--checkpoint=latest", f"--export={tmp_path}/latest")[0] == 0
    assert start("--mode=eval", f"--checkpoint={KEPT}")[1][-1].startswith(f"done at step {KEPT};")
    code, lines = start("--mode=train", "--checkpoint=best")
    assert code == 1 and "--checkpoint=best is for jobs that evaluate, predict or export a checkpoint" in lines[-1]
    assert start("--mode=eval", "--checkpoint=first")[1][-1].endswith("--checkpoint is 'first'; expected final, latest, best, or a step such as 1000 (SettingError)")  # fmt: skip
    served = tf.saved_model.load(f"{tmp_path}/latest/saved_model")
    assert served.serve(tf.ones((1, 1))).numpy().item() == LAST
    assert cli(["inspect", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "the run ended with step 20 (--checkpoint=final)" in shown and "the best is step 20 " in shown
    assert cli(["average", str(run), str(tmp_path / "mean"), "--last=2", f"--checkpoint={KEPT}"]) == 0
    assert job(tmp_path / "mean") == ((BEST + KEPT) / 2, KEPT)
    assert cli(["average", str(run), str(tmp_path / "few"), "--last=2", "--checkpoint=best"]) == 2
    assert "has 1 intact checkpoints up to step 20, and --last is 2" in capsys.readouterr().err


def test_all_that_was_trained_can_be_replayed(trained):
    started.check_replay(str(trained[0]), LAST)
    with pytest.raises(ReplayError, match="--step.*61.*60"):
        started.check_replay(str(trained[0]), LAST + 1)


def test_the_page_and_the_status_of_a_run_say_that_it_was_resumed_and_where_it_went_back(trained, capsys):
    folder, _ = trained
    found = read_run(str(folder), "run")
    assert [(start.status, start.trained) for start in found.starts] == [("killed", True), ("done", True)]
    assert (found.step, found.final_step) == (LAST, BEST)
    assert [mark.step for mark in found.marks if mark.kind == "restart"] == [BEST]
    text = " ".join(one.text for one in findings(found))
    assert (
        "trained to step 60 and went back to the checkpoint of step 20" in text and "1 of 2 starts was killed" in text
    )
    assert cli(["status", str(folder)]) == 0
    assert (
        "back at step 20; early stopping at step 60: eval/score was best" in (shown := capsys.readouterr().out)
        and "60/100" in shown
        and "eval/score 0" in shown
    )

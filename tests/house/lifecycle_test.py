"""A controller over its life: one writer, restoring and training further, actions with a memory, what run.json says."""

import dataclasses
import json
import logging

import board
import numpy as np
import pytest
import tensorflow as tf
import toy
from conftest import make_strategy, more

import looplib
from looplib.errors import ActionError, BusyError, ClosedError, StateError, StepError, UsageError
from looplib.run.records import read_jsonl


def disk(folder):
    """Every file below a folder but the lock and the reports on the run, with its content."""
    others = ("lock", "run.json", "report.html")
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in others)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def build(folder, trainer=None, **settings):
    if trainer is None:
        trainer, _ = toy.build(make_strategy("default"))
    evaluator = toy.RegressionEvaluator(trainer.model)
    policy = looplib.CheckpointPolicy(every_steps=2, keep=(looplib.KeepLast(9), looplib.KeepBest("eval/accuracy")))
    settings = {"model_dir": folder, "writers": None, "checkpoints": policy, **settings}
    return toy.controller(make_strategy("default"), trainer, evaluator, **settings)


def report(folder, name="run.json"):
    return json.loads((folder / name).read_text(), parse_constant=pytest.fail)


# Restoring.


def test_training_on_from_an_older_checkpoint_keeps_aside_what_came_after_and_says_so(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="absl")
    with build(tmp_path) as controller:
        controller.train_and_evaluate(8, 4)
        before = read_jsonl(str(tmp_path / "metrics.jsonl"))
        controller.restore_checkpoint(tmp_path / "checkpoints" / "ckpt-4")
        controller.train(6)
    after = read_jsonl(str(tmp_path / "metrics.jsonl"))
    assert [(r["step"], r["split"]) for r in after] == [
        *((step, "train") for step in range(1, 5)), (4, "eval"), (5, "train"), (6, "train")
    ]  # fmt: skip
    voided = read_jsonl(str(tmp_path / "metrics.voided.jsonl"))
    assert voided == [r for r in before if r["step"] > 4]
    aside = {path.name for path in (tmp_path / "checkpoints" / "set_aside").iterdir()}
    assert aside == {"ckpt-6", "ckpt-8"}
    assert [saved.step for saved in looplib.list_checkpoints(tmp_path)] == [6, 4, 2]
    text = caplog.text
    assert 0 < text.index("the checkpoint of step 8 was superseded by this run") < text.index("records of ")
    assert [event.step for event in board.events(tmp_path / "train")] == [*range(1, 7)]
    assert [event.step for event in board.events(tmp_path / "eval")] == [4]


@pytest.mark.slow
def test_restoring_to_evaluate_and_training_to_a_step_that_is_there_change_nothing_on_disk(tmp_path):
    with build(tmp_path) as controller:
        controller.train_and_evaluate(8, 4)
        before = disk(tmp_path)
        records = read_jsonl(str(tmp_path / "metrics.jsonl"))
        controller.restore_checkpoint(controller.best_checkpoint)
        controller.evaluate()
        assert controller.restore_checkpoint(tmp_path / "checkpoints" / "ckpt-4").endswith("ckpt-4")
        accuracy = controller.evaluate()["eval"]["accuracy"]
        assert [r["accuracy"] for r in records if (r["step"], r["split"]) == (4, "eval")] == [accuracy]
        controller.train(4)
        controller.train(3)
    assert disk(tmp_path) == before


def newest_holds(folder, kernel):
    """Whether the newest checkpoint holds a kernel, and its step."""
    newest = looplib.list_checkpoints(folder)[0]
    reader = tf.train.load_checkpoint(newest.path)
    names = [name for name, shape in tf.train.list_variables(newest.path) if shape == [5, 3]]
    return any(np.array_equal(reader.get_tensor(name), kernel) for name in names), newest.step


@pytest.mark.slow
def test_an_explicit_save_holds_what_was_assigned_and_returns_its_own_path(tmp_path):
    with build(tmp_path) as controller:
        controller.train(6)
        before = disk(tmp_path)
        assert controller.save_checkpoint().endswith("ckpt-6") and disk(tmp_path) == before
        kernel = np.full([5, 3], 7, np.float32)
        model = controller.loops["train"].task.model
        model.layers[-1].set_weights([kernel, np.zeros(3, np.float32)])
        assert controller.save_checkpoint().endswith("ckpt-6")
        assert newest_holds(tmp_path, kernel) == (True, 6)
        controller.restore_checkpoint(tmp_path / "checkpoints" / "ckpt-4")
        assert controller.save_checkpoint().endswith("ckpt-4")
        assert newest_holds(tmp_path, kernel) == (True, 6)  # nothing was changed, and nothing is on disk
        model.layers[-1].set_weights([2 * kernel, np.zeros(3, np.float32)])
        assert controller.save_checkpoint().endswith("ckpt-4")
        assert newest_holds(tmp_path, 2 * kernel) == (True, 4)
    with build(tmp_path) as controller:
        assert controller.global_step == 4


# One writer.


@pytest.mark.slow
def test_a_second_controller_of_one_directory_closes_the_first(tmp_path, caplog):
    first = build(tmp_path)
    first.train(3)
    with build(tmp_path) as second:
        assert "the earlier controller for" in caplog.text
        assert second.global_step == 3
        second.train(5)
        for call in (lambda: first.train(9), first.save_checkpoint):
            with pytest.raises(ClosedError):
                call()
        before = disk(tmp_path)
        assert first.restore_checkpoint() and first.evaluate()["eval"]["examples"] == toy.NUM_EXAMPLES
        assert disk(tmp_path) == before
    assert [r["step"] for r in read_jsonl(str(tmp_path / "metrics.jsonl"))] == [1, 2, 3, 4, 5]
    first.close()  # again
    caplog.clear()
    build(tmp_path).close()
    assert "built earlier" not in caplog.text  # both are closed, and alive
    with build(tmp_path, actions=[lambda event: event.controller.close()]) as controller:
        with pytest.raises(BusyError):
            controller.train(6)


def test_a_second_controller_of_a_directory_that_is_trained_in_is_refused(tmp_path):
    errors = []

    def build_another(event):
        with pytest.raises(BusyError) as error:
            build(tmp_path)
        errors.append(error)

    with build(tmp_path, actions=[build_another]) as controller:
        controller.train(2)
    assert len(errors) == 2 and [saved.step for saved in looplib.list_checkpoints(tmp_path)] == [2]


@pytest.mark.slow
def test_a_directory_and_a_trainer_are_free_after_a_controller_whose_building_failed(tmp_path, caplog):
    class Broken(toy.Regression):
        broken = True

        def step_fn(self, inputs):
            if self.broken:
                raise UsageError("broken")
            return super().step_fn(inputs)

    trainer = Broken()
    try:
        build(tmp_path, trainer)
    except UsageError as error:
        kept = error  # with its frames, as a notebook keeps the last error
    trainer.broken = False
    with build(tmp_path, trainer) as controller:
        controller.train(2)
    assert str(kept) == "broken" and "another controller" not in caplog.text


@pytest.mark.slow
def test_a_trainer_of_two_controllers_reads_the_step_of_the_one_that_trains_it(tmp_path, caplog):
    trainer, _ = toy.build(make_strategy("default"))
    steps = []

    def note(event):
        steps.append(int(trainer.global_step))

    with build(tmp_path / "a", trainer, actions=[note]) as first:
        first.train(2)
        with build(tmp_path / "b", trainer, actions=[note]) as second:
            second.train(1)
            assert "also the trainer of another controller that is not closed" in caplog.text
            first.train(4)
    assert steps == [1, 2, 1, 3, 4]


@pytest.mark.slow
def test_all_is_closed_though_one_of_it_fails(tmp_path):
    closed = []

    class Writer(looplib.Writer):
        def __init__(self, name):
            self.name = name

        def write(self, step, split, metrics):
            pass

        def close(self):
            closed.append(self.name)
            raise OSError(f"{self.name} fails")

    controller = build(tmp_path, writers=[Writer("a"), Writer("b")])
    controller.train(2)
    with pytest.raises(OSError, match="fails"):
        controller.close()
    assert sorted(closed) == ["a", "b"]
    build(tmp_path, writers=[]).close()  # the lock is free


@pytest.mark.slow
def test_what_a_checkpoint_calls_reported_is_on_the_disk_before_its_marker_is(tmp_path):
    synced = []

    class Writer(looplib.JsonlWriter):
        def sync(self):
            super().sync()
            records = [r["step"] for r in read_jsonl(str(tmp_path / "metrics.jsonl"))]
            synced.append((records[-1], [saved.step for saved in looplib.list_checkpoints(tmp_path)]))

    with build(tmp_path, writers=[Writer(str(tmp_path / "metrics.jsonl"))]) as controller:
        controller.train(6)
    assert [saved[:1] for _, saved in synced] == [[], [2], [4]]
    assert all(reported >= saving for (reported, _), saving in zip(synced, (2, 4, 6), strict=True))


# The step.


@pytest.mark.slow
@pytest.mark.parametrize("name", ["default", "mirrored_x2", *more(["one_device", "mirrored_x4"])])
def test_a_step_fn_that_counts_too_is_refused_and_saves_nothing(name, tmp_path):
    strategy = make_strategy(name)

    class Counting(toy.Regression):
        def step_fn(self, inputs):
            self.global_step.assign_add(1, read_value=False)
            return super().step_fn(inputs)

    with strategy.scope():
        trainer = Counting()
        if strategy.num_replicas_in_sync > 1:
            trainer.step_fn = super(Counting, trainer).step_fn
            plain = trainer.step_fn

            def step_fn(inputs):
                context = tf.distribute.get_replica_context()
                context.merge_call(lambda strategy: trainer.global_step.assign_add(1, read_value=False))
                return plain(inputs)

            trainer.step_fn = step_fn
    policy = looplib.CheckpointPolicy(every_steps=2)
    with toy.controller(strategy, trainer, model_dir=tmp_path, checkpoints=policy) as controller:
        with pytest.raises(StepError, match="global_step"):
            controller.train(4)
    assert looplib.list_checkpoints(tmp_path) == []


class Preset(toy.Regression):
    """Which finds weights of step 5 by itself, and takes their step for its own."""

    def initialize(self):
        self.global_step.assign(5)


def test_a_step_that_is_assigned_outside_of_the_training_is_refused(tmp_path):
    with pytest.raises(StepError, match="the global step is 5 after step 0"):
        toy.controller(make_strategy("default"), Preset(), model_dir=tmp_path / "preset")
    trainer = toy.Regression()
    with toy.controller(make_strategy("default"), trainer, model_dir=tmp_path / "between") as controller:
        controller.train(2)
        trainer.global_step.assign(7)
        for call in (lambda: controller.train(9), controller.save_checkpoint, lambda: controller.train(7)):
            with pytest.raises(StepError, match="the global step is 7 after step 2"):
                call()
        controller.restore_checkpoint()
        controller.train(3)
    assert [done.step for done in looplib.list_checkpoints(tmp_path / "between")] == [3, 2]


def test_updates_before_the_first_step_are_told(caplog, keras):
    trainer = toy.Regression(keras)
    with toy.controller(make_strategy("default"), trainer) as controller:
        controller.train(2)
    assert "updates before" not in caplog.text
    with toy.controller(make_strategy("default"), trainer):
        assert "begins at step 0, and the trainer's optimizer has made 2 updates before" in caplog.text


# Actions with a memory.


class Patience(looplib.Action):
    """Stops after two evaluations; remembers what it has seen."""

    def __init__(self, after=2, name=""):
        self.after, self.name, self.seen = after, name, []

    def __call__(self, event):
        if event.split == "eval":
            self.seen.append(event.step)
            if len(self.seen) >= self.after:
                event.controller.stop()

    def state(self):
        return {"seen": self.seen}

    def load(self, state):
        self.seen = list(state["seen"])


class AtEnd(looplib.Action):
    """Has one hook, and no memory."""

    ends = []

    def on_end(self, controller):
        self.ends.append(controller.global_step)


@pytest.mark.slow
def test_an_action_continues_with_its_memory_and_goes_back_with_the_checkpoint(tmp_path):
    """Stopped early, a run that is started again stops there again; one that is continued is as an uninterrupted one."""
    action = Patience()
    with build(tmp_path / "whole", actions=[action]) as controller:
        controller.train_and_evaluate(20, 2)
        assert controller.global_step == 4 and action.seen == [2, 4]
        controller.restore_checkpoint(tmp_path / "whole" / "checkpoints" / "ckpt-2")
        assert action.seen == []  # the evaluation of step 2 came after the save
    again = Patience()
    with build(tmp_path / "whole", actions=[again]) as controller:
        controller.train_and_evaluate(20, 2)
        assert controller.global_step == 4 and again.seen == [2, 4]
    with build(tmp_path / "parts", actions=[Patience(), AtEnd()]) as controller:
        controller.train_and_evaluate(3, 2)  # evaluates at 2, and at 3 as its end
    parts = Patience(4)
    with build(tmp_path / "parts", actions=[print, Patience(9, "other"), parts, AtEnd()]) as controller:
        controller.train_and_evaluate(20, 2)
        assert parts.seen == [2, 4, 6, 8] and controller.global_step == 8
    assert AtEnd.ends == [3, 8]


@pytest.mark.parametrize("method, missing", [("state", "load"), ("load", "state")])
def test_an_action_with_half_a_memory_is_refused(method, missing):
    kind = type("Forgetful", (looplib.Action,), {method: lambda self, *state: None})
    with pytest.raises(ActionError, match=f"{method}.*{missing}"):
        build(None, actions=[kind()])


@pytest.mark.slow
def test_an_action_goes_back_with_the_checkpoint(tmp_path):
    action = Patience(99)
    with build(tmp_path, actions=[action]) as controller:
        controller.train_and_evaluate(6, 2)
        assert action.seen == [2, 4, 6]
        controller.restore_checkpoint(tmp_path / "checkpoints" / "ckpt-4")
        assert action.seen == [2]  # the evaluation of step 4 came after the save
        controller.train_and_evaluate(6, 2)
        assert action.seen == [2, 4, 6]
    with build(tmp_path) as controller:  # without the action
        controller.train(8)
    with build(tmp_path, actions=[action]) as controller:
        assert action.seen == [2, 4, 6]  # its first state here: the checkpoint of step 8 has none


def test_a_state_that_json_cannot_hold_is_refused_when_the_controller_is_built():
    action = Patience()
    action.seen = np.array([1, 2])
    toy.controller(make_strategy("default"), toy.Regression(), actions=[action]).close()
    action.seen = {1, 2}
    with pytest.raises(StateError, match="Patience.state.*JSON"):
        toy.controller(make_strategy("default"), toy.Regression(), actions=[action])


# Settings and run.json.


def rate_of(trainer):
    return float(np.asarray(trainer.optimizer.get_config()["learning_rate"]))


def trained(folder, keras, rate, steps, change=None):
    trainer = toy.Regression(keras, "adam")
    trainer.optimizer.learning_rate = rate
    with toy.controller(make_strategy("default"), trainer, model_dir=folder, config={"rate": rate}) as controller:
        controller.train(steps)
        if change:
            trainer.optimizer.learning_rate = change
            controller.train(steps + 1)
    return trainer


@pytest.mark.slow
def test_a_new_learning_rate_holds_from_the_resume_on(keras, tmp_path, caplog):
    """As in a run whose learning rate is set to it at that step; and run.json says what was and what is."""
    trained(tmp_path, keras, 0.05, 3)
    resumed = trained(tmp_path, keras, 0.01, 6)
    assert rate_of(resumed) == pytest.approx(0.01)
    assert (
        "the learning rate of Adam is 0.01 from step 3, as set by this program; the checkpoint has 0.05" in caplog.text
    )
    assert "config.rate=0.01 (was 0.05); the new values apply from step 3" in caplog.text.replace("\n", " ")
    plain = toy.Regression(keras, "adam")
    with toy.controller(make_strategy("default"), plain) as controller:
        controller.train(3)
        plain.optimizer.learning_rate = 0.01
        controller.train(6)
    for a, b in zip(resumed.weights(), plain.weights()):
        np.testing.assert_array_equal(a, b)
    found = report(tmp_path)
    assert found["config"] == {"rate": 0.01} and found["starts"][1]["changed"] == {"config.rate": [0.05, 0.01]}
    assert found["starts"][0]["changed"] == {}
    caplog.clear()
    assert rate_of(trained(tmp_path, keras, 0.01, 7)) == pytest.approx(0.01)
    assert "learning rate" not in caplog.text and "settings changed" not in caplog.text


@pytest.mark.slow(spread=1)
def test_a_learning_rate_that_the_run_has_changed_itself_is_restored(keras, tmp_path, caplog):
    trained(tmp_path, keras, 0.05, 3, change=0.02)
    assert rate_of(trained(tmp_path, keras, 0.05, 6)) == pytest.approx(0.02)
    assert (
        "the learning rate of Adam is 0.02, from the checkpoint of step 4, where the program had changed it"
        in caplog.text
    )


def test_run_json_of_a_script_has_the_history_of_its_starts(tmp_path, capsys):
    @dataclasses.dataclass
    class Config:
        width: int = 3

    with build(tmp_path, config=Config()) as controller:
        controller.train_and_evaluate(4, 2)
    first = report(tmp_path)
    assert (first["status"], first["step"], first["restarts"]) == ("done", 4, 0)
    assert first["flags"]["global_batch_size"] == 8 and first["config"] == {"width": 3}
    assert set(first["metrics"]) == {"train", "eval"} and first["metrics"]["eval"]["examples"] == toy.NUM_EXAMPLES
    capsys.readouterr()
    policy = looplib.CheckpointPolicy(every_steps=4)
    with build(
        tmp_path, config=Config(4), steps_per_loop=2, checkpoints=policy, guards=looplib.Guards(non_finite="skip")
    ) as controller:
        controller.train_and_evaluate(4, 2)
    printed = capsys.readouterr().out
    assert f"restored step 4 from {tmp_path}/checkpoints/ckpt-4" in printed
    assert "already at step 4, nothing to train" in printed
    second = report(tmp_path)
    assert second["started"] == first["started"] and second["metrics"] == first["metrics"]
    assert second["starts"][0] == first["starts"][0]
    assert second["starts"][1]["changed"] == {
        "config.width": [3, 4],
        "steps_per_loop": [1, 2],
        "checkpoint_interval": [2, 4],
        "keep_best": ["max:eval/accuracy", None],
        "guards.non_finite": ["halt", "skip"],
    }
    assert second["starts"][1]["restored_from"].endswith("ckpt-4") and second["restarts"] == 1
    for start in second["starts"]:
        assert {"command", "versions", "started", "seconds", "verdict", "status", "step"} <= start.keys()
    for name, seconds in second["seconds"].items():
        parts = [start["seconds"].get(name, 0) for start in second["starts"]]
        assert seconds == pytest.approx(sum(parts), abs=2e-3)
    assert second["seconds"]["train"] >= first["seconds"]["train"] > 0


@pytest.mark.slow
def test_run_json_says_how_a_training_failed(tmp_path):
    def fail(event):
        raise RuntimeError("the cat pulled the plug")

    controller = build(tmp_path, actions=[fail])
    with pytest.raises(RuntimeError):
        controller.train(2)
    controller.close()
    found = report(tmp_path)
    assert found["status"] == "failed" and "the cat pulled the plug" in found["error"]
    with build(tmp_path) as controller:
        controller.train(2)
    found = report(tmp_path)
    assert found["status"] == "done" and "error" not in found and found["starts"][0]["status"] == "failed"


@pytest.mark.slow
def test_an_evaluation_job_has_a_report_of_its_own(tmp_path):
    with build(tmp_path) as controller:
        controller.train(2)
    before = (tmp_path / "run.json").read_bytes()
    evaluator = toy.RegressionEvaluator(toy.Regression().model)
    with toy.controller(make_strategy("default"), None, evaluator, model_dir=tmp_path) as job:
        metrics = job.evaluate()
    found = report(tmp_path, "run_eval.json")
    assert found["status"] == "done" and found["metrics"] == metrics and found["step"] == 2
    assert (tmp_path / "run.json").read_bytes() == before

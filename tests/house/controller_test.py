"""The schedule, resuming, hooks, actions, and bad input refused early."""

import contextlib
import os
import pathlib

import flat_config
import keras as keras3
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
import toy
from conftest import make_strategy, more

import looplib
from looplib.checkpoint import directory as run_directory
from looplib.errors import (
    ActionError,
    BusyError,
    CheckpointError,
    ClosedError,
    EndlessDataError,
    FileError,
    KerasFamilyError,
    MismatchError,
    MissingPartError,
    NoCheckpointError,
    SettingError,
    StateError,
    StepError,
    TaskError,
    VariableError,
)
from looplib.run.records import read_jsonl

DEFAULT = make_strategy("default")


def saved_steps(model_dir):
    names = tf.io.gfile.glob(os.path.join(model_dir, "checkpoints", "ckpt-*.index"))
    return sorted(int(os.path.basename(name)[5:-6]) for name in names)


def curve(model_dir):
    """Returns the records of metrics.jsonl without the speed."""
    records = read_jsonl(os.path.join(model_dir, "metrics.jsonl"))
    for record in records:
        record.pop("steps_per_second", None)
    return sorted(records, key=lambda record: (record["step"], record["split"]))


def order(steps):
    """The ids of each global batch."""
    context = looplib.InputContext(
        global_batch_size=8, num_replicas=1, pipeline_index=0, num_pipelines=1, seed=0, training=True, start_step=0
    )
    return list(context.indices(toy.NUM_EXAMPLES).take(steps).as_numpy_iterator())


class Quiet(toy.Regression):
    """The regression without its ids, so that several steps make a loop."""

    def step_fn(self, inputs):
        outputs = super().step_fn(inputs)
        del outputs["ids"]
        return outputs

    def loop_end(self, metrics):
        return metrics


def build(strategy=DEFAULT, trainer_class=Quiet):
    with strategy.scope():
        trainer = trainer_class()
        return trainer, toy.RegressionEvaluator(trainer.model)


def run(model_dir, steps, eval_interval=7, strategy=DEFAULT, trainer_class=Quiet, **settings):
    trainer, evaluator = build(strategy, trainer_class)
    settings = {
        "steps_per_loop": 4,
        "checkpoints": looplib.CheckpointPolicy(every_steps=10, keep=(looplib.KeepLast(100),)),
        "writers": None,
        **settings,
    }
    with toy.controller(strategy, trainer, evaluator, model_dir=model_dir, **settings) as controller:
        result = controller.train_and_evaluate(steps, eval_interval) if eval_interval else controller.train(steps)
    return trainer, controller, result


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, stops",
    [
        ("default", [10, 13, 24]),
        *more([("default", [7, 40]), ("mirrored_x2", [20, 40]), ("mirrored_x2", [10, 13, 22, 40])]),
    ],
)
def test_a_run_stopped_and_started_again_has_the_curve_of_one_that_was_not(name, stops, tmp_path):
    """Saves, evaluations and reports come at exact multiples; a report has the mean of all steps since the last one."""
    strategy = make_strategy(name)
    whole, _, _ = run(tmp_path / "whole", stops[-1], strategy=strategy)
    for stop in stops:
        parts, _, _ = run(tmp_path / "parts", stop, strategy=strategy)
    found, end = curve(tmp_path / "whole"), stops[-1]
    assert curve(tmp_path / "parts") == found
    evaluated, reported = ({*range(interval, end, interval), end} for interval in (7, 4))
    assert [record["step"] for record in found if record["split"] == "eval"] == sorted(evaluated)
    assert saved_steps(tmp_path / "whole") == sorted({*range(10, end, 10), *evaluated})  # each evaluation saves first
    losses, _ = toy.numpy_losses_and_weights(order(end), "sgd")
    means = {step: losses[(step - 1) // 4 * 4 : step].mean() for step in sorted(reported)}
    assert {record["step"]: record["loss"] for record in found if record["split"] == "train"} == pytest.approx(means)
    for a, b in zip(whole.weights(), parts.weights()):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["eager", *more(["graph", "auto"])])
@pytest.mark.parametrize("steps_per_loop", [3, *more([2])])
def test_a_run_that_fails_after_its_last_step_reports_it_when_it_is_started_again(loop, steps_per_loop, tmp_path):
    """The second start reports the sums in the checkpoint, and runs no step."""

    def train(directory, **settings):
        settings = dict(
            model_dir=tmp_path / directory, steps_per_loop=steps_per_loop, writers=None, loop=loop, **settings
        )
        with toy.controller(DEFAULT, Quiet(), **settings) as controller:
            controller.train(5)

    train("whole")
    with pytest.raises(RuntimeError, match="the last report"):
        train("parts", actions=[fail_at_last_report])
    train("parts")
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    assert curve(tmp_path / "parts")[-1]["step"] == 5


@pytest.mark.slow
def test_an_eager_step_that_cannot_be_traced_reports_nothing_of_steps_before_the_resume(tmp_path, caplog):
    """Only where no step was run, so that the names and shapes of its metrics are not known."""

    class Untraceable(Quiet):
        def step_fn(self, inputs):
            inputs[0].numpy()
            return super().step_fn(inputs)

    for fails in (True, False):
        trainer = Untraceable()
        actions = [fail_at_last_report] if fails else []
        settings = dict(model_dir=tmp_path, steps_per_loop=2, loop="eager", actions=actions)
        with toy.controller(DEFAULT, trainer, **settings) as controller:
            if fails:
                with pytest.raises(RuntimeError, match="the last report"):
                    controller.train(5)
            else:
                assert "loss" not in controller.train(5)
    assert "step_fn cannot be traced to learn their structure" in caplog.text


def fail_at_last_report(event):
    if event.step == 5:
        raise RuntimeError("the last report")


def test_a_finished_run_started_again_changes_nothing(tmp_path):
    run(tmp_path, 13)
    before, files = curve(tmp_path), saved_steps(tmp_path)
    _, controller, result = run(tmp_path, 13)
    assert curve(tmp_path) == before and saved_steps(tmp_path) == files and result["eval"]["examples"] == 37


@pytest.mark.slow
def test_an_evaluation_that_fails_loses_no_training(tmp_path):
    trainer, evaluator = build()
    controller = toy.controller(DEFAULT, trainer, evaluator, model_dir=tmp_path, actions=[fail_at_evaluation])
    with pytest.raises(RuntimeError, match="disk of the evaluation"):
        controller.train_and_evaluate(20, 7)
    assert saved_steps(tmp_path) == [7]


def fail_at_evaluation(event):
    if event.split == "eval":
        raise RuntimeError("disk of the evaluation")


@pytest.mark.slow
def test_initialize_is_called_once_in_the_life_of_a_run(tmp_path):
    calls = []

    class Pretrained(Quiet):
        def initialize(self):
            calls.append(tf.distribute.has_strategy())
            self.model.layers[-1].set_weights([toy.KERNEL * 0, np.ones(toy.NUM_CLASSES, np.float32)])

    strategy = make_strategy("mirrored_x2")
    trainer, controller, _ = run(tmp_path, 2, None, strategy=strategy, trainer_class=Pretrained)
    assert calls == [True]
    assert trainer.weights()[1].sum() == pytest.approx(3, abs=1e-5)  # gradients of a softmax's biases sum to 0
    run(tmp_path, 4, None, strategy=strategy, trainer_class=Pretrained)
    assert calls == [True]


def test_actions_see_every_report_and_can_stop_the_run(tmp_path):
    events = []

    def action(event):
        events.append((event.step, event.split))
        if event.split == "eval" and event.step == 14:
            event.controller.stop()

    _, controller, _ = run(tmp_path, 100, actions=[action])
    assert controller.global_step == 14 and saved_steps(tmp_path)[-1] == 14
    assert events == [(4, "train"), (7, "eval"), (8, "train"), (12, "train"), (14, "eval"), (14, "train")]


@pytest.mark.slow
def test_loop_end_adds_and_changes_metrics(tmp_path):
    class Perplexity(Quiet):
        def loop_end(self, metrics):
            return {**metrics, "perplexity": np.exp(metrics["loss"])}

    run(tmp_path, 4, None, trainer_class=Perplexity)
    (record,) = curve(tmp_path)
    assert record["perplexity"] == pytest.approx(np.exp(record["loss"]))


def test_restoring_by_hand_goes_back_in_the_data_too():
    trainer, _ = toy.build(DEFAULT)
    folder = os.path.join(os.environ.get("TMPDIR", "/tmp"), f"looplib-restore-{os.getpid()}")
    with toy.controller(DEFAULT, trainer, model_dir=folder) as controller:
        controller.train(5)
        path = controller.save_checkpoint()
        controller.train(9)
        first = trainer.order[5:]
        controller.restore_checkpoint(path)
        assert controller.global_step == 5
        controller.train(9)
        np.testing.assert_array_equal(np.stack(first), np.stack(trainer.order[9:]))
    tf.io.gfile.rmtree(folder)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A run of 14 steps: (its directory, its controller, which is closed, and its result)."""
    folder = tmp_path_factory.mktemp("done")
    return folder, *run(folder, 14)[1:]


def test_an_evaluation_job_reads_the_checkpoints_of_a_training_job(done, caplog, monkeypatch):
    folder, _, result = done
    _, evaluator = build()
    monkeypatch.setattr(run_directory, "_WAIT_NOTES", 0.0)
    with looplib.Controller(
        looplib.RunConfig(global_batch_size=8), evaluator=evaluator, model_dir=folder, writers=[]
    ) as job:
        assert job.global_step == 14 and job.restored_from.endswith("ckpt-14")
        assert job.evaluate() == result
        assert job.restore_checkpoint(folder / "checkpoints" / "ckpt-7").endswith("ckpt-7")
        assert job.evaluate()["eval"]["accuracy"] == curve(folder)[1]["accuracy"]  # after (4, train)
        assert job.evaluate_continuously(until_step=14) == result
        with caplog.at_level("INFO", logger="absl"):
            job.evaluate_continuously(timeout=0.1)
        assert (
            f"waiting for a checkpoint newer than ckpt-14 in {folder}/checkpoints, for up to 0.1 s" in caplog.messages
        )


def test_continuous_evaluation_says_once_that_it_waits_and_times_out_with_a_sentence(tmp_path, caplog):
    _, evaluator = build()
    job = looplib.Controller(
        looplib.RunConfig(global_batch_size=8), evaluator=evaluator, model_dir=tmp_path, writers=[]
    )
    with caplog.at_level("INFO", logger="absl"):
        for _ in range(2):
            with pytest.raises(NoCheckpointError, match="0.1"):
                job.evaluate_continuously(timeout=0.1)
    waiting = [record.getMessage() for record in caplog.records if "waiting" in record.getMessage()]
    assert waiting == [f"waiting for a checkpoint in {tmp_path}/checkpoints, for up to 0.1 s"]


def test_a_closed_controller_evaluates_and_trains_no_more(done):
    _, controller, result = done
    assert controller.evaluate()["eval"] == result["eval"]
    with pytest.raises(ClosedError):
        controller.train(20)
    assert controller.global_step == 14


def test_the_clock_adds_up_to_the_wall(done):
    _, controller, _ = done
    seconds = controller.clock.seconds()
    assert {"compile", "train", "evaluate", "save", "report", "other"} <= set(seconds)
    assert sum(seconds.values()) - seconds["wall"] == pytest.approx(seconds["wall"], abs=0.01)


# Bad input.


def broken_step(self, inputs):
    raise KeyError("no such feature")


@pytest.mark.slow
def test_a_step_that_raises_does_so_before_the_first_step_and_harms_nothing(tmp_path):
    run(tmp_path, 14)
    before = sorted(os.listdir(tmp_path / "checkpoints"))
    broken = type("Broken", (Quiet,), {"step_fn": broken_step})
    for loop in ("graph", "eager"):
        with pytest.raises(Exception, match="no such feature"):
            run(tmp_path, 28, trainer_class=broken, loop=loop)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == before
    assert run(tmp_path, 28)[1].global_step == 28


def test_a_step_of_a_trainer_or_an_evaluator_that_raises_does_so_before_training():
    trainer = type("Broken", (Quiet,), {"step_fn": broken_step})()
    with pytest.raises(Exception, match="no such feature"):
        toy.controller(DEFAULT, trainer)
    trainer, _ = build()
    broken = type("Broken", (toy.RegressionEvaluator,), {"step_fn": broken_step})(trainer.model)
    with pytest.raises(Exception, match="no such feature"):
        toy.controller(DEFAULT, trainer, broken)


@pytest.mark.slow
def test_the_checkpoints_of_another_model_are_refused_and_kept(tmp_path):
    run(tmp_path, 7)
    before = {name: (tmp_path / "checkpoints" / name).read_bytes() for name in os.listdir(tmp_path / "checkpoints")}

    class Wider(Quiet):
        def __init__(self):
            super().__init__()
            self.model = keras3.Sequential([keras3.Input((5,)), keras3.layers.Dense(4), keras3.layers.Dense(3)])

    class Narrower(Quiet):
        def __init__(self):
            super().__init__()
            self.model = keras3.Sequential([keras3.Input((5,)), keras3.layers.Dense(3, use_bias=False)])

    class OtherShape(Quiet):
        def __init__(self):
            super().__init__()
            self.model = keras3.Sequential([keras3.Input((5,)), keras3.layers.Dense(9)])

    for other, word in (
        (Wider, "only here: model/dense/bias, model/dense/kernel, .* of model/dense/bias"),
        (Narrower, "only there: model/dense/bias, .* of model/dense/bias"),
        (OtherShape, r"model/dense/kernel \[5, 3\] there, \[5, 9\] here"),
    ):
        with pytest.raises(MismatchError, match=word) as error:
            run(tmp_path, 14, trainer_class=other)
        assert "use a separate model_dir" in str(error.value)
    after = {name: (tmp_path / "checkpoints" / name).read_bytes() for name in os.listdir(tmp_path / "checkpoints")}
    assert after == before


def test_a_file_that_is_no_checkpoint_is_a_sentence(tmp_path):
    trainer, _ = build()
    controller = toy.controller(DEFAULT, trainer, model_dir=tmp_path)
    (tmp_path / "x.index").write_bytes(b"nonsense")
    for path, kind in ((tmp_path / "x", CheckpointError), (tmp_path / "missing", NoCheckpointError)):
        with pytest.raises(kind):
            controller.restore_checkpoint(path)


def test_mixed_keras_families_are_refused():
    trainer, _ = build()
    trainer.optimizer = tf_keras.optimizers.SGD(0.1)
    with pytest.raises(KerasFamilyError):
        toy.controller(DEFAULT, trainer)


def test_a_model_outside_the_strategys_scope_is_refused(keras):
    trainer, evaluator = toy.build(DEFAULT, keras)
    with pytest.raises(VariableError, match="MirroredStrategy"):
        toy.controller(make_strategy("mirrored_x2"), trainer, evaluator)
    trainer, evaluator = toy.build(make_strategy("mirrored_x2"), keras)
    with pytest.raises(VariableError):
        toy.controller(DEFAULT, trainer, evaluator)


@pytest.mark.parametrize(
    "make", [lambda: tf.distribute.MirroredStrategy(["/cpu:0"]), lambda: make_strategy("one_device")]
)
def test_an_optimizer_outside_the_scope_of_a_strategy_of_one_replica_is_refused(make):
    trainer, _ = toy.build(DEFAULT)
    with pytest.raises(VariableError, match="strategy.scope"):
        toy.controller(make(), trainer)


@pytest.mark.slow
@pytest.mark.parametrize("keras", ["keras", *more(["tf_keras"])], indirect=True)
def test_a_model_without_variables_trains_where_tensorflow_can_and_else_is_a_sentence(keras, tmp_path):
    class Unbuilt(Quiet):
        def __init__(self):
            super().__init__(keras)
            self.model = keras.Sequential([keras.layers.Dense(toy.NUM_CLASSES)])

    run(tmp_path, 3, None, trainer_class=Unbuilt)
    trainer, controller, _ = run(tmp_path, 6, None, trainer_class=Unbuilt)
    assert controller.restored_from.endswith("ckpt-3") and len(trainer.weights()) == 2
    for settings in ({"loop": "eager"}, {"strategy": make_strategy("mirrored_x2")}):
        with pytest.raises(VariableError):
            run(tmp_path / "other", 3, None, trainer_class=Unbuilt, **settings)


def test_an_evaluators_own_copy_of_the_model_is_refused():
    trainer, _ = build()
    _, evaluator = build()
    with pytest.raises(StateError):
        toy.controller(DEFAULT, trainer, evaluator)


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize(
    "settings, message",
    [
        ({"trainer": None}, "needs a trainer, an evaluator or both"),
        ({"trainer": object()}, "trainer"),
        ({"evaluator": object()}, "'eval'"),
        ({"steps_per_loop": 0}, "steps_per_loop.*0.*1"),
        ({"loop": "fast"}, "loop.*'fast'"),
        ({"global_batch_size": -1}, "global_batch_size.*-1"),
    ],
)
def test_bad_settings_are_sentences(settings, message):
    trainer, _ = build()
    settings = {"trainer": trainer, "global_batch_size": 8, **settings}
    with pytest.raises(looplib.UsageError, match=message):
        flat_config.controller(**settings)


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("name", ["rates", "own_actions", "own_steps_per_loop"])
@pytest.mark.parametrize("base", [toy.Regression, toy.RegressionEvaluator])
def test_what_only_an_adapter_has_is_refused_without_one(base, name):
    wrong = type("Wrong", (base,), {name: property(lambda self: {})})
    trainer = wrong() if base is toy.Regression else toy.Regression()
    evaluator = (wrong if base is toy.RegressionEvaluator else toy.RegressionEvaluator)(trainer.model)
    with pytest.raises(TaskError, match=f"{name}.*looplib.Adapter"):
        toy.controller(DEFAULT, trainer, evaluator)


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("interval", [0, -5, 2.5])
def test_bad_intervals_are_sentences(interval):
    with pytest.raises(SettingError, match="every_steps.*1"):
        looplib.CheckpointPolicy(every_steps=interval)
    trainer, evaluator = build()
    controller = toy.controller(DEFAULT, trainer, evaluator)
    with pytest.raises(SettingError, match="eval_interval"):
        controller.train_and_evaluate(10, interval)
    with pytest.raises(SettingError):
        controller.train(interval)
    assert controller.global_step == 0


def test_what_is_missing_is_named():
    trainer, evaluator = build()
    controller = toy.controller(DEFAULT, trainer)
    for call, message in (
        (controller.evaluate, "has no evaluator"),
        (lambda: controller.train_and_evaluate(10, 5), "evaluator.. of a KerasTrainer"),
        (controller.save_checkpoint, "save_checkpoint needs a model_dir"),
        (controller.restore_checkpoint, "restore_checkpoint needs a model_dir"),
        (toy.controller(DEFAULT, None, evaluator).train, "has no trainer"),
    ):
        with pytest.raises(MissingPartError, match=message):
            call(10) if "no trainer" in message else call()


@pytest.mark.slow
def test_an_evaluation_that_would_never_end_is_refused_before_training():
    trainer, _ = build()

    class Endless(toy.RegressionEvaluator):
        def dataset(self, context):
            return super().dataset(context).repeat()

    controller = toy.controller(DEFAULT, trainer, Endless(trainer.model))
    with pytest.raises(EndlessDataError):
        controller.train_and_evaluate(10, 5)
    assert controller.global_step == 0
    assert controller.train_and_evaluate(10, 5, eval_steps=2)["eval"]["examples"] == 16


@pytest.mark.parametrize("path", ["/proc/nowhere", "/dev/null/run"])
def test_a_directory_that_cannot_be_written_is_a_sentence(path):
    trainer, _ = build()
    with pytest.raises(FileError, match="cannot be (written to|used)"):
        toy.controller(DEFAULT, trainer, model_dir=path)


def test_evaluators_with_different_models_of_one_name_are_refused():
    first, second = build()[1], build()[1]
    with pytest.raises(StateError):
        looplib.Controller(looplib.RunConfig(global_batch_size=8), evaluator={"a": first, "b": second}, writers=[])


def test_an_evaluation_job_without_a_checkpoint_is_a_sentence(tmp_path):
    with pytest.raises(NoCheckpointError, match="there"):
        looplib.Controller(
            looplib.RunConfig(global_batch_size=8), evaluator=build()[1], model_dir=tmp_path, writers=[]
        ).evaluate()


@pytest.mark.slow
def test_an_action_cannot_train_restore_or_close_inside_a_training(tmp_path):
    def action(event):
        for call in (lambda: event.controller.train(20), event.controller.restore_checkpoint, event.controller.close):
            with pytest.raises(BusyError):
                call()
        raise SystemExit

    with pytest.raises(SystemExit):
        run(tmp_path, 8, None, actions=[action])


def test_training_continues_exactly_after_data_that_could_not_be_read():
    failures = iter([True])

    class Flaky(toy.Regression):
        def dataset(self, context):
            def check(ids):
                if context.start_step == 0 and np.array_equal(ids, bad) and next(failures, False):
                    raise OSError("the disk was away")
                return ids

            data = context.indices(37).map(lambda i: tf.ensure_shape(tf.numpy_function(check, [i], tf.int64), [8]))
            return data.map(lambda i: (i, tf.gather(toy.X, i), tf.gather(toy.Y, i)))

    whole = toy.Regression()
    toy.controller(DEFAULT, whole).train(12)
    bad = whole.order[8]
    trainer = Flaky()
    controller = toy.controller(DEFAULT, trainer)
    with pytest.raises(tf.errors.OpError, match="the disk was away"):
        controller.train(12)
    assert controller.global_step == 8
    controller.train(12)
    np.testing.assert_array_equal(np.stack(trainer.order), np.stack(whole.order))
    np.testing.assert_array_equal(trainer.weights()[0], whole.weights()[0])


@pytest.mark.slow
def test_two_controllers_may_follow_each_other_on_one_trainer():
    trainer, _ = build()
    for steps in (3, 2):
        controller = toy.controller(DEFAULT, trainer)
        controller.train(steps)
        assert controller.global_step == steps == int(trainer.global_step)


class TwoModels(Quiet):
    """Two models that train together under one Adam, with a preprocessing layer beside them."""

    build_optimizer = True

    def __init__(self):
        super().__init__(optimizer="adam")
        layers = keras3.layers
        self.other = keras3.Sequential([keras3.Input((5,)), layers.Dropout(0.5), layers.Dense(3)])
        self.scale = layers.Rescaling(0.5)
        if self.build_optimizer:
            self.optimizer.build(self.model.trainable_variables + self.other.trainable_variables)

    def step_fn(self, inputs):
        _, x, y = inputs
        with tf.GradientTape() as tape:
            logits = self.model(self.scale(x)) + self.other(x, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
            loss = self.global_mean(losses)
        variables = self.model.trainable_variables + self.other.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return {"loss": losses}


class Unbuilt(TwoModels):
    build_optimizer = False


@pytest.mark.slow
def test_several_models_train_on_several_replicas_once_their_optimizer_is_built(tmp_path):
    strategy = make_strategy("mirrored_x2")
    _, controller, _ = run(tmp_path / "built", 4, None, strategy=strategy, trainer_class=TwoModels, loop="graph")
    assert controller.global_step == 4
    run(tmp_path / "one", 4, None, trainer_class=Unbuilt)  # on one replica the first trace builds it


@pytest.mark.slow
def test_an_optimizer_of_several_models_that_is_not_built_is_refused_on_several_replicas():
    strategy = make_strategy("mirrored_x2")
    trainer, _ = build(strategy, Unbuilt)
    with pytest.raises(StepError, match="optimizer.build"):
        toy.controller(strategy, trainer)


def test_a_strategy_or_action_or_writer_of_another_kind_is_a_sentence():
    trainer, _ = build()
    for settings, message in (
        ({"strategy": "mirrored"}, "strategy is 'mirrored'; expected a tf.distribute.Strategy"),
        (
            {"strategy": tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:9"])},
            "a replica on CPU:9, and TensorFlow has CPU",
        ),
        ({"strategy": tf.distribute.OneDeviceStrategy("GPU:7")}, "a replica on GPU:7, and TensorFlow has CPU"),
        ({"actions": [3]}, "the action 3 is not callable"),
        ({"writers": [print]}, "is not a looplib.Writer"),
    ):
        with pytest.raises(looplib.UsageError, match=message):
            flat_config.controller(trainer=trainer, global_batch_size=8, **settings)


def test_training_to_the_end_of_endless_data_is_refused():
    with pytest.raises(EndlessDataError):
        toy.controller(DEFAULT, build()[0]).train(-1)


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize(
    "settings, kind, name",
    [
        ({"guards": "halt"}, SettingError, "guards"),
        ({"guards": looplib.CheckpointPolicy()}, SettingError, "guards"),
        ({"checkpoints": 100}, SettingError, "checkpoints"),
        ({"start": "latest"}, SettingError, "start"),
        ({"run_config": {"global_batch_size": 8}}, SettingError, "run_config"),
        ({"actions": print}, ActionError, "actions"),
        ({"actions": [looplib.EarlyStopping]}, ActionError, "EarlyStopping"),
    ],
)
def test_an_argument_of_another_kind_is_refused_by_name(settings, kind, name):
    with pytest.raises(kind, match=name):
        looplib.Controller(
            **{"run_config": looplib.RunConfig(global_batch_size=8), **settings}, trainer=toy.Regression()
        )


@pytest.mark.slow(spread=6)
@pytest.mark.parametrize(
    "make, name",
    [
        (lambda: looplib.RunConfig(overfit_batch="false"), "overfit_batch"),
        (lambda: looplib.RunConfig(overfit_batch=1), "overfit_batch"),
        (lambda: looplib.RunConfig(overfit_batch=None), "overfit_batch"),
        (lambda: looplib.Start(partial="no"), "partial"),
        (lambda: looplib.Start(warm_start=5), "warm_start"),
        (lambda: looplib.Guards(loss_limit="x"), "loss_limit"),
        (lambda: looplib.Guards(loss_limit=True), "loss_limit"),
    ],
)
def test_a_setting_of_another_type_is_refused_by_name_where_it_is_made(make, name):
    with pytest.raises(SettingError, match=name):
        make()


class Predicting(toy.RegressionEvaluator):
    def predict_fn(self, inputs):
        return {"logits": self.model(inputs[0], training=False)}


def test_a_controller_inside_of_the_strategys_scope_does_what_it_does_outside(keras, tmp_path):
    strategy = make_strategy("mirrored_x2")

    def use(scope, model_dir):
        with strategy.scope():
            trainer = toy.Regression(keras)
            evaluator = Predicting(trainer.model)
        with scope, toy.controller(strategy, trainer, evaluator, model_dir=model_dir) as controller:
            results = [controller.train_and_evaluate(4, eval_interval=2), controller.evaluate(), controller.global_step]
            controller.save_checkpoint()
            controller.restore_checkpoint(2)
            results.append(controller.train(5)["loss"])
            exported = controller.export()
            results += [path.read_text() for path in pathlib.Path(controller.predict()["eval"]).glob("*.jsonl")]
        loaded = tf.saved_model.load(os.path.join(exported, "saved_model"))
        return results, loaded.serve(toy.X).numpy(), trainer.weights()

    (ours, served, weights), (theirs, *others) = (
        use(scope, tmp_path / name) for name, scope in (("in", strategy.scope()), ("out", contextlib.nullcontext()))
    )
    assert ours == theirs and len(ours) == 5
    np.testing.assert_array_equal(served, others[0])
    for a, b in zip(weights, others[1]):
        np.testing.assert_array_equal(a, b)

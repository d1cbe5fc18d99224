"""Orbit's trainers and evaluators, unmodified, under looplib's controller and under Orbit's own."""

import os
import pathlib
import signal
import subprocess
import threading
import time

import pytest
from paths import PYTHONPATH

pytest.importorskip("orbit", reason="needs Orbit, which comes with Model Garden: pip install 'looplib[models]'")

import flat_config
import numpy as np
import orbit
import tensorflow as tf
import tf_keras
import toy
from conftest import make_strategy, more
from orbit_tasks import Classifier, ClassifierEvaluator, data

import looplib
from looplib.cluster.preemption import Preempted
from looplib.errors import EndlessDataError, MetricError, OrbitError, StepError
from looplib.orbit import adapters
from looplib.run import commits
from looplib.run.records import read_jsonl

ROOT = pathlib.Path(__file__).absolute().parents[2]


DEFAULT = make_strategy("default")
ALL = (looplib.KeepLast(100),)


def saved_steps(model_dir):
    return sorted(done.step for done in commits.committed(os.path.join(model_dir, "checkpoints")))


def curve(model_dir):
    records = read_jsonl(os.path.join(model_dir, "metrics.jsonl"))
    for record in records:
        record.pop("steps_per_second", None)
    return sorted(records, key=lambda record: (record["step"], record["split"]))


def controller(trainer, evaluator=None, strategy=DEFAULT, every=10, guards=looplib.Guards(), **settings):
    policy = looplib.CheckpointPolicy(every_steps=every, keep=ALL)
    evaluator = looplib.OrbitEvaluator(evaluator) if isinstance(evaluator, orbit.AbstractEvaluator) else evaluator
    if isinstance(trainer, orbit.AbstractTrainer):
        trainer = looplib.OrbitTrainer(trainer)
    if not settings.get("model_dir"):
        settings.setdefault("writers", [])
    return flat_config.controller(
        trainer=trainer,
        evaluator=evaluator,
        strategy=strategy,
        checkpoints=policy,
        guards=guards,
        steps_per_loop=4,
        **settings,
    )


def run(model_dir, steps, make=Classifier, strategy=DEFAULT, keras=tf_keras, eval_interval=7, **settings):
    with strategy.scope():
        trainer = make()
        evaluator = ClassifierEvaluator(trainer.model, keras=keras)
    with controller(trainer, evaluator, strategy, model_dir=model_dir, **settings) as c:
        c.train_and_evaluate(steps, eval_interval)
    return trainer


def orbit_run(model_dir, steps, strategy=DEFAULT, keras=tf_keras, eval_interval=7):
    """Trains as `run` does, under Orbit; returns (trainer, outputs of training, outputs of evaluation, saved steps)."""
    with strategy.scope():
        trainer = Classifier(keras=keras)
        evaluator = ClassifierEvaluator(trainer.model, keras=keras)
    outputs = [], []
    manager = tf.train.CheckpointManager(
        tf.train.Checkpoint(model=trainer.model), str(model_dir), None, step_counter=trainer.global_step,
        checkpoint_interval=10,
    )  # fmt: skip
    orbit.Controller(
        global_step=trainer.global_step,
        trainer=trainer,
        evaluator=evaluator,
        strategy=strategy,
        steps_per_loop=4,
        checkpoint_manager=manager,
        train_actions=[lambda output: outputs[0].append(tf.nest.map_structure(float, output))],
        eval_actions=[lambda output: outputs[1].append(tf.nest.map_structure(float, output))],
    ).train_and_evaluate(steps, eval_interval=eval_interval)
    return trainer, *outputs, [int(path.rpartition("-")[2]) for path in manager.checkpoints]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, family",
    [
        ("default", "keras"),
        ("mirrored_x2", "tf_keras"),
        *more([("default", "tf_keras"), ("one_device", "keras"), ("one_device", "tf_keras"), ("mirrored_x2", "keras")]),
    ],
)
def test_weights_and_metrics_are_those_that_orbit_comes_to(name, family, tmp_path):
    strategy, keras = make_strategy(name), pytest.importorskip(family)
    theirs, trained, evaluated, _ = orbit_run(tmp_path / "orbit", 24, strategy, keras, eval_interval=8)
    ours = run(tmp_path / "ours", 24, lambda: Classifier(keras=keras), strategy, keras, eval_interval=8, every=8)
    for a, b in zip(theirs.weights(), ours.weights()):
        np.testing.assert_array_equal(a, b)
    records = {split: [r for r in curve(tmp_path / "ours") if r["split"] == split] for split in ("train", "eval")}
    assert [r["step"] for r in records["train"]] == [4, 8, 12, 16, 20, 24]
    assert [(r["training_loss"], r["train/accuracy"]) for r in records["train"]] == [
        (output["training_loss"], output["train"]["accuracy"]) for output in trained
    ]
    assert [r["accuracy"] for r in records["eval"]] == [output["accuracy"] for output in evaluated]


@pytest.mark.slow
def test_saves_evaluations_and_reports_come_at_exact_multiples_where_orbits_drift(tmp_path):
    *_, drifted = orbit_run(tmp_path / "orbit", 45)
    assert drifted == [4, 14, 25, 35, 45]
    run(tmp_path / "ours", 45)
    assert saved_steps(tmp_path / "ours") == sorted({10, 20, 30, 40, 7, 14, 21, 28, 35, 42, 45})
    steps = {split: [r["step"] for r in curve(tmp_path / "ours") if r["split"] == split] for split in ("train", "eval")}
    assert steps == {"train": [*range(4, 45, 4), 45], "eval": [*range(7, 45, 7), 45]}


def preset(start):
    trainer = Classifier()
    trainer.global_step.assign(start)
    return trainer


def steps_saved(model_dir):
    reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(os.path.join(model_dir, "checkpoints")))
    return {int(reader.get_tensor(name)) for name in reader.get_variable_to_shape_map() if "step" in name}


@pytest.mark.parametrize("name", ["default", "mirrored_x2"])
def test_a_run_begins_at_the_step_that_the_trainer_has_and_ends_where_orbits_does(name, tmp_path):
    strategy = make_strategy(name)
    with strategy.scope():
        theirs, ours = preset(10), preset(10)
    orbit.Controller(global_step=theirs.global_step, trainer=theirs, strategy=strategy, steps_per_loop=4).train(18)
    with controller(ours, strategy=strategy, model_dir=tmp_path) as c:
        assert c.global_step == 10
        c.train(18)
    for a, b in zip(theirs.weights(), ours.weights()):
        np.testing.assert_array_equal(a, b)
    assert [(record["step"], record["split"]) for record in curve(tmp_path)] == [
        (12, "train"),
        (16, "train"),
        (18, "train"),
    ]
    assert steps_saved(tmp_path) == {18}
    resumed = run(tmp_path, 22, eval_interval=22, strategy=strategy)
    assert int(tf.identity(resumed.global_step)) == 22 and steps_saved(tmp_path) == {22}


def test_a_step_that_is_assigned_between_two_calls_of_train_is_refused(tmp_path):
    trainer = Classifier()
    with controller(trainer, model_dir=tmp_path) as c:
        c.train(4)
        trainer.global_step.assign(0)
        for call in (lambda: c.train(8), c.save_checkpoint):
            with pytest.raises(StepError, match="Classifier counts 0 steps at step 4"):
                call()
        c.restore_checkpoint()
        c.train(8)
        assert int(trainer.global_step) == 8


def test_a_trainer_whose_loop_is_divided_for_summaries_trains_and_resumes_as_any_other(tmp_path):
    divided = orbit.StandardTrainerOptions(use_tpu_summary_optimization=True)

    def make(options):
        trainer = Classifier(options=options)
        trainer.optimizer.build(trainer.model.trainable_variables)
        return trainer

    runs = [run(tmp_path / "whole", 20, lambda: make(None)), run(tmp_path / "divided", 8, lambda: make(divided))]
    runs[1] = run(tmp_path / "divided", 20, lambda: make(divided))
    for a, b in zip(*(trainer.weights() for trainer in runs)):
        np.testing.assert_array_equal(a, b)


def test_a_job_that_only_evaluates_takes_a_checkpoint_of_a_model_alone(tmp_path):
    trained = run(None, 8)
    path = tf.train.Checkpoint(model=trained.model).save(str(tmp_path / "model"))
    evaluator = looplib.OrbitEvaluator(ClassifierEvaluator(Classifier().model))
    correct = np.mean(np.argmax(trained.model.predict(toy.X, verbose=0), axis=1) == toy.Y)
    for model_dir in (None, tmp_path / "run"):
        start = looplib.Start(warm_start=path)
        with looplib.Controller(evaluator=evaluator, start=start, model_dir=model_dir, writers=[]) as c:
            assert c.evaluate()["eval"]["accuracy"] == pytest.approx(correct)
    with pytest.raises(looplib.UsageError, match="warm_start for the weights alone"):
        looplib.Controller(evaluator=evaluator, start=looplib.Start(continue_from=path), writers=[])


class Initialized(looplib.OrbitTrainer):
    def initialize(self):
        self.trainer.global_step.assign(6)


def test_a_run_begins_at_the_step_that_initialize_sets(tmp_path):
    with controller(Initialized(Classifier()), model_dir=tmp_path) as c:
        c.train(10)
        assert (c.global_step, int(c._loops.training.own_count)) == (10, 10)
    assert steps_saved(tmp_path) == {10}


class WithoutState(Classifier):
    """Whose pipeline has no state that TensorFlow can save."""

    def __init__(self):
        super().__init__(data().repeat().map(lambda x, y: (tf.numpy_function(lambda x: x, [x], tf.float32), y)))

    def loss(self, x, y, logits):
        x.set_shape([None, toy.NUM_FEATURES])
        return super().loss(x, y, logits)

    def train_step(self, iterator):
        def step_fn(inputs):
            x, y = inputs
            x = tf.ensure_shape(x, [8, toy.NUM_FEATURES])
            with tf.GradientTape() as tape:
                loss = self.loss(x, y, self.model(x, training=True))
            variables = self.model.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
            self.train_loss.update_state(loss)

        self.strategy.run(step_fn, args=(next(iterator),))
        self.global_step.assign_add(1)


class OfTwo(Classifier):
    """Trains on two data sets by turns, so the step alone does not give the position in each."""

    def __init__(self):
        super().__init__({"a": data(8).repeat(), "b": data(5).repeat()})

    def train_step(self, iterator):
        if self.global_step % 3 == 0:
            super().train_step(iterator["a"])
        else:
            super().train_step(iterator["b"])


@pytest.mark.slow
@pytest.mark.parametrize("make", [Classifier, WithoutState, OfTwo])
@pytest.mark.parametrize("stops", [[13, 30], *more([[4, 10, 21, 30]])])
def test_a_run_stopped_and_started_again_is_one_that_was_not(make, stops, tmp_path):
    whole = run(tmp_path / "whole", 30, make)
    for stop in stops:
        parts = run(tmp_path / "parts", stop, make)
    for a, b in zip(whole.weights(), parts.weights()):
        np.testing.assert_array_equal(a, b)
    assert int(parts.global_step) == 30 and curve(tmp_path / "parts") == curve(tmp_path / "whole")


@pytest.mark.slow
def test_where_the_position_in_the_data_is_unknown_weights_and_step_are_restored_and_the_log_says_so(tmp_path, caplog):
    caplog.set_level("INFO", logger="absl")
    strategy = make_strategy("mirrored_x2")
    first = run(tmp_path, 13, strategy=strategy)
    with strategy.scope():
        second = Classifier()
    with controller(second, strategy=strategy, model_dir=tmp_path) as c:
        assert c.global_step == 13
    assert second.global_step.numpy() == 13 and second.optimizer.iterations.numpy() == 13
    for a, b in zip(first.weights(), second.weights()):
        np.testing.assert_array_equal(a, b)
    assert (
        "the position in the data of Classifier is unknown; after step 13 its data starts from the beginning"
        in caplog.text
    )


class Poisoned(Classifier):
    """Whose loss is NaN in one step, once in its life."""

    def __init__(self, bad_step=17):
        super().__init__()
        self.bad_step = bad_step
        self.armed = True
        self.value = tf.Variable(0.0, trainable=False)

    def train(self, num_steps):
        bad = self.armed and self.global_step <= self.bad_step < self.global_step + tf.cast(num_steps, tf.int64)
        self.value.assign(np.nan if bad else 0.0)
        self.armed = self.armed and not bad
        result = super().train(num_steps)
        self.value.assign(0.0)
        return result

    def loss(self, x, y, logits):
        return super().loss(x, y, logits) * (1.0 + self.value)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_halts_the_run_and_the_newest_checkpoint_is_good(tmp_path):
    with pytest.raises(looplib.DivergenceError, match="at step 20, .*training_loss.* not finite.*ckpt-1[46], is good"):
        run(tmp_path, 40, Poisoned, every=8)
    assert saved_steps(tmp_path)[-1] == 16
    reader = tf.train.load_checkpoint(os.path.join(tmp_path, "checkpoints", "ckpt-16"))
    for name, shape in reader.get_variable_to_shape_map().items():
        value = np.asarray(reader.get_tensor(name))
        assert value.dtype.kind != "f" or np.isfinite(value).all(), (name, shape)


@pytest.mark.slow
def test_a_rollback_goes_back_and_past_the_bad_data(tmp_path, caplog):
    trainer = run(tmp_path, 40, Poisoned, every=8, guards=looplib.Guards(non_finite="rollback"))
    assert "rolling back to step 16 and continuing with the data after step 20 (rollback 1 of 3)" in caplog.text
    assert trainer.global_step.numpy() == 40 and all(np.isfinite(weight).all() for weight in trainer.weights())
    # 24 batches more than 16 steps took, from the 21st on.
    clean = Classifier()
    batches = iter(data().repeat())
    for number in range(1, 45):
        batch = next(batches)
        if not 16 < number <= 20:
            clean.train_step(iter([batch]))
    for a, b in zip(clean.weights(), trainer.weights()):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


class Line(orbit.AbstractTrainer):
    """A train() of its own: fits w x to 2 x, by numpy's arithmetic; its data may end."""

    def __init__(self, ends_at=10**9):
        self.w = tf.Variable(0.0)
        self.global_step = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.ends_at = ends_at

    def train(self, num_steps):
        for _ in range(int(num_steps)):
            if int(self.global_step) == self.ends_at:
                break
            self.w.assign_sub(0.1 * (self.w - 2.0))
            self.global_step.assign_add(1)
        return {"a": {"b": {"w": self.w}, "loss": np.float32(self.w - 2) ** 2}, "steps": num_steps}


class LineError(orbit.AbstractEvaluator):
    def __init__(self, trainer):
        self.w = trainer.w
        self.asked = []

    def evaluate(self, num_steps):
        self.asked.append(int(num_steps))
        return {"line": {"error": abs(self.w - 2.0)}}


def test_a_train_of_its_own_trains_and_resumes_and_its_nested_metrics_get_names(tmp_path):
    trainer = Line()
    evaluator = LineError(trainer)
    policy = looplib.CheckpointPolicy(keep=looplib.KeepBest("eval/line/error", "min"))
    with looplib.Controller(
        looplib.RunConfig(steps_per_loop=4),
        trainer=looplib.OrbitTrainer(trainer),
        evaluator=looplib.OrbitEvaluator(evaluator),
        model_dir=tmp_path,
        checkpoints=policy,
    ) as c:  # fmt: skip
        results = c.train_and_evaluate(6, 3, eval_steps=5)
    w = 2 * (1 - 0.9**6)
    assert trainer.w.numpy() == pytest.approx(w) and evaluator.asked == [5, 5]
    assert results["eval"] == {"line/error": pytest.approx(2 - w)}
    last = curve(tmp_path)[-1]
    assert last["a/b/w"] == pytest.approx(w) and last["steps"] == 2  # the last call's: from step 4 to 6
    trainer = Line()
    with controller(trainer, model_dir=tmp_path) as c:
        c.train(12)
    assert trainer.w.numpy() == pytest.approx(2 * (1 - 0.9**12)) and trainer.global_step.numpy() == 12


def test_a_trainer_that_stops_where_its_data_ends_ends_the_run(tmp_path, caplog):
    trainer = Line(ends_at=10)
    with controller(trainer, model_dir=tmp_path) as c:
        c.train(40)
    assert c.global_step == 10 and saved_steps(tmp_path) == [10]
    assert "Line has trained to step 10, not to 40, because its data ended" in caplog.text
    trainer = Line(ends_at=11)
    with controller(trainer, model_dir=tmp_path) as c:
        assert c.train(-1)["steps"] == 2  # to the next report
    assert c.global_step == 11


@pytest.mark.slow
def test_a_data_set_that_ends_with_an_error_is_a_sentence_and_what_was_saved_stays_good(tmp_path):
    def make():
        return Classifier(train_dataset=data().repeat(4))  # 16 batches

    with pytest.raises(OrbitError, match="4.*16"):
        run(tmp_path, 40, make, every=8, eval_interval=40)
    assert saved_steps(tmp_path) == [8, 16]
    assert run(tmp_path, 16, make, every=8).optimizer.iterations == 16


@pytest.mark.slow
def test_a_trainer_that_does_not_count_is_a_sentence_where_orbit_loops_for_ever(tmp_path):
    for counts in (0, 2):
        message = (
            rf"Classifier.train\(4\) moved its global step by {4 * counts}; expected 4: give OrbitTrainer.global_step="
        )
        with pytest.raises(OrbitError, match=message):
            run(tmp_path, 40, lambda: Classifier(counts=counts))
    with pytest.raises(OrbitError, match="OrbitTrainer.global_step="):
        controller(Line(ends_at=0), model_dir=tmp_path).train(40)
    assert not saved_steps(tmp_path)


@pytest.mark.slow
def test_another_variable_counts_and_without_any_the_controller_does(tmp_path):
    trainer = Classifier(counts=0)
    with controller(looplib.OrbitTrainer(trainer, global_step=trainer.optimizer.iterations), model_dir=tmp_path) as c:
        c.train(10)
    assert trainer.optimizer.iterations == 10 and c.global_step == 10

    class Uncounted(Line):
        global_step = None

        def __init__(self):
            self.w = tf.Variable(0.0)
            self.calls = []

        def train(self, num_steps):
            self.calls.append(int(num_steps))

    trainer = Uncounted()
    with controller(trainer) as c:
        assert c.train(10) == {"steps_per_second": pytest.approx(c.train(10)["steps_per_second"])}
    assert c.global_step == 10 and trainer.calls == [4, 4, 2]


def test_a_checkpoint_says_what_to_save_under_which_names(tmp_path):
    trainer = Classifier()
    objects = tf.train.Checkpoint(net=trainer.model, opt=trainer.optimizer, global_step=trainer.global_step)
    with controller(looplib.OrbitTrainer(trainer, checkpoint=objects), model_dir=tmp_path) as c:
        c.train(5)
    names = [name for name, _ in tf.train.list_variables(os.path.join(tmp_path, "checkpoints", "ckpt-5"))]
    assert {name.partition("/")[0] for name in names} >= {"net", "opt", "orbit_step", "global_step"}
    assert not any(name.startswith(("model", "train_loss", "accuracy")) for name in names)
    evaluator = ClassifierEvaluator(Classifier().model)
    adapter = looplib.OrbitEvaluator(evaluator, checkpoint=tf.train.Checkpoint(net=evaluator.model))
    results = looplib.Controller(evaluator=adapter, model_dir=tmp_path, writers=[]).evaluate()
    assert results["eval"]["accuracy"] == pytest.approx(toy.numpy_accuracy(trainer.weights()))


@pytest.mark.slow
def test_a_new_run_takes_weights_from_a_checkpoint_of_orbits(tmp_path):
    theirs, *_ = orbit_run(tmp_path / "orbit", 10)
    trainer = Classifier()
    looplib.Controller(
        trainer=looplib.OrbitTrainer(trainer),
        start=looplib.Start(warm_start=str(tmp_path / "orbit" / "ckpt-10")),
        writers=[],
    )
    for a, b in zip(theirs.weights(), trainer.weights()):
        np.testing.assert_array_equal(a, b)


def test_an_inspection_of_the_step_is_refused():
    with pytest.raises(OrbitError):
        controller(Line()).loops["train"].step  # noqa: B018


@pytest.mark.slow
def test_an_evaluation_job_and_evaluators_of_both_kinds_find_the_model(tmp_path):
    trainer = run(tmp_path, 14)
    job = controller(None, ClassifierEvaluator(Classifier().model), model_dir=tmp_path)
    expected = toy.numpy_accuracy([weight.astype(np.float64) for weight in trainer.weights()])
    assert job.global_step == 14 and job.evaluate()["eval"] == {"accuracy": pytest.approx(expected)}
    other = Classifier()
    both = {
        "orbits": looplib.OrbitEvaluator(ClassifierEvaluator(other.model)),
        "ours": toy.RegressionEvaluator(other.model),
    }
    results = controller(None, both, model_dir=tmp_path, global_batch_size=8).evaluate()
    assert (
        results["orbits"]["accuracy"] == pytest.approx(results["ours"]["accuracy"])
        and results["ours"]["examples"] == 37
    )


class Unbuilt(Classifier):
    """Whose model gets its variables in its first call."""

    def __init__(self):
        super().__init__()
        self.model = tf_keras.Sequential([tf_keras.layers.Dense(4, "relu"), tf_keras.layers.Dense(toy.NUM_CLASSES)])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mirrored_x2", *more(["default"])])
def test_a_model_that_gets_its_variables_late_trains_resumes_and_is_evaluated_by_a_job_of_its_own(name, tmp_path):
    strategy = make_strategy(name)
    first = run(tmp_path, 8, Unbuilt, strategy, every=8, eval_interval=8)
    with strategy.scope():
        second, third = Unbuilt(), Unbuilt()
        evaluator = ClassifierEvaluator(third.model)
    with controller(second, strategy=strategy, model_dir=tmp_path) as c:
        assert c.global_step == 8
    for a, b in zip(first.weights(), second.weights()):
        np.testing.assert_array_equal(a, b)
    job = controller(None, evaluator, strategy, model_dir=tmp_path, writers=[])
    assert (
        job.evaluate()["eval"]["accuracy"]
        == curve(tmp_path)[-2 if curve(tmp_path)[-1]["split"] == "train" else -1]["accuracy"]
    )
    for a, b in zip(first.weights(), third.weights()):
        np.testing.assert_array_equal(a, b)


def test_sigterm_ends_the_run_after_the_call_with_a_save_and_it_resumes(tmp_path):
    class Slow(Line):
        def train(self, num_steps):
            for _ in range(int(num_steps)):
                time.sleep(0.02)
                super().train(1)
            return {}

    trainer = Slow()

    def send():
        while int(trainer.global_step) < 9:
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send).start()
    with controller(trainer, model_dir=tmp_path) as c, pytest.raises(Preempted, match="ended by SIGTERM at step 1[02]"):
        c.train(400)
    assert saved_steps(tmp_path)[-1] == c.global_step == trainer.global_step.numpy()
    trainer = Slow()
    with controller(trainer, model_dir=tmp_path) as c:
        c.train(20)
    assert trainer.w.numpy() == pytest.approx(2 * (1 - 0.9**20))


@pytest.mark.slow
def test_the_watchdog_sees_the_steps_inside_of_a_call_and_leaves_evaluations_alone(monkeypatch):
    ended = []
    monkeypatch.setattr("looplib.guards.watchdog.Watchdog._end", lambda self, phase, *_: ended.append(phase))

    class Long(Line):
        def train(self, num_steps):
            for _ in range(int(num_steps)):
                time.sleep(0.15)
                super().train(1)

    class LongError(LineError):
        def evaluate(self, num_steps):
            time.sleep(1.0)

    trainer = Long()
    with controller(trainer, LongError(trainer), guards=looplib.Guards(stall_limit=0.5)) as c:
        c.train_and_evaluate(8, 8)
    assert not ended

    class Hangs(Line):
        def train(self, num_steps):
            time.sleep(1.0)
            return super().train(num_steps)

    controller(Hangs(), guards=looplib.Guards(stall_limit=0.5)).train(4)
    assert ended and set(ended) == {"train"}


def test_an_error_in_the_step_is_raised_before_the_first_step():
    class Broken(Classifier):
        def loss(self, x, y, logits):
            raise KeyError("no such feature")

    with pytest.raises(KeyError, match="no such feature"):
        controller(Broken())


@pytest.mark.slow
def test_variables_made_too_late_to_be_restored_are_refused_before_the_first_save(tmp_path):
    class Late(Line):
        def train(self, num_steps):
            if not hasattr(self, "more"):
                self.more = [tf.Variable(1.0)]
                self.model.build([None, 3])
            return super().train(num_steps)

        def __init__(self):
            super().__init__()
            self.model = tf_keras.Sequential([tf_keras.layers.Dense(2)])

    with pytest.raises(OrbitError, match="Late.train.*__init__"):
        controller(Late(), model_dir=tmp_path).train(8)
    assert not saved_steps(tmp_path)
    controller(Late()).train(8)  # where nothing is saved, nothing is lost


def test_metrics_of_bfloat16_and_bool_are_kept_over_a_restart_and_guarded(tmp_path):
    class Low(Line):
        loss = 0.5

        def train(self, num_steps):
            super().train(num_steps)
            return {"loss": tf.constant(self.loss, tf.bfloat16), "good": tf.constant(True)}

    found = {"loss": 0.5, "good": 1}
    trained = controller(Low(), model_dir=tmp_path)
    assert trained.train(6).items() >= found.items()
    trained.close()
    again = controller(Low(), model_dir=tmp_path)
    assert again.loops["train"].reducer.state() == found  # of a window that is not complete
    bad = Low()
    bad.loss = float("nan")
    with pytest.raises(looplib.DivergenceError, match="loss"):
        controller(bad).train(4)


def test_metrics_that_are_no_numbers_are_sentences_and_loop_end_mends_them():
    class Odd(Line):
        def train(self, num_steps):
            super().train(num_steps)
            return {"confusion": np.eye(2), "step": 1.0}

    class Mended(looplib.OrbitTrainer):
        def loop_end(self, metrics):
            return {"recall": metrics["confusion"][1, 1]}

    with pytest.raises(MetricError, match="'confusion'"):
        controller(Odd()).train(4)
    assert controller(Mended(Odd())).train(4)["recall"] == 1.0
    returns_a_list = type("Listing", (Line,), {"train": lambda self, num_steps: [1.0]})()
    with pytest.raises(MetricError):
        controller(returns_a_list).train(4)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"loop": "xla"}, "loop.*loop=graph"),
        ({"loop": "auto"}, "loop"),
        (
            {"guards": looplib.Guards(non_finite="skip")},
            "",
        ),
    ],
)
def test_what_a_loop_of_its_own_cannot_do_is_refused_when_the_controller_is_built(settings, message):
    with pytest.raises(OrbitError, match=message):
        controller(Line(), **settings)


def test_several_workers_are_refused(monkeypatch):
    monkeypatch.setattr(adapters, "Workers", lambda strategy: type("Two", (), {"count": 2}))
    with pytest.raises(OrbitError):
        controller(Line())


@pytest.mark.slow(spread=3)
@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: looplib.OrbitTrainer(object()),
            r"OrbitTrainer.*train\(num_steps\)",
        ),
        (lambda: looplib.OrbitEvaluator(Line()), r"OrbitEvaluator.*evaluate\(num_steps\)"),
        (lambda: looplib.OrbitTrainer(Line(), global_step=3), "global_step.*tf.Variable"),
        (lambda: looplib.OrbitTrainer(Line(), checkpoint="x"), "OrbitTrainer"),
        (
            lambda: looplib.Controller(trainer=Line()),
            "trainer.*looplib.OrbitTrainer",
        ),
        (
            lambda: looplib.Controller(evaluator=LineError(Line())),
            "looplib.OrbitEvaluator",
        ),
        (lambda: looplib.Controller(trainer=toy.Regression()), "global_batch_size"),
    ],
)
def test_bad_input_is_a_sentence(make, message):
    with pytest.raises(looplib.UsageError, match=message):
        make()


def test_a_loop_in_python_ends_with_its_data_and_its_count_is_what_is_believed():
    options = orbit.StandardTrainerOptions(use_tf_while_loop=False, use_tf_function=False)
    trainer = Classifier(data().repeat(4), options)  # 16 batches
    c = controller(trainer)
    c.train(18)
    assert c.global_step == trainer.optimizer.iterations == 16


@pytest.mark.slow
def test_what_would_never_end_is_refused():
    trainer = Classifier()
    endless = ClassifierEvaluator(trainer.model, data(shuffled=False).repeat())
    with pytest.raises(EndlessDataError):
        controller(trainer, endless).train_and_evaluate(4, 4)
    with pytest.raises(EndlessDataError):
        controller(trainer).train(-1)  # whose data another controller had before
    assert trainer.global_step == 0


@pytest.mark.slow
def test_a_binary_runs_them(python, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import dataclasses, looplib\nfrom looplib import launch\nfrom orbit_loops.foreign_test import Line, LineError\n"
        "@dataclasses.dataclass\nclass Config:\n    x: int = 0\n"
        "def build(config):\n    t = Line()\n"
        "    return looplib.OrbitTrainer(t), looplib.OrbitEvaluator(LineError(t))\n"
        "if __name__ == '__main__':\n    launch.run(build, Config(), train_steps=8, eval_interval=4)\n"
    )
    done = subprocess.run(
        [python, program, f"--model_dir={tmp_path}/run"],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": PYTHONPATH},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "step       8  eval   line/error" in done.stdout


@pytest.mark.slow
def test_an_evaluator_may_hold_its_trainer_and_the_run_resumes_under_another_strategy(tmp_path):
    class Holding(ClassifierEvaluator):
        def __init__(self, trainer):
            self.t = trainer
            super().__init__(trainer.model)

    for steps, strategy in ((7, DEFAULT), (14, make_strategy("mirrored_x2"))):
        with strategy.scope():
            trainer = Classifier()
            evaluator = Holding(trainer)
        with controller(trainer, evaluator, strategy, model_dir=tmp_path) as c:
            c.train_and_evaluate(steps, 7)
        assert c.global_step == steps
    alone = Holding(Classifier())
    job = controller(None, alone, model_dir=tmp_path)
    expected = toy.numpy_accuracy([weight.astype(np.float64) for weight in trainer.weights()])
    assert job.evaluate()["eval"]["accuracy"] == pytest.approx(expected)

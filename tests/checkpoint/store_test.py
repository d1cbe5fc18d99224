"""Checkpoints that are kept or left alone, the one that a run starts from, and the content of a snapshot."""

import io
import json
import logging
import sys

import keras as keras3
import numpy as np
import pytest
import tensorflow as tf
import toy
from conftest import make_strategy
from tampering import sign

import looplib
from looplib.__main__ import main as cli
from looplib.binary import command_line
from looplib.checkpoint.saving import Snapshots
from looplib.errors import (
    CheckpointError,
    MetricError,
    MismatchError,
    MissingPartError,
    NoCheckpointError,
    RunDirectoryError,
    SettingError,
    StateError,
    WarmStartError,
)
from looplib.run import commits
from looplib.run.policy import KeepBest, KeepEvery, KeepLast
from looplib.task.state import ReplicaState
from looplib.weights.loading import warm_start

SCORES = {1: 0.1, 2: 0.9, 3: 0.3, 4: 0.8, 5: 0.2, 6: 0.4, 7: 0.35, 8: 0.5, 9: 0.45, 10: 0.15}


class Scored(toy.RegressionEvaluator):
    """Reports a given score for each step, to know which is best."""

    def __init__(self, trainer):
        super().__init__(trainer.model)
        self.trainer = None
        self.step_of = lambda: int(trainer.global_step)

    def loop_end(self, metrics):
        return {**metrics, "score": SCORES[self.step_of()]}


def run_scored(folder, steps, *keep):
    trainer = toy.Regression()
    policy = looplib.CheckpointPolicy(every_steps=1, keep=keep)
    with toy.controller(
        make_strategy("default"), trainer, Scored(trainer), model_dir=folder, checkpoints=policy
    ) as controller:
        controller.train_and_evaluate(steps, 1)
    return sorted(done.step for done in commits.committed(folder / "checkpoints"))


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    "keep, expected",
    [
        ((KeepLast(2),), [9, 10]),
        ((KeepBest("eval/score", "max"),), [2, 10]),
        ((KeepBest("eval/score", "max", number=2),), [2, 4, 10]),
        ((KeepBest("eval/score", "min", 2),), [1, 10]),
        ((KeepEvery(4),), [4, 8, 10]),
        ((KeepLast(2), KeepBest("eval/score", "max"), KeepEvery(4)), [2, 4, 8, 9, 10]),
    ],
)
def test_rules_are_composed_and_the_newest_is_always_kept(keep, expected, tmp_path):
    assert run_scored(tmp_path, 10, *keep) == expected


def test_the_best_is_remembered_over_restarts(tmp_path):
    keep = KeepLast(1), KeepBest("eval/score", "max")
    assert run_scored(tmp_path, 3, *keep) == [2, 3]
    assert run_scored(tmp_path, 7, *keep) == [2, 7]
    marker = json.loads((tmp_path / "checkpoints" / "ckpt-2.commit").read_text())
    assert [(done.step, done.scores["eval/score"]) for done in looplib.list_checkpoints(tmp_path)] == [
        (7, SCORES[7]), (2, SCORES[2])
    ]  # fmt: skip
    assert marker["scores"]["eval/score"] == SCORES[2] and "eval/accuracy" in marker["scores"]
    for name in ("data-00000-of-00001", "index", "commit"):
        (tmp_path / "checkpoints" / f"ckpt-2.{name}").unlink()
    assert run_scored(tmp_path, 10, *keep) == [8, 10]


@pytest.mark.slow
def test_foreign_files_are_never_touched(tmp_path):
    """Names close to those of checkpoints, a checkpoint of TensorFlow's own and folders stay as they are."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    tf.train.Checkpoint(v=tf.Variable(1.0)).write(str(folder / "best-4"))
    foreign = [
        "notes.txt",
        "ckpt-x.commit",
        "ckpt-1.commit.old",
        "myckpt-2.index",
        "ckpt-3.json",
        "ckpt-",
        "ckpt-4.index.bak",
    ]
    for name in foreign:
        (folder / name).write_text(f"this is {name}")
    (folder / "ckpt-5-exported").mkdir()
    (folder / "ckpt-5-exported" / "saved_model.pb").write_text("a model")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert len(before) == len(foreign) + 3
    assert run_scored(tmp_path, 5, KeepLast(1)) == [5]
    assert run_scored(tmp_path, 8, KeepLast(1)) == [8]
    for path, content in before.items():
        assert path.read_bytes() == content
    assert not (folder / "set_aside").exists()


# What a run starts from.


def doubled(keras):
    """A model whose weights tell where they come from."""
    model = toy.Regression(keras).model
    model.layers[-1].set_weights([toy.KERNEL * 2, np.ones(toy.NUM_CLASSES, np.float32)])
    return model


def save_checkpoint(model, folder):
    trainer = toy.Regression(__import__(type(model).__module__.split(".")[0]))
    trainer.model.set_weights(model.get_weights())
    with toy.controller(make_strategy("default"), trainer, model_dir=folder) as controller:
        return controller.save_checkpoint()


SAVED = {
    "a checkpoint of looplib": (None, save_checkpoint),
    "tf.saved_model.save": (None, lambda model, folder: tf.saved_model.save(model, str(folder))),
    "model.export": (None, lambda model, folder: model.export(str(folder))),
    "model.save": ("tf_keras", lambda model, folder: model.save(str(folder), save_format="tf")),
}


def can_save(params):
    return SAVED[params["how"]][0] in (None, params["keras"])


@pytest.mark.slow(keep=1)
@pytest.mark.slow(pairs=can_save)
@pytest.mark.parametrize("how", SAVED)
@pytest.mark.parametrize("name", ["default", "mirrored_x2"])
def test_a_warm_start_takes_the_weights_and_nothing_else(how, name, keras, tmp_path):
    family, save = SAVED[how]
    if family not in (None, keras.__name__):
        pytest.skip("a way of tf_keras only")
    path = save(doubled(keras), tmp_path / "source") or tmp_path / "source"
    trainer, _ = toy.build(make_strategy(name), keras, "adam")
    run = tmp_path / "run"
    with toy.controller(
        make_strategy(name), trainer, model_dir=run, start=looplib.Start(warm_start=str(path))
    ) as controller:
        assert controller.global_step == 0 and controller.restored_from is None
        np.testing.assert_array_equal(trainer.weights()[0], toy.KERNEL * 2)
        np.testing.assert_array_equal(trainer.weights()[1], 1)
        controller.train(2)
        trained = trainer.weights()
    again, _ = toy.build(make_strategy(name), keras, "adam")
    with toy.controller(
        make_strategy(name), again, model_dir=run, start=looplib.Start(warm_start=str(path))
    ) as controller:
        assert controller.global_step == 2  # its own checkpoint comes first
        np.testing.assert_array_equal(again.weights()[0], trained[0])


@pytest.mark.slow(spread=1)
def test_an_export_of_normalization_and_dropout_finds_its_places(keras, tmp_path):
    def build():
        layers = keras.layers
        x = keras.Input((5,))
        a = layers.Dense(4)(x)
        b = layers.Dropout(0.5)(layers.BatchNormalization()(a))
        return keras.Model(x, layers.Dense(4)(layers.Add()([layers.Dense(4)(b), a])))

    source, target = build(), build()
    source.set_weights([np.random.RandomState(i).randn(*w.shape) for i, w in enumerate(source.get_weights())])
    source.export(str(tmp_path / "source"))
    warm_start({"model": target}, str(tmp_path / "source"))
    for a, b in zip(source.get_weights(), target.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def other_model(keras, units=9):
    return keras.Sequential([keras.layers.InputLayer((toy.NUM_FEATURES,)), keras.layers.Dense(units)])


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize(
    "case, sentence",
    [
        ("nothing there", "no_such"),
        ("other shapes", ""),
        ("an export of other layers", ""),
        ("damaged", ""),
    ],
)
def test_a_warm_start_that_cannot_be_is_a_sentence(case, sentence, tmp_path):
    path, target = tmp_path / "source", toy.Regression().model
    if case == "nothing there":
        path = tmp_path / "no_such"
    elif case == "an export of other layers":
        doubled(keras3).export(str(path))
        target = keras3.Sequential([keras3.Input((5,)), keras3.layers.Dense(3, name="head")])
    else:
        tf.saved_model.save(other_model(keras3) if case == "other shapes" else doubled(keras3), str(path))
        if case == "damaged":
            (path / "variables" / "variables.index").write_bytes(b"no index")
    kind = NoCheckpointError if case == "nothing there" else WarmStartError
    with pytest.raises(kind, match=sentence) as caught:
        warm_start({"model": target}, str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.slow(spread=1)
def test_a_partial_restore_takes_what_both_have_and_leaves_the_rest(keras, tmp_path):
    class Extended(toy.Regression):
        def __init__(self):
            super().__init__(keras)
            self.extra = tf.Variable([5.0, 6.0], trainable=False)

    first = toy.Regression(keras)
    with toy.controller(make_strategy("default"), first, model_dir=tmp_path) as controller:
        controller.train(3)
    with pytest.raises(MismatchError):
        toy.controller(make_strategy("default"), Extended(), model_dir=tmp_path)
    second = Extended()
    with toy.controller(
        make_strategy("default"), second, model_dir=tmp_path, start=looplib.Start(partial=True)
    ) as controller:
        assert controller.global_step == 3
        np.testing.assert_array_equal(second.weights()[0], first.weights()[0])
        np.testing.assert_array_equal(second.extra, [5.0, 6.0])
        controller.train(4)
    third = toy.Regression(keras)  # and the other way round: the checkpoint has more
    with toy.controller(
        make_strategy("default"), third, model_dir=tmp_path, start=looplib.Start(partial=True)
    ) as controller:
        assert controller.global_step == 4
        np.testing.assert_array_equal(third.weights()[0], second.weights()[0])


@pytest.mark.slow
def test_a_partial_restore_and_a_warm_start_leave_a_new_head_as_it_is_and_name_it(keras, tmp_path, caplog):
    def build(classes):
        trainer = toy.Regression(keras)
        layers = [keras.layers.InputLayer((5,)), keras.layers.Dense(4), keras.layers.Dense(classes)]
        trainer.model = keras.Sequential(layers)
        return trainer

    first = build(3)
    with toy.controller(make_strategy("default"), first, model_dir=tmp_path / "a") as controller:
        controller.train(3)
    body = first.weights()[0]
    for place, settings, step in (
        ("a", {"partial": True}, 3),
        ("b", {"warm_start": str(tmp_path / "a" / "checkpoints" / "ckpt-3")}, 0),
    ):
        caplog.clear()
        other = build(7)
        head = other.weights()[2]
        start = looplib.Start(**settings)
        with toy.controller(make_strategy("default"), other, model_dir=tmp_path / place, start=start) as controller:
            assert controller.global_step == step
            np.testing.assert_array_equal(other.weights()[0], body)
            np.testing.assert_array_equal(other.weights()[2], head)
            assert "of another shape: " in caplog.text and "not taken from" in caplog.text
            controller.train(5)


@pytest.mark.slow
def test_checkpoints_of_another_optimizer_are_refused_also_where_their_slots_fit(tmp_path):
    with toy.controller(make_strategy("default"), toy.Regression(), model_dir=tmp_path) as controller:
        controller.train(3)
    other = toy.Regression()
    other.optimizer = keras3.optimizers.RMSprop(0.1)
    with pytest.raises(MismatchError, match=r"\(SGD\).*\(RMSprop\)"):
        toy.controller(make_strategy("default"), other, model_dir=tmp_path)


@pytest.mark.slow
def test_going_on_from_an_older_checkpoint_sets_the_newer_ones_aside(tmp_path, caplog):
    policy = looplib.CheckpointPolicy(every_steps=2)
    with toy.controller(
        make_strategy("default"), toy.Regression(), model_dir=tmp_path, checkpoints=policy
    ) as controller:
        controller.train(6)
        controller.restore_checkpoint(tmp_path / "checkpoints" / "ckpt-2")
        controller.train(4)
    assert [done.step for done in commits.committed(str(tmp_path / "checkpoints"))] == [4, 2]
    assert "the checkpoint of step 6 was superseded by this run" in caplog.text


def test_a_rule_by_a_metric_that_is_not_there_is_a_sentence_at_once(tmp_path):
    trainer, evaluator = toy.build(make_strategy("default"))
    for metric, message in (
        ("test/accuracy", "needs the evaluator 'test', which does not exist; the evaluators are: eval"),
        ("eval/acc", r"\(--keep_best=max:eval/acc\) needs a metric that the evaluation returns"),
        ("eval/acc", "it returns eval/accuracy"),
    ):
        policy = looplib.CheckpointPolicy(keep=(looplib.KeepLast(), looplib.KeepBest(metric)))
        with pytest.raises(MetricError, match=message):
            settings = dict(model_dir=tmp_path, checkpoints=policy)
            toy.controller(make_strategy("default"), trainer, evaluator, **settings).train_and_evaluate(4, 2)


@pytest.mark.slow(spread=3)
@pytest.mark.parametrize("text", ["accuracy", "eval/score", "most:eval/score", "max:score"])
def test_a_best_checkpoint_that_is_asked_for_wrongly_is_answered_with_the_form_of_the_flag(text):
    with pytest.raises(SettingError) as refused:
        command_line.policy({"keep_last": 5, "keep_best": text})
    sentence = str(refused.value)
    assert sentence.startswith(f"--keep_best is {text!r}; expected <evaluator>/<metric>, such as eval/accuracy or ")
    assert sentence.endswith("such as max:eval/score")


@pytest.mark.slow
def test_a_misspelt_metric_is_refused_before_the_first_step(keras, tmp_path):
    """Where `loop_end` is the default one, the trace of the evaluation tells the names; Keras metrics among them."""

    class Metrics(toy.RegressionEvaluator):
        def __init__(self, model):
            super().__init__(model)
            self.top = keras.metrics.SparseCategoricalAccuracy()

        def step_fn(self, inputs):
            self.top.update_state(inputs[1], self.model(inputs[0], training=False))
            return {**super().step_fn(inputs), "top": self.top, "norm": looplib.last(tf.constant(1.0))}

    trainer = toy.Regression(keras)
    for metric, known in (("accurracy", False), ("top", True), ("norm", True), ("accuracy", True), ("examples", True)):
        policy = looplib.CheckpointPolicy(keep=(looplib.KeepBest(f"eval/{metric}", "max"),))
        settings = dict(model_dir=tmp_path, checkpoints=policy)
        if known:
            toy.controller(make_strategy("default"), trainer, Metrics(trainer.model), **settings).close()
            continue
        with pytest.raises(MetricError, match="eval/accuracy.*eval/examples.*eval/norm.*eval/top"):
            toy.controller(make_strategy("default"), trainer, Metrics(trainer.model), **settings)


@pytest.mark.slow(spread=3)
@pytest.mark.parametrize(
    "metric, mode",
    [
        ("eval/loss", "min"),
        ("val/text/loss", "min"),
        ("eval/MAE", "min"),
        ("eval/perplexity", "min"),
        ("eval/accuracy", "max"),
        ("eval/AUC", "max"),
        ("loss/f1", "max"),
        ("eval/score", None),
        ("eval/examples", None),
        ("eval/validation_loss", None),
        ("val/loss/total", None),
        ("eval/word_error", None),
        ("eval/top_5_accuracy", None),
        ("eval/accuracy_loss", None),
        ("eval/closs", None),
    ],
)
def test_the_best_is_the_least_or_the_most_as_the_name_says_or_must_be_said(metric, mode):
    if mode is None:
        with pytest.raises(MetricError):
            KeepBest(metric)
    else:
        assert KeepBest(metric).mode == mode
    assert KeepBest(metric, "min").mode == "min" and KeepBest(metric, "max").mode == "max"


def saved(step, score):
    return looplib.Commit(f"/run/checkpoints/ckpt-{step}", step, 0.0, {}, {"eval/loss": score}, {})


@pytest.mark.parametrize("mode, best", [("min", 1), ("max", 4)])
def test_a_score_that_is_not_a_number_is_never_the_best_and_never_in_the_way(mode, best):
    scores = {1: 0.1, 2: float("nan"), 3: None, 4: 0.4, 5: float("nan")}
    for order in (sorted(scores), sorted(scores, reverse=True), [2, 4, 5, 1, 3]):
        kept = [saved(step, scores[step]) for step in order]
        assert [done.step for done in KeepBest("eval/loss", mode).select(kept)] == [best]
    assert KeepBest("eval/loss", mode).select([saved(2, float("nan"))]) == []


@pytest.mark.slow
def test_a_bad_evaluation_leaves_the_best_checkpoint_where_it_is(tmp_path):
    """With a NaN for a score at step 3 the best, of step 2, stays, and the marker is strict JSON."""
    SCORES[3], before = float("nan"), SCORES[3]
    try:
        assert run_scored(tmp_path, 5, KeepLast(1), KeepBest("eval/score", "max")) == [2, 5]
    finally:
        SCORES[3] = before
    for path in (tmp_path / "checkpoints").glob("*.commit"):
        json.loads(path.read_text(), parse_constant=pytest.fail)


@pytest.mark.slow
def test_programs_find_checkpoints_with_paths_steps_and_scores(tmp_path):
    steps = run_scored(tmp_path, 5, KeepLast(5))
    found = looplib.list_checkpoints(tmp_path)
    assert [done.step for done in found] == steps[::-1]
    assert [done.scores["eval/score"] for done in found] == [SCORES[step] for step in steps[::-1]]
    assert looplib.list_checkpoints(tmp_path / "checkpoints") == found
    for done in found:
        assert tf.train.load_checkpoint(done.path).get_tensor("global_step/.ATTRIBUTES/VARIABLE_VALUE") == done.step
    with pytest.raises(RunDirectoryError, match="nowhere"):
        looplib.list_checkpoints(tmp_path / "nowhere")
    trainer = toy.Regression()
    policy = looplib.CheckpointPolicy(keep=(KeepLast(5), KeepBest("eval/score", "max")))
    settings = dict(model_dir=tmp_path, checkpoints=policy)
    with toy.controller(make_strategy("default"), trainer, Scored(trainer), **settings) as controller:
        assert controller.best_checkpoint == found[-2].path  # of step 2
    with toy.controller(make_strategy("default"), trainer, model_dir=tmp_path) as controller:
        with pytest.raises(NoCheckpointError):
            _ = controller.best_checkpoint


# Markers.


@pytest.mark.slow
def test_a_marker_of_a_newer_format_is_refused_by_name_and_nothing_is_moved(tmp_path, capsys):
    run_scored(tmp_path, 2, KeepLast(2))
    folder = tmp_path / "checkpoints"
    marker = json.loads((folder / "ckpt-2.commit").read_text())
    sign(folder / "ckpt-2.commit", {**marker, "format": 3, "versions": {"looplib": "9.9"}})
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    message = "ckpt-2.commit has the format 3, written by looplib 9.9, and looplib .* reads formats up to 2"
    with pytest.raises(CheckpointError, match=message):
        toy.controller(make_strategy("default"), toy.Regression(), model_dir=tmp_path)
    evaluator = toy.RegressionEvaluator(toy.Regression().model)
    with pytest.raises(CheckpointError, match=message):
        toy.controller(make_strategy("default"), None, evaluator, model_dir=tmp_path)
    with pytest.raises(CheckpointError, match=message):
        looplib.list_checkpoints(tmp_path)
    assert cli(["inspect", str(tmp_path)]) == 2
    assert "has the format 3" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_rollback_without_a_directory_is_refused_at_once():
    with pytest.raises(MissingPartError, match="model_dir"):
        toy.controller(make_strategy("default"), toy.Regression(), guards=looplib.Guards(non_finite="rollback"))


# Snapshots.


class Embedded:
    """An embedding, whose gradients are sparse, a dense layer, and Adam with its slots; and how to train a step."""

    def __init__(self, keras, strategy):
        self.strategy = strategy
        with strategy.scope():
            layers = keras.layers
            self.model = keras.Sequential(
                [layers.InputLayer((4,)), layers.Embedding(50, 8), layers.Flatten(), layers.Dense(3)]
            )
            self.optimizer = keras.optimizers.Adam(0.1)
            self.optimizer.build(self.model.trainable_variables)
            self.counter = tf.Variable(0, tf.int64)
        self.checkpoint = tf.train.Checkpoint(model=self.model, optimizer=self.optimizer, counter=self.counter)
        _ = self.checkpoint.save_counter
        self.step = tf.function(lambda ids: strategy.run(self._step, (ids,)))

    def _step(self, ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.model(ids, training=True)))
        variables = self.model.trainable_variables
        gradients = tape.gradient(loss, variables)
        assert isinstance(gradients[0], tf.IndexedSlices)
        self.optimizer.apply_gradients(zip(gradients, variables))
        self.counter.assign_add(1)

    def train(self, first, last):
        for i in range(first, last):
            self.step(tf.constant([[i, i + 1, i + 2, 3], [7, 8, i, i]]) % 50)


def read(path):
    reader = tf.train.load_checkpoint(str(path))
    return {key: np.asarray(reader.get_tensor(key)) for key in reader.get_variable_to_shape_map()}


def assert_same_tensors(one, other):
    assert one.keys() == other.keys()
    for key in one:
        assert one[key].dtype == other[key].dtype and one[key].shape == other[key].shape, key
        assert one[key].tobytes() == other[key].tobytes() or one[key].tolist() == other[key].tolist(), key


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("name", ["default", "mirrored_x2"])
def test_a_snapshot_holds_what_tensorflow_would_have_saved_at_that_time(name, keras, tmp_path):
    """Dense and sparse updates of the same variables follow before it is written."""
    run = Embedded(keras, make_strategy(name))
    run.train(0, 3)
    run.checkpoint.write(str(tmp_path / "first"))
    snapshots = Snapshots(run.checkpoint, str(tmp_path / "first"))
    run.train(3, 6)
    run.checkpoint.write(str(tmp_path / "expected"))
    snapshot = snapshots.take()
    run.train(6, 12)
    snapshots.write(str(tmp_path / "found"), snapshot)
    expected, found = read(tmp_path / "expected"), read(tmp_path / "found")
    assert_same_tensors(expected, found)
    run.checkpoint.write(str(tmp_path / "later"))
    later = read(tmp_path / "later")
    changed = [key for key in found if found[key].tobytes() != later[key].tobytes() and found[key].dtype.kind == "f"]
    assert len(changed) >= 9  # three variables, each with two slots


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("name", ["default", "mirrored_x2"])
def test_many_snapshots_held_at_once_do_not_disturb_each_other(name, keras, tmp_path):
    run = Embedded(keras, make_strategy(name))
    run.checkpoint.write(str(tmp_path / "first"))
    snapshots = Snapshots(run.checkpoint, str(tmp_path / "first"))
    taken = []
    for i in range(6):
        run.checkpoint.write(str(tmp_path / f"expected-{i}"))
        taken.append(snapshots.take())
        run.train(5 * i, 5 * i + 5)
    for i, snapshot in enumerate(taken):
        snapshots.write(str(tmp_path / f"found-{i}"), snapshot)
        assert_same_tensors(read(tmp_path / f"expected-{i}"), read(tmp_path / f"found-{i}"))


@pytest.mark.slow(spread=1)
def test_what_a_snapshot_wrote_is_restored_by_tensorflow_alone(keras, tmp_path):
    run, fresh = (Embedded(keras, make_strategy("default")) for _ in range(2))
    run.checkpoint.write(str(tmp_path / "first"))
    snapshots = Snapshots(run.checkpoint, str(tmp_path / "first"))
    run.train(0, 3)
    snapshots.write(str(tmp_path / "found"), snapshots.take())
    fresh.checkpoint.restore(str(tmp_path / "found")).assert_consumed()
    for a, b in zip(run.model.get_weights(), fresh.model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    run.train(3, 6)
    fresh.train(3, 6)
    for a, b in zip(run.model.get_weights(), fresh.model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_lookup_table_makes_saves_wait_and_is_restored(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="absl")

    def table():
        return tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, default_value=-1.0)

    first = table()
    checkpoints = toy.checkpoints(tmp_path, {"table": first, "v": tf.Variable(1.0)})
    for step in (1, 2):
        first.insert(tf.constant([step], tf.int64), tf.constant([step / 2]))
        checkpoints.save(step, wait=False)
        assert not checkpoints.saving  # it has waited
        assert commits.newest(str(tmp_path / "checkpoints")).step == step
    assert "training waits for each save" in caplog.text
    second = table()
    path = str(tmp_path / "checkpoints" / "ckpt-2")
    toy.checkpoints(tmp_path, {"table": second, "v": tf.Variable(0.0)}).restore(path)
    np.testing.assert_array_equal(second.lookup(tf.constant([1, 2, 3], tf.int64)), [0.5, 1.0, -1.0])


def test_another_tensorflow_waits_for_saves_and_refuses_a_partial_restore_in_a_sentence(tmp_path, monkeypatch, caplog):
    """One without the module of the protocol buffer that describes a checkpoint's structure."""
    caplog.set_level(logging.INFO, logger="absl")
    monkeypatch.setitem(sys.modules, "tensorflow.core.protobuf", None)
    checkpoints = toy.checkpoints(tmp_path, {"v": tf.Variable(1.0)})
    for step in (1, 2):
        checkpoints.save(step, wait=False)
        assert not checkpoints.saving and commits.newest(str(tmp_path / "checkpoints")).step == step
    assert f"only TensorFlow can save with TensorFlow {tf.__version__} any checkpoint" in caplog.text
    path = str(tmp_path / "checkpoints" / "ckpt-2")
    other = tf.Variable(0.0)
    restored = toy.checkpoints(tmp_path, {"v": other})
    restored.restore(path)
    assert float(other) == 1
    with pytest.raises(WarmStartError, match=f"TensorFlow.*{tf.__version__}"):
        restored.restore(path, partial=True)


@pytest.mark.slow(spread=3)
@pytest.mark.parametrize(
    "saved",
    [
        b"no zip file",
        b"PK\x03\x04" + b"\x00" * 30,
        {"v": np.float64([[1, 1], [2, 2]])},
        {"v": np.float32(1)},
        {"v": np.array([["x"], [None]], object)},
    ],
    ids=str,
)
def test_values_of_replicas_that_are_damaged_are_refused_in_a_sentence(saved):
    strategy = make_strategy("mirrored_x2")
    with strategy.scope():
        variable = tf.Variable([0.0, 0.0], aggregation=tf.VariableAggregation.NONE,
                               synchronization=tf.VariableSynchronization.ON_READ)  # fmt: skip
    state = ReplicaState(strategy, {"v": variable})
    if isinstance(saved, dict):
        file = io.BytesIO()
        np.savez(file, **saved)
        saved = file.getvalue()
    state.deserialize(saved)
    with pytest.raises(CheckpointError):
        state.apply()


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
def test_each_replica_gets_its_own_values_again(dtype):
    strategy = make_strategy("mirrored_x2")
    with strategy.scope():
        variable = tf.Variable(tf.zeros([2], dtype), aggregation=tf.VariableAggregation.NONE,
                               synchronization=tf.VariableSynchronization.ON_READ)  # fmt: skip
    parts = strategy.experimental_local_results(variable)
    state = ReplicaState(strategy, {"v": variable})
    assert state.serialize() == b""
    for number, part in enumerate(parts):
        part.assign(tf.cast([number, 1.5], dtype))
    saved = state.serialize()
    for part in parts:
        part.assign(tf.zeros([2], dtype))
    state.deserialize(saved)
    state.apply()
    assert [tf.cast(part, tf.float32).numpy().tolist() for part in parts] == [[0.0, 1.5], [1.0, 1.5]]


def test_a_resumed_run_continues_with_the_values_of_each_replica(tmp_path):
    """And is not initialized again."""
    strategy = make_strategy("mirrored_x2")

    class Own(toy.Regression):
        def __init__(self):
            super().__init__()
            self.own = tf.Variable(0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
                                   synchronization=tf.VariableSynchronization.ON_READ)  # fmt: skip

        def initialize(self):
            initialized.append(self)

        def step_fn(self, inputs):
            self.own.assign_add(10 ** tf.distribute.get_replica_context().replica_id_in_sync_group)
            return super().step_fn(inputs)

    initialized = []
    for start in (0, 2):
        with strategy.scope():
            trainer = Own()
        with toy.controller(strategy, trainer, model_dir=tmp_path) as controller:
            assert controller.global_step == start and len(initialized) == 1
            assert [int(part) for part in strategy.experimental_local_results(trainer.own)] == [start, 10 * start]
            controller.train(2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [tf.float32, tf.int32])
def test_a_variable_that_cannot_be_read_on_several_replicas_is_refused_in_a_sentence(dtype):
    strategy = make_strategy("mirrored_x2")

    class Own(toy.Regression):
        def __init__(self):
            super().__init__()
            self.own = tf.Variable(tf.zeros([], dtype), trainable=False, aggregation=tf.VariableAggregation.NONE,
                                   synchronization=tf.VariableSynchronization.ON_READ)  # fmt: skip

    with strategy.scope():
        trainer = Own()
    with pytest.raises(StateError, match="own"):
        toy.controller(strategy, trainer)


@pytest.mark.slow
def test_a_resume_on_data_of_another_size_or_in_another_order_says_so(tmp_path, caplog):
    caplog.set_level(logging.WARNING, logger="absl")
    said = "the training data is not the one of step 3: it has 35 examples, and had 37; the steps that follow"
    for examples, seed, told in ((37, 0, False), (37, 0, False), (35, 5, True)):
        trainer = toy.Regression(num_examples=examples)
        with toy.controller(make_strategy("default"), trainer, model_dir=tmp_path, seed=seed) as controller:
            controller.train(3)
        assert (said in caplog.text) == ("seed was 0 in the checkpoint and is 5 in this run" in caplog.text) == told


class _Shuffled(toy.Regression):
    """Reads the same examples by a pipeline of its own."""

    def dataset(self, context):
        ids = tf.data.Dataset.range(self.num_examples).shuffle(8, seed=1).repeat().batch(context.per_replica_batch_size)
        return ids.map(lambda i: (i, tf.gather(toy.X, i), tf.gather(toy.Y, i)))


def test_a_resume_on_data_that_is_read_in_another_way_says_so(tmp_path, caplog):
    caplog.set_level(logging.WARNING, logger="absl")
    had = f"it had {toy.NUM_EXAMPLES} examples by number, and is read otherwise now"
    has = f"it was a pipeline with a position of its own, and has {toy.NUM_EXAMPLES} examples by number now"
    starts = ((toy.Regression, ""), (_Shuffled, had), (_Shuffled, ""), (toy.Regression, has))
    for number, (kind, said) in enumerate(starts, 1):
        caplog.clear()
        with toy.controller(make_strategy("default"), kind(), model_dir=tmp_path) as controller:
            controller.train(number)
        assert said in caplog.text and ("the training data is not the one" in caplog.text) == bool(said)


_ROWS = [b"%d" % number for number in range(toy.NUM_EXAMPLES)]
_BY_RECORDS = lambda context, **how: context.records(_ROWS, **how).map(
    lambda rows: tf.strings.to_number(rows, tf.int64)
)


def _mixed(context, share, schedule=None):
    mixture = looplib.Mixture({"a": toy.NUM_EXAMPLES, "b": 8}, {"a": share, "b": 1 - share}, schedule)
    return context.indices(mixture).map(lambda source, ids: ids)


_ORDERS = {
    "indices": lambda context: context.indices(toy.NUM_EXAMPLES),
    "not shuffled": lambda context: context.indices(toy.NUM_EXAMPLES, shuffle=False),
    "named": lambda context: context.indices(toy.NUM_EXAMPLES, name="inputs"),
    "with seeds": lambda context: context.indices(toy.NUM_EXAMPLES, seeds=True).map(lambda ids, seeds: ids),
    "mixed": lambda context: _mixed(context, 0.5),
    "mixed otherwise": lambda context: _mixed(context, 0.7),
    "mixed otherwise later": lambda context: _mixed(context, 0.5, {2: {"a": 1.0, "b": 0.0}}),
    "records": lambda context: _BY_RECORDS(context, block=4),
    "smaller blocks": lambda context: _BY_RECORDS(context, block=2),
}


@pytest.mark.parametrize(
    "before, after, warns",
    [
        ("indices", "not shuffled", True),
        ("indices", "named", True),
        ("mixed", "mixed otherwise", True),
        ("records", "smaller blocks", True),
        ("mixed", "mixed otherwise later", False),
        ("indices", "with seeds", False),
        ("records", "records", False),
    ],
)
def test_a_resume_that_reads_its_examples_in_another_order_says_so(before, after, warns, tmp_path, caplog):
    caplog.set_level(logging.WARNING, logger="absl")
    for steps, order in ((1, before), (2, after), (3, after)):
        trainer = toy.Regression()
        trainer.dataset = lambda context, order=order: _ORDERS[order](context).map(
            lambda i: (i, tf.gather(toy.X, i), tf.gather(toy.Y, i))
        )
        with toy.controller(make_strategy("default"), trainer, model_dir=tmp_path) as controller:
            controller.train(steps)
    assert caplog.text.count("the examples come in another order than that of step 1") == warns
    assert "order than that of step 2" not in caplog.text

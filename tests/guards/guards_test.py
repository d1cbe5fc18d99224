"""Values that are not finite: found, named, and halted, skipped or rolled back, alike on every replica."""

import contextlib
import functools
import itertools
import json
import logging
import math
import os
import tempfile

import keras as keras3
import numpy as np
import pytest
import tensorflow as tf
import toy
from conftest import make_strategy, more

import looplib
from looplib.cluster import updates
from looplib.errors import EngineError, SettingError
from looplib.guards import non_finite
from looplib.guards.guards import Diverged, check_loss, spike_score
from looplib.guards.non_finite import StateCheck
from looplib.run import commits
from looplib.run.records import read_jsonl

BAD_STEP = 7


class Poisoned(toy.Regression):
    """The regression with something that is not finite at one position in the data.

    `where` is "input", "loss", "gradient" (of the last replica only), "weight" (a bad update) or "" for none.
    """

    where = ""
    bad_steps = (BAD_STEP,)

    def __init__(self, keras=keras3, optimizer="adam"):
        super().__init__(keras, optimizer)
        self.steps = []

    def dataset(self, context):
        data = super().dataset(context)
        positions = tf.data.Dataset.counter(context.start_step * context.replicas_per_pipeline)
        bad = tf.constant(self.bad_steps, tf.int64)

        def poison(position, batch):
            ids, x, y = batch
            is_bad = tf.reduce_any(position // context.replicas_per_pipeline + 1 == bad)
            return ids, tf.where(is_bad & (self.where == "input"), np.nan, x), y, tf.fill(tf.shape(y), is_bad)

        return tf.data.Dataset.zip(positions, data).map(poison)

    def step_fn(self, inputs):
        _, x, y, is_bad = inputs
        replica = tf.distribute.get_replica_context()
        last = replica.replica_id_in_sync_group == replica.num_replicas_in_sync - 1
        poison = tf.where(is_bad[0] & last, np.nan, tf.ones([]))
        with tf.GradientTape() as tape:
            logits = self.model(x, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
            losses = losses * poison if self.where == "loss" else losses
            loss = self.global_mean(losses)
        variables = self.model.trainable_variables
        gradients = tape.gradient(loss, variables)
        if self.where == "gradient":
            gradients[0] = gradients[0] * poison
        self.optimizer.apply_gradients(zip(gradients, variables))
        if self.where == "weight":
            bias = variables[-1]
            bias.assign(bias * tf.where(is_bad[0], np.nan, tf.ones([])))
        return {"loss": losses, "position": looplib.last(tf.cast(self.global_step, tf.int64))}

    def loop_end(self, metrics):
        return metrics


def build(strategy, where, keras=keras3, bad_steps=(BAD_STEP,)):
    with strategy.scope():
        trainer = type("Poisoned", (Poisoned,), {"where": where, "bad_steps": bad_steps})(keras)
        return trainer


def run(strategy, where, steps=20, keras=keras3, bad_steps=(BAD_STEP,), steps_per_loop=5, every_steps=5, **settings):
    trainer = build(strategy, where, keras, bad_steps)
    guards = settings.pop("guards", looplib.Guards())
    policy = looplib.CheckpointPolicy(every_steps=every_steps, keep=(looplib.KeepLast(100),))
    with toy.controller(
        strategy, trainer, checkpoints=policy, guards=guards, steps_per_loop=steps_per_loop, **settings
    ) as controller:
        controller.train(steps)
    return trainer, controller


def all_finite(model_dir):
    """Reads every kept checkpoint: whether all numbers in all of them are finite."""
    for done in commits.committed(os.path.join(model_dir, "checkpoints")):
        reader = tf.train.load_checkpoint(done.path)
        for key, _ in tf.train.list_variables(done.path):
            value = reader.get_tensor(key)
            if np.asarray(value).dtype.kind == "f" and not np.isfinite(value).all():
                return False
    return True


PLACES = {
    "default": ("default", "graph"),
    "xla": ("default", "xla"),
    "mirrored_x2": ("mirrored_x2", "graph"),
}


def cases(*once):
    """Every value that is not finite, in every place and by both families of Keras.

    Args:
      once: cases (where, place, Keras) that always run; the others are repetitions. Halting and skipping have each
        value, and they and rolling back have XLA and several replicas.
    """
    everything = itertools.product(["input", "loss", "gradient", "weight"], PLACES, ["keras", "tf_keras"])
    return pytest.mark.parametrize(
        "where, place, keras",
        [pytest.param(*case, marks=() if case in once else pytest.mark.slow) for case in everything],
        indirect=["keras"],
    )


def numpy_weights(left_out, steps):
    """The weights that Adam comes to in numpy in so many steps, on the data without some batches, counted from 1."""
    context = looplib.InputContext(
        global_batch_size=8, num_replicas=1, pipeline_index=0, num_pipelines=1, seed=0, training=True, start_step=0
    )
    batches = enumerate(context.indices(toy.NUM_EXAMPLES).take(steps + len(left_out)).as_numpy_iterator(), 1)
    return toy.numpy_losses_and_weights([ids for number, ids in batches if number not in left_out], "adam")[1]


@pytest.mark.slow(spread=1)
@cases(
    ("input", "default", "keras"),
    ("loss", "xla", "tf_keras"),
    ("gradient", "mirrored_x2", "keras"),
    ("weight", "mirrored_x2", "tf_keras"),
)
def test_halt_names_the_step_and_the_value_and_commits_nothing_bad(where, place, keras, tmp_path):
    name, loop = PLACES[place]
    expected = {"input": "loss", "loss": "loss", "gradient": "the gradient of .*kernel", "weight": "loss"}[where]
    # A bad update shows in the loss of the next step.
    step = BAD_STEP + 1 if where == "weight" else BAD_STEP
    with pytest.raises(looplib.DivergenceError, match=f"at step {step}, {expected}.* not finite.*ckpt-5, is good"):
        run(make_strategy(name), where, keras=keras, model_dir=tmp_path, loop=loop)
    assert [done.step for done in commits.committed(str(tmp_path / "checkpoints"))] == [5]
    assert all_finite(tmp_path)


class NamedLoss(Poisoned):
    """With a bad value in the loss that it reports, under a name of its own, and in no gradient."""

    loss_name = "nll"

    def step_fn(self, inputs):
        return {"nll": tf.where(inputs[3], np.nan, super().step_fn(inputs)["loss"])}


def test_the_loss_that_the_trainer_names_is_watched_whatever_its_name():
    with toy.controller(make_strategy("default"), NamedLoss(), steps_per_loop=5) as controller:
        with pytest.raises(looplib.DivergenceError, match=f"at step {BAD_STEP}, nll.* not finite"):
            controller.train(20)


@pytest.mark.slow
def test_a_nan_that_a_relu_hides_from_the_loss_is_found_in_the_gradient(tmp_path):
    """In a tf.function on a CPU, TensorFlow 2.20 makes 0 of relu(NaN), and the loss stays finite."""
    trainer = build(make_strategy("default"), "input")
    layers = keras3.layers
    trainer.model = keras3.Sequential([keras3.Input((5,)), layers.Dense(8, activation="relu"), layers.Dense(3)])
    trainer.optimizer = keras3.optimizers.SGD(0.1)
    with toy.controller(make_strategy("default"), trainer, model_dir=tmp_path, steps_per_loop=5) as controller:
        with pytest.raises(looplib.DivergenceError, match=f"at step {BAD_STEP}, .*the gradient of .*kernel"):
            controller.train(20)


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("bad", [[np.nan], [np.inf], [np.inf, -np.inf]], ids=str)
@pytest.mark.parametrize("dtype", ["float32", *more(["float16", "bfloat16", "float64"])])
@pytest.mark.parametrize(
    "shape", [(128, 96), (9000,), (20, 30), (3, 3, 32, 64), (9000, 1), (0, 4), (96, 128, 0)], ids=str
)
def test_one_value_that_is_not_finite_is_found_in_a_gradient_of_any_shape(shape, dtype, bad, compiled):
    gradient = np.random.default_rng(0).normal(size=shape).astype(np.float32)

    def measured(known):
        @tf.function(jit_compile=compiled, input_signature=[tf.TensorSpec(shape if known else None, dtype)])
        def measure(gradient):
            with updates.watching() as noted:
                updates.note_gradients([gradient], None)
            return non_finite.measure_gradients(noted)[1]

        return measure

    for measure in [measured(True), *([] if compiled else [measured(False)])]:
        assert np.isfinite(measure(tf.cast(gradient, dtype))).all()
        if gradient.size:
            gradient.ravel()[-len(bad) :] = bad
            assert not np.isfinite(measure(tf.cast(gradient, dtype))).any()
            gradient.ravel()[-len(bad) :] = 1


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("bad", [3, 5, 6])
def test_a_gradient_that_is_not_finite_is_named_among_many_of_one_shape(bad):
    shapes = [(3,), (2, 2), (3,), (3,), (100, 90), (3,), (), (3,), (2, 2)]  # five of one shape, two of another
    gradients = [np.ones(shape, np.float32) for shape in shapes]
    gradients[1] = gradients[1].astype(np.float64)
    gradients[bad] = gradients[bad] * np.nan
    variables = [tf.Variable(np.ones(shape, np.float32), name=f"v{number}") for number, shape in enumerate(shapes)]

    @tf.function
    def measure():
        with updates.watching() as noted:
            updates.note_gradients([tf.constant(each) for each in gradients], variables)
        names[:], measures = non_finite.measure_gradients(noted)
        return tf.concat(measures, axis=0)

    names = []
    found = measure().numpy()
    assert len(names) == len(found) == len(shapes)
    assert [name for name, value in zip(names, found) if not np.isfinite(value)] == [f"the gradient of v{bad}"]


def test_a_bad_update_in_the_last_step_before_a_save_is_not_saved(tmp_path):
    with pytest.raises(looplib.DivergenceError, match=r"after step 10, .*bias.* not finite"):
        run(make_strategy("default"), "weight", bad_steps=(10,), model_dir=tmp_path)
    assert [done.step for done in commits.committed(str(tmp_path / "checkpoints"))] == [5]


def test_a_bad_update_in_the_last_step_of_all_is_found_without_a_directory():
    with pytest.raises(looplib.DivergenceError, match=r"after step 20, .*bias.* not finite; no checkpoint was saved"):
        run(make_strategy("default"), "weight", bad_steps=(20,))


@pytest.mark.slow(spread=1)
@cases(
    ("input", "mirrored_x2", "tf_keras"),
    ("loss", "default", "keras"),
    ("gradient", "xla", "keras"),
    ("gradient", "mirrored_x2", "keras"),
    ("weight", "default", "tf_keras"),
)
def test_skip_leaves_a_step_out_as_if_its_batch_were_not_there(where, place, keras):
    name, loop = PLACES[place]
    records = []
    action = lambda event: records.append(event.metrics)
    guards = looplib.Guards(non_finite="skip")
    trainer, _ = run(make_strategy(name), where, keras=keras, guards=guards, actions=[action], loop=loop)
    for found, expected in zip(trainer.weights(), numpy_weights({BAD_STEP}, 19)):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert [record["skipped_steps"] for record in records] == [0, 1, 0, 0]
    assert all(np.isfinite(record["loss"]) for record in records)


def test_a_last_value_of_a_step_that_is_skipped_is_that_of_the_step_before():
    positions, actions = [], [lambda event: positions.append(event.metrics["position"])]
    guards = looplib.Guards(non_finite="skip")
    run(make_strategy("mirrored_x2"), "loss", bad_steps=(9, 10, 16), guards=guards, actions=actions)
    assert positions == [4, 7, 14, 19]


@pytest.mark.slow
@pytest.mark.parametrize(
    "where, keras",
    [
        pytest.param(where, keras, marks=() if keras == once else pytest.mark.slow)
        for where, once in {"input": "", "loss": "tf_keras", "gradient": "keras"}.items()
        for keras in ("keras", "tf_keras")
    ],
    indirect=["keras"],
)
def test_skip_undoes_fused_updates_too(where, keras):
    """Of variables that are large enough for them; the momentum is as if there had been no bad step."""

    class Wide(Poisoned):
        def __init__(self):
            super().__init__(keras)
            keras.utils.set_random_seed(0)
            layers = [keras.layers.InputLayer((5,)), keras.layers.Dense(2000), keras.layers.Dense(3)]
            self.model = keras.Sequential(layers)

    Bad = type("Bad", (Wide,), {"where": where})
    trainer = Bad()
    toy.controller(None, trainer, guards=looplib.Guards(non_finite="skip"), steps_per_loop=5).train(20)

    class Without(Wide):
        def dataset(self, context):
            data = super().dataset(context)
            return data.take(BAD_STEP - 1).concatenate(data.skip(BAD_STEP))

    other = Without()
    toy.controller(None, other, steps_per_loop=5).train(19)
    for a, b in zip(trainer.weights(), other.weights()):
        np.testing.assert_array_equal(a, b)


def losses_reported(name, runs, **settings):
    """The losses by their steps, of runs with one policy each, to one step each, one after the other."""
    losses = {}
    note = lambda event: losses.update({event.step: event.metrics["loss"]})
    for policy, steps in runs:
        guards = looplib.Guards(non_finite=policy)
        run(make_strategy(name), "", steps, guards=guards, every_steps=100, actions=[note], **settings)
    return losses


@functools.cache
def losses_of_a_whole_run(name, policy):
    with tempfile.TemporaryDirectory() as folder:
        return losses_reported(name, [(policy, 10)], model_dir=folder)


CHANGES = [("halt", "skip"), ("skip", "rollback"), ("off", "skip")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "before, after, name",
    [
        pytest.param(*change, name, marks=() if name == once else pytest.mark.slow)
        for change, once in zip(CHANGES, ("default", "mirrored_x2", "default"))
        for name in ("default", "mirrored_x2")
    ],
)
def test_a_resume_with_another_policy_keeps_the_window_of_metrics_whole(before, after, name, tmp_path):
    losses = losses_reported(name, [(before, 7), (after, 10)], model_dir=tmp_path)
    whole = losses_of_a_whole_run(name, after)
    assert set(whole) == {5, 10} and {step: losses[step] for step in whole} == whole


@pytest.mark.slow
def test_skipping_ends_where_nothing_else_is_left():
    guards = looplib.Guards(non_finite="skip")
    with pytest.raises(
        looplib.DivergenceError, match="all 10 steps up to step 30 had non-finite values and were skipped"
    ):
        run(
            make_strategy("default"), "loss", steps=60, bad_steps=tuple(range(15, 60)), guards=guards, steps_per_loop=10
        )


@pytest.mark.slow(spread=1)
@cases(
    ("loss", "mirrored_x2", "tf_keras"),
    ("weight", "xla", "keras"),
)
def test_rollback_goes_to_a_good_checkpoint_and_past_the_bad_data(where, place, keras, tmp_path, caplog):
    """The weights are those of steps 1 to 5 on the first five batches and of the others on those after the bad one."""
    caplog.set_level(logging.WARNING, logger="absl")
    name, loop = PLACES[place]
    guards = looplib.Guards(non_finite="rollback")
    trainer, controller = run(
        make_strategy(name), where, keras=keras, model_dir=tmp_path, guards=guards, writers=None, loop=loop
    )
    assert controller.global_step == 20 and controller.rollbacks == 1 and "rolling back to step 5" in caplog.text
    bad = BAD_STEP + 1 if where == "weight" else BAD_STEP
    for found, expected in zip(trainer.weights(), numpy_weights(set(range(6, bad + 1)), 20)):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert all_finite(tmp_path)
    steps = [record["step"] for record in read_jsonl(str(tmp_path / "metrics.jsonl"))]
    assert steps == [5, 10, 15, 20]
    (back,) = json.loads((tmp_path / "run.json").read_text())["starts"][-1]["rollbacks"]
    assert (back["step"], back["to"]) == (bad, 5) and "finite" in back["reason"]


def test_rollbacks_of_several_starts_leave_out_the_data_of_all_and_share_one_budget(tmp_path):
    """Step 18 has the twentieth batch, since two were left out before, and the run goes back to step 15."""
    guards = looplib.Guards(non_finite="rollback", rollbacks=2)
    bad = dict(guards=guards, model_dir=tmp_path, bad_steps=(7, 20, 33))
    run(make_strategy("default"), "loss", steps=10, **bad)
    trainer, _ = run(make_strategy("default"), "loss", steps=20, **bad)
    for found, expected in zip(trainer.weights(), numpy_weights({6, 7, 18, 19, 20}, 20)):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(looplib.DivergenceError, match="has used all 2 rollbacks"):
        run(make_strategy("default"), "loss", steps=40, **bad)


@pytest.mark.slow
def test_a_run_that_rolled_back_resumes_like_one_that_was_not_stopped(tmp_path):
    guards = looplib.Guards(non_finite="rollback")
    whole, _ = run(make_strategy("default"), "loss", steps=20, guards=guards, model_dir=tmp_path / "a")
    run(make_strategy("default"), "loss", steps=13, guards=guards, model_dir=tmp_path / "b")
    parts, _ = run(make_strategy("default"), "loss", steps=20, guards=guards, model_dir=tmp_path / "b")
    for a, b in zip(whole.weights(), parts.weights()):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_off_continues_training_and_leaves_bad_checkpoints_out(tmp_path, caplog):
    _, controller = run(make_strategy("default"), "loss", model_dir=tmp_path, guards=looplib.Guards(non_finite="off"))
    assert controller.global_step == 20
    assert [done.step for done in commits.committed(str(tmp_path / "checkpoints"))] == [5]
    assert "the checkpoint of step 20 is left out" in caplog.text


@pytest.mark.slow
def test_a_variable_that_is_meant_to_be_infinite_is_no_trouble(tmp_path):
    trainer = build(make_strategy("default"), "")
    trainer.best = tf.Variable(np.inf, trainable=False)
    toy.controller(make_strategy("default"), trainer, model_dir=tmp_path).train(3)


@pytest.mark.slow(spread=3)
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("largest", [2.0, 1e30])  # the square of the second is too large for float32
def test_a_check_of_the_state_names_what_is_not_finite_each_time(largest, traced):
    values = {
        "half": np.float16([6e4]),
        "single": np.float32([1, largest]),
        "double": [0.5],
        "limit": np.inf,
        "count": 3,
    }
    state = {name: tf.Variable(value) for name, value in values.items()}
    check = StateCheck(list(state.items()))
    if traced:
        assert all(not check.find() for _ in range(non_finite._BEFORE_A_TRACE))
    assert check.find() == []
    state["half"].assign([-np.inf])
    state["double"].assign([np.nan])
    assert check.find() == ["half", "double"]
    state["half"].assign([0.0])
    assert check.find() == ["double"]


def test_a_variable_that_is_not_finite_by_intention_hides_no_other_of_its_name():
    intended, other = tf.Variable(np.inf, name="limit"), tf.Variable(1.0, name="limit")
    check = StateCheck([("limit", intended), ("limit", other)])
    assert check.find() == []
    other.assign(np.nan)
    assert check.find() == ["limit"]


def test_a_jump_of_the_loss_is_scored_against_median_and_mad():
    random = np.random.RandomState(0)
    history = list(random.randn(40) * 0.1 + 2)
    guards = looplib.Guards(spike_score=6, spike_window=40)
    median = np.median(history)
    mad = np.median(np.abs(history - median))
    assert spike_score(history, 2.2, guards) is None
    assert spike_score(history, 5.0, guards) == pytest.approx(0.6745 * (5.0 - median) / mad)
    assert spike_score(history[:10], 5.0, guards) is None and spike_score(history, 5.0, looplib.Guards()) is None
    assert spike_score(history, -5.0, guards) is None  # a loss that falls is welcome


def test_a_loss_that_is_not_finite_hides_no_later_jump_and_is_not_within_a_limit():
    guards, losses = looplib.Guards(spike_score=6.0, spike_window=20), []
    for step in range(1, 21):
        check_loss(losses, step, 1 + 0.01 * (step % 3), guards, 1)
        check_loss(losses, step, math.nan, guards, 1)
    with pytest.raises(Diverged, match="robust standard deviations"):
        check_loss(losses, 21, 5.0, guards, 1)
    with pytest.raises(Diverged, match="nan, is not within the limit of 3"):
        check_loss([], 1, math.nan, looplib.Guards(loss_limit=3.0), 1)
    check_loss([], 1, math.nan, looplib.Guards(), 1)


def test_losses_are_scored_against_the_last_window_only_and_a_bad_one_is_not_among_them():
    guards, losses = looplib.Guards(spike_score=6, spike_window=8), []
    good = np.random.default_rng(0).normal(2, 0.1, 30)
    for number, loss in enumerate(good, 1):
        check_loss(losses, number, float(loss), guards, 1)
        assert losses == good[max(0, number - 8) : number].tolist()
    with pytest.raises(Diverged) as caught:
        check_loss(losses, 62, 9.0, guards, 2)
    assert losses == good[-8:].tolist() and (caught.value.good_before, caught.value.resume_after) == (60, 62)


@pytest.mark.parametrize("step, stops", [(19, False), (20, True)])
def test_the_limit_of_the_loss_holds_from_its_step_on(step, stops):
    guards = looplib.Guards(loss_limit=3.0, loss_limit_from=20)
    check_loss([], step, 3.0, guards, 1)
    with pytest.raises(Diverged) if stops else contextlib.nullcontext():
        check_loss([], step, 3.1, guards, 1)


class Jumping(Poisoned):
    def step_fn(self, inputs):
        outputs = super().step_fn(inputs)
        outputs["loss"] += tf.where(inputs[-1][0], 1000.0, 0.0)
        return outputs


@pytest.mark.slow
def test_a_jump_of_the_loss_halts_with_the_newest_checkpoint_and_the_flag_that_decides(tmp_path):
    trainer = type("Late", (Jumping,), {"bad_steps": (10,)})()
    policy, guards = (
        looplib.CheckpointPolicy(every_steps=4),
        looplib.Guards(loss_limit=100.0, loss_limit_from=0, on_spike="halt"),
    )
    with toy.controller(
        make_strategy("default"), trainer, checkpoints=policy, guards=guards, model_dir=tmp_path, steps_per_loop=2
    ) as controller:
        with pytest.raises(looplib.DivergenceError) as caught:
            controller.train(50)
    newest = looplib.list_checkpoints(tmp_path)[0]
    assert newest.step == 8 and newest.path in str(caught.value)
    assert "the policy rollback to continue automatically (--on_spike)" in str(caught.value)


@pytest.mark.slow
def test_a_jump_of_the_loss_rolls_back(tmp_path, caplog):
    guards = looplib.Guards(spike_score=8, spike_window=10, on_spike="rollback")
    trainer = type("Late", (Jumping,), {"bad_steps": (33,)})()
    policy = looplib.CheckpointPolicy(every_steps=4)
    with toy.controller(
        make_strategy("default"),
        trainer,
        checkpoints=policy,
        guards=guards,
        model_dir=tmp_path,
        steps_per_loop=2,
        writers=None,
    ) as controller:
        controller.train(50)
    assert controller.rollbacks == 1 and "rolling back to step 32" in caplog.text
    records = read_jsonl(str(tmp_path / "metrics.jsonl"))
    assert [record["step"] for record in records] == list(range(2, 51, 2))
    assert max(record["loss"] for record in records) < 100


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"non_finite": "stop"}, "non_finite.*'stop'"),
        ({"on_spike": "skip"}, "on_spike.*'skip'"),
        ({"rollbacks": -1}, "rollbacks.*-1.*0"),
        ({"spike_window": 2}, "spike_window.*2.*4"),
    ],
)
def test_bad_policies_are_sentences(settings, message):
    with pytest.raises(SettingError, match=message):
        looplib.Guards(**settings)


@pytest.mark.slow
def test_the_eager_loop_halts_too_and_cannot_skip():
    with pytest.raises(looplib.DivergenceError, match=f"at step {BAD_STEP}, "):
        run(make_strategy("default"), "gradient", loop="eager")
    with pytest.raises(EngineError):
        run(make_strategy("default"), "gradient", loop="eager", guards=looplib.Guards(non_finite="skip"))

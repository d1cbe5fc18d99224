"""A run that continues with another batch size: the next batch begins at the next example, and epochs follow."""

import itertools
import math

import keras as keras3
import numpy as np
import pytest
import tensorflow as tf
import toy
from absl import logging
from conftest import make_strategy, more
from hypothesis import given, settings
from hypothesis import strategies as st

import looplib
from looplib.data.order import Batches, BatchSizePeriod, Epoch, OrderKey
from looplib.errors import BatchSizeError, CallbackError
from looplib.weights.restoring import peek

N = toy.NUM_EXAMPLES  # 37


class Stream:
    """Reads examples one by one, as a run would: what `Batches` computes, counted."""

    def __init__(self, length, whole):
        self.length, self.whole = length, whole
        self.place, self.batch, self.sizes = 0, 0, []  # of each step that counts, the examples

    def step(self, size):
        batch = [self.place]
        while len(batch) < size and not (self.whole and (batch[-1] + 1) % self.length == 0):
            batch.append(batch[-1] + 1)
        self.place, self.batch = batch[-1] + 1, self.batch + 1
        self.sizes.append(len(batch))
        return batch


@st.composite
def lives(draw):
    """The history of a run: starts with sizes, each of some steps, and maybe a rollback to an earlier step."""
    start = st.tuples(st.integers(1, 12), st.integers(0, 9), st.none() | st.floats(0, 1))
    return draw(st.integers(1, 40)), draw(st.booleans()), draw(st.lists(start, min_size=1, max_size=5))


def live(length, whole, starts):
    """Returns the plain stream of a life, its `Batches`, and the positions of each global batch as they say."""
    stream, batches, epoch, read = Stream(length, whole), None, Epoch(length, whole), []
    for size, steps, back in starts:
        now = len(stream.sizes)
        batches = Batches(size) if batches is None else batches.resized(size, now, stream.batch)
        for _ in range(steps):
            first, last = (batches.before(stream.batch + i, epoch) for i in (0, 1))
            read.append((list(range(first, last)), stream.step(size)))
        if back is not None:
            kept = int(back * len(stream.sizes))
            del stream.sizes[kept:]
            batches = batches.back_to(kept)
    return stream, batches, epoch, read


@pytest.mark.slow
@given(lives())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_positions_and_epochs_are_those_of_examples_that_are_counted_one_by_one(life):
    length = life[0]
    stream, batches, epoch, read = live(*life)
    assert all(ours == counted for ours, counted in read)
    assert batches.is_possible(len(stream.sizes), stream.batch)
    came = [0, *itertools.accumulate(stream.sizes)]
    if not stream.whole:  # those of whole epochs are counted without the gaps of rollbacks
        assert [batches.trained(step, epoch) for step in range(len(came))] == came
    for examples in {1, length, 2 * length, came[-1]} - {0}:
        step = batches.step_of(examples, epoch)
        assert batches.trained(step, epoch) >= examples > batches.trained(step - 1, epoch)


@pytest.mark.slow
@given(lives(), st.sampled_from([1, 2]), st.booleans())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_pipelines_make_the_batches_that_follow_on_any_number_of_replicas(life, replicas, late):
    length, whole, starts = life
    starts = [(size * replicas, steps, back) for size, steps, back in starts]
    stream, batches, *_ = live(length, whole, starts)
    size, skipped = starts[-1][0], 7 if late else 0
    number = 1 if whole else replicas
    context = looplib.InputContext(
        global_batch_size=size, num_replicas=number, pipeline_index=0, num_pipelines=1, seed=3, training=True,
        start_step=stream.batch + skipped, earlier=batches.earlier, global_batches=whole,
    )  # fmt: skip
    found = context.indices(length, shuffle=False, whole_epochs=whole, repeat=True).take(5 * number)
    found = np.array_split(np.concatenate([[-1], *found.as_numpy_iterator()])[1:], 1)[0].tolist()
    steps = [stream.step(size) for _ in range(skipped + 5)][skipped:]
    assert found == [place % length for batch in steps for place in batch]


def context(size, start=0, earlier=(), **others):
    settings = dict(num_replicas=1, pipeline_index=0, num_pipelines=1, seed=3, training=True)
    return looplib.InputContext(global_batch_size=size, start_step=start, earlier=earlier, **settings, **others)


def flat(data, batches):
    """The numbers of the first element of some batches, one after another."""
    return np.concatenate([tf.nest.flatten(batch)[0] for batch in data.take(batches).as_numpy_iterator()])


LENGTHS = np.random.default_rng(1).integers(1, 32, 200)
PLANS = {
    "ids": lambda: 100,
    "kept": lambda: looplib.Kept(LENGTHS > 16),
    "mixture": lambda: looplib.Mixture(
        {"a": 90, "b": 30}, {"a": 3, "b": 1}, {4: {"a": 1, "b": 3}, 9: {"a": 1, "b": 1}}
    ),
    "packed": lambda: looplib.Packed(LENGTHS, 32),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_plans_continue_with_the_example_that_follows(name):
    # The schedule of the mixture: steps 0 to 5 have 8 examples, those from 6 on 12.
    whole = PLANS[name]()
    if name == "mixture":
        starts = {32: {"a": 1, "b": 3}, 6 * 8 + 3 * 12: {"a": 1, "b": 1}}
        whole = looplib.Mixture({"a": 90, "b": 30}, {"a": 3, "b": 1}, starts)
    expected = flat(context(1).indices(whole, seeds=True), 200)
    seeds = np.concatenate([batch[-1] for batch in context(1).indices(whole, seeds=True).take(200).as_numpy_iterator()])
    late = context(12, 6, [BatchSizePeriod(6, 6, 8)]).indices(PLANS[name](), seeds=True).take(10)
    np.testing.assert_array_equal(flat(late, 10), expected[48 : 48 + 120])
    np.testing.assert_array_equal(np.concatenate([batch[-1] for batch in late.as_numpy_iterator()]), seeds[48:168])


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 7, None])
def test_records_continue_with_the_example_that_follows_however_they_are_read(block):
    records = [b"%d" % i for i in range(300)]
    read = lambda context, steps: flat(context.records(records, block=block), steps)
    expected = read(context(8), 75)
    assert sorted(expected[:300]) == sorted(records)
    found = [read(context(8), 5), read(context(20, 5, [BatchSizePeriod(5, 5, 8)]), 5)]
    found.append(read(context(4, 10, [BatchSizePeriod(5, 5, 8), BatchSizePeriod(10, 10, 20)]), 40))
    np.testing.assert_array_equal(np.concatenate(found), expected[:300])


def test_batches_of_buckets_are_chosen_together_and_another_size_is_refused():
    order = looplib.Buckets(LENGTHS, [8, 16, 32])
    with pytest.raises(BatchSizeError, match="8.*12.*8"):
        context(12, 6, [BatchSizePeriod(6, 6, 8)]).indices(order)


def reference(examples, n=N, seed=0):
    """The first ids of a run, whatever its batches are: each epoch is read in one batch."""
    epochs = -(-examples // n)
    parts = [next(iter(looplib.InputContext(
        global_batch_size=n, num_replicas=1, pipeline_index=0, num_pipelines=1, seed=seed, training=True, start_step=i
    ).indices(n))).numpy() for i in range(epochs)]  # fmt: skip
    assert all(sorted(part) == list(range(n)) for part in parts)
    return np.concatenate(parts)[:examples]


def start(folder, size, strategy="default", log=None, trainer=None, **others):
    """Returns a controller of a run with a batch size, and its trainer."""
    strategy = make_strategy(strategy)
    with strategy.scope():
        trainer = trainer or toy.Regression()
    actions = [] if log is None else [lambda event: log.append((event.step, event.metrics.get("epoch")))]
    return toy.controller(
        strategy, trainer, model_dir=folder, global_batch_size=size, actions=actions, **others
    ), trainer  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy, settings",
    [("default", {}), ("mirrored_x2", {}), *more([("default", {"loop": "graph"}), ("mirrored_x2", {"loop": "graph"})])],
)
@pytest.mark.parametrize("sizes", [(8, 16, 4), *more([((4, 6, 20),), ((16, 8, 16),)])])
def test_a_run_sees_each_example_of_an_epoch_once_whatever_its_batch_sizes_are(strategy, settings, sizes, tmp_path):
    order, log, came, step = [], [], [0], 0
    for size in sizes:
        controller, trainer = start(tmp_path, size, strategy, log, **settings)
        with controller:
            step += 3
            controller.train(step)
        order += [ids for ids in trainer.order]
        came += [came[-1] + size * (i + 1) for i in range(3)]
    assert [len(ids) for ids in order] == [size for size in sizes for _ in range(3)]
    np.testing.assert_array_equal(np.concatenate(order), reference(3 * sum(sizes)))
    assert log == [(step, round(examples / N, 3)) for step, examples in enumerate(came[1:], 1)]
    _, record = peek(str(tmp_path / "checkpoints" / "ckpt-9"))
    assert record.global_batch_size == sizes[-1] and [span.size for span in record.earlier_batches] == [*sizes[:-1]]
    controller, _ = start(tmp_path, 10, strategy, log)
    with controller:  # epochs end where the examples do
        controller.train(epochs=3)
        assert controller.global_step == 9 + math.ceil((3 * N - 3 * sum(sizes)) / 10)


@pytest.mark.slow
@pytest.mark.parametrize("engine, batch", [("xla", 8), *more([("auto", 8), ("graph", 8)])])
def test_batches_that_xla_draws_begin_at_the_next_example(engine, batch, tmp_path):
    found = []
    for size, end in ((batch, 5), (2 * batch, 9)):
        controller, trainer = start(tmp_path, size, loop=engine, steps_per_loop=1)
        with controller:
            controller.train(end)
        found += trainer.order
    np.testing.assert_array_equal(np.concatenate(found), reference(5 * batch + 8 * batch))


class Poisoned(toy.Regression):
    """The regression whose loss is not finite where one example comes."""

    bad = -1

    def step_fn(self, inputs):
        ids, x, y = inputs
        poison = tf.where(tf.reduce_any(ids == self.bad), np.nan, 1.0)
        with tf.GradientTape() as tape:
            losses = poison * tf.nn.sparse_softmax_cross_entropy_with_logits(y, self.model(x, training=True))
            loss = self.global_mean(losses)
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return {"loss": losses, "ids": looplib.total(self._in_global_batch(ids))}

    def loop_end(self, metrics):
        self.order.append((int(self.global_step), metrics.pop("ids").tolist()))
        return metrics


# Four steps of 4 examples, then batches of 6. By the step that fails and the checkpoint to go back to: the position of
# the first example of each step that is not at its usual place, and the examples trained on by step 6.
ROLLBACKS = {
    "before the change": (3, 2, {3: 12, 4: 16, 5: 20, 6: 26}, 28),
    "behind it": (5, 4, {5: 22, 6: 28}, 28),
    "through it": (5, 2, {3: 22, 4: 28, 5: 34, 6: 40}, 32),
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["default", *more(["mirrored_x2"])])
@pytest.mark.parametrize("name", ROLLBACKS)
def test_a_rollback_leaves_out_what_was_read_and_no_more(name, strategy, tmp_path):
    bad_step, back_to, moved, trained = ROLLBACKS[name]
    places, stream = {1: 0, 2: 4, 3: 8, 4: 12, 5: 16, 6: 22}, reference(2 * N)
    order, log = {}, []
    policy = looplib.CheckpointPolicy(every_steps=2)
    for size, end in ((4, 4), (6, 6)):
        with make_strategy(strategy).scope():
            trainer = Poisoned()
        trainer.bad = stream[places[bad_step]]
        controller, _ = start(
            tmp_path, size, strategy, log, trainer, checkpoints=policy, guards=looplib.Guards(non_finite="rollback")
        )
        with controller:
            if end == 6 and back_to == 2:
                (tmp_path / "checkpoints" / "ckpt-4.commit").unlink()
            controller.train(end)
        order.update(trainer.order)
    sizes = {step: 6 if step > back_to and name == "through it" or step > 4 else 4 for step in places}
    first = {**places, **moved}
    assert order == {step: stream[first[step] : first[step] + sizes[step]].tolist() for step in places}
    assert log[-1] == (6, round(trained / N, 3))
    with make_strategy(strategy).scope():
        trainer = Poisoned()
    size = 4 if strategy == "mirrored_x2" else 5
    controller, _ = start(
        tmp_path, size, strategy, trainer=trainer, checkpoints=policy, guards=looplib.Guards(non_finite="rollback")
    )
    with controller:  # and the next start knows all that
        controller.train(epochs=1)
        assert controller.global_step == 6 + -(-(N - trained) // size)
    read = first[6] + 6
    assert trainer.order[0] == (7, stream[read : read + size].tolist())


class Plain(looplib.Trainer):
    """Notes the examples of a pipeline that is no function of a position."""

    def __init__(self, make, varies=False):
        self.make, self.batch_size_varies, self.seen = make, varies, []
        self.steps = tf.Variable(0.0)

    def dataset(self, context):
        return self.make(context)

    def step_fn(self, inputs):
        self.seen.append(inputs.numpy().tolist())
        self.steps.assign_add(1)
        return {"loss": looplib.last(self.steps)}


def unbatched(context):
    return tf.data.Dataset.range(64).repeat().batch(context.per_replica_batch_size, drop_remainder=True)


def read_plain(folder, size, end, varies=False, distribute="auto"):
    trainer = Plain(unbatched, varies)
    with looplib.Controller(
        looplib.RunConfig(global_batch_size=size, steps_per_loop=1, loop="eager", distribute=distribute),
        trainer=trainer,
        model_dir=folder,
        writers=[],
    ) as controller:
        controller.train(end)
    return sum(trainer.seen, [])


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("distribute", ["auto", "tf"])
def test_a_pipeline_that_skips_leaves_out_the_examples_that_were_read_and_says_so(distribute, tmp_path, caplog):
    first = read_plain(tmp_path, 8, 4, distribute=distribute)
    with caplog.at_level(logging.WARNING):
        second = read_plain(tmp_path, 16, 8, distribute=distribute)
        third = read_plain(tmp_path, 4, 12, distribute=distribute)
    assert first + second + third == [i % 64 for i in range(32 + 64 + 16)]
    said = [record.getMessage() for record in caplog.records]
    assert any("Plain.dataset leaves out the first 32 examples, as 2 batches of 16" in line for line in said)
    assert any("leaves out the first 96 examples, as 24 batches of 4" in line for line in said)


def test_a_pipeline_that_skips_refuses_a_size_that_does_not_come_to_its_place(tmp_path):
    read_plain(tmp_path, 8, 3)
    with pytest.raises(BatchSizeError, match="24.*8.*16"):
        read_plain(tmp_path, 16, 6)
    assert read_plain(tmp_path, 12, 4) == [i % 64 for i in range(24, 36)]  # what was refused has changed nothing
    with pytest.raises(BatchSizeError, match="8.*12.*6.*Plain.dataset"):
        read_plain(tmp_path, 6, 6, varies=True)


def test_a_pipeline_that_starts_by_itself_is_told_the_batches_of_the_present_size():
    late = context(12, 6, [BatchSizePeriod(6, 6, 8)])
    assert late.start_step == 4
    with pytest.raises(BatchSizeError, match="48.*8.*10"):
        _ = context(10, 6, [BatchSizePeriod(6, 6, 8)]).start_step


@pytest.mark.parametrize("strategy", ["default", *more(["mirrored_x2"])])
def test_whole_epochs_still_hold_each_example_once(strategy, tmp_path):
    """50 rows: three batches of 8, then 26 rows are left of the epoch, which are two batches of 16."""
    seen, log = [], []
    for size, to in ((8, {"steps": 3}), (16, {"epochs": 2}), (10, {"epochs": 3})):
        with make_strategy(strategy).scope():
            model = keras3.Sequential([keras3.Input((1,)), keras3.layers.Dense(1)])
            model.compile(keras3.optimizers.SGD(0.0), "mse", run_eagerly=True)
        trainer = Noting(model, np.arange(50, dtype="float32")[:, None], np.zeros(50, "float32"))
        trainer.rows = []
        with looplib.Controller(
            looplib.RunConfig(global_batch_size=size, steps_per_loop=1, loop="eager"),
            trainer=trainer,
            model_dir=tmp_path,
            writers=[],
            strategy=make_strategy(strategy),
            actions=[lambda event: log.append((event.step, event.metrics["epoch"]))],
        ) as controller:  # fmt: skip
            controller.train(**to)
        seen.append([row for rows in trainer.rows for row in rows])
    epochs = np.reshape(sum(seen, []), [3, 50])
    assert (np.sort(epochs, axis=1) == np.arange(50)).all()
    assert [step for step, epoch in log if epoch == int(epoch)] == [5, 9, 14]
    assert dict(log)[3] == 24 / 50 and dict(log)[4] == 40 / 50


class Noting(looplib.KerasTrainer):
    """Notes the rows of each step."""

    def step_fn(self, inputs):
        self.rows.append(inputs[0].numpy()[:, 0].astype(int).tolist())
        return super().step_fn(inputs)


def test_a_record_of_batches_that_no_run_has_is_refused():
    assert not Batches(8, (BatchSizePeriod(4, 4, 8), BatchSizePeriod(3, 3, 16))).is_possible(9, 9)
    assert not Batches(8, (BatchSizePeriod(4, 4, 2**30), BatchSizePeriod(5, 2**40, 2**30))).is_possible(2**41, 2**41)
    assert OrderKey(3, Batches(8, (BatchSizePeriod(4, 6, 2),))).batches.before(7) == 6 * 2 + 8


@pytest.mark.slow
def test_keras_callbacks_refuse_epochs_that_do_not_end_with_a_report(tmp_path):
    x = np.zeros([32, 1], "float32")
    for size in (8, 16):
        model = keras3.Sequential([keras3.Input((1,)), keras3.layers.Dense(1)])
        model.compile(keras3.optimizers.SGD(0.0), "mse")
        trainer = looplib.KerasTrainer(model, x, x, callbacks=[keras3.callbacks.ReduceLROnPlateau("loss")])
        with looplib.Controller(
            looplib.RunConfig(global_batch_size=size), trainer=trainer, model_dir=tmp_path, writers=[]
        ) as controller:
            if size == 8:
                controller.train(epochs=1)
                continue
            with pytest.raises(CallbackError, match="8.*16.*8"):
                controller.train(epochs=2)

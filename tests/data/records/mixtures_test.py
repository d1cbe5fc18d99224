"""Plans (mixtures, packed rows, buckets, filters): exact, entered at any step, and one order on any number of replicas."""

import functools
import pathlib
import re

import numpy as np
import pytest
import tensorflow as tf
from conftest import more, repetitions
from hypothesis import given, settings
from hypothesis import strategies as st

import looplib
from looplib.commands.compare import compare
from looplib.data.order import Batches, OrderKey
from looplib.errors import OrderError, RecordsError
from looplib.run.records import read_jsonl

BATCH = 8
RANDOM = np.random.default_rng(0)
LENGTHS = RANDOM.integers(0, 40, 300)
TOKENS = tf.RaggedTensor.from_row_lengths(np.arange(LENGTHS.sum()), LENGTHS)  # each token is one of its own
SIZES = {"web": 50, "code": 7, "books": 31}
WEIGHTS = {"web": 0.7, "code": 0.2, "books": 0.1}
LATER = {"web": 1, "code": 0, "books": 3}
BOUNDARIES = [10, 20, 40]
PLANS = {
    "kept": lambda: looplib.Kept(LENGTHS > 25),
    "mixture": lambda: looplib.Mixture(SIZES, WEIGHTS, {40: LATER}),
    "packed": lambda: looplib.Packed(LENGTHS, 32),
    "mixture of packed": lambda: looplib.Mixture(
        {"a": looplib.Packed(LENGTHS, 32), "b": looplib.Packed(LENGTHS[:50], 32)}, {"a": 2, "b": 1}
    ),
    "buckets": lambda: looplib.Buckets(LENGTHS, BOUNDARIES),
}


def context(**changes):
    settings = dict(
        global_batch_size=BATCH, num_replicas=1, pipeline_index=0, num_pipelines=1, seed=3, training=True, start_step=0
    )
    return looplib.InputContext(**{**settings, **changes})


def read(plan, steps, workers=1, replicas=1, seeds=False, **changes):
    """The elements of each step, put together from all pipelines and replicas: arrays `[steps, global batch, ...]`."""
    local, parts = replicas // workers, []
    for worker in range(workers):
        c = context(num_replicas=replicas, num_pipelines=workers, pipeline_index=worker, **changes)
        found = c.indices(plan, seeds, repeat=True).take(steps * local)
        batches = [tf.nest.flatten(batch) for batch in found.as_numpy_iterator()]
        parts.append([np.stack(part).reshape(steps, -1, *part[0].shape[1:]) for part in zip(*batches)])
    return [np.concatenate(columns, axis=1) for columns in zip(*parts)]


# A mixture of packed rows also has what each of the two does alone.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["kept", "mixture of packed", "buckets"])
def test_a_plan_does_not_depend_on_replicas_or_workers_and_is_entered_at_any_step(name):
    plan, steps = PLANS[name](), 100
    whole = [*(part.reshape(steps, BATCH, *part.shape[1:]) for part in endless(plan, steps * BATCH))]
    whole += read(300, steps, seeds=True)[-1:]
    for workers, replicas, first in [(2, 2, 0), (1, 4, 0), (2, 4, 90)]:
        found = read(plan, steps - first, workers, replicas, seeds=True, start_step=first)
        for part, expected in zip(found, whole, strict=True):
            np.testing.assert_array_equal(part, expected[first:])
    assert not np.array_equal(endless(plan, steps * BATCH, seed=4)[0].ravel(), whole[0].ravel())
    seeds = whole[-1].reshape(-1, 2)
    assert len({tuple(seed) for seed in seeds}) == len(seeds) == steps * BATCH


def endless(plan, count, batch=BATCH, seed=3):
    """The first examples of a training, by the plan alone: arrays `[count, ...]`."""
    found = plan.endless(OrderKey(seed, Batches(batch)))(tf.range(count, dtype=tf.int64))
    return [part.numpy() for part in tf.nest.flatten(found)]


def once(plan, batch=BATCH):
    """The examples of an evaluation, in batches: arrays `[size, ...]`."""
    places = [tf.range(first, min(first + batch, plan.size), dtype=tf.int64) for first in range(0, plan.size, batch)]
    found = [[part.numpy() for part in tf.nest.flatten(plan.once()(batch))] for batch in places]
    return [np.concatenate(part) for part in zip(*found)]


def check_epochs(stream, ids):
    """Checks that a stream has each id once in as many examples as there are ids, and returns its whole epochs."""
    epochs = stream[: len(stream) // len(ids) * len(ids)].reshape(-1, len(ids))
    assert (np.sort(epochs, axis=1) == np.sort(ids)).all() and set(stream) <= set(ids)
    return epochs


SEEDS = st.integers(-(2**63), 2**63 - 1)
SOURCES = st.integers(1, 20).map(np.arange) | st.lists(st.integers(0, 99), min_size=1, max_size=20, unique=True).map(
    np.array
)
WEIGHT = st.sampled_from([0, 1, 2, 3, 50, 0.1, 0.7, 1 / 3])


@pytest.mark.slow
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    ids=st.lists(SOURCES, min_size=1, max_size=5),
    starts=st.sets(st.integers(1, 30), max_size=2),
    seed=SEEDS,
    data=st.data(),
)
def test_every_prefix_of_a_mixture_has_of_each_source_its_share_and_each_source_its_own_epochs(ids, starts, seed, data):
    names, starts = "abcde"[: len(ids)], [0, *sorted(starts), 40]
    weights = st.lists(WEIGHT, min_size=len(ids), max_size=len(ids)).filter(any)
    phases = [dict(zip(names, data.draw(weights))) for _ in starts[1:]]
    plan = looplib.Mixture(
        {name: looplib.Kept(own) for name, own in zip(names, ids)}, phases[0], dict(zip(starts[1:], phases[1:]))
    )
    found, sources = endless(plan, 40 * BATCH, seed=seed)
    for first, last, phase in zip(starts, starts[1:], phases):
        part = sources[first * BATCH : last * BATCH]
        shares = np.array([*phase.values()]) / sum(phase.values())
        expected = np.arange(1, len(part) + 1)[:, None] * shares
        # Weights without a common denominator of up to 65,536 are rounded to that.
        assert np.abs(np.cumsum(part[:, None] == np.arange(len(ids)), axis=0) - expected).max() < 1 + len(part) / 2**16
    for number, own in enumerate(ids):
        check_epochs(found[sources == number], own)  # which continue where the weights change
    assert [*zip(*once(plan))] == [(one, number) for number, own in enumerate(ids) for one in own]


def test_epochs_of_a_mixture_differ_and_those_of_its_sources_too():
    ids, sources = endless(looplib.Mixture(dict.fromkeys("abc", 31), dict.fromkeys("abc", 1)), 31 * 12)
    epochs = np.concatenate([check_epochs(ids[sources == number], np.arange(31)) for number in range(3)])
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs) == 12


def best_fit(pieces, row_length):
    """The number of rows: longest first, each into the row with the least room that is enough."""
    rooms = []
    for length in sorted(pieces, reverse=True):
        enough = [room for room in rooms if room >= length]
        if enough:
            rooms.remove(min(enough))
        rooms.append((min(enough) if enough else row_length) - length)
    return len(rooms)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=25).filter(any),
    row_length=st.integers(1, 40),
    seed=SEEDS,
    data=st.data(),
)
def test_each_epoch_of_packed_rows_has_each_token_of_the_chosen_documents_in_as_few_rows(
    lengths, row_length, seed, data
):
    overlap = data.draw(st.integers(0, row_length - 1))
    full = st.lists(st.sampled_from([d for d, n in enumerate(lengths) if n]), min_size=1, unique=True)
    chosen = data.draw(st.none() | full.map(np.array))
    order = looplib.Packed(lengths, row_length, overlap, chosen)
    pieces = []  # (document, its first token, the token after its last)
    for document in range(len(lengths)) if chosen is None else chosen:
        ends = [0]
        while ends[-1] < lengths[document]:
            start = max(0, ends[-1] - overlap)
            ends.append(min(start + row_length, lengths[document]))
            pieces.append((document, start, ends[-1]))
    sizes = [last - first for _, first, last in pieces]
    assert order.tokens == sum(sizes) and order.size == best_fit(sizes, row_length)
    rows = endless(order, 2 * order.size, seed=seed)
    for epoch in ([part[: order.size] for part in rows], [part[order.size :] for part in rows], once(order)):
        found = []
        for documents, places, segments, positions in zip(*epoch):
            number = segments.max()
            used = np.count_nonzero(segments)
            assert (np.diff(segments[:used]) >= 0).all() and set(segments[:used]) == set(range(1, number + 1))
            assert not any(part[used:].any() for part in (documents, places, segments, positions))  # padding comes last
            for segment in range(1, number + 1):
                here = segments == segment
                (document,) = set(documents[here])
                found.append((document, places[here][0], places[here][-1] + 1))
                assert list(places[here]) == list(range(*found[-1][1:])) and list(positions[here]) == list(
                    range(here.sum())
                )
        assert sorted(found) == sorted(pieces)


def test_other_documents_share_a_row_in_each_epoch():
    order = looplib.Packed(LENGTHS, 32)
    rows = endless(order, 2 * order.size)[0].reshape(2, order.size, -1)
    first, second = ({frozenset(row) for row in epoch} for epoch in rows)
    assert len(first & second) < 0.6 * order.size


@pytest.mark.slow
def test_tokens_of_packed_rows_may_be_read_for_them():
    rows = looplib.PackedRows(*(part[0] for part in read(looplib.Packed(LENGTHS, 32), 1)))
    asked = []

    def documents(ids):
        asked.extend(ids.numpy())
        return tf.gather(TOKENS, ids)

    np.testing.assert_array_equal(rows.read(documents, -1), rows.fill(TOKENS, -1))
    assert len(set(asked)) == len(asked)
    expected = [[TOKENS[d][p] if s else -1 for d, p, s in zip(*row)] for row in zip(*rows[:3])]
    np.testing.assert_array_equal(rows.fill(TOKENS, -1), expected)


@pytest.mark.slow
def test_batches_of_a_bucket_are_padded_to_its_boundary():
    """By the line of docs/data_mixing.md."""
    batches = context().indices(looplib.Buckets(LENGTHS, BOUNDARIES))
    padded = lambda ids, longest: (ids, tf.gather(TOKENS, ids).to_tensor(shape=[-1, longest[0]]))
    for ids, tokens in batches.map(padded).take(8).as_numpy_iterator():
        assert tokens.shape == (8, min(bound for bound in BOUNDARIES if bound >= LENGTHS[ids].max()))
        assert [list(row[:n]) for row, n in zip(tokens, LENGTHS[ids])] == [TOKENS[i].numpy().tolist() for i in ids]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=60),
    edges=st.sets(st.integers(1, 29), max_size=4),
    batch=st.integers(1, 12),
    seed=SEEDS,
)
def test_each_global_batch_is_of_one_bucket_and_what_is_left_comes_in_the_next_epoch(lengths, edges, batch, seed):
    boundaries, lengths = [*sorted(edges), 30], np.array(lengths)
    bounds = np.array([min(bound for bound in boundaries if bound >= length) for length in lengths])
    plan = looplib.Buckets(lengths, boundaries)
    members = {bound: np.flatnonzero(bounds == bound) for bound in set(bounds)}
    begins = [sum(epoch * len(own) // batch for own in members.values()) for epoch in range(5)]
    ids, longest = endless(plan, max(1, begins[-1]) * batch, batch, seed)
    np.testing.assert_array_equal(longest, bounds[ids])
    assert (longest.reshape(-1, batch) == longest.reshape(-1, batch)[:, :1]).all()
    for bound, own in members.items():
        for epoch, batches in enumerate(begins):
            came = epoch * len(own) // batch * batch
            times = np.bincount(ids[: batches * batch][longest[: batches * batch] == bound], minlength=len(lengths))[
                own
            ]
            assert times.sum() == came and set(times) <= {came // len(own), -(-came // len(own))}
    ids, longest = once(plan, batch)
    assert sorted(ids) == list(range(len(lengths))) and (lengths[ids] <= longest).all()


def test_buckets_take_turns_in_another_order_each_epoch():
    longest = endless(looplib.Buckets(np.repeat([5, 20, 30], 80), [8, 20, 40]), 240 * 20)[1][::BATCH].reshape(20, 30)
    assert len({tuple(turns) for turns in longest}) == 20


@pytest.mark.slow
def test_epochs_are_known_where_there_are_any():
    c = context()
    for name, steps in (("kept", (LENGTHS > 25).sum() / 8), ("buckets", 300 / 8), ("mixture", None)):
        c.indices(PLANS[name]())
        assert c.steps_per_epoch == steps
        c = context()


@pytest.mark.slow(spread=6)
@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: looplib.Mixture(SIZES, {"web": 1}), "weights of a mixture are of web; expected one for each source"),
        (lambda: looplib.Mixture(SIZES, {**WEIGHTS, "web": -1}), "0.*0"),
        (lambda: looplib.Mixture(SIZES, {**WEIGHTS, "web": float("nan")}), "0.*0"),
        (lambda: looplib.Mixture(SIZES, {**WEIGHTS, "web": 1e9}), "1/65536"),
        (lambda: looplib.Mixture(SIZES, [1, 2, 3]), "expected a dict of sources by name, a dict of weights"),
        (lambda: looplib.Mixture(SIZES, WEIGHTS, [(5, WEIGHTS)]), "expected a dict of sources by name, a dict of weights"),
        (lambda: looplib.Mixture(SIZES, {**WEIGHTS, "web": "1"}), "0.*0"),
        (lambda: looplib.Mixture({}, {}), "expected one for each source: there is none"),
        (lambda: looplib.Mixture({"a": 0}, {"a": 1}), "'a'.*0"),
        (lambda: looplib.Mixture({"a": 4}, {"a": 1}, {0: {"a": 1}}), "0"),
        (lambda: looplib.Mixture({"a": 4}, {"a": 1}, {2.5: {"a": 1}}), "2.5"),
        (lambda: looplib.Mixture({"a": looplib.Buckets([1], [2])}, {"a": 1}), "expected one of single examples"),
        (lambda: looplib.Kept(LENGTHS > 99), ".300..*0"),
        (lambda: looplib.Packed([3, 4], 8, chosen=[0, 2]), "2.*2"),
        (lambda: looplib.Kept(np.ones(3)), "float64.*.3..*3"),
        (lambda: looplib.Packed([3, -1], 8), r"int64.*\[2\].*-1.*0"),
        (lambda: looplib.Packed([0, 0], 8), "2"),
        (lambda: looplib.Packed([3], 8, overlap=8), "looplib.Packed.*8.*0.*7"),
        (lambda: looplib.Buckets([3, 9], [4, 8]), "9"),
        (lambda: looplib.Buckets([3, 9], [16, 8]), "expected ascending boundaries"),
        (lambda: context().indices(looplib.Kept([1, 2]), shuffle=False), "looplib.Kept.*shuffle=False"),
        (
            lambda: context(global_batches=True).indices(looplib.Mixture(SIZES, WEIGHTS), whole_epochs=True),
            "looplib.Mixture",
        ),
        (
            lambda: context().indices(looplib.Mixture({"a": 9, "b": looplib.Packed([3], 8)}, {"a": 1, "b": 1})),
            "the sources a, b of a mixture have examples of different kinds",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_a_plan_is_a_sentence(make, message):
    with pytest.raises(looplib.UsageError, match=message):
        make()


def unequal(folder):
    """By kind, a source of records that can stand in a mixture with bytes, or with x: float32 [2]; else what is said."""
    import pyarrow
    import pyarrow.parquet

    for name, column in (("x", [1.0] * 8), ("wide", [1] * 8)):
        pyarrow.parquet.write_table(pyarrow.table({name: column}), folder / f"{name}.parquet")
    (folder / "a.txt").write_text("one\ntwo\n")
    plain = [{"x": np.ones(2, np.float32)}] * 4
    of_one = "{x: float32 [2]}"
    again = [
        (plain, [{"x": np.ones([2, 1], np.float32)}] * 4, of_one, "{x: float32 [2, 1]}"),
        (plain, [(np.ones(2, np.float32),)] * 4, of_one, "(float32 [2])"),
        (f"{folder}/a.txt", plain, "string []", of_one),
        (f"{folder}/x.parquet", f"{folder}/wide.parquet", "{x: float64 []}", "{wide: int64 []}"),
        (plain, [{"x": np.zeros(2, np.float32)}] * 3, None, None),
    ]
    return [
        (plain, [{"x": np.ones(2, np.int64)}] * 4, of_one, "{x: int64 [2]}"),
        (plain, [{"x": np.ones(3, np.float32)}] * 4, of_one, "{x: float32 [3]}"),
        (plain, [{"y": np.ones(2, np.float32)}] * 4, of_one, "{y: float32 [2]}"),
        (f"{folder}/a.txt", f"{folder}/x.parquet", "string []", "{x: float64 []}"),
        (f"{folder}/a.txt", [b"in", b"memory"], None, None),
        *repetitions([], again),
    ]


class Reads(looplib.Trainer):
    def __init__(self, mixture):
        self.mixture = mixture

    def dataset(self, context):
        return context.records(self.mixture)

    def step_fn(self, inputs):
        return {"source": inputs[1]}


@pytest.mark.slow
def test_sources_of_a_mixture_whose_records_differ_are_refused_before_the_first_step(tmp_path):
    for one, other, first, second in unequal(tmp_path):
        trainer = Reads(looplib.Mixture({"one": one, "other": other}, {"one": 1, "other": 1}))
        if first is None:
            with looplib.Controller(
                looplib.RunConfig(global_batch_size=4, loop="eager"), trainer=trainer, writers=[]
            ) as controller:
                assert controller.train(2)["source"] == 0.5
            continue
        said = f"the sources 'one' and 'other' of a mixture have records of different structures: {first} and {second};"
        with pytest.raises(RecordsError, match=re.escape(said)):
            looplib.Controller(looplib.RunConfig(global_batch_size=4, loop="eager"), trainer=trainer, writers=[])


STEPS = ["--train_steps=20", "--checkpoint_interval=5", "--mode=train", "--config.state_mb=0.01"]


@pytest.mark.slow
@pytest.mark.parametrize("data, keras", [("mixture", "keras"), *more(
    [("packed", "tf_keras"), ("buckets", "keras"), ("mixture", "tf_keras"), ("packed", "keras"), ("buckets", "tf_keras")])])  # fmt: skip
def test_a_killed_run_and_one_on_two_workers_see_the_same_examples(data, keras, nursery, tmp_path):
    flags = [*STEPS, "--config.noisy=False", f"--config.data={data}", f"--config.keras={keras}"]
    start = functools.partial(nursery.life, tmp_path / "killed", *flags, "--config.slow_step=0.02", "--loop=eager")
    lives = [nursery.life(tmp_path / "whole", *flags, "--loop=eager")]
    lives += nursery.workers(2, tmp_path / "workers", *flags, "--loop=eager")
    killed = start()
    while not killed.ended(0.01) and not list((tmp_path / "killed").glob("checkpoints/ckpt-1*.commit")):
        pass
    killed.kill()
    for life in (*lives, again := start()):
        assert life.code(300) == 0, life.output()
    assert "restored step 1" in again.output()
    result = compare(tmp_path / "whole", tmp_path / "killed")
    assert result.differences == [] and result.examples
    checksums = [
        [record["examples_checksum"] for record in read_jsonl(str(folder / "metrics.jsonl")) if record["split"] == "train"]
        for folder in (tmp_path / name for name in ("whole", "workers"))
    ]  # fmt: skip
    assert checksums[0] == checksums[-1] and len(set(checksums[0])) == 4


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two TFRecord files of texts, "<name> <number> ..." of different lengths."""
    folder = tmp_path_factory.mktemp("records")
    texts = {name: [f"{name} {i} {'x' * (i % 9)}" for i in range(size)] for name, size in (("web", 50), ("code", 21))}
    for name, lines in texts.items():
        with tf.io.TFRecordWriter(str(folder / f"{name}.tfrecord")) as writer:
            for line in lines:
                writer.write(line.encode())
    return {name: str(folder / f"{name}.tfrecord") for name in texts}, texts


def records(plan, steps, workers=1, replicas=1, **changes):
    """The elements of `context.records`, put together as by `read`."""
    parts, local = [], replicas // workers
    for worker in range(workers):
        c = context(num_replicas=replicas, num_pipelines=workers, pipeline_index=worker, **changes)
        batches = [tf.nest.flatten(batch) for batch in c.records(plan).take(steps * local).as_numpy_iterator()]
        parts.append([np.stack(part).reshape(steps, -1) for part in zip(*batches)])
    return [np.concatenate(columns, axis=1) for columns in zip(*parts)]


@pytest.mark.slow
def test_records_of_files_are_mixed_filtered_and_put_into_buckets_like_examples_in_memory(files):
    names, texts = files
    weights, keep = {"web": 3, "code": 1}, np.arange(21) % 3 > 0
    lengths = looplib.measure(names["web"], tf.strings.length)
    assert list(lengths) == [len(text) for text in texts["web"]]
    filtered = looplib.Kept(keep, names["code"])
    found, source = records(looplib.Mixture({"web": names["web"], "code": filtered}, weights), 30, 2, 4)
    expected = read(looplib.Mixture({"web": 50, "code": looplib.Kept(keep)}, weights), 30)
    np.testing.assert_array_equal(source, expected[1])
    lines = [texts[("web", "code")[s]][i].encode() for i, s in zip(*(part.ravel() for part in expected))]
    assert found.ravel().tolist() == lines
    found, longest = records(looplib.Buckets(lengths, [8, 16], names["web"]), 12, 1, 2, start_step=3)
    expected = [part[3:] for part in read(looplib.Buckets(lengths, [8, 16]), 15)]
    assert found.ravel().tolist() == [texts["web"][i].encode() for i in expected[0].ravel()]
    np.testing.assert_array_equal(longest, expected[1])
    with pytest.raises(OrderError, match="looplib.Kept"):
        context().records(looplib.Kept(keep))
    with pytest.raises(OrderError, match="looplib.Buckets.*block=8"):
        context().records(looplib.Buckets(lengths, [8, 16], names["web"]), block=8)
    with pytest.raises(OrderError, match="21.*50"):
        looplib.Kept(keep, names["web"])


@pytest.mark.slow
def test_records_that_a_filter_keeps_may_be_read_by_blocks(files):
    names, texts = files
    ids = np.flatnonzero(np.arange(50) % 3 > 0)
    kept = [texts["web"][i].encode() for i in ids]
    c = context()
    batches = list(c.records(looplib.Kept(ids, names["web"]), block=4).take(12).as_numpy_iterator())
    expected = context().records(kept, block=4).take(12)
    np.testing.assert_array_equal(batches, list(expected.as_numpy_iterator()))
    assert sorted(np.concatenate(batches)[: len(ids)]) == sorted(kept)
    np.testing.assert_array_equal(
        batches, [[texts["web"][i].encode() for i in step] for step in c.requests.last.ids.take(12)]
    )
    once = context(training=False).records(looplib.Kept(ids, names["web"]), block=4)
    assert np.concatenate(list(once.as_numpy_iterator())).tolist() == kept


@pytest.mark.slow
def test_what_is_measured_is_kept_until_the_function_or_the_records_change(files, tmp_path, caplog):
    caplog.set_level("WARNING", logger="absl")
    names, texts = files
    calls, cache = [], str(tmp_path / "lengths.npy")

    def length(record):
        tf.py_function(lambda r: calls.append(len(r)), [record], [])
        return tf.strings.length(record)

    source = looplib.open_records(names["web"])
    first = looplib.measure(source, length, cache=cache)
    assert sum(calls) == 50 and list(first) == [len(text) for text in texts["web"]] and not caplog.records
    np.testing.assert_array_equal(np.load(cache), first)
    np.save(cache, np.where(np.arange(50) == 7, 99, first))
    longer = looplib.measure(source, lambda record: tf.strings.length(record) + 1, cache=cache)
    np.testing.assert_array_equal(longer, first + 1)
    assert "are of other records, or of another function" in caplog.text
    np.testing.assert_array_equal(looplib.measure(names["code"], length, cache=cache), [len(t) for t in texts["code"]])
    pathlib.Path(cache).write_bytes(b"\x93NUMPY damaged")
    np.testing.assert_array_equal(looplib.measure(source, length, cache=cache), first)
    caplog.clear()
    for _ in range(2):  # a number may be NaN
        found = looplib.measure(
            source, lambda record: tf.fill(tf.shape(record), np.nan), cache=str(tmp_path / "nan.npy")
        )
        assert np.isnan(found).all() and len(found) == 50 and not caplog.records
    with pytest.raises(RecordsError):
        looplib.measure(source, lambda record: tf.stack([record, record]))

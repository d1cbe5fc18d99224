"""`context.loader`: loaders of Grain, Hugging Face, PyTorch and WebDataset, and of one's own, with states that lie."""

import gc
import io
import itertools
import logging
import tarfile

import datasets
import grain
import numpy as np
import pytest
import tensorflow as tf
import webdataset
from conftest import make_strategy, more

import looplib
from looplib.data import loader, loader_state, pipelines
from looplib.data.loader_state import LoaderPosition, UnsavableStateError
from looplib.errors import DatasetError, UsageError

torch = pytest.importorskip("torch", reason="PyTorch for CPUs is not installed")
StatefulDataLoader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

SIZE, EXAMPLES, STEPS = 8, 40, 13  # of a global batch, of a pass, read: two passes and three batches


@pytest.fixture(autouse=True)
def drop_iterators():
    """Drops a test's iterators at its end, and the processes of loaders with them."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Four shards of WebDataset, of ten examples each."""
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(4):
        with tarfile.open(folder / f"{shard}.tar", "w") as file:
            for i in range(10):
                data = f"{shard * 10 + i}".encode()
                entry = tarfile.TarInfo(f"{shard * 10 + i:03}.cls")
                entry.size = len(data)
                file.addfile(entry, io.BytesIO(data))
    return sorted(map(str, folder.glob("*.tar")))


def grain_map(training, size, shards):
    data = grain.MapDataset.range(EXAMPLES).seed(3)
    data = data.shuffle().repeat() if training else data
    return data.map(lambda i: {"id": np.int64(i)}).batch(size, drop_remainder=training)


def grain_iter(training, size, shards):
    data = grain.MapDataset.range(EXAMPLES).seed(3)
    data = data.shuffle().repeat() if training else data
    return data.to_iter_dataset().filter(lambda i: i % 5 != 4 or not training).batch(size, drop_remainder=training)


def grain_processes(training, size, shards):
    data = grain_iter(training, size, shards)
    return data.mp_prefetch(grain.MultiprocessingOptions(num_workers=2))


def grain_loader(training, size, shards):
    sampler = grain.samplers.IndexSampler(EXAMPLES, shuffle=training, seed=3, num_epochs=None if training else 1)
    batches = grain.transforms.Batch(size, drop_remainder=training)
    return grain.DataLoader(data_source=range(EXAMPLES), sampler=sampler, operations=[batches])


def huggingface_map(training, size, shards):
    data = datasets.Dataset.from_dict({"id": list(range(EXAMPLES)), "text": [f"{i}" for i in range(EXAMPLES)]})
    return (data.shuffle(seed=3) if training else data).batch(size, drop_last_batch=training)


def huggingface_iterable(training, size, shards):
    data = datasets.Dataset.from_dict({"id": list(range(EXAMPLES))}).to_iterable_dataset(num_shards=4)
    data = data.with_format("numpy")
    return (data.shuffle(seed=3, buffer_size=10) if training else data).batch(size, drop_last_batch=training)


def torch_stateful(training, size, shards, workers=0):
    settings = dict(shuffle=training, drop_last=training, generator=torch.Generator().manual_seed(3))
    return StatefulDataLoader(
        [(torch.tensor(i), f"{i}") for i in range(EXAMPLES)], size, num_workers=workers, **settings
    )


def torch_processes(training, size, shards):
    return torch_stateful(training, size, shards, 2)


def torch_plain(training, size, shards):
    settings = dict(shuffle=training, drop_last=training, generator=torch.Generator().manual_seed(3))
    return torch.utils.data.DataLoader(list(range(EXAMPLES)), size, **settings)


def torch_sampled(training, size, shards):
    sampler = torch.utils.data.DistributedSampler(range(EXAMPLES), 1, 0, shuffle=training, seed=3)
    return torch.utils.data.DataLoader(range(EXAMPLES), size, sampler=sampler, drop_last=training)


def web(training, size, shards):
    data = webdataset.WebDataset(shards, shardshuffle=False, empty_check=False)
    data = data.decode().to_tuple("cls").map(lambda one: (np.int64(one[0]),))
    return data.batched(size, partial=not training)


class Own:
    """A loader with a state, whose order depends on the epoch."""

    def __init__(self, training, size, state=None):
        self.training, self.size, self.epoch, self.next, self.read = training, size, 0, 0, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def state_dict(self):
        return {"next": self.next, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.next, self.epoch = state["next"], state["epoch"]

    def __iter__(self):
        ids = np.random.default_rng(self.epoch).permutation(EXAMPLES) if self.training else np.arange(EXAMPLES)
        first, self.next = self.next, 0
        for start in range(first, EXAMPLES, self.size):
            self.next, self.read = start + self.size, self.read + 1
            yield {"id": ids[start : start + self.size]}
        self.next = 0


def own(training, size, shards):
    return Own(training, size)


def generator(training, size, shards):
    """Passes of one order; a function that makes one in each call."""
    ids = np.random.default_rng(3).permutation(EXAMPLES) if training else np.arange(EXAMPLES)
    return (ids[i : i + size] for i in range(0, EXAMPLES, size))


FAST = [grain_map, huggingface_iterable, torch_stateful, web]
KINDS = [*FAST, *more([grain_iter, grain_loader, huggingface_map, torch_plain, torch_sampled, own, generator])]
IN_PROCESSES = more([grain_processes, torch_processes])


def stream(strategy, make, start_step=0, training=True, batches="per_replica", mismatch="skip", workers=(0, 1)):
    members = {
        "dataset": lambda self, context: context.loader(
            lambda index, count: make(training, context.loader_batch_size), mismatch=mismatch
        ),
        "batch_size_varies": False,
        "uneven_parts": False,
        "batches": batches,
    }
    config = looplib.RunConfig(global_batch_size=SIZE, seed=3)
    task = type("Data", (), members)()
    return pipelines.Pipelines(strategy, task, config, training=training, start_step=start_step).distribute()


def ids_of(batch):
    """The ids of a step, over all replicas, and the sizes of their parts."""
    parts = [part for part in tf.nest.flatten(batch) if part.dtype != tf.string]
    return np.concatenate([np.ravel(part.numpy()) for part in parts]).tolist()


def read(stream, iterator, steps=10**9):
    taken = []
    while len(taken) < steps and stream.has_value(batch := stream.next_as_optional(iterator)):
        values = [stream.strategy.experimental_local_results(leaf) for leaf in tf.nest.flatten(stream.get_value(batch))]
        taken.append(ids_of([leaf for leaves in zip(*values) for leaf in leaves]))
    return taken


def alone(make):
    """The ids of the steps, as the loader gives them in a loop by hand."""
    made, taken, epoch = make(True, SIZE), [], 0
    while len(taken) < STEPS + 3:
        if epoch and not hasattr(made, "__len__") and iter(made) is made:
            made = make(True, SIZE)
        for part in (made, getattr(made, "sampler", None)):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        for batch in itertools.islice(made, STEPS):
            batch = batch["id"] if isinstance(batch, dict) else batch[0] if isinstance(batch, (tuple, list)) else batch
            taken.append(np.asarray(batch).tolist())
        epoch += 1
    return taken[:STEPS]


@pytest.mark.parametrize("name", ["default", *more(["mirrored_x2"])])
@pytest.mark.parametrize("kind", [*KINDS, *IN_PROCESSES])
def test_a_loader_continues_with_the_next_batch_after_each_of_several_stops(kind, name, shards):
    strategy, make = make_strategy(name), lambda *settings: kind(*settings, shards)
    whole = stream(strategy, make)
    all_ids = read(whole, whole.iterate(), STEPS)
    if kind not in (torch_plain, torch_stateful, torch_processes):  # whose generator looplib gives a seed in each epoch
        assert all_ids == alone(make)
    for first_epoch in (all_ids[:5], all_ids[5:10]):
        if kind is not grain_iter and kind is not grain_processes:
            assert sorted(itertools.chain(*first_epoch)) == list(range(EXAMPLES))
    taken, position = [], None
    for stop in (1, 5, 7, 12, STEPS):  # within passes, and at the end of one
        part = stream(strategy, make, len(taken))
        iterator = part.iterate(position)
        taken += read(part, iterator, stop - len(taken))
        position = part.position(iterator, stop)
        part.end(iterator, wait=True)
    assert taken == all_ids


@pytest.mark.parametrize("name", ["default", "mirrored_x2"])
@pytest.mark.parametrize("kind", [*KINDS, *IN_PROCESSES])
def test_an_evaluation_has_each_example_once_also_the_second_time(kind, name, shards):
    made = stream(make_strategy(name), lambda *settings: kind(*settings[:1], 7, shards), training=False)
    for _ in range(2):
        iterator = made.iterate()
        assert sorted(itertools.chain(*read(made, iterator))) == list(range(EXAMPLES))
        made.end(iterator, wait=True)


def test_global_batches_of_a_loader_are_divided_and_continue_on_another_number_of_replicas(shards):
    make = lambda *settings: torch_stateful(*settings, shards)
    whole = stream(make_strategy("default"), make, batches="global")
    all_ids = read(whole, whole.iterate(), STEPS)
    taken, position = [], None
    for name, steps in [("mirrored_x2", 3), ("default", 5), ("mirrored_x4", 5)]:
        for batches in ("global", "per_replica"):
            part = stream(make_strategy(name), make, len(taken), batches=batches)
            iterator = part.iterate(position)
            found = read(part, iterator, steps)
        taken, position = taken + found, part.position(iterator, len(taken) + steps)
    assert taken == all_ids


# States that lie; the numbers are those of public reports, listed in docs/data_loaders.md.


class BeginsAgain(Own):
    """Takes its first state, and begins at the start with each further one."""

    restored = 0

    def load_state_dict(self, state):
        type(self).restored += 1
        super().load_state_dict(state if type(self).restored == 1 else {"next": 0, "epoch": state["epoch"]})


class Refuses(Own):
    """Fails with a state behind its first shard."""

    def load_state_dict(self, state):
        if state["next"] > 0:
            raise KeyError("shard_idx")
        super().load_state_dict(state)


class ShufflesAgain(Own):
    """Has another order after a state was loaded."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.training, self.order = True, True

    def __iter__(self):
        batches = list(super().__iter__())
        return iter(batches[::-1] if getattr(self, "order", False) else batches)


class AtTheStart(Own):
    """Loads a state, and stays at example 0."""

    def load_state_dict(self, state):
        self.epoch = state["epoch"]


class NextEpoch(Own):
    """Has the order of the next epoch after a state was loaded."""

    def load_state_dict(self, state):
        super().load_state_dict({**state, "epoch": state["epoch"] + 1})


class SkipsTheEpoch(Own):
    """Takes a state at the end of an epoch for the end of the next one."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.next = EXAMPLES if state["next"] >= EXAMPLES else state["next"]


class KeepsItsPlace(Own):
    """Begins each further pass where a state has put it."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.kept = state["next"]

    def __iter__(self):
        self.next = max(self.next, getattr(self, "kept", 0))
        return super().__iter__()


LIARS = [BeginsAgain, Refuses, ShufflesAgain, AtTheStart, NextEpoch, SkipsTheEpoch, KeepsItsPlace]


@pytest.mark.parametrize("liar", LIARS)
def test_a_state_that_lies_is_found_and_the_pass_is_read_again(liar, caplog):
    liar.restored = 0
    strategy, make = make_strategy("default"), lambda training, size: liar(training, size)
    all_ids = [
        ids.tolist()
        for epoch in range(4)
        for ids in np.random.default_rng(epoch).permutation(EXAMPLES).reshape(-1, SIZE)
    ]
    for stops in [(3, 8, 10, STEPS), (5, STEPS), (4, 6, 9, 15)]:
        taken, position = [], None
        for stop in stops:
            part = stream(strategy, make, len(taken))
            iterator = part.iterate(position)
            taken += read(part, iterator, stop - len(taken))
            position = part.position(iterator, stop)
        assert taken == all_ids[: len(taken)]
    assert (
        liar in (SkipsTheEpoch, KeepsItsPlace)
        or "does not continue with the batches that it gave before" in caplog.text
    )


def test_a_state_that_lies_is_refused_if_that_is_asked():
    make = lambda training, size: AtTheStart(training, size)
    part = stream(make_strategy("default"), make)
    iterator = part.iterate()
    read(part, iterator, 5)
    position = part.position(iterator, 5)
    again = stream(make_strategy("default"), make, 5, mismatch="refuse")
    with pytest.raises(tf.errors.OpError, match="AtTheStart does not continue with the batches.*mismatch=.skip"):
        again.next(again.iterate(position))


class Drifts:
    """A loader without a state, whose order is another one in each process."""

    passes = 0

    def __iter__(self):
        type(self).passes += 1
        ids = np.random.default_rng(type(self).passes).permutation(EXAMPLES)
        return iter(ids.reshape(-1, SIZE))


def test_a_loader_without_a_state_that_gives_other_batches_is_refused_or_said(caplog):
    make = lambda training, size: Drifts()
    part = stream(make_strategy("default"), make)
    assert "two passes of the Drifts begin with different batches" in caplog.text
    iterator = part.iterate()
    read(part, iterator, 3)
    position = part.position(iterator, 3)
    again = stream(make_strategy("default"), make, 3)
    with pytest.raises(tf.errors.OpError, match="Drifts does not give the batches again that it gave in epoch 1"):
        again.next(again.iterate(position))
    caplog.clear()
    warned = stream(make_strategy("default"), make, 3, mismatch="warn")
    warned.next(warned.iterate(position))
    assert "the run trains on what comes" in caplog.text


def test_a_rollback_that_leaves_batches_out_finds_the_next_ones_by_reading():
    make = lambda training, size: Own(training, size)
    whole = stream(make_strategy("default"), make)
    all_ids = read(whole, whole.iterate(), STEPS)
    later = stream(make_strategy("default"), make, 7)
    assert read(later, later.iterate(), STEPS - 7) == all_ids[7:]


# What a loader may do wrong.


def passes(*batches):
    return lambda training, size: iter([np.asarray(batch) if batch is not None else None for batch in batches])


WRONG = {
    "None": (passes(range(8), range(8), None), "gave None in place of batch 3"),
    "smaller": (passes(range(8), range(8), range(4)), "gave 4 examples in batch 3 of epoch 1; expected 8.*drop_last"),
    "larger": (passes(range(16)), "gave 16 examples in batch 1 of epoch 1; expected 8"),
    "empty": (passes(range(8), range(8), np.zeros([0], int)), "gave 0 examples in batch 3"),
    "another type": (
        passes(range(8), range(8), np.zeros(8)),
        "has a batch of float64 .*, and its first ones have int64",
    ),
    "another shape": (passes(range(8), range(8), np.zeros([8, 1], int)), "has a batch of int64 .*same shape"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_batch_of_another_form_is_refused_by_its_number(what):
    make, message = WRONG[what]
    with pytest.raises((tf.errors.OpError, UsageError), match=message):
        made = stream(make_strategy("default"), make)
        read(made, made.iterate(), 4)


def test_what_is_no_loader_or_has_no_batch_is_refused_early():
    strategy = make_strategy("default")
    for make, message in [
        (lambda training, size: 3, "returned a int; expected a loader of batches"),
        (lambda training, size: tf.data.Dataset.range(3), "returned a tf.data.Dataset, which dataset"),
        (lambda training, size: [], "list has no batch"),
        (lambda training, size: [1, 2], "single examples or numbers"),
        (lambda training, size: [[np.arange(8)], {"x": np.arange(8)}], "different structures"),
    ]:
        with pytest.raises(UsageError, match=message):
            stream(strategy, make)
    with pytest.raises(UsageError, match="mismatch of context.loader is 'no'; expected one of skip, refuse, warn"):
        stream(strategy, lambda training, size: [np.arange(8)], mismatch="no")
    one = iter([np.arange(8)] * 3)
    ended = (batch for batch in [np.arange(8)] * 3)
    stream(strategy, lambda training, size: ended)
    with pytest.raises(UsageError, match="returned one generator twice, which begins only once"):
        stream(strategy, lambda training, size: ended)
    del one


def test_one_loader_with_a_state_is_not_for_training_and_evaluation_at_once():
    shared = Own(True, SIZE)
    training = stream(make_strategy("default"), lambda training, size: shared)
    with pytest.raises(UsageError, match="one Own is read by the training and by an evaluation"):
        stream(make_strategy("default"), lambda training, size: shared, training=False)
    del training


def test_an_error_of_the_loader_and_a_pass_that_ends_early_name_it():
    class Fails(Own):
        def __iter__(self):
            yield from itertools.islice(super().__iter__(), 3)
            raise OSError("the disk of shard 7 is gone")

    class Short(Own):
        def __len__(self):
            return EXAMPLES

    for kind, message in [
        (Fails, "the disk of shard 7 is gone"),
        (Short, "Short has 40 batches by its len.*ended before"),
    ]:
        made = stream(make_strategy("default"), lambda training, size: kind(training, size))
        with pytest.raises(tf.errors.OpError, match=message):
            read(made, made.iterate(), STEPS)


# States as texts.


def test_a_state_comes_back_as_it_was():
    state = {
        "a": [1, 2.5, None, True, 2**70, float("inf")], "b": (b"\0\xff", ("x",)), 3: {"looplib": "bytes"},
        "c": np.arange(6, dtype=np.uint8).reshape(2, 3), "d": np.float32(0.1), "e": torch.tensor([1, 2]), "": [],
    }  # fmt: skip
    found = loader_state.unpack(loader_state.pack(state))
    assert found.keys() == state.keys() and all(found[key] == state[key] for key in ("a", "b", 3, "d", ""))
    np.testing.assert_array_equal(found["c"], state["c"])
    assert found["c"].dtype == np.uint8 and isinstance(found["e"], torch.Tensor) and found["e"].tolist() == [1, 2]
    assert type(found["d"]) is np.float32


def test_a_state_of_other_objects_is_not_saved_and_said_once(caplog):
    with pytest.raises(UnsavableStateError, match=r"state\['rng'\]\[0\] is a numpy.random._generator.Generator"):
        loader_state.pack({"rng": [np.random.default_rng()]})

    class Odd(Own):
        def state_dict(self):
            return {"rng": np.random.default_rng()}

    made = stream(make_strategy("default"), lambda training, size: Odd(training, size))
    all_ids = read(made, iterator := made.iterate(), 7)
    assert caplog.text.count("the state of Odd cannot be saved") == 1
    again = stream(make_strategy("default"), lambda training, size: Odd(training, size), 7)
    assert read(again, again.iterate(made.position(iterator, 7)), 2)[0] not in all_ids[5:]


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"loader": 3}', b"\xff"])
def test_a_position_that_is_none_is_a_sentence(damage):
    with pytest.raises(loader_state.MisfitError):
        LoaderPosition.from_bytes(damage)
    made = stream(make_strategy("default"), lambda training, size: Own(training, size), 3)
    if damage:
        with pytest.raises(UsageError, match="the checkpoint has no position of a loader .*, and the data is Own now"):
            made.iterate(damage)


def test_a_position_of_another_part_of_the_data_is_refused():
    make = lambda training, size: Own(training, size)
    part = stream(make_strategy("default"), make)
    read(part, iterator := part.iterate(), 3)
    position = part.position(iterator, 3).replace(b"part 0 of 1", b"part 0 of 2")
    again = stream(make_strategy("default"), make, 3)
    with pytest.raises(UsageError, match="gave the run part 0 of 2, .* and gives part 0 of 1"):
        again.iterate(position)


def test_states_are_taken_less_often_where_they_cost_more_than_the_batches(monkeypatch):
    class Slow(Own):
        taken = 0

        def state_dict(self):
            type(self).taken += 1
            Timed.now += 0.2
            return super().state_dict()

    class Timed:
        now = 0.0

        @classmethod
        def perf_counter(cls):
            cls.now += 0.005
            return cls.now

    monkeypatch.setattr(loader, "time", Timed)
    made = stream(make_strategy("default"), lambda training, size: Slow(training, size))
    all_ids = read(made, iterator := made.iterate(), STEPS)
    assert Slow.taken < STEPS
    again = stream(make_strategy("default"), lambda training, size: Slow(training, size), STEPS)
    following = np.random.default_rng(2).permutation(EXAMPLES).reshape(-1, SIZE)[STEPS - 10].tolist()
    assert len(all_ids) == STEPS and read(again, again.iterate(made.position(iterator, STEPS)), 1) == [following]


def test_the_digest_of_a_batch_covers_types_shapes_and_values():
    one = [np.arange(6, dtype=np.int32), np.asarray(["a", "b"])]
    others = [
        [one[0].astype(np.int64), one[1]], [one[0].reshape(2, 3), one[1]], [one[0][::-1], one[1]],
        [one[0], np.asarray(["a", "c"])],
    ]  # fmt: skip
    digests = [loader._digest(batch) for batch in [one, *others]]
    assert len(set(digests)) == 5 and loader._digest([part.copy() for part in one]) == digests[0]


def test_a_user_of_the_data_set_may_map_it_and_a_shuffle_behind_it_resumes_by_skipping(caplog):
    caplog.set_level(logging.INFO, logger="absl")
    with pytest.raises(DatasetError, match="calls context.loader twice"):
        context = looplib.InputContext(
            global_batch_size=8, num_replicas=1, pipeline_index=0, num_pipelines=1, seed=0, training=True, start_step=0
        )
        for _ in range(2):
            context.loader(lambda index, count: Own(True, SIZE))

"""The data digest: equal for runs with equal data, however they run, and another one after any change of the data."""

import signal
import sys
import time

import numpy as np
import pytest
import tensorflow as tf
import toy
from conftest import make_strategy, needs_models, repetitions

import looplib
from looplib.__main__ import main
from looplib.checkpoint.commits import latest_checkpoint
from looplib.checkpoint.restoring import peek
from looplib.errors import EXIT_DIFFERENT, EXIT_DONE, ActionError
from looplib.extras.tools.data_digest import DataDigest, digest_of

BATCH, STEPS = 8, 20
DATA = np.random.RandomState(1).randint(0, toy.NUM_EXAMPLES, (STEPS, BATCH))


class Ordered(toy.Regression):
    """Trains on given batches of numbers of examples, whose features may be others."""

    def __init__(self, numbers=DATA, features=toy.X):
        super().__init__()
        self.numbers, self.features = numbers, features

    def dataset(self, context):
        ids = tf.data.Dataset.from_tensor_slices(self.numbers.reshape(-1)).repeat()
        batches = ids.batch(context.per_replica_batch_size, drop_remainder=True)
        return batches.map(lambda i: (i, tf.gather(self.features, i), tf.gather(toy.Y, i)))

    def loop_end(self, metrics):
        del metrics["ids"]
        return metrics


def digest(folder, trainer=Ordered, steps=STEPS, strategy="default", **settings):
    """Trains; returns what the checkpoint says of the data."""
    strategy = make_strategy(strategy)
    with strategy.scope():
        trainer = trainer()
    settings = {"steps_per_loop": 5, "data_digest": True, **settings}
    with toy.controller(strategy, trainer, model_dir=folder, **settings) as controller:
        controller.train(steps)
    return digest_of(peek(latest_checkpoint(f"{folder}/checkpoints"))[1])


def by_numpy(batches, features=toy.X):
    """The digest of batches of numbers of examples."""
    np.seterr(over="ignore")

    def mix(words):
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
        return words ^ (words >> np.uint64(31))

    def hashed(rows):
        rows = np.ascontiguousarray(rows.reshape(len(rows), -1))
        words = mix(rows.view(np.uint64)) if rows.itemsize == 8 else rows.view(np.uint32).astype(np.uint64)
        keys = mix(np.arange(1, words.shape[1] + 1, dtype=np.uint64)) | np.uint64(1)
        return mix((words * keys).sum(axis=1, dtype=np.uint64))

    total = 0
    for step, ids in enumerate(batches):
        columns = [hashed(part) for part in (ids.astype(np.int64), features[ids], toy.Y[ids])]
        rows = np.stack([*columns, np.full(len(ids), step, np.uint64)], axis=1)
        total += sum(int(number) % 2**53 for number in hashed(rows))
    return total % 2**53


def test_the_digest_is_the_sum_of_hashes_of_content_and_step(tmp_path):
    found = digest(tmp_path)
    assert (found.since, found.step, found.examples, found.checksum) == (0, STEPS, STEPS * BATCH, by_numpy(DATA))
    changed, swapped, repeated, lacking = toy.X.copy(), DATA.copy(), DATA.copy(), DATA.copy()
    changed[DATA[7, 3]].view(np.uint8)[1] ^= 1
    swapped[[4, 11]] = DATA[[11, 4]]
    repeated[9] = DATA[8]
    lacking[5:-1] = DATA[6:]
    others = {"byte": (DATA, changed), "swap": (swapped,), "twice": (repeated,), "left out": (lacking,)}
    assert len({by_numpy(*other) for other in others.values()} | {found.checksum}) == 5
    for name in repetitions(["byte"], others):
        other = digest(tmp_path / name, lambda: Ordered(*others[name]))
        assert other.checksum == by_numpy(*others[name]) and other.examples == found.examples, name


WAYS = {
    "mirrored_x2": dict(strategy="mirrored_x2"),
    "mirrored_x4": dict(strategy="mirrored_x4"),
    "eager": dict(loop="eager"),
    "xla": dict(loop="xla"),
    "auto": dict(loop="auto"),
    "other reports": dict(steps_per_loop=7),
}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("way", WAYS)
def test_no_way_to_train_changes_the_digest(way, tmp_path):
    found = digest(tmp_path, **WAYS[way])
    assert (found.examples, found.checksum) == (STEPS * BATCH, by_numpy(DATA))


@pytest.mark.slow
def test_a_resume_within_a_report_and_on_other_replicas_changes_nothing(tmp_path):
    digest(tmp_path, steps=8)
    partly = digest(tmp_path, steps=13, strategy="mirrored_x2")
    assert (partly.step, partly.examples, partly.checksum) == (13, 13 * BATCH, by_numpy(DATA[:13]))
    assert partly.reported.checksum == by_numpy(DATA[:10])
    found = digest(tmp_path, steps=STEPS, steps_per_loop=4)
    assert (found.since, found.examples, found.checksum) == (0, STEPS * BATCH, by_numpy(DATA))


class Spoiled(Ordered):
    """With one loss that is not finite, the first time that its step comes."""

    def step_fn(self, inputs):
        outputs = super().step_fn(inputs)
        bad = tf.reduce_all(inputs[0] == tf.constant(DATA[12], inputs[0].dtype))
        return {**outputs, "loss": tf.where(bad, np.nan, outputs["loss"])}


@pytest.mark.slow
def test_what_a_rollback_undoes_does_not_count(tmp_path):
    guards = looplib.Guards(non_finite="rollback")
    policy = looplib.CheckpointPolicy(every_steps=5)
    found = digest(tmp_path, Spoiled, steps=STEPS, guards=guards, checkpoints=policy)
    left_out = np.concatenate([DATA[:10], DATA[13:], DATA[:3]])[:STEPS]  # the data goes on after the bad step
    assert (found.examples, found.checksum) == (STEPS * BATCH, by_numpy(left_out))


@pytest.mark.slow
def test_a_digest_that_is_asked_for_later_says_from_where_on(tmp_path):
    digest(tmp_path, steps=8, data_digest=False)
    found = digest(tmp_path)
    assert (found.since, found.step, found.examples) == (8, STEPS, (STEPS - 8) * BATCH)
    assert "of 96 examples of steps 9 to 20" in str(found)


def test_a_memory_of_another_form_is_refused():
    for state in (None, [1, 2], {"since": 0}, {**dict.fromkeys(("since", "step", "examples"), 0), "checksum": "0"}):
        with pytest.raises(ValueError):
            DataDigest().load(state)
    fields = dict.fromkeys(("since", "step", "examples", "checksum", "reported_examples", "reported_checksum"), 2**60)
    with pytest.raises(ValueError):
        DataDigest().load(fields)


@pytest.fixture
def forks(python, monkeypatch, nursery):
    """The commands run in forks."""
    monkeypatch.setattr(sys, "executable", python)
    monkeypatch.setenv("PYTHONPATH", nursery.environment["PYTHONPATH"])


def train(nursery, folder, *arguments, **environment):
    arguments = [f"--model_dir={folder}", "--mode=train", "--train_steps=60", "--data_digest", *arguments]
    environment = {"LOOPLIB_EXAMPLE_CHECKSUMS": None, **environment}
    life = nursery.life_of("audited", *arguments, environment=environment)
    assert life.code() == 0, life.output()
    return digest_of(peek(latest_checkpoint(f"{folder}/checkpoints"))[1])


@pytest.mark.slow
def test_runs_are_told_apart_by_their_data_before_they_are_replayed(forks, nursery, tmp_path, capfd):
    whole = train(nursery, tmp_path / "whole")
    assert train(nursery, tmp_path / "two", "--num_virtual_devices=2", "--steps_per_loop=4") == whole
    train(nursery, tmp_path / "other", AUDITED_FLIP="data:33")
    assert main(["inspect", str(tmp_path / "whole")]) == EXIT_DONE
    assert f"data: digest {whole.total.text} of 480 examples of steps 1 to 60" in capfd.readouterr().out
    assert main(["diff", str(tmp_path / "whole"), str(tmp_path / "other")]) == EXIT_DIFFERENT
    assert "data: other examples between steps 31 and 40\n" in capfd.readouterr().out
    main(["diff", str(tmp_path / "whole"), str(tmp_path / "two")])
    assert "data: equal up to step 60\n" in capfd.readouterr().out


@pytest.mark.slow
def test_a_kill_and_two_workers_have_the_digest_of_one_process(nursery, tmp_path):
    whole = train(nursery, tmp_path / "whole")
    arguments = [f"--model_dir={tmp_path / 'killed'}", "--mode=train", "--train_steps=60", "--data_digest"]
    environment = {"LOOPLIB_EXAMPLE_CHECKSUMS": None}
    life = nursery.life_of("audited", *arguments, "--config.waits=0.05", environment=environment)
    end = time.monotonic() + 60
    while latest_checkpoint(str(tmp_path / "killed" / "checkpoints")) is None and time.monotonic() < end:
        time.sleep(0.05)
    life.kill(signal.SIGKILL)
    assert life.code() == -signal.SIGKILL
    assert train(nursery, tmp_path / "killed") == whole
    options = ["--mode=train", "--train_steps=60", "--data_digest"]
    workers = nursery.workers(2, tmp_path / "workers", *options, binary="audited", environments=[environment] * 2)
    assert [worker.code() for worker in workers] == [0, 0], workers[0].output()
    found = digest_of(peek(latest_checkpoint(str(tmp_path / "workers" / "checkpoints")))[1])
    assert (found.total, found.step) == (whole.total, 60)


@needs_models
@pytest.mark.slow
def test_data_that_looplib_does_not_read_is_refused():
    import orbit_tasks

    strategy = make_strategy("default")
    trainer = looplib.OrbitTrainer(orbit_tasks.Classifier())
    with toy.controller(strategy, trainer, data_digest=True, global_batch_size=None) as controller:
        with pytest.raises(ActionError, match="leave out --data_digest"):
            controller.train(2)

"""`context.records(follow=...)`: files that appear while a run trains, each once, in an order that checkpoints hold."""

import os
import signal
import threading
import time

import followed
import numpy as np
import pytest
import tensorflow as tf
from clouds import wait_for
from conftest import make_strategy, more

import looplib
from looplib.base.decoding import MisfitError
from looplib.data.loader_state import FollowedFile, FollowedPosition


def write(folder, name, numbers):
    """Writes a file of numbers, which appears by a rename."""
    folder.mkdir(exist_ok=True)
    (folder / f".{name}").write_text("".join(f"{number}\n" for number in numbers))
    os.rename(folder / f".{name}", folder / name)


def pattern(folder):
    return f"{folder}/day-*.txt"


class Mean(looplib.Evaluator):
    """An evaluation, which needs TensorFlow's threads while the training's data waits for files."""

    def dataset(self, context):
        return context.indices(32)

    def step_fn(self, ids):
        return {"mean": tf.cast(ids, tf.float32)}


def controller(folder, model_dir=None, *, replicas=1, size=8, loop="auto", shuffle=True, bad_records=0, **settings):
    strategy = make_strategy("mirrored_x2" if replicas > 1 else "default")
    follow = looplib.Follow(**{"settled": None, "every": 0.05, **settings})
    with strategy.scope():
        trainer = followed.Followed(pattern(folder), shuffle, follow)
    config = looplib.RunConfig(global_batch_size=size, steps_per_loop=4, loop=loop, seed=3, bad_records=bad_records)
    tasks = {"trainer": trainer, "evaluator": Mean()}
    return looplib.Controller(config, **tasks, strategy=strategy, model_dir=model_dir, writers=[]), trainer


def hashed(batches):
    """The hash of an order, by plain Python."""
    found = 0
    for batch in batches:
        found = (found * 31 + sum(int(n) ** 2 * place for place, n in enumerate(batch, 1)) + 2**63) % 2**64 - 2**63
    return found


def state(trainer):
    return trainer.seen.numpy().tolist(), int(trainer.hash.numpy())


def of(numbers):
    return np.bincount(numbers, minlength=followed.MOST).tolist()


@pytest.mark.parametrize("loop", ["auto", *more(["graph", "xla", "eager"])])
@pytest.mark.parametrize("replicas", [1, 2])
def test_files_come_in_the_order_of_their_names_each_once_while_others_appear(tmp_path, replicas, loop):
    if loop == "xla" and replicas > 1:
        pytest.skip("XLA takes one replica")
    write(tmp_path, "day-2.txt", range(20, 33))
    write(tmp_path, "day-1.txt", range(20))
    run, trainer = controller(tmp_path, replicas=replicas, loop=loop, shuffle=False)

    def add():
        for day in range(3, 9):
            time.sleep(0.4)
            write(tmp_path, f"day-{day}.txt", range(7 + day * 13 - 13, 7 + day * 13))

    thread = threading.Thread(target=add)
    thread.start()
    assert run.train_and_evaluate(steps=13, eval_interval=4)["eval"]["mean"] == 15.5
    thread.join()
    assert state(trainer) == (of(range(104)), hashed(np.arange(104).reshape(13, 8)))
    run.close()


def test_the_order_within_a_file_is_shuffled_and_does_not_depend_on_replicas_or_on_when_files_appear(tmp_path):
    for day in range(4):
        write(tmp_path, f"day-{day}.txt", range(day * 100, day * 100 + 100))
    run, one = controller(tmp_path)
    run.train(steps=12)  # 96 numbers of the first file
    assert sum(one.seen.numpy()[:100]) == 96 and max(one.seen.numpy()) == 1
    run.train(steps=50)
    run.close()
    run, two = controller(tmp_path, replicas=2)
    run.train(steps=50)
    run.close()
    assert state(one) == state(two) == (of(range(400)), int(one.hash.numpy()))
    assert int(one.hash.numpy()) != hashed(np.arange(400).reshape(50, 8))
    later = tmp_path / "later"
    write(later, "day-0.txt", range(100))
    run, three = controller(later)
    for day in range(1, 4):
        run.train(steps=12 * day)
        write(later, f"day-{day}.txt", range(day * 100, day * 100 + 100))
    run.train(steps=50)
    run.close()
    assert state(three) == state(one)


def test_a_run_continues_where_it_was_also_when_files_were_removed_that_it_has_read(tmp_path, caplog):
    files, model_dir = tmp_path / "files", str(tmp_path / "run")
    for day in range(6):
        write(files, f"day-{day}.txt", range(day * 30, day * 30 + 30))
    run, whole = controller(files)
    run.train(steps=22)
    run.close()
    run, _ = controller(files, model_dir)
    run.train(steps=9)
    run.close()
    for day in (0, 1):  # 60 of 72 numbers
        (files / f"day-{day}.txt").unlink()
    os.rename(files, tmp_path / "elsewhere")
    write(tmp_path / "elsewhere", "day-6.txt", range(180, 210))
    run, trainer = controller(tmp_path / "elsewhere", model_dir, replicas=2)
    run.train(steps=22)
    assert state(trainer) == state(whole)
    run.restore_checkpoint(9)
    run.train(steps=22)
    assert state(trainer) == state(whole)
    run.close()
    assert "another order" not in caplog.text
    controller(tmp_path / "elsewhere", model_dir, shuffle=False)[0].close()
    assert "the examples come in another order than that of step 22" in caplog.text


def test_a_file_that_is_written_slowly_is_taken_once_it_is_unchanged_for_the_time_that_is_set(tmp_path):
    write(tmp_path, "day-1.txt", range(8))
    run, trainer = controller(tmp_path, shuffle=False, settled=1.0)

    def add():
        with open(tmp_path / "day-2.txt", "w") as file:
            for number in range(8, 24):
                file.write(f"{number}\n")
                file.flush()
                time.sleep(0.1)
        write(tmp_path, "day-3.txt", range(24, 32))

    thread = threading.Thread(target=add)
    thread.start()
    run.train(steps=4)
    thread.join()
    assert state(trainer) == (of(range(32)), hashed(np.arange(32).reshape(4, 8)))
    assert run.clock.of("waiting") > 0.3
    run.close()


def test_late_empty_and_old_files_get_a_sentence(tmp_path, caplog):
    write(tmp_path, "day-3.txt", range(16))
    write(tmp_path, "day-4.txt", [])
    write(tmp_path, "day-0.txt", range(100, 120))
    os.utime(tmp_path / "day-0.txt", (time.time() - 1000, time.time() - 1000))
    run, trainer = controller(tmp_path, shuffle=False, newest="10m")
    run.train(steps=2)
    write(tmp_path, "day-2.txt", range(16, 24))
    write(tmp_path, "day-4.txt", range(24, 32))
    run.train(steps=4)
    assert state(trainer) == (of(range(32)), hashed(np.arange(32).reshape(4, 8)))
    said = caplog.text
    assert "day-0.txt is left out, because it is older than Follow.newest" in said
    assert "day-4.txt is empty, and is taken once it has records" in said
    assert "day-2.txt appeared after day-3.txt, whose name follows it" in said
    write(tmp_path, "day-3.txt", range(20))
    write(tmp_path, "day-5.txt", range(32, 40))
    write(tmp_path, "day-6.txt", range(40, 4000))
    write(tmp_path, "day-7.txt", range(8))
    time.sleep(0.1)
    run.train(steps=5)
    (tmp_path / "day-7.txt").unlink()
    time.sleep(0.1)
    run.train(steps=499)
    assert "day-7.txt is gone before the run has taken it" in caplog.text
    assert "day-3.txt was changed after the run had taken it; write new records to new files" in caplog.text
    run.close()


@pytest.mark.parametrize("how", ["removed", "longer", "of the same size"])
def test_a_file_that_is_gone_before_it_is_read_is_refused_or_left_out_by_the_policy(tmp_path, how):
    files, model_dir = tmp_path / "files", str(tmp_path / "run")
    for day in range(4):
        write(files, f"day-{day}.txt", range(day * 20, day * 20 + 20))
    run, _ = controller(files, model_dir, shuffle=False)
    run.train(steps=4)  # 12 numbers of the second file are trained on
    run.close()
    if how == "removed":
        (files / "day-1.txt").unlink()
    else:
        write(files, "day-1.txt", range(20, 50) if how == "longer" else range(60, 80))
    run, _ = controller(files, model_dir, shuffle=False)
    with pytest.raises(
        looplib.UsageError,
        match=r"day-1.txt (was changed|cannot be opened any more).*not all of its records were trained on",
    ):
        run.train(steps=9)
    run.close()
    run, trainer = controller(files, model_dir, shuffle=False, bad_records=1)
    run.train(steps=9)
    run.close()
    expected = [*range(32), *range(40, 80)]
    assert state(trainer) == (of(expected), hashed(np.reshape(expected, (9, 8))))
    assert len(os.listdir(f"{model_dir}/bad_records")) == 1


def test_a_damaged_file_is_refused_or_left_out_by_the_policy(tmp_path):
    def records(name, numbers):
        with tf.io.TFRecordWriter(str(tmp_path / name)) as writer:
            for number in numbers:
                writer.write(str(number).encode())

    for day in range(3):
        records(f"day-{day}.txt.tfrecord", range(day * 8, day * 8 + 8))
    path = tmp_path / "day-1.txt.tfrecord"
    path.write_bytes(path.read_bytes()[:-3])

    class Records(followed.Followed):
        def dataset(self, context):
            return context.records(f"{tmp_path}/day-*.tfrecord", follow=self._follow, shuffle=False).map(
                lambda records: tf.strings.to_number(records, tf.int64)
            )

    for most in (0, 1):
        trainer = Records("", follow=looplib.Follow(settled=None))
        config = looplib.RunConfig(global_batch_size=8, steps_per_loop=4, bad_records=most)
        run = looplib.Controller(config, trainer=trainer, writers=[])
        if most:
            run.train(steps=2)
            assert state(trainer)[0] == of([*range(8), *range(16, 24)])
        else:
            with pytest.raises(looplib.UsageError, match=r"day-1.txt.tfrecord ends at byte"):
                run.train(steps=2)
        run.close()


@pytest.mark.parametrize("kind", ["tfrecord", "array_record", "parquet"])
def test_files_of_each_format_are_followed(tmp_path, kind):
    def add(day):
        numbers, path = range(day * 20, day * 20 + 20), str(tmp_path / f"day-{day}.{kind}")
        if kind == "tfrecord":
            with tf.io.TFRecordWriter(path + ".new") as writer:
                for number in numbers:
                    writer.write(str(number).encode())
        elif kind == "array_record":
            writer = pytest.importorskip("array_record.python.array_record_module").ArrayRecordWriter(
                path + ".new", "group_size:1"
            )
            for number in numbers:
                writer.write(str(number).encode())
            writer.close()
        else:
            parquet = pytest.importorskip("pyarrow.parquet")
            parquet.write_table(
                pytest.importorskip("pyarrow").table({"n": [str(number) for number in numbers]}), path + ".new"
            )
        os.rename(path + ".new", path)

    class Records(followed.Followed):
        def dataset(self, context):
            found = context.records(f"{tmp_path}/day-*.{kind}", follow=self._follow)
            return found.map(lambda one: tf.strings.to_number(one["n"] if kind == "parquet" else one, tf.int64))

    add(0)
    trainer = Records("")
    with looplib.Controller(looplib.RunConfig(global_batch_size=8), trainer=trainer, writers=[]) as run:
        run.train(steps=2)
        assert max(np.flatnonzero(trainer.seen.numpy())) < 20
        for day in range(1, 4):
            add(day)
        run.train(steps=10)
    assert state(trainer)[0] == of(range(80))


def test_a_checkpoint_that_does_not_say_what_was_read_is_refused(tmp_path):
    class Other(followed.Followed):
        def dataset(self, context):
            return context.indices(100)

    model_dir = str(tmp_path / "run")
    config = looplib.RunConfig(global_batch_size=8, steps_per_loop=4)
    with looplib.Controller(config, trainer=Other(""), model_dir=model_dir, writers=[]) as run:
        run.train(steps=3)
    write(tmp_path, "day-1.txt", range(80))
    run, _ = controller(tmp_path, model_dir)
    with pytest.raises(looplib.UsageError, match="does not say which files"):
        run.train(steps=5)
    run.close()


@pytest.mark.parametrize("name", ["../day-1.txt", "/etc/day-1.txt", "a//day-1.txt", ""])
def test_a_list_of_files_from_elsewhere_names_none_outside_of_the_folder(name):
    saved = FollowedPosition([FollowedFile("a/day-0.txt", 1, 1), FollowedFile(name, 1, 1)]).to_bytes()
    with pytest.raises(MisfitError):
        FollowedPosition.from_bytes(saved)
    good = FollowedPosition([FollowedFile("a/day-0.txt", 1, 1), FollowedFile("b/day-0.txt", 1, 1)])
    assert FollowedPosition.from_bytes(good.to_bytes()) == good
    assert FollowedPosition.from_bytes(FollowedPosition([]).to_bytes()) == FollowedPosition([])


def test_a_rollback_and_another_batch_size_continue_with_the_examples_that_follow(tmp_path):
    files, model_dir = tmp_path / "files", str(tmp_path / "run")
    write(files, "day-1.txt", range(100))
    run, _ = controller(files, model_dir, shuffle=False)
    run.train(steps=5)
    run.close()
    run, trainer = controller(files, model_dir, shuffle=False, size=12)
    run.train(steps=10)
    assert state(trainer)[0] == of(range(100))
    run.close()


def test_what_cannot_follow_is_refused_in_a_sentence(tmp_path):
    def refused(change, match, **settings):
        class Refused(followed.Followed):
            def dataset(self, context):
                return change(context)

        config = looplib.RunConfig(global_batch_size=8, **settings)
        with pytest.raises(looplib.UsageError, match=match):
            looplib.Controller(config, trainer=Refused(""), writers=[])

    files = pattern(tmp_path)
    refused(lambda c: c.records([files], follow=True), "expected one pattern")
    refused(lambda c: c.records(files, follow=True, repeat=True), "no epochs")
    refused(lambda c: c.records(files, follow=True).shuffle(10), "mixes batches")
    refused(lambda c: c.records(files, follow=True), "leave out --overfit_batch", overfit_batch=True)
    refused(lambda c: c.records(f"{tmp_path}/**/*.txt", follow=True), "a pattern for each level")
    refused(lambda c: c.records(f"{tmp_path}/*", follow=True), "do not say one format")
    refused(lambda c: tf.data.Dataset.zip((c.records(files, follow=True), c.records(files, follow=True))), "twice")
    with pytest.raises(looplib.UsageError, match=r"Follow.newest is '7 days'"):
        looplib.Follow(newest="7 days")
    for name in ("day-1\\.txt", os.fsdecode(b"day-\xff.txt")):
        write(tmp_path / "named", name, range(8))
        run, _ = controller(tmp_path / "named")
        with run, pytest.raises(looplib.UsageError, match="a name that no checkpoint can hold"):
            run.train(steps=1)
        (tmp_path / "named" / name).unlink()


def test_a_signal_ends_a_wait_at_once_with_a_save_and_a_wait_is_no_stall(nursery, tmp_path):
    write(tmp_path, "day-1.txt", range(50))
    flags = [f"--model_dir={tmp_path}/run", f"--files={pattern(tmp_path)}", "--train_steps=-1", "--stall_limit=2"]
    life = nursery.life_of("followed", *flags)
    end = time.monotonic() + 60
    while "step       4" not in life.output() and time.monotonic() < end:
        time.sleep(0.1)
    assert not life.ended(6.0), life.output()
    asked = time.monotonic()
    life.kill(signal.SIGTERM)
    assert life.code(20) == 75, life.output()
    assert time.monotonic() - asked < 5
    assert (tmp_path / "run" / "checkpoints" / "ckpt-6.commit").exists()


def killed(start, folder, steps, kills=5):
    """Kills a run at random moments while files appear, and lets it end."""
    chosen, day = np.random.default_rng(0), 0
    for _ in range(kills):
        life = start()
        for _ in range(3):
            write(folder, f"day-{day:03}.txt", range(day * 40, day * 40 + 40))
            day += 1
            time.sleep(chosen.uniform(0.1, 1.0))
        life.kill()
        life.code()
    life = start()
    while day * 40 < steps * 8 + 40:
        write(folder, f"day-{day:03}.txt", range(day * 40, day * 40 + 40))
        day += 1
    assert life.code(200) == 0, life.output()


@pytest.mark.slow
def test_a_run_in_a_store_follows_objects_of_a_store_and_continues_on_another_machine(cloud, tmp_path):
    def add(day):
        lines = "".join(f"{number}\n" for number in range(day * 40, day * 40 + 40))
        cloud.write(f"day-{day}.txt", lines.encode(), "files")

    def start(steps, machine):
        flags = [f"--model_dir={cloud.url()}", f"--files={cloud.url('files')}/day-*.txt", "--seed=3"]
        flags += [f"--train_steps={steps}", "--checkpoint_interval=4", "--slow=0.02", "--every=1"]
        return cloud.nursery.life_of("followed", *flags, environment=cloud.environment(machine))

    for day in range(3):
        add(day)
    life = start(50, "one")
    wait_for(lambda: max(cloud.steps(), default=0) >= 8 or life.ended(), 60)
    assert not life.ended(), life.output()
    add(3)
    life.kill()
    life.code()
    cloud.lose("one")
    cloud.delete("day-0.txt", "files")  # which is read
    for day in range(4, 10):
        add(day)
    assert (life := start(50, "two")).code(120) == 0, life.output()
    for day in range(10):
        write(tmp_path / "here", f"day-{day}.txt", range(day * 40, day * 40 + 40))
    run, trainer = controller(tmp_path / "here")
    run.train(steps=50)
    run.close()
    folder = cloud.download("copy")
    assert saved(folder, 50) == list(state(trainer)) and sum(trainer.seen.numpy()) == 400


def saved(model_dir, step):
    reader = tf.train.load_checkpoint(f"{model_dir}/checkpoints/ckpt-{step}")
    return [reader.get_tensor(f"{name}/.ATTRIBUTES/VARIABLE_VALUE").tolist() for name in ("seen", "hash")]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_runs_that_are_killed_while_files_appear_train_on_each_number_once_in_one_order(nursery, tmp_path, workers):
    flags = ["--train_steps=85", "--checkpoint_interval=4", "--slow=0.02", "--seed=3"]

    class Together:
        def __init__(self, model_dir, folder):
            args = [f"--files={pattern(folder)}", *flags]
            if workers == 1:
                self.lives = [nursery.life_of("followed", f"--model_dir={model_dir}", *args)]
            else:
                self.lives = nursery.workers(workers, model_dir, *args, binary="followed")

        def kill(self):
            for life in self.lives:
                life.kill()

        def code(self, timeout=120.0):
            return max(abs(life.code(timeout)) if life.code(timeout) != -signal.SIGKILL else 0 for life in self.lives)

        def output(self):
            return "".join(life.output() for life in self.lives)

    killed(lambda: Together(tmp_path / "killed", tmp_path / "files"), tmp_path / "files", 85)
    run, trainer = controller(tmp_path / "files")
    run.train(steps=85)
    run.close()
    assert saved(tmp_path / "killed", 85) == list(state(trainer))
    assert sum(trainer.seen.numpy()) == 680 and max(trainer.seen.numpy()) == 1

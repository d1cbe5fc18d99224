"""Batches that data workers make: real ones, in processes of their own, and what comes after their deaths."""

import contextlib
import itertools
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import paths
import pytest
import served
import tensorflow as tf
from conftest import make_strategy

import looplib
from looplib.data import pipelines, service
from looplib.errors import DataError, DatasetError, ParameterServerError, SettingError, ShardingError, WorkerError
from looplib.processes.group import hold_ports

BATCH = 8
X = np.arange(50, dtype="float32")
ENVIRONMENT = {**os.environ, "PYTHONPATH": paths.PYTHONPATH}


@contextlib.contextmanager
def data_workers(python, count):
    """Runs data workers; gives their addresses and processes."""
    with hold_ports(count) as ports:
        command = [python, "-m", "looplib", "data_worker", "--host=127.0.0.1"]
        processes = [subprocess.Popen([*command, f"--port={port}"], env=ENVIRONMENT) for port in ports]
        try:
            yield [f"127.0.0.1:{port}" for port in ports], processes
        finally:
            for process in processes:
                process.kill()
                process.wait()


@pytest.fixture(scope="module")
def addresses(python):
    """Two data workers."""
    with data_workers(python, 2) as (addresses, _):
        yield addresses


def stream(make, addresses, *, start_step=0, strategy="default", kind="per_replica", **settings):
    task = type("Data", (), {"dataset": lambda self, context: make(context), "batch_size_varies": False,
                             "batches": kind, "uneven_parts": False})()  # fmt: skip
    config = looplib.RunConfig(global_batch_size=BATCH, seed=3, data_service=",".join(addresses), **settings)
    return pipelines.Pipelines(make_strategy(strategy), task, config, training=True, start_step=start_step).distribute()


def read(stream, steps):
    """The batches of [step][replica] that a stream gives, each a list of lists; fewer if it ends."""
    iterator, taken = stream.iterate(), []
    while len(taken) < steps and stream.has_value(batch := stream.next_as_optional(iterator)):
        leaves = tf.nest.flatten(stream.get_value(batch))
        values = [stream.strategy.experimental_local_results(leaf) for leaf in leaves]
        to_list = lambda leaf: leaf.to_list() if isinstance(leaf, tf.RaggedTensor) else leaf.numpy().tolist()
        taken.append([[to_list(leaf) for leaf in replica] for replica in zip(*values)])
    stream.end(iterator)
    return taken


def by_number(context):
    def example(ids, seeds):
        ragged = tf.RaggedTensor.from_row_lengths(tf.repeat(ids, ids % 3), ids % 3)
        return {"id": ids, "x": tf.gather(X, ids), "noise": tf.random.stateless_uniform([2], seeds[0]), "rows": ragged}

    return context.indices(50, seeds=True).map(example, tf.data.AUTOTUNE)


def zipped(context):
    pairs = context.indices(50), context.indices(30).map(tf.square)
    return tf.data.Dataset.zip(pairs).prefetch(2)


def whole_epochs(context):
    return context.indices(50, whole_epochs=True)


def own(context):
    data = tf.data.Dataset.range(50).shard(context.num_pipelines, context.pipeline_index)
    data = data.shuffle(50, seed=context.seed).repeat()
    return data.batch(context.per_replica_batch_size, drop_remainder=True)


@pytest.mark.slow(pairs=True)
@pytest.mark.parametrize("strategy", ["default", "mirrored_x2"])
@pytest.mark.parametrize("make", [by_number, zipped, whole_epochs])
@pytest.mark.parametrize("count", [1, 2])
def test_examples_by_number_come_as_without_data_workers_from_any_step(make, count, strategy, addresses):
    kind = "global" if make is whole_epochs else "per_replica"
    plain = read(stream(make, [], strategy=strategy, kind=kind), 30)
    other = stream(make, addresses[:count], strategy=strategy, kind=kind)
    assert other.properties.infinite and other.positioned and not other.skipped
    assert read(other, 30) == plain
    resumed = stream(make, addresses[:count], start_step=17, strategy=strategy, kind=kind)
    assert read(resumed, 13) == plain[17:]
    if make is not zipped:
        ids = list(itertools.chain.from_iterable(replica[0] for step in plain for replica in step))
        assert [sorted(ids[i : i + 50]) for i in range(0, 200, 50)] == [list(range(50))] * 4


def test_a_pipeline_of_ones_own_keeps_its_order_on_one_data_worker_and_alternates_on_two(addresses):
    plain = read(stream(own, []), 30)
    assert read(stream(own, addresses[:1]), 30) == plain
    resumed = stream(own, addresses[:1], start_step=11)
    assert resumed.skipped == 11 and read(resumed, 19) == plain[11:]
    halves = [
        tf.data.Dataset.range(50).shard(2, part).shuffle(50, seed=3).repeat().batch(BATCH).as_numpy_iterator()
        for part in (0, 1)
    ]
    expected = [[[next(half).tolist()]] for _ in range(15) for half in halves]
    assert read(stream(own, addresses), 30) == expected
    assert read(stream(own, addresses, start_step=11), 19) == expected[11:]


def test_data_that_ends_gives_each_example_once_and_is_known_to_end(addresses):
    def ends(context):
        return tf.data.Dataset.range(40).shard(context.num_pipelines, context.pipeline_index).batch(BATCH)

    data = stream(ends, addresses)
    assert not data.properties.infinite and data.properties.sure == 5
    found = read(data, 100)
    assert len(found) == 6 and sorted(itertools.chain.from_iterable(step[0][0] for step in found)) == list(range(40))


def test_the_iterators_of_tf_distribute_read_from_data_workers_too(addresses):
    plain = read(stream(by_number, [], strategy="mirrored_x2"), 10)
    assert read(stream(by_number, addresses, strategy="mirrored_x2", distribute="tf"), 10) == plain


def test_what_a_data_worker_cannot_do_is_refused_before_the_first_step(addresses, tmp_path):
    with tf.io.TFRecordWriter(str(tmp_path / "a.tfrecord")) as writer:
        for i in range(20):
            writer.write(str(i))
    generated = tf.data.Dataset.from_generator(lambda: iter(range(9)), output_signature=tf.TensorSpec([], tf.int64))
    for make in (
        lambda context: context.records(str(tmp_path / "a.tfrecord")),
        lambda context: generated.repeat().batch(BATCH, drop_remainder=True),
        lambda context: context.indices(9).map(lambda i: tf.ensure_shape(tf.numpy_function(np.copy, [i], tf.int64), 8)),
    ):
        with pytest.raises(DatasetError, match=r"Data.dataset runs Python, .*; read by context.indices or files by tf"):
            stream(make, addresses[:1])
    with pytest.raises(DatasetError, match="context.resident, .* leave out --data_service"):
        stream(lambda context: context.resident(X), addresses[:1])
    same = lambda context: tf.data.Dataset.range(50).repeat().batch(BATCH, drop_remainder=True)
    with pytest.raises(
        ShardingError, match="gives each of 2 data workers the same data, because it does not use conte"
    ):
        stream(same, addresses)
    assert len(read(stream(same, addresses[:1]), 3)) == 3
    skips = lambda context: own(context).skip(context.start_step)
    with pytest.raises(ShardingError, match="the same data, at context.start_step"):
        stream(skips, addresses)
    with pytest.raises(ParameterServerError, match="with parameter servers, each worker reads its own batches"):
        config = looplib.RunConfig(global_batch_size=BATCH, data_service=addresses[0])
        task = stream(same, []).properties and type("Data", (), {"batches": "per_replica"})()
        pipelines.Pipelines(make_strategy("default"), task, config, training=True, remote=lambda **_: None)


@pytest.mark.parametrize("text", ["5050", "host:", "host:0", "host:70000", "a:1,,b:2", "http://a:1", "a b:1", 5050])
def test_an_address_of_another_form_is_refused_when_the_configuration_is_built(text):
    with pytest.raises(SettingError, match="data_service has .*; expected HOST:PORT of each data worker, with commas"):
        looplib.RunConfig(data_service=text)


def test_addresses_are_split_and_none_is_none():
    assert looplib.RunConfig(data_service="a.b:1,[::1]:65535").data_workers == ("a.b:1", "[::1]:65535")
    assert looplib.RunConfig(data_service="").data_workers == looplib.RunConfig().data_workers == ()


def test_an_address_where_no_data_worker_answers_is_a_sentence_in_time(monkeypatch):
    monkeypatch.setattr(service, "_JOIN", 0.5)
    monkeypatch.setattr(service, "_ANSWER", 0.3)
    with hold_ports(1) as ports:
        with pytest.raises(WorkerError, match=f"data worker at 127.0.0.1:{ports[0]} does not answer .*refused"):
            stream(by_number, [f"127.0.0.1:{ports[0]}"])
    with socket.create_server(("127.0.0.1", 0)) as silent:  # as a process that is frozen
        with pytest.raises(WorkerError, match="does not answer within 0 s|does not answer"):
            stream(by_number, [f"127.0.0.1:{silent.getsockname()[1]}"])
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer():
            with contextlib.suppress(OSError):
                while True:
                    other.accept()[0].sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(WorkerError, match="it is another server"):
            stream(by_number, [f"127.0.0.1:{other.getsockname()[1]}"])


_servers = []  # to the end: an iterator asks for a dispatcher that has ended again and again


def foreign(workers):
    """A service of tf.data in this process, as somebody may have one, with any number of workers."""
    of = tf.data.experimental.service
    dispatcher = of.DispatchServer(of.DispatcherConfig(protocol="grpc"))
    address = dispatcher.target.partition("://")[2]
    _servers.extend([dispatcher, *(of.WorkerServer(of.WorkerConfig(address, protocol="grpc")) for _ in range(workers))])
    return address


def test_a_service_that_would_give_each_example_twice_or_none_is_refused(monkeypatch):
    data = stream(by_number, [foreign(2)])
    iterator = data.iterate()
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        for _ in range(20_000):
            data.next(iterator)
    text = (
        r"DataError: the data service at localhost:\d+ gave batch \d+ where batch \d+ was due: it has several data work"
    )
    assert re.search(text, str(raised.value))
    monkeypatch.setattr(service, "_JOIN", 1.0)
    with pytest.raises(WorkerError, match="no data comes from the data worker at .*no data within 1 s"):
        stream(by_number, [foreign(0)])


def test_a_function_that_fails_on_a_data_worker_is_told_with_its_reason(addresses):
    class Trainer(looplib.Trainer):
        def dataset(self, context):
            def checked(ids):
                with tf.control_dependencies([tf.debugging.Assert(tf.reduce_sum(ids) < 250, ["a large sum"])]):
                    return tf.identity(ids)

            return context.indices(50).map(checked)

        def __init__(self):
            self.weight = tf.Variable(0.0)

        def step_fn(self, inputs):
            return {"loss": tf.cast(inputs, tf.float32) * self.weight}

    config = looplib.RunConfig(global_batch_size=BATCH, data_service=",".join(addresses))
    with looplib.Controller(config, trainer=Trainer()) as controller:
        with pytest.raises(
            DataError, match=r"the data worker 127.0.0.1:\d+ fails: .*a large sum.*; mend the data or the f"
        ):
            controller.train(200)


def test_random_numbers_without_seeds_of_their_own_are_warned_of_where_batches_are_made_again(addresses, caplog):
    noisy = lambda context: own(context).map(lambda ids: tf.cast(ids, tf.float32) + tf.random.uniform([8], seed=1))
    stream(noisy, addresses)
    assert "this is exact only if" not in caplog.text
    stream(noisy, addresses, start_step=3)
    assert "make again what Data.dataset has given before, to skip it; this is exact only if its random" in caplog.text


# Deaths.

PROGRAM = [str(paths.PROGRAMS / "served.py"), "--config.step_ops=3000", "--config.patience=2"]


class Launch:
    """A launch of the program with data workers, whose lines are read while it runs."""

    def __init__(self, folder, *options, python=sys.executable):
        command = [sys.executable, "-m", "looplib", "launch", *options, "--backoff=0.1", "--", python, *PROGRAM]
        self.process = subprocess.Popen(
            [*command, f"--model_dir={folder}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=ENVIRONMENT,
        )  # fmt: skip
        self.lines = []
        self._reader = threading.Thread(target=lambda: self.lines.extend(self.process.stdout), daemon=True)
        self._reader.start()

    def wait_for(self, text, seconds=60):
        """Waits for a line."""
        end = time.monotonic() + seconds
        while not any(text in line for line in list(self.lines)):
            assert time.monotonic() < end and self.process.poll() is None, "".join(self.lines)
            time.sleep(0.02)

    def end(self, seconds=90):
        """Returns the exit code, once the launch and all that it has started have ended."""
        try:
            code = self.process.wait(seconds)
            self._reader.join(20)
        finally:
            self.process.kill()
        end = time.monotonic() + 10
        while children := [pid for pid in self.children if is_alive(pid)]:
            assert time.monotonic() < end, children
            time.sleep(0.05)
        return code

    def data_workers(self):
        """The data workers that run now, in order."""
        found = {}
        for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                if int(path.read_text().rpartition(")")[2].split()[1]) == self.process.pid:
                    words = (path.parent / "cmdline").read_bytes().split(b"\0")
                    self.children.append(int(path.parent.name))
                    if b"data_worker" in words:
                        found[next(word for word in words if word.startswith(b"--port"))] = int(path.parent.name)
        return list(found.values())

    children: list = []


def is_alive(pid):
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def seen(folder):
    """The ids of each step, from the newest checkpoint."""
    newest = tf.train.latest_checkpoint(str(folder / "checkpoints"))
    names = [name for name, _ in tf.train.list_variables(newest)]
    return tf.train.load_variable(newest, next(name for name in names if name.startswith("seen/")))


def expected_ids():
    """The ids of a training without data workers."""
    context = looplib.InputContext(global_batch_size=8, num_replicas=1, pipeline_index=0, num_pipelines=1, seed=0,
                                   training=True, start_step=0)  # fmt: skip
    return np.stack(list(context.indices(50).take(served.STEPS).as_numpy_iterator()))


LOST = (
    r"no progress for \d+ s in the phase 'train' after \d+ steps; the data worker at 127.0.0.1:\d+ does not answer "
    r"\(.*\); start it again; .*resume from"
)


def test_a_run_whose_data_worker_dies_says_so_and_resumes_with_another_number_of_them(python, tmp_path):
    run = [python, *PROGRAM, f"--model_dir={tmp_path / 'run'}"]
    with data_workers(python, 2) as (addresses, processes):
        flag = [f"--data_service={','.join(addresses)}"]
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen([*run, *flag], **output, env=ENVIRONMENT) as process:
            timer = threading.Timer(60, process.kill)
            timer.start()
            for line in process.stdout:
                if "step      20" in line:
                    processes[1].kill()
            timer.cancel()
            assert re.search(LOST, line), line
        assert process.returncode == 76
        done = subprocess.run([*run, f"--data_service={addresses[0]}"], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0 and "restored step" in done.stdout, done.stderr
    np.testing.assert_array_equal(seen(tmp_path / "run"), expected_ids())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_launch_whose_data_worker_dies_restarts_all_and_has_seen_what_it_would_have_seen(number, tmp_path):
    launch = Launch(tmp_path / "run", "--data_workers=2", "--restarts=1")
    launch.wait_for("step      20")
    os.kill(launch.data_workers()[1], number)
    text = f"{launch.end()}" + "".join(launch.lines)
    assert text.startswith("0") and re.search(LOST, text) and "restored step" in text, text
    np.testing.assert_array_equal(seen(tmp_path / "run"), expected_ids())


@pytest.mark.slow
def test_a_launch_that_is_killed_leaves_no_data_worker(tmp_path):
    launch = Launch(tmp_path / "run", "--data_workers=1")
    launch.wait_for("step      10")
    assert len(launch.data_workers()) == 1
    launch.process.kill()
    launch.end()


@pytest.mark.slow
def test_two_workers_on_two_data_workers_see_what_one_sees_without(tmp_path):
    launch = Launch(tmp_path / "run", "--workers=2", "--data_workers=2")
    assert launch.end() == 0, "".join(launch.lines)
    context = {"global_batch_size": 8, "num_replicas": 2, "num_pipelines": 2, "seed": 0, "training": True}
    own = looplib.InputContext(**context, pipeline_index=0, start_step=0).indices(50).take(served.STEPS)
    np.testing.assert_array_equal(seen(tmp_path / "run"), np.stack(list(own.as_numpy_iterator())))  # of the chief


def test_a_data_worker_is_named_as_what_to_add_and_ends_the_run_where_it_is_restarted(python, tmp_path):
    class Trainer(looplib.Trainer):
        def __init__(self):
            self.weight = tf.Variable(0.0)

        def dataset(self, context):
            return context.indices(50)

        def step_fn(self, inputs):
            return {"loss": tf.cast(inputs, tf.float32) * self.weight}

    with data_workers(python, 1) as (addresses, processes):
        config = looplib.RunConfig(global_batch_size=BATCH, data_service=addresses[0], steps_per_loop=1)
        with looplib.Controller(config, trainer=Trainer()) as controller:
            controller.train(3)
            what, advice = controller.clock.of_input()
            assert what == "data workers make the batches" and "start more of them" in advice
            processes[0].kill()
            processes[0].wait()
            port = addresses[0].rpartition(":")[2]
            command = [python, "-m", "looplib", "data_worker", "--host=127.0.0.1", f"--port={port}"]
            processes[0] = subprocess.Popen(command, env=ENVIRONMENT)
            with pytest.raises(
                DataError, match="a data worker was restarted and has lost its place in the data; resume"
            ):
                controller.train(1000)

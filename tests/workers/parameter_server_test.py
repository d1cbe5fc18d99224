"""Parameter servers, with real processes on this machine: a coordinator, two workers and one parameter server."""

import contextlib
import json
import re
import signal
import time

import asynchronous
import numpy as np
import pytest
import tensorflow as tf
from ordered import NOTHING

import looplib
from looplib import UsageError
from looplib.cluster import parameter_servers, runtime
from looplib.errors import ParameterServerError
from looplib.processes.group import hold_ports

TASKS = [("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0)]
TIMEOUT = 180


class Cluster:
    """The processes of one start of `asynchronous`. Use it in a `with` block, which ends those that it started."""

    def __init__(self, nursery, arguments, folder):
        self.nursery, self.arguments, self.folder = nursery, arguments, folder
        self.processes = {}  # task -> `lives.Life`, of its newest start

    def start(self, task):
        job, index = task
        config = json.dumps({"cluster": self.jobs, "task": {"type": job, "index": index}})
        self.processes[task] = self.nursery.life_of(
            "asynchronous", *self.arguments, log=str(self.folder / f"{job}{index}.log"),
            environment={"TF_CONFIG": config, "CUDA_VISIBLE_DEVICES": "-1", **NOTHING},
        )  # fmt: skip
        self._held.callback(self.processes[task].end)

    def log(self, job, index=0):
        return (self.folder / f"{job}{index}.log").read_text()

    def wait_for(self, condition, what):
        """Waits until a function without arguments returns something true."""
        until = time.monotonic() + TIMEOUT
        while not (found := condition()):
            assert not self.processes["chief", 0].ended(), self.log("chief")[-3000:]
            assert time.monotonic() < until, f"no {what}: {self.log('chief')[-3000:]}"
            time.sleep(0.1)
        return found

    def codes(self):
        """Waits for all that still run; returns dict from task to exit code, of those that this object started last."""
        return {task: process.code(TIMEOUT) for task, process in self.processes.items()}

    def __enter__(self):
        with contextlib.ExitStack() as self._held:
            self.jobs = {}
            for (job, _), port in zip(TASKS, self._held.enter_context(hold_ports(len(TASKS)))):
                self.jobs.setdefault(job, []).append(f"127.0.0.1:{port}")
            for task in TASKS:
                self.start(task)
            self._held = self._held.pop_all()
        return self

    def __exit__(self, *_):
        self._held.close()


def arguments(folder, *flags):
    return [f"--model_dir={folder}", "--strategy=parameter_server", "--keep_last=1000", *flags]


def records(folder, split):
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [record for record in found if record["split"] == split]


def reached(folder):
    return max((record["step"] for record in records(folder, "train")), default=0)


def check_evaluations(folder, until):
    """Every evaluation up to a step is that of numpy with the weights of its step's checkpoint."""
    found, found_by_keras = (
        [record for record in records(folder, split) if record["step"] <= until] for split in ("eval", "by_keras")
    )
    assert found
    for record, by_keras in zip(found, found_by_keras, strict=True):
        reader = tf.train.load_checkpoint(str(folder / "checkpoints" / f"ckpt-{record['step']}"))
        shapes = reader.get_variable_to_shape_map()
        names = [name for name in shapes if name.startswith("model/") or "_trainable_variables/" in name]
        kernel = next(reader.get_tensor(name) for name in names if shapes[name] == [5, 3])
        bias = next(reader.get_tensor(name) for name in names if shapes[name] == [3])
        loss, accuracy = asynchronous.numpy_evaluation(kernel, bias)
        assert record["examples"] == by_keras["examples"] == asynchronous.TEST_EXAMPLES == 37
        assert record["last_size"] == 37 % 8  # of the last batch, whichever worker had it
        np.testing.assert_allclose(record["loss"], loss, rtol=1e-5)
        assert record["accuracy"] == pytest.approx(accuracy, abs=1e-12)
        assert by_keras["accuracy"] == pytest.approx(accuracy, abs=1e-6)
    return found


def check_windows(folder, interval=10):
    """Every report is of exactly its steps, in the order of their numbers."""
    for record in records(folder, "train"):
        assert record["steps"] == interval and record["number"] == record["step"] - 1


def ids_by_number(output):
    lines = re.findall(r"^ids (\d+) (.*)$", output, re.MULTILINE)
    return {int(number): [int(count) for count in counts.split()] for number, counts in lines}


@pytest.mark.parametrize("data", [pytest.param("indices", marks=pytest.mark.slow), "records"])
def test_workers_die_and_come_back_and_a_coordinator_resumes_with_every_batch_counted_once(
    nursery, tmp_path, capsys, data
):
    run = tmp_path / "run"
    flags = ["--eval_interval=100", "--checkpoint_interval=50", "--config.step_seconds=0.01", f"--config.data={data}"]
    config = asynchronous.Config(data=data)
    if data == "records":
        config.files, config.block = asynchronous.write_records(tmp_path, bad=60), 4
        flags += [f"--config.files={config.files}", f"--config.block={config.block}", "--bad_records=skip:1"]
    with Cluster(nursery, arguments(run, *flags, "--train_steps=1000000"), tmp_path) as cluster:
        cluster.wait_for(lambda: reached(run) >= 50, "50 steps")
        cluster.processes["worker", 1].kill()
        cluster.wait_for(lambda: "task:1 is gone" in cluster.log("chief"), "note that the worker is gone")
        alone = reached(run)
        cluster.wait_for(lambda: reached(run) >= alone + 50, "training by the other worker")
        cluster.start(("worker", 1))
        cluster.wait_for(lambda: "task:1 is back" in cluster.log("chief"), "note that the worker is back")
        again = reached(run)
        cluster.wait_for(lambda: reached(run) >= again + 50, "training by both")
        killed = data == "records"
        cluster.processes["chief", 0].kill(signal.SIGKILL if killed else signal.SIGTERM)
        codes = cluster.codes()
        assert set(codes.values()) == ({-signal.SIGKILL, 1} if killed else {75}), cluster.log("chief")[-3000:]
        first = cluster.log("chief")
    assert len(re.findall("task:1 is (gone|back)", first)) == 2 and "Traceback" not in first
    stopped = reached(run) if killed else int(re.search(r"ended by SIGTERM at step (\d+), saved", first)[1])
    target = stopped - stopped % 10 + 100
    with Cluster(nursery, arguments(run, *flags, f"--train_steps={target}"), tmp_path) as cluster:
        assert set(cluster.codes().values()) == {0}, cluster.log("chief")[-3000:]
        both = cluster.log("chief")
    restored = int(re.search(r"restored step (\d+)", both)[1])
    # A save starts after the report of its step, and after the save before it is committed.
    assert restored in range(stopped - 100, stopped + 1) if killed else restored == stopped
    assert f"done at step {target}" in both
    report = json.loads((run / "run.json").read_text())
    assert report["status"] == "done" and report["step"] == target and "workers: 2" in report["strategy"]
    check_windows(run)
    losses = [record["loss"] for record in records(run, "train")]
    assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:5])
    assert len(check_evaluations(run, target)) >= 2

    # Which examples each report is of is what one process trains on, that was never stopped.
    expected = ids_of_one_process(capsys, target, config)
    assert ids_by_number(both) == expected and len(expected) == target // 10
    if data == "records":
        assert [path.name.partition("-")[0] for path in (run / "bad_records").iterdir()] == ["1_tfrecord"]


def ids_of_one_process(capsys, steps, config=None):
    capsys.readouterr()
    trainer = asynchronous.Regression(config or asynchronous.Config())
    settings = looplib.RunConfig(global_batch_size=8, steps_per_loop=10, bad_records=1)
    looplib.Controller(settings, trainer=trainer, writers=[]).train(steps)
    return ids_by_number(capsys.readouterr().out)


@pytest.mark.slow
def test_a_pipeline_is_shared_out_and_a_lost_parameter_server_ends_the_run_with_a_sentence(nursery, tmp_path):
    run, steps = tmp_path / "run", 200
    flags = ["--config.keras=tf_keras", "--config.data=pipeline", "--eval_interval=100"]
    flags += ["--train_steps=1000000", "--checkpoint_interval=10"]  # so that a save is likely to meet the loss
    with Cluster(nursery, arguments(run, *flags), tmp_path) as cluster:
        cluster.wait_for(lambda: reached(run) > steps, "200 steps and their evaluations")
        cluster.processes["ps", 0].kill()
        codes = cluster.codes()
        log = cluster.log("chief")
    check_windows(run)
    assert len(check_evaluations(run, steps)) == 2
    last = next(record for record in records(run, "train") if record["step"] == steps)
    assert last["loss"] < 0.4 and last["iterations"] == steps  # none was lost, as no worker was
    counts = np.sum([counts for number, counts in ids_by_number(log).items() if number < steps], axis=0)
    assert counts.sum() == steps * 8
    for half in (counts[::2], counts[1::2]):  # each worker has its own, and goes through it evenly
        assert half.max() - half.min() <= 0.25 * half.mean()
    assert {task: code for task, code in codes.items() if task[0] != "ps"} == {
        ("chief", 0): 1, ("worker", 0): 1, ("worker", 1): 1
    }, log[-3000:]  # fmt: skip
    assert re.match(
        "looplib: error: .*parameter server was lost.* restart all processes to resume", log.splitlines()[-1]
    )


@pytest.mark.slow
def test_what_asynchrony_cannot_keep_is_refused_and_what_it_can_is_done(nursery, tmp_path, capsys):
    with Cluster(nursery, ["tries"], tmp_path) as cluster:
        assert set(cluster.codes().values()) == {0}, cluster.log("chief")[-3000:]
        log = cluster.log("chief")
    said = dict(re.findall(r"^(\w+): (.*)$", log, re.MULTILINE))
    for name, words in {
        "xla": "loop is xla.*use loop=graph",
        "eager": "loop is eager.*use loop=graph",
        "skip": "policy skip.*use halt, rollback",
        "ends": "must not end: repeat",
        "filtered": "makes more or fewer batches than context.indices",
        "shuffled": "batches that depend on others .for example with filter, take or shuffle",
        "untraceable": "cannot be made on a worker.*without .numpy",
        "keras_metric": "Keras metric objects.*looplib.mean",
        "accumulate": "SGD has gradient_accumulation_steps.*gradients are lost; use a larger batch",
        "scope": "not on a parameter server; build.*strategy.scope",
        "halt": "at step 13, the gradient of .* not finite",
        "rollback": "at step 20, 1 rollbacks",
        "clipped_keras": "at step 20, 0 rollbacks, 20 iterations",  # with dropout
        "clipped_tf_keras": "at step 20, 0 rollbacks, 20 iterations",
        "resident": "at step 20, 0 rollbacks, 20 iterations, 1 trace$",  # of calls of several sizes
        "damaged": "^record 26 of .*1.tfrecord, at byte 1352, is damaged: its checksum",
        "elsewhere": "^the worker on .*0.tfrecord' matches no file.*all workers must read the same files",
        "left_out": "at step 20, 0 rollbacks, 20 iterations",
    }.items():
        assert re.search(words, said[name]), (name, said[name])
    for keras in ("keras", "tf_keras"):  # a rate of 0.2 and a global norm of 0.01, by each worker for itself
        np.testing.assert_allclose(np.float64(said[f"changes_{keras}"].split()), [0.002] * 5, rtol=1e-3)
    after = log.split("\nrollback\n")[1].split("\nrollback: ")[0]
    assert list(ids_by_number(after)) == [9, 19]  # steps are numbered as they count, whatever data was left out
    expected = ids_of_one_process(capsys, 20)
    for name in ("resident", "leftovers", "python", "own_source"):
        assert ids_by_number(re.split(rf"\n{name}: ", log.split(f"\n{name}\n")[1])[0]) == expected, name


CLUSTER = {"chief": ["localhost:1"], "worker": ["localhost:2"], "ps": ["localhost:3"]}


@pytest.mark.slow(spread=4)
@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, "the environment defines no cluster; expected TF_CONFIG with a chief, workers and ps"),
        ("{", "TF_CONFIG is not JSON"),  # as cluster.resolve has it
        (
            {"cluster": {"worker": ["localhost:2"]}, "task": {"type": "worker", "index": 0}},
            "strategy is parameter_server, but TF_CONFIG lists no parameter servers",
        ),
        ({"cluster": CLUSTER, "task": {"type": "evaluator", "index": 0}}, "an evaluator, which .* --mode=continuous_eval"),
        ({"cluster": CLUSTER, "task": {"type": "worker", "index": 1}}, "as worker 1, but lists only 1"),
    ],
)  # fmt: skip
def test_a_cluster_that_is_none_is_refused(monkeypatch, config, words):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    if config is not None:
        monkeypatch.setenv("TF_CONFIG", config if isinstance(config, str) else json.dumps(config))
    with pytest.raises(UsageError, match=words):
        parameter_servers.connect()


def test_settings_that_need_one_order_or_one_process_are_refused():
    with pytest.raises(ParameterServerError, match="--deterministic"):
        runtime.setup("parameter_server", deterministic=True)
    with pytest.raises(ParameterServerError):
        runtime.setup("parameter_server", num_virtual_devices=2)

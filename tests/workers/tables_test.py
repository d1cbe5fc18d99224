"""Tables of several processes: who holds and who writes the parts, and a resume on another number of them."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

from looplib.run import commits

PROGRAM = pathlib.Path(__file__).parents[1] / "programs" / "tables.py"


def run(folder, steps, servers=0, workers=0, replicas=0, *more, shards=4):
    """Trains up to a step; returns the device of each part, by name, or with workers the number of rows of each."""
    kinds = {"parameter_server": servers, "multi_worker": workers, "mirrored": replicas, "one_device": 1}
    strategy = next(kind for kind, number in kinds.items() if number)
    flags = [f"--model_dir={folder}", f"--train_steps={steps}", f"--num_virtual_devices={replicas or 1}", *more]
    command = [sys.executable, PROGRAM, *flags, f"--strategy={strategy}"]
    if servers or workers:
        numbers = [f"--workers={workers or 2}", f"--parameter_servers={servers}"]
        command = [sys.executable, "-m", "looplib", "launch", *numbers, "--", *command]
    environment = {**os.environ, "SHARDS": str(shards)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    assert "outside of its model" not in done.stderr + done.stdout
    if workers:
        return re.findall(r"worker (\d).*held by \S+/rows_(\d) .* (\d+) rows", done.stdout)
    return dict(re.findall(r"held by \S+/(rows_\d) (\S+)", done.stdout))


def parts(folder, step, shards=4):
    reader = tf.train.load_checkpoint(str(folder / "checkpoints" / f"ckpt-{step}"))
    found = {re.search(r"rows_(\d)/.ATTRIBUTES", key): key for key in reader.get_variable_to_shape_map()}
    keys = {match[1]: key for match, key in found.items() if match}
    return np.concatenate([reader.get_tensor(keys[str(n)]) for n in range(shards)])


def test_servers_hold_and_write_their_parts_and_a_run_resumes_on_another_number_of_them(tmp_path):
    held = run(tmp_path, 20, 2)
    assert [re.search(r"ps/replica:0/task:(\d)", held[f"rows_{n}"])[1] for n in range(4)] == ["0", "1", "0", "1"]
    at_20 = parts(tmp_path, 20)
    files = [path.stat().st_size for path in (tmp_path / "checkpoints").glob("ckpt-20.data-*")]
    share = at_20.nbytes // 2 * 2  # of one of two servers, with Adagrad's slot
    assert len(files) == 3 and sum(share <= size < share + 5000 for size in files) == 2  # the third has the rest
    held = run(tmp_path, 40, 1)
    assert len(set(held.values())) == 1
    at_40 = parts(tmp_path, 40)
    assert np.abs(at_40 - at_20)[:500].max() > 0.01  # rows of the batches
    np.testing.assert_array_equal(at_40[500:], at_20[500:])  # and no others, in two runs
    run(tmp_path, 41, 0)  # and on one device
    np.testing.assert_array_equal(parts(tmp_path, 41)[500:], at_20[500:])
    run(tmp_path / "other", 1, 2, 0, 0, f"--warm_start={tmp_path}", shards=3)  # and a new run in other parts
    np.testing.assert_array_equal(parts(tmp_path / "other", 1, shards=3)[500:], at_20[500:])


def test_workers_hold_and_write_their_parts_and_come_to_the_table_of_one_device(tmp_path):
    run(tmp_path / "many", 20, replicas=2)
    held = run(tmp_path / "many", 40, workers=2)
    assert sorted(held) == [(str(w), str(n), "250" if n % 2 == w else "0") for w in range(2) for n in range(4)]
    files = [path.stat().st_size for path in (tmp_path / "many" / "checkpoints").glob("ckpt-40.data-*")]
    share = parts(tmp_path / "many", 40).nbytes // 2 * 2  # of one of two workers, with Adagrad's slot
    assert len(files) == 2 and min(files) == share
    run(tmp_path / "one", 40)
    one, many = (parts(tmp_path / name, 40) for name in ("one", "many"))
    np.testing.assert_allclose(many, one, rtol=1e-5, atol=1e-7)
    assert np.abs(one - parts(tmp_path / "many", 20))[:500].max() > 0.01


@pytest.mark.slow
def test_workers_that_are_killed_at_random_leave_every_bit_of_the_table(nursery, tmp_path):
    steps = ["--train_steps=120", "--checkpoint_interval=1", "--strategy=multi_worker"]
    tool = [
        "looplib",
        "launch",
        "--workers=2",
        "--restarts=9",
        "--backoff=0.5",
        "--",
        nursery.python,
        str(PROGRAM),
        *steps,
    ]
    whole = nursery.life_of(*tool, f"--model_dir={tmp_path / 'whole'}")
    assert whole.code(240) == 0, whole.output()
    run, random = nursery.life_of(*tool, f"--model_dir={tmp_path / 'killed'}"), np.random.default_rng(5)
    children = pathlib.Path(f"/proc/{run.pid}/task/{run.pid}/children")
    for target in (5, 30, 60):
        while (done := commits.newest(str(tmp_path / "killed" / "checkpoints"))) is None or done.step < target:
            assert not run.ended(), run.output()
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.3))  # a save takes a good part of that
        os.kill(int(random.choice(children.read_text().split())), signal.SIGKILL)
    assert run.code(240) == 0, run.output()
    np.testing.assert_array_equal(parts(tmp_path / "killed", 120), parts(tmp_path / "whole", 120))
    assert not list((tmp_path / "killed" / "checkpoints").glob("*.of-*"))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "shards"), [("keras", 1), ("tf_keras", 3)])
def test_two_workers_train_a_plain_step_of_each_family_as_one_device_does(family, shards, tmp_path):
    more = [f"--config.family={family}", "--config.plain=True"]
    run(tmp_path / "many", 10, 0, 2, 0, *more, shards=shards)  # of which one has no part, or fewer
    run(tmp_path / "many", 20, 0, 2, 0, *more, shards=shards)
    run(tmp_path / "one", 20, 0, 0, 0, *more, shards=shards)
    one, many = (parts(tmp_path / name, 20, shards) for name in ("one", "many"))
    np.testing.assert_allclose(many, one, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_workers_start_from_the_rows_of_a_table_in_other_parts(tmp_path):
    run(tmp_path / "first", 20)
    run(tmp_path / "other", 1, 0, 2, 0, f"--warm_start={tmp_path / 'first'}", shards=3)
    first, other = parts(tmp_path / "first", 20), parts(tmp_path / "other", 1, shards=3)
    np.testing.assert_array_equal(other[500:], first[500:])
    assert (other[:500] == first[:500]).mean() > 0.1  # those that the step has not looked up


@pytest.mark.slow
def test_an_export_by_workers_is_refused_and_one_process_writes_it(tmp_path):
    run(tmp_path, 20, workers=2)
    with pytest.raises(AssertionError, match="each worker has its parts of the ShardedEmbedding alone"):
        run(tmp_path, 20, 0, 2, 0, "--mode=export")
    run(tmp_path, 20, 0, 0, 0, "--mode=export")
    serve = tf.saved_model.load(str(tmp_path / "export" / "step-20" / "saved_model")).signatures["serving_default"]
    ids = np.arange(1000).reshape(125, 8)
    (found,) = serve(tf.constant(ids)).values()
    np.testing.assert_allclose(found, parts(tmp_path, 20)[ids].mean(axis=1), rtol=1e-5, atol=1e-7)

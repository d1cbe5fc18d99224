"""Tables of several processes: who holds and who writes the parts, and a resume on another number of them."""

import pathlib
import re
import subprocess
import sys

import numpy as np
import tensorflow as tf

PROGRAM = pathlib.Path(__file__).parents[1] / "programs" / "tables.py"


def run(folder, steps, servers=0, workers=0, replicas=0):
    """Trains up to a step; returns the device of each part, by name, or with workers the number of rows of each."""
    kinds = {"parameter_server": servers, "multi_worker": workers, "mirrored": replicas, "one_device": 1}
    strategy = next(kind for kind, number in kinds.items() if number)
    flags = [f"--model_dir={folder}", f"--train_steps={steps}", f"--num_virtual_devices={replicas or 1}"]
    command = [sys.executable, PROGRAM, *flags, f"--strategy={strategy}"]
    if servers or workers:
        numbers = [f"--workers={workers or 2}", f"--parameter_servers={servers}"]
        command = [sys.executable, "-m", "looplib", "launch", *numbers, "--", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    assert "outside of its model" not in done.stderr + done.stdout
    if workers:
        return re.findall(r"worker (\d).*held by \S+/rows_(\d) .* (\d+) rows", done.stdout)
    return dict(re.findall(r"held by \S+/(rows_\d) (\S+)", done.stdout))


def parts(folder, step):
    reader = tf.train.load_checkpoint(str(folder / "checkpoints" / f"ckpt-{step}"))
    return np.concatenate([reader.get_tensor(f"table/rows_{n}/.ATTRIBUTES/VARIABLE_VALUE") for n in range(4)])


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


def test_workers_hold_and_write_their_parts_and_come_to_the_table_of_one_device(tmp_path):
    held = run(tmp_path / "many", 20, workers=2)
    assert sorted(held) == [(str(w), str(n), "250" if n % 2 == w else "0") for w in range(2) for n in range(4)]
    files = [path.stat().st_size for path in (tmp_path / "many" / "checkpoints").glob("ckpt-20.data-*")]
    share = parts(tmp_path / "many", 20).nbytes // 2 * 2  # of one of two workers, with Adagrad's slot
    assert len(files) == 2 and min(files) == share
    assert not list((tmp_path / "many" / "checkpoints").glob("*.of-*"))
    run(tmp_path / "many", 40, replicas=2)
    run(tmp_path / "many", 60, workers=2)
    run(tmp_path / "one", 60)
    one, many = (parts(tmp_path / name, 60) for name in ("one", "many"))
    np.testing.assert_allclose(many, one, rtol=1e-5, atol=1e-7)
    assert np.abs(one - parts(tmp_path / "many", 20))[:500].max() > 0.01

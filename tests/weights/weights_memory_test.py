"""A warm start needs at most two and a quarter of a tensor more than the model, and no read copies a weight after it."""

import os
import subprocess
import sys
import textwrap

import pytest
from paths import PYTHONPATH

# Prints the bytes of the largest tensor, and by how much the process grows above what it has at the end; then by how much
# as it reads a weight.
PROGRAM = """
    import gc, sys
    import keras, numpy as np, tensorflow as tf
    import looplib
    from written import write_safetensors

    how, replicas, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{n}" for n in range(replicas)])

    def number(field):
        lines = open("/proc/self/status").read().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

    def build():
        layers = [keras.layers.Dense(4096, name=name, use_bias=False) for name in "abcd"]
        return keras.Sequential([keras.Input((4096,)), *layers])

    source = build()
    if how == "h5":
        source.save_weights(path := f"{path}/w.weights.h5")
    elif how == "keras":
        source.save(path := f"{path}/w.keras")
    elif how == "checkpoint":
        path = tf.train.Checkpoint(model=source).save(f"{path}/ckpt")
    else:
        kind = np.float16 if how == "half" else np.float32
        values = {v.path: v.numpy().astype(kind) for v in source.variables}
        if how == "transposed":
            values = {name: value.T for name, value in values.items()}
        path = write_safetensors(f"{path}/w.safetensors", values)
        del values
    del source
    with strategy.scope():
        model = build()
    rules = {"kernel$": looplib.WeightRule("kernel", (1, 0))} if how == "transposed" else {}
    start = looplib.WarmStart(path, rules)
    looplib.warm_start({"model": model}, start)  # each variable now has memory of its own

    def growth(work):
        gc.collect()
        open("/proc/self/clear_refs", "w").write("5")  # forgets the peak until now
        before = number("VmRSS")
        found = work()
        return number("VmHWM") - before

    def read():
        return [part.read_value() for part in strategy.experimental_local_results(model.trainable_variables[0].value)]

    print(4096 * 4096 * 4, growth(lambda: looplib.warm_start({"model": model}, start)), growth(read))
"""


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("how", ["checkpoint", "half", "keras", "h5", "transposed", "safetensors"])
def test_a_warm_start_needs_two_tensors_more_than_the_model_and_no_read_copies_one(how, replicas, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    command = [sys.executable, str(program), how, str(replicas), str(tmp_path)]
    variables = {**os.environ, "PYTHONPATH": PYTHONPATH}
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, env=variables)
    assert found.returncode == 0, found.stderr
    tensor, taking, reading = map(int, found.stdout.split())
    assert taking < tensor * (2.25 if how == "half" else 2) + (16 << 20), taking / tensor
    assert reading < tensor / 4, reading / tensor

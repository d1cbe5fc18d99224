"""Records of files in an object store beside the same files on the disk: `python -m benchmarks.bucket_records`.

JPEGs of about 100 kB are read in random order, decoded and resized. The store is moto's server behind a proxy that adds
20 ms to each request. The server and the proxy have one core, and the program that reads has another one, for local
files too: a store does not take its time from the machine that trains. Two epochs are read in each turn, the first one
with an empty cache. The kinds take turns, each turn in a new process, and medians count.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

from absl import app, flags

ROOT = pathlib.Path(__file__).absolute().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "helpers"), str(ROOT / "tests" / "programs")]

_ROUNDS = flags.DEFINE_integer("rounds", 3, "Turns of each kind.")
_DELAY = flags.DEFINE_float("delay", 0.02, "Seconds of latency of each request.")
_IMAGES, _SHARDS, _SIDE = 800, 8, 256

_PROGRAM = """
import json, os, sys, time
os.sched_setaffinity(0, {0})
import tensorflow as tf
import looplib

count, batch = int(sys.argv[2]), 40
context = looplib.InputContext(
    global_batch_size=batch, num_replicas=1, pipeline_index=0, num_pipelines=1, seed=1, training=True,
    start_step=0)

def decode(records):
    one = lambda record: tf.image.resize(tf.io.decode_jpeg(record, channels=3), [224, 224])
    return tf.map_fn(one, records, fn_output_signature=tf.TensorSpec([224, 224, 3], tf.float32))

begun = time.perf_counter()
batches = iter(context.records(sys.argv[1]).map(decode, num_parallel_calls=2).prefetch(2))
next(batches)
times = [time.perf_counter()]
for epoch in range(2):
    for _ in range(count // batch):
        next(batches)
    times.append(time.perf_counter())
print(json.dumps({"first": times[0] - begun, "rates": [count / (b - a) for a, b in zip(times, times[1:])]}))
"""


def make(folder):
    """Writes the shards."""
    import numpy as np
    import tensorflow as tf

    random = np.random.default_rng(0)
    for shard in range(_SHARDS):
        with tf.io.TFRecordWriter(f"{folder}/images.tfrecord-{shard}") as writer:
            for _ in range(_IMAGES // _SHARDS):
                coarse = random.integers(0, 256, (_SIDE // 2, _SIDE // 2, 3), dtype=np.uint8)
                image = np.repeat(np.repeat(coarse, 2, axis=0), 2, axis=1)
                writer.write(tf.io.encode_jpeg(image, quality=95).numpy())


def measure(place, environment):
    """Reads two epochs in a new process; returns what it has told."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, place, str(_IMAGES)], check=True, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def main(argv):
    """Measures, and prints a table."""
    del argv
    from clouds import BUCKET, Cloud
    from proxy import Proxy
    from servers import S3

    with tempfile.TemporaryDirectory() as folder:
        make(folder)
        size = sum(path.stat().st_size for path in pathlib.Path(folder).iterdir())
        print(f"{_IMAGES} JPEGs, {size / _IMAGES / 1000:.0f} kB each")
        os.sched_setaffinity(0, {1})  # this process, which is the proxy, and the server
        with S3() as server, Proxy("127.0.0.1", server.port) as proxy:
            server.make_bucket(BUCKET)
            for path in pathlib.Path(folder).iterdir():
                server.write(BUCKET, f"data/{path.name}", path.read_bytes())
            proxy.faults.delay = _DELAY.value
            cloud = Cloud(server, proxy, None, pathlib.Path(folder), "bench")
            found = {"local": [], "store": []}
            for number in range(_ROUNDS.value):
                for kind, told in found.items():
                    place = (
                        f"{folder}/images.tfrecord-*" if kind == "local" else f"s3://{BUCKET}/data/images.tfrecord-*"
                    )
                    told.append(measure(place, cloud.environment(machine=f"{kind}{number}", PYTHONPATH=str(ROOT))))
                    print(kind, told[-1], flush=True)
    print(f"\n{'':8}{'first batch s':>16}{'epoch 1, a second':>20}{'epoch 2, a second':>20}   (medians)")
    rates = {}
    for kind, told in found.items():
        first = statistics.median(one["first"] for one in told)
        rates[kind] = [statistics.median(one["rates"][epoch] for one in told) for epoch in range(2)]
        print(f"{kind:8}{first:16.2f}{rates[kind][0]:20.0f}{rates[kind][1]:20.0f}")
    print(f"{'ratio':24}" + "".join(f"{store / local:20.2f}" for store, local in zip(rates["store"], rates["local"])))


if __name__ == "__main__":
    app.run(main)

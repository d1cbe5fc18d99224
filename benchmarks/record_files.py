"""Reading records of files: `context.records` beside tf.data's pipeline and grain's loader.

    python -m benchmarks.record_files make --folder=/tmp/record_files
    python -m benchmarks.record_files index
    python -m benchmarks.record_files resume
    python -m benchmarks.record_files speed --kind=small --cold=false

`make` writes a million records of 1 kB in 64 TFRecord files and in 64 ArrayRecord files, and JPEGs of about 100 kB. The
other commands print one JSON object a line.
"""

import gc
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported

import numpy as np
import tensorflow as tf
from absl import app, flags

import looplib

_FOLDER = flags.DEFINE_string("folder", "/tmp/record_files", "Where the files are.")
_KIND = flags.DEFINE_enum("kind", "small", ["small", "images"], "Records of 1 kB, or JPEGs of 100 kB.")
_PEER = flags.DEFINE_enum("peer", "tf.data", ["tf.data", "batched", "grain"], "What is measured beside looplib.")
_COLD = flags.DEFINE_boolean("cold", False, "Drops the page cache before each round; needs root.")
_BLOCK = flags.DEFINE_integer("block", None, "Neighbouring records that are read at once; none: the default.")
_BATCH = flags.DEFINE_integer("batch", 128, "Examples of a batch.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Rounds of each.")
_SECONDS = flags.DEFINE_float("seconds", 3.0, "Seconds of a round.")
_THREADS = flags.DEFINE_integer("threads", 4, "Threads of grain's loader; with 4 it is fastest on two cores.")
_WORKER = flags.DEFINE_list("worker", None, "WORKER,WORKERS,BLOCK of a process of `resume`.")
_FILES, _RECORDS, _IMAGES, _STEP, _STEPS = 64, 1_000_000, 2000, 10_000, 7812
_WARM = {"small": 64, "images": 8}  # batches before a turn is timed, so that what is read ahead is there already


def context(batch, worker=0, workers=1, start=0):
    """Returns the context of one of `workers` with a replica each."""
    return looplib.InputContext(
        global_batch_size=batch, num_replicas=workers, pipeline_index=worker, num_pipelines=workers, seed=1,
        training=True, start_step=start,
    )  # fmt: skip


def make(folder):
    """Writes the files."""
    from array_record.python import array_record_module

    folder.mkdir(parents=True, exist_ok=True)
    noise, number = np.random.default_rng(0).bytes(2_000_000), 0
    for file in range(_FILES):
        of_all = f"{file:05d}-of-{_FILES:05d}"
        array = array_record_module.ArrayRecordWriter(str(folder / f"small.array_record-{of_all}"), "group_size:1")
        with tf.io.TFRecordWriter(str(folder / f"small.tfrecord-{of_all}")) as writer:
            for _ in range(_RECORDS // _FILES):
                at = number * 7919 % 1_900_000
                record = number.to_bytes(8, "little") + noise[at : at + 1016]
                writer.write(record)
                array.write(record)
                number += 1
        array.close()
    pixels = np.random.default_rng(0).integers(0, 256, [40, 27, 27, 3], np.uint8)
    images = [tf.image.resize(image, [400, 400], "bicubic") + 12 * np.random.randn(400, 400, 3) for image in pixels]
    jpegs = [
        tf.io.encode_jpeg(tf.cast(tf.clip_by_value(image, 0, 255), tf.uint8), quality=96).numpy() for image in images
    ]
    for file in range(16):
        with tf.io.TFRecordWriter(str(folder / f"images.tfrecord-{file:05d}-of-00016")) as writer:
            for image in range(_IMAGES // 16):
                writer.write(jpegs[image % len(jpegs)])
    print(json.dumps({"small": number, "bytes of a JPEG": float(np.mean(list(map(len, jpegs))))}))


def drop_cache():
    """Drops the page cache."""
    os.sync()
    pathlib.Path("/proc/sys/vm/drop_caches").write_text("3")


def index(folder):
    """Measures how fast the index is built, beside `cat`, cold and warm."""
    files = sorted(map(str, folder.glob("small.tfrecord-*")))
    size = sum(map(os.path.getsize, files))
    for cold in (True, False, True, False):
        found = {}
        for name in ("cat", "index"):
            for old in folder.glob(".looplib-*"):
                old.unlink()
            if cold:
                drop_cache()
            start = time.perf_counter()
            if name == "cat":
                subprocess.run(["cat", *files], stdout=subprocess.DEVNULL, check=True)
            else:
                looplib.open_records(files)
            found[name] = round(size / (time.perf_counter() - start) / 1e6)
        print(json.dumps({"cold": cold, "MB/s": found}), flush=True)


def io():
    """Returns (bytes read by calls of the kernel, bytes that came from the disk) of this process."""
    fields = dict(line.split(": ") for line in pathlib.Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"]), int(fields["read_bytes"])


def memory():
    """Returns the resident memory of this process, MB."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def resume_worker(folder, worker, workers, block):
    """Resumes at a step: prints the seconds to the first batch, the ids, and what was read."""
    batch = _BATCH.value
    next(iter(tf.data.Dataset.range(1).map(lambda number: number + 1)))  # TensorFlow's own start
    start = time.perf_counter()
    source = looplib.open_records(f"{folder}/small.tfrecord-*")
    found = time.perf_counter() - start
    batches = iter(context(batch, worker, workers, _STEP).records(source, block=block))
    ids, first, before, resident = [], None, io(), []
    for step in range(_STEPS):
        records = next(batches).numpy()
        if first is None:
            first = found, time.perf_counter() - start
        ids.append(np.asarray([int.from_bytes(record[:8], "little") for record in records], np.int32))
        if step % 1500 == 1499:
            resident.append(round(memory()))
    time.sleep(1)  # until all that is read ahead is counted too
    read = [after - there for after, there in zip(io(), before)]
    print(json.dumps({"seconds": first, "read": read, "MB": resident, "ids": np.concatenate(ids).tolist()}))


def resume(folder):
    """Resumes on 1, 2 and 4 workers: identical ids, each worker's share of the bytes, memory."""
    for block in [_BLOCK.value] if _BLOCK.value else (1, 1024):
        digests = {}
        for workers in (1, 2, 4):
            found = []
            for worker in range(workers):
                command = [sys.executable, "-m", "benchmarks.record_files", "worker", f"--folder={folder}"]
                command += [f"--worker={worker},{workers},{block}", f"--batch={_BATCH.value}"]
                output = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
                found.append(json.loads(output.splitlines()[-1]))
            size = _BATCH.value // workers
            ids = np.concatenate([np.reshape(worker.pop("ids"), [_STEPS, size]) for worker in found], axis=1)
            digests[workers] = hashlib.sha256(ids.tobytes()).hexdigest()[:12]
            whole = _STEPS * _BATCH.value * 1040
            shares = [worker["read"][0] / whole * workers for worker in found]
            print(
                json.dumps({
                    "block": block, "workers": workers, "ids": digests[workers],
                    "seconds to the index, to a batch": [np.round(worker["seconds"], 2).tolist() for worker in found],
                    "bytes read / (all / workers)": [round(share, 3) for share in shares],
                    "MB": [worker["MB"] for worker in found],
                }),
                flush=True,
            )  # fmt: skip
        assert len(set(digests.values())) == 1, digests


def decode(record):
    """Decodes and resizes one JPEG."""
    image = tf.image.resize(tf.io.decode_jpeg(record, channels=3), [224, 224])
    return tf.ensure_shape(image, [224, 224, 3])


def own(folder):
    """Returns looplib's batches."""
    records = context(_BATCH.value).records(f"{folder}/{_KIND.value}.tfrecord-*", block=_BLOCK.value)
    if _KIND.value == "images":
        spec = tf.TensorSpec([224, 224, 3])
        return records.map(lambda batch: tf.map_fn(decode, batch, spec), tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)
    return records.map(parse, tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def parse(records):
    """Parses a batch of records of 1 kB."""
    return tf.io.decode_raw(records, tf.uint8, fixed_length=1024)


def by_tf_data(folder):
    """Returns the batches of the pipeline that TensorFlow's guides recommend, with a shuffle buffer of 10,000."""
    files = tf.data.Dataset.list_files(f"{folder}/{_KIND.value}.tfrecord-*", seed=1)
    examples = files.repeat().interleave(
        tf.data.TFRecordDataset, cycle_length=16, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
    )
    images = _KIND.value == "images"
    examples = examples.shuffle(500 if images else 10_000, seed=1)
    if _PEER.value == "batched":  # parsed after batching, as looplib's are
        batches = examples.batch(_BATCH.value, drop_remainder=True)
        return batches.map(parse, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)
    one = decode if images else lambda record: tf.io.decode_raw(record, tf.uint8, fixed_length=1024)
    examples = examples.map(one, num_parallel_calls=tf.data.AUTOTUNE)
    return examples.batch(_BATCH.value, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


def by_grain(folder):
    """Returns grain's batches of the ArrayRecord file, shuffled as a whole, read by threads of this process."""
    import grain.python as grain

    source = grain.ArrayRecordDataSource(sorted(map(str, folder.glob("small.array_record-*"))))
    numbers = grain.MapDataset.source(source).seed(1).shuffle().repeat()
    loaded = numbers.batch(_BATCH.value, drop_remainder=True, batch_fn=parse_by_numpy)
    return loaded.to_iter_dataset(grain.ReadOptions(num_threads=_THREADS.value, prefetch_buffer_size=64))


def parse_by_numpy(records):
    """Parses records of 1 kB into a batch, uint8 `[b, 1024]`."""
    return np.frombuffer(b"".join(records), np.uint8).reshape(-1, 1024)


def own_of_array_record(folder):
    """Returns looplib's batches of the ArrayRecord file."""
    batches = context(_BATCH.value).records(f"{folder}/small.array_record-*", block=_BLOCK.value)
    return batches.map(parse, tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def idle():
    """Waits until the turn before has ended in all of its threads; a loader that reads ahead slows the next one."""
    gc.collect()
    for _ in range(100):
        before = time.process_time()
        time.sleep(0.1)
        if time.process_time() - before < 0.002:
            return
    raise RuntimeError("the loader of the turn before still uses the processor")


def rate(make_batches, folder):
    """Returns examples per second of a round, after its first batches, or from the start if the cache is cold."""
    if _COLD.value:
        drop_cache()
    batches = iter(make_batches(folder))
    if not _COLD.value:
        for _ in range(_WARM[_KIND.value]):
            next(batches)
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < _SECONDS.value:
        np.asarray(next(batches))
        count += _BATCH.value
    found = count / (time.perf_counter() - start)
    if make_batches is by_grain:
        batches.close()  # else its threads fill their buffer in the next turn
    del batches
    idle()
    return found


def speed(folder):
    """Measures looplib beside a peer, in alternating rounds."""
    pair = (own_of_array_record, by_grain) if _PEER.value == "grain" else (own, by_tf_data)
    rates = [[rate(one, folder) for one in pair] for _ in range(_ROUNDS.value)]
    own_rate, peer_rate = np.median(rates, axis=0)
    quartiles = np.quantile([first / second for first, second in rates], [0.25, 0.5, 0.75])
    print(
        json.dumps({
            "kind": _KIND.value, "block": _BLOCK.value, "cold": _COLD.value, "peer": _PEER.value,
            "examples/s": round(own_rate), "peer's": round(peer_rate),
            "ratio": round(quartiles[1], 2), "quartiles": [round(quartiles[0], 2), round(quartiles[2], 2)],
        }),
        flush=True,
    )  # fmt: skip


def main(arguments):
    """Runs the command that the first argument names."""
    folder = pathlib.Path(_FOLDER.value)
    if arguments[1:] == ["worker"]:
        return resume_worker(folder, *map(int, _WORKER.value))
    return {"make": make, "index": index, "resume": resume, "speed": speed}[arguments[1]](folder)


if __name__ == "__main__":
    app.run(main)

"""`context.records` of objects in a store: what it gives for local files, through a server that delays and refuses."""

import collections
import concurrent.futures
import shutil
import signal
import struct
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf
from proxy import Proxy
from servers import KEY, S3, SECRET

import looplib
from looplib.data.records import reader, reading
from looplib.errors import RecordsError
from looplib.stores import ranges

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

COUNTS = (700, 0, 1200, 1, 599)  # of the shards
TOTAL, BYTES = sum(COUNTS), 1000


def content(number):
    """The record of a number, of about a kilobyte that does not compress."""
    return struct.pack("<q", number) + np.random.default_rng(number).bytes(BYTES - number % 50)


def write(folder):
    """Writes the same records as TFRecord files, lines, records of fixed length and Parquet."""
    import pyarrow
    import pyarrow.parquet

    numbers = iter(range(TOTAL))
    for shard, count in enumerate(COUNTS):
        own = [next(numbers) for _ in range(count)]
        with tf.io.TFRecordWriter(f"{folder}/a.tfrecord-{shard}") as writer:
            for number in own:
                writer.write(content(number))
        folder.joinpath(f"a.txt-{shard}").write_text("".join(f"{content(number).hex()}\n" for number in own))
        folder.joinpath(f"a.bin-{shard}").write_bytes(b"".join(content(number)[:900] for number in own))
        table = pyarrow.table({"i": np.asarray(own, np.int64), "x": [content(number) for number in own]})
        pyarrow.parquet.write_table(table, f"{folder}/a.parquet-{shard}", row_group_size=50)


class Store:
    """A bucket of moto's server, behind a proxy that adds 20 ms to each request."""

    def __init__(self, server, proxy, folder):
        self._server, self.proxy, self.folder = server, proxy, folder

    def since(self, before=0):
        """Returns the numbers of requests by method, and of bytes that came, after the first so many requests."""
        requests = self.proxy.requests[before:]
        counts = collections.Counter(request.method for request in requests)
        return counts + collections.Counter(bytes=sum(request.returned for request in requests))

    def write(self, name, content):
        self._server.write("data", name, content)

    def copy(self, below):
        """Copies the TFRecord files to where a test may change them; returns their pattern."""
        for path in sorted(self.folder.glob("a.tfrecord-*")):
            self.write(f"{below}/{path.name}", path.read_bytes())
        return f"s3://data/{below}/a.tfrecord-*"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch, S3() as server, Proxy("127.0.0.1", server.port) as proxy:
        proxy.faults.delay = 0.02
        for name, value in (("ENDPOINT_URL", proxy.url), ("ACCESS_KEY_ID", KEY), ("SECRET_ACCESS_KEY", SECRET)):
            patch.setenv(f"AWS_{name}", value)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        server.make_bucket("data")
        folder = tmp_path_factory.mktemp("local")
        write(folder)
        for path in sorted(folder.iterdir()):
            server.write("data", f"train/{path.name}", path.read_bytes())
        yield Store(server, proxy, folder)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOOPLIB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LOOPLIB_RECORDS_GB", raising=False)
    return tmp_path / "cache"


def context(batch=20, worker=0, workers=1, training=True, start=0):
    return looplib.InputContext(
        global_batch_size=batch, num_replicas=workers, pipeline_index=worker, num_pipelines=workers, seed=3,
        training=training, start_step=start,
    )  # fmt: skip


def batches(dataset, count=-1):
    """The batches, as comparable lists."""
    found = []
    for batch in dataset.take(count).as_numpy_iterator():
        found.append({name: list(batch[name]) for name in batch} if isinstance(batch, dict) else list(batch))
    return found


def numbers(dataset, count):
    """The numbers of the records of batches."""
    return [[struct.unpack("<q", record[:8])[0] for record in batch] for batch in batches(dataset, count)]


FORMATS = {"tfrecord": {}, "txt": {}, "bin": {"format": "binary", "record_bytes": 900}, "parquet": {}}


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("kind", [*FORMATS])
def test_each_format_gives_what_local_files_give(store, kind):
    local = looplib.open_records(f"{store.folder}/a.{kind}-*", **FORMATS[kind])
    stored = looplib.open_records(f"s3://data/train/a.{kind}-*", **FORMATS[kind])
    assert len(stored) == len(local) == TOTAL
    for block, start in ((None, 0), (1, 100), (30, 37)):
        expected = batches(context(start=start).records(local, block=block), 60)
        assert batches(context(start=start).records(stored, block=block), 60) == expected
    assert batches(context(training=False).records(stored)) == batches(context(training=False).records(local))


@pytest.mark.slow
def test_workers_of_parameter_servers_open_the_objects_by_themselves(store):
    @tf.function
    def make():  # as on a worker
        own = looplib.InputContext(
            global_batch_size=20, num_replicas=1, pipeline_index=0, num_pipelines=1, seed=3, training=True,
            start_step=0, numbers=tf.data.Dataset.from_tensor_slices(np.int64([3, 0, 2])), remote=True,
        )  # fmt: skip
        return own.records("s3://data/train/a.tfrecord-*")

    expected = batches(context().records("s3://data/train/a.tfrecord-*"), 4)
    assert batches(make()) == [expected[step] for step in (3, 0, 2)]


def test_array_records_are_refused_in_a_sentence(store):
    store.write("other/a.array_record", b"x" * 100)
    with pytest.raises(RecordsError, match="s3://data/other/a.array_record.*TFRecord"):
        looplib.open_records("s3://data/other/*.array_record")


def test_what_is_not_there_is_a_sentence(store):
    for url in ("s3://data/nothing/*.tfrecord", "s3://data/nothing/a.tfrecord"):
        with pytest.raises(RecordsError, match="s3://data/nothing"):
            looplib.open_records(url)
    with pytest.raises(looplib.UsageError, match="folder.*s3://data/train|s3://data/train.*folder"):
        looplib.open_records("s3://data/train")


def test_a_name_with_signs_of_patterns_is_the_object_or_refused_where_it_matches_others(store):
    def content(pattern):
        source = looplib.open_records(f"s3://data/signs/{pattern}")
        return [source[number] for number in range(len(source))]

    for name in ("a[1].txt", "a1.txt", "c[7].txt", "d2.txt", "d3.txt"):
        store.write(f"signs/{name}", f"{name}\n".encode())
    assert content("c[7].txt") == content("c[[]7].txt") == [b"c[7].txt"]
    with pytest.raises(RecordsError, match="the name of a file"):
        content("a[1].txt")
    assert content("a[[]1].txt") == [b"a[1].txt"] and content("a[12].txt") == [b"a1.txt"]
    assert content("d[!2].txt") == content("d[^2].txt") == [b"d3.txt"]  # as in local patterns


@pytest.mark.slow
def test_an_index_reads_the_data_once_and_the_next_start_reads_none(store):
    size = sum(path.stat().st_size for path in store.folder.glob("a.tfrecord-*"))
    before = len(store.proxy.requests)
    batches(context().records("s3://data/train/a.tfrecord-*"), 2 * TOTAL // 20)
    first = store.since(before)
    assert size <= first["bytes"] <= 1.01 * size  # for the index and two epochs
    # A listing, a look for an object with the pattern as its name, each file's size, a range of each that is not empty.
    assert first["GET"] <= 2 + 4 and first["HEAD"] <= 1 + 5
    before = len(store.proxy.requests)
    batches(context().records("s3://data/train/a.tfrecord-*"), 2 * TOTAL // 20)
    again = store.since(before)
    assert again["GET"] <= 2 and again["HEAD"] <= 1 + 5 and again["PUT"] == 0


@pytest.mark.slow
def test_each_worker_fetches_its_own_records(store, cache, tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "_AHEAD_BYTES", 1 << 20)  # the data is small
    monkeypatch.setattr(reader, "_CHUNK_BYTES", 1 << 18)
    with tf.io.TFRecordWriter(str(tmp_path / "b.tfrecord")) as writer:
        for number in range(16_000):
            writer.write(content(number))
    store.write("own/b.tfrecord", (tmp_path / "b.tfrecord").read_bytes())
    looplib.open_records("s3://data/own/b.tfrecord")  # the index
    size, found = (tmp_path / "b.tfrecord").stat().st_size, []
    for worker in range(2):
        shutil.rmtree(cache / "blocks")
        source, before = looplib.open_records("s3://data/own/b.tfrecord"), len(store.proxy.requests)
        dataset = context(8, worker, 2).records(source, block=500)
        found.append([record for batch in batches(dataset, 16_000 // 8) for record in batch])
        assert store.since(before)["bytes"] < 0.7 * size  # a half, and some of the next epoch that is read ahead
    assert sorted(found[0] + found[1]) == sorted(map(content, range(16_000)))


PROGRAM = """
import sys, time, looplib
start = int(sys.argv[1])
context = looplib.InputContext(global_batch_size=20, num_replicas=1, pipeline_index=0, num_pipelines=1, seed=3,
                               training=True, start_step=start)
for batch in context.records("s3://data/train/a.tfrecord-*", block=30).as_numpy_iterator():
    print(*[int.from_bytes(record[:8], "little") for record in batch], flush=True)
    time.sleep(0.002)
"""


@pytest.mark.slow
def test_a_killed_run_resumes_where_it_was(store):
    expected = numbers(context().records(f"{store.folder}/a.tfrecord-*", block=30), 150)
    found = []
    for moment in (40, 150):
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(len(found))],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        while len(found) < moment:
            found.append([int(number) for number in process.stdout.readline().split()])
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("cached", [False, True])
def test_an_object_that_is_replaced_in_mid_run_ends_it(store, cache, monkeypatch, cached):
    pattern = store.copy(f"replaced-{cached}")
    source = looplib.open_records(pattern)
    if not cached:
        shutil.rmtree(cache / "blocks")
        source = looplib.open_records(pattern)
    dataset = iter(context().records(source, block=30))
    next(dataset)
    good = (store.folder / "a.tfrecord-2").read_bytes()
    store.write(f"replaced-{cached}/a.tfrecord-2", good[::-1])
    monkeypatch.setattr(ranges, "_LOOKED", 0.0)
    with pytest.raises(
        tf.errors.OpError, match=rf"replaced-{cached}/a.tfrecord-2 was changed.*record \d+ \(byte \d+\)"
    ):
        end = time.monotonic() + 30
        while time.monotonic() < end:
            source.files._checked.clear()
            next(dataset)
            time.sleep(0.005)


@pytest.mark.slow
def test_damage_is_named_by_object_record_and_byte(store):
    raw = bytearray((store.folder / "a.tfrecord-2").read_bytes())
    at = sum(len(content(700 + row)) + 16 for row in range(17))
    raw[at + 12] ^= 16
    store.write("damaged/a.tfrecord-2", bytes(raw))
    with pytest.raises(
        tf.errors.OpError, match=f"record 17 of s3://data/damaged/a.tfrecord-2, at byte {at}, is damaged"
    ):
        batches(context(training=False).records("s3://data/damaged/a.tfrecord-2"))
    store.write("damaged/a.tfrecord-2", bytes(raw[: at + 5]))
    with pytest.raises(RecordsError, match=f"s3://data/damaged/a.tfrecord-2.*{at + 5}.*17"):
        looplib.open_records("s3://data/damaged/a.tfrecord-2")


@pytest.mark.slow
def test_a_storm_of_refusals_changes_nothing(store, monkeypatch):
    monkeypatch.setenv("LOOPLIB_RECORDS_GB", "0")  # so that each epoch asks again
    expected = batches(context().records(f"{store.folder}/a.tfrecord-*", block=100), 150)
    store.proxy.faults.share = 0.3
    try:
        assert batches(context().records("s3://data/train/a.tfrecord-*", block=100), 150) == expected
    finally:
        store.proxy.faults.share = 0.0
    assert sum(request.status == 503 for request in store.proxy.requests) > 10


def size_of(folder):
    sizes = []
    for path in folder.rglob("*"):
        try:
            sizes.append(path.stat().st_size if path.is_file() else 0)
        except FileNotFoundError:
            pass
    return sum(sizes)


@pytest.mark.slow
def test_the_cache_keeps_to_its_limit_with_several_processes(store, cache, monkeypatch, tmp_path):
    with tf.io.TFRecordWriter(str(tmp_path / "c.tfrecord")) as writer:
        for number in range(16_000):
            writer.write(content(number))
    store.write("limit/c.tfrecord", (tmp_path / "c.tfrecord").read_bytes())
    monkeypatch.setenv("LOOPLIB_RECORDS_GB", "0.008")  # half of the data
    program = PROGRAM.replace("time.sleep(0.002)", "pass").replace("train/a.tfrecord-*", "limit/c.tfrecord")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(start)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        for start in (0, 100, 200)
    ]
    expected = numbers(context().records(f"{tmp_path}/c.tfrecord", block=30), 2200)
    largest = 0
    try:
        for row in range(2000):
            for process, start in zip(processes, (0, 100, 200)):
                assert [int(number) for number in process.stdout.readline().split()] == expected[start + row]
            if row % 10 == 0:
                largest = max(largest, size_of(cache / "blocks"))
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()
    assert 4e6 < largest < 8e6


@pytest.mark.slow
def test_a_damaged_or_missing_block_of_the_cache_is_read_again(store, cache):
    source = looplib.open_records("s3://data/train/a.tfrecord-*")
    expected = [content(number) for number in range(TOTAL)]
    assert source.__getitems__(range(TOTAL)) == expected
    blocks = sorted(path for path in (cache / "blocks").rglob("*") if path.is_file())
    assert len(blocks) == 4
    raw = bytearray(blocks[0].read_bytes())
    raw[-100] ^= 1
    blocks[0].write_bytes(raw)
    blocks[1].write_bytes(blocks[1].read_bytes()[:-1])
    blocks[2].unlink()
    before = len(store.proxy.requests)
    assert source.__getitems__(range(TOTAL)) == expected
    assert store.since(before)["GET"] == 3


@pytest.mark.slow
def test_several_threads_read_each_byte_once(store, cache):
    looplib.open_records("s3://data/train/a.tfrecord-*")
    shutil.rmtree(cache / "blocks")
    source, before = looplib.open_records("s3://data/train/a.tfrecord-*"), len(store.proxy.requests)
    numbers = [np.random.default_rng(seed).permutation(TOTAL) for seed in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for order, found in zip(numbers, pool.map(source.__getitems__, numbers)):
            assert found == [content(number) for number in order]
    size = sum(path.stat().st_size for path in store.folder.glob("a.tfrecord-*"))
    assert store.since(before)["bytes"] == size


@pytest.mark.slow
def test_other_stores_go_the_same_way():
    import fsspec

    memory = fsspec.filesystem("memory")
    for shard in range(2):
        memory.pipe_file(f"/m/a.txt-{shard}", b"".join(b"%d\n" % (shard * 100 + row) for row in range(100)))
    source = looplib.open_records("memory://m/a.txt-*")
    assert source.__getitems__(range(200)) == [b"%d" % number for number in range(200)]
    time.sleep(0.01)
    memory.pipe_file("/m/a.txt-1", b"1\n" * 100)
    source.files._checked.clear()
    with pytest.raises(RecordsError, match="memory://m/a.txt-1 was changed"):
        source[150]


@pytest.mark.slow
def test_plain_paths_import_no_driver(tmp_path):
    (tmp_path / "a.txt").write_text("1\n2\n")
    program = f"import sys, looplib; looplib.open_records({str(tmp_path / 'a.txt')!r}); print('fsspec' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    assert found.stdout.split()[-1] == "False"

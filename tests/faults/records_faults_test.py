"""Files of records, their indexes and notes as others may leave them: read in bounds, or refused in one sentence.

Each format has a file of the numbers 0 to 299, and what is read of it after a fault is what was read before, or an error
says which file and what to do.
"""

import os
import pathlib
import random
import shutil
import signal
import socket
import struct
import subprocess
import time
import zipfile

import google_crc32c
import numpy as np
import pytest
import tensorflow as tf
from conftest import more, repetitions

import looplib
from looplib.data.context import BadRecords
from looplib.data.records import index, reader
from looplib.data.records.index import BadRecordError
from looplib.errors import DataError, FileError, OrderError, RecordsError, RunDirectoryError, SettingError

MUTATIONS = int(os.environ.get("LOOPLIB_MUTATIONS", repetitions(120, 400)))
TOTAL = 300
BIN = {"format": "binary", "record_bytes": len("record 00000000\n")}


def content(number):
    """A record: text of 15 characters."""
    return f"record {number:08d}".encode()


def write(path, count=TOTAL, first=0):
    """Writes a file in the format that its name says; returns its path as text."""
    records = [content(number) for number in range(first, first + count)]
    if path.suffix == ".tfrecord":
        with tf.io.TFRecordWriter(str(path)) as writer:
            for record in records:
                writer.write(record)
    elif path.suffix == ".array_record":
        from array_record.python import array_record_module

        writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1,uncompressed")
        for record in records:
            writer.write(record)
        writer.close()
    elif path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.table({"text": [record.decode() for record in records]})
        pyarrow.parquet.write_table(table, path, row_group_size=50, compression="none", write_page_checksum=True)
    else:
        path.write_bytes(b"".join(record + b"\n" for record in records))
    return str(path)


def opened(path):
    """Opens a file, of which .bin has records of one length."""
    return looplib.open_records(str(path), **(BIN if pathlib.Path(path).suffix == ".bin" else {}))


def texts(source):
    """All records as text."""
    records = [source[number] for number in range(len(source))]
    return [(record["text"] if isinstance(record, dict) else record.decode().strip()) for record in records]


GOOD = [content(number).decode() for number in range(TOTAL)]
NAMES = ("a.tfrecord", "a.array_record", "a.parquet", "a.txt", "a.jsonl", "a.csv", "a.bin")
READ_BY_LOOPLIB = ("a.tfrecord", "a.txt", "a.bin")  # one of each kind


def put(kind, path):
    """Puts something that is no regular file at a path."""
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.path.relpath(path))
    else:
        path.symlink_to(kind)


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("kind", ["FIFO", "directory", "socket", "/dev/null", "/dev/zero"])
def test_only_a_regular_file_is_read_as_records(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        path = tmp_path / name
        put(kind, path)
        with pytest.raises(RecordsError, match=name[1:]):
            opened(f"{tmp_path}/?{name[1:]}")  # a pattern
        with pytest.raises(RecordsError, match=name):
            opened(path)
        (shutil.rmtree if kind == "directory" else os.unlink)(path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("name", NAMES)
def test_a_link_to_data_is_read_and_one_to_nothing_is_named(name, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / name).symlink_to(write(tmp_path / "data" / name))
    assert texts(opened(tmp_path / name)) == GOOD
    (tmp_path / "data" / name).unlink()
    with pytest.raises(RecordsError, match=f"{name}'"):
        opened(tmp_path / name)
    with pytest.raises(RecordsError, match=f"{name}.*found.*"):
        opened(f"{tmp_path}/[a].{name[2:]}")


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_no_bytes_is_said_and_the_others_are_read(name, tmp_path, caplog):
    caplog.set_level("WARNING", logger="absl")
    (tmp_path / name).touch()
    if name in ("a.array_record", "a.parquet"):
        with pytest.raises(RecordsError, match=f"{name}.*0"):
            opened(tmp_path / name)
        return
    assert len(opened(tmp_path / name)) == 0
    assert f"0 bytes, and so no record, are in {tmp_path / name}" in caplog.text
    write(tmp_path / f"b.{name[2:]}")
    assert texts(opened(f"{tmp_path}/*.{name[2:]}")) == GOOD


# Names.


def test_what_is_no_name_of_a_file_is_refused_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text\n")
    with pytest.raises(RecordsError, match=r"\[\]"):
        looplib.open_records([])
    for wrong in ("\udcff.txt", None, 5, b"a.txt", ["a.txt", 5], [None], "a\0.txt", ""):
        with pytest.raises(FileError, match="(expected|UTF-8)"):
            looplib.open_records(wrong)
    open(os.fsencode(tmp_path) + b"/b\xff.txt", "w").close()
    with pytest.raises(RecordsError, match=r"'\*.txt'.*UTF-8.*\('b.udcff.txt'\)"):
        looplib.open_records("*.txt")
    assert len(looplib.open_records("a*.txt")) == 1


def test_a_folder_whose_name_is_not_utf8_has_an_index(tmp_path, monkeypatch):
    folder = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(folder)
    monkeypatch.chdir(folder)
    write(pathlib.Path("a.txt"))
    for _ in range(2):
        assert texts(opened("a.txt")) == GOOD
    assert len(list(pathlib.Path().glob(".looplib-*.index"))) == 1


def test_a_file_that_is_named_twice_in_other_spellings_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "c.txt")
    for files in (["./c.txt", "c.txt"], [path, "c.txt"], ["*.txt", "c.txt"], [f"file://{path}", path]):
        with pytest.raises(RecordsError, match=f"{path}"):
            looplib.open_records(files)


# Indexes.


@pytest.fixture
def indexed(tmp_path):
    """A function that makes a file with its index: returns their paths and the content of the index."""

    def make(name):
        path = tmp_path / name
        write(path)
        opened(path)
        (found,) = tmp_path.glob(".looplib-*.index")
        return path, found, found.read_bytes()

    return make


def forged(good, change):
    """An index whose numbers are changed, int64 `[counts and offsets]`, with the checksum that belongs to them."""
    before = len(index._MAGIC) + 8
    start = before + 8 + int.from_bytes(good[before : before + 8], "little")
    numbers = np.frombuffer(good[start:], np.int64).copy()
    changed = change(numbers)
    body = good[before:start] + (numbers if changed is None else np.asarray(changed, np.int64)).tobytes()
    return index._MAGIC + google_crc32c.value(body).to_bytes(8, "little") + body


def put_at(place, value):
    def change(numbers):
        numbers[place] = value

    return change


FORGED = {
    "a negative count": put_at(0, -1),
    "no count": put_at(0, 0),
    "a count of 2^62": put_at(0, 2**62),
    "a count that is too small": put_at(0, 5),
    "a count that is too large": put_at(0, TOTAL + 2),
    "one record": lambda numbers: [1, 0],
    "no record": lambda numbers: [1, numbers[-1]],
    "no offsets": lambda numbers: numbers[:1],
    "no numbers": lambda numbers: numbers[:0],
    "a negative offset": put_at(1, -(2**62)),
    "an offset of 2^62": put_at(7, 2**62),
    "a last offset beyond the file": put_at(-1, 2**40),
    "a last offset inside the file": lambda numbers: [numbers[0] - 1, *numbers[1:-1]],
    "a first offset inside the file": lambda numbers: [numbers[0] - 1, *numbers[2:]],
    "decreasing offsets": lambda numbers: [numbers[0], 0, *numbers[-2:1:-1], numbers[-1]],
    "an offset twice": lambda numbers: [numbers[0], 0, *numbers[2:9], numbers[8], *numbers[10:]],
    "zeros": lambda numbers: [numbers[0], *np.zeros(TOTAL + 1)],
    "more after its end": lambda numbers: [*numbers, 0],
}


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("name", ["a.tfrecord", "a.txt"])
def test_an_index_that_does_not_fit_its_file_is_made_again(name, indexed, caplog):
    path, place, good = indexed(name)
    for what, change in FORGED.items():
        caplog.clear()
        place.write_bytes(forged(good, change))
        assert texts(opened(path)) == GOOD, what
        assert place.read_bytes() == good, what
        assert f"the index of records {place} is not used, and made again: it" in caplog.text, what
    place.write_bytes(forged(good, lambda numbers: None))
    written = place.stat().st_mtime_ns
    assert texts(opened(path)) == GOOD and place.stat().st_mtime_ns == written  # what has the right numbers is used


def test_an_index_is_made_again_wherever_it_was_cut_or_a_bit_of_it_flipped(indexed):
    path, place, good = indexed("a.txt")
    cuts = sorted({*range(0, 200), *range(0, len(good), 97), len(good) - 1})
    for cut in repetitions(cuts[::5], cuts):
        place.write_bytes(good[:cut])
        assert len(opened(path)) == TOTAL and place.read_bytes() == good, cut
    for bit in random.Random(0).sample(range(8 * len(good)), repetitions(60, 300)):
        content = bytearray(good)
        content[bit // 8] ^= 1 << bit % 8
        place.write_bytes(content)
        assert len(opened(path)) == TOTAL and place.read_bytes() == good, bit


@pytest.mark.slow
def test_no_mutation_of_an_index_with_a_right_checksum_changes_the_records_unsaid(indexed):
    """Offsets that fit are believed until the records are read, which shows that they are wrong."""
    chance = random.Random(3)
    values = [-1, 0, 1, 7, 16, 2**31, 2**40, 2**62, -(2**63), 2**63 - 1]
    outcomes = {"made again": 0, "refused": 0, "equal": 0}

    def change(numbers):
        for _ in range(chance.randrange(1, 4)):
            way, at = chance.randrange(5), chance.randrange(len(numbers))
            if way == 0:
                numbers[at] = chance.choice(values)
            elif way == 1:
                numbers[at] += chance.choice([-16, -1, 1, 16])
            elif way == 2:
                numbers = np.delete(numbers, at)
            elif way == 3:
                numbers = np.insert(numbers, at, chance.choice(values))
            elif at > 1:  # one record less
                numbers = np.delete(numbers, min(at, len(numbers) - 2))
                numbers[0] -= 1
        return numbers

    for name in ("a.tfrecord", "a.txt"):
        path, place, good = indexed(name)
        for number in range(MUTATIONS // 2):
            place.write_bytes(bad := forged(good, change))
            try:
                source = opened(path)
                found = texts(source)
                assert found == GOOD, number
                outcomes["equal" if place.read_bytes() == bad else "made again"] += 1
            except looplib.UsageError as error:
                assert f"the index of records does not fit {path}" in str(error) and not place.exists(), number
                outcomes["refused"] += 1
        place.unlink(missing_ok=True)
        path.unlink()
    print(outcomes)
    assert outcomes["made again"] > MUTATIONS / 3 and outcomes["refused"] > 0


LINES = [b"x" * (1 + 37 * number % 23) + b"\n" for number in range(TOTAL)]


def rewritten(path, lines):
    """Writes other content of an equal size, with the time of the old one, as `rsync -t` may."""
    before = path.stat()
    path.write_bytes(b"".join(lines))
    assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_an_index_of_a_file_that_was_rewritten_with_its_time_is_made_again(indexed, caplog):
    path, place, _ = indexed("a.txt")
    for lines in (LINES, LINES[::-1]):
        lines = [*lines, b"y" * (path.stat().st_size - len(b"".join(lines)) - 1) + b"\n"]
        rewritten(path, lines)
        source = opened(path)
        assert [source[number] + b"\n" for number in range(len(source))] == lines
        assert f"the index of records {place} is not used, and made again: its offsets are not those of" in caplog.text
        caplog.clear()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.tfrecord", "a.txt"])
def test_a_few_wrong_offsets_of_an_index_are_not_counted_as_damaged_records(name, indexed, tmp_path):
    path, place, good = indexed(name)
    place.write_bytes(forged(good, lambda numbers: [numbers[0] - 1, *numbers[1:8], *numbers[9:]]))
    run, sentence = tmp_path / "run", f"does not fit {path}, as record 6 shows: .*; the index was removed; run the same"
    with pytest.raises(DataError, match=sentence):
        train(run, path, 15, most=5000)
    assert not place.exists() and not (run / "bad_records").exists()
    assert sorted(number for batch in train(run, path, 15) for number in batch) == list(range(TOTAL))
    assert place.read_bytes() == good


def test_a_damaged_length_is_looked_for_once_and_is_a_damaged_record(indexed, monkeypatch):
    path, place, good = indexed("a.tfrecord")
    content, before = bytearray(path.read_bytes()), path.stat()
    for number in (6, 7):
        content[number * len(content) // TOTAL] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    source = opened(path)
    scan, scans = source._layout.scan, []
    object.__setattr__(source._layout, "scan", lambda *args: scans.append(args) or scan(*args))
    for number in (6, 7, 6):
        with pytest.raises(BadRecordError, match=f"record {number} of {path}, at byte"):
            source[number]
    assert len(scans) == 1 and place.read_bytes() == good


def test_of_a_sparse_index_of_60_gigabytes_no_more_is_read_than_fits(indexed, python):
    path, place, good = indexed("a.tfrecord")
    for size in (60 << 30, 1 << 40):
        os.truncate(place, size)
        start = len(good) - 8 * (TOTAL + 2)
        with open(place, "r+b") as file:  # whose head and count are plausible
            file.write(good[:start] + struct.pack("<q", size // 8 if size > 1 << 36 else TOTAL + 1))
        code = (
            "import resource, looplib; resource.setrlimit(resource.RLIMIT_AS, (20 << 30, 20 << 30)); "
            f"assert len(looplib.open_records({str(path)!r})) == {TOTAL}; "
            "assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 3 << 20"
        )
        result = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stderr
        assert place.read_bytes() == good


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("what", ["link", "link to an index", "FIFO", "directory", "dangling", "/dev/zero", "socket"])
def test_what_stands_in_place_of_an_index_is_not_followed_or_waited_for(what, indexed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOOPLIB_CACHE", str(tmp_path / "cache"))
    path, place, good = indexed("a.txt")
    place.unlink()
    victim = tmp_path / "victim"
    victim.write_bytes(good if what == "link to an index" else b"the user's")
    kinds = {"link": str(victim), "link to an index": str(victim), "dangling": str(tmp_path / "new")}
    put(kinds.get(what, what), place)
    before = victim.read_bytes()
    assert texts(opened(path)) == GOOD and texts(opened(path)) == GOOD
    assert victim.read_bytes() == before and not (tmp_path / "new").exists()
    if what == "directory":
        (kept,) = (tmp_path / "cache").iterdir()
        assert kept.read_bytes() == good
    else:
        assert place.read_bytes() == good and not place.is_symlink()


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("what", ["link", "FIFO", "directory", "dangling", "socket"])
def test_what_stands_in_place_of_the_lock_of_an_index_is_not_followed_or_waited_for(
    what, indexed, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    path, place, good = indexed("a.txt")
    place.unlink()
    lock = place.with_name(f"{place.name}.lock")
    victim = tmp_path / "victim"
    victim.write_bytes(b"the user's")
    put({"link": str(victim), "dangling": str(tmp_path / "new")}.get(what, what), lock)
    assert texts(opened(path)) == GOOD and place.read_bytes() == good
    assert victim.read_bytes() == b"the user's" and not (tmp_path / "new").exists()


def test_a_stopped_process_that_holds_the_lock_of_an_index_is_not_waited_for_without_end(
    indexed, python, monkeypatch, caplog
):
    monkeypatch.setattr(index, "_WAIT", 0.5)
    path, place, good = indexed("a.txt")
    place.unlink()
    code = (
        "import sys, time\nfrom looplib.base import files\n"
        f"with files.appending({str(place) + '.lock'!r}):\n    print('held', flush=True)\n    time.sleep(60)\n"
    )
    holder = subprocess.Popen([python, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        holder.send_signal(signal.SIGSTOP)
        start = time.monotonic()
        assert texts(opened(path)) == GOOD and place.read_bytes() == good
        assert 0.4 < time.monotonic() - start < 10
        assert "is held by another process, which may be stopped; not waiting for it" in caplog.text
    finally:
        holder.send_signal(signal.SIGCONT)
        holder.kill()
        holder.wait()


def test_two_processes_that_make_an_index_at_once_leave_a_whole_one(indexed, python):
    path, place, good = indexed("a.txt")
    code = (
        f"import looplib, os\nfor _ in range(40):\n    try: os.unlink({str(place)!r})\n    except FileNotFoundError: pass\n"
        f"    assert len(looplib.open_records({str(path)!r})) == {TOTAL}\n"
    )
    processes = [subprocess.Popen([python, "-c", code], stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in processes:
        assert process.wait(60) == 0, process.stderr.read()
    opened(path)
    assert place.read_bytes() == good
    assert sorted(other.name for other in place.parent.iterdir()) == sorted([place.name, path.name])


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("cache", ["absent", "a file", "FIFO", "link", "full of directories", os.devnull])
def test_a_folder_that_cannot_be_written_takes_the_cache_directory_or_none(cache, indexed, tmp_path, monkeypatch):
    """The place beside the data is taken by a directory, as root may write to any folder."""
    path, place, good = indexed("a.txt")
    place.unlink()
    place.mkdir()
    folder = tmp_path / "cache" / "of" / "mine"
    if cache not in ("absent", os.devnull):
        folder.parent.mkdir(parents=True)
    if cache == "a file":
        folder.touch()
    elif cache == "FIFO":
        os.mkfifo(folder)
    elif cache == "link":
        folder.symlink_to(tmp_path / "elsewhere")
    elif cache == "full of directories":
        (folder / place.name.removeprefix(".looplib-")).mkdir(parents=True)
    monkeypatch.setenv("LOOPLIB_CACHE", os.devnull if cache == os.devnull else str(folder))
    assert texts(opened(path)) == GOOD and texts(opened(path)) == GOOD
    if cache in ("absent", "link"):  # a user may have the cache on another disk
        assert [kept.read_bytes() for kept in folder.iterdir()] == [good]


# The files' own heads and lengths.


def length_of(count):
    """The length in front of a TFRecord with its checksum."""
    raw = struct.pack("<Q", count)
    crc = google_crc32c.value(raw)
    return raw + struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("count", [2**40, 2**60, 2**63, 2**64 - 16, 2**64 - 1])
def test_a_length_that_no_file_has_is_named(count, tmp_path):
    path = tmp_path / "a.tfrecord"
    path.write_bytes(path.read_bytes() if path.exists() else b"")
    write(path, 3)
    path.write_bytes(path.read_bytes() + length_of(count) + bytes(40))
    with pytest.raises(RecordsError, match=f"{path}.*3"):
        opened(path)


def test_a_record_that_no_tensor_holds_is_named_before_it_is_read(tmp_path):
    large = 5 << 30
    path = tmp_path / "a.tfrecord"
    path.write_bytes(length_of(large))
    os.truncate(path, large + 16)
    (tmp_path / "a.bin").touch()
    os.truncate(tmp_path / "a.bin", 2 * large)
    for source in (
        lambda: opened(path),
        lambda: looplib.open_records(tmp_path / "a.bin", "binary", record_bytes=large),
    ):
        with pytest.raises(RecordsError, match="0.*0.*5,368,709"):
            source()
    with pytest.raises(RecordsError, match="a.bin"):
        os.truncate(tmp_path / "a.bin", 1 << 43)
        looplib.open_records(tmp_path / "a.bin", "binary", record_bytes=1)


def test_lines_of_a_compressed_file_are_not_read_as_text(tmp_path):
    import bz2
    import gzip
    import lzma

    for kind in (gzip, bz2, lzma):
        (tmp_path / "a.txt.packed").write_bytes(kind.compress(b"text\n" * 100))
        with pytest.raises(RecordsError, match="a.txt.packed"):
            opened(tmp_path / "a.txt.packed")


def test_row_groups_that_do_not_fit_into_memory_or_do_not_add_up_are_named(tmp_path):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    table = pyarrow.table({"n": pyarrow.array(np.zeros(20_000_000, np.int8))})
    pyarrow.parquet.write_table(table, path, row_group_size=len(table))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(RecordsError, match="0.*20,000,000"):
        opened(path)
    pyarrow.parquet.write_table(table.slice(0, 100), path, row_group_size=50)
    raw = path.read_bytes()
    start = len(raw) - 8 - int.from_bytes(raw[-8:-4], "little")
    found = set()
    for field in (b"\x16\x65", b"\x16\x66"):  # -51 and 51 rows or values in place of 50
        at = start
        while (at := raw.find(b"\x16\x64", at + 1)) > 0:
            path.write_bytes(raw[:at] + field + raw[at + 2 :])
            try:
                records = opened(path)
                assert [records[number] for number in range(len(records))] == 100 * [{"n": 0}]
                found.add("equal")
            except looplib.UsageError as error:
                assert "row group" in str(error)
                found.add("cannot be read" if "cannot be read" in str(error) else "expected")
    assert found == {"equal", "cannot be read", "expected"}
    pyarrow.parquet.write_table(table.slice(0, 0), path)
    assert len(opened(path)) == 0


def test_records_that_fill_the_memory_are_named(tmp_path, python):
    path = tmp_path / "a.tfrecord"
    with open(path, "wb") as file:
        file.write(length_of((1 << 30) - 16))
        file.truncate(1 << 30)
    code = (
        "import resource, looplib; from looplib.data.records.sources import items\n"
        f"source = looplib.open_records({str(path)!r})\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 29),) * 2)\n"
        "try: items(source, [0])\nexcept looplib.UsageError as error: print(error)\n"
    )
    result = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    assert "record 0 of" in result.stdout and "do not fit into memory" in result.stdout, result


@pytest.mark.slow
def test_numbers_that_are_kept_of_records_are_read_in_bounds(tmp_path, caplog):
    path, cache = write(tmp_path / "a.tfrecord"), tmp_path / "lengths.npy"

    def measured():
        return looplib.measure(path, lambda records: tf.strings.length(records), cache=str(cache)).tolist()

    expected = [len(content(0))] * TOTAL
    assert measured() == expected
    good = cache.read_bytes()
    nested = good[:10] + b"(" * (len(good[10:128]) - 1) + b"\n" + good[128:]
    for bad in (b"", good[:40], good[:-1], nested, good.replace(b"(300,)", b"(9**9,)"), good[:10] + b"\xff" * 200):
        cache.write_bytes(bad)
        assert measured() == expected and cache.read_bytes() == good
    os.truncate(cache, 60 << 30)
    assert measured() == expected
    for kind in ("FIFO", "/dev/zero"):
        cache.unlink()
        put(kind, cache)
        assert measured() == expected and cache.read_bytes() == good


# Files that change while they are read.


def truncated(path):
    os.truncate(path, path.stat().st_size // 2)


def appended(path):
    with path.open("ab") as file:
        file.write(b"more text\n")


def replaced(path):
    other = path.with_name(f"other-{path.name}")
    write(other, first=500)
    other.rename(path)


def by_a_fifo(path):
    path.unlink()
    os.mkfifo(path)


def by_a_folder(path):
    path.unlink()
    path.mkdir()


CHANGES = (truncated, appended, replaced, pathlib.Path.unlink, by_a_fifo, by_a_folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("training", [True, *more([False])])
def test_a_file_that_changes_inside_an_epoch_ends_it_in_a_sentence(name, training, tmp_path, monkeypatch):
    monkeypatch.setattr("looplib.data.records.files._SECONDS", 0.0)  # it is looked at each time that it is read
    for change in CHANGES:
        path = tmp_path / name
        write(path)
        context = looplib.InputContext(
            global_batch_size=20 if training else 4, num_replicas=1, pipeline_index=0, num_pipelines=1, seed=3,
            training=training, start_step=0,
        )  # fmt: skip
        batches = iter(context.records(opened(path), block=1))
        next(batches)
        change(path)
        with pytest.raises(
            tf.errors.OpError,
            match=f"{name}.* (was changed while it was read, at|cannot be found|is a directory, a FIFO)",
        ):
            for _ in range(400 if training else 74):
                next(batches)
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("name", READ_BY_LOOPLIB)
def test_a_file_that_is_replaced_before_it_is_opened_is_not_waited_for(name, tmp_path):
    for change in CHANGES:
        path = tmp_path / name
        write(path)
        source = opened(path)
        source.files._open.clear()
        source.files._checked[0] = time.monotonic()  # looked at just now
        change(path)
        with pytest.raises(RecordsError, match=f"{name}.*.*(was.*while|cannot.*be|is.*FIFO)"):
            source[0]
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()


def test_a_change_that_leaves_size_and_time_is_seen_where_records_have_checksums_or_ends(tmp_path):
    for name in ("a.tfrecord", "a.txt"):
        path = tmp_path / name
        write(path)
        source = opened(path)
        times = path.stat().st_atime_ns, path.stat().st_mtime_ns
        raw = path.read_bytes()
        path.write_bytes(raw[7:] + raw[:7])
        os.utime(path, ns=times)
        sentence = f"record 3 of {path}, at byte .*, is damaged: it" if name == "a.tfrecord" else "does not fit"
        with pytest.raises(RecordsError, match=sentence):
            source[3]


# Damaged records that are left out, over restarts.

BAD = (3, 17, 150)


def damaged(path):
    """A TFRecord file with a flipped bit in some records."""
    write(path)
    raw = bytearray(path.read_bytes())
    for number in BAD:
        raw[number * len(raw) // TOTAL + 14] ^= 1
    path.write_bytes(raw)
    return path


def train(run, path, steps, most=len(BAD), plan=None):
    """Trains with batches of 20, so that each epoch is 15 steps; returns the sums of the records' numbers by step."""
    found = []

    class Sum(looplib.Trainer):
        def __init__(self):
            self.total = tf.Variable(0, dtype=tf.int64)

        def dataset(self, context):
            data = context.records(plan() if plan else str(path), block=1)
            return data.map(lambda records, *_: tf.strings.to_number(tf.strings.substr(records, 7, 8), tf.int64))

        def step_fn(self, inputs):
            self.total.assign_add(tf.reduce_sum(inputs))
            found.append(inputs.numpy().tolist())
            return {"loss": tf.cast(inputs, tf.float32)}

    with looplib.Controller(
        looplib.RunConfig(global_batch_size=20, loop="eager", seed=3, steps_per_loop=5, bad_records=most),
        trainer=Sum(),
        writers=[],
        model_dir=run,
        checkpoints=looplib.CheckpointPolicy(every_steps=5),
    ) as controller:  # fmt: skip
        controller.train(steps)
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The batches of an undisturbed run, and its notes."""
    folder = tmp_path_factory.mktemp("undisturbed")
    found = train(folder / "run", damaged(folder / "a.tfrecord"), 30)
    notes = {note.name for note in (folder / "run" / "bad_records").iterdir()}
    assert len(notes) == len(BAD)
    return found, notes


def half_written(notes):
    for note in notes.iterdir():
        note.with_name(f"{note.name}.{'0' * 16}.new").touch()
        note.unlink()


def foreign_names(notes):
    for number in range(3000):
        (notes / f"note {number}.txt").touch()
    (notes / "README.txt").touch()
    (notes / "folder-7.d").mkdir()
    os.mkfifo(notes / "FIFO-x.txt")


def notes_as_others(notes):
    for note, kind in zip(list(notes.iterdir()), ("FIFO", "/dev/zero", "directory")):
        note.unlink()
        put(kind, note)


def as_a_folder(notes):
    shutil.rmtree(notes)


NOTES = {
    "removed": as_a_folder,
    "half written": half_written,
    "foreign names": foreign_names,
    "others": notes_as_others,
}


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("what", NOTES)
def test_the_count_of_damaged_records_over_restarts_is_that_of_an_undisturbed_run(what, undisturbed, tmp_path):
    path, run = damaged(tmp_path / "a.tfrecord"), tmp_path / "run"
    found = train(run, path, 15)  # one epoch, which has all of them
    NOTES[what](run / "bad_records")
    found += train(run, path, 30)
    assert found == undisturbed[0]
    assert undisturbed[1] <= {note.name for note in (run / "bad_records").iterdir()}
    with pytest.raises(DataError, match="3.*--bad_records.*2"):
        train(run, path, 45, most=2)


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("what", ["link", "FIFO", "file"])
def test_notes_of_damaged_records_are_written_inside_of_the_run_directory(what, tmp_path, caplog):
    path, run, victim = damaged(tmp_path / "a.tfrecord"), tmp_path / "run", tmp_path / "victim"
    victim.mkdir()
    run.mkdir()
    place = run / "bad_records"
    place.touch() if what == "file" else put(str(victim) if what == "link" else what, place)
    sentence = "is a symbolic link, and looplib writes" if what == "link" else "must be a directory in a run directory"
    with pytest.raises(RunDirectoryError, match=f"{place}.*{sentence}"):
        train(run, path, 5)
    left_out = BadRecords(len(BAD), str(place))  # as if it were put there while the run trains
    error = BadRecordError("record 3 of a.tfrecord", "the file", "a_tfrecord-3-0123456789ab")
    with pytest.raises(RunDirectoryError, match=f"{place}.*{sentence}"):
        reader.leave_out(left_out, error)
    assert not list(victim.iterdir())


@pytest.mark.slow
def test_notes_that_cannot_be_written_are_counted_in_the_process_and_said(undisturbed, tmp_path, caplog, monkeypatch):
    path, run = damaged(tmp_path / "a.tfrecord"), tmp_path / "run"
    (run / "bad_records").mkdir(parents=True)
    for name in undisturbed[1]:
        (run / "bad_records" / name / "full").mkdir(parents=True)  # as root may write to any folder
    caplog.set_level("WARNING", logger="absl")
    shutil.rmtree(run / "bad_records" / sorted(undisturbed[1])[0])
    assert train(run, path, 30) == undisturbed[0]
    with pytest.raises(DataError, match="3.*--bad_records.*2"):
        train(tmp_path / "other", path, 30, most=2)


@pytest.mark.slow
def test_no_record_that_a_filter_leaves_out_comes_in_place_of_a_damaged_one(tmp_path):
    path, other = damaged(tmp_path / "a.tfrecord"), write(tmp_path / "b.tfrecord", 100, 1000)
    chosen = np.arange(TOTAL) % 4 == 3  # with 3, but not 4; without 17 and 150
    kept = set(np.flatnonzero(chosen)) - set(BAD)
    plans = {
        "alone": lambda: looplib.Kept(chosen, str(path)),
        "in a mixture": lambda: looplib.Mixture(
            {"a": looplib.Kept(chosen, str(path)), "b": str(other)}, {"a": 1, "b": 1}
        ),
    }
    for name, plan in plans.items():
        found = {number for batch in train(tmp_path / name, path, 20, plan=plan) for number in batch}
        assert {number for number in found if number < 1000} == kept, name


def test_a_source_of_a_mixture_that_has_or_keeps_no_record_is_refused_when_it_is_built(tmp_path):
    path, empty = damaged(tmp_path / "a.tfrecord"), tmp_path / "empty.tfrecord"
    bad = damaged(tmp_path / "bad.tfrecord")
    empty.touch()

    def mixture(other, weight=1.0):
        return lambda: looplib.Mixture(
            {"a": str(path), "b": other() if callable(other) else other}, {"a": 1, "b": weight}
        )

    for weight in (1, 0):
        with pytest.raises(SettingError, match="'b'.*0.*1"):
            train(tmp_path / "run", path, 5, plan=mixture(str(empty), weight))
        with pytest.raises(OrderError, match=".300..*0"):
            train(
                tmp_path / "run", path, 5, plan=mixture(lambda: looplib.Kept(np.zeros(TOTAL, bool), str(bad)), weight)
            )
        with pytest.raises(RecordsError, match="3"):
            train(tmp_path / "run", path, 5, 9, plan=mixture(lambda: looplib.Kept(np.asarray(BAD), str(bad)), weight))
    with pytest.raises(OrderError, match="0"):
        looplib.Mixture({"a": 3, "b": 4}, {"a": 0, "b": 0.0})
    with pytest.raises(SettingError, match="'a'.*4611686018427387904"):
        looplib.Mixture({"a": 2**62, "b": 2**62}, {"a": 1, "b": 1})


@pytest.mark.slow
def test_a_source_of_one_record_and_one_of_weight_0_are_mixed_exactly(tmp_path):
    path, one = write(tmp_path / "a.tfrecord"), write(tmp_path / "one.tfrecord", 1, 1000)
    plan = lambda: looplib.Mixture(  # noqa: E731
        {"a": str(path), "one": one, "none": str(path)},
        {"a": 3, "one": 1, "none": 0},
        {3: {"a": 0, "one": 1, "none": 0}},
    )
    found = train(tmp_path / "run", path, 5, plan=plan)
    assert [batch.count(1000) for batch in found] == [5, 5, 5, 20, 20]


def test_a_numpy_file_that_cannot_be_read_is_named(tmp_path):
    from trainers import fine_tune, image_data

    path = tmp_path / "data.npz"
    arrays = {name: np.zeros((4, 8, 8), np.float32) for name in ("x_train", "x_test")}
    np.savez_compressed(path, **arrays, y_train=np.arange(4), y_test=np.arange(4))
    good = path.read_bytes()
    assert image_data.numpy_file(str(path)).name == str(path)
    with zipfile.ZipFile(path, "w") as bomb:
        for name in ("x_train", "y_train", "x_test", "y_test"):
            head = f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({2**50},), }}".ljust(117).encode() + b"\n"
            bomb.writestr(f"{name}.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head)
    bad = [path.read_bytes(), b"", good[:-30], good[: len(good) // 2], bytes(100)]
    flipped = bytearray(good)
    flipped[120:140] = bytes(20)
    for content in (*bad, flipped):
        path.write_bytes(content)
        with pytest.raises(looplib.UsageError, match=f"{path}"):
            image_data.numpy_file(str(path))
        with pytest.raises(looplib.UsageError, match=f"{path}"):
            fine_tune.load_adapted(str(tmp_path), str(path))
    path.unlink()
    for kind in ("FIFO", "directory"):
        put(kind, path)
        with pytest.raises(looplib.UsageError, match=f"{path}"):
            image_data.numpy_file(str(path))
        (os.rmdir if kind == "directory" else os.unlink)(path)

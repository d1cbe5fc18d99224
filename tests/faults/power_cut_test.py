"""Power cuts: what a checkpoint calls reported is on the disk before the checkpoint counts.

A run trains on an ext4 file system of its own, in a file. `EXT4_IOC_SHUTDOWN` stops that file system between one moment
and the next, as a cut does: what the kernel has not put on the disk is lost, also in the midst of an fsync. Then it is
mounted again, which replays its journal, and the run is started again.
"""

import collections
import concurrent.futures
import contextlib
import fcntl
import os
import random
import shutil
import struct
import subprocess
import time

import pytest
from conftest import more, repetitions
from kill_test import AIMS, STEPS, events, reach, records, strike

from looplib.commands.compare import compare
from looplib.report.writers.files import JsonlWriter
from looplib.report.writers.tensorboard_writer import TensorBoardWriter
from looplib.run import commits
from looplib.run.records import read_jsonl
from looplib.weights.restoring import peek

ARGUMENTS = [
    "--config.slow_step=0.004", "--config.slow_evaluation=0.005", "--config.slow_save=0.005",
    "--config.slow_restore=0.03", "--config.extra_metrics=40", "--loop=eager", "--train_steps=50",
]  # fmt: skip
# ext4 as it is by default, and without its own remedy for programs that rename a file before they sync it.
RUNS = {"default": "loop", "no remedy": "loop,noauto_da_alloc,commit=60"}
_SHUTDOWN = 0x8004587D  # _IOR('X', 125, __u32)
_WITHOUT_FLUSHING = struct.pack("I", 2)


def call(*command):
    """Runs a command; skips the test where it is missing or not permitted."""
    if not shutil.which(command[0]):
        pytest.skip(f"a power cut needs {command[0]}, which is not installed")
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        pytest.skip(f"a power cut needs a file system of its own: {' '.join(command)}: {result.stderr.strip()}")


class Disk:
    """An ext4 file system in a file, mounted while the `with` block lasts.

    Args:
      place: a directory, for the file and the mount.
      options: what it is mounted with.

    Attributes:
      folder: where it is mounted.
    """

    def __init__(self, place, options):
        self._image, self.folder = place / "image", place / "disk"
        self._mount = ["mount", "-o", options, str(self._image), str(self.folder)]
        self._cuts = 0

    def __enter__(self):
        self.folder.mkdir()
        with open(self._image, "wb") as file:
            file.truncate(192 * 2**20)
        call("mkfs.ext4", "-q", str(self._image))
        call(*self._mount)
        return self

    def __exit__(self, *_):
        subprocess.run(["umount", "--lazy", str(self.folder)], capture_output=True)  # the loop device goes with it

    def cut(self):
        """Cuts the power; a file that was not synced must be lost by it, and one that was must not."""
        self._cuts += 1
        synced, lost = self.folder / f"synced-{self._cuts}", self.folder / f"lost-{self._cuts}"
        with open(synced, "w") as file:
            file.write("kept" * 1000)
            file.flush()
            os.fsync(file.fileno())
        lost.write_text("lost" * 1000)
        place = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.ioctl(place, _SHUTDOWN, _WITHOUT_FLUSHING)
        finally:
            os.close(place)

    def restore_power(self):
        """Mounts the file system again, once all who used it have ended."""
        subprocess.run(["umount", str(self.folder)], check=True)
        subprocess.run(self._mount, check=True)
        assert (self.folder / f"synced-{self._cuts}").read_text() == "kept" * 1000
        lost = self.folder / f"lost-{self._cuts}"
        assert not lost.exists() or lost.read_text() != "lost" * 1000, "this was no power cut"


def up_to(reported, found):
    """Those of (split, step, more) whose split was reported up to their step."""
    return [record for record in found if record[1] <= reported.get(record[0], 0)]


def lines(folder):
    return [(record["split"], record["step"], record) for record in records(folder)]


def scalars(folder):
    return [(split, step, tag, value) for split, tag, step, value in events(folder)]


def check(run, whole, seen):
    """Checks what a cut has left; returns the step of the newest checkpoint.

    Args:
      run: the run directory.
      whole: that of a run that was not cut.
      seen: the steps of the checkpoints that had a marker just before the cut, newest first.
    """
    newest = commits.newest(str(run / "checkpoints"))
    # The newest one that was seen may have been about to be put on the disk.
    assert (newest.step if newest else 0) >= (seen[1] if len(seen) > 1 else 0)
    if newest is None:
        return 0
    assert commits.verify(newest) == ""
    step, record = peek(newest.path)
    assert step == newest.step
    reported = record.reported
    for read in (lines, scalars):
        expected, found = up_to(reported, read(whole)), up_to(reported, read(run))
        assert sorted(found, key=str) == sorted(expected, key=str), f"after a cut, step {step} reports {reported}"
    return step


def cut_again_and_again(nursery, disk, whole, cuts, chance):
    """Trains on a disk, through power cuts; returns [(what the run was at, the step it was cut back to)].

    A life before every third cut is killed, which leaves records to the next one that are void or not synced yet.
    """
    run, struck, saved = disk.folder / "run", [], 0
    while len(struck) < cuts:
        if len(struck) % 3 == 1 and saved < STEPS - 16:
            strike(nursery.life(run, *ARGUMENTS), run, chance.choice(["step", "report", "evaluate"]), chance, saved + 4)
        aim = chance.choice(list(AIMS))
        life = nursery.life(run, *ARGUMENTS)
        try:
            reach(life, run, aim, chance, saved + int(chance.random() * (STEPS - 8 - saved) / (cuts - len(struck))))
            assert not life.ended(), life.output()
            doing = life.note()[1]
            seen = [done.step for done in commits.committed(str(run / "checkpoints"))]
            disk.cut()
        finally:
            life.end()
        disk.restore_power()
        saved = check(run, whole, seen)
        struck.append((doing, saved))
    life = nursery.life(run, *ARGUMENTS)
    assert life.code() == 0, life.output()
    return struck


@pytest.fixture(scope="module")
def whole(nursery, tmp_path_factory):
    """A run that was not cut."""
    folder = tmp_path_factory.mktemp("whole")
    life = nursery.life(folder, *ARGUMENTS)
    assert life.code() == 0, life.output()
    return folder


@pytest.fixture(scope="module")
def runs(nursery, whole, cases, tmp_path_factory):
    """The chosen runs, at a time: dict from name to (run directory, a future)."""
    chosen = {name: RUNS[name] for name in cases("name")}
    with contextlib.ExitStack() as stack:
        disks = [stack.enter_context(Disk(tmp_path_factory.mktemp("power"), options)) for options in chosen.values()]
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(len(chosen)))
        cuts = int(os.environ.get("LOOPLIB_CUTS", repetitions(2, 20)))
        yield {
            name: (
                disk.folder / "run",
                pool.submit(
                    cut_again_and_again, nursery, disk, whole, (cuts + number) // len(chosen), random.Random(number)
                ),
            )
            for number, (name, disk) in enumerate(zip(chosen, disks))
        }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["no remedy", *more(["default"])])  # the harder one
def test_a_run_that_lost_power_again_and_again_ends_as_one_that_did_not(name, runs, whole):
    started = time.monotonic()
    run, future = runs[name]
    struck = future.result()
    print(
        f"\n{name}: {len(struck)} cuts, {time.monotonic() - started:.0f} s,", collections.Counter(w for w, _ in struck)
    )
    print([step for _, step in struck])
    result = compare(whole, run)
    assert result.differences == [] and result.examples
    assert records(run) == records(whole) and events(run) == events(whole)


def writers_of(run):
    return TensorBoardWriter(str(run)), JsonlWriter(str(run / "metrics.jsonl"))


def write(writers, steps):
    for writer in writers:
        for step in steps:
            writer.write(step, "train", {"loss": step})


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("options", RUNS.values())
def test_records_that_a_resume_rewrites_or_finds_survive_a_cut(options, tmp_path):
    """Void ones, which are kept beside them, too; and those of a process that was killed before it could sync them."""
    with Disk(tmp_path, options) as disk:
        run = disk.folder / "run"
        run.mkdir()

        def steps():
            found = [step for _, step, _, _ in scalars(run)]
            assert [record["step"] for record in records(run)] == found
            return found

        write(first := writers_of(run), range(1, 7))
        for writer in first:
            writer.sync()
            writer.close()
        for writer in writers_of(run):
            writer.resume(4, {"train": 4})
        disk.cut()
        disk.restore_power()
        assert steps() == [1, 2, 3, 4]
        assert [record["step"] for record in read_jsonl(str(run / "metrics.voided.jsonl"))] == [5, 6]
        for part in (range(5, 8), [8]):
            write(last := writers_of(run), part)
            for writer in last:
                writer.close()
        for writer in last:
            writer.resume(8, {"train": 8})
            writer.sync()
        disk.cut()
        disk.restore_power()
        assert steps() == [*range(1, 9)]

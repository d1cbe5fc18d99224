"""Random faults over the whole of a run in a store: `python tests/programs/store_faults.py --count=200 --seed=0`.

Each schedule strikes a run, at random moments, with one to three faults: of the process, the local disk, the clock, the
store, or by a second writer. Then the same command is started until the run is done. Asked is: did each start end with a
sentence where it did not end well; is each checkpoint in the store whole, whatever happened; did nothing that was there
get lost; did one machine at a time write; and is the run in the end that which nothing befell? `--number=N` makes one
schedule alone.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
from typing import Any

if __name__ == "__main__":
    TESTS = pathlib.Path(__file__).parents[1]
    sys.path[:0] = [str(TESTS.parent), str(TESTS), str(TESTS / "helpers")]

import copied
import lives
from clouds import BUCKET, LEASE, Cloud, said
from proxy import Faults, Proxy, Request
from servers import S3

from looplib.buckets.note import steps_of
from looplib.commands.compare import compare
from looplib.run import commits
from looplib.run.records import read_jsonl

STEPS, KEEP, EVERY, SIZE = (
    40,
    3,
    10,
    20_000,
)  # of a run; it keeps its newest checkpoints, and those of each so many steps
TRAINING = [
    f"--train_steps={STEPS}", "--checkpoint_interval=5", f"--keep_every={EVERY}", "--eval_interval=20",
    "--config.slow_step=0.05", "--config.state_mb=0.1",
]  # fmt: skip
LIMIT = 90.0  # seconds that a start may take
ENDS = (0, 1, 75, -signal.SIGTERM, -signal.SIGKILL)
CLOCK = r"""
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *found) {
  int error = syscall(SYS_clock_gettime, clock, found);
  const char *off = getenv("CLOCK_OFF");
  if (off && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) found->tv_sec += atol(off);
  return error;
}
int gettimeofday(struct timeval *found, void *zone) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  found->tv_sec = now.tv_sec;
  found->tv_usec = now.tv_nsec / 1000;
  return 0;
}
time_t time(time_t *found) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (found) *found = now.tv_sec;
  return now.tv_sec;
}
"""


def clock_library(folder: pathlib.Path) -> dict[str, str]:
    """Makes the library that puts a process's clock off by CLOCK_OFF seconds; returns the variable that loads it."""
    if not shutil.which("gcc"):
        return {}
    (folder / "clock.c").write_text(CLOCK)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "clock.so", folder / "clock.c"], check=True)
    return {"LD_PRELOAD": str(folder / "clock.so")}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a schedule.

    Attributes:
      number: of the schedule.
      faults: what struck, and when.
      ends: how each start ended: a code, and the class of the error that it told.
      problems: what is wrong, sentences.
    """

    number: int
    faults: tuple[str, ...]
    ends: tuple[str, ...]
    problems: tuple[str, ...]

    def __str__(self) -> str:
        wrong = "".join(f"\n  WRONG: {problem}" for problem in self.problems)
        return f"{self.number}: {' + '.join(self.faults)}: {' then '.join(self.ends)}{wrong}"


class Schedule:
    """A run in a store, and what befalls it.

    Args:
      number: of the schedule.
      seed: of all schedules.
      cloud: the store and the machines, of this schedule alone.
      has_clock: whether the clocks of machines can be put off.
    """

    def __init__(self, number: int, seed: int, cloud: Cloud, has_clock: bool):
        self.chance = random.Random(f"{seed} {number}")
        self.number, self.cloud = number, cloud
        self.faults: list[str] = []
        self.ends: list[str] = []
        self.problems: list[str] = []
        self.undo, self.at_the_end = contextlib.ExitStack(), contextlib.ExitStack()
        self.others: list[lives.Life] = []
        self.stopped = 0  # how often a process was, or a request held, between its question and its write
        self.temporary = cloud.folder / "temporary"
        self.clock = self.chance.choice(["-3600", "3600"]) if has_clock and self.chance.random() < 0.3 else ""
        if self.clock:
            self.faults.append(f"a clock that is {self.clock} s off")
        strikes = [strike for strike in STRIKES if not (os.getuid() and strike is has_a_full_disk)]
        self.strikes = self.chance.sample(strikes, self.chance.choice([1, 1, 2, 3]))
        if has_a_full_disk in self.strikes:
            self._mount()

    def _mount(self) -> None:
        place = self.cloud.folder / "one"
        place.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", place], check=True)
        self.at_the_end.callback(subprocess.run, ["umount", "--lazy", place], check=True)

    def start(self, machine: str) -> lives.Life:
        """Starts the command on a machine, whose requests are signed by its name."""
        self.temporary.mkdir(exist_ok=True)
        return self.cloud.copied(
            f"--steps={STEPS}", f"--keep={KEEP}", f"--every={EVERY}", f"--size={SIZE}", "--pause=0.06", machine=machine,
            environment=self.environment(machine),
        )  # fmt: skip

    def environment(self, machine: str) -> dict[str, str]:
        """The variables of a start on a machine."""
        clock = {"CLOCK_OFF": self.clock} if self.clock and machine == "one" else {}
        return {"AWS_ACCESS_KEY_ID": machine, "TMPDIR": str(self.temporary), **clock}

    def run(self) -> Outcome:
        """Makes the schedule."""
        with self.at_the_end:
            with self.undo:
                life = self.start("one")
                for strike in self.strikes:
                    if life.ended(self.chance.random() * 3.0):
                        break
                    self.faults.append(strike.__name__)
                    strike(self, life)
                if not life.ended(self.chance.random() * 4.0) and self.chance.random() < 0.5:
                    self.undo.close()  # it gets over it
                if self.cloud.proxy.faults != Faults():  # at its end it waits longer for a store than a trial does
                    life.ended(8.0)
                    self.undo.close()
                self.end_of(life)
                for other in self.others:
                    self.end_of(other)
            self.look_at_the_store()
            self.go_on()
            self.look_at_the_end()
            self.look_at_the_writers()
        return Outcome(self.number, tuple(self.faults), tuple(self.ends), tuple(self.problems))

    def end_of(self, life: lives.Life) -> None:
        """Waits for the end of a start, and looks at it and at the store."""
        try:
            code = life.code(LIMIT)
        except TimeoutError as error:
            self.problems.append(str(error))
            code = life.code()
        shutil.copy(life.log, self.cloud.folder / f"{len(self.ends)}.log")
        told = self.told(life)
        self.ends.append(" ".join([str(code), *told]))
        if code not in ENDS or (code == 1 and not told) or "Traceback" in life.output():
            self.problems.append(f"a start ended with {code}: {life.output()[-3000:]}")

    def told(self, life: lives.Life) -> list[str]:
        """The errors that a start has told, each in a sentence."""
        return [one["error"] for one in said(life) if "error" in one]

    def began_at(self, life: lives.Life) -> int | None:
        """The step that a start has begun at; None if it did not come so far."""
        return next((one["start"] for one in said(life) if "start" in one), None)

    def look_at_the_store(self) -> None:
        """Each checkpoint whose marker is in the store is whole there."""
        with tempfile.TemporaryDirectory(dir=self.cloud.folder) as folder:
            place = self.cloud.download(folder) / "checkpoints"
            for step in self.cloud.steps():
                try:
                    damage = commits.verify(commits.read_marker(str(place / f"ckpt-{step}")))
                except (OSError, ValueError, KeyError) as error:
                    damage = repr(error)
                if damage:
                    self.problems.append(f"step {step} in the store is damaged: {damage}")

    def go_on(self) -> None:
        """Starts the command until the run is done: here, and, if that is refused, on a machine that has nothing."""
        for machine in ("one", "one", "one", "fresh"):
            there = self.cloud.steps()
            life = self.start(machine)
            self.end_of(life)
            self.look_at_the_store()
            first = self.began_at(life)
            if first is not None and first < max(there, default=0):
                self.problems.append(f"it started at step {first}, although the store had {there}")
            lost = {step for step in there if step % EVERY == 0} - set(self.cloud.steps())
            if lost:
                self.problems.append(f"{sorted(lost)} were lost in the store")
            if life.code() == 0:
                return
        self.problems.append(f"the run cannot be continued: {life.output()[-2000:]}")

    def look_at_the_end(self) -> None:
        """The run in the store is that which nothing befell."""
        found = self.cloud.steps()
        self.compare_steps([*range(EVERY, STEPS - KEEP + 1, EVERY), *range(STEPS - KEEP + 1, STEPS + 1)])
        for step in found:
            if self.cloud.read(f"checkpoints/ckpt-{step}.index") != copied.content(step, 0, SIZE):
                self.problems.append(f"step {step} has other weights")
        if self.cloud.read("metrics.jsonl").decode() != "".join(copied.line(step, 0) for step in range(1, STEPS + 1)):
            self.problems.append("metrics.jsonl is another")

    def compare_steps(self, wanted: list[int]) -> None:
        """The store has the wanted steps; those that were lost before they were copied may be missing."""
        found = set(self.cloud.steps()) - {0}  # which a signal before the first step saves
        missing = set(wanted) - found
        if any(strike in LOSING for strike in self.strikes):  # the newest checkpoints are copied first
            puts = [one for one in self.cloud.proxy.requests if one.method == "PUT" and 200 <= one.status < 300]
            missing &= {STEPS, *steps_of(one.path.partition("/run/")[2] for one in puts)}
        if missing or found - set(wanted):
            self.problems.append(f"in the end the store has the steps {sorted(found)}")

    def look_at_the_writers(self) -> None:
        """Nobody wrote once another machine had the run, but for the request between a question and a stop."""
        holders, late = {0: ""}, collections.Counter()
        root = f"/{BUCKET}/{self.cloud.prefix}/run/"
        for request in self.cloud.proxy.requests:
            name = urllib.parse.unquote(urllib.parse.urlsplit(request.path).path).removeprefix(root)
            if request.method not in ("PUT", "POST", "DELETE") or not 200 <= request.status < 300:
                continue
            if name.startswith(".lease/"):
                taken = int(name.removeprefix(".lease/"))
                if request.method == "DELETE":  # of an old one, or by a start that was refused
                    holders.pop(taken, None)
                else:
                    holders.setdefault(taken, request.key)
            elif request.key != holders[max(holders)]:
                late[request.key] += 1
        if not json.loads(self.cloud.read(f".lease/{max(holders):08d}"))["released"]:
            self.problems.append("the lease is still held")
        if sum(late.values()) > self.stopped:
            self.problems.append(f"machines that did not hold the run wrote: {dict(late)}")


class TrainedSchedule(Schedule):
    """One whose run trains a model.

    Args:
      whole: the directory of a run that nothing befell.
      *what: what any `Schedule` takes.
    """

    def __init__(self, whole: pathlib.Path, *what: Any):
        super().__init__(*what)
        self._whole = whole
        self.faults.append("a training")

    def start(self, machine: str) -> lives.Life:
        self.temporary.mkdir(exist_ok=True)
        return self.cloud.run(*TRAINING, machine=machine, environment=self.environment(machine))

    def told(self, life: lives.Life) -> list[str]:
        return ["a sentence"] if re.search("^looplib: error: ", life.output(), re.M) else []

    def began_at(self, life: lives.Life) -> int | None:
        found = re.search(r"restored step (\d+) from ", life.output())
        return int(found[1]) if found else 0 if "step       5" in life.output() else None

    def look_at_the_end(self) -> None:
        found = self.cloud.download("found")
        self.problems += [difference.text("whole", "found") for difference in compare(self._whole, found).differences]
        ours, theirs = (
            [{**record, "steps_per_second": 0} for record in read_jsonl(str(place / "metrics.jsonl"))]
            for place in (found, self._whole)
        )
        if ours != theirs:
            self.problems.append(f"metrics.jsonl is another: {ours}")
        self.compare_steps([done.step for done in commits.committed(str(self._whole / "checkpoints"))])


# What may strike; each is named after what it does.


def is_killed(schedule: Schedule, life: lives.Life) -> None:
    life.kill(signal.SIGKILL)


def is_terminated(schedule: Schedule, life: lives.Life) -> None:
    life.kill(signal.SIGTERM)


def is_stopped_for_a_while(schedule: Schedule, life: lives.Life) -> None:
    schedule.stopped += 1
    life.kill(signal.SIGSTOP)
    time.sleep(schedule.chance.choice([0.3, LEASE, 2 * LEASE]))
    life.kill(signal.SIGCONT)


def cannot_write_files(schedule: Schedule, life: lives.Life) -> None:
    with contextlib.suppress(ProcessLookupError):
        _, most = resource.prlimit(life.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(life.pid, resource.RLIMIT_FSIZE, (SIZE // 2, most))  # and its output fits

    def allow() -> None:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(life.pid, resource.RLIMIT_FSIZE, (most, most))

    schedule.undo.callback(allow)


def has_a_full_disk(schedule: Schedule, life: lives.Life) -> None:
    path = schedule.cloud.folder / "one" / "full"
    schedule.undo.callback(path.unlink, missing_ok=True)
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
        while True:
            file.write(bytes(1024))


def local(schedule: Schedule) -> pathlib.Path | None:
    """The local directory, once it is there."""
    return next((schedule.cloud.folder / "one" / "runs").glob("*/run"), None)


def loses_its_directory(schedule: Schedule, life: lives.Life) -> None:
    if place := local(schedule):
        shutil.rmtree(place, ignore_errors=True)


def loses_its_directory_and_its_notes(schedule: Schedule, life: lives.Life) -> None:
    if place := local(schedule):
        for path in (place, place.with_name("run.mirror")):
            shutil.rmtree(path, ignore_errors=True)


def has_its_directory_moved(schedule: Schedule, life: lives.Life) -> None:
    if place := local(schedule):
        moved = place.with_name("moved")
        with contextlib.suppress(OSError):
            place.rename(moved)
        if schedule.chance.random() < 0.5:
            schedule.undo.callback(_move_back, moved, place)


def _move_back(moved: pathlib.Path, place: pathlib.Path) -> None:
    with contextlib.suppress(OSError):  # it was made again
        moved.rename(place)


def loses_an_old_checkpoint(schedule: Schedule, life: lives.Life) -> None:
    if place := local(schedule):
        for path in (place / "checkpoints").glob(f"ckpt-{EVERY}.*"):
            path.unlink(missing_ok=True)


def loses_its_temporary_folder(schedule: Schedule, life: lives.Life) -> None:
    shutil.rmtree(schedule.temporary, ignore_errors=True)


def has_a_store_that_fails(schedule: Schedule, life: lives.Life) -> None:
    chance, faults = schedule.chance, Faults()
    status = chance.choice([403, 404, 500, 503, "cut", "late"])
    kind = chance.choice(["any", "PUT", "GET", "DELETE", "ckpt-", "metrics"])
    if status == "cut":
        faults.cut = chance.choice([0.3, 1.0])
    elif status == "late":
        faults.delay, schedule.stopped = chance.choice([0.2, 1.0, 1.5 * LEASE]), schedule.stopped + 1
    else:
        faults.share, faults.status = chance.choice([0.3, 1.0]), status

    def only(request: Request) -> bool:
        # A store that says that there is no lease, although there is, cannot be told from one without.
        lies = status == 404 and ".lease" in request.path
        return not lies and (kind in ("any", request.method) or kind in request.path)

    faults.only = only
    schedule.faults[-1] += f" ({status}, {kind})"
    schedule.cloud.proxy.faults = faults
    schedule.undo.callback(setattr, schedule.cloud.proxy, "faults", Faults())


def has_a_store_that_is_out_of_reach(schedule: Schedule, life: lives.Life) -> None:
    schedule.cloud.proxy.stop()
    time.sleep(schedule.chance.choice([0.5, LEASE, 2 * LEASE]))
    schedule.cloud.proxy.start()


def has_a_second_writer(schedule: Schedule, life: lives.Life) -> None:
    if not schedule.others:
        schedule.others.append(schedule.start("two"))


def is_stopped_while_a_second_writer_starts(schedule: Schedule, life: lives.Life) -> None:
    life.kill(signal.SIGSTOP)
    schedule.stopped += 1
    has_a_second_writer(schedule, life)
    schedule.others[0].ended(schedule.chance.choice([1.0, 2 * LEASE]))
    life.kill(signal.SIGCONT)


STRIKES = (
    is_killed, is_terminated, is_stopped_for_a_while, cannot_write_files, has_a_full_disk, loses_its_directory,
    loses_its_directory_and_its_notes, has_its_directory_moved, loses_an_old_checkpoint, loses_its_temporary_folder,
    has_a_store_that_fails, has_a_store_that_fails, has_a_store_that_fails, has_a_store_that_is_out_of_reach,
    has_a_second_writer, is_stopped_while_a_second_writer_starts,
)  # fmt: skip
LOSING = (  # what was not copied yet; a writer that takes over a stopped one's run begins with what the store has
    loses_its_directory, loses_its_directory_and_its_notes, has_its_directory_moved, loses_an_old_checkpoint,
    is_stopped_while_a_second_writer_starts,
)  # fmt: skip


def schedule(
    number: int, seed: int, s3: S3, nursery: lives.Nursery, folder: pathlib.Path, has_clock: bool, trains: bool
) -> Outcome:
    """Makes one schedule; keeps its folder if something is wrong."""
    place = folder / f"{number}"
    place.mkdir()
    with Proxy("127.0.0.1", s3.port, number) as proxy:
        what = (number, seed, Cloud(s3, proxy, nursery, place, f"{folder.name}-{number}"), has_clock)
        outcome = (TrainedSchedule(folder / "whole", *what) if trains else Schedule(*what)).run()
    if not outcome.problems:
        shutil.rmtree(place, ignore_errors=True)
    print(outcome, flush=True)
    return outcome


def schedules(
    numbers: range, seed: int, s3: S3, nursery: lives.Nursery, folder: pathlib.Path, has_clock: bool = False
) -> list[Outcome]:
    """Makes schedules, two at a time, and one of four with a training.

    Args:
      numbers: of the schedules.
      seed: of what is random.
      s3: the store.
      nursery: what starts runs.
      folder: for their local files.
      has_clock: whether the nursery has loaded `clock_library`.
    """
    if any(number % 4 == 3 for number in numbers):
        life = nursery.life(folder / "whole", *TRAINING)
        assert life.code() == 0, life.output()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda n: schedule(n, seed, s3, nursery, folder, has_clock, n % 4 == 3), numbers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, default=0, help="the first schedule")
    arguments = parser.parse_args()
    started, folder = time.monotonic(), pathlib.Path(tempfile.mkdtemp(prefix="store-faults-"))
    clock = clock_library(folder)
    with S3() as s3, lives.Nursery(variables=clock) as nursery:
        s3.make_bucket(BUCKET)
        numbers = range(arguments.number, arguments.number + arguments.count)
        outcomes = schedules(numbers, arguments.seed, s3, nursery, folder, bool(clock))
    wrong = [outcome for outcome in outcomes if outcome.problems]
    print(f"{len(outcomes)} schedules in {time.monotonic() - started:.0f} s, {len(wrong)} wrong; {folder}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

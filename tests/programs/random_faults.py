"""Random faults against short runs: `python tests/programs/random_faults.py --count=200 --seed=0`.

Each trial draws a fault or two, strikes a run of 60 steps, or its predictions or export, with them, and asks: did the run end, with a code and a line
that fit; does the next start end as a run that nothing befell, or is it refused with advice that helps; and is
everything outside of the run directory as it was? `--number=N` repeats one trial alone, `--fault=NAME` one fault.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import os
import pathlib
import random
import re
import shutil
import sys
import tempfile
import threading
import time

if __name__ == "__main__":
    TESTS = pathlib.Path(__file__).parents[1]
    sys.path[:0] = [str(TESTS.parent), str(TESTS), str(TESTS / "helpers")]

import directory_faults
import job_faults
import lives
import moment_faults
from fault import NEWEST, Fault
from faults.kill_test import events, records
from sandbox import Sandbox

from looplib.commands.compare import compare

STEPS = 60
COMMON = [
    f"--train_steps={STEPS}", "--checkpoint_interval=20", "--eval_interval=20", "--config.letter=λ",
    "--config.slow_step=0.002", "--config.noisy=False",
]  # fmt: skip
LIMIT = 90.0  # seconds that a start may take
# Each part is drawn as often as it stands here; a job goes alone.
PARTS = ("console", "directory", "directory", "name", "moment", "moment", "surroundings")
JOBS = (*job_faults.JOBS, *[""] * 6)  # "" for the training


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a trial.

    Attributes:
      number: of the trial.
      faults: the names of what struck.
      codes: the exit codes: of the struck start, and of those after it.
      problems: what is wrong with it, sentences; none if all is well.
    """

    number: int
    faults: tuple[str, ...]
    codes: tuple[int, ...]
    problems: tuple[str, ...]


class Patterns:
    """Runs that nothing befell, for trials to compare with and to copy; each is trained when it is first needed.

    Args:
      nursery: what starts them.
      folder: for their directories.
    """

    def __init__(self, nursery: lives.Nursery, folder: pathlib.Path):
        self._nursery, self._folder = nursery, folder
        self._lock = threading.Lock()

    def whole(self) -> pathlib.Path:
        """Returns the directory of a run to the end."""
        return self._trained("whole")

    def stopped(self) -> pathlib.Path:
        """Returns that of a run that stopped in the middle."""
        return self._trained("stopped", f"--train_steps={NEWEST}")

    def done(self, job: job_faults.Job) -> pathlib.Path:
        """Returns that of a run to the end with which a job was done."""
        whole = self.whole()
        with self._lock:
            path = self._folder / job.name
            if not path.exists():
                shutil.copytree(whole, path)
                life = self._nursery.life(path, *COMMON, *job.flags)
                assert life.code() == 0, life.output()
        return path

    def _trained(self, name: str, *flags: str) -> pathlib.Path:
        path = self._folder / name
        with self._lock:
            if not path.exists():
                life = self._nursery.life(path, *COMMON, *flags)
                assert life.code() == 0, life.output()
        return path


def all_faults() -> list[Fault]:
    """All faults that can be made on this machine, of jobs too."""
    directories, moments = directory_faults.FAULTS, [*moment_faults.FAULTS]
    if os.getuid():
        directories = [fault for fault in directories if fault.line != directory_faults.CANNOT_READ]
    else:
        moments.append(moment_faults.DISK)
    return [*directories, *moments, *job_faults.FAULTS]


def draw(chance: random.Random) -> list[Fault]:
    """Draws a fault, or two of different parts that can be made together."""
    faults = all_faults()
    if job := chance.choice(JOBS):
        return [chance.choice([fault for fault in faults if fault.part == job])]
    parts = sorted({chance.choice(PARTS), chance.choice(PARTS)})
    chosen = [chance.choice([fault for fault in faults if fault.part == part]) for part in parts]
    if moment_faults.DISK in chosen and any(fault.stopped for fault in chosen):
        return [moment_faults.DISK]
    return chosen


def last_line(life: lives.Life) -> str:
    """The last line that a life has printed."""
    return (life.output().strip().splitlines() or [""])[-1]


def strike(
    place: Sandbox, faults: list[Fault], nursery: lives.Nursery, flags: tuple[str, ...]
) -> tuple[int, list[str]]:
    """Starts a run and strikes it; returns its exit code, and what is wrong with its end."""
    life = nursery.life(place.model_dir, *COMMON, *flags, *place.flags, **place.order)
    for fault in faults:
        fault.strike(place, life)
    try:
        code = life.code(LIMIT)
    except TimeoutError as error:
        life.code()
        return 999, [str(error)]
    problems, line = [], last_line(life)
    if not any(code in fault.codes for fault in faults):
        problems.append(f"it ended with {code}: {life.output()[-3000:]}")
    fits = any(fault.line and code in fault.codes and re.search(fault.line, line) for fault in faults)
    if code > 0 and place.has_console and not (line.startswith("looplib: ") and fits):
        problems.append(f"the last line does not fit to code {code}: {line!r}")
    for other in place.others:
        code_beside = other.code(LIMIT)
        if code_beside and not (code_beside == 1 and last_line(other).startswith("looplib: error: ")):
            problems.append(f"what ran beside it ended with {code_beside}: {other.output()[-3000:]}")
    return code, problems


def go_on(
    place: Sandbox, faults: list[Fault], nursery: lives.Nursery, job: tuple[str, ...]
) -> tuple[list[int], list[str]]:
    """Starts the run again, until it is done, as the refusals advise; returns the codes, and what is wrong."""
    codes, flags = [], []
    for _ in range(2):
        life = nursery.life(place.run, *COMMON, *job, *flags)
        codes.append(life.code(LIMIT))
        line = last_line(life)
        if codes[-1] == 0:
            return codes, []
        refusing = [fault for fault in faults if fault.refused and re.search(fault.refused, line)]
        if codes[-1] != 1 or not refusing:
            return codes, [f"the next start ended with {codes[-1]}: {life.output()[-3000:]}"]
        flags = [*refusing[0].advice]
        refusing[0].mend(place)
    return codes, [f"it is refused although its advice was followed: {line}"]


def differences(run: pathlib.Path, whole: pathlib.Path, from_step: int) -> list[str]:
    """How the records, events and last checkpoint of a run differ from those of one that nothing befell.

    Args:
      run: the run directory.
      whole: the other's.
      from_step: records up to this step are not compared.
    """
    found = []
    for difference in compare(whole, run).differences:
        step = re.match(r"step (\d+) ", difference.where)
        if not step or int(step[1]) > from_step:
            found.append(difference.text("of the whole run", "of this one"))

    def later(lines: list[dict]) -> list[dict]:
        return sorted((r for r in lines if r["step"] > from_step), key=lambda r: (r["step"], r["split"]))

    if later(records(run)) != later(records(whole)):
        found.append("other lines in metrics.jsonl")
    ours, theirs = (  # those in checkpoints/ are another program's
        [event for event in events(path) if event[2] > from_step and event[0] != "checkpoints"] for path in (run, whole)
    )
    if ours != theirs:
        found.append(f"other events: {sorted(set(ours) ^ set(theirs))[:4]}")
    return found


def trial(
    number: int, seed: int, nursery: lives.Nursery, patterns: Patterns, folder: pathlib.Path, only: str
) -> Outcome:
    """Makes one trial; keeps its folder if something is wrong."""
    chance = random.Random(f"{seed} {number}")
    faults = [fault for fault in all_faults() if fault.name == only][:1] if only else draw(chance)
    place = Sandbox(folder / str(number), chance)
    job = job_faults.JOBS.get(faults[0].part)
    flags = job.flags if job else ()
    stopped = any(fault.stopped for fault in faults)
    if job:
        shutil.copytree(patterns.done(job) if stopped else patterns.whole(), place.run)
    elif stopped or (chance.random() < 0.5 and all(fault.stopped is None for fault in faults)):
        shutil.copytree(patterns.stopped(), place.run)
    with place.at_the_end:
        for fault in faults:
            fault.prepare(place)
        before = place.outside()
        with place.undo:
            code, problems = strike(place, faults, nursery, flags)
        codes, more = go_on(place, faults, nursery, flags)
        after = place.outside()
        problems += more
        if not more and job:
            problems += job.differences(place.run / job.folder, patterns.done(job) / job.folder)
        elif not more:
            lost = any(fault.loses_records for fault in faults)
            problems += differences(place.run, patterns.whole(), NEWEST if lost else 0)
        changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
        if changed:
            problems.append(f"outside of the run directory there are changes: {', '.join(changed)}")
    if not problems:
        shutil.rmtree(place.folder)
    return Outcome(number, tuple(fault.name for fault in faults), (code, *codes), tuple(problems))


def trials(numbers: range, seed: int, folder: pathlib.Path, nursery: lives.Nursery, only: str = "") -> list[Outcome]:
    """Makes trials, two at a time, as many as the smallest machine has cores."""
    folder.chmod(0o711)
    patterns = Patterns(nursery, folder)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        made = [pool.submit(trial, number, seed, nursery, patterns, folder, only) for number in numbers]
        outcomes = []
        for future in made:
            outcomes.append(future.result())
            print(one_line(outcomes[-1]), flush=True)
        return outcomes


def one_line(outcome: Outcome) -> str:
    """Describes the outcome of a trial, with all that is wrong."""
    codes = " then ".join(map(str, outcome.codes))
    return f"{outcome.number}: {' + '.join(outcome.faults)}: {codes}" + "".join(
        f"\n  WRONG: {problem}" for problem in outcome.problems
    )


def table(outcomes: list[Outcome]) -> str:
    """Each fault with its outcomes, as lines of text."""
    rows = collections.defaultdict(collections.Counter)
    for outcome in outcomes:
        for name in outcome.faults:
            codes = " then ".join(map(str, outcome.codes))
            rows[name]["WRONG " * bool(outcome.problems) + codes] += 1
    return "\n".join(
        f"{name:<55} {', '.join(f'{codes} ({times}x)' for codes, times in sorted(rows[name].items()))}"
        for name in sorted(rows)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, default=0, help="the first trial")
    parser.add_argument("--fault", default="", help="strikes with this one only")
    arguments = parser.parse_args()
    started, folder = time.monotonic(), pathlib.Path(tempfile.mkdtemp(prefix="random-faults-"))
    numbers = range(arguments.number, arguments.number + arguments.count)
    with lives.Nursery() as nursery:
        outcomes = trials(numbers, arguments.seed, folder, nursery, arguments.fault)
    print(table(outcomes))
    wrong = [outcome for outcome in outcomes if outcome.problems]
    kept = f"; those are kept in {folder}" if wrong else ""
    print(f"{len(outcomes)} trials in {time.monotonic() - started:.0f} s, {len(wrong)} wrong{kept}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

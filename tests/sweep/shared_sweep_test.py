"""Sweeps of several processes with one storage: whatever dies, joins or leaves, each trial is done once, as by one."""

import collections
import contextlib
import dataclasses
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import threading
import time

import optuna
import pytest
from conftest import more
from paths import PROGRAMS, ROOT
from postgres import PASSWORD, QUOTED, Postgres, missing

from looplib.__main__ import main
from looplib.errors import EXIT_DONE, EXIT_PREEMPTED, EXIT_UNKNOWN
from looplib.sweep import space
from looplib.sweep.study import Study, SweepPlan, parse

STEPS = 10
RATES = ("0.5", "0.25", "0.75", "0.1", "0.9", "0.3")
# A run that costs nothing to start: a checkpoint is an empty file, and the score is the step times the rate.
PROGRAM = """
import fcntl, os, signal, sys, time
given = dict(argument.lstrip("-").split("=", 1) for argument in sys.argv[1:])
saves = given["model_dir"] + "/checkpoints"
os.makedirs(saves, exist_ok=True)
lock = open(given["model_dir"] + "/lock", "w")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit("looplib: error: the run directory is in use (LockedError)")
begun = max((int(name[5:-7]) for name in os.listdir(saves) if name.endswith(".commit")), default=0)
print("from", begun, flush=True)
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
for step in range(begun + 1, int(given["steps"]) + 1):
    time.sleep(float(given.get("pause", 0)))
    with open(given["model_dir"] + "/metrics.jsonl", "a") as file:
        score = step * float(given["rate"]) + int(given.get("seed", 0))
        file.write('{"step": %d, "split": "eval", "score": %r}\\n' % (step, score))
    open(f"{saves}/ckpt-{step}.commit", "w").close()
    if asked:
        sys.exit(75)
print("done", flush=True)
"""


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("psycopg")
    if missing():
        pytest.skip(missing())
    with Postgres() as server:
        yield server


@dataclasses.dataclass
class Fleet:
    """Processes that share a directory and a study.

    Attributes:
      python: what stands for Python.
      base: for the directory, the program and what the processes print.
      url: of the storage.
    """

    python: str
    base: pathlib.Path
    url: str
    machines: list[subprocess.Popen] = dataclasses.field(default_factory=list)

    @property
    def folder(self):
        return self.base / "sweep"

    @property
    def study(self):
        return self.base.name

    def command(self, *options, rates=RATES, pause=0.1, folder=None, shared=True):
        """The arguments of `python -m looplib`."""
        program = self.base / "program.py"
        program.write_text(PROGRAM)
        own = [f"--storage={self.url}", f"--study={self.study}"] if shared else []
        return [
            "sweep", f"--dir={folder or self.folder}", "--metric=eval/score", "--goal=max", *own, *options, "--",
            sys.executable, "-IS", str(program), f"--steps={STEPS}", f"--pause={pause}", f"--rate={','.join(rates)}",
        ]  # fmt: skip

    def start(self, *options, python=None, **order):
        """Starts a process; returns it."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with open(self.base / f"machine-{len(self.machines)}", "wb") as log:
            arguments = [python or self.python, PROGRAMS / "impatient.py", *self.command(*options, **order)]
            self.machines.append(subprocess.Popen(arguments, env=environment, stdout=log, stderr=log))
        return self.machines[-1]

    def output(self, number=-1):
        """What a process has printed."""
        return (self.base / f"machine-{range(len(self.machines))[number]}").read_text()

    def lives(self, run):
        """The steps from which the starts of a run have gone on, and how often it came to its end."""
        lines = (self.folder / f"{run}.log").read_text().splitlines()
        return [int(line[5:]) for line in lines if line.startswith("from ")], lines.count("done")

    def saved(self, number):
        """The last checkpoint of a trial."""
        return max((int(path.name[5:-7]) for path in self.folder.glob(f"trial-{number:04}/**/*.commit")), default=0)

    def running(self):
        """The trials that have begun for good, and have not come to their end."""
        begun = [number for number in range(len(RATES)) if self.saved(number) > 2]
        return [number for number in begun if not self.lives(f"trial-{number:04}")[1]]

    def records(self):
        """Optuna's records of the trials."""
        return optuna.load_study(study_name=self.study, storage=self.url).get_trials()

    def trials(self):
        """{number: state} of the newest record of each trial."""
        return {one.user_attrs["trial"]: one.state.name for one in self.records()}

    def whole(self, *options, **order):
        """What results.csv has of a sweep without --storage."""
        assert (
            main(self.command(*options, folder=self.base / "whole", shared=False, **{"pause": 0, **order})) == EXIT_DONE
        )
        return (self.base / "whole" / "results.csv").read_bytes()

    def results(self):
        return (self.folder / "results.csv").read_bytes()

    def kill(self, machine):
        """Kills a process; what stands for Python dies before its process, whose runs die with it."""
        machine.kill()
        machine.wait()


@pytest.fixture
def fleet(python, tmp_path, request):
    is_server = getattr(request, "param", "sqlite") == "postgresql"
    url = request.getfixturevalue("server").url() if is_server else f"sqlite:///{tmp_path}/study.db"
    fleet = Fleet(python, tmp_path, url)
    yield fleet
    for machine in fleet.machines:
        if machine.poll() is None:
            fleet.kill(machine)


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


@pytest.mark.parametrize("fleet", ["sqlite", *more(["postgresql"])], indirect=True)
def test_a_process_that_is_killed_and_one_that_joins_late_neither_lose_nor_repeat_a_trial(fleet):
    first, second = fleet.start(pause=0.3), fleet.start(pause=0.3)
    until(lambda: len(fleet.running()) == 2)
    fleet.kill(first)
    late = fleet.start(pause=0.3)
    assert [machine.wait(60) for machine in (second, late)] == [EXIT_DONE] * 2, fleet.output(1) + fleet.output()
    assert fleet.trials() == dict.fromkeys(range(len(RATES)), "COMPLETE")
    lives = [fleet.lives(f"trial-{number:04}") for number in range(len(RATES))]
    assert [done for _, done in lives] == [1] * len(RATES)
    (taken_over,) = [starts for starts, _ in lives if starts != [0]]
    assert len(taken_over) == 2 and 2 < taken_over[1] < STEPS  # it went on from its checkpoint
    done = [re.findall(r"^(trial-\d+): eval/score", fleet.output(number), re.MULTILINE) for number in range(3)]
    assert done[1] and done[2] and sorted(sum(done, [])) == [f"trial-{number:04}" for number in range(len(RATES))]
    assert fleet.results() == fleet.whole()
    assert "best: " in fleet.output(1) and "best: " in fleet.output(2)


@pytest.mark.slow
@pytest.mark.parametrize("search", ["grid", "random", "tpe"])
@pytest.mark.parametrize("fleet", ["sqlite", "postgresql"], indirect=True)
def test_processes_killed_at_any_moment_end_with_the_results_of_one(fleet, search):
    moments, seeds = random.Random(search), 2
    points = ["--seeds=2", f"--search={search}", *([] if search == "grid" else ["--trials=7"])]
    rates = RATES if search == "grid" else ("0.1..0.9",)
    for _ in range(8):
        alive = [machine for machine in fleet.machines if machine.poll() is None]
        for _ in range(moments.choice((1, 2)) if len(alive) < 2 else 0):
            fleet.start(*points, "--parallel=2", rates=rates, pause=0.1)
        time.sleep(moments.uniform(0.5, 3.0))
        fleet.kill(moments.choice(fleet.machines))
    last = fleet.start(*points, rates=rates, pause=0.1)
    assert last.wait(120) == EXIT_DONE, fleet.output()
    count = 7 if search != "grid" else len(RATES)
    assert fleet.trials() == dict.fromkeys(range(count), "COMPLETE")
    if search != "tpe":
        assert fleet.results() == fleet.whole(*points, rates=rates)
    for number in range(count):
        for seed in range(seeds):
            starts, done = fleet.lives(f"trial-{number:04}/seed-{seed}")
            # A machine may be killed after a run has ended and before the database has that: then nothing is left to do.
            assert starts == sorted(starts) and done == 1 + starts.count(STEPS)


@pytest.mark.slow
def test_a_process_that_gets_a_signal_hands_its_trials_to_the_others_at_once(fleet):
    first = fleet.start("--parallel=2")
    until(lambda: fleet.saved(0) > 1 and fleet.saved(1) > 1)
    first.send_signal(signal.SIGTERM)
    assert first.wait(30) == EXIT_PREEMPTED and "best: " not in fleet.output()
    assert not (fleet.folder / "results.csv").exists()
    assert fleet.trials() == {0: "WAITING", 1: "WAITING"}
    kept = [fleet.saved(number) for number in range(2)]
    assert fleet.start("--parallel=2").wait(60) == EXIT_DONE, fleet.output()
    assert "that were begun: 2" in fleet.output()
    assert [fleet.lives(f"trial-{number:04}") for number in range(2)] == [([0, step], 1) for step in kept]
    assert fleet.results() == fleet.whole()


@pytest.mark.slow
def test_a_process_that_was_frozen_gives_up_what_another_one_has_taken(fleet):
    first = fleet.start("--parallel=2", pause=0.3, python=sys.executable)
    until(lambda: fleet.saved(0) > 1 and fleet.saved(1) > 1)
    frozen = processes_of(fleet)
    for number in frozen:
        os.kill(number, signal.SIGSTOP)
    second = fleet.start(pause=0.3)
    until(lambda: [one.state.name for one in fleet.records()].count("FAIL") == 2)
    for number in frozen:
        os.kill(number, signal.SIGCONT)
    assert [machine.wait(120) for machine in (first, second)] == [EXIT_DONE] * 2, fleet.output(0) + fleet.output(1)
    assert fleet.output(0).count("another process has taken the trial") == 2
    assert fleet.trials() == dict.fromkeys(range(len(RATES)), "COMPLETE")
    assert [fleet.lives(f"trial-{number:04}")[1] for number in range(len(RATES))] == [1] * len(RATES)
    assert fleet.results() == fleet.whole()


def processes_of(fleet):
    """The numbers of the processes that have the directory in their command line: sweeps and their runs."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(fleet.folder) in path.read_text() and path.parent.name != str(os.getpid()):
                found.append(int(path.parent.name))
    return sorted(found)


@pytest.mark.slow
@pytest.mark.parametrize("fleet", ["postgresql"], indirect=True)
def test_a_database_that_restarts_ends_no_process_and_one_that_stays_away_ends_them_with_all_saved(fleet, server):
    machines = [fleet.start(pause=0.3) for _ in range(2)]
    until(lambda: fleet.saved(0) > 1 and fleet.saved(1) > 1)
    server.stop()
    time.sleep(1.0)
    server.start()
    until(lambda: len(fleet.trials()) > 2)
    assert [machine.poll() for machine in machines] == [None] * 2, fleet.output(0) + fleet.output(1)
    server.stop()
    try:
        for number, machine in enumerate(machines):
            assert machine.wait(60) == EXIT_UNKNOWN
            last = fleet.output(number).splitlines()[-1]
            assert "cannot be read or written" in last and "no trial that has ended is lost" in last, last
            assert "Traceback" not in fleet.output(number)
    finally:
        server.start()
    again = fleet.start(pause=0.3)
    assert again.wait(120) == EXIT_DONE, fleet.output()
    lives = [fleet.lives(f"trial-{number:04}") for number in range(len(RATES))]
    # A run may have ended while nobody could note that: then its second start finds nothing left to do.
    assert [done - starts.count(STEPS) for starts, done in lives] == [1] * len(RATES)
    assert fleet.results() == fleet.whole()


@pytest.mark.slow
def test_many_processes_at_once_make_each_trial_once_and_draw_the_points_of_one(tmp_path):
    command = ["train", "--a=1..4", "--b=x,y,z", "--c=0.1..0.5:0.1"]  # 60 points
    plan = SweepPlan(command=command, search="random", metric="eval/score", goal="max", prune="none", seeds=0)
    parameters, limit = space.parse(command)[1], 50
    for name in ("shared", "alone"):
        (tmp_path / name).mkdir()
    database = parse(f"sqlite:///{tmp_path}/study.db", None)
    made, errors = collections.Counter(), []

    def machine():
        try:
            study = Study(str(tmp_path / "shared"), plan, parameters, limit, database)
            while not study.is_over:
                if trial := study.next():
                    made[trial.number] += 1
                    with study.alone():
                        study.note(trial, 0, float(trial.number))
                else:
                    time.sleep(0.05)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=machine) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors
    assert made == dict.fromkeys(range(limit), 1)
    alone = Study(str(tmp_path / "alone"), plan, parameters, limit)
    found = Study(str(tmp_path / "shared"), plan, parameters, limit, database)
    assert [trial.params for trial in found.trials()] == [alone.next().params for _ in range(limit)]


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("moment", ["_show_life", "_queue", "suggest", "ask", "tell"])
def test_a_process_that_ends_in_the_middle_of_taking_or_handing_over_a_trial_loses_none(tmp_path, moment, monkeypatch):
    """The call at which it ends has done its work, and nothing after it was done."""
    command = ["train", "--a=1,2"]
    plan = SweepPlan(command=command, search="grid", metric="eval/score", goal="max", prune="none", seeds=0)
    parameters, database = space.parse(command)[1], parse(f"sqlite:///{tmp_path}/study.db", None)
    monkeypatch.setattr("looplib.sweep.study.GRACE", 1)

    def study():
        return Study(str(tmp_path), plan, parameters, None, database)

    class Ended(BaseException):
        pass

    def ends_after(call):
        def end(*values, **named):
            call(*values, **named)
            raise Ended

        return end

    begun = study()
    assert begun.next().number == 0
    time.sleep(2.2)  # it is stale now
    of = {"ask": optuna.Study, "tell": optuna.Study, "suggest": space.Parameter}.get(moment, Study)
    with monkeypatch.context() as patch, contextlib.suppress(Ended):
        patch.setattr(of, moment, ends_after(getattr(of, moment)))
        study().next()
    time.sleep(2.2)
    last, found = study(), []
    for number in range(2):
        trial = last.next()
        with last.alone():
            last.note(trial, 0, float(number))
        found.append(trial.params["--a"])
    assert last.next() is None and last.is_over
    assert sorted(found) == ["1", "2"] and [one.state.name for one in last.trials()] == ["COMPLETE"] * 2


def test_a_process_that_lives_keeps_its_trials_however_long_they_take(tmp_path, monkeypatch):
    command = ["train", "--a=1,2"]
    plan = SweepPlan(command=command, search="grid", metric="eval/score", goal="max", prune="none", seeds=0)
    parameters, database = space.parse(command)[1], parse(f"sqlite:///{tmp_path}/study.db", None)
    monkeypatch.setattr("looplib.sweep.study.GRACE", 2)
    monkeypatch.setattr("looplib.sweep.study.BEAT", 0.3)
    first, second = (Study(str(tmp_path), plan, parameters, None, database) for _ in range(2))
    trial, end = first.next(), time.monotonic() + 4.5
    while time.monotonic() < end:
        assert first.beat() == set()
        time.sleep(0.1)
    assert second.next().number == 1 and second.next() is None and not second.is_over and first.has(trial)
    first.hand_back()
    assert second.next() is None  # it looks again in a second
    time.sleep(1.1)
    assert second.next().params == trial.params and not first.has(trial)


@pytest.mark.slow
@pytest.mark.parametrize("fleet", ["postgresql"], indirect=True)
def test_a_password_in_the_environment_is_enough_and_none_is_shown(fleet, monkeypatch):
    assert main(fleet.command(pause=0)) == EXIT_DONE
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    url = fleet.url.replace(f":{QUOTED}@", "@")
    assert main(fleet.command(f"--storage={url}", pause=0)) == EXIT_DONE
    assert fleet.results() == fleet.whole()
    written = [path.read_bytes() for path in fleet.base.rglob("*") if path.is_file()]
    assert not [text for text in written if PASSWORD.encode() in text or QUOTED.encode() in text]


# Refusals: each a sentence, code 2, no trial started and no password shown.

SECRET = "never-to-be-shown"
REFUSED = {
    "password": (lambda server: server.url(password=SECRET), "password authentication failed"),
    "port": (lambda server: server.url(password=SECRET, port=1), "127.0.0.1:1/postgres cannot be used ("),
    "database": (lambda server: server.url(database="none"), 'database "none" does not exist'),
    "no driver": (lambda server: f"mysql+mysqldb://me:{SECRET}@127.0.0.1/x", "needs a driver that cannot be imported"),
    "dialect": (lambda server: f"redis://:{SECRET}@127.0.0.1/0", "no URL of a database that SQLAlchemy knows"),
    "no URL": (lambda server: f"me:{SECRET}@127.0.0.1", "no URL of a database that SQLAlchemy knows"),
    "port of text": (lambda server: f"postgresql+psycopg://me:x@host:{SECRET}/x", "no URL of a database"),
    "slash": (lambda server: f"postgresql+psycopg://me:'{SECRET}/x@127.0.0.1:1/x", "127.0.0.1:1/x cannot be used ("),
    "option": (lambda server: f"{server.url()}?password={SECRET}&nothing=1", "cannot be used ("),
}  # fmt: skip


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("case", REFUSED)
def test_a_database_that_cannot_be_used_is_a_sentence_before_any_trial(case, server, tmp_path, capsys):
    make, sentence = REFUSED[case]
    command = ["sweep", f"--dir={tmp_path / 'sweep'}", f"--storage={make(server)}", "--", sys.executable, "--a=1,2"]
    started = time.monotonic()
    assert main(command) == EXIT_UNKNOWN
    assert time.monotonic() - started < 10
    error = capsys.readouterr().err
    assert sentence in error and SECRET not in error and PASSWORD not in error and QUOTED not in error
    assert error.startswith("looplib: error: ") and not list((tmp_path / "sweep").glob("*"))


@pytest.mark.slow
def test_processes_that_do_not_fit_are_refused(fleet, capsys):
    def refuse(sentence, *options, **order):
        assert main(fleet.command(*options, **order)) == EXIT_UNKNOWN
        assert sentence in capsys.readouterr().err

    assert main(fleet.command(pause=0)) == EXIT_DONE
    refuse("holds a sweep whose seeds is 0, not 2; start it as it was, or use another --study", "--seeds=2", pause=0)
    refuse("has its runs in another directory than", pause=0, folder=fleet.base / "elsewhere")
    refuse("sweep.shared is of a sweep with --storage; start it as it was", pause=0, shared=False)
    refuse("has runs of another sweep, of which the study 'other' in", "--study=other", pause=0)
    (fleet.folder / "sweep.shared").write_text("x" * 32)
    refuse("has its runs in another directory than", pause=0)
    assert main(fleet.command(folder=fleet.base / "alone", shared=False, pause=0)) == EXIT_DONE
    refuse("sweep.db is of a sweep without --storage; start it as it was", pause=0, folder=fleet.base / "alone")
    refuse("--study is the name of a sweep in --storage", "--study=x", shared=False)
    refuse("--study is 'a\\x1bb'", "--study=a\x1bb")


@pytest.mark.slow
def test_a_study_of_another_program_is_left_alone(fleet, capsys):
    study = optuna.create_study(storage=fleet.url, study_name=fleet.study)
    study.tell(study.ask(), 1.0)
    assert main(fleet.command()) == EXIT_UNKNOWN
    assert "it has trials, and no sweep has made it" in capsys.readouterr().err
    assert not study.user_attrs and not list(fleet.folder.glob("trial-*"))

"""Sweeps in an object store: each start may be on another machine, and the results are those of an undisturbed sweep."""

import csv
import io
import json
import random
import signal
import sqlite3
import statistics
import time

import pytest
import swept
from clouds import wait_for
from copied import line, score

from looplib.errors import EXIT_DONE, EXIT_PREEMPTED, EXIT_UNKNOWN

RATES = (0.5, 0.25, 0.75)
STEPS = 12
COPIED = ("-m", "copied", f"--steps={STEPS}")  # cheap trials, without a model


@pytest.fixture
def sweeps(cloud, python):
    return Sweeps(cloud, python)


class Sweeps:
    """Sweeps on machines of a cloud."""

    def __init__(self, cloud, python):
        self.cloud, self._python = cloud, python

    def start(self, *options, of=COPIED, rates=RATES, machine="m", environment=(), place=None):
        """Starts a sweep in the store, or at a place; returns its `Life`."""
        flag = f"{'--rate' if of[1] == 'copied' else '--config.rate'}={','.join(map(str, rates))}"
        return self.cloud.tool(
            "sweep", f"--dir={place or self.cloud.url('sweep')}", "--metric=eval/score", "--goal=max", *options, "--",
            self._python, *of, flag, machine=machine, environment={"OMP_NUM_THREADS": "1", **dict(environment)},
        )  # fmt: skip

    def steps(self):
        """The steps of the checkpoints in the store, by run."""
        found = {}
        for name in self.cloud.names("sweep"):
            run, _, rest = name.partition("/checkpoints/")
            if rest.endswith(".commit"):
                found.setdefault(run, []).append(int(rest.removeprefix("ckpt-").removesuffix(".commit")))
        return found

    def database(self):
        """Opens a copy of the database in the store."""
        path = self.cloud.folder / "found.db"
        path.write_bytes(self.cloud.read("sweep.db", "sweep"))
        return sqlite3.connect(path)

    def ended(self):
        """The numbers of the trials that have ended, as the database in the store has them."""
        if "sweep.db" not in self.cloud.names("sweep"):
            return []
        database = self.database()
        found = [
            number for number, state in database.execute("SELECT number, state FROM trials") if state == "COMPLETE"
        ]
        database.close()
        return found

    def table(self):
        return rows_of(self.cloud.read("results.csv", "sweep").decode())

    def same_as(self, whole):
        """Asserts that the sweep has the results of a local one, and each run of it what that one's has."""
        assert self.table() == rows_of((whole / "results.csv").read_text())
        for run in whole.glob("trial-*/metrics.jsonl"):
            assert without_times(self.cloud.read(f"{run.parent.name}/metrics.jsonl", "sweep")) == without_times(
                run.read_bytes()
            )


def rows_of(text):
    return list(csv.DictReader(io.StringIO(text, newline="")))


def without_times(text):
    records = map(json.loads, text.splitlines())
    return [{key: value for key, value in record.items() if key != "steps_per_second"} for record in records]


def starts_of(log):
    """The step from which each start of a run of `copied` has gone on."""
    return [json.loads(one)["start"] for one in log.decode().splitlines() if one.startswith("{") and '"start"' in one]


def test_a_sweep_killed_with_its_machine_continues_on_another_one_and_repeats_no_trial(sweeps):
    cloud, of = sweeps.cloud, (*COPIED, "--pause=0.1")
    first = sweeps.start(of=of, machine="one")
    wait_for(lambda: sweeps.ended() == [0] and max(sweeps.steps().get("trial-0001", [0])) > 3)
    first.kill()
    first.code()
    cloud.lose("one")
    kept, before = max(sweeps.steps()["trial-0001"]), len(cloud.proxy.requests)
    second = sweeps.start(of=of, machine="two")
    whole = sweeps.start(place=cloud.folder / "whole", machine="three")
    for life in (second, whole):
        assert life.code() == EXIT_DONE, life.output()
    assert "trials that have ended: 1; that resume: 1" in second.output()
    sweeps.same_as(cloud.folder / "whole")
    assert [float(row["eval/score"]) for row in sweeps.table()] == sorted(
        (STEPS * rate for rate in RATES), reverse=True
    )
    assert starts_of(cloud.read("trial-0001.log", "sweep")) == [0, kept]  # the log goes on too
    of_the_first = [request for request in cloud.proxy.requests[before:] if "/trial-0000/" in request.path]
    assert not [request for request in of_the_first if request.method == "PUT" or ".commit" in request.path]
    assert {"sweep.db", "results.csv", "results.txt", "results.png", "trial-0002.log"} <= cloud.names("sweep").keys()
    assert cloud.read("results.png", "sweep") == (cloud.folder / "whole" / "results.png").read_bytes()
    assert f"are in {cloud.url('sweep')}" in second.output() and "Traceback" not in second.output()
    for number, (rate,) in enumerate(sweeps.database().execute("SELECT param_value FROM trial_params")):
        lines = [part for step in range(1, STEPS + 1) for part in (line(step, 0), score(step, RATES[int(rate)]))]
        assert cloud.read(f"trial-{number:04}/metrics.jsonl", "sweep").decode() == "".join(lines)


@pytest.mark.slow
def test_a_second_sweep_is_refused_on_another_machine_and_on_this_one(sweeps):
    first = sweeps.start(of=(*COPIED, "--pause=1"), machine="one")
    wait_for(lambda: sweeps.steps())
    for machine in ("one", "two"):
        second = sweeps.start(machine=machine)
        assert second.code() == EXIT_UNKNOWN, second.output()
        assert "in use by process" in second.output() and "use another --dir" in second.output()
        assert "Traceback" not in second.output()
    assert not first.ended()
    first.end()


@pytest.mark.slow(most=1)
@pytest.mark.parametrize("search", ["grid", "tpe"])
def test_a_sweep_killed_at_any_moment_on_machines_that_vanish_ends_as_one_that_was_not(sweeps, search):
    cloud, moments = sweeps.cloud, random.Random(7)
    options = [f"--search={search}", "--trials=5", "--seeds=2", *(["--parallel=2"] if search == "grid" else [])]
    rates = (*RATES, 0.1, 0.2) if search == "grid" else ("0.1..0.9",)
    ended = set()
    for number in range(5):
        life = sweeps.start(*options, of=(*COPIED, "--pause=0.05"), rates=rates, machine=f"m{number}")
        life.ended(moments.uniform(1.0, 4.0))
        life.kill()
        life.code()
        cloud.lose(f"m{number}")
        assert ended <= set(now := sweeps.ended())  # no end is forgotten
        ended = set(now)
    last = sweeps.start(*options, of=COPIED + ("--pause=0.05",), rates=rates, machine="last")
    whole = sweeps.start(*options, rates=rates, place=cloud.folder / "whole", machine="other")
    for life in (last, whole):
        assert life.code() == EXIT_DONE, life.output()
    sweeps.same_as(cloud.folder / "whole")
    assert len(sweeps.table()) == 5 and {row["state"] for row in sweeps.table()} == {"done"}


@pytest.mark.slow
def test_a_sweep_of_trainings_continues_on_another_machine_and_tools_read_it(sweeps):
    cloud, of, rates = (
        sweeps.cloud,
        ("-m", "swept", "--config.pause=0.2", "--config.noise=0.01"),
        ("0.05", "0.1", "0.4"),
    )
    first = sweeps.start("--parallel=2", of=of, rates=rates, machine="one")
    wait_for(lambda: len(sweeps.steps()) == 2, 60)
    first.kill()
    first.code()
    cloud.lose("one")
    second = sweeps.start("--parallel=2", of=of, rates=rates, machine="two")
    whole = sweeps.start("--parallel=2", of=of, rates=rates, place=cloud.folder / "whole", machine="three")
    for life in (second, whole):
        assert life.code() == EXIT_DONE, life.output()
    sweeps.same_as(cloud.folder / "whole")
    starts = [json.loads(cloud.read(f"trial-000{number}/run.json", "sweep"))["starts"] for number in range(3)]
    assert all(of_one[-1]["restored_from"] for of_one in starts[:2])  # runs of the first machine were continued
    page = cloud.folder / "page.html"
    for tool in (["status", cloud.url("sweep")], ["report", cloud.url("sweep"), f"--output={page}"]):
        assert (life := cloud.tool(*tool, machine="four")).code() == 0, life.output()
        assert life.output().count(" done ") == 3 or "3 runs" in life.output()
    again = cloud.folder / "again"
    for tool in (
        ["rerun", f"{cloud.url('sweep')}/trial-0000", f"--to={again}"],
        ["diff", f"{cloud.url('sweep')}/trial-0000", again],
    ):
        assert (life := cloud.tool(*tool, machine="four")).code() == 0, life.output()


@pytest.mark.slow
def test_a_signal_saves_the_runs_and_the_same_command_continues_elsewhere(sweeps):
    of = ("-m", "swept", "--config.pause=0.2")
    first = sweeps.start("--parallel=2", of=of, rates=("0.1", "0.2"), machine="one")
    wait_for(lambda: len(sweeps.steps()) == 2, 60)
    first.kill(signal.SIGTERM)
    assert first.code() == EXIT_PREEMPTED, first.output()
    kept = {run: max(steps) for run, steps in sweeps.steps().items()}
    sweeps.cloud.lose("one")
    second = sweeps.start("--parallel=2", of=of, rates=("0.1", "0.2"), machine="two")
    assert second.code() == EXIT_DONE and "that resume: 2" in second.output(), second.output()
    for run, step in kept.items():
        start = json.loads(sweeps.cloud.read(f"{run}/run.json", "sweep"))["starts"][-1]
        assert start["restored_from"].endswith(f"ckpt-{step}")
    for row in sweeps.table():
        assert float(row["eval/score"]) == pytest.approx(swept.score(float(row["config.rate"]), 40), rel=1e-5)


@pytest.mark.slow
def test_a_store_that_is_down_stops_no_run_and_fails_no_trial(sweeps):
    proxy, seconds = sweeps.cloud.proxy, 30.0
    steps = int(10 * seconds)
    of = ("-m", "copied", f"--steps={steps}", "--pause=0.1")
    life = sweeps.start("--parallel=2", of=of, rates=(*RATES, 0.1))
    wait_for(lambda: len(sweeps.steps()) == 2)
    proxy.stop()
    time.sleep(seconds)
    logs = list(sweeps.cloud.folder.glob("m/sweeps/*/sweep/trial-*.log"))
    assert min(log.read_text().count('"step"') for log in logs) > 0.7 * steps  # the runs went on
    proxy.start()
    assert life.code(300) == EXIT_DONE, life.output()
    assert {row["state"] for row in sweeps.table()} == {"done"} and len(sweeps.table()) == 4
    assert sorted(float(row["eval/score"]) for row in sweeps.table()) == sorted(steps * rate for rate in (*RATES, 0.1))


@pytest.mark.slow
def test_the_end_of_a_sweep_waits_for_the_store(sweeps):
    proxy, begun = sweeps.cloud.proxy, []
    life = sweeps.start(rates=RATES[:1] + RATES[1:2])

    def fails(request):
        """From when the last run has ended."""
        begun.extend([request.time] if "/results" in request.path and request.method == "PUT" else [])
        return bool(begun)

    proxy.faults.share, proxy.faults.only = 1.0, fails
    wait_for(lambda: begun)
    assert not life.ended(15.0)
    proxy.clear()
    assert life.code(60) == EXIT_DONE, life.output()
    assert len(sweeps.table()) == 2 and sweeps.ended() == [0, 1]


@pytest.mark.slow
def test_a_run_that_the_store_refuses_is_no_failed_trial(sweeps):
    faults = sweeps.cloud.proxy.faults
    faults.share, faults.status = 1.0, 403
    faults.only = lambda request: "/trial-0001/" in request.path
    life = sweeps.start()
    assert life.code() == EXIT_UNKNOWN, life.output()
    assert "no trial that has ended is lost" in life.output() and "Traceback" not in life.output()
    assert sweeps.ended() == [0]
    sweeps.cloud.proxy.clear()
    again = sweeps.start()
    assert again.code() == EXIT_DONE, again.output()
    assert {row["state"] for row in sweeps.table()} == {"done"} and len(sweeps.table()) == 3


@pytest.mark.slow
def test_a_sweep_that_has_lost_its_lease_ends_and_writes_nothing_more(sweeps, s3):
    cloud = sweeps.cloud
    first = sweeps.start(of=(*COPIED, "--pause=0.3"), machine="one")
    wait_for(lambda: sweeps.steps())
    cloud.proxy.stop()
    for name in [
        name for name in cloud.names("sweep") if "/0" in name and name.startswith((".sweep", "trial-0000/.lease"))
    ]:
        cloud.write(name, json.dumps({**json.loads(cloud.read(name, "sweep")), "host": "elsewhere"}).encode(), "sweep")
    second = sweeps.start(of=(*COPIED, "--pause=0.3"), machine="two", environment={"AWS_ENDPOINT_URL": s3.url})
    wait_for(lambda: len(sweeps.ended()) == 1, 60)
    started = time.monotonic()
    cloud.proxy.start()
    assert first.code() == EXIT_UNKNOWN, first.output()
    assert "another process has taken the directory of a sweep" in first.output()
    assert second.code() == EXIT_DONE, second.output()
    assert {row["state"] for row in sweeps.table()} == {"done"} and len(sweeps.table()) == 3
    written = [one for one in cloud.proxy.requests if one.method in ("PUT", "DELETE") and one.time > started]
    assert not [one for one in written if ".lease" not in one.path and ".sweep" not in one.path]


@pytest.mark.slow
def test_a_run_that_saves_nothing_new_on_another_machine_is_given_up_after_as_many_starts(sweeps):
    cloud, of = sweeps.cloud, (*COPIED, "--dies=5", "--pause=1")
    first = sweeps.start(of=of, rates=(0.5, 0.25), machine="one")
    wait_for(lambda: max(sweeps.steps().get("trial-0000", [0])) >= 3)
    first.kill()
    first.code()
    cloud.lose("one")
    kept = max(sweeps.steps()["trial-0000"])
    second = sweeps.start(of=of, rates=(0.5, 0.25), machine="two")
    second.code()
    starts = starts_of(cloud.read("trial-0000.log", "sweep"))
    assert starts == [0, *[3] * (kept == 3), *[4] * 5]


@pytest.mark.slow
def test_a_sweep_without_its_database_continues_only_what_has_the_same_settings(sweeps):
    of, cloud = ("-m", "swept", "--train_steps=10"), sweeps.cloud
    assert sweeps.start(of=of, rates=("0.1", "0.2"), machine="one").code() == EXIT_DONE
    cloud.delete("sweep.db", "sweep")
    other = sweeps.start(of=of, rates=("0.3", "0.4"), machine="two")
    assert other.code() == EXIT_UNKNOWN and "has a run of an earlier sweep" in other.output(), other.output()
    cloud.delete("sweep.db", "sweep")
    same = sweeps.start(of=of, rates=("0.1", "0.2"), machine="three")
    assert same.code() == EXIT_DONE, same.output()
    assert [len(json.loads(cloud.read(f"trial-000{n}/run.json", "sweep"))["starts"]) for n in range(2)] == [2, 2]


@pytest.mark.slow
def test_a_damaged_database_in_the_store_is_told_and_stays_as_it_is(sweeps):
    cloud = sweeps.cloud
    assert sweeps.start(rates=RATES[:1] + RATES[1:2], machine="one").code() == EXIT_DONE
    for damaged in (b"no database", cloud.read("sweep.db", "sweep")[:5000]):
        cloud.write("sweep.db", damaged, "sweep")
        life = sweeps.start(rates=RATES[:1] + RATES[1:2], machine="two")
        assert life.code() == EXIT_UNKNOWN and "sweep.db is damaged" in life.output(), life.output()
        assert "Traceback" not in life.output() and cloud.read("sweep.db", "sweep") == damaged
        cloud.lose("two")


@pytest.mark.slow
def test_a_hopeless_run_is_stopped_on_another_machine_too(sweeps):
    """The first five trials run to their end, the later ones only if they are not below the median of those that do."""
    cloud, rates = sweeps.cloud, (0.1, 0.2, 0.3, 0.4, 0.55, 0.6, 0.7, 0.8)
    of = ("-m", "copied", "--steps=6", "--pause=0.3")
    first = sweeps.start("--prune=median", of=of, rates=rates, machine="one")
    wait_for(lambda: len(sweeps.ended()) == 5, 60)
    first.kill()
    first.code()
    cloud.lose("one")
    second = sweeps.start("--prune=median", of=of, rates=rates, machine="two")
    assert second.code() == EXIT_DONE, second.output()
    rows = sorted(sweeps.table(), key=lambda row: row["trial"])
    for number, row in enumerate(rows):
        ended = [float(one["rate"]) for one in rows[:number] if one["state"] == "done"]
        hopeless = number >= 5 and float(row["rate"]) < statistics.median(ended)
        assert row["state"] == ("stopped" if hopeless else "done"), (number, rows)
    assert len(rows) == 8 and any(row["state"] == "stopped" for row in rows)  # else the order of the grid is another

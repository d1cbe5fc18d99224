"""Workers that die, one after the other: how many are started next, when there are more again, and when none are.

The commands are small scripts; `tests/workers/elastic_workers_test.py` has trainings.
"""

import signal

import pytest
from conftest import more
from local_workers_test import SAVES, Launched

from looplib import __main__ as tools
from looplib.processes.restarts import RestartBudget, WorkerNumbers

# The first worker notes each start: how many there are, where it is, and what `run.json` has about the start. One that
# dies waits for the others, which end as looplib's do: with code 1, as soon as they notice.
NOTED = """
from looplib.base import orders
count = len(me.workers)
here = [path.with_name(f"{i}.{me.job_id}") for i in range(count)]
dead = path.with_name(f"dead.{me.job_id}")
if index == 0:
    with path.with_name("starts").open("a") as file:
        print(count, me.workers[0], orders.current().note, file=file)
here[index].write_text("")
def die():
    while not all(place.exists() for place in here):
        time.sleep(0.02)
    dead.write_text("")
    os.kill(os.getpid(), signal.SIGKILL)
def stay(seconds=60):
    end = time.time() + seconds
    while time.time() < end and not dead.exists():
        time.sleep(0.02)
    sys.exit(1)
"""


class Elastic(Launched):
    """A launch of a script that notes its starts."""

    def __init__(self, folder, script, **settings):
        super().__init__(folder, NOTED + script, **{"workers": 4, "min_workers": 2, "grow_after": 1000.0, **settings})

    def starts(self):
        """(workers, the address of the first, what is noted) of each start."""
        lines = (self.folder / "starts").read_text().splitlines()
        return [(int(count), *rest) for count, *rest in (line.split(" ", 2) for line in lines)]

    def lives(self, name):
        return super().lives(name) if name.startswith("worker") else []


@pytest.mark.slow
def test_after_a_death_those_that_are_left_start_again_and_later_all(tmp_path):
    script = "if lives == 0:\n    die() if index == 1 else stay()\nif count == 2:\n    time.sleep(1000)\n"
    launched = Elastic(tmp_path, SAVES + script, workers=3, grow_after=5.0)  # time to note the second start
    code, _, err = launched.end()
    assert code == 0, err
    counts, places, notes = zip(*launched.starts())
    assert counts == (3, 2, 3)
    assert notes == (
        "3 workers",
        "2 of 3 workers because worker 1 was ended by SIGKILL",
        "3 workers after a start of 2",
    )
    assert len(set(places)) == 3  # an old worker that hangs cannot take part
    assert err == [
        "looplib: worker 1 was ended by SIGKILL; worker 0, worker 2 exited with code 1",
        "looplib: restarting 2 of 3 workers in 0.2 s from the newest checkpoint (restart 1 of 10)",
        "looplib: there is room for more workers: these save and end first",
    ]


@pytest.mark.slow
def test_a_number_that_cannot_share_the_global_batch_is_passed_over(tmp_path):
    script = """
if index == 0:
    orders.tell_batch(12)
if 12 % count:
    sys.exit(75)
if count == 4:
    die() if index == 1 else stay()
"""
    launched = Elastic(tmp_path, script, workers=5, min_workers=1)
    code, _, err = launched.end()
    assert code == 0, err
    assert [count for count, *_ in launched.starts()] == [5, 4, 4, 3]  # of 5 places, first one is empty, and then two
    assert [line for line in err if "12 examples" in line] == [
        "looplib: a global batch of 12 examples can be divided among 1 or 2 or 3 or 4 workers (of 1 to 5)"
    ]


@pytest.mark.slow
def test_where_no_number_can_share_the_global_batch_the_launch_says_so(tmp_path):
    script = "orders.tell_batch(7)\nsys.exit(75)"
    code, _, err = Elastic(tmp_path, script).end()
    assert code and "a global batch of 7 examples cannot be divided among 2 to 4 workers" in err[-1]


WRONG = 'print("looplib: error: flag --x is unknown (FlagError)", file=sys.stderr)\nsys.exit(1)'


@pytest.mark.parametrize(
    "script, restarts, counts",
    [
        *more([("die() if index == count - 1 else stay()", 2, [3, 2, 1]), ("sys.exit(1)", 1, [3, 3]), (WRONG, 5, [3])]),
        ("sys.exit(1)", None, [3]),
    ],
)
def test_what_fails_each_time_is_not_restarted_for_ever(script, restarts, counts, tmp_path):
    """An error of the program is not restarted at all, unless --restarts asks for it and it may go away."""
    launched = Elastic(tmp_path, script, workers=3, min_workers=1, restarts=restarts)
    code, _, err = launched.end()
    assert code == 1 and err[-1].startswith("looplib: error: worker ")
    assert [count for count, *_ in launched.starts()] == counts


@pytest.mark.slow
def test_a_worker_that_freezes_counts_as_dead(tmp_path):
    script = "if count == 4:\n    os.kill(os.getpid(), signal.SIGSTOP) if index == 1 else stay(0.3)"
    launched = Elastic(tmp_path, script, grace=1000.0)
    code, _, err = launched.end()
    assert code == 0, err
    assert launched.starts()[1][::2] == (
        3,
        "3 of 4 workers because worker 1 was stopped and had to be killed",
    )


@pytest.mark.slow
def test_a_signal_while_workers_make_room_for_more_is_no_second_one(tmp_path):
    script = """
if lives == 0:
    die() if index == 2 else stay()
came = []
def save(*_):
    came.append(1)
    if len(came) > 1:
        os._exit(143)
    time.sleep(2)
    print("saved", flush=True)
    os._exit(75)
signal.signal(signal.SIGTERM, save)
time.sleep(1000)
"""
    launched = Elastic(tmp_path, script, grow_after=15.0)
    while "room for more" not in (line := launched.process.stderr.readline()):
        assert line
    launched.process.send_signal(signal.SIGTERM)
    code, out, err = launched.end()
    assert code == 75, err
    assert sorted(out) == [f"[worker {i}] saved" for i in range(3)]
    assert [count for count, *_ in launched.starts()] == [4, 3]


@pytest.mark.slow
def test_workers_are_not_ended_for_more_of_them_before_their_first_report(tmp_path):
    script = """
if lives == 0:
    die() if index == 1 else stay()
def end(*_):
    path.with_name(f"told{index}").write_text(str(time.time()))
    os._exit(75)
signal.signal(signal.SIGTERM, end)
if count == 2:
    if index == 0:
        orders.tell_batch(6)
        time.sleep(4)
        path.with_name("reported").write_text(str(time.time()))
        orders.tell_batch()
    time.sleep(1000)
"""
    launched = Elastic(tmp_path, script, workers=3, grow_after=2.0)
    code, _, err = launched.end()
    assert code == 0, err
    assert [count for count, *_ in launched.starts()] == [3, 2, 3]
    told, reported = (float((tmp_path / name).read_text()) for name in ("told0", "reported"))
    assert reported <= told < reported + 2


def test_an_empty_place_is_tried_again_after_a_time_that_doubles():
    numbers = WorkerNumbers(least=2, most=4, rest=10.0)
    assert numbers.choose(0.0) == 4 and numbers.grows_at(4) is None
    numbers.lose(1, 0.0)  # to 10
    assert numbers.choose(9.9) == 3 and numbers.grows_at(3) == 10.0 and numbers.choose(10.0) == 4
    numbers.lose(1, 5.0)  # to 25
    assert numbers.choose(9.9) == 2 and numbers.choose(10.0) == 3 and numbers.choose(25.0) == 4
    numbers.lose(2, 30.0)  # to 70
    assert numbers.choose(30.0) == 2 and numbers.grows_at(2) == 70.0
    numbers.lose(2, 35.0)  # to 115: no place is left, and two are used that are empty still
    assert numbers.choose(35.0) == 2 and numbers.choose(70.0) == 2 and numbers.grows_at(2) == 115.0
    numbers.lose(1, 10_000.0)  # an hour later
    assert numbers.choose(10_009.0) == 3 and numbers.choose(10_010.0) == 4


@pytest.mark.parametrize("size", [1, 12, 60, 64])
def test_the_workers_divide_the_global_batch_whichever_places_are_left(size):
    for least in range(1, 7):
        for empty in range(7):
            numbers = WorkerNumbers(least, 6, 1.0, size)
            numbers.lose(empty, 0.0)
            possible = [n for n in range(least, 7) if size / n == size // n]
            fitting = [n for n in possible if n <= 6 - empty]
            assert numbers.choose(0.5) == (fitting[-1] if fitting else possible[0] if possible else None)


def test_restarts_are_counted_by_the_hour():
    budget = RestartBudget(backoff=1.0)
    assert [budget.pause(3, 5.0, now) for now in (0.0, 10.0, 20.0, 30.0)] == [1.0, 2.0, 4.0, None]
    assert budget.pause(3, 600.0, 3601.0) == 1.0 and budget.used == 3  # after a long life without doubling
    assert budget.pause(3, 5.0, 3602.0) is None


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--min_workers=3"], "--min_workers is 3; expected at most 2"),
        (["--min_workers=0"], "--min_workers is 0; expected at least 1"),
        (["--min_workers=1", "--parameter_servers=1"], "leave it out and use --restarts"),
        (["--data_workers=1", "--parameter_servers=1"], "--data_workers is for workers that train in step"),
        (["--data_workers=-1"], "--data_workers is -1; expected at least 0"),
        (["--min_workers=1", "--grow_after=nan"], "--grow_after is nan; expected seconds of at least 0"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_in_words(arguments, words, capfd):
    assert tools.main(["launch", "--workers=2", *arguments, "--", "true"]) == 2
    assert words in capfd.readouterr().err

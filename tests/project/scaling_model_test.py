"""The model of a run on many replicas, against published numbers and independent computations."""

import math

import numpy as np
import pytest

from benchmarks import all_reduce, scaling_model
from benchmarks.scaling_model import Costs, expected_maximum, save_interval, simulate, useful_share

HOUR, MINUTE = 3600.0, 60.0


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("mean,minutes", [(24 * HOUR, 117), (6 * HOUR, 57), (15 * MINUTE, 9.1)])
def test_the_save_interval_is_that_of_dalys_paper(mean, minutes):
    found = save_interval(5 * MINUTE, mean) / MINUTE  # its figures 3 to 5: dump time 5 minutes
    assert round(found, 1 if minutes < 10 else 0) == minutes


@pytest.mark.parametrize("mean", [24 * HOUR, 6 * HOUR])
def test_no_other_interval_is_better(mean):
    best = max(np.arange(1.0, 400.0), key=lambda minutes: useful_share(minutes * MINUTE, 300.0, 600.0, mean))
    assert save_interval(300.0, mean) / MINUTE == pytest.approx(best, rel=0.02)


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize(
    "n,mean", [(1, 0.0), (2, 1 / math.sqrt(math.pi)), (3, 1.5 / math.sqrt(math.pi)), (10, 1.53875)]
)
def test_the_slowest_of_n_is_as_slow_as_order_statistics_say(n, mean):
    assert expected_maximum(n) == pytest.approx(mean, abs=2e-3)


def test_the_slowest_of_thousands_is_as_slow_as_drawn_numbers():
    drawn = np.random.default_rng(0).normal(size=(2000, 1024)).max(axis=1).mean()
    assert expected_maximum(1024) == pytest.approx(drawn, abs=0.03)


def test_the_rings_time_is_that_of_its_rounds():
    n, size, latency, bandwidth = 8, 1_000_000, 1e-4, 1e8
    sent = 0.0
    for _ in range(2):  # reduce-scatter, then all-gather
        for _ in range(n - 1):
            sent += latency + size / n / bandwidth
    assert scaling_model.all_reduce_seconds(n, size, latency, bandwidth) == pytest.approx(sent)
    assert scaling_model.all_reduce_seconds(1, size, latency, bandwidth) == 0


def test_the_simulation_without_failures_is_work_and_saves():
    assert simulate(1000.0, 100.0, 5.0, 0.0, 60.0, 1e12) == pytest.approx(1000 + 10 * 5)


@pytest.mark.parametrize("mean", [600.0, 3600.0])
def test_the_simulation_agrees_with_dalys_model(mean):
    interval, stall, lost = save_interval(5.0, mean), 5.0, 60.0
    work = 3000 * mean
    share = work / simulate(work, interval, stall, 0.0, lost, mean)
    # Daly lets failures strike a restart as any other time, and begins each segment again; 3,000 failures are drawn.
    assert share == pytest.approx(useful_share(interval, stall, lost, mean), rel=0.03)


def test_a_save_that_takes_long_to_count_costs_more():
    slow, fast = (simulate(1e6, 100.0, 1.0, commit, 60.0, 2000.0) for commit in (90.0, 0.0))
    assert slow > 1.02 * fast


def test_more_replicas_take_longer_steps_and_fail_more_often():
    table = scaling_model.rows(Costs(), [1, 8, 64, 512])
    for key in ("step", "failures_a_day"):
        values = [row[key] for row in table]
        assert values == sorted(values) and values[0] < values[-1]
    assert table[-1]["failures_a_day"] == pytest.approx(419 / 54 * 512 / 16384)
    assert all(0.9 < row["simulated"] <= 1 for row in table)


def test_the_fit_finds_the_rings_latency_and_bandwidth():
    times = {size: scaling_model.all_reduce_seconds(4, size, 3e-4, 2e8) for size in all_reduce.SIZES}
    assert all_reduce.fit(4, times) == pytest.approx((3e-4, 2e8))


def test_the_table_is_printed_and_drawn(tmp_path, capsys):
    scaling_model.main(["--replicas=1,8", f"--picture={tmp_path}/scaling.png", "--compute=1"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[1].split()[:3] == ["1", "1000", "ms"]
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")

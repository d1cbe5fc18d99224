"""Seconds by phase, which never overlap and add up to the wall time."""

from looplib.clock import Clock


class Time:
    """A time that passes when told."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_inner_phases_do_not_count_for_outer_ones():
    time = Time()
    clock = Clock(now=time)
    time.now += 1
    with clock.phase("train"):
        time.now += 2
        with clock.phase("save"):
            time.now += 4
        time.now += 8
        assert clock.of("train") == 10
    with clock.phase("train"):
        time.now += 16
    time.now += 32
    assert clock.seconds() == {"other": 33, "save": 4, "train": 26, "wall": 63}


def test_a_phase_that_raises_is_closed():
    time = Time()
    clock = Clock(now=time)
    try:
        with clock.phase("train"):
            time.now += 1
            raise RuntimeError
    except RuntimeError:
        pass
    time.now += 2
    assert clock.seconds() == {"other": 2, "train": 1, "wall": 3}

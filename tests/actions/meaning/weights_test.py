"""Checks of weights: what no longer changes and what explodes is found, and a healthy training is not."""

import numpy as np
import pytest
import tensorflow as tf

from looplib.actions.learning_warnings import MetricNorms
from looplib.actions.weight_checks import TrainedVariable, WeightChecks

RANDOM = np.random.default_rng(0)
STEPS = 100  # between two checks


def found_in(histories, groups=None, known=()):
    """Returns the findings of checks of variables whose values, one a check, are in lists by name."""
    variables = {name: tf.Variable(values[0]) for name, values in histories.items()}
    groups = groups or {}
    trained = [TrainedVariable(name, variable, groups.get(name, 0)) for name, variable in variables.items()]
    checks, findings, known = WeightChecks(), [], set(known)
    for number in range(len(next(iter(histories.values())))):
        for name, values in histories.items():
            variables[name].assign(values[number])
        new = checks.check(STEPS * (number + 1), trained, known)
        known.update(key for finding in new for key in finding.keys)
        findings += [(number, finding) for finding in new]
    return findings


def trained(shape=(6, 4), checks=12, scale=0.05, start=None):
    """The values of a variable at the checks of a training that goes well."""
    value = RANDOM.normal(size=shape).astype("float32") if start is None else start
    values = []
    for _ in range(checks):
        values.append(value)
        value = (value + scale * RANDOM.normal(size=shape)).astype("float32")
    return values


def small(values):
    """Values of which one is smaller than all that an update has to change elsewhere."""
    values[0, 0] = 1e-6
    return values


def test_weights_that_keep_every_bit_while_others_change_are_found_once_after_three_checks():
    dead = [small(trained()[0])] * 12
    ((number, finding),) = found_in({"dead/kernel": dead, "head/kernel": trained()})
    assert (number, finding.kind, finding.subjects, finding.since) == (4, "no change", ("dead/kernel",), 200)
    assert "dead/kernel has not changed by a single bit since step 200" in finding.text and "1 of 2" in finding.text


def test_weights_that_weight_decay_alone_changes_are_found():
    value, values = RANDOM.normal(size=(6, 4)).astype("float32"), []
    for _ in range(12):
        values.append(value)
        for _ in range(STEPS):
            value = value - np.float32(1e-3 * 0.004) * value  # as AdamW of Keras does with a gradient of zero
    ((_, finding),) = found_in({"dead/kernel": values, "head/kernel": trained()})
    assert finding.subjects == ("dead/kernel",) and "one factor" in finding.text


def test_layers_that_die_together_are_one_warning():
    dead = {f"layer_{number}/kernel": [small(trained()[0])] * 12 for number in range(3)}
    ((_, finding),) = found_in({**dead, "head/kernel": trained()})
    assert finding.subjects == tuple(dead)


def test_weights_that_died_late_have_the_step_since_when():
    alive = trained(checks=5)
    ((_, finding),) = found_in({"dead/kernel": alive + [alive[-1]] * 10, "head/kernel": trained(checks=15)})
    assert finding.since == 600  # the fifth check is of step 500, and the sixth has the first copy


@pytest.mark.parametrize("ulps", [1, 4])
def test_weights_of_which_one_element_changes_by_a_bit_are_alive(ulps):
    start = RANDOM.normal(size=(40, 40)).astype("float32")
    values = []
    for number in range(12):
        value = start.copy()
        for _ in range(ulps * number):
            value[7, 3] = np.nextafter(value[7, 3], np.float32(10))
        values.append(value)
    assert not found_in({"slow/kernel": values, "head/kernel": trained()})


def test_a_pause_of_all_weights_is_silent():
    assert not found_in({"a": [trained()[0]] * 12, "b": [trained()[0]] * 12})  # a learning rate of 0


def test_large_elements_that_a_tiny_update_does_not_reach_are_silent():
    """At the end of a schedule, an update of 1e-9 changes small elements and leaves gains near 1 alone."""
    gains = [RANDOM.uniform(0.9, 1.1, size=16).astype("float32")] * 12
    kernel = trained(scale=1e-9, start=RANDOM.uniform(1e-5, 1e-4, size=(6, 4)).astype("float32"))
    kernel = [value * np.float32(1 - 1e-3 * number) for number, value in enumerate(kernel)]
    assert not found_in({"norm/gamma": gains, "head/kernel": kernel})


def test_what_another_optimizer_trains_does_not_count():
    dead = [trained()[0]] * 12
    assert not found_in({"slow": dead, "fast": trained()}, groups={"slow": 0, "fast": 1})


def test_a_known_finding_is_not_repeated():
    dead = [trained()[0]] * 12
    assert not found_in({"dead": dead, "head": trained()}, known={"no change: dead"})


def test_an_exploding_norm_is_found_against_its_own_history():
    values = trained(checks=12)
    values += [values[-1] * np.float32(factor) for factor in (20, 40, 80)]
    ((number, finding),) = found_in({"kernel": values, "bias": trained((4,), 15)})
    assert (number, finding.kind, finding.subjects, finding.since) == (12, "exploding norm", ("kernel",), 1200)
    norms = [np.linalg.norm(value) for value in values]
    assert f"{norms[12]:.4g}" in finding.text and f"{np.median(norms[:12]):.4g}" in finding.text


def test_growth_from_zero_is_silent():
    """Biases and the second matrix of an adapter begin at zero and grow with each step."""
    direction = RANDOM.normal(size=8).astype("float32")
    linear = [direction * np.float32(number) for number in range(40)]
    quadratic = [direction * np.float32(number**2) for number in range(40)]
    assert not found_in({"bias": linear, "lora_b": quadratic, "kernel": trained(checks=40)})


def test_a_spike_before_ten_checks_is_silent():
    values = trained(checks=8)
    assert not found_in({"kernel": [*values, values[-1] * np.float32(50)], "other": trained(checks=9)})


def test_the_history_survives_a_restart_and_other_values_are_refused():
    variable = tf.Variable(np.ones(4, "float32"))
    one = [TrainedVariable("kernel", variable, 0)]
    first, second = WeightChecks(), WeightChecks()
    for step in range(12):
        variable.assign(np.full(4, 1 + 0.01 * step, "float32"))
        assert not first.check(100 * (step + 1), one, ())
    second.load(first.state())
    variable.assign(np.full(4, 30, "float32"))
    (finding,) = second.check(1300, one, ())
    assert finding.kind == "exploding norm"
    for wrong in ({"kernel": [-1.0]}, {"kernel": ["x"]}, {"kernel": [float("inf")]}):
        with pytest.raises(ValueError):
            WeightChecks().load(wrong)


def test_norms_of_gradients_that_stay_a_hundred_times_as_high_are_found_and_a_spike_is_not():
    usual = [{"gradient_norm": float(norm), "loss": 1.0} for norm in RANDOM.uniform(0.5, 2, size=20)]
    high = [{"gradient_norm": 500.0, "loss": 1.0}] * 3

    def found(reports):
        norms = MetricNorms()
        return [finding for step, report in enumerate(reports) for finding in norms.check(step, report, ())]

    (finding,) = found([*usual, *high, *high])
    assert (finding.subjects, finding.since) == (("gradient_norm",), 20) and "500" in finding.text
    assert not found([*usual, *high[:1], *usual, *high[:2], *usual])
    assert not found([{"gradient_norm/a/kernel": 1e-9}] * 20 + [{"gradient_norm/a/kernel": 1e-3}] * 5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_of_sixteen_bits_may_stand_still(dtype):
    """Their updates may be too small for them."""
    still = tf.Variable(tf.cast(trained()[0], dtype))
    moving = tf.Variable(tf.cast(trained()[0], dtype))
    one = [TrainedVariable("still", still, 0), TrainedVariable("moving", moving, 0)]
    checks = WeightChecks()
    for number, value in enumerate(trained()):
        moving.assign(tf.cast(value, dtype))
        assert not checks.check(100 * number, one, ())


def test_a_large_variable_is_compared_by_elements_that_are_spread_over_it():
    large = tf.Variable(tf.zeros([3000, 1500]))
    other = tf.Variable(1.0)
    one = [TrainedVariable("table", large, 0), TrainedVariable("other", other, 0)]
    checks, found = WeightChecks(), []
    for number in range(5):
        other.assign_add(1.0)
        found += checks.check(100 * number, one, ())
    assert [finding.subjects for finding in found] == [("table",)]

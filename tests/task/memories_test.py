"""Memories of actions and learning rates belong to what has their name, wherever it stands in a list."""

import re

import keras as keras3
import numpy as np
import pytest
import tensorflow as tf
import toy
from conftest import make_strategy
from tampering import rewrite_run_state

import looplib
from looplib.errors import ActionError, CheckpointError

FIRST, LAST, PATIENCE = 7, 24, 6
ACCURACY, LOSS = ("eval/accuracy", "max"), ("eval/loss", "min")
LOWEST = ("eval/accuracy", "min")
# By step. The accuracy is best before the restart, and rises for long after it.
VALUES = {
    "accuracy": np.array([0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.1, *np.linspace(0.15, 0.55, 9), *[0.2] * 9]),
    "loss": np.array([*(0.8 - 0.05 * np.arange(13)), *[0.7] * 12]),
}


class Scripted(looplib.Evaluator):
    """Reports `VALUES` of each step."""

    def __init__(self, model):
        self.model = model

    def dataset(self, context):
        return context.indices(1)

    def step_fn(self, inputs):
        return {name: looplib.last(tf.gather(tf.constant(of), self.global_step)) for name, of in VALUES.items()}


def run(folder, steps, actions):
    """Trains up to a step, and returns the step that it has reached."""
    trainer = toy.Regression()
    policy = looplib.CheckpointPolicy(every_steps=4)
    with toy.controller(
        make_strategy("default"), trainer, Scripted(trainer.model), model_dir=folder, checkpoints=policy,
        actions=actions,
    ) as controller:  # fmt: skip
        controller.train_and_evaluate(steps, 1)
        return controller.global_step


def stoppers(*watched):
    return [looplib.EarlyStopping(metric, PATIENCE, mode=mode) for metric, mode in watched]


def stop(metric, mode, begin):
    """Returns the step at which one that sees the evaluations from a step on ends the training."""
    values = VALUES[metric.partition("/")[2]] * (1 if mode == "max" else -1)
    best, waited = -np.inf, 0
    for step in range(begin, LAST):
        best, waited = (values[step], 0) if values[step] > best else (best, waited + 1)
        if waited == PATIENCE:
            return step
    return LAST


CASES = {
    "added in front": ([LOSS], [ACCURACY, LOSS]),
    "added behind": ([LOSS], [LOSS, ACCURACY]),
    "another order": ([LOSS, ACCURACY], [ACCURACY, LOSS]),
    "the first is removed": ([LOSS, ACCURACY], [ACCURACY]),
    "another metric": ([LOSS], [ACCURACY]),
    "another mode": ([ACCURACY], [LOWEST]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_memory_belongs_to_what_an_action_watches(case, tmp_path, caplog):
    before, now = CASES[case]
    assert run(tmp_path, FIRST, stoppers(*before)) == FIRST
    # A new one sees the evaluation of the checkpoint's step too, which a start repeats.
    expected = min(stop(*each, begin=1 if each in before else FIRST) for each in now)
    assert FIRST < expected == run(tmp_path, LAST, stoppers(*now))
    pairs = ((now, before), (before, now))
    new, left = ([f"EarlyStopping({', '.join(one)})" for one in these if one not in others] for these, others in pairs)
    assert ("start with a fresh one" in caplog.text) == bool(new) and all(name in caplog.text for name in new)
    assert ("not used" in caplog.text) == bool(left) and all(name in caplog.text for name in left)


class Counting(looplib.Action):
    """Has a memory, and no name of its own."""

    seen = 0

    def state(self):
        return self.seen

    def load(self, state):
        self.seen = int(state)


def named(name):
    action = Counting()
    action.name = name
    return action


def test_actions_whose_memories_cannot_be_told_apart_are_refused_when_the_controller_is_built():
    def build(*actions):
        toy.controller(make_strategy("default"), toy.Regression(), actions=actions).close()

    stop = looplib.EarlyStopping
    for twins, name in [
        (stoppers(LOSS, LOSS), r"EarlyStopping\(eval/loss, min\)"),
        ([stop("eval/loss", 2), stop("eval/loss", 9, mode="min")], r"EarlyStopping\(eval/loss, min\)"),
        ([Counting(), Counting()], r"Counting\(\)"),
        ([named("a"), named("a")], r"Counting\(a\)"),
    ]:
        with pytest.raises(ActionError, match=f"{name}.*.*give"):
            build(*twins)
    with pytest.raises(ActionError, match="Counting.name.*3"):
        build(named(3))
    build(*stoppers(LOSS, LOWEST), stop("eval/loss", name="patient"), Counting(), named("a"), looplib.Action())


STOPS, REDUCES = "EarlyStopping(eval/loss, min)", "ReduceOnPlateau(eval/loss, min)"
BAD = [(STOPS, memory) for memory in (None, 3, [1, 2], ["much", 1, 1, 1], [0.5, 1, None, 1], {"best": 1})]
BAD += [(REDUCES, [0.5, 1, 1, 0, "long"])]  # the last is how many reports are left of a cooldown


@pytest.mark.slow
@pytest.mark.parametrize("name, memory", BAD, ids=str)
def test_a_memory_of_other_types_is_a_sentence(name, memory, tmp_path):
    trainer = toy.Regression()
    watching = lambda: [*stoppers(LOSS), looplib.ReduceOnPlateau("eval/loss")]
    build = lambda: toy.controller(
        make_strategy("default"), trainer, Scripted(trainer.model), model_dir=tmp_path, actions=watching()
    )
    with build() as controller:
        controller.train(1)
    change = lambda state: state["actions"].update({name: memory})
    rewrite_run_state(tmp_path / "checkpoints" / "ckpt-1.commit", change)
    with pytest.raises(CheckpointError, match=f"{re.escape(name)}"):
        build()


# Learning rates.


class Two(toy.Regression):
    """Has two optimizers of one class, which are made in some order."""

    def __init__(self, rates):
        super().__init__()
        del self.optimizer
        for name, rate in rates.items():
            setattr(self, name, keras3.optimizers.SGD(rate))

    def step_fn(self, inputs):
        _, x, y = inputs
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, self.model(x, training=True))
            loss = self.global_mean(losses)
        kernel, bias = self.model.trainable_variables
        gradients = tape.gradient(loss, [kernel, bias])
        self.of_kernel.apply([gradients[0]], [kernel])
        self.of_bias.apply([gradients[1]], [bias])
        return {"loss": losses}

    loop_end = looplib.Trainer.loop_end


@pytest.mark.slow
def test_a_learning_rate_belongs_to_the_optimizer_of_its_attribute(tmp_path):
    """One that the run has reduced stays so, though the optimizers are made in another order."""
    rates = {"of_kernel": 0.25, "of_bias": 0.5}

    def start(rates, steps):
        trainer = Two(rates)
        with toy.controller(make_strategy("default"), trainer, model_dir=tmp_path) as controller:
            if steps == 1:
                trainer.of_kernel.learning_rate = 0.125
            controller.train(steps)
        return [float(one.learning_rate) for one in (trainer.of_kernel, trainer.of_bias)]

    start(rates, 1)
    assert start(dict(reversed(rates.items())), 2) == [0.125, 0.5]
    assert start({**rates, "of_bias": 0.0625}, 3) == [0.125, 0.0625]  # a new one of the program

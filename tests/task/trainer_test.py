"""The interface of a Trainer without a controller."""

import numpy as np
import pytest
import tensorflow as tf
import toy

import looplib


def test_global_mean_is_the_sum_over_the_global_batch():
    trainer = toy.Regression()
    trainer.global_batch_size = 8
    values = np.arange(4, dtype=np.float32)
    assert float(trainer.global_mean(values)) == pytest.approx(values.sum() / 8)
    pairs = tf.constant(np.stack([values, 3 * values], 1))
    assert float(trainer.global_mean(pairs)) == pytest.approx(2 * values.sum() / 8)  # further dimensions are averaged
    assert trainer.global_mean(tf.zeros([0])).numpy() == 0  # a replica without examples
    assert trainer.global_mean(tf.cast(values, tf.bfloat16)).dtype == tf.float32
    assert trainer.global_mean(tf.cast(values, tf.float64)).dtype == tf.float64


def test_global_mean_before_a_controller_is_a_sentence():
    with pytest.raises(looplib.UsageError, match="before a Controller took the trainer"):
        toy.Regression().global_mean([1.0])


@pytest.mark.parametrize("kind", [looplib.Trainer, looplib.Evaluator])
def test_dataset_and_step_fn_are_abstract(kind):
    with pytest.raises(TypeError, match="abstract.*dataset.*step_fn"):
        kind()


@pytest.mark.parametrize("kind", [looplib.GradientTrainer, looplib.KerasTrainer, looplib.OrbitTrainer])
def test_a_subclass_that_does_not_call_the_init_of_its_base_class_is_told_so(kind):
    class Forgets(kind):
        def __init__(self):
            self.model = toy.Regression().model

        def dataset(self, context):
            return context.indices(8)

        def loss_fn(self, inputs):
            return self.model(inputs)

    with pytest.raises(looplib.UsageError, match=r"Forgets.__init__ does not .* super\(\).__init__"):
        looplib.Controller(looplib.RunConfig(global_batch_size=4), trainer=Forgets())

"""KerasHub's models under a `GradientTrainer`, with their preprocessors in its pipeline; `fit_matrix_test` has `KerasTrainer`."""

import fit_hub
import fit_matrix
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import make_strategy

import looplib

BATCH, STEPS = 8, 5  # 24 examples


class Tuned(looplib.GradientTrainer):
    """Trains a task of KerasHub on strings or images, by a loss of its own."""

    def __init__(self, model, x, y=None):
        self.preprocessor, model.preprocessor = model.preprocessor, None
        super().__init__(model, keras.optimizers.SGD(0.1, momentum=0.5))
        self.x, self.y = x, y

    def dataset(self, context):
        ids = context.indices(len(self.x))
        if self.y is None:  # of texts alone, the preprocessor makes targets and weights
            return ids.map(lambda ids: self.preprocessor(tf.gather(self.x, ids)))
        x = lambda ids: tf.gather(self.x, ids)
        prepared = (lambda ids: self.preprocessor(x(ids))) if self.preprocessor else x
        return ids.map(lambda ids: (prepared(ids), tf.gather(self.y, ids)))

    def loss_fn(self, inputs):
        x, y, *weights = inputs
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(y, tf.int32), self.model(x, training=True))
        return looplib.mean(losses, tf.cast(weights[0], losses.dtype)) if weights else losses


def build(kind):
    """Returns the trainer of a kind of model with its first weights."""
    keras.utils.set_random_seed(3)
    model, arguments = fit_hub.BUILD[kind](keras)
    return Tuned(model, **arguments)


def trained(kind, strategy="default", steps=STEPS, export=None, **settings):
    """Returns the weights after a training."""
    keras.backend.clear_session()
    strategy = make_strategy(strategy)
    with strategy.scope():
        trainer = build(kind)
    frozen = [np.array(variable) for variable in trainer.model.non_trainable_variables]
    config = looplib.RunConfig(global_batch_size=BATCH)
    with looplib.Controller(config, trainer=trainer, strategy=strategy, writers=[], **settings) as controller:
        controller.train(steps)
        if export:
            controller.export(export)
    if "lora" in kind:
        assert len(trainer.model.trainable_variables) < 16  # adapters and the head
        for before, variable in zip(frozen, trainer.model.non_trainable_variables, strict=True):
            np.testing.assert_array_equal(before, np.array(variable))
    return trainer.model


@pytest.mark.slow
def test_a_task_with_its_preprocessor_trains_as_in_fit(tmp_path):
    pytest.importorskip("keras_hub")
    (cell,) = fit_matrix.cells_of(fit_matrix.ROWS["hub_texts"], "keras", ["fit"], tmp_path).values()
    assert cell.startswith(fit_matrix.RIGHT)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hub_int8_lora", "hub_images", "hub_language"])  # fit_matrix.py has others
def test_a_model_of_keras_hub_resumes_bit_by_bit_on_any_replicas_and_is_exported(kind, tmp_path):
    pytest.importorskip("keras_hub")
    whole = trained(kind, export=tmp_path / "export")
    trained(kind, steps=2, model_dir=tmp_path / "run")
    resumed = trained(kind, model_dir=tmp_path / "run")
    for one, other in zip(resumed.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    replicas = trained(kind, "mirrored_x2")
    for one, other in zip(replicas.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    served = tf.saved_model.load(tmp_path / "export" / "saved_model")
    signature = Tuned(whole, [0]).export().signature
    x = tf.nest.map_structure(lambda spec: tf.ones([4, *(size or 8 for size in spec.shape[1:])], spec.dtype), signature)
    np.testing.assert_allclose(served.serve(x), whole(x, training=False), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a data set", "a PyDataset"])
def test_the_preprocessor_of_a_task_gets_strings_of_each_kind_of_data(kind):
    pytest.importorskip("keras_hub")

    class Data(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, number):
            return tuple(part[number * BATCH : (number + 1) * BATCH] for part in (arguments["x"], arguments["y"]))

    def trained(make):
        keras.backend.clear_session()
        keras.utils.set_random_seed(3)
        model, _ = fit_hub.hub_texts(keras)
        x, y = make()
        trainer = looplib.KerasTrainer(model, x, y, shuffle=False)
        with looplib.Controller(looplib.RunConfig(global_batch_size=BATCH), trainer=trainer, writers=[]) as controller:
            controller.train(STEPS)
        return model

    _, arguments = fit_hub.hub_texts(keras)
    slices = lambda: tf.data.Dataset.from_tensor_slices((arguments["x"], arguments["y"])).batch(BATCH)
    found = trained(lambda: (slices() if kind == "a data set" else Data(), None))
    expected = trained(lambda: (arguments["x"], arguments["y"]))
    for one, other in zip(found.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)

"""class_weight weighs examples as in Keras `fit`, whatever the targets look like."""

import numpy as np
import pytest
import tensorflow as tf
from conftest import more

import looplib
from looplib.errors import DatasetError

WEIGHTS = {0: 2.0, 1: 5.0, 2: 7.0}
_random = np.random.RandomState(0)
X, IMAGES = _random.randn(8, 3).astype(np.float32), _random.randn(8, 4, 4, 1).astype(np.float32)
SOFT = np.array([0.9, 0.1, 0.6, 0.4, 1.2, 1.6, 0.5, 1.5], np.float32)  # a half goes to the even number
MASK = _random.randint(0, 3, (8, 4, 4))
VECTORS = _random.rand(8, 3).astype(np.float32)


def compiled(keras, targets):
    """Returns a model whose outputs have the shape of the targets."""
    keras.utils.set_random_seed(1)
    image = targets.ndim > 2
    last = keras.layers.Conv2D(targets.shape[-1], 1) if image else keras.layers.Dense(targets[..., None].shape[1])
    model = keras.Sequential([keras.layers.InputLayer((4, 4, 1) if image else (3,)), last])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


TARGETS = {
    "soft": SOFT,
    "soft column": SOFT[:, None],
    "soft vectors": VECTORS,
    "masks": MASK[..., None],
    "one-hot masks": np.eye(3, dtype=np.float32)[MASK],
}


def arguments(targets, kind, batch=4):
    x = IMAGES if targets.ndim > 2 else X
    if kind == "arrays":
        return {"x": x, "y": targets}
    return {"x": tf.data.Dataset.from_tensor_slices((x, targets)).batch(batch)}


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("case, kind", [("soft", "arrays"), ("soft column", "data set"), ("soft vectors", "arrays"),
                                        ("masks", "data set"), ("one-hot masks", "data set"),
                                        *more([("soft", "data set"), ("soft column", "arrays")])])  # fmt: skip
def test_class_weights_are_those_of_fit(case, kind, keras):
    targets = TARGETS[case]
    theirs, ours = compiled(keras, targets), compiled(keras, targets)
    options = {"shuffle": False} if kind == "arrays" else {}
    size = {"batch_size": 4} if kind == "arrays" else {}
    history = theirs.fit(**arguments(targets, kind), **size, **options, class_weight=WEIGHTS, verbose=0).history
    trainer = looplib.KerasTrainer(ours, **arguments(targets, kind), **options, class_weight=WEIGHTS)
    with looplib.Controller(looplib.RunConfig(global_batch_size=4), trainer=trainer, writers=[]) as controller:
        assert controller.train(epochs=1)["loss"] == pytest.approx(history["loss"][0], rel=1e-5)
    for one, other in zip(ours.get_weights(), theirs.get_weights()):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_soft_targets_are_rounded_to_a_class():
    model = compiled(__import__("keras"), SOFT)
    losses = np.square(model(X).numpy()[:, 0] - SOFT)
    weights = np.array([5, 2, 5, 2, 5, 7, 2, 7])
    trainer = looplib.KerasTrainer(model, X, SOFT, class_weight=WEIGHTS, shuffle=False)
    with looplib.Controller(looplib.RunConfig(global_batch_size=8), trainer=trainer, writers=[]) as controller:
        assert controller.train(1)["loss"] == pytest.approx((losses * weights).mean(), rel=1e-5)


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("kind", ["arrays", "data set"])
@pytest.mark.parametrize("targets", [MASK, MASK.astype(np.float32)], ids=["whole", "float"])
def test_masks_whose_last_dimension_is_an_image_s_width_are_refused(kind, targets, keras):
    model = compiled(keras, MASK[..., None])
    with pytest.raises(DatasetError, match="class_weight.*3.*1"):
        looplib.KerasTrainer(model, **arguments(targets, kind), class_weight=WEIGHTS)


@pytest.mark.slow(spread=1)
def test_sample_weights_in_a_data_set_are_refused_beside_class_weights(keras):
    data = tf.data.Dataset.from_tensor_slices((X, SOFT, SOFT)).batch(4)
    with pytest.raises(DatasetError):
        looplib.KerasTrainer(compiled(keras, SOFT), data, class_weight=WEIGHTS)

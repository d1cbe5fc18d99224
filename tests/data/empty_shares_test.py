"""An example that stands in for none, on a replica whose share of a global batch is empty, changes no metric."""

import importlib
import types

import numpy as np
import pytest
import tensorflow as tf
from conftest import make_strategy, more

import looplib
from looplib.errors import MetricError

VALUES = np.array([3.0, 1.0, 4.0, 1.0, 5.0], np.float32)  # of the second global batch one replica has no share


def model_with_metrics(keras):
    class WithMetrics(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense, self.own = keras.layers.Dense(1), keras.metrics.Mean(name="own")
            self.deeper = {"list": [keras.metrics.Mean(name="deeper")]}

        def call(self, inputs):
            return self.dense(inputs)

    model = WithMetrics()
    model(VALUES[:, None])
    return model


class Metrics(looplib.Evaluator):
    """Takes the means of all values by metrics that are held in many ways."""

    batches = "global"

    def __init__(self, keras, loose=None):
        self.model, self.module, self.loose = (
            model_with_metrics(keras),
            tf.Module(),
            types.SimpleNamespace(metric=loose),
        )
        self.module.metric = keras.metrics.Mean(name="module")
        self.structure = [{"metric": keras.metrics.Mean(name="structure")}]
        self.returns_loose = False

    def dataset(self, context):
        return tf.data.Dataset.from_tensor_slices(VALUES).batch(4)

    def step_fn(self, values):
        metrics = [self.model.own, *self.model.deeper["list"], self.module.metric, self.structure[0]["metric"]]
        loose = [self.loose.metric] if self.loose.metric is not None else []
        for metric in [*metrics, *loose]:
            metric.update_state(values)
        return {metric.name: metric for metric in [*metrics, *loose[: self.returns_loose]]}


@pytest.fixture(params=["keras", *more(["tf_keras"])])
def keras(request):
    return importlib.import_module(request.param)


def controller(keras, loop, loose=False, returned=False):
    strategy = make_strategy("mirrored_x2")
    with strategy.scope():
        evaluator = Metrics(keras, keras.metrics.Mean(name="loose") if loose else None)
    evaluator.returns_loose = returned
    return looplib.Controller(
        looplib.RunConfig(global_batch_size=4, loop=loop), evaluator=evaluator, strategy=strategy, writers=[]
    )


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("loop", ["eager", "graph"])
def test_metrics_count_each_example_once_wherever_the_task_holds_them(keras, loop):
    with controller(keras, loop) as made:
        for _ in range(2):
            found = made.evaluate()["eval"]
            assert found.pop("examples") == len(VALUES)
            assert found == {name: pytest.approx(VALUES.mean()) for name in ("own", "deeper", "module", "structure")}


@pytest.mark.slow
@pytest.mark.parametrize("returned", [True, False])
def test_a_metric_that_is_not_found_is_refused_when_the_controller_is_built(keras, returned):
    with pytest.raises(MetricError):
        controller(keras, "graph", loose=True, returned=returned)


def test_a_returned_metric_that_is_not_found_is_refused_in_the_first_eager_step(keras):
    with pytest.raises(MetricError):
        controller(keras, "eager", loose=True, returned=True).evaluate()

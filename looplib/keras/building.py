"""The variables of a compiled Keras model, of its metrics and optimizers: made before the first step, from the data.

Several replicas and the eager loop cannot make them in a step. What is traced here is not run, so that nothing changes.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from looplib.base.messages import gist
from looplib.cluster.updates import refuse_others
from looplib.compat import keras as _keras
from looplib.compat.patches import alone
from looplib.compat.tensorflow import converted
from looplib.errors import DatasetError, LossError, UsageError, VariableError
from looplib.keras.data import KerasData
from looplib.loop.step import raise_refusal
from looplib.task.state import state_kept, state_of_model, unheld


def build(model: Any, data: KerasData, trains: bool) -> None:
    """Makes the variables that the steps of a model need.

    Args:
      model: the compiled model.
      data: what it is trained or evaluated on.
      trains: whether it is trained.

    Raises:
      UsageError: for a `train_step` that has to make variables on several replicas and cannot be traced.
    """
    own_step = _keras.has_own_step(model)
    try:
        _build_by_test_step(model, data)
    except Exception:
        if not own_step:
            raise
    finally:
        model.reset_metrics()
    own_steps = own_step or _keras.has_own_step(model, "test_step")  # which may leave compiled metrics unbuilt
    if trains and own_steps and _is_unbuilt(model):
        _build_by_train_step(model, data)
    # A model with a train_step of its own needs neither a loss nor a call; its first step shows what is wrong.
    model.built = model.built or all(layer.built for layer in model.layers)


def _build_by_test_step(model: Any, data: KerasData) -> None:
    """Runs the test step on few examples, where that is faster than to trace it; or traces it."""
    if model.built and model.distribute_strategy.num_replicas_in_sync == 1:
        with contextlib.suppress(Exception), state_kept(model):  # a layer may need batches of another size
            sample = data.sample(1)
            _refuse_without_targets(model, sample)
            model.distribute_strategy.run(model.test_step, args=(sample,))
            return
    _trace(model, model.test_step, data)


def _build_by_train_step(model: Any, data: KerasData) -> None:
    try:
        traced = _trace(model, model.train_step, data)
    except Exception as error:
        if model.distribute_strategy.num_replicas_in_sync == 1:
            return  # the first step makes them
        if isinstance(error, UsageError):
            raise
        explain(error)
        raise VariableError(
            f"{type(model).__name__}.train_step has to make variables, which must exist before the first step on "
            f"several replicas, and it cannot be traced for a batch of the data ({gist(error)}); under "
            "strategy.scope(), build the layers (layer.build(shape), or a call on a batch) and the optimizers "
            "(optimizer.build(variables)) before KerasTrainer gets the model"
        ) from error
    model.built = True
    strategy = model.distribute_strategy
    refuse_others(strategy, traced.variables, unheld(strategy, traced.variables, state_of_model(model)))


def _refuse_without_targets(model: Any, batch: Any) -> None:
    """Raises `UsageError` for a batch without targets if Keras would give them to the compiled loss."""
    own = any(_keras.has_own_step(model, name) for name in ("train_step", "test_step", "compute_loss"))
    if not own and model.loss and _keras.unpacked(model, batch)[1] is None:
        raise DatasetError(
            "the data of KerasTrainer or its evaluator has no targets, which the compiled loss needs; give y, or "
            "elements (inputs, targets); to predict for rows without targets, give them to trainer.predict(x), or as "
            "trainer.evaluator(predict_data=x)"
        )


def _trace(model: Any, step: Callable[[Any], Any], data: KerasData) -> tf.types.experimental.ConcreteFunction:
    """Traces a step on all replicas, for batches like the data's."""
    spec = data.spec(model.distribute_strategy.num_replicas_in_sync)
    _refuse_without_targets(model, spec)
    _keras.check_stateful_batch(
        model, next((part.shape[0] for part in tf.nest.flatten(spec) if part is not None), None)
    )
    return trace(model, step, spec)


def trace(model: Any, step: Callable[[Any], Any], spec: Any) -> tf.types.experimental.ConcreteFunction:
    """Traces a step of a model on all replicas, for batches of a spec."""
    strategy = model.distribute_strategy

    @tf.autograph.experimental.do_not_convert
    def on_replica(batch: Any) -> None:
        with alone():
            converted(step)(batch)

    def traced() -> tf.types.experimental.ConcreteFunction:
        run = tf.autograph.experimental.do_not_convert(lambda batch: strategy.run(on_replica, args=(batch,)))
        return tf.function(run).get_concrete_function(spec)

    with strategy.scope(), tf.variable_creator_scope(_keras.make_outside):
        try:
            try:
                return traced()
            except (TypeError, ValueError):
                if not _renew_constants(model):
                    raise
                return traced()
        except Exception as error:
            raise_refusal(error)
            raise
        finally:
            _renew_constants(model)


def _renew_constants(model: Any) -> bool:
    """Makes the constants of layers again, which a layer without `adapt` makes in the graph that Keras builds it in.

    Returns:
      Whether there are any.
    """
    layers = [layer for layer in filter(_keras.finalizes, _keras.sublayers(model)) if layer.built]
    for layer in layers:
        layer.finalize_state()
    return bool(layers)


def _is_unbuilt(model: Any) -> bool:
    """Returns whether a step may have to make variables of layers, metrics, or other optimizers than the compiled one.

    One replica makes the optimizers' in its first step. Optimizers of tf_keras do not say whether they have any.
    """
    layers = [layer for layer in _keras.sublayers(model) if layer is not model]
    # Where `test_step` cannot be traced, the objects that hold the compiled losses and metrics are not built either.
    in_tf_keras = (model.compiled_loss, model.compiled_metrics) if _keras.family(model) == "tf_keras" else ()
    if not all(getattr(part, "built", True) for part in (*layers, *model.metrics, *in_tf_keras)):
        return True
    others = [one for one in _keras.optimizers(model).values() if one is not model.optimizer]
    several = model.distribute_strategy.num_replicas_in_sync > 1
    return several and not all(getattr(one, "built", False) for one in others)


@tf.autograph.experimental.do_not_convert
def explain(error: Exception) -> None:
    """Raises a `UsageError` for what tf_keras refuses in a step of the model's own on several replicas."""
    if "losses.Reduction" in str(error):
        raise LossError(
            "tf_keras refuses a loss that divides by the batch in a step of the model's own on several replicas; make "
            'it with reduction="none", and take tf.reduce_mean of its values, which looplib weighs right'
        ) from error

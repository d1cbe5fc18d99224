"""Checks that a trainer and evaluators can run together; makes missing optimizer slots; collects the state."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import tensorflow as tf

from looplib.base.folders import is_name
from looplib.base.messages import join_names, shown
from looplib.cluster import runtime
from looplib.compat import keras as _keras
from looplib.compat.row_updates import is_divided
from looplib.errors import ActionError, ExportError, SettingError, StateError, StrategyError, TaskError, VariableError
from looplib.task.state import state_of, variables_of
from looplib.task.trainer import Adapter, Evaluator, OwnLoop, Trainer

_ADAPTER_NAMES = ("own_actions", "rates", "own_steps_per_loop")


@runtime_checkable
class _Buildable(Protocol):
    """An optimizer that can make its slots at once, unlike the ones of `tf_keras.optimizers.legacy`."""

    def build(self, variables: Sequence[Any]) -> None:
        """Makes the slots."""


def check_tasks(trainer: Any, evaluator: Any) -> dict[str, Evaluator]:
    """Returns the evaluators of a controller by name; `UsageError` for objects of other kinds, or nothing at all."""
    evaluators = evaluator if isinstance(evaluator, dict) else {"eval": evaluator} if evaluator is not None else {}
    if trainer is None and not evaluators:
        raise TaskError("a controller needs a trainer, an evaluator or both; it got neither")
    if trainer is not None and not isinstance(trainer, Trainer):
        raise TaskError(
            f"trainer is {shown(trainer)}; expected an instance of a looplib.Trainer subclass (one of "
            "Orbit's is wrapped: looplib.OrbitTrainer(trainer))"
        )
    for name, value in evaluators.items():
        if not isinstance(value, Evaluator):
            raise TaskError(
                f"evaluator {name!r} is {shown(value)}; expected a looplib.Evaluator instance (one of "
                "Orbit's is wrapped: looplib.OrbitEvaluator(evaluator))"
            )
        if name == "train" or not isinstance(name, str) or not (re.fullmatch(r"[\w.-]+", name) and is_name(name)):
            raise TaskError(
                f"an evaluator is named {name!r}; expected letters, digits, '.', '_' or '-', and not 'train'"
            )
    for task in (trainer, *evaluators.values()):
        if task is not None and not task.base_initialized:
            raise TaskError(
                f"{type(task).__name__}.__init__ does not call that of its base class; call "
                "super().__init__(...) in it, with the arguments that the base class takes"
            )
        defined = [name for name in _ADAPTER_NAMES if any(name in vars(kind) for kind in type(task).__mro__)]
        if defined and not isinstance(task, Adapter):
            raise TaskError(
                f"{type(task).__name__} defines {join_names(defined)}, which the controller reads of a "
                "looplib.Adapter only; make looplib.Adapter its first base class, or rename what it defines"
            )
    return dict(evaluators)


def check_kinds(strategy: Any, actions: Any) -> None:
    """Raises `UsageError` if the strategy is not one, or an action cannot be called."""
    if not isinstance(strategy, tf.distribute.Strategy):
        raise StrategyError(
            f"strategy is {strategy!r}; expected a tf.distribute.Strategy, as looplib.runtime.setup returns"
        )
    if isinstance(strategy, (tf.distribute.MirroredStrategy, tf.distribute.OneDeviceStrategy)):
        found = [device.name.partition("device:")[2] for device in tf.config.list_logical_devices()]
        wanted = [name.partition("device:")[2] for name in strategy.extended.worker_devices]  # such as CPU:0
        if missing := [name for name in wanted if name not in found]:
            raise StrategyError(
                f"the strategy has a replica on {missing[0]}, and TensorFlow has {join_names(found)} only, where it "
                "would run instead, or wait without end for another; name devices that exist, or divide one by "
                "tf.config.set_logical_device_configuration first"
            )
    if isinstance(actions, str) or not isinstance(actions, Sequence):
        raise ActionError(f"actions is {shown(actions)}; expected a list of functions of one looplib.Event")
    for action in actions:
        if not callable(action) or isinstance(action, type):
            found = "a class, of which an instance is needed" if isinstance(action, type) else "not callable"
            raise ActionError(f"the action {action!r} is {found}; expected a function of one looplib.Event")


def check_settings(**settings: tuple[Any, type]) -> None:
    """Raises `UsageError` if an argument, by name, is of another type than the one beside it."""
    for name, (value, kind) in settings.items():
        if not isinstance(value, kind):
            raise SettingError(f"{name} is {shown(value)}; expected a looplib.{kind.__name__}")


def check_together(
    trainer: Trainer | None, evaluators: Mapping[str, Evaluator], strategy: tf.distribute.Strategy, engine: str
) -> None:
    """Raises `UsageError` where the tasks cannot run together, on this strategy and engine.

    That is for two Keras families, variables of another strategy, models without variables where they must have them,
    or tasks with different models of one name.
    """
    tasks = [*([trainer] if trainer else []), *evaluators.values()]
    held = {
        f"{type(task).__name__}.{name}": value
        for task in tasks
        for name, value in vars(task).items()
        if name != "global_step"  # which belongs to the controller that had the task before
    }
    _keras.check_one_family(held)
    if engine == "eager" and isinstance(strategy, tf.distribute.TPUStrategy):
        raise StrategyError(
            "a TPU runs only compiled programs, and the eager loop does not compile; debug on the host, with "
            "--strategy=one_device --loop=eager"
        )
    may_wait = {id(value) for task in tasks if isinstance(task, OwnLoop) for value in vars(task).values()}
    for what, value in held.items():
        if _keras.is_model(value) and not value.built and id(value) in may_wait:
            continue  # the task's own loop may build it
        if _keras.is_model(value) and not value.built:
            _check_unbuilt(what, strategy, engine)
        elif not _keras.is_layer(value) or value.built:
            runtime.check_placement(strategy, what, _variables(value))
    owners = {}
    for task in tasks:
        for name, value in vars(task).items():
            owner = owners.setdefault(name, task)
            if getattr(owner, name) is not value and _keras.is_layer(value) and value.built and value.variables:
                raise StateError(
                    f"{type(task).__name__}.{name} is not the object that {type(owner).__name__} holds under that "
                    "name, but a checkpoint stores one object per name; give an evaluator the trainer's own model, or "
                    "another name"
                )


def collect_state(trainer: Trainer | None, evaluators: Mapping[str, Evaluator]) -> dict[str, Any]:
    """Returns the complete state of a run, by attribute name: the trainer's, and the evaluators' without metrics.

    It is called after tracing, when all variables exist.
    """
    objects = state_of(trainer) if trainer else {}
    for task in evaluators.values():
        for name, value in state_of(task).items():
            if not _keras.is_metrics(getattr(task, name, None)):
                objects.setdefault(name, value)
    return objects


def build_optimizers(trainer: Trainer, strategy: tf.distribute.Strategy, engine: str) -> None:
    """Makes the slots of an optimizer that has none yet, so that all state exists.

    Only where it is clear which variables it trains: those of the only layer that the trainer holds. An optimizer of
    `tf_keras.optimizers.legacy` makes its own when a step is traced, so that only the eager loop needs this; the other
    layers may be parts of the largest one.
    """
    held = list(vars(trainer).values())
    layers = [value for value in held if _keras.is_layer(value) and value.built and value.trainable_variables]
    variables = [value for value in held if isinstance(value, tf.Variable) or _keras.is_variable(value)]
    loose = any(variable.trainable for variable in variables)  # the optimizer may have to train them too
    if not layers or loose:
        return
    trained = max((layer.trainable_variables for layer in layers), key=len)
    known = {id(variable) for variable in trained}
    in_one = all(id(variable) in known for layer in layers for variable in layer.trainable_variables)
    for optimizer in filter(_keras.is_optimizer, held):
        if isinstance(optimizer, _Buildable):
            if len(layers) == 1:
                try:
                    with strategy.scope():
                        optimizer.build(trained)
                except RuntimeError as error:  # Keras's, for an optimizer of another strategy
                    raise VariableError(
                        f"{type(optimizer).__name__} was made outside the scope of {type(strategy).__name__}; build "
                        "models, optimizers and metrics inside `with strategy.scope():`"
                    ) from error
        elif engine == "eager" and in_one:
            _trace_update(optimizer, trained, strategy)


def _trace_update(optimizer: Any, variables: Sequence[tf.Variable], strategy: tf.distribute.Strategy) -> None:
    """Traces an update that is never run, in which an optimizer makes its variables."""

    def update() -> None:
        optimizer.apply_gradients([(tf.zeros_like(variable), variable) for variable in variables])

    tf.function(lambda: strategy.run(update), autograph=False).get_concrete_function()


def _check_unbuilt(what: str, strategy: tf.distribute.Strategy, engine: str) -> None:
    if engine == "eager" or strategy.num_replicas_in_sync > 1 or runtime.is_remote(strategy):
        raise VariableError(
            f"{what} has no variables yet; on several replicas or workers, and in the eager loop, a model must have "
            "them before the first step: give it an Input layer, or call it once in __init__"
        )


def _variables(value: Any) -> list[Any]:
    """Returns the variables of Keras or TensorFlow that an attribute holds, without vocabularies of tf_keras."""
    if isinstance(value, tf.Variable):
        return [value]
    if isinstance(value, (list, tuple)):
        return [variable for item in value for variable in _variables(item)]
    if _keras.is_variable(value):
        return [value]
    if isinstance(value, tf.Module) or _keras.family(value):
        found = getattr(value, "variables", [])
        return [
            v for v in (found() if callable(found) else found) if isinstance(v, tf.Variable) or _keras.is_variable(v)
        ]
    return []


def check_rows(task: Any) -> None:
    """Raises `UsageError` if no worker has all rows of a table, which an export needs."""
    if any(is_divided(variable) for _, variable in variables_of(state_of(task))):
        raise ExportError(
            "each worker has its parts of the ShardedEmbedding alone, and an export needs all; export the checkpoint "
            "by one process, with --mode=export or `python -m looplib export`"
        )

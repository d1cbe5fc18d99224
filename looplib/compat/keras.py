"""The two Keras families: which of them an object belongs to, and what looplib needs to know about it.

Keras 3 (`keras`) and Keras 2 (`tf_keras`) both run on TensorFlow, and neither's optimizer works on the other's model.
This imports neither: it recognizes objects by the modules of their classes.
"""

import contextlib
import functools
import importlib.abc
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import tensorflow as tf

from looplib.compat import versions
from looplib.errors import BatchSizeError, ExportError, KerasFamilyError, SettingError, StepError

_ROOTS = {"keras": "Keras 3", "tf_keras": "tf_keras"}
_STRUCTURES = (list, tuple, dict)
GLOBAL_SEED = "seed_generator_state"  # the name of the variable of Keras 3's own seed generator
UNSEEDED = (
    "the step draws from keras.random without a seed, or makes a seed generator; replicas cannot make one in a step, "
    "and no checkpoint has that of Keras; give the function seed=self.seeds, a keras.random.SeedGenerator that the "
    "layer or model makes in __init__"
)
_SEARCHED = (*_STRUCTURES, tf.Module, tf.train.Checkpoint)
_LISTED = (*_SEARCHED, tf.Variable, tf.random.Generator)
_HOLDERS = (  # classes beside layers whose objects may hold a state of their own
    ("metrics", "Metric"), ("losses", "Loss"), ("optimizers", "schedules", "LearningRateSchedule"),
    ("callbacks", "Callback"), ("regularizers", "Regularizer"), ("initializers", "Initializer"),
    ("constraints", "Constraint"),
)  # fmt: skip


def family(value: Any) -> str | None:
    """Returns "keras", "tf_keras" or None for the family that defines one of `value`'s base classes."""
    return family_of_class(type(value))


@functools.lru_cache(maxsize=1024)  # a list that a trainer holds may have a million items
def family_of_class(kind: type) -> str | None:
    """Returns what `family` returns for an instance of a class."""
    roots = (base.__module__.split(".")[0] for base in kind.__mro__)
    return next((root for root in roots if root in _ROOTS), None)


def imported() -> list[str]:
    """Returns the names of the families that the program has imported."""
    return [root for root in _ROOTS if root in sys.modules]


def is_own_class(value: Any) -> bool:
    """Returns whether Keras itself, of either family, defines the class of an object."""
    return type(value).__module__.split(".")[0] in _ROOTS


def is_a(value: Any, *path: str) -> bool:
    """Returns whether `value` is of a class of its own family, such as ("layers", "RNN")."""
    root = family(value)
    if root is None:
        return False
    kind = sys.modules[root]
    for name in path:
        kind = getattr(kind, name, None)
    return kind is not None and isinstance(value, kind)


def is_metric(value: Any) -> bool:
    """Returns whether `value` is a Keras metric object of either family."""
    return is_a(value, "metrics", "Metric")


def is_metrics(value: Any) -> bool:
    """Returns whether `value` is a Keras metric object, or a list or dict of only these."""
    if not isinstance(value, _STRUCTURES):
        return is_metric(value)
    items = list(value.values() if isinstance(value, dict) else value)
    return bool(items) and all(map(is_metrics, items))


def is_layer(value: Any) -> bool:
    """Returns whether `value` is a Keras layer or model of either family (tf_keras metrics, layers too, are not)."""
    return is_a(value, "layers", "Layer") and not is_metric(value)


def is_model(value: Any) -> bool:
    """Returns whether `value` is a Keras model of either family."""
    return is_a(value, "Model")


def is_variable(value: Any) -> bool:
    """Returns whether `value` is a variable of Keras 3; tf_keras has `tf.Variable`s."""
    return family(value) == "keras" and is_a(value, "Variable")


def tf_variable(variable: Any) -> tf.Variable:
    """Returns the `tf.Variable` of a variable of either family, or of TensorFlow."""
    return variable.value if is_variable(variable) else variable


def value_now(value: Any) -> Any:
    """Returns a value; for a variable of either family or of TensorFlow, a tensor of its present value."""
    variable = tf_variable(value)
    return tf.convert_to_tensor(variable) if isinstance(variable, tf.Variable) else value


def variable_path(variable: Any) -> str:
    """Returns the name of a variable of either family with the names of the layers that hold it, such as a/kernel."""
    return variable.path if is_variable(variable) else variable.name.removesuffix(":0")


def without_vocabularies(variables: Iterable[Any]) -> list[Any]:
    """Returns the variables of a layer without vocabularies, which tf_keras lists too."""
    return [variable for variable in variables if isinstance(tf_variable(variable), tf.Variable)]


def is_optimizer(value: Any) -> bool:
    """Returns whether `value` is a Keras optimizer of either family, or of `tf_keras.optimizers.legacy`."""
    return is_a(value, "optimizers", "Optimizer") or is_a(value, "optimizers", "legacy", "Optimizer")


def input_specs(model: Any) -> Any:
    """Returns the structure of `tf.TensorSpec`s of the inputs of a model; None if it has no Input layers.

    Each has a name: its key in a dict, "inputs" for one input, and else the name of its Input layer. Ragged and sparse
    inputs are refused.
    """
    inputs = getattr(model, "inputs", None)
    if not inputs:
        return None
    inputs = inputs[0] if is_a(model, "Sequential") else model.input
    if isinstance(inputs, dict):
        return {key: _spec(part, key) for key, part in inputs.items()}
    name = None if tf.nest.is_nested(inputs) else "inputs"
    return tf.nest.map_structure(lambda part: _spec(part, name or part.name), inputs)


def _spec(part: Any, name: str) -> tf.TensorSpec:
    of_tf_keras = family(part) == "tf_keras" and not isinstance(part.type_spec, tf.TensorSpec)
    if of_tf_keras or (family(part) == "keras" and (part.sparse or part.ragged)):
        raise ExportError(
            f"the input {name!r} is ragged or sparse, and an export takes dense tensors; export a model of these, "
            "or write a looplib.Trainer with an export() of its own"
        )
    return tf.TensorSpec(part.shape, part.dtype, name)


def inner_metrics(metric: Any) -> list[Any]:
    """Returns the metric, and the metrics inside it: Keras 3 wraps all compiled metrics in one."""
    return [metric, *(one for inner in getattr(metric, "metrics", ()) for one in inner_metrics(inner))]


def _within(value: Any) -> Iterable[tuple[str, Any]]:
    """Returns (name, item) of what a list, dict, layer or `tf.Module` holds, in the reverse order of the search.

    A layer's private attributes come first, because Keras also has those of a user in some, and a model's own optimizer
    last.
    """
    if isinstance(value, _STRUCTURES):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [(str(key), item) for key, item in items if isinstance(item, _LISTED) or family(item)]
    if any(is_a(value, *path) for path in _HOLDERS):
        return [(name, part) for name, part in vars(value).items() if not is_model(part)]  # of a callback, the model
    if not is_layer(value) and not isinstance(value, _SEARCHED):
        return ()
    parts = dict(vars(value))
    if is_model(value):
        parts["optimizer"] = getattr(value, "optimizer", None)
    return sorted(parts.items(), key=lambda part: (not part[0].startswith("_"), part[0] == "optimizer"))


def _reached(attributes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields (path, object) for every object reachable through attributes, each once."""
    todo, seen = list(attributes.items()), set()
    while todo:
        path, value = todo.pop()
        if id(value) not in seen:
            seen.add(id(value))
            yield path, value
            todo.extend((f"{path}/{name}", item) for name, item in _within(value))


def optimizers(holder: Any) -> dict[str, Any]:
    """Returns the Keras optimizers that a trainer holds: as attributes, in lists and dicts, models, layers and modules.

    Each has the path of its attribute, such as `optimizer`, or `model/d_optimizer` for one of a model.
    """
    return {path: value for path, value in _reached(vars(holder)) if is_optimizer(value)}


def parts(holder: Any) -> list[Any]:
    """Returns the layers, metrics and modules that something is and holds, also those in lists and dicts."""
    kinds = (is_layer, is_metric, lambda value: isinstance(value, tf.Module))
    return [value for _, value in _reached({"": holder}) if any(is_one(value) for is_one in kinds)]


def sublayers(layer: Any) -> list[Any]:
    """Returns a layer and all that it holds, also in lists and dicts, which Keras 3 does not track for TensorFlow."""
    return [part for part in parts(layer) if is_layer(part)]


def adapts(layer: Any) -> bool:
    """Returns whether a layer learns from data in its method `adapt`."""
    return callable(getattr(layer, "adapt", None))


def finalizes(layer: Any) -> bool:
    """Returns whether a layer computes with constants that its `finalize_state` makes of its variables."""
    own = getattr(type(layer), "finalize_state", None)
    return own is not getattr(module_of(layer).layers.Layer, "finalize_state", None)


def given_constants(layer: Any) -> list[Any]:
    """Returns the constants that a layer was given instead of `adapt`, which no variable holds; without lookup tables.

    These are the boundaries of a `Discretization`, mean and variance of a `Normalization`, what an own `adapt` keeps.
    """
    found = ()
    if is_a(layer, "layers", "Normalization"):
        found = (layer.input_mean, layer.input_variance)
    elif is_a(layer, "layers", "Discretization"):
        # In tf_keras a variable has what an adapted layer makes its boundaries of.
        found = (layer.bin_boundaries if family(layer) == "keras" else layer.input_bin_boundaries,)
    elif adapts(layer) and not is_own_class(layer) and not finalizes(layer):
        values = [value for value in vars(layer).values() if not tf.is_symbolic_tensor(value)]
        found = [value for value in values if isinstance(value, (float, np.ndarray, np.generic, tf.Tensor))]
    return [float(number) for value in found if np.asarray(value).dtype.kind in "iuf" for number in np.ravel(value)]


def with_inner(outer: Iterable[Any]) -> list[Any]:
    """Returns Keras optimizers and those inside of them: one that scales the loss holds the one that updates."""
    found, todo = [], list(outer)
    while todo:
        value = todo.pop(0)
        if all(value is not other for other in found):
            found.append(value)
            todo += optimizers(value).values()
    return found


def averaged(optimizer: Any, variables: Iterable[Any], with_updated: bool) -> list[tuple[tf.Variable, tf.Variable]]:
    """Returns (variable, its moving average) for each average that a built optimizer with `use_ema` keeps.

    An optimizer that has made an update has none, unless `with_updated`.
    """
    # Neither family has a public name for these.
    averages = getattr(optimizer, "_model_variables_moving_average", None) or []
    if not averages or (int(tf.identity(tf_variable(optimizer.iterations))) and not with_updated):
        return []
    if family(optimizer) == "tf_keras":
        places = getattr(optimizer, "_index_dict", {})
        numbers = [(variable, places.get(optimizer._var_key(variable))) for variable in variables]
        pairs = [(variable, averages[number]) for variable, number in numbers if number is not None]
    else:
        pairs = zip(getattr(optimizer, "_trainable_variables", []), averages)
    return [(tf_variable(variable), tf_variable(average)) for variable, average in pairs if average is not None]


def rate_or_schedule(optimizer: Any, rate: Any) -> Any:
    """Returns the rate or schedule of an optimizer of tf_keras, whose public attribute has the last update's rate."""
    return getattr(optimizer, "_learning_rate", rate)


def scales_loss(optimizer: Any) -> bool:
    """Returns whether a Keras optimizer scales the loss, so that an overflow of its gradients is no fault."""
    return getattr(optimizer, "inner_optimizer", None) is not None


def loss_scale(optimizer: Any) -> tf.Variable | None:
    """Returns the variable by which an optimizer scales the loss; None without one, or in another version."""
    # tf_keras has no public name for it.
    of_tf_keras = getattr(getattr(optimizer, "_loss_scale", None), "current_loss_scale", None)
    scale = tf_variable(getattr(optimizer, "dynamic_scale", of_tf_keras))
    return scale if isinstance(scale, tf.Variable) else None


def mask_of(value: Any) -> tf.Tensor | None:
    """Returns the mask that layers and losses of either family leave at a tensor; None for none."""
    return getattr(value, "_keras_mask", None)  # neither family has a public name for it


def with_mask(value: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
    """Leaves a mask at a tensor, unless it is None; returns the tensor."""
    if mask is not None:
        value._keras_mask = mask
    return value


def changes_when_called(layer: Any) -> bool:
    """Returns whether a call of a layer may change a state in it: of random numbers, or moving statistics."""
    # tf_keras draws from TensorFlow's own state by default, which is in no variable.
    parts = (layer, *layer.submodules) if family(layer) == "tf_keras" else ()
    return bool(layer.non_trainable_variables) or any(getattr(part, "_random_generator", None) for part in parts)


def computes_in(model: Any, *types: str) -> bool:
    """Returns whether a model, or a layer directly in it, computes in one of some types, such as "float16"."""
    layers = [model, *(model.layers if is_model(model) else ())]
    return any(is_layer(layer) and layer.compute_dtype in types for layer in layers)


def check_one_family(objects: Mapping[str, Any]) -> None:
    """Raises `UsageError` unless these objects, by name, are of one family, and Keras 3 runs on TensorFlow."""
    names: dict[str, str] = {}
    for name, value in objects.items():
        if root := family(value):
            names.setdefault(root, name)
    if len(names) > 1:
        found = " and ".join(f"{name} is of {_ROOTS[root]}" for root, name in sorted(names.items()))
        raise KerasFamilyError(
            f"two Keras families are mixed: {found}; expected one family, so build the model, its optimizer and its "
            "metrics all from `keras` or all from `tf_keras`"
        )
    if "keras" in names and sys.modules["keras"].backend.backend() != "tensorflow":
        raise KerasFamilyError(
            f"Keras 3 runs on the {sys.modules['keras'].backend.backend()} backend; looplib trains on TensorFlow, so "
            "set KERAS_BACKEND=tensorflow in the environment"
        )


def untracked_variables(value: Any) -> list[Any]:
    """Returns the state of a Keras object, or of lists and dicts of them, that `tf.train.Checkpoint` would miss.

    In Keras 3 these are the variables of metrics, the seeds of generators and layers, what a layer or a subclassed
    model keeps in a list or dict, the optimizers in an optimizer, and what losses, metrics, schedules, callbacks,
    regularizers, initializers and constraints hold; in tf_keras the random generators of layers such as dropout, the
    states of stateful recurrent layers, and what losses and the others that no checkpoint tracks hold.
    """
    if isinstance(value, _STRUCTURES):
        return [variable for _, item in _within(value) for variable in untracked_variables(item)]
    if family(value) is None:
        return []
    trackable = isinstance(value, tf.Module) or is_layer(value) or is_optimizer(value)
    below = tf.train.TrackableView(value).descendants() if trackable else ()
    tracked = {id(one) for part in below for one in (part, tf_variable(part))}
    found = _of_tf_keras(value) if family(value) == "tf_keras" else _of_keras_3(value, tracked)
    tracked |= {id(state) for state in found}
    loose = {id(state): state for state in _loose(value)}
    return [*found, *(state for key, state in loose.items() if key not in tracked)]


def _of_tf_keras(value: Any) -> list[Any]:
    # tf_keras keeps them out of checkpoints, and has no public name for the generators.
    modules = (value, *value.submodules) if isinstance(value, tf.Module) else ()
    holders = [getattr(part, "_random_generator", None) for part in modules]
    found = [getattr(holder, "_generator", None) for holder in holders]
    found += [state for part in modules if is_a(part, "layers", "RNN") for state in tf.nest.flatten(part.states)]
    return [state for state in found if isinstance(state, (tf.random.Generator, tf.Variable))]


def _of_keras_3(value: Any, tracked: set[int]) -> list[Any]:
    if is_metric(value) or is_a(value, "random", "SeedGenerator"):
        return [variable.value for variable in (value.variables if is_metric(value) else [value.state])]
    if is_optimizer(value):
        return [part for part in with_inner([value]) if id(part) not in tracked]
    if not is_layer(value):
        return []
    missed = [part for part in with_inner(optimizers(value).values()) if id(part) not in tracked]
    own = [*value.variables, *(variable for optimizer in missed for variable in optimizer.variables)]
    return [variable.value for variable in own if id(variable) not in tracked]


def _loose(value: Any) -> Iterator[Any]:
    """Yields variables and generators in what a Keras object holds beside layers, and any `tf.Variable` in Keras 3.

    Those of the metrics of a layer are left out.
    """
    reached = [part for _, part in _reached({"": value})]
    holders = [part for part in reached if any(is_a(part, *path) for path in _HOLDERS)] if is_layer(value) else [value]
    of_metrics = [one for part in reached if is_metric(part) for one in part.variables] if is_layer(value) else ()
    left_out = {id(tf_variable(one)) for one in of_metrics}
    every = [part for holder in holders for _, part in _reached({"": holder})]
    every += [part for part in reached if isinstance(part, tf.Variable) and family(value) == "keras"]
    for part in every:
        state = part.state if is_a(part, "random", "SeedGenerator") else part
        state = tf_variable(state)
        if isinstance(state, (tf.Variable, tf.random.Generator)) and id(state) not in left_out:
            yield state


def make_outside(make: Callable[..., Any], **settings: Any) -> Any:
    """Makes a variable outside of the function that is traced, with its initial value, as tf_keras's layers do.

    For `tf.variable_creator_scope` in the scope of a strategy. A variable whose initial value is computed in the
    function is made by `make`.

    Raises:
      UsageError: for the seed of Keras's global generator.
    """
    value = settings["initial_value"]
    if tf.is_symbolic_tensor(value):
        value = tf.get_static_value(value)
    if GLOBAL_SEED in str(settings.get("name")) and tf.distribute.has_strategy():
        raise StepError(UNSEEDED)
    if tf.executing_eagerly() or value is None:
        return make(**settings)
    settings["initial_value"] = value
    known = inspect.signature(tf.Variable.__init__).parameters
    # A graph numbers a scope that is entered again, as that of a metric for its second variable; Keras does not.
    path = getattr(sys.modules.get("keras.src.backend.common.name_scope"), "current_path", str)()
    with tf.init_scope(), tf.name_scope(f"{path}/") if path else contextlib.nullcontext():
        return tf.Variable(**{name: value for name, value in settings.items() if name in known})


def makes_sums_late(metric: Any) -> bool:
    """Returns whether a metric makes sums in its next update: as `F1Score` and `R2Score` do."""
    return not metric.variables or vars(metric).get("_built") is False


def make_sums_outside(make: Callable[..., Any], **settings: Any) -> Any:
    """Makes a sum that a metric of Keras keeps as `make_outside` does, and other variables by `make`.

    Some metrics of Keras 3, such as `F1Score`, make their sums when they are first updated.
    """
    sums = (tf.VariableSynchronization.ON_READ, tf.VariableAggregation.SUM)
    is_sum = (settings.get("synchronization"), settings.get("aggregation")) == sums
    return make_outside(make, **settings) if is_sum else make(**settings)


def when_imported(name: str, function: Callable[[types.ModuleType], None]) -> None:
    """Calls a function of a Keras family's module now, or right after it is imported: a program may do so late.

    Keras has no configuration of its own that would have the settings before. Python looks for a module at the finders
    of `sys.meta_path`; the one here takes itself out at once.
    """
    if name in sys.modules:
        function(sys.modules[name])
        return

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, fullname: str, path: object, target: object = None) -> Any:
            if fullname != name:
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.loader is not None:
                execute = spec.loader.exec_module

                def execute_and_call(module: types.ModuleType) -> None:
                    execute(module)
                    function(module)

                spec.loader.exec_module = execute_and_call
            return spec

    sys.meta_path.insert(0, Finder())


def module_of(value: Any) -> Any:
    """Returns the module of the family of an object: `keras` or `tf_keras`."""
    return sys.modules[family(value)]


def refuse_limits(model: Any) -> None:
    """Raises `UsageError` where Keras 3 is set to end each `fit` early, for trials of a script."""
    config = sys.modules["keras"].config if family(model) == "keras" else None
    for name in ("max_epochs", "max_steps_per_epoch"):
        limit = getattr(config, name, None)  # Keras has them since 3.10
        if limit is not None and limit():
            raise SettingError(
                f"keras.config.{name} is {limit()}, a limit of fit that a Controller does not have; give "
                f"controller.train fewer epochs or steps, and call keras.config.set_{name}(None) or unset "
                f"KERAS_{name.upper()}"
            )


def has_own_step(model: Any, step: str = "train_step") -> bool:
    """Returns whether a model has a `train_step`, or another step, of its own in place of Keras's."""
    return getattr(type(model), step).__module__.split(".")[0] not in ("keras", "tf_keras")


def unlisted_metrics(model: Any) -> list[Any]:
    """Returns the metrics that a model holds and its `metrics`, where it has a property of its own, leaves out."""
    listed = {id(variable) for metric in model.metrics for variable in metric.variables}
    held = [*filter(is_metric, parts(model))]
    held += compiled_metrics(model)
    return [metric for metric in held if any(id(variable) not in listed for variable in metric.variables)]


def compiled_metrics(model: Any) -> list[Any]:
    """Returns the metrics of the compiled losses and metrics of a model of tf_keras; [] of Keras 3."""
    if family(model) == "keras":
        return []
    return [one for part in (model.compiled_loss, model.compiled_metrics) if part for one in part.metrics]


def is_batch_normalization(layer: Any) -> bool:
    """Returns whether a layer normalizes by the statistics of its batch."""
    return is_a(layer, "layers", "BatchNormalization")


def has_own_statistics(layer: Any) -> bool:
    """Returns whether a layer normalizes by the statistics of a replica's own examples."""
    return is_batch_normalization(layer) and layer.trainable and not getattr(layer, "synchronized", False)


def fixed_batch(model: Any) -> int | None:
    """Returns the batch size that the Input layers of a model say; None if they say none."""
    sizes = [spec.shape[0] for spec in tf.nest.flatten(getattr(model, "inputs", None) or [])]
    return next((size for size in sizes if size is not None), None)


def check_stateful_batch(model: Any, size: float | None) -> None:
    """Raises `UsageError` if the stateful layers of a model are made for other batches than a replica gets.

    Args:
      model: the model.
      size: the examples that each replica gets; None if that is not known.
    """
    stateful = any(is_a(layer, "layers", "RNN") and layer.stateful for layer in sublayers(model))
    expected = fixed_batch(model) if stateful else None
    if expected and size is not None and size != expected:
        raise BatchSizeError(
            f"the stateful layers of {type(model).__name__} are made for batches of {expected}, and each of "
            f"{model.distribute_strategy.num_replicas_in_sync} replicas gets {size:g} examples; change the model, or "
            "the global batch size"
        )


def unpacked(model: Any, batch: Any) -> tuple[Any, Any, Any]:
    """Returns the inputs, targets and sample weights of a batch; None for what it does not have."""
    return module_of(model).utils.unpack_x_y_sample_weight(batch)


@runtime_checkable
class _Preprocessing(Protocol):
    """A task of KerasHub, whose `fit` preprocesses what it is given."""

    preprocessor: Any

    def preprocess_samples(self, x: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """Returns a batch for its steps."""


def preprocessing(model: Any) -> Callable[..., Any] | None:
    """Returns what the `fit` of a model does with inputs, targets and weights first; None for nothing."""
    has_own = isinstance(model, _Preprocessing) and model.preprocessor is not None
    return model.preprocess_samples if has_own else None


def served(model: Any) -> Any:
    """Returns the model to export of one that is trained: the student of a `keras.distillation.Distiller`."""
    return model.student if is_a(model, "distillation", "Distiller") else model


versions.check_legacy(tf.__version__)
when_imported("keras", lambda module: versions.check_keras(module.__version__, tf.__version__))
when_imported("tf_keras", lambda module: versions.check_tf_keras(module.__version__, tf.__version__))

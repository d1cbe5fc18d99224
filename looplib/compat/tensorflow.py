"""TensorFlow: its import, and what it does not publish, each in a guarded function with a fall-back.

TensorFlow is imported without the garbage collector. An import makes hundreds of thousands of objects, and nearly all
of them stay; the collector would visit them again and again, which takes a fifth of the time of the import.

Everything else here depends on a private attribute, on a module that is not public, or on the words of a message.
Another version of TensorFlow may change any of these, so each function returns None, False or nothing where TensorFlow
is not as expected, and looplib then says less and does not fail. `tests/compat/tf_test.py` tries each with the
installed TensorFlow, and names what that version changed; all work with the versions that `versions.py` knows. Of this
kind is also `replay/xla.py`, for messages and programs of XLA that one tool reads.
"""

import builtins
import collections
import concurrent.futures
import dataclasses
import functools
import gc
import logging as python_logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

from looplib.base.messages import gist
from looplib.compat import versions
from looplib.errors import DeviceError, UsageError, WorkerError

_collects = gc.isenabled()
gc.disable()
try:
    import tensorflow as tf
except ModuleNotFoundError as error:
    if error.name != "tensorflow":
        raise
    raise versions.not_installed() from error
except TypeError as error:
    if sys.flags.optimize < 2:
        raise
    raise DeviceError("TensorFlow cannot be imported under python -OO, which leaves out docstrings; use -O") from error
finally:
    if _collects:
        gc.enable()
    gc.freeze()  # modules stay; without this, the first collections of a program go through all their objects

from absl import logging

versions.check_tensorflow(tf.__version__)

_FOLDER = os.path.dirname(tf.__file__) + os.sep
_STRATEGIES = {
    "_DefaultDistributionStrategy": "DefaultStrategy",
    "CollectiveAllReduceStrategy": "MultiWorkerMirroredStrategy",
}
_UNREACHABLE = (tf.errors.UnavailableError, tf.errors.AbortedError)

# To type checkers, all of TensorFlow is `Any`. These tell its tensors and data sets from what is none.


class TensorLike(Protocol):
    """A `tf.Tensor`, for type checkers."""

    @property
    def dtype(self) -> Any:
        """The type of its elements."""


class DatasetLike(Protocol):
    """A `tf.data.Dataset`, for type checkers."""

    @property
    def element_spec(self) -> Any:
        """The structure of `tf.TypeSpec`s of its elements."""


# The start of TensorFlow's devices.

_stack_at_start: list[traceback.FrameSummary] = []


def watch() -> None:
    """Notes the stack that starts TensorFlow's devices, see `stack_at_start`.

    Some settings, such as the number of virtual devices, count only before that.
    """
    try:
        from tensorflow.python.eager import context as private

        context = private.context()
        start = context.ensure_initialized
    except (ImportError, AttributeError):
        return

    def noting() -> None:
        context.__dict__.pop("ensure_initialized", None)
        if not _stack_at_start:
            _stack_at_start.extend(traceback.extract_stack())
        start()

    if not started():
        context.ensure_initialized = noting


def started() -> bool:
    """Returns whether TensorFlow has started its devices."""
    threads = tf.config.threading.get_inter_op_parallelism_threads()
    try:
        tf.config.threading.set_inter_op_parallelism_threads(threads + 1)
    except RuntimeError:
        return True
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    return False


def stack_at_start() -> list[traceback.FrameSummary]:
    """Returns the stack that started TensorFlow's devices; [] if they have not started, or it is not known."""
    return _stack_at_start


# The functions that AutoGraph converts.

_builtins: tuple[object, ...] = ()


def keep_builtins() -> None:
    """Prevents AutoGraph from mistaking a method for a built-in function, which it does not convert.

    AutoGraph knows built-in functions by their addresses at the import of TensorFlow. In a notebook, `input` is then a
    method that lives as long as the cell. A method that later gets this address would not be converted, and fail at a
    `tf.range`. This puts in the addresses of the present built-in objects, and keeps these alive.
    """
    global _builtins
    try:
        from tensorflow.python.autograph.pyct import inspect_utils
    except ImportError:
        return
    if isinstance(getattr(inspect_utils, "_BUILTIN_FUNCTION_IDS", None), frozenset):
        _builtins = tuple(vars(builtins).values())
        inspect_utils._BUILTIN_FUNCTION_IDS = frozenset(map(id, _builtins))


def functions_in(concrete: tf.types.experimental.ConcreteFunction) -> set[str]:
    """Returns the names of all functions that a traced function calls."""
    return {function.signature.name for function in concrete.graph.as_graph_def().library.function}


_READS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp"})


def updated_by(concrete: tf.types.experimental.ConcreteFunction) -> set[int]:
    """Returns the `identity_of` the variables that a traced function may update."""
    captured = concrete.captured_inputs
    inputs = concrete.inputs[len(concrete.inputs) - len(captured) :]
    handles = {inside.name: id(handle) for inside, handle in zip(inputs, captured)}
    found = set()
    for op in concrete.graph.get_operations():
        found |= {handles.get(part.name) for part in _changed_by(op)}
    return found - {None}


def _changed_by(op: tf.Operation) -> list[tf.Tensor]:
    """Returns the inputs of an op that it may change, if they are handles of variables."""
    if op.type in _READS:
        return []
    try:
        reads = op.get_attr("_read_only_resource_inputs")  # of an op that calls a function
    except ValueError:
        reads = ()
    return [part for number, part in enumerate(op.inputs) if number not in reads]


def changed_since(before: int, among: Callable[[], Iterable[tuple[str, tf.Variable]]]) -> list[str]:
    """Returns which variables the ops of the present trace after the first ones, `before`, may update, by their names.

    `among` returns variables with names; it is called if any is updated. None are known in a branch of a condition, and
    without a trace.
    """
    graph = tf.compat.v1.get_default_graph()
    handles = {inside.name: id(outside) for outside, inside in getattr(graph, "captures", ())}
    found = {handles.get(part.name) for op in graph.get_operations()[before:] for part in _changed_by(op)}
    return [name for name, variable in among() if identity_of(variable) in found] if found - {None} else []


_CALLS = {"PartitionedCall": ["f"], "StatefulPartitionedCall": ["f"]}
_CALLS |= dict.fromkeys(("If", "StatelessIf"), ["then_branch", "else_branch"])


def graphs_called_by(op: tf.Operation) -> list[Any]:
    """Returns the graphs, with `inputs` and `outputs`, of the functions that an op calls with its last inputs.

    One of them for a call, two for a condition; [] for any other op, and where TensorFlow does not tell.
    """
    graphs = (graph_of(op.graph, op.get_attr(name).name) for name in _CALLS.get(op.type, ()))
    return [graph for graph in graphs if graph is not None]


def graph_of(graph: tf.Graph, name: str) -> Any:
    """Returns the graph of a function that a graph calls; None if TensorFlow does not hand it out."""
    try:
        return graph._get_function(name).graph
    except AttributeError:
        return None


def identity_of(variable: object) -> int:
    """Returns a number that is equal for a variable and its wrappers, such as those for parameter servers."""
    return id(getattr(variable, "handle", variable))


# The words of errors.


def lost_server(error: BaseException, of_any_process: bool = False) -> UsageError | None:
    """Returns the `UsageError` for a parameter server that could not be reached; None for any other error.

    With `of_any_process`, each process that cannot be reached is known to be a parameter server.
    """
    # TensorFlow's own ClusterCoordinator recognizes them by these words.
    if not isinstance(error, _UNREACHABLE) or not (of_any_process or "/job:ps" in str(error)):
        return None
    return WorkerError(
        f"a parameter server was lost, with its weights ({gist(error)}); restart all processes to resume from the "
        "newest checkpoint"
    )


def name_of(strategy: tf.distribute.Strategy) -> str:
    """Returns the public name of a strategy's class; TensorFlow up to 2.22 uses other names for two of them."""
    name = type(strategy).__name__.removesuffix("V2")
    return _STRATEGIES.get(name, name)


_Made = TypeVar("_Made")


def outside(make: Callable[[], _Made]) -> _Made:
    """Returns what a function makes, such as a variable of the host, as if no scope of a strategy were entered.

    A scope, or a graph that is traced, belongs to a thread, so that another thread is outside of it.
    """
    with concurrent.futures.ThreadPoolExecutor(1, "looplib-outside") as executor:
        return executor.submit(make).result()


def worker_devices(strategy: tf.distribute.Strategy) -> tuple[str, ...]:
    """Returns the names of the devices of this process's replicas; the default strategy has none."""
    return tuple(strategy.extended.worker_devices)


def log_warnings_only() -> None:
    """Leaves TensorFlow's own notes out of the log; its warnings and errors stay."""
    tf.get_logger().setLevel("WARNING")

    def is_kept(record: python_logging.LogRecord) -> bool:  # some modules log by absl
        return record.levelno >= python_logging.WARNING or not record.pathname.startswith(_FOLDER)

    logging.get_absl_handler().addFilter(is_kept)


def log_once() -> None:
    """Makes TensorFlow print each warning once: mutes its own handler while the root logger has one.

    TensorFlow itself sees to that where the root logger has a handler when it is imported.
    """
    for handler in tf.get_logger().handlers:
        handler.addFilter(lambda _: not (tf.get_logger().propagate and python_logging.getLogger().handlers))


def log_errors_only() -> None:
    """Leaves TensorFlow's own warnings out of the log, too."""
    tf.get_logger().setLevel("ERROR")


# The keys of a checkpoint, as TensorFlow's guide to checkpoints shows them.
OBJECT_GRAPH_KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"
_VARIABLE, _PYTHON_STATE = "/.ATTRIBUTES/VARIABLE_VALUE", "/.ATTRIBUTES/py_state"


def variable_key(name: str) -> str:
    """Returns the key of a variable that a checkpoint holds under a name."""
    return name + _VARIABLE


def python_state_key(name: str) -> str:
    """Returns the key of a `tf.train.experimental.PythonState` that a checkpoint holds under a name."""
    return name + _PYTHON_STATE


def is_variable_key(key: str) -> bool:
    """Returns whether a key of a checkpoint belongs to a variable."""
    return key.endswith(_VARIABLE)


def name_of_variable(key: str) -> str:
    """Returns the name under which a checkpoint holds the variable of a key."""
    return key.removesuffix(_VARIABLE)


def object_graph(reader: Any) -> Any:
    """Returns the structure of the objects that a checkpoint was written from, for `tf.train.load_checkpoint`'s reader.

    It is a `TrackableObjectGraph` with `nodes`, or None where this version of TensorFlow keeps it in another way. A
    checkpoint that cannot be read, or has none, raises ValueError or `tf.errors.OpError`.
    """
    try:
        from tensorflow.core.protobuf import trackable_object_graph_pb2 as private  # it has no public name

        parse = private.TrackableObjectGraph.FromString
    except (ImportError, AttributeError):
        return None
    return parse(reader.get_tensor(OBJECT_GRAPH_KEY))


# Names of ops in the messages of errors that a data set raised.
_OF_THE_INPUT = re.compile("IteratorGetNext|user-defined function passed to")


def is_of_the_input(error: BaseException) -> bool:
    """Returns whether an error was raised by the ops of a data set, as far as TensorFlow's message says; else False."""
    return bool(_OF_THE_INPUT.search(str(error)))


_WRONG_LENGTH = re.compile(r"dataset was expected to contain (\d+) elements? but contained ((?:at least|only) \d+)")


def lengths_of_a_wrong_epoch(error: BaseException) -> tuple[str, str] | None:
    """Returns (the asserted cardinality of a data set, its actual one) from the error of a wrong one; else None."""
    found = _WRONG_LENGTH.search(str(error))
    return (found[1], found[2]) if found else None


_NOT_IN_XLA = re.compile(r"\(No registered '(\w+)' OpKernel for XLA_")


def lacking_in_xla(error: BaseException) -> list[str]:
    """Returns the types of the ops for which XLA refused a function, as far as TensorFlow's message says; else []."""
    return sorted(set(_NOT_IN_XLA.findall(str(error))))


def nodes_in(graph: tf.compat.v1.GraphDef) -> Iterator[tf.compat.v1.NodeDef]:
    """Yields the nodes of a graph and of its functions."""
    yield from graph.node
    for function in graph.library.function:
        yield from function.node_def


def growing_array(nodes: Iterable[tf.compat.v1.NodeDef]) -> str | None:
    """Returns the name of an op that makes a `tf.TensorArray` grow; None for none.

    XLA leaves such an array at its size, without an error.
    """
    for node in nodes:
        if node.op == "TensorListResize" or node.attr["resize_if_index_out_of_bounds"].b:
            return node.name
    return None


def is_late_variable(error: BaseException) -> bool:
    """Returns whether an error says that a `tf.function` makes variables in its first call and cannot lift them out."""
    return type(error).__name__ == "UnliftableError"  # it has no public name (TensorFlow 2.22)


def is_merge_in_branch(error: BaseException) -> bool:
    """Returns whether an error says that replicas cannot be joined inside of a condition or another inner graph."""
    return isinstance(error, RuntimeError) and "`merge_call` called while defining a new graph" in str(error)


def is_across_replicas(error: BaseException) -> bool:
    """Returns whether an error says that a replica has called what only the code around all replicas can call."""
    return isinstance(error, RuntimeError) and "cross-replica context" in str(error)


def is_merge_of_some(error: BaseException) -> bool:
    """Returns whether an error says that some replicas were joined without the others."""
    return isinstance(error, RuntimeError) and "different number of replica_context().merge_call()" in str(error)


# How TensorFlow 2.20 to 2.22 write the state of an iterator as text. If another version has none of these names, no
# stage is found, and `data.iterator_state` saves nothing.


def keys_of_iterator_state(texts: list[bytes]) -> list[bytes]:
    """Returns the keys in each part of an iterator's state, which name its stages and buffers; b"" without any."""
    found = (re.search(rb"metadata: (\S*)", text) for text in texts)
    return [match[1] if match else b"" for match in found]


def stages_of_iterator_state(texts: list[bytes]) -> set[str]:
    """Returns the names of the stages in an iterator's state, those made inside of functions included."""
    keys = keys_of_iterator_state(texts)
    return {stage.decode() for key in keys for stage in re.findall(rb"::([A-Z][A-Za-z0-9]*)", key)}


@dataclasses.dataclass(frozen=True)
class RepeatedSeeds:
    """The stages below a repetition of a pipeline that draw new seeds for each epoch, as a shuffle does.

    An iterator's state has to hold their seeds, because later epochs depend on them. It lacks those of a stage that has
    ended, or that has not begun in this epoch.
    """

    outside: int = 0  # not below a cache
    cached: int = 0  # below a cache, which needs them until it is full
    caches: int = 0  # how many caches there are
    interleaved: int = 0  # of the names of files, or of what else an interleave makes data sets of

    def lacking(self, texts: list[bytes]) -> bool:
        """Returns whether one of them is not in an iterator's state."""
        seeds, full = set(), set()
        for key in keys_of_iterator_state(texts):
            name, _, values = re.sub(rb"(Repeat)\[\d+\]", rb"\1", key).partition(b"@@")
            stage = name.rpartition(b"::")[2]
            if (b"Shuffle" in stage and not stage.endswith(b":buffer")) or stage == b"Random":
                seeds.add(name)
            if name.endswith(b"::MemoryCache") and values.startswith(b"cache_completed"):
                full.add(name)
        repeated = [name for name in seeds if b"Repeat" in name]  # ShuffleAndRepeat is one that repeats itself
        cached = sum(b"MemoryCacheImpl" in name for name in repeated)
        return len(repeated) - cached < self.outside or (cached < self.cached and len(full) < self.caches)


def repeated_seeds(dataset: tf.data.Dataset) -> RepeatedSeeds | None:
    """Finds the stages with seeds below the repetitions of a pipeline, except those in functions of other stages.

    None where TensorFlow does not tell a pipeline's stages.
    """
    found = collections.Counter()

    def walk(stage: tf.data.Dataset, repeated: bool, cached: bool, interleaved: bool) -> None:
        name = type(stage).__name__
        found["caches"] += "Cache" in name
        if ("Shuffle" in name or "RandomDataset" in name) and (repeated or "Repeat" in name):
            found["cached" if cached else "outside"] += 1
            found["interleaved"] += interleaved
        for before in stage._inputs() if "Snapshot" not in name else ():  # later epochs read what the first has written
            walk(before, repeated or "Repeat" in name, cached or "Cache" in name, interleaved or "Interleave" in name)

    try:
        walk(dataset, False, False, False)
    except (AttributeError, NotImplementedError):
        return None
    return RepeatedSeeds(**found)


# Ops that draw from a state of TensorFlow's own, which nobody can save.
RANDOM_OPS = frozenset({
    "Multinomial", "ParameterizedTruncatedNormal", "RandomGamma", "RandomPoisson", "RandomPoissonV2", "RandomShuffle",
    "RandomStandardNormal", "RandomUniform", "RandomUniformInt", "SampleDistortedBoundingBox",
    "SampleDistortedBoundingBoxV2", "TruncatedNormal",
})  # fmt: skip
# Stages that give an element for each one that they get, and remember nothing of those before.
_BY_ELEMENT = {"_MapDataset", "_ParallelMapDataset", "_PrefetchDataset", "_OptionsDataset", "_ZipDataset"}


def is_by_element(dataset: tf.data.Dataset, origins: list[tf.data.Dataset], any_other: bool = False) -> bool:
    """Returns whether a pipeline makes each element of one element of each data set that it reads.

    Then it begins at any position if those do. Other stages, such as a shuffle, depend on the elements before, and so
    does a map that draws random numbers one after another. One that runs in parallel does not repeat them anyway. False
    where TensorFlow does not tell a pipeline's stages. With `any_other`, branches
    that read none of the origins are known to begin at any position too.
    """
    try:
        return _reads(dataset, origins, any_other) is not False
    except (AttributeError, NotImplementedError):
        return False


def _reads(dataset: tf.data.Dataset, origins: list[tf.data.Dataset], any_other: bool) -> bool | None:
    """Returns whether a data set reads origins by element; None for a branch that reads none but is allowed."""
    if any(dataset is origin for origin in origins):
        return True
    found = [_reads(one, origins, any_other) for one in dataset._inputs()]
    if not any(one is not None for one in found):
        return None if any_other else False
    name = type(dataset).__name__
    if name == "_MapDataset" and RANDOM_OPS & _stateful_ops(dataset):
        return False
    return False not in found and name in _BY_ELEMENT


def stateful_ops_of_maps(dataset: tf.data.Dataset, origins: list[tf.data.Dataset]) -> set[str]:
    """Returns the types of stateful ops in the maps of a pipeline `is_by_element`, as far as TensorFlow tells.

    Only what comes after the origins, the data sets that it reads, counts.
    """
    if any(dataset is origin for origin in origins):
        return set()
    try:
        own = _stateful_ops(dataset) if type(dataset).__name__ in ("_MapDataset", "_ParallelMapDataset") else set()
    except AttributeError:
        own = set()
    return own.union(*(stateful_ops_of_maps(one, origins) for one in dataset._inputs()))


def _ops_of(stage: tf.data.Dataset) -> list[tf.Operation]:
    graph = stage._map_func.function.graph
    return [op for each in (graph, *(one.graph for one in graph._functions.values())) for op in each.get_operations()]


def _stateful_ops(stage: tf.data.Dataset) -> set[str]:
    return {op.type for op in _ops_of(stage) if op.op_def.is_stateful}


def why_restored_wrongly(texts: list[bytes]) -> str:
    """Returns why TensorFlow (2.20 to 2.22) would restore an iterator's state wrongly; "" if no reason is known."""
    stages = stages_of_iterator_state(texts)
    if "CSV" in stages:
        return "it reads CSV files, whose saved place TensorFlow restores at the end of what was buffered"
    if "FileCache" in stages:  # if the files are gone, the restore ends the process
        return "it caches in files"
    for text in texts:
        # For `sample_from_datasets` and the like, TensorFlow forgets how many sources have ended, so that the restored
        # iterator looks for an element of them forever at the end of its data.
        if b"DirectedInterleave:data_input_impl_empty" in text and b"values: 1>" in text:
            return "a data set that it mixes with others has ended, which TensorFlow does not restore"
    keys = b"\n".join(keys_of_iterator_state(texts))
    for cache in set(re.findall(rb"(\S+::MemoryCache)@@cache_completed", keys)):
        # One iterator has filled a cache while another one is still filling it; TensorFlow restores the other one at
        # the beginning of the cache.
        if cache + b"Impl::" in keys:
            return "two of its parts share a cache, which one of them is still filling"
    return ""


def message_without_op(error: tf.errors.OpError) -> str:
    """Returns the message of an error without the op's name, which TensorFlow 2.20 to 2.22 put before and after it."""
    return error.message.partition("}} ")[2].partition(" [Op")[0] or error.message


# Ops whose result depends on the shape of what they get and not on its values.
_OF_SHAPES = frozenset({"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike"})


def depends_on_values(tensor: tf.Tensor) -> bool | None:
    """Returns whether a tensor of a graph depends on values that the graph gets, such as a batch, or on random ones.

    A tensor of constants and shapes does not. None for an eager tensor, which does not say where it comes from.
    """
    return None if tf.executing_eagerly() else bool(_sources(tensor))


def depends_on_inputs(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor depends on anything but constants and variables; True for an eager one."""
    return tf.executing_eagerly() or any(source.dtype != tf.resource for source in _sources(tensor))


def concatenated(tensor: tf.Tensor) -> list[tf.Tensor]:
    """Returns the tensors that a tensor of a graph is the concatenation of; else the tensor itself."""
    is_joined = not tf.executing_eagerly() and tensor.op.type == "ConcatV2"
    return list(tensor.op.inputs)[:-1] if is_joined else [tensor]


def _sources(tensor: tf.Tensor) -> list[tf.Tensor]:
    """Returns the outputs of a graph's ops with values of their own that a tensor is computed from: inputs, draws."""
    found, todo, seen = [], [tensor], set()
    while todo:
        value = todo.pop()
        op = value.op
        if value.name in seen or op.type in _OF_SHAPES:
            continue
        seen.add(value.name)
        if op.type in ("PartitionedCall", "StatefulPartitionedCall"):
            todo += _used_by_call(op, value.value_index)
        elif (op.op_def.is_stateful and op.type != "ReadVariableOp") or not (op.inputs or op.type == "Const"):
            found.append(value)
        else:
            todo += op.inputs
    return found


def _used_by_call(op: tf.Operation, output: int) -> list[tf.Tensor]:
    """Returns the inputs of the call of a function that one of its outputs depends on; all of them if not known."""
    graph = graph_of(op.graph, op.get_attr("f").name)
    if graph is None:
        return list(op.inputs)
    within = _sources(graph.outputs[output])
    places = {value.name: number for number, value in enumerate(graph.inputs)}
    return [op.inputs[places[value.name]] if value.name in places else op.outputs[output] for value in within]


class ReplicaLocal(threading.local):
    """Values of one replica's step, for functions that it calls without passing them.

    tf.distribute keeps none for a replica, but traces and runs each in a thread of its own.
    """


watch()
keep_builtins()


Function = TypeVar("Function", bound=Callable[..., Any])


def not_converted(function: Function) -> Function:
    """Returns a function that AutoGraph does not convert, nor what it calls; for names that users see.

    TensorFlow's decorator has no types, so that a checker would take what it returns for `Any`.
    """
    return tf.autograph.experimental.do_not_convert(function)


def converted(function: Function) -> Function:
    """Returns a function that AutoGraph converts in each trace, also if what calls it is not converted.

    What it calls is converted too, unless that is marked by `do_not_convert`. Without a trace, as with `loop="eager"`,
    the function is called as it is.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not tf.inside_function():
            return function(*args, **kwargs)
        return _converting()(function, args, kwargs)

    return tf.autograph.experimental.do_not_convert(call)


@functools.cache
def _converting() -> Callable[[Callable[..., Any], tuple, dict[str, Any]], Any]:
    return tf.autograph.to_graph(_call)


def _call(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


# Stages without a state that their iterators share, as a shuffle's seeds are. Functions of the others are looked at.
_PLAIN = frozenset(
    "AssertCardinality Batch Concatenate Options PaddedBatch ParallelBatch Prefetch Range Rebatch Repeat Shard Skip "
    "Take Tensor TensorSlice Unbatch Zip".split()
)
_OF_FUNCTIONS = frozenset({"FlatMap", "Map", "ParallelMap"})
_STATE = ("PyFunc", "Shuffle", "Generator", "Assign", "Cache", "Insert", "Rng", "RandomDataset", "Stateful")
_FUNCTION_CALLS = ("StatefulPartitionedCall",)  # of functions whose ops are looked at


def leaves_no_trace(dataset: tf.data.Dataset, known: list[tf.data.Dataset]) -> bool:
    """Returns whether a pipeline has no state that a second iterator over it would change.

    Such a state are the seeds of a shuffle, random numbers, a cache, and whatever a Python function keeps. False where
    TensorFlow does not tell a pipeline's stages.

    Args:
      dataset: the pipeline.
      known: data sets that it reads and that are known to have no such state.
    """
    if any(dataset is one for one in known):
        return True
    name = type(dataset).__name__.removeprefix("_").removesuffix("Dataset")
    try:
        if name in _OF_FUNCTIONS and not _is_plain(dataset):
            return False
        inputs = dataset._inputs()
    except (AttributeError, NotImplementedError):
        return False
    return name in _PLAIN | _OF_FUNCTIONS and all(leaves_no_trace(one, known) for one in inputs)


def _is_plain(stage: tf.data.Dataset) -> bool:
    types = {op.type for op in _ops_of(stage)} - set(_FUNCTION_CALLS)
    return RANDOM_OPS.isdisjoint(types) and not any(part in kind for kind in types for part in _STATE)

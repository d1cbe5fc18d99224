"""Names of TensorFlow that are not public stand in `compat` (and in `replay/preflight.py`), and work with the TensorFlow installed.

A failure of `test_the_installed_tensorflow_...` says what this version of TensorFlow has changed.
"""

import ast
import pathlib
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from conftest import make_strategy, more, repetitions

from looplib.compat import places, versions
from looplib.compat import tensorflow as _tf
from looplib.data import iterator_state
from looplib.replay import preflight

ROOT = pathlib.Path(__file__).absolute().parents[2]
FILES = sorted((ROOT / "looplib").rglob("*.py"))
# Uses outside of looplib/compat, by file, with the reason.
ELSEWHERE = {
    "orbit/adapters.py": {"_train_options"},  # of Orbit; without it, a loop that it divides is traced in one piece
    "stores/ranges.py": {"_shutdown"},  # of concurrent.futures; without it, a thread waits longer at the end
    # Of fsspec: without _walk, a folder that cannot be listed is taken for an empty one; of s3fs, whose public functions
    # read without a condition.
    "stores/stores.py": {"_walk", "_call_s3"},
    # The places in files of weights, which follow what tf_keras itself does.
    "weights/layers.py": {
        "_functional",
        "_non_trainable_weights",
        "_operations",
        "_trainable_weights",
        "tf_keras.src",
    },
    # The stages of a pipeline; without them, no pipeline is read a second time.
    "compat/tensorflow.py": {"_functions", "_inputs", "_map_func"},
    # These are none of TensorFlow's or Keras's: a file, and a module of a debugger.
    "exports/predictions.py": {"_lock"},
    "cluster/preemption.py": {"_pydevd_bundle"},
}
OF_TUPLES = ("_asdict", "_fields", "_replace")  # of a NamedTuple, public in spite of their names
TEXT_METHODS = ("startswith", "endswith", "removeprefix", "removesuffix", "replace")
INNER = re.compile(r"\b(?:tf_)?keras\.src\b|\btensorflow\.(?:python|core|compiler|tsl)\b")


def run(program: str, *arguments: str) -> str:
    """Runs a program in a process of its own, where TensorFlow has not started; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def error_of(function: Callable, *arguments: Any) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: B017, PT011 - of types that have no public name
        function(*arguments)
    return caught.value


# What each function of compat/tensorflow.py depends on, tried with the TensorFlow that is installed.


def the_line_that_starts_the_devices(folder: pathlib.Path) -> None:
    program = folder / "program.py"
    program.write_text(
        "import looplib, tensorflow as tf\n"
        "from looplib.compat import tensorflow as _tf\n"
        "from looplib.compat import places\n"
        "assert not _tf.started() and _tf.stack_at_start() == []\n"
        "x = tf.constant(1.0)  # here\n"
        "assert _tf.started()\n"
        "print(places.place_of_start())\n"
    )
    assert run(f"import runpy; runpy.run_path({str(program)!r})").endswith(":5: x = tf.constant(1.0)  # here\n")


class Counting:
    def count(self, steps: tf.Tensor) -> tf.Tensor:
        total = 0
        for _ in tf.range(steps):
            total += 1
        return total


def the_addresses_of_builtins_that_autograph_does_not_convert(folder: pathlib.Path) -> None:
    from tensorflow.python.autograph.pyct import inspect_utils

    counting = Counting()
    at_old_address = counting.count
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspect_utils, "_BUILTIN_FUNCTION_IDS", frozenset([id(at_old_address)]))
        with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):  # else there is nothing to mend any more
            tf.function(at_old_address)(tf.constant(3))
        _tf.keep_builtins()
        assert tf.function(at_old_address)(tf.constant(3)) == 3
        assert id(print) in inspect_utils._BUILTIN_FUNCTION_IDS


@tf.function
def branching(x: tf.Tensor) -> tf.Tensor:
    return tf.cond(x[0] > 0, lambda: tf.sin(x), lambda: tf.map_fn(tf.cos, x))


def the_graphs_of_called_functions(folder: pathlib.Path) -> None:
    ops = places.Ops(branching.get_concrete_function(tf.TensorSpec([2])))
    assert {"Sin", "Cos"} <= {op.type for op in ops}
    sine = next(op for op in ops if op.type == "Sin")
    assert "tf.sin(x)" in places.line_of(sine)


def the_op_that_an_error_names(folder: pathlib.Path) -> None:
    @tf.function
    def failing(x: tf.Tensor) -> tf.Tensor:
        return tf.gather(x, tf.cast(x[0], tf.int32) + 9) + tf.linalg.inv(tf.zeros([2, 2]))[0]  # here

    with pytest.raises(tf.errors.OpError) as caught:
        failing(tf.constant([1.0, 2.0]))
    place = places.place_of(caught.value, [failing.get_concrete_function(tf.TensorSpec([2]))])
    assert place.endswith("# here"), caught.value


def the_op_that_xla_has_no_kernel_for(folder: pathlib.Path) -> None:
    @tf.function(jit_compile=True)
    def program(x: tf.Tensor) -> tf.Tensor:
        return tf.strings.length(tf.strings.as_string(x))

    spec = tf.TensorSpec([2])
    with pytest.raises(Exception) as caught:  # XLA's errors have many types
        program.experimental_get_compiler_ir(spec)(stage="hlo", platform_name="GPU")
    assert _tf.lacking_in_xla(caught.value), caught.value
    found = places.Ops(program.get_concrete_function(spec)).named_in(str(caught.value))
    assert found is not None and found.type in ("AsString", "StringLength"), caught.value


def the_size_that_xla_needs_as_a_constant(folder: pathlib.Path) -> None:
    @tf.function(jit_compile=True)
    def program(x: tf.Tensor) -> tf.Tensor:
        return tf.zeros([tf.cast(x[0], tf.int32)])

    with pytest.raises(Exception) as caught:
        program.experimental_get_compiler_ir(tf.TensorSpec([2]))(stage="hlo", platform_name="GPU")
    assert preflight.needs_a_constant(caught.value), caught.value


def the_sizes_that_depend_on_values(folder: pathlib.Path) -> None:
    @tf.function(jit_compile=True)
    def program(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.unique(x)[0])

    spec = tf.TensorSpec([4])
    hlo = program.experimental_get_compiler_ir(spec)(stage="hlo", platform_name="GPU")
    ops = places.Ops(program.get_concrete_function(spec))
    found = [(ops.named(path), kind) for path, kind in preflight.dynamic_sizes(hlo)]
    assert any(op is not None and op.type == kind == "Unique" for op, kind in found), hlo


def xlas_plan_of_memory(folder: pathlib.Path) -> None:
    @tf.function(jit_compile=True)
    def program(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.matmul(x, x, transpose_b=True) ** 2)  # 1,000 x 1,000 numbers in between

    found = preflight.temporary_bytes(program, [tf.TensorSpec([1000, 2])])
    assert found is not None and 4_000_000 <= found <= 12_000_000


def the_difference_between_an_error_of_the_data_and_of_the_step(folder: pathlib.Path) -> None:
    def refuse(number: tf.Tensor) -> tf.Tensor:
        tf.debugging.assert_less(number, tf.constant(0, tf.int64))
        return number

    @tf.function
    def read(iterator: Iterator[tf.Tensor]) -> tf.Tensor:
        return next(iterator)

    numbers = tf.data.Dataset.range(3)
    for data in (numbers.map(refuse), numbers.map(lambda i: tf.numpy_function(refuse, [i], tf.int64))):
        assert _tf.is_of_the_input(error_of(read, iter(data)))
    assert not _tf.is_of_the_input(error_of(tf.function(lambda: tf.debugging.check_numerics(1 / tf.zeros([]), ""))))


def the_error_of_a_variable_that_is_made_too_late(folder: pathlib.Path) -> None:
    made = []

    def step(x: tf.Tensor) -> tf.Tensor:
        if len(made) < 2:
            made.append(tf.Variable(x * 2.0))
        return made[0] * x

    strategy = make_strategy("mirrored_x2")
    with strategy.scope():
        outer = tf.function(lambda x: strategy.run(step, (x,)))
        error = error_of(outer.get_concrete_function, tf.TensorSpec([]))
    assert _tf.is_late_variable(error), type(error)
    assert not _tf.is_late_variable(ValueError("another"))


def the_error_of_a_replica_that_reduces_as_code_around_replicas_does(folder: pathlib.Path) -> None:
    for strategy in (make_strategy("mirrored_x2"), make_strategy("default")):
        for name, call in {"reduce": lambda x: strategy.reduce("SUM", x, None), "run": strategy.run}.items():
            error = error_of(lambda call=call: strategy.run(lambda: call(tf.constant(1.0))))
            assert _tf.is_across_replicas(error), (name, error)
    assert not _tf.is_across_replicas(RuntimeError("another"))


def the_error_of_replicas_that_are_joined_in_a_branch(folder: pathlib.Path) -> None:
    def step(x: tf.Tensor) -> tf.Tensor:
        total = lambda: tf.distribute.get_replica_context().all_reduce("sum", x)
        return tf.cond(x > 0, total, lambda: x)

    strategy = make_strategy("mirrored_x2")
    outer = tf.function(lambda x: strategy.run(step, (x,)))
    error = error_of(outer.get_concrete_function, tf.TensorSpec([]))
    assert _tf.is_merge_in_branch(error), error
    assert not _tf.is_merge_in_branch(RuntimeError("another"))

    def joined_by_the_first(x: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        return x if context.replica_id_in_sync_group else context.all_reduce("sum", x)

    error = error_of(strategy.run, joined_by_the_first, (tf.constant(1.0),))
    assert _tf.is_merge_of_some(error), error
    assert not _tf.is_merge_of_some(RuntimeError("another"))


def ops_that_xla_lacks(folder: pathlib.Path) -> None:
    function = tf.function(lambda x: tf.strings.to_number(tf.strings.as_string(x)), jit_compile=True)
    assert "AsString" in _tf.lacking_in_xla(error_of(function, tf.zeros([2])))
    assert not _tf.lacking_in_xla(ValueError("another"))


def the_op_at_the_end_of_a_message(folder: pathlib.Path) -> None:
    data = tf.data.Dataset.range(3).map(lambda i: tf.numpy_function(lambda j: np.int64(j), [i], tf.int64))
    variant = tf.nest.flatten(iter(data), expand_composites=True)[0]
    error = error_of(lambda: tf.raw_ops.SerializeIterator(resource_handle=variant, external_state_policy=2))
    message = _tf.message_without_op(error)
    assert "{{" not in message and "[Op" not in message and "stateful" in message, error.message


def the_users_frames_in_a_message(folder: pathlib.Path) -> None:
    def raising() -> float:
        raise RuntimeError("no such example")  # here

    @tf.function
    def converted(x: tf.Tensor) -> tf.Tensor:
        return x + tf.numpy_function(raising, [], tf.float64)

    @tf.function
    def wrong(x: tf.Tensor) -> tf.Tensor:
        return x + tf.zeros([3])  # here

    for function, argument in ((converted, tf.constant(1.0, tf.float64)), (wrong, tf.zeros([2]))):
        with pytest.raises((tf.errors.OpError, ValueError)) as caught:
            function(argument)
        lines = pathlib.Path(__file__).read_text().splitlines()
        found = [line for file, line in places.frames_in(str(caught.value)) if file == __file__]
        assert any(lines[line - 1].endswith("# here") for line in found), caught.value


def the_stages_and_keys_in_the_state_of_an_iterator(folder: pathlib.Path) -> None:
    """By these, `data/iterator_state.py` refuses to save what TensorFlow restores wrongly."""
    (folder / "table.csv").write_text("1\n2\n")
    rows = tf.data.Dataset.range(8)
    table = tf.data.experimental.CsvDataset(str(folder / "table.csv"), [tf.int32])
    pipeline = rows.shuffle(4).flat_map(lambda i: tf.data.Dataset.range(i + 1)).batch(2)
    nested = iter(pipeline)
    next(nested)  # which makes the inner one
    assert {"Root", "Range", "Shuffle", "FlatMap", "BatchV2"} <= iterator_state.save(nested, pipeline)[1]
    for dataset, reason in ((table, "it reads CSV files"), (rows.cache(str(folder / "cache")), "it caches in files")):
        with pytest.raises(iterator_state.UnsavableError, match=reason):
            iterator_state.save(iter(dataset), dataset)
    order = tf.data.Dataset.from_tensor_slices(tf.constant([0, 0, 1, 1], tf.int64))
    mixture = tf.data.Dataset.choose_from_datasets([rows.take(1), rows], order, stop_on_empty_dataset=False)
    mixed = iter(mixture)
    iterator_state.save(mixed, mixture)
    for _ in range(2):
        next(mixed)
    with pytest.raises(iterator_state.UnsavableError, match="mixes with others has ended"):
        iterator_state.save(mixed, mixture)
    both = tf.data.Dataset.zip((rows.shuffle(2).cache(), tf.data.Dataset.random(rerandomize_each_iteration=True)))
    assert _tf.repeated_seeds(both.shuffle(3).repeat().shuffle(2)) == _tf.RepeatedSeeds(outside=2, cached=1, caches=1)


def the_stages_that_remember_no_element(folder: pathlib.Path) -> None:
    ids = tf.data.Dataset.range(20)
    kept = ids.map(lambda i: i + 1).map(lambda i: i + 1, tf.data.AUTOTUNE).prefetch(2).with_options(tf.data.Options())
    assert _tf.is_by_element(ids, [ids]) and _tf.is_by_element(tf.data.Dataset.zip((kept, {"a": ids})), [ids])
    others = [
        ids.shuffle(3), ids.enumerate(), ids.batch(2), ids.take(3), ids.filter(lambda i: i > 2), ids.cache(),
        ids.scan(0, lambda state, i: (state + 1, i)), ids.repeat(),
    ]  # fmt: skip
    assert not any(_tf.is_by_element(other.map(lambda *x: x[0]), [ids]) for other in others)
    assert not _tf.is_by_element(kept, [])
    random = lambda i: tf.cond(i > 3, lambda: tf.random.uniform([]), lambda: 0.0)
    python = lambda i: tf.py_function(lambda i: i, [i], tf.int64)
    assert not _tf.is_by_element(ids.map(random), [ids])
    drawing = ids.map(python).map(random, 2)
    assert _tf.is_by_element(drawing, [ids]) and _tf.is_by_element(ids.map(python), [ids])
    assert {"RandomUniform", "EagerPyFunc"} < _tf.stateful_ops_of_maps(drawing, [ids])
    assert not _tf.stateful_ops_of_maps(kept, [ids]) | _tf.stateful_ops_of_maps(drawing, [drawing])


def the_structure_of_a_checkpoint(folder: pathlib.Path) -> None:
    path = tf.train.Checkpoint(v=tf.Variable(1.0)).write(str(folder / "ckpt"))
    graph = _tf.object_graph(tf.train.load_checkpoint(path))
    keys = {attribute.checkpoint_key for node in graph.nodes for attribute in node.attributes}
    assert keys == {_tf.variable_key("v")}


SERVE = """
import sys, tensorflow as tf
spec = tf.train.ClusterSpec({"worker": sys.argv[1:2], "ps": sys.argv[2:3]})
server = tf.distribute.Server(spec, job_name="ps", task_index=0, protocol="grpc")
print("serving", flush=True)
sys.stdin.read()
"""
LOSE = """
import os, subprocess, sys
os.environ["GRPC_FAIL_FAST"] = "use_caller"
import tensorflow as tf
from looplib.compat import tensorflow as _tf
from looplib.processes.group import hold_ports
with hold_ports(2) as ports:
    worker, ps = (f"127.0.0.1:{port}" for port in ports)
    server = subprocess.Popen([sys.executable, "-c", sys.argv[1], worker, ps], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdout.readline() == b"serving\\n"
    spec = tf.train.ClusterSpec({"worker": [worker], "ps": [ps]})
    tf.config.experimental_connect_to_cluster(spec, job_name="worker", task_index=0)
    with tf.device("/job:ps/task:0"):
        variable = tf.Variable(1.0)
    step = tf.function(lambda: variable.assign_add(tf.random.uniform([])))
    step()
    server.kill()
    server.wait()
    try:
        step().numpy()
    except tf.errors.OpError as error:
        print(repr(error), _tf.lost_server(error), flush=True)
    os._exit(0)
"""


def the_loss_of_a_parameter_server(folder: pathlib.Path) -> None:
    output = run(LOSE, SERVE)
    assert "a parameter server was lost, with its weights" in output, output


USES = [
    the_line_that_starts_the_devices,
    the_addresses_of_builtins_that_autograph_does_not_convert,
    the_graphs_of_called_functions,
    the_op_that_an_error_names,
    the_op_that_xla_has_no_kernel_for,
    the_size_that_xla_needs_as_a_constant,
    the_sizes_that_depend_on_values,
    xlas_plan_of_memory,
    the_difference_between_an_error_of_the_data_and_of_the_step,
    the_error_of_a_variable_that_is_made_too_late,
    the_error_of_replicas_that_are_joined_in_a_branch,
    the_error_of_a_replica_that_reduces_as_code_around_replicas_does,
    ops_that_xla_lacks,
    the_op_at_the_end_of_a_message,
    the_users_frames_in_a_message,
    the_stages_and_keys_in_the_state_of_an_iterator,
    the_structure_of_a_checkpoint,
    *more([the_loss_of_a_parameter_server]),  # tests/workers/parameter_server_test.py loses one too
]


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_the_installed_tensorflow_still_gives(use, tmp_path: pathlib.Path, python: str, monkeypatch) -> None:
    monkeypatch.setattr(sys, "executable", repetitions(python, sys.executable))  # where it has not started
    try:
        use(tmp_path)
    except Exception as error:
        what = use.__name__.replace("_", " ")
        raise AssertionError(
            f"TensorFlow {tf.__version__} does not give {what} as {versions.KNOWN} did; fix it in looplib/compat/tensorflow.py (or replay/preflight.py)"
        ) from error


def test_tensorflow_is_imported_without_the_collector() -> None:
    text = pathlib.Path(_tf.__file__).read_text()
    assert text.index("gc.disable()") < text.index("import tensorflow as tf") < text.index("gc.enable()")


def test_another_version_says_less_and_fails_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _tf.graph_of(object(), "f") is None
    monkeypatch.setattr(_tf, "graph_of", lambda graph, name: None)
    assert "Sin" not in {op.type for op in places.Ops(branching.get_concrete_function(tf.TensorSpec([2])))}
    monkeypatch.setattr(preflight, "_fields", lambda message: [])
    assert preflight.temporary_bytes(tf.function(lambda x: tf.sin(x), jit_compile=True), [tf.TensorSpec([2])]) is None
    monkeypatch.setitem(sys.modules, "tensorflow.python.eager", None)
    _tf.watch()
    monkeypatch.setitem(sys.modules, "tensorflow.python.autograph.pyct", None)
    _tf.keep_builtins()
    error = tf.errors.UnavailableError(None, None, "other words")
    assert _tf.lost_server(error) is None and _tf.lost_server(error, of_any_process=True) is not None
    assert not preflight.needs_a_constant(error)
    assert places.frames_in("other words") == [] and list(preflight.dynamic_sizes("other words")) == []


def private_names(path: pathlib.Path) -> Iterator[str]:
    """Yields the modules that a file imports from inside TensorFlow, and the private attributes of what is not its own."""
    tree = ast.parse(path.read_text())
    own = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own.add(node.attr)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            own.update(name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    for node in ast.walk(tree):  # parts of texts
        if isinstance(node, ast.JoinedStr):
            texts |= set(map(id, node.values))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TEXT_METHODS:
            texts |= set(map(id, node.args))
    for node in ast.walk(tree):
        name = ""
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module]
            yield from (".".join(one.split(".")[:2]) for one in names if INNER.match(one))
        elif isinstance(node, ast.Attribute) and not isinstance(node.value, ast.Name):
            name = node.attr
        elif isinstance(node, ast.Attribute) and node.value.id not in ("self", "cls", "os", "sys"):
            name = node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            yield from INNER.findall(node.value)
            name = node.value if node.value.isidentifier() else ""
        if name.startswith("_") and not name.startswith("__") and name.strip("_") and name not in (*own, *OF_TUPLES):
            yield name


def test_the_installed_tensorflow_says_which_variables_a_function_updates_also_in_loops_and_functions() -> None:
    read, added, looped, called = variables = [tf.Variable(1.0) for _ in range(4)]
    inner = tf.function(lambda: called.assign_add(read))

    @tf.function
    def step() -> None:
        added.assign_add(read)
        for _ in tf.range(2):
            looped.assign(looped * read)
        inner()

    updated = _tf.updated_by(step.get_concrete_function())
    assert [_tf.identity_of(variable) in updated for variable in variables] == [False, True, True, True]


def test_only_compat_uses_what_tensorflow_and_keras_do_not_publish() -> None:
    for path in FILES:
        name, found = str(path.relative_to(ROOT / "looplib")), set(private_names(path))
        if path.parent == ROOT / "looplib" / "compat":
            assert found or path.stem not in ("keras", "optimizers", "tensorflow"), "this test finds nothing any more"
        else:
            more = sorted(found - ELSEWHERE.get(name, set()))
            assert not more, f"{name} uses {more}; put it into looplib/compat, with what to do where it is missing"


def missing_names(path: pathlib.Path) -> Iterator[str]:
    """Yields names such as `tf.nest.map` in a file that TensorFlow and numpy do not have."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
            node = node.value
        if not names or not isinstance(node, ast.Name) or node.id not in ("tf", "np"):
            continue
        found: Any = tf if node.id == "tf" else np
        for name in names:
            if not isinstance(found, types.ModuleType):  # of values, only running the code knows
                break
            if not hasattr(found, name):
                yield f"{path.relative_to(ROOT)}: {'.'.join([node.id, *names])}"
                break
            found = getattr(found, name)


@pytest.mark.slow
def test_every_public_name_that_is_used_exists() -> None:
    files = [*FILES, *(ROOT / "trainers").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    assert [name for path in files for name in missing_names(path)] == []


def test_the_installed_tensorflow_tells_the_functions_that_an_op_calls():
    inner = tf.function(lambda value: (value, value + 1))

    @tf.function
    def outer(value):
        first = inner(value)[1]
        return first, tf.cond(value > 0, lambda: value, lambda: -value)

    graph = outer.get_concrete_function(tf.TensorSpec([])).graph
    ops = {op.type: op for op in graph.get_operations()}
    call = next(op for name, op in ops.items() if name.endswith("PartitionedCall"))
    condition = next(op for name, op in ops.items() if name.endswith("If"))
    assert [len(_tf.graphs_called_by(op)) for op in (call, condition, call.inputs[0].op)] == [1, 2, 0]
    assert len(_tf.graphs_called_by(call)[0].outputs) == 2

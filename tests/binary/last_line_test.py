"""The last line of a binary that fails names the line of the user's program and the sentence that matters."""

import itertools

import pytest
from lazily import Results
from paths import PROGRAMS

from looplib.base.messages import gist

LINES = (PROGRAMS / "wrong.py").read_text().splitlines()
DENSE = "expected axis -1 of input shape to have value 4, but received input with shape"
INK, PAPER, CARD = "ValueError: the reader is out of ink", "the layer is out of paper", "KeyError 'tray'"

# Flags -> (the mark of the line, None where the gist alone counts; what the last line says before it).
KERAS = {
    "model": DENSE,
    "dense": DENSE,
    "conv": "min_ndim=4, found ndim=2",
    "embedding": "is not in [0, 5)",
    "layer_value": f"ValueError: {PAPER}",
    "layer_lines": f"ValueError: {PAPER}: - tray 1 - tray 2",
    "layer_type": "TypeError: the layer wants paper of another size",
    "layer_key": CARD,
    "layer_attribute": "AttributeError: 'numpy.ndarray' object has no attribute 'trays'",
    "layer_empty": "ValueError",
    "layer_assert": "AssertionError",
    "build": "no_such",
}
OTHERS = {
    "matmul": "ValueError: Dimensions must be equal, but are 4 and 3 for MatMul with input shapes: [8,4], [3,4].",
    "add": "ValueError: Dimensions must be equal, but are 4 and 3 for add",
    "dtype": "TypeError: Input 'y' of 'AddV2' Op has type int64 that does not match type float32",
    "python": "AttributeError: 'SymbolicTensor' object has no attribute 'nothing_like_it'",
    "name": "NameError: name 'undefined_name' is not defined",
    "reshape": "ValueError: Dimension size must be evenly divisible by 5 but is 32 for Reshape",
    "autograph": "ValueError: 'y' must also be initialized in the else branch",
    "run": "InvalidArgumentError: assertion failed: [ids are too large]",
    "gather": "InvalidArgumentError: indices[0] = 7 is not in [0, 3)",
    "py_function": INK,
    "map_py": INK,
    "map_trace": "ValueError: Cannot reshape a tensor with 32 elements to shape [3,5] (15 elements) for Reshape",
    "map_run": "InvalidArgumentError: bad pixels : Tensor had Inf values",
    "dataset": "FileNotFoundError: [Errno 2] No such file or directory: '/no/such/file'; restore it, or check the path, or",
    "py_missing": "FileNotFoundError: [Errno 2] No such file or directory: '/no/such/file'; restore it, or check the",
    "full": "OSError: [Errno 28] No space left on device; free space on that disk, or",
    "chained": "RuntimeError: the printer has no tray",
    "recursion": "RecursionError: maximum recursion depth exceeded",
    "not_implemented": "NotImplementedError",
    "memory": "MemoryError",
    "exhausted": "ResourceExhaustedError: out of memory",
    "loop_end": "KeyError 'lost'",
    "loop_end_assert": "AssertionError",
    "quiet": "Quiet",
    "lines": "RuntimeError: the printer is on fire: tray 1 tray 2",
    "evaluator": DENSE,
    "import": "ModuleNotFoundError: No module named 'no_such_module'",
    "syntax": "SyntaxError: invalid syntax",
}
ON_MIRRORED = ("dense", "embedding", "layer_key", "run", "map_run", "py_function", "evaluator")
EAGER = ("dense", "embedding", "layer_value", "run", "map_py", "chained", "python")
CASES = {
    **{f"{fault}, keras": sentence for fault, sentence in {**KERAS, **OTHERS}.items()},
    **{f"{fault}, tf_keras": sentence for fault, sentence in KERAS.items()},
    **{f"{fault}, keras --num_virtual_devices=2": {**KERAS, **OTHERS}[fault] for fault in ON_MIRRORED},
    **{f"{fault}, keras --loop=eager": {**KERAS, **OTHERS}[fault] for fault in EAGER},
    "quit, keras": "the run was ended by quitting the debugger",
    "quit, keras --loop=eager": "the run was ended by quitting the debugger",
}
CASES["model, tf_keras"] = "expected shape=(None, 4), found shape=(8, 3)"
CASES["run, keras --loop=eager"] = "InvalidArgumentError: ids are too large"
CASES["chained, keras --loop=eager"] += " (because of KeyError 'tray')"  # AutoGraph keeps no causes
CASES["python, keras --loop=eager"] = "object has no attribute 'nothing_like_it'"
# Each kind of fault once, the families of Keras in turn; some on replicas and without a graph.
ALIKE = ("conv", "layer_lines", "layer_value", "layer_type", "layer_attribute", "layer_assert", "layer_empty", "add", "dtype", "name",
         "python", "reshape", "gather", "map_py", "map_trace", "not_implemented", "memory", "exhausted", "loop_end_assert", "quiet",
         "lines", "import")  # fmt: skip
ELSEWHERE = [f"{fault}, keras --num_virtual_devices=2" for fault in ("dense", "map_run")]
ELSEWHERE += ["chained, keras --loop=eager"]
ONCE = [f"{fault}, {family}" for fault, family in zip(KERAS, itertools.cycle(["keras", "tf_keras"]))]
ONCE += [f"{fault}, keras" for fault in (*OTHERS, "quit")]
ONCE = [case for case in ONCE if case.partition(",")[0] not in (*ALIKE, "dense", "map_run", "chained")] + ELSEWHERE
PARAMETERS = [pytest.param(case, marks=() if case in ONCE else pytest.mark.slow) for case in CASES]
PLACES = {
    "model": "model",
    "map_run": "def dataset",
    "map_py": "map_py, py_function",
    "py_function": "map_py, py_function",
}


@pytest.fixture(scope="module")
def last_lines(nursery, tmp_path_factory):
    """What each case ends with: (exit code, last line)."""

    def run(case):
        fault, family, *flags = case.replace(",", "").split()
        folder = tmp_path_factory.mktemp(fault)
        settings = [f"--model_dir={folder}", f"--config.fault={fault}", f"--config.keras={family}"]
        life = nursery.life_of("wrong", *settings, *flags)
        return life.code(), life.output().strip().splitlines()[-1]

    return Results(run)


@pytest.mark.slow
@pytest.mark.parametrize("case", PARAMETERS)
def test_the_last_line_names_the_users_line_and_the_sentence(case, last_lines):
    code, line = last_lines[case]
    assert code == 1, line
    assert line.startswith("looplib: error: ") and CASES[case] in line, line
    fault = case.partition(",")[0]
    if fault == "quit":
        return
    if case == "layer_key, tf_keras":  # AutoGraph cannot make another KeyError, and says where it was called
        fault = "self.printer"
    place = "settings.py:1: x = = 1" if fault == "syntax" else marked(PLACES.get(fault, fault))
    if fault == "autograph":  # AutoGraph names the condition
        place = f"tests/programs/wrong.py:{LINES.index('            if tf.reduce_sum(x) > 0:') + 1}: "
    assert f"fix {place}" in line, line


def marked(mark):
    """The start of "file:line: text" for the line of wrong.py that ends in a mark."""
    numbers = [
        n for n, text in enumerate(LINES, 1) if text.endswith(f"  # {mark}") or text.strip().startswith(mark + "(")
    ]
    return f"tests/programs/wrong.py:{numbers[0]}: "


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize(
    "error, sentence",
    [
        (KeyError("x"), "'x'"),
        (AssertionError(), "AssertionError"),
        (ValueError("\n\n one\ntwo"), "one"),
        (ValueError("word " * 59 + "@tf.function"), "word " * 59 + "…"),
        (ValueError("x" * 400), "x" * 298 + " …"),
        (OSError(28, "No space left on device", "ckpt"), "[Errno 28] No space left on device: 'ckpt'"),
        (
            ValueError("Graph execution error:\n\nDetected at node div defined at (most recent call last):\n<stack traces>\n\n"
                       "2 root error(s) found.\n  (0) INVALID_ARGUMENT: bad\n\t [[{{node div}}]]\n0 successful"),
            "bad",
        ),
        (ValueError("in user code:\n\n    File \"a.py\", line 1, in f  *\n        g()\n\n    ValueError: in user code:\n    \n"
                    "        File \"b.py\", line 2, in g  *\n            h()\n    \n        TypeError: inner\n    \n"), "inner"),
    ],
)  # fmt: skip
def test_the_gist_of_a_message(error, sentence):
    assert gist(error) == sentence

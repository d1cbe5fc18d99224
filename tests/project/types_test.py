"""What a type checker says of programs that use looplib: one run of mypy, in its strict mode, over all of them."""

import re
import subprocess
import sys

import pytest
from paths import PYTHONPATH
from public_names_test import STUB

import looplib
from looplib.commands import project

ROOT = STUB.parents[1]
# A guide leaves out the types of its own functions, and other packages have none, or no stubs.
OF_THE_PROGRAM = {"no-untyped-def", "var-annotated", "import-untyped", "import-not-found"}
OF_OTHERS = re.compile(r'Class cannot subclass "(\w+)"|Call to untyped function "(\w+)"')
# A wrong signature of each method that users write, and what mypy says of it.
WRONG = {
    "GradientTrainer": (
        "def loss_fn(self) -> Any: ...",
        "def loss_fn(self, inputs: Any) -> float: ...",
        "def loss_fn(self, inputs: Any) -> dict[str, Any]: ...",
        "def loss_fn(self, inputs: Any) -> tuple[Any, float]: ...",
        "def dataset(self) -> Any: ...",
        "def dataset(self, context: looplib.InputContext) -> list[Any]: ...",
        "loss_fn: int = 3",
    ),
    "Trainer": (
        "def step_fn(self, x: Any, y: Any) -> dict[str, Any]: ...",
        "def step_fn(self, inputs: Any) -> float: ...",
        "def dataset(self, context: int) -> Any: ...",
        "def dataset(self, context: looplib.InputContext) -> int: ...",
        "def dataset(self, context: looplib.InputContext) -> None: ...",
        "def step_fn(self): ...",
    ),
    "Evaluator": (
        "def step_fn(self) -> dict[str, Any]: ...",
        "def dataset(self, context: looplib.InputContext) -> tuple[Any, Any]: ...",
        "def predict_dataset(self, context: looplib.InputContext) -> str: ...",
        "def predict_fn(self, inputs: Any) -> int: ...",
    ),
}
# Signatures that fit, with what they return by a name of the program's own.
RIGHT = """
from collections.abc import Mapping
from typing import Any
import looplib
Metrics = Mapping[str, Any]
class OneStep(looplib.Trainer):
    def dataset(self, context: looplib.InputContext) -> Any: ...
    def step_fn(self, inputs: Any) -> Metrics: return {}
class OneEvaluation(looplib.Evaluator):
    def step_fn(self, inputs: Any) -> Metrics: return {}
    def predict_fn(self, inputs: Any) -> Metrics: return {}
looplib.EarlyStopping("eval/f", 3, mode="max")
"""


def names():
    """Returns the public names, and the methods and properties of the classes among them."""
    for name in (*looplib.__all__, *looplib._MODULES):
        yield name
        if isinstance(value := getattr(looplib, name), type):
            yield from (
                f"{name}.{one}" for one in vars(value) if not one.startswith("_") and callable(vars(value)[one])
            )


def programs():
    """Returns the program of each page by its name; those of Model Garden are untyped, as it is."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = "\n\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
        if text and "official" not in text:
            yield f"page_{page.stem}.py", text


def wrong():
    """Returns a program with a class for each wrong signature, each on a line of its own after the two of its class."""
    classes = [
        f"class {kind}{number}(looplib.{kind}):\n    {line}\n"
        for kind, lines in WRONG.items()
        for number, line in enumerate(lines)
    ]
    return "\n".join(["from typing import Any\nimport looplib", *classes])


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What mypy says: lists of (line, message, code) by file."""
    folder = tmp_path_factory.mktemp("types")
    for name, text in programs():
        (folder / name).write_text(text)
    for start in ("loss", "keras", "step"):
        made = folder / "made" / start / f"from_{start}"
        project.make(str(made), start)
        (made / made.name).rename(folder / made.name)
        (made / "tests" / "test_train.py").rename(folder / f"test_{start}.py")
    (folder / "wrong.py").write_text(wrong() + '\n\nlooplib.EarlyStopping("eval/f", 3, mode="up")\n')
    (folder / "right.py").write_text(RIGHT)
    (folder / "names.py").write_text("import looplib\n" + "".join(f"reveal_type(looplib.{name})\n" for name in names()))
    settings = [
        "--strict",
        "--allow-redefinition",
        "--follow-imports=silent",
        "--no-error-summary",
        "--cache-dir=cache",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *settings, "."],
        cwd=folder,
        env={"MYPYPATH": str(ROOT), "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and not done.stderr, done.stdout + done.stderr
    lines = re.findall(r"^(\S+?):(\d+): (?:error|note): (.*?)(?:  \[([\w-]+)\])?$", done.stdout, re.MULTILINE)
    return {name: [one[1:] for one in lines if one[0] == name] for name in {one[0] for one in lines}}


def test_no_public_name_is_any(found):
    revealed = [message for _, message, _ in found["names.py"]]
    assert len(revealed) == len(list(names())) > 100
    unknown = [name for name, message in zip(names(), revealed) if re.search(r'"(Any|def \(\*.*\) -> Any)"$', message)]
    assert not unknown


def test_a_checker_reports_nothing_of_looplib_in_any_program(found):
    public, texts, told = {name.rpartition(".")[2] for name in names()}, dict(programs()), []
    for file in texts.keys() & found.keys():
        for line, message, code in found[file]:
            name = "".join(OF_OTHERS.match(message).groups("")) if OF_OTHERS.match(message) else ""
            theirs = name and (name not in public or re.search(rf"(def|class) {name}\b", texts[file]))
            if code and code not in OF_THE_PROGRAM and not theirs:
                told.append((file, line, message))
    assert "no-untyped-def" not in {code for _, _, code in found.get("page_README.py", ())}  # so that it is checked
    # The page shows the error that looplib gives for it.
    assert len(told) == 1, told
    ((file, _, message),) = told
    assert file == "page_errors_program.py" and "steps_per_loop" in message


def test_a_new_project_has_all_types(found):
    own = [one for file, lines in found.items() if file.startswith(("from_", "test_")) for one in lines]
    assert own and {code for _, _, code in own if code} == {"import-untyped"}


def test_a_wrong_signature_of_a_method_that_users_write_is_found(found):
    lines = {int(line) for line, _, code in found["wrong.py"] if code in ("override", "assignment")}
    text = wrong().splitlines()
    assert lines == {number for number, line in enumerate(text, 1) if line.startswith("    ")}
    assert "arg-type" in {code for _, _, code in found["wrong.py"]}  # of a mode that is none
    assert "right.py" not in found

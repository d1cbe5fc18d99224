"""Work that a fork finds done already."""

import os
import pathlib
import subprocess

import pytest
from conftest import more
from paths import PYTHONPATH

ROOT = pathlib.Path(__file__).parents[2]
# Names what AutoGraph converts, which takes each process a second; TensorFlow has no public way to ask for it.
PROGRAM = """
import runpy, sys
from tensorflow.python.autograph.impl import api

names, transform = [], api._TRANSPILER.transform_ast

def noted(node, context):
    names.append(context.info.name)
    return transform(node, context)

api._TRANSPILER.transform_ast = noted
try:
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
except SystemExit as end:
    print("converted", *names)
    sys.exit(end.code)
"""


@pytest.mark.parametrize("binary", ["trainers.image_classification", *more(["faulty"])])
def test_what_a_run_converts_was_converted_before_the_fork(binary, python, tmp_path):
    done = subprocess.run(
        [python, "-c", PROGRAM, binary, f"--model_dir={tmp_path}/run", "--train_steps=2", "--steps_per_loop=1"],
        capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "converted", "add them to fork_server.py"

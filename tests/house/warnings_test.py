"""Under `-W error`, neither README's program nor a ready trainer ends by a warning of looplib's own.

Warnings in modules of other packages are left out, such as those of gast, by which AutoGraph converts functions, except
that a file or socket of theirs that is not closed is looplib's matter, too.
"""

import pathlib
import re
import subprocess
import sys

import conftest
import paths
import pytest

STRICT = r"""
import gc, runpy, sys, warnings
warnings.filterwarnings("ignore", module=r"(?!(looplib|trainers|__main__)(\.|$))")
warnings.simplefilter("error", ResourceWarning)
sys.argv[:] = sys.argv[1:]
run = runpy.run_path if sys.argv[0].endswith(".py") else runpy.run_module
run(sys.argv[0], run_name="__main__")
gc.collect()
"""


def run_strictly(*arguments: str | pathlib.Path) -> str:
    """Runs a file or module with warnings as errors; returns what it says about warnings, which should be nothing."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", STRICT, *map(str, arguments)],
        capture_output=True, text=True, cwd=paths.ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return "\n".join(line for line in done.stderr.splitlines() if re.search(r"Warning\b|deprecated", line))


def test_the_program_of_readme_gives_no_warning(tmp_path):
    (text,) = re.findall(r"```python\n(.*?)```", (paths.ROOT / "README.md").read_text(), re.S)
    (tmp_path / "program.py").write_text(text.replace("/tmp/first", str(tmp_path / "run")).replace("500", "40"))
    assert run_strictly(tmp_path / "program.py") == ""


@pytest.mark.parametrize(
    "name",
    [
        "image_classification",
        *conftest.more(["language_model", "contrastive", "diffusion", "gan", "fine_tune", "recommendation"]),
    ],
)
def test_a_ready_trainer_gives_no_warning(tmp_path, name):
    flags = ["--train_steps=4", "--global_batch_size=16"]
    if name == "fine_tune":
        assert run_strictly("trainers.image_classification", f"--model_dir={tmp_path / 'base'}", *flags) == ""
        flags.append(f"--config.base={tmp_path / 'base'}")
    assert run_strictly(f"trainers.{name}", f"--model_dir={tmp_path / 'run'}", *flags) == ""


def test_a_warning_or_an_unclosed_file_is_noticed(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("open(__file__)\n")
    assert "ResourceWarning: unclosed file" in run_strictly(program)
    program.write_text("import warnings; warnings.warn('old', DeprecationWarning)\n")
    with pytest.raises(AssertionError, match="DeprecationWarning: old"):
        run_strictly(program)

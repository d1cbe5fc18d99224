"""Where the project is, and the path on which a program finds it, the helpers of its tests, and their programs."""

import os
import pathlib

ROOT = pathlib.Path(__file__).absolute().parents[2]
PROGRAMS = ROOT / "tests" / "programs"
PYTHONPATH = os.pathsep.join(str(ROOT / part) for part in ("", "tests", "tests/helpers", "tests/programs"))

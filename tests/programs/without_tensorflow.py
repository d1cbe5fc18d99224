"""Import this first in a worker that needs no TensorFlow, which `looplib/__init__.py` imports: it takes seconds.

An empty package takes its place; the modules below it are the real ones.
"""

import pathlib
import sys
import types

_package = types.ModuleType("looplib")
_package.__path__ = [str(pathlib.Path(__file__).parents[2] / "looplib")]
sys.modules["looplib"] = _package

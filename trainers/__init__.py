"""Ready trainers, each an absl binary: `python -m trainers.<name> --help`."""

from looplib.compat import tensorflow as _tf  # noqa: F401  (imports TensorFlow, before any other file does, and faster)

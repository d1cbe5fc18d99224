"""When a pipeline repeats its batches exactly, where that depends on the user's program."""

from looplib.compat import tensorflow as _tf

# The beginnings of TensorFlow's names of ops, and parts of them.
_PYTHON = ("PyFunc", "EagerPyFunc", "PyFuncStateless")
_RESOURCES = ("Variable", "Rng", "StatefulUniform", "StatefulStandardNormal", "StatefulTruncatedNormal")


def condition(op: str, *, by_skipping: bool) -> str:
    """Returns the condition under which an op of a pipeline repeats its results; "" if it always does.

    Args:
      op: a text that begins with the op's type.
      by_skipping: whether the pipeline is read again from its beginning, rather than from a later position.
    """
    if op.startswith(_PYTHON):
        return "its Python code depends on its arguments only, not on time or on earlier runs"
    if op.startswith(tuple(_tf.RANDOM_OPS)):
        repeats = "its random ops have seeds and run without num_parallel_calls"
        return repeats if by_skipping else "its random numbers come from tf.random.stateless_*, with seeds=True"
    if any(name in op for name in _RESOURCES):
        values = "from the start of the run" if by_skipping else "that they had at this step"
        return f"its variables and tf.random.Generators have the values {values}"
    return ""

"""What `tf.data` does not tell of a pipeline: whether it can be read a second time without a trace."""

import tensorflow as tf

from looplib.compat.tensorflow import RANDOM_OPS

# Stages without a state that their iterators share, as a shuffle's seeds are. Functions of the others are looked at.
_PLAIN = frozenset(
    "AssertCardinality Batch Concatenate Options PaddedBatch ParallelBatch Prefetch Range Rebatch Repeat Shard Skip "
    "Take Tensor TensorSlice Unbatch Zip".split()
)
_OF_FUNCTIONS = frozenset({"FlatMap", "Map", "ParallelMap"})
_STATE = ("PyFunc", "Shuffle", "Generator", "Assign", "Cache", "Insert", "Rng", "RandomDataset", "Stateful")
_CALLS = ("StatefulPartitionedCall",)  # of functions whose ops are looked at


def leaves_no_trace(dataset: tf.data.Dataset, known: list[tf.data.Dataset]) -> bool:
    """Returns whether a pipeline has no state that a second iterator over it would change.

    Such a state are the seeds of a shuffle, random numbers, a cache, and whatever a Python function keeps. False where
    TensorFlow, of which 2.20 and 2.21 are known, does not tell a pipeline's stages.

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
    graph = stage._map_func.function.graph
    graphs = [graph, *(function.graph for function in graph._functions.values())]
    types = {op.type for each in graphs for op in each.get_operations()} - set(_CALLS)
    return RANDOM_OPS.isdisjoint(types) and not any(part in kind for kind in types for part in _STATE)

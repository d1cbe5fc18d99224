"""The weights in TensorFlow's checkpoints, by names of which each means one."""

import re

import numpy as np
import tensorflow as tf

from looplib.base.messages import gist
from looplib.compat import tensorflow as _tf
from looplib.errors import NoCheckpointError, WarmStartError
from looplib.task.record import RunRecord
from looplib.weights.names import NamedVariable, SavedVariables, groups
from looplib.weights.sources import StoredTensor

_MODEL = re.compile(r"^(sequential|functional|model)(_\d+)?/(?=.+/)")
_OF_OTHERS = re.compile(r"/(\w*optimizer|_?metrics|compiled_metrics|_compile_metrics|_loss_tracker|keras_api)/")
_OWN = frozenset({"global_step", "input_state", "replica_state", "run_state", "save_counter"})


def is_weight(leaf: NamedVariable) -> bool:
    """Returns whether a saved variable is of a layer or a module, and not of an optimizer or a metric."""
    kept = leaf.paths and all(_OF_OTHERS.search(f"/{path}/") for _, path in leaf.paths.values())
    return not (leaf.origin or leaf.owned or kept)


def by_unique_name(saved: SavedVariables) -> dict[str, NamedVariable]:
    """Returns the saved weights by names: with the attribute of the trainer before it, or by its path, if need be."""
    weights = list(filter(is_weight, saved.leaves.values()))
    names: dict[str, NamedVariable] = {}
    for name, alike in groups(weights, lambda leaf: _without_model(leaf.name)).items():
        longer = groups(alike, lambda leaf: f"{min(leaf.paths)}/{_without_model(leaf.name)}".lstrip("/"))
        for long, leaves in longer.items():
            for leaf in leaves:
                names[name if len(alike) == 1 else long if len(leaves) == 1 else leaf.path] = leaf
    return names


def _without_model(name: str) -> str:
    """Returns a name without the one that Keras has given a model without a name, such as `sequential_1`."""
    return _MODEL.sub("", name)


class CheckpointWeights:
    """The weights of a checkpoint, without a program that has variables for them.

    Args:
      path: the checkpoint.

    Attributes:
      tensors: its weights by name.

    Raises:
      UsageError: if it cannot be read.
    """

    def __init__(self, path: str) -> None:
        try:
            self._reader = tf.train.load_checkpoint(path)
            graph = _tf.object_graph(self._reader)
            record = RunRecord.in_checkpoint(self._reader, path)
            if graph is None:
                raise ValueError("it has no object graph")
        except (ValueError, IndexError, tf.errors.OpError) as error:
            kind = WarmStartError if tf.io.gfile.exists(f"{path}.index") else NoCheckpointError
            raise kind(
                f"{path} cannot be read ({gist(error)}); name a file of weights, a run directory, a checkpoint such as "
                "ckpt-1000, or a SavedModel"
            ) from error
        hidden = {*_OWN, *(record.optimizers or ()), "optimizer"}
        roots = {child.local_name for child in graph.nodes[0].children}
        # Placeholders: what is here does not matter.
        saved = SavedVariables(
            self._reader, graph, record.names, {name: tf.train.Checkpoint() for name in roots - hidden}
        )
        dtypes = self._reader.get_variable_to_dtype_map()
        self._keys, self.tensors = {}, {}
        for name, leaf in by_unique_name(saved).items():
            dtype = dtypes[leaf.key]
            kind = None if dtype == tf.string else np.dtype(dtype.as_numpy_dtype)
            if not leaf.name.endswith("seed_generator_state"):
                self.tensors[name], self._keys[name] = StoredTensor(name, leaf.shape, kind), leaf.key

    def read(self, key: str) -> np.ndarray:
        """Returns the numbers of a tensor."""
        return np.asarray(self._reader.get_tensor(self._keys[key]))

    def close(self) -> None:
        """Does nothing, because TensorFlow's reader has no end."""

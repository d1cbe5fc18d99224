"""The weights in TensorFlow's checkpoints, by names of which each means one."""

import collections
import re
from collections.abc import Iterable, Mapping

import numpy as np
import tensorflow as tf

from looplib.base.messages import gist
from looplib.compat import tensorflow as _tf
from looplib.errors import NoCheckpointError, WarmStartError
from looplib.task.record import RunRecord
from looplib.weights.names import LiveVariables, NamedVariable, NameNormalizer, SavedVariables, groups, in_order
from looplib.weights.sources import StoredTensor

_Layer = dict[str, list[NamedVariable]]


class Match:
    """Pairs saved variables with the ones of this program.

    Args:
      saved: the variables of a checkpoint.
      live: those here.
      optimizers: the optimizers that the checkpoint was made with, dict from name to class, as others start
        from the beginning; None where they are not known.

    Attributes:
      pairs: list of (saved, here).
      ambiguous: the saved variables that could belong to several here.
    """

    def __init__(
        self, saved: Iterable[NamedVariable], live: LiveVariables, optimizers: Mapping[str, str] | None
    ) -> None:
        self.pairs: list[tuple[NamedVariable, NamedVariable]] = []
        self._done: set[int] = set()
        self._normal = NameNormalizer(live)
        held = {name: live.objects[name] for name in live.optimizers}
        classes = {name: type(value).__name__ for name, value in held.items() if not isinstance(value, (list, dict))}
        other = {name for name in classes if optimizers is not None and optimizers.get(name) != classes[name]}
        sides = [list(saved), [leaf for leaf in live.leaves if not leaf.paths.keys() <= other]]
        slots = [[leaf for leaf in side if leaf.origin] for side in sides]
        sides = [[leaf for leaf in side if not leaf.origin] for side in sides]
        sizes = collections.Counter(root for leaf in sides[1] for root in leaf.paths)
        unsure: list[NamedVariable] = []
        for find in (self._by_name, self._by_path, self._by_layer):
            for root in sorted(sizes, key=lambda root: (sizes[root], root)):  # the narrowest attribute decides first
                left = ([leaf for leaf in side if root in leaf.paths and id(leaf) not in self._done] for side in sides)
                unsure += find(root, *left)
        self.ambiguous = [leaf for leaf in unsure if id(leaf) not in self._done and leaf.floating]
        self._by_origin(*slots)

    def _pair(self, one: NamedVariable, other: NamedVariable) -> None:
        self.pairs.append((one, other))
        self._done |= {id(one), id(other)}

    def _by_name(self, root: str, saved: list[NamedVariable], live: list[NamedVariable]) -> list[NamedVariable]:
        """Pairs names that somebody has given and that both sides have once."""
        there, here = (groups(side, lambda leaf: self._normal.given(leaf.name)) for side in (saved, live))
        for name in there.keys() & here.keys() - {None}:
            if len(there[name]) == len(here[name]) == 1:
                self._pair(there[name][0], here[name][0])
        return []

    def _by_path(self, root: str, saved: list[NamedVariable], live: list[NamedVariable]) -> list[NamedVariable]:
        """Pairs what both sides hold under the same attributes, without a place in a list."""
        there, here = ({leaf.paths[root]: leaf for leaf in side} for side in (saved, live))
        for numbers, path in there.keys() & here.keys():
            if not numbers:
                self._pair(there[0, path], here[0, path])
        return []

    def _by_layer(self, root: str, saved: list[NamedVariable], live: list[NamedVariable]) -> list[NamedVariable]:
        """Pairs layers of one name in their order, by shape where their numbers differ; returns the rest."""
        sides = [self._layers(root, side) for side in (saved, live)]
        unsure = []
        for name in sides[0].keys() & sides[1].keys():
            shapes = [groups(side[name], _shapes) for side in sides]
            for shape in shapes[0].keys() & shapes[1].keys():
                if len(shapes[0][shape]) == len(shapes[1][shape]):
                    unsure += self._pair_layers(shapes[0].pop(shape), shapes[1].pop(shape))
            there, here = ([layer for layers in side.values() for layer in layers] for side in shapes)
            if len(there) == len(here):
                there, here = ([layer for layer in side[name] if layer in left]
                               for side, left in zip(sides, (there, here)))  # fmt: skip
                unsure += self._pair_layers(there, here)
            else:
                vague = [layer for layer in there if _shapes(layer) in shapes[1]]
                unsure += [leaf for layer in vague for alike in layer.values() for leaf in alike]
        return unsure

    def _pair_layers(self, saved: list[_Layer], live: list[_Layer]) -> list[NamedVariable]:
        """Pairs the variables of layers that belong together; returns the rest, whose names one side has more often."""
        unsure = []
        for one, other in zip(saved, live):
            for part in one.keys() & other.keys():
                if len(one[part]) != len(other[part]):
                    unsure += one[part]
                    continue
                for there, here in zip(one[part], other[part]):
                    self._pair(there, here)
        return unsure

    def _layers(self, root: str, leaves: list[NamedVariable]) -> dict[str, list[_Layer]]:
        """Returns the layers by normal name, each a dict from the name of a variable in it, in the order of paths."""
        layers: dict[str, dict[tuple[str, int], _Layer]] = {}
        seen: collections.Counter[str] = collections.Counter()
        for leaf in sorted(leaves, key=lambda leaf: in_order(leaf.paths[root][1])):
            layer, _, own = leaf.name.rpartition("/")
            seen[leaf.name] += 1
            name = self._normal(leaf.name).rpartition("/")[0]
            if self._normal.given(own) is None:  # the layer's attribute tells more than variable_1
                own = re.split(r"(?:^|/)(?:[\w-]*-)?\d+(?:/|$)", leaf.paths[root][1])[-1] or self._normal(own)
            layers.setdefault(name, {}).setdefault((layer, seen[leaf.name]), {}).setdefault(own, []).append(leaf)
        return {name: list(alike.values()) for name, alike in layers.items()}

    def _by_origin(self, saved: list[NamedVariable], live: list[NamedVariable]) -> None:
        """Pairs slots of one kind whose variables are pairs."""
        here = {id(one): other for one, other in self.pairs}
        slots = {(root, leaf.kind, id(leaf.origin)): leaf for leaf in live for root in leaf.paths}
        for leaf in saved:
            if origin := here.get(id(leaf.origin)):
                found = {id(slot): slot for root in leaf.paths if (slot := slots.get((root, leaf.kind, id(origin))))}
                for slot in found.values():
                    self._pair(leaf, slot)


def _shapes(layer: _Layer) -> frozenset[tuple[str, tuple[tuple[int | None, ...], ...]]]:
    return frozenset((name, tuple(leaf.shape for leaf in alike)) for name, alike in layer.items())


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

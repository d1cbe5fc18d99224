"""The names of what a checkpoint holds: which saved value belongs to which variable, also of a changed program.

TensorFlow finds a saved value by its place in lists of layers and optimizer variables, so that a layer more, or one
that is frozen, moves all others. Here a variable is known by its own name below an attribute of the trainer, and a
value that an optimizer or an average keeps for a variable (a slot) by that variable. The run record of a checkpoint has
these names. A checkpoint without them has the names that TensorFlow gives, which lack some layers of subclassed models.

Keras numbers the layers that have no name (`dense`, `dense_1`), and each process counts for itself. Such layers are
known by their order if there are equally many, or else by their shapes if these decide it.
"""

import collections
import dataclasses
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from looplib import _keras
from looplib.task.averages import WeightAverages
from looplib.task.record import VariableNames
from looplib.task.state import SlotOptimizer

_NUMBERED = re.compile(r"(layer(_with_weights)?-)?\d+$")  # names of children in lists, and of tf_keras's layers
_MODELS = frozenset({"sequential", "functional", "model"})  # the names that Keras gives to models


_T = TypeVar("_T")
_Paths = dict[str, tuple[int, str]]


@dataclasses.dataclass(eq=False)
class Leaf:
    """A variable of a checkpoint or of the objects here.

    Attributes:
      name: its own name, such as `encoder/dense_1/kernel`.
      shape: its shape.
      floating: whether it holds floating-point numbers.
      paths: dict from an attribute of the trainer to how many parts of the path below it are numbers, and this path.
      variable: the variable here, or None for one of a checkpoint.
      key: the key in the checkpoint, or "" for one that is here.
      origin: the variable that it is kept for, if it is a slot.
      kind: of a slot, which one, such as `Adam momentum`.
      node: its number in the saved object graph; -1 for one that is here.
    """

    name: str
    shape: tuple[int | None, ...]
    floating: bool
    paths: _Paths
    variable: tf.Variable | None = None
    key: str = ""
    origin: "Leaf | None" = None
    kind: str = ""
    node: int = -1

    def below(self, root: str) -> str:
        """Returns its whole path by way of an attribute of the trainer."""
        return "/".join(filter(None, (root, self.paths[root][1])))

    @property
    def path(self) -> str:
        """Its shortest path with the fewest numbers."""
        return min((self.paths[root][0], self.below(root)) for root in self.paths)[1]


class Live:
    """The variables that some objects hold, by name.

    Args:
      objects: dict from attribute name to trackable object.
      recorded: whether the names are those that `record` returns, or else those that TensorFlow saves.

    Attributes:
      leaves: the variables.
      parts: all other objects.
      optimizers: the attributes that are optimizers.
    """

    def __init__(self, objects: Mapping[str, Any], recorded: bool = True) -> None:
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._of_variable: dict[int, Leaf] = {}
        # TensorFlow saves wrappers of lists and dicts.
        holder = tf.train.Checkpoint(**{name: value for name, value in objects.items() if name})
        objects = {**objects, **tf.train.TrackableView(holder).children(holder)}
        self.objects, self._recorded = objects, recorded
        self.optimizers = {name for name, value in objects.items() if _keras.is_optimizer(value)}
        roots = {name: self._number(value) for name, value in objects.items()}
        self._ways = _paths(self._children, roots)
        named = []
        for number, paths in self._ways.items():
            value = self._objects[number]
            variable = _variable(value)
            if variable is None:
                continue
            if leaf := self.leaf_of(value):
                leaf.paths = {**paths, **leaf.paths}
                continue
            path = _keras.variable_path(value)
            leaf = Leaf(path if recorded else _keras.variable_path(variable), tuple(variable.shape),
                        variable.dtype.is_floating, paths, variable)  # fmt: skip
            self._of_variable[id(variable)] = leaf
            named.append((path, leaf))
        self.parts = [value for value in self._objects if _variable(value) is None]
        self._find_slots(named)
        self._reachable = list(self._of_variable.values())
        self._find_old_slots()
        self.leaves = list(self._of_variable.values())
        _leave_to_others(self.leaves, self.optimizers)

    def _number(self, value: Any) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)  # which also keeps it alive, so that its id stays its own
        return self._numbers[id(value)]

    def _children(self, number: int) -> list[tuple[str, int]]:
        value = self._objects[number]
        found = {} if _variable(value) is not None else tf.train.TrackableView(value).children(value)
        return [(name, self._number(child)) for name, child in found.items()]

    def leaf_of(self, value: Any) -> Leaf | None:
        """Returns the variable of an object; None if it is no variable of these."""
        return self._of_variable.get(id(_variable(value)))

    def _find_slots(self, named: list[tuple[str, Leaf]]) -> None:
        held = {}
        for part in self.parts:
            if _keras.is_optimizer(part) and not isinstance(part, SlotOptimizer):
                found = [self.leaf_of(variable) for variable in part.variables]
                held[type(part).__name__, id(part)] = [leaf for leaf in found if leaf]
            elif isinstance(part, WeightAverages):
                for value, original in zip(part.values, part.originals):
                    if leaf := self.leaf_of(value):
                        leaf.kind, leaf.origin = "average", self.leaf_of(original)
        owned = {id(leaf) for leaves in held.values() for leaf in leaves}
        origins = _Origins([pair for pair in named if id(pair[1]) not in owned])
        for (owner, _), leaves in held.items():
            origins.assign(leaves, owner if self._recorded else None)

    def _find_old_slots(self) -> None:
        """Adds the slots of optimizers that TensorFlow saves beside their variables, which no attribute reaches."""
        for part in filter(lambda part: isinstance(part, SlotOptimizer), self.parts):
            paths = self._ways[self._number(part)]
            for origin in self._reachable:
                for kind in part.get_slot_names():
                    if (slot := _old_slot(part, origin.variable, kind)) is not None:
                        self._of_variable[id(slot)] = Leaf(slot.name, tuple(slot.shape), slot.dtype.is_floating,
                                                           dict(paths), slot, origin=origin, kind=kind)  # fmt: skip

    def record(self) -> VariableNames:
        """Returns the names to keep with a checkpoint."""
        return VariableNames(
            {leaf.path: leaf.name for leaf in self._reachable},
            {leaf.path: [leaf.kind, leaf.origin.path] for leaf in self._reachable if leaf.origin},
        )


class Saved:
    """The variables that a checkpoint holds, by name.

    Args:
      reader: from `tf.train.load_checkpoint`.
      graph: its object graph.
      names: the names of its run record; None for a checkpoint that has none.
      roots: dict from attribute name to the number of its node.
      live: the variables here.

    Attributes:
      leaves: dict from the number of a node to its variable.
    """

    def __init__(
        self, reader: Any, graph: Any, names: VariableNames | None, roots: Mapping[str, int], live: Live
    ) -> None:
        children = [[(child.local_name, child.node_id) for child in node.children] for node in graph.nodes]
        ways = _paths(children.__getitem__, roots)
        self.leaves: dict[int, Leaf] = {}
        for number, paths in ways.items():
            self._add(reader, graph, number, paths)
        leaves = list(self.leaves.values())
        if names is None:
            kinds = {leaf.kind for leaf in live.leaves if leaf.origin}
            _Origins([(leaf.name, leaf) for leaf in leaves]).assign(leaves, None, kinds)
        else:
            at = {path: self.leaves.get(_node_at(children, path)) for path in names.own}
            for path, name in names.own.items():
                if leaf := at[path]:
                    leaf.name = name
            for path, (kind, origin) in names.slots.items():
                if (leaf := at.get(path)) and at.get(origin):
                    leaf.kind, leaf.origin = kind, at[origin]
        for number, paths in ways.items():
            for slot in graph.nodes[number].slot_variables:
                self._add(reader, graph, slot.slot_variable_node_id, paths)
                if leaf := self.leaves.get(slot.slot_variable_node_id):
                    leaf.kind, leaf.origin = slot.slot_name, self.leaves.get(slot.original_variable_node_id)
        _leave_to_others(self.leaves.values(), live.optimizers)

    def _add(self, reader: Any, graph: Any, number: int, paths: _Paths) -> None:
        for attribute in graph.nodes[number].attributes:
            key = attribute.checkpoint_key
            if attribute.name == "VARIABLE_VALUE" and reader.has_tensor(key):
                shape, dtype = (
                    of()[key] for of in (reader.get_variable_to_shape_map, reader.get_variable_to_dtype_map)
                )
                name = attribute.full_name or key
                self.leaves[number] = Leaf(name, tuple(shape), dtype.is_floating, dict(paths), key=key, node=number)


class Match:
    """Which saved variable belongs to which one here.

    Args:
      saved: those of a checkpoint.
      live: those here.
      optimizers: the optimizers that the checkpoint was made with, dict from name to class or list of classes, as
        others start from the beginning; None where they are not known.

    Attributes:
      pairs: list of (saved, here).
      ambiguous: the saved variables that could belong to several here.
    """

    def __init__(self, saved: Iterable[Leaf], live: Live, optimizers: Mapping[str, str] | Sequence[str] | None) -> None:
        self.pairs: list[tuple[Leaf, Leaf]] = []
        self._done: set[int] = set()
        self._normal = Normal(live)
        classes = {name: type(live.objects[name]).__name__ for name in live.optimizers}
        if isinstance(optimizers, Mapping):
            other = {name for name in classes if optimizers.get(name) != classes[name]}
        else:
            other = {name for name in classes if optimizers is not None and classes[name] not in optimizers}
        sides = [list(saved), [leaf for leaf in live.leaves if not leaf.paths.keys() <= other]]
        slots = [[leaf for leaf in side if leaf.origin] for side in sides]
        sides = [[leaf for leaf in side if not leaf.origin] for side in sides]
        sizes = collections.Counter(root for leaf in sides[1] for root in leaf.paths)
        unsure: list[Leaf] = []
        for find in (self._by_name, self._by_path, self._by_layer):
            for root in sorted(sizes, key=lambda root: (sizes[root], root)):  # the narrowest attribute decides first
                left = ([leaf for leaf in side if root in leaf.paths and id(leaf) not in self._done] for side in sides)
                unsure += find(root, *left)
        self.ambiguous = [leaf for leaf in unsure if id(leaf) not in self._done and leaf.floating]
        self._by_origin(*slots)

    def _pair(self, one: Leaf, other: Leaf) -> None:
        self.pairs.append((one, other))
        self._done |= {id(one), id(other)}

    def _by_name(self, root: str, saved: list[Leaf], live: list[Leaf]) -> list[Leaf]:
        """Pairs names that somebody has given and that both sides have once."""
        there, here = (_groups(side, lambda leaf: self._normal.given(leaf.name)) for side in (saved, live))
        for name in there.keys() & here.keys() - {None}:
            if len(there[name]) == len(here[name]) == 1:
                self._pair(there[name][0], here[name][0])
        return []

    def _by_path(self, root: str, saved: list[Leaf], live: list[Leaf]) -> list[Leaf]:
        """Pairs what both sides hold under the same attributes, without a place in a list."""
        there, here = ({leaf.paths[root]: leaf for leaf in side} for side in (saved, live))
        for numbers, path in there.keys() & here.keys():
            if not numbers:
                self._pair(there[0, path], here[0, path])
        return []

    def _by_layer(self, root: str, saved: list[Leaf], live: list[Leaf]) -> list[Leaf]:
        """Pairs layers of one name in their order, by shape where there are not equally many; returns what is left."""
        sides = [self._layers(root, side) for side in (saved, live)]
        unsure = []
        for name in sides[0].keys() & sides[1].keys():
            shapes = [_groups(side[name], _shapes) for side in sides]
            for shape in shapes[0].keys() & shapes[1].keys():
                if len(shapes[0][shape]) == len(shapes[1][shape]):
                    self._pair_layers(shapes[0].pop(shape), shapes[1].pop(shape))
            there, here = ([layer for layers in side.values() for layer in layers] for side in shapes)
            if len(there) == len(here):
                self._pair_layers(*([layer for layer in side[name] if layer in left]
                                    for side, left in zip(sides, (there, here))))  # fmt: skip
            else:
                unsure += [leaf for layer in there if _shapes(layer) in shapes[1] for leaf in layer.values()]
        return unsure

    def _pair_layers(self, saved: list[dict[str, Leaf]], live: list[dict[str, Leaf]]) -> None:
        for one, other in zip(saved, live):
            for part in one.keys() & other.keys():
                self._pair(one[part], other[part])

    def _layers(self, root: str, leaves: list[Leaf]) -> dict[str, list[dict[str, Leaf]]]:
        """Returns the layers by normal name, each a dict from the name of a variable in it, in the order of paths."""
        layers: dict[str, dict[tuple[str, int], dict[str, Leaf]]] = {}
        seen: collections.Counter[str] = collections.Counter()
        for leaf in sorted(leaves, key=lambda leaf: _in_order(leaf.paths[root][1])):
            layer, _, own = leaf.name.rpartition("/")
            seen[leaf.name] += 1
            name = self._normal(leaf.name).rpartition("/")[0]
            layers.setdefault(name, {}).setdefault((layer, seen[leaf.name]), {})[self._normal(own)] = leaf
        return {name: list(alike.values()) for name, alike in layers.items()}

    def _by_origin(self, saved: list[Leaf], live: list[Leaf]) -> None:
        """Pairs slots of one kind whose variables are pairs."""
        here = {id(one): other for one, other in self.pairs}
        slots = {(root, leaf.kind, id(leaf.origin)): leaf for leaf in live for root in leaf.paths}
        for leaf in saved:
            if origin := here.get(id(leaf.origin)):
                found = {id(slot): slot for root in leaf.paths if (slot := slots.get((root, leaf.kind, id(origin))))}
                for slot in found.values():
                    self._pair(leaf, slot)


class Normal:
    """Takes out of names what Keras has counted in one process: `dense_7/kernel` becomes `dense/kernel`.

    The name of a model that is an attribute of the trainer is left out too: the attribute stands for it.

    Args:
      live: the variables here, whose layers decide which names Keras has made.
    """

    def __init__(self, live: Live) -> None:
        holders = [part for part in live.parts if _keras.is_layer(part) or _keras.is_optimizer(part)]
        named = [(part, _base(part.name)) for part in holders if not isinstance(part, SlotOptimizer)]
        made = {base for part, base in named if _plain(base) == _plain(type(part).__name__)}
        self._made = made | {"Variable", "variable", "seed_generator", "seed_generator_state"}
        self._models = _MODELS | {_base(value.name) for value in live.objects.values() if _keras.is_model(value)}

    def __call__(self, name: str) -> str:
        """Returns the name without the numbers that Keras has given."""
        parts = [_base(part) if self._is_made(part) else part for part in name.split("/")]
        return "/".join(parts[1:] if len(parts) > 2 and _base(parts[0]) in self._models else parts)

    def given(self, name: str) -> str | None:
        """Returns the normal name; None if Keras has made a part of it."""
        name = self(name)
        return None if any(self._is_made(part) for part in name.split("/")) else name

    def _is_made(self, part: str) -> bool:
        return _base(part).removeprefix("forward_").removeprefix("backward_") in self._made


class _Origins:
    """The variables that slots may be kept for, by the names that optimizers make of theirs.

    Args:
      named: list of (name of a variable, variable).
    """

    def __init__(self, named: list[tuple[str, Leaf]]) -> None:
        self._whole = _groups(named, lambda pair: pair[0])
        self._flat = _groups(named, lambda pair: pair[0].replace("/", "_"))

    def assign(self, leaves: list[Leaf], owner: str | None, kinds: set[str] | None = None) -> None:
        """Sets `origin` and `kind` of those of an optimizer's variables that are slots.

        Args:
          leaves: the variables, in the optimizer's order.
          owner: the optimizer's class; None takes what the names of its variables say.
          kinds: the kinds that are possible; None for all.
        """
        for name, alike in _groups(leaves, lambda leaf: leaf.name).items():
            kind, origins = self._find(name, owner)
            if len(origins) > len(alike):  # of variables of one name, those that the optimizer reaches
                origins = [one for one in origins if alike[0].paths.keys() & one.paths.keys()]
            if len(origins) == len(alike) and (kinds is None or kind in kinds):
                for leaf, origin in zip(alike, origins):
                    leaf.kind, leaf.origin = kind, origin

    def _find(self, name: str, owner: str | None) -> tuple[str, list[Leaf]]:
        first, _, own = name.partition("/")
        words = own.split("_")
        for end in range(len(words) - 1, 0, -1):  # Keras 3: adam/dense_kernel_momentum
            if found := self._flat.get("_".join(words[:end])):
                return f"{owner or _base(first)} {'_'.join(words[end:])}", [leaf for _, leaf in found]
        parts = name.split("/")
        for start in range(1, len(parts) - 1):  # tf_keras: m/dense/kernel
            if found := self._whole.get("/".join(parts[start:])):
                return f"{owner or ''} {parts[start - 1]}", [leaf for _, leaf in found]
        return "", []


def stable_names(objects: Mapping[str, Any], variables: Sequence[tf.Variable]) -> dict[str, tf.Variable]:
    """Gives variables names that another start of the program gives them too.

    Args:
      objects: dict from attribute name to trackable object.
      variables: variables that these hold.

    Returns:
      dict from name to variable, in their order. Where several have one name, it says which one of how many.
    """
    if not variables:
        return {}
    live = Live(objects)
    normal = Normal(live)
    alike: dict[str, list[Leaf]] = {}
    for leaf in sorted(map(live.leaf_of, variables), key=lambda leaf: _in_order(leaf.path)):
        alike.setdefault(f"{min(leaf.paths)}/{normal(leaf.name)}", []).append(leaf)
    names = {
        id(leaf.variable): name if len(leaves) == 1 else f"{name} {number} of {len(leaves)}"
        for name, leaves in alike.items()
        for number, leaf in enumerate(leaves, 1)
    }
    return {names[id(variable)]: variable for variable in variables}


def misplaced(saved: Saved, live: Live, objects: Mapping[int, Any]) -> list[str]:
    """Lists the saved variables at whose place in the structure there is another one now.

    Args:
      saved: the variables of a checkpoint.
      live: those here.
      objects: the objects here by the numbers of the checkpoint's nodes.

    Returns:
      list of phrases, such as "la/kernel there, lb/kernel here".
    """
    normal = Normal(live)
    here = {number: leaf for number in saved.leaves if (leaf := live.leaf_of(objects.get(number)))}
    names = {normal(leaf.name) for leaf in live.leaves}
    found = []
    for number, leaf in here.items():
        there = saved.leaves[number]
        if there.origin and leaf.origin:
            other = here.get(there.origin.node) is not leaf.origin or there.kind != leaf.kind
        elif there.origin or leaf.origin:
            other = False  # names of TensorFlow's that do not say it
        else:
            one = normal(there.name)
            other = one != normal(leaf.name) and (one in names or all(count for count, _ in leaf.paths.values()))
        if other:
            found.append(f"{there.name} there, {leaf.name} here")
    return found


def _variable(value: Any) -> tf.Variable | None:
    value = _keras.tf_variable(value)
    return value if isinstance(value, tf.Variable) else None


def _old_slot(optimizer: SlotOptimizer, variable: tf.Variable, kind: str) -> tf.Variable | None:
    try:
        return optimizer.get_slot(variable, kind)
    except KeyError:  # of a variable that it does not train
        return None


def _paths(children: Callable[[int], list[tuple[str, int]]], roots: Mapping[str, int]) -> dict[int, _Paths]:
    """Returns how each node is reached from each root, by a path with the fewest numbers."""
    found: dict[int, _Paths] = {}
    for root, start in roots.items():
        queue, seen = collections.deque([(start, 0, "")]), set()
        while queue:
            number, count, path = queue.popleft()
            if number in seen:
                continue
            seen.add(number)
            found.setdefault(number, {})[root] = count, path
            for name, child in children(number):
                way = (child, count + bool(_NUMBERED.match(name)), f"{path}/{_escaped(name)}".lstrip("/"))
                (queue.append if way[1] > count else queue.appendleft)(way)
    return found


def _leave_to_others(leaves: Iterable[Leaf], optimizers: set[str]) -> None:
    """Removes the ways by an optimizer to variables that others hold."""
    for leaf in leaves:
        if not leaf.paths.keys() <= optimizers:
            leaf.paths = {root: path for root, path in leaf.paths.items() if root not in optimizers}


def _node_at(children: list[list[tuple[str, int]]], path: str) -> int:
    """Returns the number of the node at a path; -1 for none."""
    number = 0
    for name in path.split("/"):
        number = next((child for own, child in children[number] if _escaped(own) == name), -1)
        if number < 0:
            break
    return number


def _groups(items: Iterable[_T], key: Callable[[_T], Hashable]) -> dict[Hashable, list[_T]]:
    groups: dict[Hashable, list[_T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _shapes(layer: dict[str, Leaf]) -> frozenset[tuple[str, tuple[int | None, ...]]]:
    return frozenset((name, leaf.shape) for name, leaf in layer.items())


def _in_order(path: str) -> list[tuple[bool, int, str]]:
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"[/-]", path)]


def _escaped(name: str) -> str:
    """Returns the name of a child as a part of a path; a key of a dict may have a slash."""
    return name.replace("%", "%25").replace("/", "%2F")


def _base(name: str) -> str:
    return re.sub(r"_\d+$", "", name)


def _plain(name: str) -> str:
    return name.replace("_", "").lower()

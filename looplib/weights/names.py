"""The names in a checkpoint: they pair saved values with variables, also of a changed program.

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

from looplib.compat import keras as _keras
from looplib.compat import tensorflow as _tf
from looplib.task.averages import WeightAverages
from looplib.task.record import VariableNames
from looplib.task.state import SlotOptimizer

_NUMBERED = re.compile(r"(layer(_with_weights)?-)?\d+$")  # names of children in lists, and of tf_keras's layers
_MODELS = frozenset({"sequential", "functional", "model"})  # the names that Keras gives to models
PART = re.compile(r"(?:^|/)rows_(\d+)$")  # the end of the name of a part of a table of embeddings
_T = TypeVar("_T")
_Paths = dict[str, tuple[int, str]]


@dataclasses.dataclass(eq=False)
class NamedVariable:
    """A variable of a checkpoint or of the objects here.

    Attributes:
      name: its own name, such as `encoder/dense_1/kernel`.
      shape: its shape.
      floating: whether it holds floating-point numbers.
      paths: dict from an attribute of the trainer to how many parts of the path below it are numbers, and this path.
      variable: the variable here, or None for one of a checkpoint.
      key: the key in the checkpoint, or "" for one that is here.
      origin: the variable that it is kept for, if it is a slot.
      owned: whether an optimizer or averages hold it for themselves, as far as that is known.
      kind: of a slot, which one, such as `Adam momentum`.
      node: its number in the saved object graph; -1 for one that is here.
      parts: of a table of embeddings that stands for its parts, these, in the order of their rows.
    """

    name: str
    shape: tuple[int | None, ...]
    floating: bool
    paths: _Paths
    variable: tf.Variable | None = None
    key: str = ""
    origin: "NamedVariable | None" = None
    owned: bool = False
    kind: str = ""
    node: int = -1
    parts: list["NamedVariable"] = dataclasses.field(default_factory=list)

    @property
    def path(self) -> str:
        """Its path with the fewest numbers."""
        return _shortest(self.paths)


class LiveVariables:
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
        self._of_variable: dict[int, NamedVariable] = {}
        # TensorFlow saves wrappers of lists and dicts.
        holder = tf.train.Checkpoint(**{name: value for name, value in objects.items() if name})
        objects = {**objects, **tf.train.TrackableView(holder).children(holder)}
        self.objects, self._recorded = objects, recorded
        self.optimizers = {name for name, value in objects.items() if _has_optimizers(value)}
        roots = {name: self._number(value) for name, value in objects.items()}
        self._ways = _paths(self._children, roots)
        self.parts = [value for value in self._objects if _variable(value) is None]
        # Keras 3's own names of variables that TensorFlow knows by shorter ones.
        layers = [part for part in self.parts if _keras.is_layer(part) and part.built]
        held = _keras.without_vocabularies(one for layer in layers for one in layer.variables)
        known = {id(_variable(one)): _keras.variable_path(one) for one in held}
        named = []
        self._places: list[tuple[str, NamedVariable]] = []  # Keras 3's variable and the tf.Variable in it are two
        for number, paths in self._ways.items():
            value = self._objects[number]
            variable = _variable(value)
            if variable is None:
                continue
            if leaf := self.leaf_of(value):
                leaf.paths = {**paths, **leaf.paths}
            else:
                path = known.get(id(variable)) or _keras.variable_path(value)
                leaf = NamedVariable(path if recorded else _keras.variable_path(variable), tuple(variable.shape),
                            variable.dtype.is_floating, paths, variable)  # fmt: skip
                self._of_variable[id(variable)] = leaf
                named.append((path, leaf))
            self._places.append((_shortest(_without_optimizers(paths, self.optimizers)), leaf))
        self._find_slots(named)
        self._find_old_slots()
        self.leaves = list(self._of_variable.values())
        for leaf in self.leaves:
            leaf.paths = _without_optimizers(leaf.paths, self.optimizers)

    def _number(self, value: Any) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)  # which also keeps it alive, so that its id stays its own
        return self._numbers[id(value)]

    def _children(self, number: int) -> list[tuple[str, int]]:
        value = self._objects[number]
        found = {} if _variable(value) is not None else tf.train.TrackableView(value).children(value)
        return [(name, self._number(child)) for name, child in found.items()]

    def leaf_of(self, value: Any) -> NamedVariable | None:
        """Returns the `NamedVariable` of an object; None if the object is not one of these variables."""
        return self._of_variable.get(id(_variable(value)))

    def _find_slots(self, named: list[tuple[str, NamedVariable]]) -> None:
        held = {}
        for part in self.parts:
            if _keras.is_optimizer(part) and not isinstance(part, SlotOptimizer):
                found = [self.leaf_of(variable) for variable in part.variables]
                held[type(part).__name__, id(part)] = [leaf for leaf in found if leaf]
            elif isinstance(part, WeightAverages):
                for original, value in part.pairs:
                    if leaf := self.leaf_of(value):
                        leaf.kind, leaf.origin, leaf.owned = "average", self.leaf_of(original), True
        owned = {id(leaf) for leaves in held.values() for leaf in leaves}
        origins = _Origins([pair for pair in named if id(pair[1]) not in owned])
        for (owner, _), leaves in held.items():
            for leaf in leaves:
                leaf.owned = True
            origins.assign(leaves, owner if self._recorded else None)

    def _find_old_slots(self) -> None:
        """Adds the slots of optimizers that TensorFlow saves beside their variables, which no attribute reaches."""
        for part in filter(lambda part: isinstance(part, SlotOptimizer), self.parts):
            paths = self._ways[self._number(part)]
            for origin in list(self._of_variable.values()):
                for kind in part.get_slot_names():
                    if (slot := _old_slot(part, origin.variable, kind)) is not None:
                        leaf = NamedVariable(slot.name, tuple(slot.shape), slot.dtype.is_floating, dict(paths), slot)
                        leaf.origin, leaf.kind, leaf.owned = origin, kind, True
                        self._of_variable[id(slot)] = leaf

    def record(self) -> VariableNames:
        """Returns the names to save with a checkpoint. They are equal in each process that runs this program."""
        places = sorted(self._places, key=lambda place: in_order(place[0]))
        counted = NameNormalizer(self).counted(leaf.name for _, leaf in places if not leaf.origin)
        return VariableNames(
            {path: counted(leaf.name) for path, leaf in places if not leaf.origin},
            {path: [leaf.kind, leaf.origin.path] for path, leaf in places if leaf.origin},
        )


class SavedVariables:
    """The variables that a checkpoint holds, by name.

    Args:
      reader: from `tf.train.load_checkpoint`.
      graph: its object graph.
      names: the names of its run record; None for a checkpoint that has none.
      objects: dict from attribute name to the trackable object here, or from "" to one that was saved as the whole.

    Attributes:
      leaves: dict from the number of a node to its variable.
      attributes: the attributes of the trainer that have a variable in it.
      live: the variables here, under names of the same kind.
    """

    def __init__(self, reader: Any, graph: Any, names: VariableNames | None, objects: Mapping[str, Any]) -> None:
        self.live = live = LiveVariables(objects, recorded=names is not None)
        numbers = {"": 0} | {child.local_name: child.node_id for child in graph.nodes[0].children}
        roots = {name: numbers[name] for name in objects if name in numbers}
        children = [[(child.local_name, child.node_id) for child in node.children] for node in graph.nodes]
        ways = _paths(children.__getitem__, roots)
        self.leaves: dict[int, NamedVariable] = {}
        self._shapes, self._dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
        for number, paths in ways.items():
            self._add(graph, number, paths)
        leaves = list(self.leaves.values())
        if names is None:
            kinds = {leaf.kind for leaf in live.leaves if leaf.origin}
            _Origins([(leaf.name, leaf) for leaf in leaves]).assign(leaves, None, kinds)
        else:
            by_name = [{_escaped(name): child for name, child in of_node} for of_node in children]
            at = {path: self.leaves.get(_node_at(by_name, path)) for path in [*names.own, *names.slots]}
            for path, name in names.own.items():
                if leaf := at[path]:
                    leaf.name = name
            for path, (kind, origin) in names.slots.items():
                if (leaf := at.get(path)) and at.get(origin):
                    leaf.kind, leaf.origin = kind, at[origin]
        for number, paths in ways.items():
            for slot in graph.nodes[number].slot_variables:
                self._add(graph, slot.slot_variable_node_id, paths)
                if leaf := self.leaves.get(slot.slot_variable_node_id):
                    leaf.kind, leaf.origin = slot.slot_name, self.leaves.get(slot.original_variable_node_id)
        for leaf in self.leaves.values():
            leaf.paths = _without_optimizers(leaf.paths, live.optimizers)
        variables = [key for key in self._shapes if _tf.is_variable_key(key)]
        self.attributes = {_tf.name_of_variable(key).partition("/")[0] for key in variables} - {"save_counter"}

    def _add(self, graph: Any, number: int, paths: _Paths) -> None:
        for attribute in graph.nodes[number].attributes:
            key = attribute.checkpoint_key
            if attribute.name == "VARIABLE_VALUE" and key in self._shapes:
                name, shape, floating = attribute.full_name or key, self._shapes[key], self._dtypes[key].is_floating
                self.leaves[number] = NamedVariable(name, tuple(shape), floating, dict(paths), key=key, node=number)


class NameNormalizer:
    """Removes from names the numbers that Keras has counted in one process: `dense_7/kernel` becomes `dense/kernel`.

    The name of a model that is an attribute of the trainer is left out too: the attribute stands for it.

    Args:
      live: the variables here, whose layers decide which names Keras has made.
    """

    def __init__(self, live: LiveVariables) -> None:
        holders = [part for part in live.parts if _keras.is_layer(part) or _keras.is_optimizer(part)]
        for value in filter(_keras.is_layer, live.objects.values()):
            holders += _keras.sublayers(value)
        holders = [part for part in holders if not isinstance(part, SlotOptimizer)]
        named = [(part, _inner(_base(getattr(part, "name", "")))) for part in holders]  # tf_keras's loss scale has none
        made = {base for part, base in named if _plain(base) == _plain(type(part).__name__)}
        self._made = made | {"Variable", "variable", "seed_generator", "seed_generator_state"}
        self._models = _MODELS | {_base(value.name) for value in live.objects.values() if _keras.is_model(value)}

    def __call__(self, name: str) -> str:
        """Returns the name without the numbers that Keras has given."""
        parts = [_base(part) if self._is_made(part) else part for part in name.split("/")]
        return "/".join(parts[1:] if len(parts) > 2 and _base(parts[0]) in self._models else parts)

    def counted(self, names: Iterable[str]) -> Callable[[str], str]:
        """Returns a function that renumbers the names that Keras has numbered: from 0 on, in the order of `names`."""
        numbers: dict[str, dict[str, int]] = {}
        for part in (part for name in names for part in name.split("/") if self._is_made(part)):
            of_base = numbers.setdefault(_base(part), {})
            of_base.setdefault(part, len(of_base))

        def count(part: str) -> str:
            number = numbers.get(_base(part), {}).get(part)
            return part if number is None else f"{_base(part)}_{number}" if number else _base(part)

        return lambda name: "/".join(map(count, name.split("/")))

    def given(self, name: str) -> str | None:
        """Returns the normal name; None if Keras has chosen a part of it."""
        name = self(name)
        return None if any(self._is_made(part) for part in name.split("/")) else name

    def _is_made(self, part: str) -> bool:
        return _inner(_base(part)) in self._made


def stable_names(objects: Mapping[str, Any], variables: Sequence[tf.Variable]) -> dict[str, tf.Variable]:
    """Returns the variables by names that are the same in every start of the program, in their order.

    Args:
      objects: dict from attribute name to trackable object, which hold the variables.
      variables: the variables. Where several have one name, it says which one of how many.
    """
    if not variables:
        return {}
    live = LiveVariables(objects)
    normal = NameNormalizer(live)
    alike: dict[str, list[NamedVariable]] = {}
    for leaf in sorted(map(live.leaf_of, variables), key=lambda leaf: in_order(leaf.path)):
        alike.setdefault(f"{min(leaf.paths)}/{normal(leaf.name)}", []).append(leaf)
    names = {
        id(leaf.variable): name if len(leaves) == 1 else f"{name} {number} of {len(leaves)}"
        for name, leaves in alike.items()
        for number, leaf in enumerate(leaves, 1)
    }
    return {names[id(variable)]: variable for variable in variables}


class _Origins:
    """The variables that may have slots, with their names, by the names that optimizers derive from theirs."""

    def __init__(self, named: list[tuple[str, NamedVariable]]) -> None:
        self._whole = groups(named, lambda pair: pair[0])
        self._flat = groups(named, lambda pair: pair[0].replace("/", "_"))

    def assign(self, leaves: list[NamedVariable], owner: str | None, kinds: set[str] | None = None) -> None:
        """Sets `origin` and `kind` of the slot variables of an optimizer.

        Args:
          leaves: the variables, in the optimizer's order.
          owner: the optimizer's class; None if only the names of its variables are known.
          kinds: the kinds that are possible; None for all.
        """
        for name, alike in groups(leaves, lambda leaf: leaf.name).items():
            kind, origins = self._find(name, owner)
            if len(origins) > len(alike):  # of variables of one name, those that the optimizer reaches
                origins = [one for one in origins if alike[0].paths.keys() & one.paths.keys()]
            if len(origins) == len(alike) and (kinds is None or kind in kinds):
                for leaf, origin in zip(alike, origins):
                    leaf.kind, leaf.origin = kind, origin

    def _find(self, name: str, owner: str | None) -> tuple[str, list[NamedVariable]]:
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


def _variable(value: Any) -> tf.Variable | None:
    value = _keras.tf_variable(value)
    return value if isinstance(value, tf.Variable) else None


def _old_slot(optimizer: SlotOptimizer, variable: tf.Variable, kind: str) -> tf.Variable | None:
    try:
        return optimizer.get_slot(variable, kind)
    except KeyError:  # of a variable that it does not train
        return None


def _paths(children: Callable[[int], list[tuple[str, int]]], roots: Mapping[str, int]) -> dict[int, _Paths]:
    """Returns, for each node, the path from each root that has the fewest numbers."""
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


def _shortest(paths: _Paths) -> str:
    """Returns the whole path with the fewest numbers."""
    return min((count, f"{root}/{path}".strip("/")) for root, (count, path) in paths.items())[1]


def _without_optimizers(paths: _Paths, optimizers: set[str]) -> _Paths:
    """Returns the paths to a variable that do not lead through an optimizer; all paths if each of them does."""
    return {root: way for root, way in paths.items() if root not in optimizers} or paths


def _node_at(children: list[dict[str, int]], path: str) -> int:
    """Returns the number of the node at a path; -1 for none."""
    number = 0
    for name in path.split("/"):
        number = children[number].get(name, -1)
        if number < 0:
            break
    return number


def whole_name(part: str) -> str:
    """Returns the name of a table of embeddings, `items/rows`, from that of one of its parts, `items/rows_0`."""
    return re.sub(r"_\d+$", "", part) if PART.search(part) else part


def groups(items: Iterable[_T], key: Callable[[_T], Hashable]) -> dict[Hashable, list[_T]]:
    """Returns the items by key, in their order."""
    found: dict[Hashable, list[_T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def in_order(path: str) -> list[tuple[bool, int, str]]:
    """Returns a key that sorts paths, those with numbers in the order of the numbers."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"[/-]", path)]


def _has_optimizers(value: Any) -> bool:
    """Returns whether an attribute is an optimizer, or a list or dict of them."""
    if _keras.is_optimizer(value) or not isinstance(value, (list, tuple, dict)):
        return _keras.is_optimizer(value)
    items = value.values() if isinstance(value, dict) else value
    return bool(items) and all(map(_keras.is_optimizer, items))


def _escaped(name: str) -> str:
    """Returns the name of a child as a part of a path; a key of a dict may have a slash, or be empty."""
    return name.replace("%", "%25").replace("/", "%2F") or "%"


def _inner(name: str) -> str:
    """Returns the name of the layer inside a `Bidirectional`, without the prefix that this adds."""
    return name.removeprefix("forward_").removeprefix("backward_")


def _base(name: str) -> str:
    return re.sub(r"_\d+$", "", name)


def _plain(name: str) -> str:
    return name.replace("_", "").lower()

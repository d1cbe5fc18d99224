"""Which saved value goes to which variable here: by rules where these touch a name, by equal names else."""

import dataclasses
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import tensorflow as tf

from looplib.base.messages import join_names
from looplib.compat import keras as _keras
from looplib.errors import WarmStartError
from looplib.weights.layers import ComputedValue, Targets
from looplib.weights.names import LiveVariables, NamedVariable
from looplib.weights.rules import RuledName


class Matched(Protocol):
    """Variables and tensors, paired by equal names.

    Attributes:
      pairs: list of (saved, here).
      ambiguous: the saved variables that could belong to several here.
    """

    pairs: list[tuple[NamedVariable, NamedVariable]]
    ambiguous: list[NamedVariable]


@dataclasses.dataclass(frozen=True)
class Taken:
    """A saved value and the variable here that takes it.

    Attributes:
      there: the saved one.
      here: the one here.
      form: the name, the order of axes and the shape that rules have given it.
    """

    there: NamedVariable
    here: NamedVariable
    form: RuledName

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The shape of the value once its axes are in order; of another number of axes, as it is there."""
        there, axes = self.there.shape, self.form.transpose
        return tuple(there[axis] for axis in axes) if len(axes) == len(there) else there

    @property
    def fits(self) -> bool:
        """Whether the variable has the shape of the value."""
        if self.form.transpose and len(self.form.transpose) != len(self.there.shape):
            return False
        if self.form.reshape:
            return tf.TensorShape(self.shape).num_elements() == tf.TensorShape(self.here.shape).num_elements()
        return tf.TensorShape(self.here.shape).is_compatible_with(self.shape)  # that of an adapted layer may be open

    def formed(self, value: np.ndarray) -> np.ndarray:
        """Returns the value in the form of the variable; a view where numpy can."""
        if self.form.transpose:
            value = value.transpose(self.form.transpose)
        return value.reshape(self.here.shape) if self.form.reshape else value


@dataclasses.dataclass(frozen=True)
class WholeLayers:
    """The pairs of the layers that are taken, each as a whole.

    Attributes:
      taken: the pairs.
      misfits: the saved names of the others, by the reason.
    """

    taken: list[Taken]
    misfits: dict[str, list[str]]


def whole_layers(
    pairs: Sequence[Taken],
    live: LiveVariables,
    sides: tuple[Iterable[NamedVariable], Iterable[NamedVariable]],
    ruled: Container[int],
    type_there: Callable[[Taken], str],
) -> WholeLayers:
    """Divides pairs by what fits; a layer of Keras with a misfit takes nothing of equal names, with its slots.

    A layer of another kind has variables that are only there and others that are only here, such as the kernel of a
    `Conv2D` and the two of a `SeparableConv2D`.

    Args:
      pairs: the pairs.
      live: the variables here.
      sides: all saved values, and all variables here.
      ruled: the ids of the saved values that rules have touched.
      type_there: returns the name of the type of a saved value.
    """
    layers: dict[int, int] = {}  # of a variable here, the innermost layer that has it
    sizes: dict[int, int] = {}
    for part in live.parts:
        if _keras.is_layer(part) and not _keras.is_model(part):
            own = [leaf for variable in part.variables if (leaf := live.leaf_of(variable))]
            for leaf in own:
                if id(leaf) not in sizes or len(own) < sizes[id(leaf)]:
                    layers[id(leaf)], sizes[id(leaf)] = id(part), len(own)

    def layer(leaf: NamedVariable) -> int | None:
        if isinstance(leaf.variable, ComputedValue):
            return id(leaf.variable.layer)
        return layers.get(id(leaf.origin or leaf))

    def reason(taken: Taken) -> str:
        there, here = taken.there, taken.here
        equal = there.floating and here.floating or type_there(taken) == here.variable.dtype.name
        return "" if equal and taken.fits else "of another shape" if equal else "of another type"

    done = {id(leaf) for taken in pairs for leaf in (taken.there, taken.here)}
    only_there = {_layer_there(leaf) for leaf in sides[0] if id(leaf) not in done and id(leaf) not in ruled}
    only_here = {layer(leaf) for leaf in sides[1] if id(leaf) not in done}
    reasons = {id(taken): reason(taken) for taken in pairs}
    torn = {layer(taken.here) for taken in pairs if reasons[id(taken)]} - {None}
    other = {layer(taken.here) for taken in pairs if _layer_there(taken.there) in only_there - {None}}
    other &= only_here - {None}
    found = WholeLayers([], {})
    for taken in pairs:
        why = reasons[id(taken)]
        if not why and id(taken.there) not in ruled and (place := layer(taken.here)) in torn | other:
            why = "with these in a layer" if place in torn else "in a layer with other variables"
        if why:
            found.misfits.setdefault(why, []).append(taken.there.name)
        else:
            found.taken.append(taken)
    return WholeLayers(found.taken, dict(sorted(found.misfits.items())))


def _layer_there(leaf: NamedVariable) -> tuple[str, str] | None:
    """Returns what tells the layer of a saved value; None for a slot, and for a value whose name has no layer."""
    name = leaf.name.rpartition("/")[0]
    place = leaf.path.rpartition("/")[0] if leaf.paths else ""
    return (name, place) if name and not leaf.origin else None


def pair(
    saved: Mapping[str, NamedVariable],
    ruled: Mapping[str, RuledName],
    targets: Targets,
    match: Callable[[list[NamedVariable]], Matched],
    path: str,
) -> list[Taken]:
    """Returns the pairs of saved values and variables here, by rules and by equal names.

    Args:
      saved: the values by name.
      ruled: what rules make of the names that they touch.
      targets: the names here.
      match: pairs by equal names those that no rule has touched with the variables that no rule has filled.
      path: the file, for messages.

    Raises:
      WarmStartError: if a rule makes a name that nothing here has, if two values are for one variable, if a value that
        a rule touches has another shape than its variable, or if an equal name may mean several variables.
    """
    by_rule = [
        Taken(saved[name], _target(name, form, targets, path), form)
        for name, form in ruled.items()
        if form.name is not None
    ]
    filled: dict[int, Taken] = {}
    for taken in by_rule:
        other = filled.setdefault(id(taken.here), taken)
        if other is not taken:
            raise _twice(targets.shown(taken.here), other.there.name, taken.there.name, path)
        if not taken.fits or taken.there.floating != taken.here.floating:
            raise _misfit(taken, targets.shown(taken.here), path)
    rest = [leaf for name, leaf in saved.items() if name not in ruled]
    for leaf in rest:
        for here in targets.find(leaf.name) if filled else ():
            if id(here) in filled:
                raise _twice(targets.shown(here), filled[id(here)].there.name, leaf.name, path)
    targets.leaves[:] = [leaf for leaf in targets.leaves if id(leaf) not in filled]
    matched = match(rest)
    if matched.ambiguous:
        raise WarmStartError(
            f"values of {path} fit several layers here, whose names Keras has made and numbered, or that several "
            f"models have: {join_names(sorted({leaf.name for leaf in matched.ambiguous}), most=4)}; give the layers "
            'that only one of the two models has names of their own, such as Dense(8, name="adapter"), or say by rules '
            "which is which"
        )
    return by_rule + [Taken(there, here, RuledName(there.name)) for there, here in matched.pairs]


def _target(name: str, form: RuledName, targets: Targets, path: str) -> NamedVariable:
    found = targets.find(form.name or "")
    if len(found) == 1:
        return found[0]
    if found:
        several = join_names(sorted(map(targets.shown, found)), most=4)
        raise WarmStartError(
            f"the rules make {form.name} of {name} in {path}, which may be {several}; let them make one of these, and "
            "give layers that Keras has numbered names of their own"
        )
    names = sorted(map(targets.shown, targets.leaves))
    raise WarmStartError(
        f"the rules make {form.name} of {name} in {path}, and nothing here has that name; here are "
        f"{join_names(names, most=6)} (python -m looplib weights lists all); correct the rule, or leave the value out "
        "by one with null (None)"
    )


def _twice(here: str, one: str, other: str, path: str) -> WarmStartError:
    return WarmStartError(
        f"{one} and {other} of {path} are both for {here}; leave one of them out by a rule with null (None)"
    )


def _misfit(taken: Taken, name: str, path: str) -> WarmStartError:
    axes, there, here = list(taken.form.transpose), list(taken.there.shape), list(taken.here.shape)
    if taken.there.floating != taken.here.floating:
        kinds = ("other values than floating-point numbers", "floating-point numbers")
        return WarmStartError(
            f"{taken.there.name} of {path} has {kinds[taken.there.floating]}, and {name} here has "
            f"{kinds[taken.here.floating]}; correct the rule, or leave the value out by one with null (None)"
        )
    how = f", transposed by {axes}" if axes else ""
    cure = "correct the rule, or leave the value out by one with null (None)"
    if not axes and here == there[::-1] and here != there:
        cure = f"transpose it by {list(range(len(there)))[::-1]}"
    elif None not in here and math.prod(there) == math.prod(here) and len(there) != len(here):
        cure = "set reshape in the rule if only the axes differ"
    return WarmStartError(
        f"{taken.there.name} of {path} has the shape {there}{how}, and {name} here has {here}; {cure}"
    )

"""A registered experiment of Model Garden, made small enough to train in seconds on two cores."""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Changes that turn a registered experiment into a toy of itself.

    Attributes:
        make_data: Writes the data into the directory that it is given, the same each time, and returns what `overrides`
            needs of it: paths, and numbers such as how many examples there are.
        overrides: Takes what `make_data` returned and returns the parameters to override, a nested dict with `task`,
            `trainer` and `runtime`.
        base: Makes the configuration that `overrides` changes, where no experiment of the name is registered.
    """

    make_data: Callable[[str], dict]
    overrides: Callable[[dict], dict]
    base: Callable[[], object] | None = None


def merged(*trees):
    """Nested dicts as one; the later wins."""
    result = {}
    for tree in trees:
        for key, value in tree.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if both else value
    return result

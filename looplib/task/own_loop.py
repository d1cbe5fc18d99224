"""A trainer or evaluator that brings its own loop, such as Orbit's."""

import abc
from typing import Generic, TypeVar

Specification = TypeVar("Specification")
Loop = TypeVar("Loop")


class OwnLoop(abc.ABC, Generic[Specification, Loop]):
    """A trainer or evaluator whose steps run in its own loop, which looplib calls.

    Its type parameters are classes of `loop.base`, a room above this one.
    """

    @abc.abstractmethod
    def make_loop(self, specification: Specification) -> Loop:
        """Returns the loop that the controller calls for this object."""

"""What adapters for other libraries provide, in addition to what a user's trainer or evaluator has."""

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from looplib.task.actions import Event

Specification = TypeVar("Specification")
Loop = TypeVar("Loop")


class Adapter:
    """A further base class of a trainer or an evaluator, for what only the controller asks it for.

    Example:
        ```python
        class LanguageModel(looplib.Adapter, looplib.GradientTrainer):
            @property
            def rates(self):
                return {"tokens_per_second": self.global_batch_size * 128}
        ```
    """

    @property
    def own_actions(self) -> Sequence[Callable[[Event], object]]:
        """Actions of this object, which the controller calls before the user's.

        The trainer's come before the evaluators'.
        """
        return ()

    @property
    def rates(self) -> Mapping[str, float]:
        """Metrics in proportion to the speed of a training: dict from name to the value at one step a second.

        Each report has them, multiplied by its `steps_per_second`. Comparisons of runs leave out metrics whose names
        end in "per_second" or "share_of_peak".
        """
        return {}

    def own_steps_per_loop(self, global_batch_size: int | None, of_epoch: bool = False) -> int | None:
        """Returns the controller's `steps_per_loop` where it is not given; None leaves it to looplib.

        Args:
          global_batch_size: examples of a step.
          of_epoch: whether a training by epochs needs the steps of one, for which the data may be read once.
        """
        del global_batch_size, of_epoch
        return None


class OwnLoop(abc.ABC, Generic[Specification, Loop]):
    """A trainer or evaluator whose steps run in its own loop, which looplib calls.

    Its type parameters are classes of `loop.base`, a room above this one.
    """

    @abc.abstractmethod
    def make_loop(self, specification: Specification) -> Loop:
        """Returns the loop that the controller calls for this object."""


def rates_of(task: object) -> Mapping[str, float]:
    """Returns the `Adapter.rates` of a trainer or an evaluator; {} without any."""
    return task.rates if isinstance(task, Adapter) else {}

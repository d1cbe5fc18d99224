"""How long the data of a training lasts where the workers' shares end, and which batches are left out then."""

import dataclasses
from collections.abc import Sequence

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Lengths:
    """The lengths of the workers' shares, from the beginning of the data.

    Every step needs a batch for each replica, so the share that ends first decides.

    Attributes:
      batches: of each worker; negative where the share never ends or its length is not known, as tf.data says it.
      replicas: replicas of each worker, which get its batches in turn.
    """

    batches: Sequence[int]
    replicas: int

    @property
    def steps(self) -> int | None:
        """The steps that the data lasts for; None if that is not known, or it never ends."""
        if tf.data.UNKNOWN_CARDINALITY in self.batches:
            return None
        return min((count // self.replicas for count in self.batches if count >= 0), default=None)

    def left_out(self) -> str:
        """Describes what a training to the end leaves out, as a clause; "" if that is nothing, or not known."""
        if self.steps is None:
            return ""
        used = self.steps * self.replicas
        if len(self.batches) == 1:
            (count,) = self.batches
            rest = count - used
            return f"{count} batches for {self.replicas} replicas, of which the last {rest} are left out" * bool(rest)
        over = {index: count - used for index, count in enumerate(self.batches) if count > used or count < 0}
        rest = " and ".join(f"{'all further' if n < 0 else n} of worker {index}" for index, n in over.items())
        shares = ", ".join("no end" if count < 0 else str(count) for count in self.batches)
        return f"shares of {shares} batches, in the order of the workers, and {rest} are left out" * bool(over)

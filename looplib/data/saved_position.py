"""The position of a pipeline's iterator as bytes, and the reason if it cannot be saved."""

from collections.abc import Callable

import tensorflow as tf

from looplib.data import iterator_state


class SavedPosition:
    """Saves and restores the position of a pipeline's iterators, if TensorFlow does that exactly.

    Args:
      renew: makes the pipeline again; None saves no position.
      count: elements of a step, which a trial of unknown stages reads.
      note: logs what a user has to know, a clause about the data set.

    Attributes:
      obstacle: why no position can be saved, as a clause; "" if nothing is in the way.
    """

    def __init__(self, renew: Callable[[], tf.data.Dataset] | None, count: int, note: Callable[[str], None]) -> None:
        self._renew, self._count, self._note = renew, count, note
        self.obstacle = ""
        self._digest = b""  # of the pipeline, in front of its states
        self._tried_out = self._warned_between_epochs = False  # stages that are not known; that a state is not complete

    def begin(self, iterator: tf.data.Iterator, *kind: object) -> bool:
        """Takes a new iterator of a kind; returns whether its position can be saved, as far as is known."""
        if self._possible:
            try:
                self._digest = iterator_state.digest(iterator, *kind)
            except iterator_state.UnsavableError as error:
                self._give_up(str(error))
        return self._possible

    @property
    def _possible(self) -> bool:
        return self._renew is not None and not self.obstacle

    def save(self, iterator: tf.data.Iterator, dataset: tf.data.Dataset) -> bytes | None:
        """Returns the position of an iterator of a data set; None if it has none that can be saved."""
        if not self._possible:
            return None
        try:
            packed, stages = iterator_state.save(iterator, dataset)
            untried = sorted(stages - iterator_state.TRIED)
            if untried and not self._tried_out:
                self._try_out(self._renew, dataset, untried)
                self._tried_out = True
            return self._digest + packed
        except iterator_state.BetweenEpochsError as error:
            if not self._warned_between_epochs:
                self._note(
                    "has a shuffle that has ended or not begun in this epoch, so that its state is not complete, and a "
                    f"run that resumes here will skip the data already used: {error}"
                )
            self._warned_between_epochs = True
            return None  # the next position can be saved again
        except iterator_state.UnsavableError as error:
            self._give_up(str(error))
            return None

    def restore(self, iterator: tf.data.Iterator, position: bytes) -> str:
        """Brings a new iterator to a position; returns why it is none of this pipeline, or ""."""
        size = len(self._digest)
        if position[:size] != self._digest:
            return "its stages, buffers, elements, batch size or length have changed"
        try:
            iterator_state.restore(iterator, position[size:])
        except (tf.errors.OpError, ValueError) as error:
            return str(error).partition("\n")[0][:200] or type(error).__name__
        return ""

    def _try_out(self, renew: Callable[[], tf.data.Dataset], dataset: tf.data.Dataset, stages: list[str]) -> None:
        """Saves and restores iterators of pipelines made for this; raises `UnsavableError` if that is not exact."""
        first, second = renew(), renew()
        named = ", ".join(stages)
        if first is dataset:  # whose shuffles would continue with the order of the next epoch
            raise iterator_state.UnsavableError(f"it is not known whether TensorFlow restores {named} exactly")
        if not iterator_state.restores_exactly(first, second, self._count):
            raise iterator_state.UnsavableError(f"in a trial, TensorFlow did not restore {named} exactly")

    def _give_up(self, why: str) -> None:
        """Logs this once; each further try may take seconds."""
        self.obstacle = why
        self._note(f"has no position that can be saved; a resumed run will skip the data already used: {why}")

"""Comparison: the copies of variables on all replicas, by checksums that each replica computes on its device."""

from collections.abc import Callable

import numpy as np
import tensorflow as tf
from absl import logging

from looplib.extras.integrity.checksums import checksums
from looplib.extras.integrity.compared import ComparedVariables
from looplib.messages import join_names

_Function = Callable[[], tf.Tensor]


class Comparison:
    """Compares the copies of the variables of a training.

    Making it compares them once. Variables that no step updates, and whose copies differ from the beginning (such as
    statistics that were frozen later, or random generators), are left out from then on, with a line in the log.

    Args:
      found: the variables.
      gather: waits for the other workers, and returns an array of the arrays of all, the chief's first.
    """

    def __init__(self, found: ComparedVariables, gather: Callable[[np.ndarray], np.ndarray]) -> None:
        self._strategy, self._gather = found.strategy, gather
        named = [*found.updated_alike, *found.not_updated]
        self._names = [name for name, _ in named]
        self._variables = [variable for _, variable in named]
        self._checksums = self._on_each_replica(checksums)
        self._finite = self._on_each_replica(_has_finite)
        self._left_out: set[int] = set()
        self._left_out.update(n for n in self._differing(self._sums()) if n >= len(found.updated_alike))
        others = [*found.others, *(self._names[n] for n in sorted(self._left_out))]
        logging.info(
            "the replicas are compared in %d variables%s",
            len(named) - len(self._left_out),
            f"; not in those that a step may update from its own data: {join_names(others)}" if others else "",
        )

    def differences(self) -> str:
        """Returns what differs, as clauses that name variables, replicas and workers; "" if nothing does.

        Workers wait for each other, and all return the same.
        """
        sums = self._sums()
        groups: dict[tuple[int, ...], list[str]] = {}
        for number in self._differing(sums):
            groups.setdefault(_suspects(sums[:, number]), []).append(self._names[number])
        return "; ".join(self._clause(names, suspects, len(sums)) for suspects, names in groups.items())

    def _sums(self) -> np.ndarray:
        """Returns the checksums of each variable on each replica, int64 `[replicas, variables, 2]`."""
        return self._values(self._checksums)

    def _differing(self, sums: np.ndarray) -> list[int]:
        """Returns the numbers of the variables whose copies differ.

        Where no copy has a finite value, after a loss of NaN, only the bits of NaN may differ.
        """
        found = np.flatnonzero((sums != sums[:1]).any(axis=(0, 2)))
        if not len(found):
            return []
        finite = self._values(self._finite).any(axis=0)
        return [int(number) for number in found if finite[number] and number not in self._left_out]

    def _on_each_replica(self, function: Callable[[tf.Tensor], tf.Tensor]) -> _Function:
        """Makes a `tf.function` that stacks the results of a function of each variable, on each replica."""

        def on_replica() -> tf.Tensor:
            return tf.stack([function(variable.read_value()) for variable in self._variables])

        return tf.function(lambda: self._strategy.run(on_replica), autograph=False)

    def _values(self, function: _Function) -> np.ndarray:
        """Returns the results of all replicas of all workers, `[replicas, variables, ...]`."""
        local = np.stack([part.numpy() for part in self._strategy.experimental_local_results(function())])
        return self._gather(local).reshape(-1, *local.shape[1:])

    def _clause(self, names: list[str], suspects: tuple[int, ...], replicas: int) -> str:
        where, which = self._named(suspects), join_names(names)
        if len(suspects) == replicas:
            return f"{which} differs between {where}, and which of them is right is not known"
        return f"{which} on {where} differs from the other {replicas - len(suspects)}"

    def _named(self, replicas: tuple[int, ...]) -> str:
        local = len(self._strategy.experimental_local_results(self._variables[0]))  # replicas of a worker
        return " and ".join(f"replica {number} (worker {number // local})" for number in replicas)


def _suspects(sums: np.ndarray) -> tuple[int, ...]:
    """Returns the replicas that are in the minority, by checksums `[replicas, 2]`; all if there is no majority."""
    _, kinds = np.unique(sums, axis=0, return_inverse=True)
    kinds = kinds.ravel()
    counts = np.bincount(kinds)
    if np.count_nonzero(counts == counts.max()) > 1:
        return tuple(range(len(sums)))
    return tuple(np.flatnonzero(kinds != counts.argmax()).tolist())


def _has_finite(value: tf.Tensor) -> tf.Tensor:
    """Returns whether a tensor has only finite values, a boolean scalar; True for what is no floating-point number."""
    if not (value.dtype.is_floating or value.dtype.is_complex):
        return tf.constant(True)
    return tf.reduce_all(tf.math.is_finite(value if value.dtype.is_floating else tf.math.real(value)))

"""The comparison of replicas: the copies of variables, by checksums that each replica computes on its device."""

from collections.abc import Callable

import numpy as np
import tensorflow as tf
from absl import logging

from looplib.actions.checksums import checksums, checksums_together
from looplib.actions.compared import ComparedVariables, Named
from looplib.base.messages import join_names

_Values = list[tf.Tensor]


class ReplicaComparison:
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
        self._take(named)
        differing, alike = self._differing()[0], len(found.updated_alike)
        left_out = {number for number in differing if number >= alike}
        if left_out:
            self._take([one for number, one in enumerate(named) if number not in left_out])
        others = [*found.others, *(named[number][0] for number in sorted(left_out))]
        logging.info(
            "the replicas are compared in %d variables%s",
            len(self._names),
            f"; not in those that a step may update from its own data: {join_names(others)}" if others else "",
        )

    def _take(self, named: Named) -> None:
        self._names = [name for name, _ in named]
        self._variables = [variable for _, variable in named]
        self._together = self._on_each_replica(checksums_together)
        # This is traced only where copies differ.
        self._each = self._on_each_replica(lambda values: tf.stack([checksums(_one_nan(value)) for value in values]))

    def differences(self) -> str:
        """Returns what differs, as clauses that name variables, replicas and workers; "" if nothing does.

        Workers wait for each other, and all return the same.
        """
        found, sums = self._differing()
        groups: dict[tuple[int, ...], list[str]] = {}
        for number in found:
            groups.setdefault(_suspects(sums[:, number]), []).append(self._names[number])
        return "; ".join(self._clause(names, suspects, len(sums)) for suspects, names in groups.items())

    def _differing(self) -> tuple[list[int], np.ndarray]:
        """Returns the numbers of the variables whose copies differ, and checksums, int64 `[replicas, variables, 2]`.

        NaN equals NaN, as after a loss of NaN, where its bits may differ.
        """
        sums = self._values(self._together)
        if (sums == sums[:1]).all():
            return [], sums
        sums = self._values(self._each)
        return np.flatnonzero((sums != sums[:1]).any(axis=(0, 2))).tolist(), sums

    def _on_each_replica(self, function: Callable[[_Values], tf.Tensor]) -> Callable[[], tf.Tensor]:
        """Makes a `tf.function` that calls a function of the variables' values on each replica."""
        variables, strategy = self._variables, self._strategy

        def on_replica() -> tf.Tensor:
            return function([variable.read_value() for variable in variables])

        return tf.function(lambda: strategy.run(on_replica), autograph=False)

    def _values(self, function: Callable[[], tf.Tensor]) -> np.ndarray:
        """Returns the results on all replicas of all workers, `[replicas, ...]`."""
        local = np.stack([part.numpy() for part in self._strategy.experimental_local_results(function())])
        return self._gather(local).reshape(-1, *local.shape[1:])

    def _clause(self, names: list[str], suspects: tuple[int, ...], replicas: int) -> str:
        where, what = self._named(suspects), f"{join_names(names)} {'differs' if len(names) == 1 else 'differ'}"
        if len(suspects) == replicas:
            return f"{what} between {where}, and which of them is right is not known"
        return f"{what} on {where} from the other {replicas - len(suspects)}"

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


def _one_nan(value: tf.Tensor) -> tf.Tensor:
    """Returns a tensor whose NaNs have the same bits."""
    if value.dtype.is_complex:
        return tf.complex(_one_nan(tf.math.real(value)), _one_nan(tf.math.imag(value)))
    return tf.where(tf.math.is_nan(value), tf.cast(np.nan, value.dtype), value) if value.dtype.is_floating else value

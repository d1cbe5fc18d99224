"""ReplicaAgreement: an action that compares the copies of a variable on all replicas."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from looplib.actions.checksums import can_sum, checksums, checksums_together
from looplib.base.messages import join_names, whole_number
from looplib.compat import tensorflow as _tf
from looplib.errors import ActionError, CorruptionError
from looplib.guards.guards import Diverged
from looplib.loop.contracts import Loop, StepAddition
from looplib.run.report import ReplicaChecks
from looplib.task.actions import Action, Event
from looplib.task.averages import WeightAverages
from looplib.task.gradient_trainer import DynamicLossScale
from looplib.task.state import held_by, no_weights, state_of, variables_of

# Ops that sum in an order of their own each time on a GPU, unless ops are deterministic: of sparse gradients, say.
_UNORDERED = frozenset({
    "ResourceScatterAdd", "ResourceScatterNdAdd", "ResourceScatterNdSub", "ResourceScatterSub", "ScatterNd",
    "TensorScatterAdd", "TensorScatterSub", "UnsortedSegmentSum",
})  # fmt: skip
Named = list[tuple[str, tf.Variable]]


@dataclasses.dataclass(frozen=True)
class ComparedVariables:
    """The variables of a trainer's state that have a copy on each replica.

    Attributes:
      updated_alike: those that all replicas update by the same values: weights, also frozen ones, everything that an
        optimizer holds, averages of these, and the scale of the loss.
      not_updated: those that no step updates.
      others: the names of those that are not compared, because a replica may update them from its own data.
    """

    updated_alike: Named
    not_updated: Named
    others: list[str]

    @property
    def strategy(self) -> tf.distribute.Strategy | None:
        """The strategy that made the variables; None without any."""
        found = [*self.updated_alike, *self.not_updated]
        return getattr(found[0][1], "distribute_strategy", None) if found else None


def compared_variables(loop: Loop) -> ComparedVariables:
    """Finds the variables of a training to compare.

    Variables with a sum or a value for each replica, such as those of metrics (`ON_READ`), are others. So is what the
    traced step updates, and is neither trainable nor an optimizer's: moving statistics, states of recurrent layers,
    seeds. What the step updates is not known in the eager loop, in a trainer's own loop, and with phases.
    """
    task, state = loop.task, state_of(loop.task)
    copied = [(name, variable) for name, variable in variables_of(state) if _is_copied(variable)]
    free = {id(variable) for variable in no_weights(task, state)}
    alike = {id(variable) for _, variable in copied if id(variable) not in free}
    for part in held_by(state):
        if isinstance(part, WeightAverages):
            alike |= {id(average) for variable, average in part.pairs if id(variable) in alike}
        elif isinstance(part, DynamicLossScale):
            alike |= {id(variable) for variable in part.variables}
    known = loop.traced is not None and task.training_phases is None
    updated = _tf.updated_by(loop.traced.function) if known else set()
    not_updated = {id(variable) for _, variable in copied if known and updated.isdisjoint(_identities(variable))}
    return ComparedVariables(
        updated_alike=[(name, variable) for name, variable in copied if id(variable) in alike],
        not_updated=[(name, one) for name, one in copied if id(one) in not_updated - alike],
        others=[name for name, variable in copied if id(variable) not in alike | not_updated],
    )


def why_not_comparable(loop: Loop, strategy: tf.distribute.Strategy) -> str:
    """Returns why replicas may come to differ without a fault, as a clause; "" if no reason is known."""
    devices = map(tf.DeviceSpec.from_string, _tf.worker_devices(strategy))
    if all(device.device_type != "GPU" for device in devices) or _is_deterministic():
        return ""
    if loop.traced is None:
        return "what the step does on the GPUs is not known"
    ops = sorted(_UNORDERED & loop.traced.op_counts.keys())
    return f"on GPUs, the step sums in no fixed order ({join_names(ops)})" if ops else ""


def _is_deterministic() -> bool:
    try:
        tf.timestamp()
    except tf.errors.FailedPreconditionError:  # which TensorFlow raises only then
        return True
    return False


def _identities(variable: tf.Variable) -> list[int]:
    parts = variable.distribute_strategy.experimental_local_results(variable)
    return [_tf.identity_of(part) for part in parts]


def _is_copied(variable: tf.Variable) -> bool:
    return (
        isinstance(variable, tf.distribute.DistributedValues)
        and variable.synchronization != tf.VariableSynchronization.ON_READ
        and can_sum(variable.dtype)
    )


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


DEFAULT_EVERY = 1000
_CURE = (
    "test the device and the memory of that replica, or leave it out, and run the same command again, which continues "
    "from the newest checkpoint with the same data. If the step updates these variables from the data of each replica "
    "on purpose, leave out the comparison (--check_replicas=0)"
)


class Corrupted(Diverged):
    """A device has changed numbers. The data is not at fault, so that a rollback repeats it.

    Args:
      controller: the `Controller`, whose guards decide between a halt and a rollback.
      what: a sentence without its full stop, that names the step.
      good_before: the last step whose state is known to be good.
      step: the step at which it was found.
    """

    repeats, kind = True, CorruptionError

    def __init__(self, controller: Any, what: str, good_before: int, step: int) -> None:
        super().__init__(what, "rollback" if controller.guards.may_roll_back else "halt", good_before, step)
        self.cure = f"{_CURE}; --non_finite=rollback goes back automatically, and repeats the data"


class ReplicaAgreement(Action, StepAddition):
    """Compares the copies of the variables of all replicas and workers, which a step updates alike.

    A copy that differs has been changed by a device or its memory. It is compared at reports, before each save, and at
    the end, by integer checksums that each replica computes. Any single changed bit is found. If a copy differs, the
    checkpoints since the last comparison are set aside, and the run ends with a `CorruptionError`, which names the
    variable, the replica and the worker; or, if the `Guards` allow rollbacks, goes back and repeats the same data.

    Nothing is compared on one replica, and with parameter servers. docs/integrity.md lists what is not compared.

    Args:
      every: steps between two comparisons, which come with the next report. At least `steps_per_loop`, which is the
        default if it is above 1,000; else the default is 1,000.

    Attributes:
      passed: how many comparisons have found no difference, and the step of the last one.

    Raises:
      UsageError: for bad input; when a training starts, for fewer steps than `steps_per_loop`.

    Example:
        ```python
        looplib.Controller(..., actions=[looplib.ReplicaAgreement(every=500)])
        ```
    """

    def __init__(self, every: int | None = None) -> None:
        self._asked = None if every is None else whole_number("every of ReplicaAgreement", every)
        self.passed: dict[str, int | None] = {"checks": 0, "last_step": None}
        self._controller: Any = None
        self._comparison: ReplicaComparison | None = None
        self._every = DEFAULT_EVERY
        self._reported = self._agreed = 0  # the steps of the last report, and of the last comparison without difference
        self._compared: tuple[int, int] | None = None  # the step of the last comparison, and the rollbacks until then

    def on_start(self, controller: Any) -> None:
        """Finds the variables to compare, and compares them once."""
        per_loop = controller.steps_per_loop
        if self._asked is not None and self._asked < per_loop:
            raise ActionError(
                f"the replicas are to be compared every {self._asked} steps, and a report comes every {per_loop}; "
                "expected at least as many steps, or a lower steps_per_loop (--check_replicas, --steps_per_loop)"
            )
        self._every = self._asked or max(DEFAULT_EVERY, per_loop)
        self._controller, self._comparison, self._compared = controller, None, None
        self._reported = self._agreed = controller.global_step
        if controller.report.facts.num_replicas == 1:
            return
        with controller.clock.phase("compile"):
            loop = controller.loops["train"]
            found = compared_variables(loop)
            if found.strategy is None:
                return
            if why := why_not_comparable(loop, found.strategy):
                logging.info("the replicas are not compared: %s; with --deterministic, they are", why)
                return
            self._comparison = ReplicaComparison(found, controller.gather)
            self.passed = {"checks": 0, "last_step": None}  # run.json is written with its newest values
            controller.report.note(ReplicaChecks(self._every, self.passed))
            self._compare_outside(controller)

    def __call__(self, event: Event) -> None:
        """Compares, if it is time."""
        if event.split != "train":
            return
        before, self._reported = self._reported, event.step
        went_back = event.step <= before
        if event.ending or went_back or event.step // self._every > before // self._every:
            self._compare(event.step)

    def check_state(self) -> None:
        """See `StepAddition`; compares what is saved."""
        if self._comparison is not None:
            self._compare(self._controller.global_step)

    def on_end(self, controller: Any) -> None:
        """Compares the last state, if no save did."""
        self._compare_outside(controller)

    def _compare_outside(self, controller: Any) -> None:
        """Compares before or after the steps of a training, where the controller cannot go back."""
        try:
            self._compare(controller.global_step)
        except Corrupted as fault:
            raise fault.kind(f"{fault.what}; {fault.cure}") from None

    def _compare(self, step: int) -> None:
        """Raises `Corrupted` if copies differ; workers wait for each other."""
        if self._comparison is None or self._compared == (step, self._controller.rollbacks):
            return
        if found := self._comparison.differences():
            since = f", and agreed at step {self._agreed}" if self._agreed < step else ""
            what = f"the replicas differ at step {step}{since}: {found}"
            raise Corrupted(self._controller, what, min(self._agreed, step - 1), step)
        self._compared, self._agreed = (step, self._controller.rollbacks), step
        self.passed |= {"checks": self.passed["checks"] + 1, "last_step": step}

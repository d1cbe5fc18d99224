"""Whether two trainings of one interval have equal bits: that takes one kind of machine, one engine, one version."""

import dataclasses
from collections.abc import Sequence

from looplib.extras.audit.machine import machine_of
from looplib.extras.page import values
from looplib.report.run_json import Report, StartRecord
from looplib.task.record import RunRecord

_COMPUTING = ("tensorflow", "keras", "tf_keras", "numpy")  # packages
_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Kind:
    """What is not equal between two trainings of one interval.

    Attributes:
      rounding: clauses about what rounds in another way.
      random: clauses about what may draw other random numbers, such as XLA for dropout.
    """

    rounding: tuple[str, ...]
    random: tuple[str, ...]

    def __str__(self) -> str:
        found = [*self.random, *self.rounding]
        return "; ".join(found[:_SHOWN]) + f", and {len(found) - _SHOWN} more" * (len(found) > _SHOWN)

    def __bool__(self) -> bool:
        return bool(self.rounding or self.random)


def compare_kinds(
    starts: Sequence[StartRecord], now: Report, first: RunRecord | None, last: RunRecord, again: RunRecord
) -> Kind:
    """Returns why an interval need not have the bits that it had; an empty `Kind` if it has to.

    Args:
      starts: the starts of the run that trained the interval.
      now: the report of the training that was to repeat it.
      first: the record of the checkpoint that the interval begins with; None for the start of the run.
      last: the record of its last checkpoint.
      again: the record of the checkpoint that was made again.
    """
    rounding: list[str] = []
    random: list[str] = []
    here, flags = (now.get("starts") or [StartRecord()])[-1], now.get("flags", {})
    for start in starts:
        rounding += _differences(start, here)
        then, replicas = start.get("num_replicas"), here.get("num_replicas")
        random += [f"it had {values.shown(then)} replicas, and has {values.shown(replicas)}"] * (then != replicas)
    if flags.get("loop") == "auto" and here.get("num_replicas") == 1:
        engines = {_engine(record) for record in (first or RunRecord(), last, again)}
        if len(engines) > 1 or engines == {None}:
            random.append("--loop=auto had not chosen one engine for all of these steps")
    machine = machine_of(here)
    if machine and machine.devices and not flags.get("deterministic"):
        rounding.append(f"ops on a {machine.devices[0]} need not be deterministic without --deterministic")
    return Kind(tuple(dict.fromkeys(rounding)), tuple(dict.fromkeys(random)))


def _differences(start: StartRecord, now: StartRecord) -> list[str]:
    then, here = machine_of(start), machine_of(now)
    found = then.differences(here) if then and here else ["run.json does not say what kind of machine it was"]
    versions = start.get("versions", {}), now.get("versions", {})
    for name in _COMPUTING:
        before, after = (values.text(version.get(name, ""), 50) or "not used" for version in versions)
        found += [f"{name} was {before}, and is {after}"] * (before != after)
    return found


def _engine(record: RunRecord) -> tuple[str, int] | None:
    """Returns the engine that `loop="auto"` had chosen for the training; None before it had."""
    chosen = record.engines.get("train")
    return (chosen.loop, chosen.chunk) if chosen else None

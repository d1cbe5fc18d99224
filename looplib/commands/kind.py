"""Whether two trainings of one interval have equal bits: that takes one kind of machine, one engine, one version."""

from collections.abc import Sequence

from looplib.run import values
from looplib.run.machine import machine_of
from looplib.run.run_json import Report, StartRecord
from looplib.task.record import RunRecord

_COMPUTING = ("tensorflow", "keras", "tf_keras", "numpy")  # packages
_SHOWN = 3


def why_other_bits(
    starts: Sequence[StartRecord], now: Report, first: RunRecord | None, last: RunRecord, again: RunRecord
) -> str:
    """Returns why an interval need not have the bits that it had, as clauses; "" if it has to.

    Args:
      starts: the starts of the run that trained the interval.
      now: the report of the training that was to repeat it.
      first: the record of the checkpoint that the interval begins with; None for the start of the run.
      last: the record of its last checkpoint.
      again: the record of the checkpoint that was made again.
    """
    found: list[str] = []
    here, flags = (now.get("starts") or [StartRecord()])[-1], now.get("flags", {})
    for start in starts:
        found += _differences(start, here)
        then, replicas = start.get("num_replicas"), here.get("num_replicas")
        found += [f"it had {values.shown(then)} replicas, and has {values.shown(replicas)}"] * (then != replicas)
    if flags.get("loop") == "auto" and here.get("num_replicas") == 1:
        engines = {_engine(record) for record in (first or RunRecord(), last, again)}
        if len(engines) > 1 or engines == {None}:
            found.append("--loop=auto had not chosen one engine for all of these steps")
    machine = machine_of(here)
    if machine and machine.devices and not flags.get("deterministic"):
        found.append(f"ops on a {machine.devices[0]} need not be deterministic without --deterministic")
    found = list(dict.fromkeys(found))
    return "; ".join(found[:_SHOWN]) + f", and {len(found) - _SHOWN} more" * (len(found) > _SHOWN)


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

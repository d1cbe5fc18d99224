"""`python -m looplib diff A B`: the first step where two runs differ, and what differs."""

from typing import Any

from looplib.base.decoding import text
from looplib.base.messages import join_names, shown
from looplib.base.orders import ReplayOrder
from looplib.commands.check import say
from looplib.commands.compare import compare_tensors, is_speed
from looplib.commands.replay import Replayable
from looplib.errors import EXIT_DIFFERENT, EXIT_DONE, EXIT_UNKNOWN
from looplib.loop import additions
from looplib.processes.child import TemporaryFolder
from looplib.replay.player import CHECKSUM, Trace
from looplib.run.commits import Commit
from looplib.run.directory import RunDir
from looplib.run.report import Program, RunReport, changed_settings

Curves = dict[tuple[int, str], dict[str, float | None]]
_SHOWN = 6
_LONGEST = 500  # characters of a value of a report, such as the arguments of the program
_FEW_STEPS = 10  # that take no longer than to start the commands once more


def diff(first: str, second: str) -> int:
    """Finds the first step at which two runs part, and prints it with what differs there.

    Args:
      first: a run directory, which is only read.
      second: the other one.

    Returns:
      The exit code: `EXIT_DONE` if they are equal as far as both go, `EXIT_DIFFERENT` if not, `EXIT_UNKNOWN` if they
      have nothing in common to compare.

    Raises:
      UsageError: for a directory that is no run, or a run that cannot be replayed.
    """
    runs = Replayable(first), Replayable(second)
    differences = _of_the_reports(*(run.report for run in runs))
    for line in differences or ["settings, versions and code are equal"]:
        say(line)
    curves, saved = (
        [RunDir(run.directory).records().by_key() for run in runs],
        [{done.step: done for done in run.intact()} for run in runs],
    )
    records, record = _first_different_record(*curves)
    checkpoints, equal, different = _bisected(*saved)
    ends = [step for step in (record, different) if step is not None]
    if not ends:
        reached = max([*records, *checkpoints], default=None)
        if reached is None:
            say("not known: the runs have no report and no checkpoint of the same step")
            return EXIT_UNKNOWN
        say(f"EQUAL up to step {reached}: {len(records)} reports and {len(checkpoints)} checkpoints of the same steps")
        return EXIT_DONE
    say(f"reports: {_of(record, records)}; checkpoints: {_of(different, checkpoints)}")
    end = min(ends)
    start = max((step for step in equal if step < end), default=0)
    lines: list[str] = []
    part_at_once = differences and end > start + _FEW_STEPS  # perhaps
    for stop in [start + 1, end] if part_at_once else [end]:
        begin = f"their equal checkpoints of step {start}" if start else "the start"
        say(f"replaying both from {begin} to step {stop}")
        if lines := _parting(*(_traces(run, start, stop) for run in runs)):
            break
    for line in lines or [
        f"DIFFERENT at step {end}, but their replays are equal up to there: the code may have changed since, or the "
        "steps use something that neither a checkpoint nor the command holds"
    ]:
        say(line)
    return EXIT_DIFFERENT


# Reports.


def _of_the_reports(one: RunReport, other: RunReport) -> list[str]:
    """Returns lines about settings, versions and code that differ."""
    settings = changed_settings(one, other)
    lines = [f"setting {name}: {shown(a)} and {shown(b)}" for name, (a, b) in sorted(settings.items())]
    for name in sorted(one.versions.keys() | other.versions.keys()):
        a, b = (text(report.versions.get(name, "not used"), _LONGEST) for report in (one, other))
        lines += [f"version of {name}: {a} and {b}"] * (a != b)
    programs = [vars(report.program or Program()) for report in (one, other)]
    for name, title in (("arguments", "program"), ("commit", "git commit"), ("changes", "changes since the commit")):
        a, b = (text(str(program[name] or "none"), _LONGEST) for program in programs)
        lines += [f"{title}: {a} and {b}"] * (a != b)
    return lines


# Curves.


def _first_different_record(one: Curves, other: Curves) -> tuple[list[int], int | None]:
    """Returns the steps that both have a record of, and the first one with another number."""
    common = sorted(one.keys() & other.keys())
    for place in common:
        names = {name for name in one[place].keys() & other[place].keys() if not is_speed(name)}
        if any(one[place][name] != other[place][name] for name in names):
            return [step for step, _ in common], place[0]
    return [step for step, _ in common], None


def _bisected(ours: dict[int, Commit], theirs: dict[int, Commit]) -> tuple[list[int], list[int], int | None]:
    """Compares checkpoints of equal steps; all after the first different one differ too.

    Returns:
      (the steps that both have one of, the steps that are equal, the first that differs or None).
    """
    common = sorted(ours.keys() & theirs.keys())
    equal, low, high = [], 0, len(common)
    while low < high:
        middle = (low + high) // 2
        paths = (commits[common[middle]].path for commits in (ours, theirs))
        if not compare_tensors(*paths).differences:
            equal.append(common[middle])
            low = middle + 1
        else:
            high = middle
    return common, equal, common[low] if low < len(common) else None


def _of(step: int | None, steps: list[int]) -> str:
    if not steps:
        return "none of the same step"
    return f"equal up to step {max(steps)}" if step is None else f"different at step {step}"


# Replays.


def _traces(run: Replayable, start: int, end: int) -> list[Trace]:
    say(f"  {run.directory}")
    checkpoint = next((done for done in run.checkpoints() if done.step == start), None)
    with TemporaryFolder() as folder:
        return run.start_again(checkpoint, ReplayOrder(run.directory, end, trace=True), folder).traces


def _parting(ones: list[Trace], others: list[Trace]) -> list[str]:
    """Returns lines about the first step where two traces differ; [] if none does."""
    for one, other in zip(ones, others):
        found = {
            "examples": ["other ones, by their checksums"] * (_checksum(one) != _checksum(other)),
            "metrics": _differences(_without_checksum(one), _without_checksum(other)),
            "variables": _differences(one.variables, other.variables),
        }
        kinds = [kind for kind, lines in found.items() if lines]
        if not kinds:
            continue
        where = f"at step {one.step}" if one.metrics or other.metrics else f"before step {one.step + 1}"
        equal = "; ".join(f"the {kind} are still equal" for kind in [*found][: [*found].index(kinds[0])] if one.metrics)
        lines = [f"DIFFERENT: the runs part {where}, first in the {kinds[0]}" + (f" ({equal})" if equal else "")]
        return lines + [f"  {kind}: {join_names(found[kind], _SHOWN)}" for kind in kinds]
    return []


def _checksum(trace: Trace) -> int | None:
    return trace.metrics.get(additions.METRIC)


def _without_checksum(trace: Trace) -> dict[str, Any]:
    return {name: value for name, value in trace.metrics.items() if name != additions.METRIC}


def _differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Returns a text for each value that differs, with NaN equal to itself; of checksums only the name."""
    names = [*one, *(name for name in other if name not in one)]
    values = [(name, *(str(values.get(name, "nothing")) for values in (one, other))) for name in names]
    return [name if CHECKSUM in a + b else f"{name} ({a} and {b})" for name, a, b in values if a != b]

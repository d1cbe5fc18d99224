"""The names of the metrics that looplib adds to reports, which those of a user may not have."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from looplib.errors import UsageError

CHECKSUM = "examples_checksum"
BATCH_SIZES = ("batch_sizes/larger", "batch_sizes/more", "batch_sizes/count")
_OWN = frozenset({"epoch", "examples", "skipped_steps", "steps_per_second", CHECKSUM, *BATCH_SIZES})


def check(who: str, names: Collection[str], rates: Collection[str] = ()) -> None:
    """Raises `UsageError` if a metric that `who` returned has the name of looplib's, or of `Adapter.rates`."""
    for found, others, of in (
        (names, _OWN, "looplib adds to reports"),
        (rates, _OWN, "looplib adds to reports"),
        (names, rates, "its rates have too"),
    ):
        if both := sorted(set(found) & set(others)):
            raise UsageError(f"{who} returned a metric named {both[0]!r}, which {of}; give yours another name")


def check_finished(who: str, before: Mapping[str, Any], after: Mapping[str, Any], rates: Collection[str] = ()) -> None:
    """Raises `UsageError` if a `loop_end` has made a metric with such a name, or changed looplib's."""
    kept = {name for name in _OWN & before.keys() & after.keys() if after[name] == before[name]}
    check(f"{who}.loop_end", after.keys() - kept, rates)


def refuse_in(step_fn: Callable[[Any], Any], who: str, rates: Callable[[], Collection[str]]) -> Callable[[Any], Any]:
    """Wraps a user's step, so that its metrics are checked when it is traced; `rates` returns names."""
    right = set()  # groups of names; an eager loop calls the step many times

    def checked(inputs: Any) -> Any:
        outputs = step_fn(inputs)
        names = frozenset(name for name in outputs if isinstance(name, str)) if isinstance(outputs, dict) else ()
        if names not in right:
            check(who, names, rates())
            right.add(names)
        return outputs

    return checked

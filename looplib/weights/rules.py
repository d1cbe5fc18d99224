"""Where weights come from, and the rules that give their names and shapes the form of the model here."""

import contextlib
import dataclasses
import os
import re
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from looplib.base import files
from looplib.base.messages import join_names, shown, with_cure
from looplib.buckets.local import local_path
from looplib.errors import SettingError, WarmStartError

_ENDINGS = (".yaml", ".yml")
_MOST_BYTES = 1 << 20  # of a file of rules
_LEAST_SECONDS, _SECONDS_OF_A_MATCH = 5.0, 1e-4  # for all matches
_FIELDS = "to, transpose and reshape"
_FORM = (
    "expected the new text of the name, null (None) to leave the value out, or a mapping (looplib.WeightRule) with "
    f"{_FIELDS}, such as {{to: kernel, transpose: [1, 0]}}"
)


@dataclasses.dataclass(frozen=True)
class WeightRule:
    r"""A new name for values whose axes are in another order, or whose shape has other axes.

    Attributes:
      to: what replaces the part of the name that the pattern matches, as in `re.sub`: "\\1" is the first group.
      transpose: the axes of the value there in the order here, as for `numpy.transpose`. A matrix of PyTorch's `Linear`
        is `(1, 0)`, a kernel of its `Conv2d` `(2, 3, 1, 0)` and of its `Conv1d` `(2, 1, 0)`. Default: as they are.
      reshape: whether the value then takes the shape of the variable, if it has as many numbers: the matrices of
        PyTorch's attention have no axis for heads, and those of Keras have one. Default False.
    """

    to: str
    transpose: tuple[int, ...] = ()
    reshape: bool = False

    def __post_init__(self) -> None:
        axes = self.transpose
        whole = isinstance(axes, (list, tuple)) and all(type(axis) is int for axis in axes)
        if not isinstance(self.to, str) or type(self.reshape) is not bool or not whole:
            raise SettingError(f"a rule for weights is {shown(self)}; {_FORM}")
        if sorted(axes) != list(range(len(axes))):
            raise SettingError(
                f"transpose is {list(axes)} in a rule for weights; expected each axis once, such as [1, 0]"
            )
        object.__setattr__(self, "transpose", tuple(axes))


@dataclasses.dataclass(frozen=True)
class WarmStart(os.PathLike[str]):
    """The weights that a new run starts from, and rules for their names: `Start(warm_start=WarmStart(path, rules))`.

    Each rule is a pattern of Python's `re` that is searched in each saved name, and what the matched parts become.
    Rules apply in their order, each to what the ones before it have made of a name.

    Attributes:
      path: what `looplib.warm_start` takes.
      rules: dict from a pattern to a text, to a `WeightRule`, or to None, which leaves the value out.

    Raises:
      UsageError: for a rule of another form.
    """

    path: str
    rules: Mapping[str, str | WeightRule | None] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, os.PathLike)) or not isinstance(self.rules, Mapping):
            raise SettingError(
                f"WarmStart is of {shown(self.path)} and {shown(self.rules)}; expected a path and a dict of rules"
            )
        object.__setattr__(self, "path", os.fspath(self.path))
        for pattern, rule in self.rules.items():
            if not isinstance(pattern, str) or not (rule is None or isinstance(rule, (str, WeightRule))):
                raise SettingError(f"the rule {shown(pattern)} for weights is {shown(rule)}; {_FORM}")
            try:
                re.sub(pattern, _text(rule), "")  # which reads the text too
            except (re.error, IndexError) as error:
                raise SettingError(
                    f"the rule {pattern!r} for weights, with {shown(rule)}, is none that re.sub of Python takes "
                    f"({error}); correct the pattern, or the numbers of its groups such as \\1"
                ) from error

    def __fspath__(self) -> str:
        return self.path


def _text(rule: str | WeightRule | None) -> str:
    return rule.to if isinstance(rule, WeightRule) else rule or ""


@dataclasses.dataclass(frozen=True)
class RuledName:
    """The result of rules for a saved name.

    Attributes:
      name: the new name; None leaves the value out.
      transpose: the order of the axes; () for the order there.
      reshape: whether the value takes the shape of its variable.
    """

    name: str | None
    transpose: tuple[int, ...] = ()
    reshape: bool = False


def apply(rules: Mapping[str, str | WeightRule | None], names: Iterable[str], path: str) -> dict[str, RuledName]:
    """Returns what the rules make of the names that one of them matches, by saved name.

    Raises:
      WarmStartError: if a rule matches nothing or takes too long, or two transpose one value in ways that do not fit.
    """
    found: dict[str, RuledName] = {}
    idle, names, saved, pattern = dict.fromkeys(rules), list(names), "", ""
    compiled = {pattern: re.compile(pattern) for pattern in rules}
    try:
        with _ended_after(_LEAST_SECONDS + _SECONDS_OF_A_MATCH * len(rules) * len(names)):
            for saved in names:
                now = RuledName(saved)
                touched = False
                for pattern, rule in rules.items():
                    if now.name is None or not compiled[pattern].search(now.name):
                        continue
                    touched = True
                    idle.pop(pattern, None)
                    now = _after(now, compiled[pattern], rule, saved, path)
                if touched:
                    found[saved] = now
    except TimeoutError:
        raise WarmStartError(
            f"the rule {pattern!r:.300} for weights takes too long for {saved!r:.300} of {path}; write its pattern "
            "without a repetition inside a repetition, such as (a+)+"
        ) from None
    if idle:
        raise WarmStartError(
            f"no name in {path}, as the rules before have made it, matches {join_names([*map(repr, idle)], most=4)}; "
            f"its names are {join_names(names, most=6)} (python -m looplib weights lists all); correct the rule"
        )
    return found


@contextlib.contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """Ends a `with` block of matches by a `TimeoutError`; in the main thread alone, where Python has signals."""

    def end(*_: object) -> None:
        raise TimeoutError

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler, (left, _) = signal.signal(signal.SIGALRM, end), signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)
        signal.signal(signal.SIGALRM, handler)


def _after(now: RuledName, pattern: re.Pattern[str], rule: str | WeightRule | None, saved: str, path: str) -> RuledName:
    if rule is None:
        return RuledName(None)
    name = pattern.sub(_text(rule), now.name or "")
    if isinstance(rule, str):
        return dataclasses.replace(now, name=name)
    axes = rule.transpose or now.transpose
    if rule.transpose and now.transpose:
        if len(rule.transpose) != len(now.transpose):
            raise WarmStartError(
                f"two rules transpose {saved} of {path}, by {list(now.transpose)} and {list(rule.transpose)}; give it "
                "one order of axes"
            )
        axes = tuple(now.transpose[axis] for axis in rule.transpose)
    return RuledName(name, axes, rule.reshape or now.reshape)


def given(start: str | os.PathLike[str]) -> WarmStart:
    """Returns a warm start of a path, or that which a file of rules (.yaml) holds.

    Raises:
      UsageError: if the file cannot be read, or holds something else.
    """
    if isinstance(start, WarmStart):
        return start
    if not isinstance(start, (str, os.PathLike)):
        raise SettingError(
            f"warm_start got {shown(start)}; expected the path of a file of weights, a checkpoint or a run, or a "
            "looplib.WarmStart"
        )
    path = os.fspath(start)
    if not isinstance(path, str) or not path.endswith(_ENDINGS):
        return WarmStart(path)
    local = local_path(path, "warm_start")
    try:
        from looplib.config.field_types import load  # here, as it needs packages that take time

        held = load(files.read_text(os.path.realpath(local), _MOST_BYTES))
    except (OSError, ValueError) as error:
        raise SettingError(f"the file of rules {path} cannot be read: {with_cure(error)}") from error
    if not isinstance(held, dict) or not held.keys() <= {"path", "rules"} or not isinstance(held.get("path"), str):
        raise SettingError(
            f"the file {path} holds {shown(held)}; expected path: with the file of weights, and rules: with patterns"
        )
    rules = held.get("rules") or {}
    if not isinstance(rules, dict):
        raise SettingError(f"rules: in {path} holds {shown(rules)}; expected pattern: new name")
    of = held["path"] if files.is_remote(held["path"]) else os.path.expanduser(held["path"])
    of = of if files.is_remote(of) or of.startswith("file:") else os.path.join(os.path.dirname(local), of)
    return WarmStart(of, {pattern: _rule(pattern, rule, path) for pattern, rule in rules.items()})


def _rule(pattern: Any, rule: Any, path: str) -> Any:
    """Returns a rule of a YAML file; `WarmStart` checks what is no mapping."""
    if not isinstance(rule, dict):
        return rule
    if not rule.keys() <= {"to", "transpose", "reshape"} or "to" not in rule:
        raise SettingError(f"the rule {shown(pattern)} in {path} is {shown(rule)}; {_FORM}")
    return WeightRule(rule["to"], rule.get("transpose", ()), rule.get("reshape", False))

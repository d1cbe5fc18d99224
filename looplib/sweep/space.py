"""The space that a sweep searches: flags of the command that have several values.

- `--config.lr=0.1,0.01`: choices. A comma within brackets or quotes, or after a backslash, separates nothing.
- `--config.layers=1..4`: whole numbers; `16..64:16` are 16, 32, 48 and 64.
- `--config.rate=0.1..0.5`: any number between; `0.1..0.5:0.1` in steps.
- `--config.lr=1e-4..1e-1:log`: any number between, each order of magnitude as likely.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Sequence

import numpy as np
import optuna
from optuna import Trial
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from looplib.errors import SweepError

Value = str | int | float

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(?::(\w.*))?")
_WHOLE = re.compile(r"[-+]?\d+")
_LARGEST, _LONGEST, _MOST_STEPS = 2.0**53, 100, 1e12  # numbers that databases and floats hold; their characters
_DIGITS = 12  # of steps, whose sums are not exact
_LARGEST_GRID = 10_000
_FLAG = re.compile(r"(--?[\w.]+)=(.*)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A flag that has several values.

    Attributes:
      flag: with its dashes.
      values: Optuna's form of them.
    """

    flag: str
    values: BaseDistribution

    def suggest(self, trial: Trial) -> None:
        """Gives a trial a value, unless it has one."""
        values = self.values
        if isinstance(values, CategoricalDistribution):
            trial.suggest_categorical(self.flag, values.choices)
        elif isinstance(values, IntDistribution):
            trial.suggest_int(self.flag, values.low, values.high, step=values.step, log=values.log)
        elif isinstance(values, FloatDistribution):
            trial.suggest_float(self.flag, values.low, values.high, step=values.step, log=values.log)

    @property
    def count(self) -> float:
        """How many values it has; infinity for a range of any numbers."""
        values = self.values
        if isinstance(values, CategoricalDistribution):
            return len(values.choices)
        if isinstance(values, FloatDistribution) and not values.step:
            return math.inf
        return round((values.high - values.low) / values.step) + 1

    def grid(self) -> list[Value]:
        """Returns all values.

        Raises:
          UsageError: if there is no end of them.
        """
        values = self.values
        if isinstance(values, CategoricalDistribution):
            return list(values.choices)
        if isinstance(values, IntDistribution) and not values.log:
            return list(range(values.low, values.high + 1, values.step))
        if isinstance(values, FloatDistribution) and values.step:
            return [round(values.low + number * values.step, _DIGITS) for number in range(int(self.count))]
        raise SweepError(
            f"{self.flag} is a range without steps, and a grid needs single values; list them (a,b,c), give a step "
            "(LOW..HIGH:STEP), or use --search=random or --search=tpe"
        )


def points(search: str, parameters: Sequence[Parameter]) -> Iterator[dict[str, Value]]:
    """Yields the points of a search in the order in which they are tried, each once.

    Args:
      search: "grid", "random" or "tpe", which has no points before there are results.
      parameters: what has several values.

    Raises:
      UsageError: at once, for a grid that has no end or is too large.
    """
    if search != "grid":
        return _random(parameters) if search == "random" else iter(())
    lists = [one.grid() for one in parameters]
    if (size := math.prod(map(len, lists))) > _LARGEST_GRID:
        raise SweepError(
            f"the grid has {size:,} points; expected at most {_LARGEST_GRID:,}; list fewer values, or use "
            "--search=random"
        )
    grid = list(itertools.product(*lists))
    flags = [one.flag for one in parameters]
    return (dict(zip(flags, grid[place])) for place in np.random.default_rng(0).permutation(size))


def _random(parameters: Sequence[Parameter]) -> Iterator[dict[str, Value]]:
    sampler, study, seen = optuna.samplers.RandomSampler(0), optuna.create_study(), set()
    trial = optuna.trial.create_trial(value=0.0)  # a sampler asks for one, and draws at random whatever it is
    while True:
        point = {one.flag: sampler.sample_independent(study, trial, one.flag, one.values) for one in parameters}
        if tuple(point.values()) not in seen:
            seen.add(tuple(point.values()))
            yield point


def parse(command: Sequence[str]) -> tuple[list[str], list[Parameter]]:
    """Returns the arguments of a command that have one value, and the parameters.

    Args:
      command: a looplib binary and its flags.

    Raises:
      UsageError: for a range or a list that has no sense, or a flag with several values that comes twice.
    """
    fixed: list[str] = []
    parameters: list[Parameter] = []
    for argument in command:
        match = _FLAG.fullmatch(argument)
        values = _values(*match.groups()) if match else None
        if values is not None:
            parameters.append(Parameter(match[1], values))
        else:
            fixed.append(argument.replace("\\,", ",") if match else argument)
    flags = [match[1] for argument in command if (match := _FLAG.fullmatch(argument))]
    for parameter in parameters:
        if flags.count(parameter.flag) > 1:
            raise SweepError(f"{parameter.flag} comes twice in the command; give it all values at once")
    return fixed, parameters


def _values(flag: str, text: str) -> BaseDistribution | None:
    """Returns the values of a flag, None if there is one."""
    if match := _RANGE.fullmatch(text):
        return _range(flag, *match.groups())
    choices = split(text)
    if len(choices) == 1:
        return None
    if len(set(choices)) < len(choices):
        raise SweepError(f"{flag}={text} lists a value twice; list each once")
    return CategoricalDistribution(choices)


def _range(flag: str, low: str, high: str, more: str | None) -> BaseDistribution:
    log = more == "log"
    step = None if log or more is None else more
    numbers = [low, high] + ([step] if step else [])
    if step and not re.fullmatch(_NUMBER, step):
        raise SweepError(
            f"{flag}={low}..{high}:{more} is no range; expected LOW..HIGH, LOW..HIGH:STEP or LOW..HIGH:log"
        )
    for number in numbers:
        if len(number) > _LONGEST or abs(float(number)) > _LARGEST:
            raise SweepError(
                f"{flag} has the number {number[:30]}; expected at most {_LARGEST:g}, in {_LONGEST} characters"
            )
    kind = int if all(_WHOLE.fullmatch(number) for number in numbers) else float
    first, last = kind(low), kind(high)
    if (
        not first < last
        or (step and not (last - first) / _MOST_STEPS < kind(step) <= last - first)
        or (log and first <= 0)
    ):
        bounds = "0 < LOW < HIGH" if log else "LOW < HIGH, and a step above 0 that fits between them"
        raise SweepError(f"{flag}={low}..{high}{f':{more}' if more else ''} has no values; expected {bounds}")
    if step:  # to the last value of the range
        last = round(first + int((last - first) / kind(step) + 1e-9) * kind(step), _DIGITS)
    if kind is int:
        return IntDistribution(first, last, log=log, step=int(step) if step else 1)
    return FloatDistribution(first, last, log=log, step=float(step) if step else None)


def split(text: str) -> list[str]:
    """Returns the parts of a text between its commas, but those within brackets or quotes, or after a backslash."""
    parts, depth, quote, escaped = [""], 0, "", False
    for character in text:
        if escaped and character != ",":
            parts[-1] += "\\"
        if not escaped and character == "\\":
            escaped = True
            continue
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        else:
            depth += (character in "([{") - (character in ")]}")
        if character == "," and not (escaped or quote or depth > 0):
            parts.append("")
        else:
            parts[-1] += character
        escaped = False
    parts[-1] += "\\" * escaped
    return parts

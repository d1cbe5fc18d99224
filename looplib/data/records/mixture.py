"""Mixtures: several sources in exact shares, each with epochs and an order of its own."""

import functools
import heapq
import math
import os
from collections.abc import Mapping, Sequence
from fractions import Fraction
from numbers import Real

import numpy as np
import tensorflow as tf

from looplib.base.messages import join_names, whole_number
from looplib.data.order import Locate, OrderKey
from looplib.data.records.plans import All, RecordPlan
from looplib.data.records.sources import Chain, Source, opened
from looplib.errors import OrderError

_MOST_EXAMPLES = 1 << 48  # of a source, so that their sum is an int64
_MOST_PARTS = 1 << 16  # of an example that a share is a whole number of


class Mixture(RecordPlan):
    """Examples of several sources in exact shares, for a training; for an evaluation, each example of each once.

    After any number of examples since the weights last changed, each source has given its share of them, give or take
    less than one. Each source has epochs and an order of its own: a small one with a large weight starts its next epoch
    while others are in their first.

        sources = {"web": looplib.Kept(kinds == "web"), "code": looplib.Kept(kinds == "code")}
        mixture = looplib.Mixture(sources, {"web": 3, "code": 1})
        context.indices(mixture).map(lambda ids, sources: tf.gather(x, ids))

    Examples are pairs: what the source's plan gives, such as ids, int64 `[b]`, or records; and the source, int64
    `[b]`, a number in `names`.

    Args:
      sources: by the name of each source, the number of its examples, whose ids count from 0; or its records, as
        `looplib.open_records` returns them, or the names of their files, for `context.records(mixture)`; or a plan,
        such as `Kept` or `Packed`.
      weights: of each source, by its name; shares are in proportion. A share is exact if all have a common denominator
        of up to 65,536, as 0.7, 0.2 and 0.1 do; else it is rounded to that fraction.
      schedule: weights from a step of the run on, by this step, for weights that change during the training; those of
        `weights` hold before the first.

    Attributes:
      names: of the sources, in the order of their numbers.

    Raises:
      UsageError: for weights that are not of these sources or no shares, and sources whose examples differ in kind.
    """

    comes_in_epochs = False

    def __init__(
        self,
        sources: Mapping[str, int | str | os.PathLike[str] | Source | RecordPlan],
        weights: Mapping[str, float],
        schedule: Mapping[int, Mapping[str, float]] | None = None,
    ) -> None:
        later = schedule.values() if isinstance(schedule, Mapping) else [schedule or {}]
        if not all(isinstance(one, Mapping) for one in (sources, weights, *later)):
            raise OrderError(
                "looplib.Mixture expected a dict of sources by name, a dict of weights by the same names, and maybe a "
                "dict of such weights by step; one of these is none"
            )
        self.names = tuple(sources)
        self._plans = [_plan(name, source) for name, source in sources.items()]
        if any(plan.chosen_by_batch for plan in self._plans):
            raise OrderError("a source of a mixture gives whole batches; expected one of single examples, not Buckets")
        self.size = sum(plan.size for plan in self._plans)
        self.width = max([plan.width for plan in self._plans], default=1)
        records = [plan.source for plan in self._plans if plan.source is not None]
        if records and (len(records) < len(self._plans) or any(isinstance(plan, Mixture) for plan in self._plans)):
            raise OrderError(
                "some sources of a mixture of records are no records, or mixtures themselves; name all records as "
                "sources of one mixture"
            )
        self.source = Chain(records, self.names) if records else None
        self.kept = [kept for plan in self._plans for kept in plan.kept]
        phases = {0: weights, **(schedule or {})}
        if schedule and 0 in schedule:
            raise OrderError("the schedule of a mixture has step 0; pass the first weights as `weights`")
        self._steps = sorted(whole_number("a step of a mixture's schedule", step, least=0) for step in phases)
        self._parts = [_parts(self.names, phases[step]) for step in self._steps]

    def endless(self, key: OrderKey) -> Locate:
        """See `Plan`."""
        place = _Places([key.batches.before(step) for step in self._steps], self._parts)
        return self._locate([plan.endless(key.part(i)) for i, plan in enumerate(self._plans)], place)

    def once(self) -> Locate:
        """See `Plan`; the sources come one after the other."""
        first = tf.constant(np.cumsum([0, *(plan.size for plan in self._plans)]), tf.int64)

        def place(positions: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            source = tf.searchsorted(first, positions, "right", tf.int64) - 1
            return source, positions - tf.gather(first, source)

        return self._locate([plan.once() for plan in self._plans], place)

    def to_read(self, found: tuple) -> tuple[tf.Tensor, ...]:
        """See `Plan`; the source is known besides."""
        inner, sources = found
        numbers, *others = self._plans[0].to_read(inner)
        return tf.gather(tf.constant(self.source.firsts, tf.int64), sources) + numbers, sources, *others

    def _locate(self, locates: Sequence[Locate], place: Locate) -> Locate:
        def locate(positions: tf.Tensor) -> tuple:
            sources, places = place(positions)
            of_each = [tf.cast(tf.where(sources == i)[:, 0], tf.int32) for i in range(len(locates))]
            found = [locate(tf.gather(places, own)) for locate, own in zip(locates, of_each)]
            try:
                return tf.nest.map_structure(lambda *parts: tf.dynamic_stitch(of_each, parts), *found), sources
            except (TypeError, ValueError) as error:
                raise OrderError(
                    f"the sources {join_names(self.names)} of a mixture have examples of different kinds; expected "
                    f"one structure and shape ({error})"
                ) from error

        return locate


def _plan(name: str, source: int | str | os.PathLike[str] | Source | RecordPlan) -> RecordPlan:
    if isinstance(source, RecordPlan):
        return source
    records = opened(source) if isinstance(source, (str, os.PathLike, Source)) else None
    size = source if records is None else len(records)
    return All(whole_number(f"source {name!r} of a mixture", size, most=_MOST_EXAMPLES), records)


class _Places:
    """Divides positions of a run among the sources.

    Args:
      starts: the position at which each phase starts; the first is 0.
      parts: of each phase, the parts of each source in a period of as many examples as there are parts.
    """

    def __init__(self, starts: Sequence[int], parts: Sequence[tuple[int, ...]]) -> None:
        patterns = [_pattern(one) for one in parts]
        given = np.zeros([len(starts), len(parts[0])], np.int64)  # by each source before each phase
        for number in range(1, len(starts)):
            rounds, rest = divmod(starts[number] - starts[number - 1], sum(parts[number - 1]))
            partial = np.bincount(patterns[number - 1][0][:rest], minlength=len(parts[0]))
            given[number] = given[number - 1] + rounds * np.array(parts[number - 1]) + partial
        periods = [sum(one) for one in parts]
        self._starts, self._periods, self._parts, self._given = map(_int64, (starts, periods, parts, given))
        self._first = _int64(np.cumsum([0, *periods[:-1]]))
        self._sources, self._before = (_int64(np.concatenate(columns)) for columns in zip(*patterns))

    def __call__(self, positions: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the source at each position, and the number of its examples before that; each int64 `[b]`."""
        phases = tf.searchsorted(self._starts, positions, "right", tf.int64) - 1
        since, periods = positions - tf.gather(self._starts, phases), tf.gather(self._periods, phases)
        rows = tf.gather(self._first, phases) + since % periods
        sources = tf.gather(self._sources, rows)
        where = tf.stack([phases, sources], axis=1)
        whole = since // periods * tf.gather_nd(self._parts, where)
        return sources, tf.gather_nd(self._given, where) + whole + tf.gather(self._before, rows)


def _int64(values: Sequence) -> tf.Tensor:
    return tf.constant(np.asarray(values), tf.int64)


def _parts(names: Sequence[str], weights: Mapping[str, float]) -> tuple[int, ...]:
    """Returns the shares as whole numbers of parts, with their common divisor taken out."""
    if set(weights) != set(names) or not names:
        raise OrderError(
            f"the weights of a mixture are of {join_names(list(weights)) or 'nothing'}; expected one for each source: "
            f"{join_names(names) or 'there is none'}"
        )
    numbers = [weights[name] for name in names]
    if not all(isinstance(one, Real) and math.isfinite(one) and one >= 0 for one in numbers) or not any(numbers):
        raise OrderError(f"the weights of a mixture are {dict(weights)}; expected numbers of at least 0, not all 0")
    exact = [Fraction(str(float(number))) for number in numbers]  # 0.1 as it is written, not its nearest float
    shares = [number / sum(exact) for number in exact]
    parts = math.lcm(*(share.denominator for share in shares))
    if parts > _MOST_PARTS:
        # What is rounded down goes to those that lose most by it.
        parts = _MOST_PARTS
        lost = sorted(range(len(shares)), key=lambda i: -(shares[i] * parts % 1))
        extra = set(lost[: parts - sum(int(share * parts) for share in shares)])
        found = [int(share * parts) + (i in extra) for i, share in enumerate(shares)]
    else:
        found = [int(share * parts) for share in shares]
    gone = [name for name, share, part in zip(names, shares, found) if share and not part]
    if gone:
        raise OrderError(
            f"the weight of {join_names(gone)} is less than 1/{_MOST_PARTS} of a mixture; use a larger weight, or 0"
        )
    divisor = math.gcd(*found)
    return tuple(part // divisor for part in found)


@functools.lru_cache(maxsize=16)
def _pattern(parts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Returns one period of a mixture: the source at each position, and how many of its examples come before there.

    Example n of a source of share s may stand from position floor(n / s) on, and has to stand before ceil((n + 1) / s).
    The earliest deadline first meets all deadlines (Baruah et al., 1996, Proportionate progress), so that each prefix
    has the share of each source, give or take less than one.
    """
    period = sum(parts)
    jobs = sorted(
        (n * period // part, -(-(n + 1) * period // part), source, n)
        for source, part in enumerate(parts)
        for n in range(part)
    )
    waiting, found, coming = [], np.empty([2, period], np.int64), 0
    for position in range(period):
        while coming < period and jobs[coming][0] <= position:
            heapq.heappush(waiting, jobs[coming][1:])
            coming += 1
        found[:, position] = heapq.heappop(waiting)[1:]
    return found[0], found[1]

"""Settings of every type: what `config.yaml` holds reads back equal, and what no file can hold is refused."""

import dataclasses
import datetime
import enum
import pathlib
import typing
from collections.abc import Callable, Mapping, Sequence

import ml_collections
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from looplib import UsageError
from looplib.binary import config
from looplib.config import field_types


class Kind(enum.Enum):
    ADAM = "adam"
    SGD = "sgd"


class Level(enum.IntEnum):
    NO = 0
    ON = 1


class Word(str, enum.Enum):
    YES = "yes"
    NUMBER = "1"


class Pair(typing.NamedTuple):
    count: int
    name: str = "pair"


# Each type with its values. Those of the first table have no NaN, so that they can be keys and members of sets.
KEYS = {
    int: st.integers(),
    bool: st.booleans(),
    str: st.text(st.characters(codec="utf-8"))
    | st.sampled_from(["1e-4", "no", "null", "1", "2020-01-01", "~", "a: b"]),
    Kind: st.sampled_from(Kind),
    Level: st.sampled_from(Level),
    Word: st.sampled_from(Word),
    typing.NewType("Count", int): st.integers(),
    typing.Literal["a", 1, True]: st.sampled_from(["a", 1, True]),
    pathlib.Path: st.text("ab/. 1", min_size=1).map(pathlib.Path),
    datetime.date: st.dates(),
    datetime.time: st.times().map(lambda time: time.replace(fold=0)),  # which is equal to the other
}
WHOLE = {
    **KEYS,
    float: st.floats(),
    bytes: st.binary(),
    datetime.datetime: st.datetimes(timezones=st.none() | st.just(datetime.timezone.utc)).map(
        lambda when: when.replace(fold=0)
    ),
    datetime.timedelta: st.timedeltas(datetime.timedelta(-10_000), datetime.timedelta(10_000)),
    np.float32: st.floats(width=32).map(np.float32),
    np.int16: st.integers(-300, 300).map(np.int16),
    np.bool_: st.booleans().map(np.bool_),
    int | str | None: st.none() | st.integers() | st.sampled_from(["a", "1", "null"]),
    float | bool | int: st.floats() | st.booleans() | st.integers(),
    str | bytes: st.binary() | st.sampled_from(["a", "1", "null"]),
    Pair: st.builds(Pair, st.integers(), st.text("a1 :")),
    typing.Any: st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text("a1-e.: "),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab1", min_size=1), inner, max_size=3),
        max_leaves=5,
    ),
}
leaves = st.sampled_from([*WHOLE.items()])
keys = st.sampled_from([*KEYS.items()])


def composed(inner):
    """Types made of others, with their values."""
    return st.one_of(
        inner.map(lambda one: (list[one[0]], st.lists(one[1], max_size=3))),
        inner.map(lambda one: (tuple[one[0], ...], st.lists(one[1], max_size=3).map(tuple))),
        inner.map(lambda one: (Sequence[one[0]], st.lists(one[1], max_size=3).map(tuple))),
        inner.map(lambda one: (one[0] | None if one[0] is not typing.Any else one[0], st.none() | one[1])),
        keys.map(lambda one: (set[one[0]], st.sets(one[1], max_size=3))),
        keys.map(lambda one: (frozenset[one[0]], st.frozensets(one[1], max_size=3))),
        st.tuples(inner, inner).map(lambda two: (tuple[two[0][0], two[1][0]], st.tuples(two[0][1], two[1][1]))),
        st.tuples(keys, inner).map(lambda two: (dict[two[0][0], two[1][0]], st.dictionaries(two[0][1], two[1][1], max_size=3))),
        keys.map(lambda one: (Mapping[one[0], str], st.dictionaries(one[1], st.text("a1: "), max_size=3))),
        st.tuples(st.lists(inner, min_size=1, max_size=3), st.booleans()).map(made),
    )  # fmt: skip


def made(fields):
    """A dataclass, frozen or not, with these fields, and its instances."""
    fields, frozen = fields
    kind = dataclasses.make_dataclass("Made", [(f"f{n}", hint) for n, (hint, _) in enumerate(fields)], frozen=frozen)
    return kind, st.builds(kind, *(values for _, values in fields))


def equal(one, other):
    return one == other or repr(field_types.plain(one)) == repr(field_types.plain(other))  # NaN is not equal to itself


TYPES = st.recursive(leaves, composed, max_leaves=5)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(TYPES, min_size=1, max_size=3), st.booleans(), st.data())
def test_what_is_written_of_a_configuration_reads_back_equal_over_any_other(fields, frozen, data):
    kind, instances = made((fields, frozen))
    wanted, other = data.draw(instances), data.draw(instances)
    config.check(wanted, kind, "config")
    tree = config.given(wanted)
    assert equal(field_types.typed(tree, kind, str, ""), wanted)
    again = config.given(other)
    config.merge(again, kind, field_types.load(config.text_of(wanted, tree)), str)
    assert equal(field_types.typed(again, kind, str, ""), wanted)


@dataclasses.dataclass(frozen=True)
class Part:
    width: int = 16
    hidden: int = 0  # 4 * width, unless given
    kind: Kind = Kind.ADAM

    def __post_init__(self):
        if self.width % 4:
            raise ValueError(f"width {self.width} is no multiple of 4")
        if not self.hidden:
            object.__setattr__(self, "hidden", 4 * self.width)


@dataclasses.dataclass
class Run:
    part: Part = Part()
    name: str = ""  # of the part, unless given
    rates: dict[str, float] = dataclasses.field(default_factory=lambda: {"encoder": 1e-4, "head": 0.1})
    parts: dict[str, Part] = dataclasses.field(default_factory=dict)
    stages: list[Part] = dataclasses.field(default_factory=list)
    total: int = dataclasses.field(init=False)

    def __post_init__(self):
        self.name = self.name or f"width-{self.part.width}"
        self.total = self.part.hidden + sum(stage.hidden for stage in self.stages)


def read(start, *texts):
    """The configuration that files make of another, as launch.run does, and its YAML."""
    config.check(start, type(start), "config")
    tree = config.given(start)
    for number, text in enumerate(texts):
        config.merge(tree, type(start), field_types.load(text), lambda where: f"{where} in {number}.yaml")
    made = field_types.typed(tree, type(start), str, "")
    return made, config.text_of(made, tree)


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize(
    "start, texts, hidden, name",
    [
        (Run(), ["part: {width: 32}"], 128, "width-32"),
        (Run(), ["part: {width: 32}", "part: {width: 8}"], 32, "width-8"),
        (Run(), ["part: {width: 32, hidden: 7}\nname: own"], 7, "own"),
        (Run(Part(8, hidden=5), name="own"), ["part: {width: 32}"], 5, "own"),
        (Run(Part(8)), ["name: own"], 32, "own"),
    ],
)
def test_what_post_init_makes_follows_the_final_values_also_over_the_file_that_is_kept(start, texts, hidden, name):
    made, text = read(start, *texts)
    assert (made.part.hidden, made.name, made.total) == (hidden, name, hidden)
    assert read(Run(), text)[0] == made
    assert read(Run(), text, "part: {width: 64}")[0].part.hidden == (256 if hidden == 4 * made.part.width else hidden)


def test_post_init_runs_once_where_nothing_is_made_by_it():
    calls = []

    @dataclasses.dataclass
    class Checked:
        width: int = 4

        def __post_init__(self):
            calls.append(self.width)

    read(Checked(), "width: 5")
    assert calls == [4, 5]  # of the program, and of the final values


REFUSED = {
    "part: {width: 30}": "Part refuses its settings: width 30 is no multiple of 4",
    "part: {kind: LION}": "part.kind in 0.yaml is 'LION'; expected one of ADAM, SGD",
    "rates: {head: true}": "rates.head in 0.yaml is True; expected float",
    "rates: {no: 1}": "rates.False in 0.yaml is False; expected str",
    "parts: {a: {widht: 4}}": "parts.a.widht in 0.yaml is not a setting of Part; did you mean width?",
    "parts: {a: {width: 30}}": "parts.a in 0.yaml: Part refuses its settings: width 30",
    "stages: [{}, {kind: 3}]": "stages[1].kind in 0.yaml is 3; expected one of ADAM, SGD",
    "stages: [{width: 4}, {hiden: 3}]": "stages[1].hiden in 0.yaml is not a setting of Part; did you mean hidden?",
    "stages: abc": "stages in 0.yaml is 'abc'; expected list[Part]",
    "total: 3": "total in 0.yaml is not a setting of Run",
}


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("text", REFUSED)
def test_a_wrong_value_in_a_dict_a_list_or_a_part_is_a_sentence(text):
    with pytest.raises(UsageError) as error:
        read(Run(), text)
    assert REFUSED[text] in str(error.value)


def test_a_dict_in_a_file_replaces_the_default_and_says_what_it_leaves_out(caplog):
    assert read(Run(), "rates: {encoder: 1e-3}")[0].rates == {"encoder": 0.001}
    assert "rates in 0.yaml replaces the whole dict, and leaves out head" in caplog.text


@dataclasses.dataclass
class Twice:
    rate: float = 1.0

    def __post_init__(self):
        self.rate *= 2


@dataclasses.dataclass
class Thrice(Twice):
    times: int = 3


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize(
    "hint, value, sentence",
    [
        (Callable, len, "config.field is of the type Callable, and no file can hold a Callable"),
        (list[np.ndarray], [], "and no file can hold a ndarray"),
        (Callable | None, None, "and no file can hold a Callable"),
        (float, None, "config.field is None; expected a value of its type, float"),
        (typing.Any, (1, 2), r"config.field is \(1, 2\); expected a value of its type, Any"),
        (float, True, "config.field is True"),
        (Twice | Part | Thrice, Twice(), "is a Twice, whose fields a Thrice has too"),
        (Twice, Twice(3.0), "is not what Holder makes of its own values"),
    ],
)
def test_what_no_file_can_hold_is_refused_at_the_start(hint, value, sentence):
    kind = dataclasses.make_dataclass("Holder", [("field", hint)])
    with pytest.raises(UsageError, match=sentence):
        read(kind(value))


def test_a_config_dict_in_a_field_keeps_its_types_and_references():
    nested = ml_collections.ConfigDict({"width": 4, "sub": {"rate": 0.1}, "sizes": (1, 2)})
    nested.hidden = nested.get_ref("width") * 4
    kind = dataclasses.make_dataclass("Holder", [("model", ml_collections.ConfigDict)])
    made, text = read(kind(nested), "model: {width: 8, sub: {rate: 1e-3}, sizes: [3]}")
    assert made.model.to_dict() == {"width": 8, "sub": {"rate": 0.001}, "sizes": (3,), "hidden": 32}
    assert read(kind(nested), text)[0] == made and nested.width == 4
    for wrong, sentence in (("{widht: 1}", "model.widht in 0.yaml is not a setting"), ("{width: a}", "expected int")):
        with pytest.raises(UsageError, match=sentence):
            read(kind(nested), f"model: {wrong}")

"""Foreign JSON becomes typed values: all of it, or what fits, within bounds."""

import dataclasses
import json
from typing import Annotated, Any

import pytest

from looplib.base.decoding import SHOWN, MisfitError, decode, parse_json


@dataclasses.dataclass
class Inner:
    at: int
    share: Annotated[float, 1e12] = 0.0


@dataclasses.dataclass
class Outer:
    name: Annotated[str, 5] = ""
    step: int | None = None
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    inner: list[Inner] = dataclasses.field(default_factory=list)
    pair: tuple[Any, Any] | None = None
    unknown: dict[str, Any] = dataclasses.field(default_factory=dict)


WHOLE = {"name": "a", "step": 3, "seconds": {"x": 1, "y": 0.5}, "inner": [{"at": 1, "share": 2.5}], "pair": [1, "b"]}
MISFITS = [
    ("step", True, None), ("step", 1.0, None), ("step", 2**53 + 1, None), ("step", "3", None), ("name", 3, ""),
    ("seconds", {"x": True, "y": 10**400, "z": float("nan"), "w": 2}, {"w": 2}), ("seconds", [1], {}),
    ("inner", [{"share": 1.0}, {"at": 2, "share": 1e13}, {"at": "2"}, 5], [Inner(2)]), ("pair", [1], None),
    ("name", "a" * 9, "aaaa…"), ("inner", [{"at": 1}] * 3000, [Inner(1)] * 2000),
    ("seconds", {"n" * 300: 1.0}, {"n" * 199 + "…": 1.0}),
]  # fmt: skip


def test_what_fits_is_read_as_it_was_written():
    expected = Outer("a", 3, {"x": 1, "y": 0.5}, [Inner(1, 2.5)], (1, "b"))
    assert decode(Outer, WHOLE, SHOWN, strict=False) == expected
    assert decode(list[Inner], WHOLE["inner"], strict=True) == expected.inner
    assert decode(list[int], [2**70], strict=True) == [2**70] and decode(list[int], [2**70], strict=False) == []
    assert decode(Outer, {**WHOLE, "newer": [1]}, strict=False).unknown == {"newer": [1]}


@pytest.mark.parametrize("field, value, left", MISFITS)
def test_what_misfits_is_left_out_and_the_rest_stays(field, value, left):
    found = decode(Outer, {**WHOLE, field: value}, SHOWN, strict=False)
    assert getattr(found, field) == left
    assert dataclasses.replace(found, **{field: 0}) == dataclasses.replace(
        decode(Outer, WHOLE, strict=False), **{field: 0}
    )


@pytest.mark.parametrize("value", [None, 5, [], {}, {"at": 1}, {"at": "1", "share": 1.0}, {"at": 1, "share": None}])
def test_a_strict_decoder_takes_all_or_nothing(value):
    with pytest.raises(MisfitError, match="in place of"):
        decode(Inner, value, strict=True)


@pytest.mark.parametrize("value", [None, 5, "x", [1]])
def test_another_kind_as_a_whole_is_a_misfit(value):
    with pytest.raises(MisfitError):
        decode(Outer, value, SHOWN, strict=False)


def test_json_that_is_nested_too_deep_is_refused():
    assert parse_json(json.dumps(WHOLE)) == WHOLE
    for text in ("[" * 101 + "]" * 101, "[" * 10**6, '{"a":' * 5000):
        with pytest.raises(ValueError):
            parse_json(text)
